"""Decides how sums, means and maxima over tokens are taken: in float64, by `where` and never by multiplying with 0, and
within an episode before across episodes.

Tokens lie flat, in any order, each with the number of its episode: where rows were cut and how they were packed can't
change a result. Pure functions over tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# A log-ratio beyond it is clamped, so that exp stays finite in any type: e^20 is far beyond every cap in use.
CLAMP = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """k tokens of `episodes` episodes. episode int64 [k]: the episode of each; used bool [k]: what takes part. What the
    others hold may be anything, NaN too: it reaches no result."""

    episode: torch.Tensor
    used: torch.Tensor
    episodes: int

    def only(self, keep: torch.Tensor) -> Tokens:
        """Those of them for which keep bool [k] is True."""
        return replace(self, used=self.used & keep)

    def counts(self) -> torch.Tensor:
        """Used tokens of each episode, float64 [episodes]."""
        return self.sums(torch.ones_like(self.episode, dtype=torch.float64))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[k] -> float64 [episodes]; 0 where no token is used."""
        own = torch.where(self.used, values.double(), torch.zeros((), dtype=torch.float64, device=values.device))
        return torch.zeros(self.episodes, dtype=torch.float64, device=own.device).index_add(0, self.episode, own)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """[k] -> float64 [episodes]; 0 where no token is used."""
        return self.sums(values) / self.counts().clamp(min=1)

    def maxima(self, values: torch.Tensor) -> torch.Tensor:
        """[k] -> float64 [episodes]; 0 where no token is used. NaN where one of the used tokens is NaN."""
        none = torch.full((self.episodes,), -torch.inf, dtype=torch.float64, device=values.device)
        own = torch.where(self.used, values.double(), none.new_tensor(-torch.inf))
        highest = none.scatter_reduce(0, self.episode, own, "amax")
        return torch.where(self.counts() > 0, highest, torch.zeros_like(highest))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A value for each episode, at each of its tokens: [episodes] -> [k]."""
        return values[self.episode]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Over all used tokens alike: [k] -> float64 []; 0 where there is none."""
        own = values[self.used].double()
        return own.mean() if own.numel() else own.new_zeros(())

    def present(self) -> torch.Tensor:
        """bool [episodes]: which have a used token."""
        return self.counts() > 0

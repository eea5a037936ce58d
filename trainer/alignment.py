"""Decides whether an engine's log-probabilities mean what the trainer takes them for: a wrong meaning, or noise.

Both sides hold the same weights, so whatever they differ by is numerics, or one of them computes something else:
another temperature, a filtered distribution, another position. Noise is small, or at least explained by nothing; a
wrong meaning explains the difference away. So the trainer computes what each meaning would have given for the very
tokens, and the one that leaves least of the difference is named, where it leaves far less than the stated meaning does.
What remains after correction is told beside it. Pure functions; second moments are of |difference| winsorised at 1, in
nats squared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.events import Alignment

from .drift import WINSOR, clustered_error

STATED = "as stated"
# A meaning is named only where it leaves so small a share of the difference: a right one leaves rounding alone, and
# fitted parameters take a few percent off noise.
EXPLAINS = 0.25
ALIKE = 1.5
QUIET = 1e-6  # nats squared: below an RMS of a thousandth of a nat there is nothing to explain
SURE = 4.0  # standard errors from which a mean difference is no accident
LEANS = 0.5  # a mean difference that is so large a share of the RMS is no rounding

TOP_P = np.linspace(0.5, 0.99, 50)
TEMPERATURES = np.geomspace(0.25, 4.0, 65)  # over the stated one; refined around the best


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kind`: `aligned` (nothing beyond `noise`), `noise` (a difference that no meaning explains), `meaning` (one does:
    `what`), `biased` (none does, and it leans to one side: no rounding). `mismatch`: second moment of the difference;
    `left`: what of it `what` leaves. `mean`: of engine minus trainer; `error` of it, clustered by episode. `bias`: mean
    ratio minus 1 that is left after the weights that the trainer applies."""

    kind: str
    what: str
    mismatch: float
    left: float
    mean: float
    error: float
    bias: float
    tokens: int

    @property
    def good(self) -> bool:
        return self.kind in ("aligned", "noise")

    def record(self) -> Alignment:
        return Alignment(self.kind, self.what, self.tokens, self.mismatch, self.left, self.mean,
                         self.error if math.isfinite(self.error) else None, self.bias)  # fmt: skip

    def __str__(self) -> str:
        said = f"engine and trainer differ by {math.sqrt(self.mismatch):.4f} nats (RMS of {self.tokens} tokens)"
        if self.kind == "meaning":
            return f"{said}, and the engine's log-probabilities are {self.what}: that leaves {math.sqrt(self.left):.4f}"
        if self.kind == "biased":
            return f"{said}, {self.mean:+.4f} of it to one side: no rounding, and no meaning that is known explains it"
        return said


def verdict(engine: NDArray[np.float64], meanings: Mapping[str, NDArray[np.float64]], episode: NDArray[np.int64],
            noise: float, weights: NDArray[np.float64] | None = None) -> Verdict:  # fmt: skip
    """engine [k]: what it reported for tokens whose episodes are [k]; `meanings`: what the trainer computes for them
    under each, `STATED` first and the simplest before the others (nan where it says nothing). `noise`: RMS difference
    of two equivalent forwards of the trainer, nats. `weights` [k]: the correction's, for what is left after it."""
    stated = meanings[STATED]
    left = {name: _moment(engine - column) for name, column in meanings.items()}
    mismatch = left[STATED]
    # Of those that explain it equally well the first: what is fitted stands behind what isn't.
    best = next(name for name, one in left.items() if one <= ALIKE * min(left.values()) + QUIET)
    apart = engine - stated
    mean, error = float(apart.mean()), clustered_error(apart, episode)
    ratio = np.exp(np.clip(stated - engine, -20, 20))
    bias = float(np.mean(ratio if weights is None else weights) - 1)
    what, kind = STATED, "noise"
    if mismatch <= max(QUIET, 4 * noise**2):
        kind = "aligned"
    elif left[best] < EXPLAINS * mismatch:
        what, kind = best, "meaning"
    elif abs(mean) > LEANS * math.sqrt(mismatch) and abs(mean) > SURE * error:
        kind = "biased"
    return Verdict(kind, what, mismatch, left[what], mean, error, bias, len(engine))


def meanings(logits: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor,
             episode: NDArray[np.int64], engine: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:  # fmt: skip
    """What the trainer computes for sampled tokens int64 [k] under each meaning, float64 [k], by name.

    logits and before [k, vocabulary]: of the position that predicts each token, and of the one before that. temperature
    [k]: as recorded. What has a parameter (a temperature, top-p) is fitted to what the engine reported.
    """
    wide, at = logits.double(), temperature.double()[:, None]

    def chosen(log_probabilities: torch.Tensor) -> NDArray[np.float64]:
        found: NDArray[np.float64] = log_probabilities.gather(1, tokens[:, None])[:, 0].cpu().numpy()
        return found

    stated = torch.log_softmax(wide / at, dim=-1)
    own = chosen(stated)
    found = {STATED: own, "raw: at temperature 1": chosen(torch.log_softmax(wide, dim=-1))}
    found["scored one position early"] = chosen(torch.log_softmax(before.double() / at, dim=-1))
    for name, step in (("reported one token late", 1), ("reported one token early", -1)):
        moved = np.full_like(own, np.nan)
        same = episode[1:] == episode[:-1]
        if step == 1:
            moved[1:][same] = own[:-1][same]
        else:
            moved[:-1][same] = own[1:][same]
        found[name] = moved
    p, column = _filtered(stated, tokens, own, engine)
    found[f"top-p {p:.2f}"] = column
    factor, column = _fitted(lambda f: chosen(torch.log_softmax(wide / (at * f), dim=-1)), engine)
    found[f"at {factor:.3f} times the temperature"] = column
    return found


def _filtered(stated: torch.Tensor, tokens: torch.Tensor, own: NDArray[np.float64], engine: NDArray[np.float64]
              ) -> tuple[float, NDArray[np.float64]]:  # fmt: skip
    """Renormalised over the most likely tokens that hold p of the probability (top-p, arXiv:1904.09751), for the p that
    leaves least of the difference. A token that isn't among them was not sampled so, and says nothing."""
    ordered, order = stated.sort(dim=-1, descending=True)
    cumulated = ordered.exp().cumsum(dim=-1)
    rank = (order == tokens[:, None]).int().argmax(dim=-1)
    columns = {}
    for p in TOP_P.tolist():
        kept = (cumulated < p).sum(dim=-1) + 1  # the one that passes p is kept too
        mass = cumulated.gather(1, (kept - 1)[:, None])[:, 0].log().cpu().numpy()
        columns[p] = np.where((rank < kept).cpu().numpy(), own - mass, np.nan)
    best = min(columns, key=lambda p: _moment(engine - columns[p]))
    return best, columns[best]


def _fitted(compute: Callable[[float], NDArray[np.float64]], engine: NDArray[np.float64]
            ) -> tuple[float, NDArray[np.float64]]:  # fmt: skip
    """The factor, and its column, that leaves least of the difference."""
    columns = {float(f): compute(float(f)) for f in TEMPERATURES}
    best = min(columns, key=lambda f: _moment(engine - columns[f]))
    step = math.log(TEMPERATURES[1] / TEMPERATURES[0])
    for _ in range(8):  # bisection around it, on a scale of logarithms
        step /= 2
        near = {f: compute(f) for f in (best * math.exp(-step), best * math.exp(step))} | {best: columns[best]}
        best = min(near, key=lambda f: _moment(engine - near[f]))
        columns[best] = near[best]
    return best, columns[best]


def _moment(difference: NDArray[np.float64]) -> float:
    """Over the tokens that a meaning speaks of; infinite where these are fewer than half."""
    known = np.isfinite(difference)
    if 2 * int(known.sum()) < len(difference):
        return math.inf
    return float(np.mean(np.minimum(np.abs(difference[known]), WINSOR) ** 2))

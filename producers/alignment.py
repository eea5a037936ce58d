"""Decides how a replica is probed for numerical alignment: it continues contexts that it served before, beside its
work, under no lease and in no group, and tells on `fleet` what it sampled and with which log-probabilities.

The trainer scores the same tokens with the same version's weights, so no drift is in the difference. The first token of
a continuation comes from a prefill and the others from decoding, and both are processed as all that the engine samples;
so any engine can be probed, and what is compared is what training gets. A probe is of one version: it is given up where
weights change, and made once for each version that is to be probed. A state machine without an engine: it says what to
submit, and takes what comes back.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.schemas.columns import pack_float32, pack_ids
from headrace.schemas.events import AlignmentProbe
from headrace.schemas.settings import AlignmentSettings

from .engines import GenerationRequest, Progress, Sampling

CUTS = 4  # contexts end after the prompt, or after one, two or three quarters of what was sampled, in turn
_NAME = "alignment/"


class Prober:
    """Of one replica. `served` with each finished request, `begin` where there is room for more, then every
    progress."""

    def __init__(self, settings: AlignmentSettings, temperature: float) -> None:
        self._settings, self._temperature = settings, temperature
        self._contexts: deque[list[int]] = deque(maxlen=settings.contexts)
        self._served = 0
        self._probed = -1  # the version of the newest probe that was begun
        self._version = -1
        self._open: dict[str, list[int]] = {}  # contexts, by request
        self._tokens: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[float]] = {}
        self._running: set[str] = set()

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the requests that run."""
        return tuple(self._running)

    def served(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """A request has ended: its context may be continued again."""
        cut = len(tokens) * (self._served % CUTS) // CUTS
        self._served += 1
        self._contexts.append([*prompt, *tokens[:cut]])

    def begin(self, version: int, stop_ids: frozenset[int]) -> list[GenerationRequest]:
        """What to submit now, at this version: nothing where no probe is due, or too little was served yet."""
        full = len(self._contexts) == self._settings.contexts
        if self._running or version == self._probed or not full or not self._settings.probes(version):
            return []
        self._probed = self._version = version
        self._tokens, self._logprobs = {}, {}
        self._open = {f"{_NAME}{version}/{i}": context for i, context in enumerate(self._contexts)}
        self._running = set(self._open)
        return [GenerationRequest(name, context, Sampling(self._temperature, self._settings.tokens, version * 64 + i),
                                  stop_ids) for i, (name, context) in enumerate(self._open.items())]  # fmt: skip

    def refused(self, request: str) -> None:
        """The engine can't run it: a context that leaves no room."""
        self._running.discard(request)

    def give_up(self) -> tuple[str, ...]:
        """Weights are about to change. The requests to cancel; the probe comes again at a version that is due."""
        running, self._running, self._tokens = self.active, set(), {}
        return running

    def took(self, one: Progress) -> bool:
        """Whether it is of the probe."""
        if one.request_id not in self._running:
            return one.request_id.startswith(_NAME)
        if one.version != self._version or one.finished == "lost":
            self._running, self._tokens = set(), {}  # what else comes of it is ignored
            return True
        self._tokens.setdefault(one.request_id, []).extend(one.token_ids.tolist())
        self._logprobs.setdefault(one.request_id, []).extend(one.logprobs.tolist())
        if one.finished is not None:
            self._running.discard(one.request_id)
        return True

    def result(self, worker: str, incarnation: str, engine: Mapping[str, str]) -> AlignmentProbe | None:
        """Once, when all of a probe has come."""
        if self._running or not self._tokens:
            return None
        names = list(self._tokens)
        ids = [token for name in names for token in (*self._open[name], *self._tokens[name])]
        logprobs = [value for name in names for value in self._logprobs[name]]
        probe = AlignmentProbe(
            worker, incarnation, self._version, json.dumps(engine, sort_keys=True), self._temperature,
            tuple(len(self._open[name]) for name in names), tuple(len(self._tokens[name]) for name in names),
            int(time.time() * 1000), pack_ids(np.array(ids, np.int32)), pack_float32(np.array(logprobs, np.float32)),
        )  # fmt: skip
        self._tokens, self._logprobs = {}, {}
        return probe

"""Decides what happens around an update of a replica's weights: to its active requests, to their caches, and whether
the replica may take work at all. Facts in, verdicts out; the worker acts.

| requests | caches | when a version is ready |
|---|---|---|
| keep | keep | active requests go on; their next tokens are sampled on keys of earlier versions, as the span says |
| keep | clear | active requests go on; their keys are computed anew from prompt and tokens, with the new weights |
| finish | clear | nothing begins until the active requests have ended; then it is applied |
| abort | clear | active requests are handed back, to be run again from their prompts |

Whatever the policy, a request that begins later never meets another version's cached keys. With `finish` and `abort` no
request is active when weights change, so there would be no cache to keep: the settings refuse that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.schemas.settings import WeightSettings


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """`ready`: a version waits to be applied; `active`: requests that the engine decodes."""

    requests: str
    caches: str

    @classmethod
    def of(cls, settings: WeightSettings) -> UpdatePolicy:
        return cls(settings.requests, settings.caches)

    def applies(self, active: int) -> bool:
        """Whether what is ready may be applied now."""
        return self.requests != "finish" or active == 0

    def begins(self, ready: bool) -> bool:
        """Whether a request may begin."""
        return self.requests != "finish" or not ready

    @property
    def aborts(self) -> bool:
        """Whether active requests are given up before weights change."""
        return self.requests == "abort"

    @property
    def recomputes(self) -> bool:
        """Whether active requests are preempted after weights have changed, and their keys computed anew."""
        return self.requests == "keep" and self.caches == "clear"


@dataclass(slots=True)
class Fence:
    """Keeps work away from a replica that doesn't serve what it should, until it has caught up.

    It is fenced once an update was refused, or once a version that is published has not been served for `patience_s`.
    A replica that waits is not late: for its active requests to end (`finish`), or for an evaluation that has pinned
    its version.
    """

    patience_s: float
    reason: str | None = None  # why it is fenced; None: it isn't
    _seen: dict[int, float] = field(default_factory=dict)  # version that isn't served yet: since when it is known
    _forgiven: int = 0  # refusals up to when it had caught up last

    def observe(self, served: int, newest: int, refusals: Sequence[tuple[int, Exception]], waits: bool,
                now: float) -> str | None:  # fmt: skip
        """The reason to be fenced now. `newest`: known to be published; `refusals`: version and reason of each so far,
        as the receiver keeps them; `waits`: an update is ready, or an evaluation has pinned the version."""
        self._seen = {version: since for version, since in self._seen.items() if version > served}
        if served >= newest:
            self._forgiven, self.reason = len(refusals), None
            return None
        if waits:
            self._seen.clear()
        self._seen.setdefault(newest, now)
        late_s = now - min(self._seen.values())
        if len(refusals) > self._forgiven:
            self.reason = "version {} was refused: {}".format(*refusals[self._forgiven])  # what began it
        elif late_s > self.patience_s:
            self.reason = f"version {served} is served, and a later one has been published for {late_s:.0f} s"
        elif waits:
            self.reason = None
        return self.reason

"""What a producer owes the log for attempts whose events the broker refused for good: an end, never a silent gap."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.events import EpisodeEnded

from .episodes import Attempt, delivery_failed
from .outbox import Failure

TRIES = 3  # an end may be refused with its neighbours in one batch; after so many it is the broker that refuses


@dataclass(slots=True)
class _Owed:
    sequence: int
    tries: int = 1


class Refusals:
    """Not for several threads."""

    def __init__(self) -> None:
        self._owed: dict[Attempt, _Owed] = {}

    def end_for(self, failure: Failure) -> EpisodeEnded | None:
        """The end to write for the failure's attempt; None where it is on its way, or has been refused too often."""
        attempt = failure.attempt
        if attempt is None:
            return None
        owed = self._owed.get(attempt)
        if owed is None:
            owed = self._owed[attempt] = _Owed(failure.sequence)
        elif failure.sequence == owed.sequence and owed.tries < TRIES:
            owed.tries += 1
        else:
            return None  # a later event of an attempt that has ended
        return delivery_failed(attempt, owed.sequence, f"event {failure.sequence} ({failure.kind}): {failure.reason}")

"""The clock that stands still while the log does.

Deadlines and lease timeouts run on it, so an outage, a stopped run or a restart of the reader expires nothing: each
record moves it by the time since the newest record before, at most `max_step_ms`. Whoever needs it to run while nothing
else happens writes ticks. A step must be well below whatever expires on the clock: after an outage the first record
takes one, and who was away with the broker has the rest of its time to be heard again.

Timestamps are those of the partition's leader, and leaders' clocks differ. While leadership moves to and fro, only what
goes beyond the newest timestamp so far counts: the clock gains at most that difference, once, however often it moves,
and loses at each move at most what a difference is beyond a step: a deadline comes later then, but it comes.
A clock that went back further than leaders' clocks differ was wrong and has been set right: time goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEP_MS = 5000  # a few ticks: less would lose time on a busy broker, more would let an outage expire things
MIN_STEP_MS = 2000  # two ticks: a clock of smaller steps would run slow
MAX_SKEW_MS = 60_000  # between leaders whose clocks are kept at all
TICK_AFTER_S = 1.0


@dataclass(slots=True)
class LogClock:
    """Milliseconds since the fold began; `last_ms` is the newest timestamp seen, -1 for none."""

    now_ms: int = 0
    last_ms: int = -1
    max_step_ms: int = MAX_STEP_MS

    def see(self, timestamp_ms: int) -> int:
        """Advance by a record. A timestamp that goes back moves nothing. Returns the time now."""
        step = timestamp_ms - self.last_ms
        if self.last_ms < 0 or step < -MAX_SKEW_MS:
            self.last_ms = timestamp_ms
        elif step > 0:
            self.now_ms += min(step, self.max_step_ms)
            self.last_ms = timestamp_ms
        return self.now_ms

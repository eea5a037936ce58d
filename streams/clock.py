"""The clock that stands still while the log does.

Deadlines and lease timeouts run on it, so an outage, a stopped run or a restart of the reader expires nothing: each
record moves it by the time since the record before, at most `MAX_STEP_MS`. Whoever needs it to run while nothing else
happens writes ticks.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_STEP_MS = 5000  # a few ticks: less would lose time on a busy broker, more would let an outage expire things
TICK_AFTER_S = 1.0


@dataclass(slots=True)
class LogClock:
    """Milliseconds since the fold began; `last_ms` is the timestamp last seen, -1 for none."""

    now_ms: int = 0
    last_ms: int = -1

    def see(self, timestamp_ms: int) -> int:
        """Advance by a record. A timestamp that goes back moves nothing. Returns the time now."""
        if self.last_ms >= 0:
            self.now_ms += min(max(0, timestamp_ms - self.last_ms), MAX_STEP_MS)
        self.last_ms = timestamp_ms
        return self.now_ms

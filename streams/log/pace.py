"""Decides how long a transfer waits so that it takes no more than its share of a network, disk or processor."""

from __future__ import annotations


class Pace:
    """At most so many bytes a second; None: no limit. What was not used is not saved up, so that after a pause a
    transfer begins with one piece, not with a burst."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def wait_s(self, size: int, now: float) -> float:
        """Seconds to wait after moving `size` bytes at the monotonic time `now`, before anything more is moved."""
        if self._bytes_per_s is None:
            return 0.0
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        return self._free_at - now

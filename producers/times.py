"""Which times an event may carry: what can't be is refused at the door, with what was probably meant."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.schemas.errors import InvalidRecord

FIRST_MS = 1_577_836_800_000  # 2020-01-01: no episode is older
DAY_MS = 24 * 3600 * 1000  # clocks and time zones may differ by so much

_UNITS = (("seconds", 1e3, "multiply by 1000"), ("microseconds", 1e-3, "divide by 1000"),
          ("nanoseconds", 1e-6, "divide by 1,000,000"))  # fmt: skip


def checked_ms(name: str, value: float, now_ms: int) -> int:
    """A time in milliseconds since the epoch. Raises InvalidRecord where it is before 2020, more than a day after
    `now_ms`, or no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRecord(f"{name} = {value!r}: a time is a number of milliseconds since 1970")
    if _possible(value, now_ms):
        return int(value)
    for unit, factor, mend in _UNITS:
        if _possible(value * factor, now_ms):
            raise InvalidRecord(f"{name} = {value:.15g} looks like {unit} since 1970: it must be in milliseconds, so "
                                f"{mend}")  # fmt: skip
    if FIRST_MS <= value:
        raise InvalidRecord(f"{name} = {value:.15g} is {(value - now_ms) / DAY_MS:.1f} days ahead of this machine's "
                            "clock: one of the two clocks is wrong")  # fmt: skip
    raise InvalidRecord(f"{name} = {value:.15g} is before 2020: it must be milliseconds since 1970 by the wall clock "
                        "(a monotonic clock counts from the start of the machine)")  # fmt: skip


def checked_timings(timings_ms: Mapping[str, float]) -> dict[str, float]:
    """Durations in milliseconds, by step. Raises InvalidRecord where one is negative or no finite number."""
    for name, value in timings_ms.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRecord(f"the timing {name!r} is {value!r}: leave out what was not measured")
        if value < 0:
            raise InvalidRecord(f"the timing {name!r} is {value:g} ms: a step can't take less than nothing (were its "
                                "two times taken from different clocks, or the wrong way round?)")  # fmt: skip
    return {name: float(value) for name, value in timings_ms.items()}


def _possible(ms: float, now_ms: int) -> bool:
    return FIRST_MS <= ms <= now_ms + DAY_MS

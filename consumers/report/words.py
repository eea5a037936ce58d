"""How a value looks to a person: seconds, shares, sizes, spreads. `-` where the log can't support it."""

from __future__ import annotations

from collections.abc import Callable

from ..figures import Quantiles


def seconds(value: float | None) -> str:
    """A duration in the unit that reads best; "-" for none."""
    if value is None:
        return "-"
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def spread(value: Quantiles | None, show: Callable[[float | None], str] = seconds) -> str:
    """Median, 95th percentile and maximum; "-" for none."""
    if value is None:
        return "-"
    return f"{show(value.p50)} median, {show(value.p95)} p95, {show(value.max)} max"


def number(value: float | None) -> str:
    """Three digits that mean something; "-" for none."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share of 1 in per cent; "-" for none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def size(value: float) -> str:
    """Bytes in the unit that reads best (powers of 1,000)."""
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"

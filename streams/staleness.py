"""How much a token may weigh that an older policy sampled: decided per segment, from lag and estimated drift.

Drift is the divergence of the sampling policy from the batch's target, in nats squared: the squared sum of the
versions' published RMS changes `rho` on the way (what was not published yet counts as the latest one), over a floor
that equal weights show between engine and trainer. Lag alone decides while no `rho` is known. The weight falls from 1
to 0 along a ramp; a segment beyond a limit stays in the group's baseline and trains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.schemas.settings import StalenessSettings


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of one segment: versions behind its target, drift in nats squared (nan: unknown), weight in [0, 1]."""

    lag: int
    drift: float
    weight: float


def drift(version: int, target: int, rho: Mapping[int, float], floor: float, measured: float | None = None) -> float:
    """Estimated drift of what `version` sampled against `target`; nan where no `rho` was published.

    `rho[v]` is the RMS change of log-probability from version v - 1 to v. `measured` is a realised second moment
    against the version that the sum begins at, where one is known: D = floor + (sqrt(S) + sum rho)^2 with
    S = max(0, measured - floor).
    """
    known = {v: r for v, r in rho.items() if v >= 1 and math.isfinite(r)}
    start = math.sqrt(max(0.0, measured - floor)) if measured is not None else 0.0
    if version >= target:
        return floor + start**2
    if not known:
        return math.nan
    latest = known[max(known)]
    return floor + (start + sum(known.get(v, latest) for v in range(version + 1, target + 1))) ** 2


def assess(version: int, target: int, rho: Mapping[int, float], settings: StalenessSettings) -> Staleness:
    """The staleness of a segment that `version` sampled, in a batch that trains `target`."""
    lag = target - version
    estimate = drift(version, target, rho, settings.floor)
    return Staleness(lag, estimate, weight(lag, estimate, settings))


def weight(lag: int, estimate: float, settings: StalenessSettings) -> float:
    """Rule `ramp`: 1 up to `ramp_from` over the floor, linear to 0 at `drift_limit`; 0 beyond `hard_lag`."""
    if lag > settings.hard_lag:
        return 0.0
    if math.isnan(estimate):
        return 1.0
    over = estimate - settings.floor
    span = settings.drift_limit - settings.ramp_from
    return min(1.0, max(0.0, (settings.drift_limit - over) / span))

"""How much a token may weigh that an older policy sampled: decided per segment, from lag and estimated drift.

Drift is the divergence of the sampling policy from the batch's target, in nats squared. What was measured of a
version's tokens in an earlier batch is known; from there on the versions' published RMS changes `rho` are added (what
was not published yet counts as the latest one, and is counted as extrapolated), over a floor that equal weights show
between engine and trainer. Lag alone decides while nothing is published. `rule` says how the weight falls with the
forecast.

What lies beyond a limit, `on_stale` decides. `mask`: its tokens train nothing, the episode stays in the baseline.
`drop`: the whole episode leaves, baseline and denominators too. `wait`: as `mask`, and the next manifest waits for open
groups that its version would push beyond the limit, at most until they close. Pure functions, and a fold over
`Version`s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.schemas.events import Version
from headrace.schemas.settings import StalenessSettings

# A measurement whose standard error is a larger share of it tells less than the sum of the changes does.
TELLS = 0.5


@dataclass(frozen=True, slots=True)
class Forecast:
    """drift in nats squared, floor included (nan: nothing is published); how many versions on the way have no published
    change yet."""

    drift: float
    extrapolated: int


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of one segment: versions behind its target, drift in nats squared (nan: unknown), weight in [0, 1], and how many
    versions of the forecast were extrapolated."""

    lag: int
    drift: float
    weight: float
    extrapolated: int = 0


class Drifts:
    """What has been published of the policy's drift: `publish` each version's record, in order."""

    def __init__(self, versions: Iterable[Version] = ()) -> None:
        self._rho: dict[int, float] = {}
        self._latest = math.nan
        self._measured: dict[int, tuple[int, float]] = {}  # of a version's tokens: against which target, nats squared
        for version in versions:
            self.publish(version)

    def publish(self, version: Version) -> None:
        if version.rho_tokens > 0 and math.isfinite(version.rho):
            # After a rollback the way from the version before it leads back over those that were given up.
            back = sum(self._rho.get(given_up, 0.0) for given_up in range(version.parent + 1, version.version))
            self._rho[version.version], self._latest = version.rho + back, version.rho
        for one in version.realised:
            if one.error is not None and one.error <= TELLS * one.second_moment:
                self._measured[one.version] = version.parent, one.second_moment

    def forecast(self, version: int, target: int, floor: float) -> Forecast:
        """Of what `version` sampled, against `target`."""
        at, measured = self._measured.get(version, (version, None))
        if not version <= at <= target:
            at, measured = version, None
        if at < target and not self._rho:
            return Forecast(math.nan, target - version)
        way = range(at + 1, target + 1)
        changes = {v: self._rho.get(v, self._latest) for v in way}
        return Forecast(drift(changes, floor, measured), sum(v not in self._rho for v in way))


def drift(changes: Mapping[int, float], floor: float, measured: float | None = None) -> float:
    """D = floor + (sqrt(S) + sum of rho)^2, nats squared: by the triangle inequality of the L2 norm, no less than what
    changes that don't point the same way come to. `changes`: rho of each version on the way, nats. S = max(0, measured
    - floor): `measured` is the realised second moment where the way begins, none for the sampling version itself."""
    start = math.sqrt(max(0.0, measured - floor)) if measured is not None else 0.0
    return floor + (start + sum(changes.values())) ** 2


def assess(version: int, target: int, drifts: Drifts, settings: StalenessSettings) -> Staleness:
    """The staleness of a segment that `version` sampled, in a batch that trains `target`."""
    lag, found = target - version, drifts.forecast(version, target, settings.floor)
    return Staleness(lag, found.drift, weight(lag, found.drift, settings), found.extrapolated)


def weight(lag: int, estimate: float, settings: StalenessSettings) -> float:
    """0 beyond `hard_lag`, 1 where no drift is known. Rule `ramp`: 1 up to `ramp_from` over the floor, linear to 0 at
    `drift_limit`. Rule `limit`: 1 up to `drift_limit`, 0 beyond."""
    if lag > settings.hard_lag:
        return 0.0
    if math.isnan(estimate):
        return 1.0
    over = estimate - settings.floor
    if settings.rule == "limit":
        return float(over <= settings.drift_limit)
    span = settings.drift_limit - settings.ramp_from
    return min(1.0, max(0.0, (settings.drift_limit - over) / span))


def dropped(weights: Iterable[float], settings: StalenessSettings) -> bool:
    """Whether an episode whose segments have these weights leaves as a whole."""
    return settings.on_stale == "drop" and any(one <= 0 for one in weights)


def pushed_out(version: int, target: int, drifts: Drifts, settings: StalenessSettings) -> bool:
    """Whether what `version` sampled may be trained in a batch for `target`, and not any more in the one after it."""
    now, then = (assess(version, one, drifts, settings).weight for one in (target, target + 1))
    return now > 0 >= then

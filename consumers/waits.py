"""Who waited for what: the time of episodes, engines and trainer by reason, each batch's straggler, the bottleneck.

A pure fold over records of the small topics; `figures` feeds it. What workers and trainer measured of themselves is
taken as they say it. One thing no worker can know is told here from the log: whether it had nothing to do because the
run was *paced*, that is, because there was no room for another group (DESIGN: room is a matter of `max_lag`).

The trainer's wait is defined here and nowhere else (`trainer_times`): the time in which no batch was there, as the
trainer measured it, or, of one that doesn't, from the commit of the version before to the manifest. The wait before the
first batch stands apart (`first_wait_s`): nothing can be trained before the first groups have closed, it is part of the
time to trainable batch, and it is in no share and no verdict.

The advice follows one rule: change what the measured waiting points to, and nothing where it is below `WORTH_IT` of the
time. `max_lag = 0` takes turns and is the simple mode; 1, the default, overlaps sampling and training; more is advised
only where both sides still wait for each other beyond that share.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.events import (
    AttemptEnded,
    Disposed,
    GroupClosed,
    Heartbeat,
    Lease,
    Manifest,
    Publication,
    RunCreated,
    SettingsChanged,
    Version,
)
from headrace.schemas.outcomes import Closure, Purpose
from headrace.schemas.settings import RunSettings
from headrace.schemas.waiting import MODEL_TIME, Idle, Step, TrainerTime

from .facts import Fact

WORTH_IT = 0.15  # of the time: below it no wait is worth a setting
BUSY = "busy"
EARLIER = "earlier attempts"  # of a straggler: its slot was leased again
GENERATION, ENVIRONMENT, TRAINING, PUBLICATION = "generation", "environment", "training", "publication"


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slot that ended last of the group that closed last of a batch, and what it spent most of its time on."""

    batch: int
    group: str
    slot: int
    attempt: int
    task: str
    state: str
    state_s: float  # in that state
    open_s: float  # from the group's opening to its closure


@dataclass(frozen=True, slots=True)
class Waits:
    """Shares are of the time that was measured; None where nothing was."""

    steps_s: Mapping[str, float]  # seconds of all ended attempts, by step
    engine_s: Mapping[str, float]  # seconds of all engines, by `busy` and reason of idleness
    trainer_s: Mapping[str, float]  # seconds of the trainer, by what it did, without `first_wait_s`
    first_wait_s: float | None  # the trainer's wait for the first batch; None: that isn't trained yet
    trainer_waits_s: tuple[float, ...]  # its wait for each later batch
    gpu_hours: float | None  # of workers and trainer; None: no GPU was reported
    stragglers: tuple[Straggler, ...]  # one a batch
    bottleneck: str | None  # generation, environment, training or publication; None: nothing waits much, or too early
    advice: str

    @property
    def engine(self) -> Mapping[str, float]:
        return shares(self.engine_s)

    @property
    def trainer(self) -> Mapping[str, float]:
        return shares(self.trainer_s)

    @property
    def steps(self) -> Mapping[str, float]:
        return shares(self.steps_s)


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each part of the whole, in [0, 1]; empty where there is nothing."""
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total > 0 else {}


@dataclass(slots=True)
class Waiting:
    """Give it every record, in log order within a partition; then `waits`."""

    _steps: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _versions: dict[int, Version] = field(default_factory=dict)
    _beats: dict[str, list[tuple[int, Mapping[str, float]]]] = field(default_factory=lambda: defaultdict(list))
    _opened: dict[str, int] = field(default_factory=dict)
    _trains: set[str] = field(default_factory=set)  # groups that take room
    _leased: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _ended: dict[tuple[str, int], AttemptEnded] = field(default_factory=dict)  # by slot, the newest attempt
    _closed: dict[str, tuple[int, GroupClosed]] = field(default_factory=dict)
    _manifests: list[tuple[int, Manifest]] = field(default_factory=list)
    _disposed: list[tuple[int, str]] = field(default_factory=list)
    _published: dict[int, int] = field(default_factory=dict)
    _settings: list[tuple[int, int, int]] = field(default_factory=list)  # (ms, groups, max_lag)
    _trainer_gpus: int = 0

    def observe(self, fact: Fact[Any]) -> None:
        at = fact.timestamp_ms
        match fact.event:
            case Heartbeat() as beat if beat.managed:
                self._beats[beat.incarnation].append((at, beat.counters))
            case Lease() as lease:
                self._opened.setdefault(lease.group, at)
                if lease.purpose == Purpose.TRAIN and not lease.unmanaged:
                    self._trains.add(lease.group)
                for one in lease.assignments:
                    self._leased.setdefault((lease.group, one.slot, one.attempt), at)
            case AttemptEnded() as ended:
                self._ended[ended.group, ended.slot] = ended
                for step, ms in ended.timings_ms.items():
                    if step != MODEL_TIME:  # beside the steps, not one of them
                        self._steps[step] += ms / 1000
            case GroupClosed() as closed:
                self._closed[closed.group] = at, closed
            case Manifest() as manifest:
                self._manifests.append((at, manifest))
            case Disposed() as disposed:
                self._disposed.append((at, disposed.group))
            case Publication() as publication:
                self._published.setdefault(publication.version, at)
            case Version() as version:
                self._versions[version.version] = version
                self._trainer_gpus = int(_device(version.fingerprint).startswith("cuda"))
            case RunCreated() as created:
                batch = RunSettings.model_validate_json(created.settings).batch
                self._settings.append((at, batch.groups, batch.max_lag))
            case SettingsChanged() as changed if self._settings:
                news, (_, groups, lag) = json.loads(changed.changes), self._settings[-1]
                self._settings.append((at, news.get("batch.groups", groups), news.get("batch.max_lag", lag)))
            case _:
                pass

    def waits(self) -> Waits:
        engine = self._engines()
        gpu_s = sum(beats[-1][1].get("gpu_s", 0.0) for beats in self._beats.values())
        times = trainer_times(self._versions, {manifest.batch: manifest for _, manifest in self._manifests})
        gpu_s += self._trainer_gpus * sum(sum(each.values()) for each in times.values())
        first = times[1].pop(TrainerTime.WAITING, 0.0) if 1 in times else None
        trainer = {str(name): total for name in TrainerTime
                   if (total := sum(each.get(name, 0.0) for each in times.values()))}  # fmt: skip
        later = tuple(each.get(TrainerTime.WAITING, 0.0) for number, each in times.items() if number > 1)
        max_lag = self._settings[-1][2] if self._settings else 1
        bottleneck, advice = advise(shares(engine), shares(trainer), max_lag)
        steps = {str(step): self._steps[step] for step in [*Step, *self._steps] if self._steps.get(step)}
        return Waits(steps, engine, trainer, first, later, gpu_s / 3600 if gpu_s else None, self._stragglers(),
                     bottleneck, advice)  # fmt: skip

    # ------------------------------------------------------------------------------------------------- engines

    def _engines(self) -> dict[str, float]:
        """What the heartbeats' counters say, with `no_requests` split by what the log says of that time."""
        seconds: dict[str, float] = defaultdict(float)
        paced = self._without_room()
        unpublished = min(self._published.values(), default=None)  # before version 0 is there, weights are waited for
        for beats in self._beats.values():
            before: tuple[int, Mapping[str, float]] = (beats[0][0], {})
            for at, counters in beats:
                grown = {name: counters.get(key, 0.0) - before[1].get(key, 0.0) for name, key in _COUNTERS.items()}
                idle = grown.pop(Idle.NO_REQUESTS)
                # The first heartbeat tells of the time before it.
                begin = min(before[0], at - round(1000 * (idle + sum(grown.values()))))
                span = max(1, at - begin)
                early = span if unpublished is None else min(span, max(0, unpublished - begin))
                held = min(span - early, paced.between(begin + early, at))
                grown[Idle.WEIGHTS] += idle * early / span
                grown[Idle.PACED] = idle * held / span
                grown[Idle.NO_REQUESTS] = idle * (span - early - held) / span
                for name, value in grown.items():
                    seconds[str(name)] += max(0.0, value)
                before = at, counters
        return {name: value for name, value in seconds.items() if value > 0}

    def _without_room(self) -> Stretches:
        """The times at which no group for training could be opened."""
        moves: list[tuple[int, int, int]] = []  # (ms, change of room for what is open or waits, change of the settings)
        last = 0
        for at, groups, lag in self._settings:
            moves.append((at, 0, (lag + 1) * groups - last))
            last = (lag + 1) * groups
        decided = {ref.group for _, manifest in self._manifests for ref in manifest.groups}
        for group in self._trains:
            moves.append((self._opened[group], -1, 0))
            if group in self._closed:
                at, closed = self._closed[group]
                if closed.closure != Closure.CANDIDATE:
                    moves.append((at, 1, 0))
                elif group in decided:
                    pass  # it takes room until the version of its batch is published
        for at, manifest in self._manifests:
            if manifest.batch in self._published:
                own = sum(ref.group in self._trains for ref in manifest.groups)
                moves.append((max(at, self._published[manifest.batch]), own, 0))
        moves += [(at, 1, 0) for at, group in self._disposed if group in self._trains and group not in decided]
        return Stretches.below_one(moves)

    # ---------------------------------------------------------------------------------------------- stragglers

    def _stragglers(self) -> tuple[Straggler, ...]:
        return tuple(one for _, manifest in self._manifests if (one := self._straggler(manifest)) is not None)

    def _straggler(self, manifest: Manifest) -> Straggler | None:
        known = [self._closed[ref.group] for ref in manifest.groups if ref.group in self._closed]
        if not known:
            return None
        _, closed = max(known, key=lambda one: one[0])
        slot = closed.held_up_by
        ended = self._ended.get((closed.group, slot))
        attempt = ended.attempt if ended else 0
        times = {step: ms / 1000 for step, ms in (ended.timings_ms if ended else {}).items() if step != MODEL_TIME}
        if attempt > 0 and (leased := self._leased.get((closed.group, slot, attempt))) is not None:
            times[EARLIER] = (leased - self._opened.get(closed.group, leased)) / 1000
        state = max(times, key=times.__getitem__, default="unknown")
        return Straggler(manifest.batch, closed.group, slot, attempt, closed.task, state, times.get(state, 0.0),
                         closed.open_ms / 1000)  # fmt: skip


def trainer_times(versions: Mapping[int, Version],
                  manifests: Mapping[int, Manifest]) -> dict[int, dict[TrainerTime, float]]:  # fmt: skip
    """Seconds of the trainer by trained version and by what it did. A trainer that doesn't measure itself waits from
    the commit of the version before to the manifest, and computes until its own commit."""
    times: dict[int, dict[TrainerTime, float]] = {}
    for number in sorted(versions):
        version, before, manifest = versions[number], versions.get(number - 1), manifests.get(number)
        told = {name: version.metrics[f"{name}_s"] for name in TrainerTime if f"{name}_s" in version.metrics}
        if not told and before is not None and manifest is not None:
            waited = max(0, manifest.decided_ms - before.committed_ms) / 1000
            told = {TrainerTime.WAITING: waited,
                    TrainerTime.COMPUTE: max(0.0, (version.committed_ms - before.committed_ms) / 1000 - waited)}
        if number > 0:
            times[number] = told
    return times


_COUNTERS: Mapping[str, str] = {BUSY: "busy_s"} | {str(reason): f"idle_{reason}_s" for reason in Idle}


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of time, as the total of them before each of `times` (ms, ascending)."""

    times: NDArray[np.float64]
    before: NDArray[np.float64]

    @classmethod
    def below_one(cls, moves: Sequence[tuple[int, int, int]]) -> Stretches:
        """Where the sum of all changes so far is below one; it lasts as long as the last one does."""
        if not moves:
            return cls(np.zeros(1), np.zeros(1))
        times = np.array(sorted(at for at, _, _ in moves), np.float64)
        level = np.cumsum([one + two for _, one, two in sorted(moves)])
        lasting = np.append(np.diff(times), 1e12)  # nothing has ended the last one yet
        total = np.concatenate([[0.0], np.cumsum(np.where(level < 1, lasting, 0.0))])
        return cls(np.append(times, times[-1] + 1e12), total)

    def between(self, begin: float, end: float) -> float:
        low, high = np.interp([begin, end], self.times, self.before)
        return float(high - low)


def advise(engine: Mapping[str, float], trainer: Mapping[str, float], max_lag: int) -> tuple[str | None, str]:
    """The bottleneck and the next setting to change, from shares of the engines' and of the trainer's time."""
    if not engine or not trainer:
        return None, "nothing to advise yet: no version has been trained"
    waiting, publishing = trainer.get(TrainerTime.WAITING, 0.0), trainer.get(TrainerTime.PUBLISHING, 0.0)
    paced, weights = engine.get(Idle.PACED, 0.0), engine.get(Idle.WEIGHTS, 0.0)
    if max(publishing, weights) > WORTH_IT and max(publishing, weights) >= max(waiting, paced):
        return PUBLICATION, ("new weights are what is waited for: weights.codec = fast, fewer changed weights (a lower "
                             "optimizer.learning_rate), or a faster way from trainer to workers")  # fmt: skip
    if waiting > WORTH_IT and paced > WORTH_IT:
        return GENERATION, (f"sampling and training wait for each other: batch.max_lag = {max_lag + 1} (now {max_lag}) "
                            "lets them overlap")  # fmt: skip
    if waiting > WORTH_IT:
        if engine.get(Idle.ENVIRONMENT, 0.0) > WORTH_IT:
            return ENVIRONMENT, ("engines wait for environments: site.slots or more workers, so that more episodes run "
                                 "beside each other, or a faster verifier")  # fmt: skip
        if engine.get(Idle.UNROUTED, 0.0) > WORTH_IT:
            return GENERATION, "requests find no replica: see `headrace show RUN replicas` for those that are fenced"
        return GENERATION, "engines are at work and the trainer waits: site.workers, or a faster device for them"
    if paced > WORTH_IT:
        return TRAINING, ("engines wait for the trainer, which is at work: a faster device for it, or fewer engines; "
                          "more lag would only make samples older")  # fmt: skip
    return None, f"nothing waits for more than {WORTH_IT:.0%} of its time: no setting is worth changing"


def _device(fingerprint: str) -> str:
    try:
        return str(json.loads(fingerprint).get("device", ""))
    except (ValueError, AttributeError):
        return ""

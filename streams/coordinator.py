"""Paces the run: which groups are opened, when, for whom, and which candidates make a batch. A pure state machine.

`observe` takes records, `decide` returns the records to write and has then applied them, by the methods that also
apply what is read from the log at a start: a restart stands where the log stands. (A caller whose transaction fails
must write the same decision again, or start anew.)

Room for new groups = (max_lag + 1) x batch groups - groups in manifests whose version is not yet published - candidates
waiting - open groups for training. It is derived, so every fate of a group gives its place back by itself, and with
max_lag = 0 sampling and training take turns. Nothing is leased before version 0 is published. Slots that wait are
leased before new groups are opened. Evaluation takes no room.
"""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace.schemas.errors import InvalidRecord
from headrace.schemas.events import (
    Assignment,
    AttemptEnded,
    Derived,
    Disposed,
    Event,
    Exhausted,
    GroupClosed,
    GroupSpec,
    HandBack,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseRequest,
    Manifest,
    Position,
    Publication,
    RunCreated,
    SettingsChanged,
    Task,
    Version,
)
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Closure, Purpose
from headrace.schemas.settings import RunSettings, changed
from headrace.schemas.topics import FLEET, GROUPS

from .assembler import RecordLike
from .batching import Batching, Candidate, Entry
from .leasing import Leasing, OpenGroup
from .stalls import Stall, Stalls, Standing
from .tasks import TaskSource, task_source


class Addressed(RecordLike, Protocol):
    """A record that also says its partition."""

    @property
    def partition(self) -> int: ...


@dataclass(slots=True)
class Decision:
    """What to write, in one transaction: `tasks` in this order, then `trajectories`, then `batches`."""

    tasks: list[LeaseEnded | Lease] = field(default_factory=list)
    trajectories: list[Exhausted | Lease] = field(default_factory=list)
    batches: list[Entry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tasks or self.trajectories or self.batches)

    def lease(self, lease: Lease) -> None:
        self.tasks.append(lease)
        self.trajectories.append(lease)


class Coordinator:
    """At a start it must observe `policy`, `batches`, `groups` and `tasks`, each from its beginning, as `restore` does;
    `fleet` from its end. From then on `policy`, `groups` and `fleet`; `tasks` and `batches` are its own."""

    def __init__(self, settings: RunSettings, source: TaskSource) -> None:
        self.settings = settings
        self.leasing = Leasing(0)
        self.batching = Batching()
        self.published = -1
        self.assembled: dict[int, int] = {}  # of each partition of `trajectories`: what `groups` accounts for
        self._closed: set[str] = set()  # groups whose leases are still to be read
        self._stalls = Stalls()
        self._source = source
        self._settings_at = (0, b"")  # offset and digest of the record that says them
        self._cursor = self._opened = self._leases = 0
        self._requests: deque[LeaseRequest] = deque()
        self._answered: set[str] = set()
        self._news = False
        self._set(settings)

    # ------------------------------------------------------------------------------------------------- facts

    def observe(self, topic: str, record: Addressed, event: Event) -> None:
        """A record of one of its topics (`topic` is the short name), decoded. Raises InvalidRecord, and has changed
        nothing, where it can't be; TasksExhausted where settings name tasks that aren't there."""
        self._news = True
        self.passed(topic, record)
        if topic == FLEET:
            self.leasing.clock.see(record.timestamp_ms)
        self._stalls.observe(self.leasing.clock.now_ms, event)
        match event:
            case Heartbeat():
                self.leasing.heartbeat(event)
            case HandBack():
                self.leasing.handed_back(event)
            case LeaseRequest():
                if event.request not in self._answered and all(r.request != event.request for r in self._requests):
                    self._requests.append(event)
            case AttemptEnded():
                self.leasing.attempt_ended(event)
            case GroupClosed():
                managed = event.closure != Closure.UNMANAGED
                if self.leasing.closed(event.group) is None and managed:
                    self._closed.add(event.group)
                if managed and event.purpose == Purpose.TRAIN:
                    self.batching.closed(Candidate(record.partition, record.offset, event), self.settings)
            case Position():
                self.assembled[record.partition] = event.offset
            case Lease():
                self._leased(event)
            case LeaseEnded():
                self.leasing.lease_ended(event)
            case Manifest() | Disposed():
                self.batching.read(event, record.value or b"")
            case Version():
                self.batching.version(event)
            case Publication():
                self.published = max(self.published, event.version)
            case RunCreated():
                self._settings_at = (record.offset, digest(record.value or b""))
                self._set(RunSettings.model_validate(json.loads(event.settings)))
            case Derived():
                self._cursor = max(self._cursor, event.cursor)
            case SettingsChanged():
                try:
                    settings = changed(self.settings, json.loads(event.changes))
                except ValueError as error:
                    raise InvalidRecord(f"the settings can't be changed so: {error}") from error
                self._settings_at = (record.offset, digest(record.value or b""))
                self._set(settings)
            case _:
                pass

    def passed(self, topic: str, record: Addressed) -> None:
        """A record was read, whether or not it can be used."""
        if topic == GROUPS:
            positions = self.batching.positions
            positions[record.partition] = max(positions.get(record.partition, 0), record.offset + 1)

    def restored(self) -> None:
        """All leases have been read."""
        self._closed = set()

    def _set(self, settings: RunSettings) -> None:
        if settings.tasks != self.settings.tasks:
            self._source = task_source(settings.tasks)
        self.settings = settings
        self.leasing.expire_after(round(settings.rollout.lease_timeout_s * 1000))

    def _leased(self, lease: Lease) -> None:
        if lease.group not in self._closed:
            self.leasing.leased(lease)
        self._leases = max(self._leases, lease.number + 1)
        self._cursor = max(self._cursor, lease.cursor)
        self._opened += lease.opens
        if lease.request is not None:
            self._answered.add(lease.request)

    # ------------------------------------------------------------------------------------------------- decisions

    @property
    def room(self) -> int:
        """How many groups may be opened for training."""
        batch = self.settings.batch
        return ((batch.max_lag + 1) * batch.groups - self.batching.unpublished(self.published)
                - len(self.batching.candidates) - self.leasing.open_groups(Purpose.TRAIN))  # fmt: skip

    @property
    def exhausted(self) -> bool:
        """The task source has ended and no group of it is open."""
        return self._source.at(self._cursor) is None and not self.leasing.open_groups(Purpose.TRAIN)

    @property
    def finished(self) -> bool:
        """Nothing more will be decided for training, and all that was has been published."""
        return self.exhausted and not self.batching.candidates and self.published >= self.batching.batch

    def stall(self) -> Stall | None:
        """The part of the run that stands still, where a warning or the error is due. Ask after `decide`."""
        if self.finished:
            return None
        return self._stalls.look(self.leasing.clock.now_ms, self.standing(),
                                 round(self.settings.rollout.no_progress_s * 1000))  # fmt: skip

    def standing(self) -> Standing:
        held, oldest = self.leasing.held()
        reporting, offering = self.leasing.reporting()
        wanted = sum(len(group.waiting) for group in self.leasing.waiting())
        if self.room > 0 and self._source.at(self._cursor) is not None:
            wanted += self.room * self.settings.spec().slots
        return Standing(self.batching.committed, self.published, self.batching.batch, wanted, held, oldest, reporting,
                        offering, self.leasing.owed())  # fmt: skip

    def decide(self, now_ms: int) -> Decision:
        """What the news since the last call call for. Raises TooUniform, NoProgress, TasksExhausted."""
        decision = Decision()
        if not self._news:
            return decision
        self._news = False
        for ended in self.leasing.due():
            decision.tasks.append(ended)
            decision.trajectories += self.leasing.lease_ended(ended)
        decision.batches = self.batching.decide(self.settings, self._settings_at, now_ms, last=self.exhausted,
                                                open_since=self.leasing.oldest_versions(Purpose.TRAIN))  # fmt: skip
        if self.published >= 0:
            self._lease_waiting(decision)
            self._answer(decision)
            self._open_groups(decision)
        return decision

    def _lease_waiting(self, decision: Decision) -> None:
        for group in self.leasing.waiting():
            opening = group.opening
            for worker, incarnation, slots in self.leasing.place(group.waiting, group):
                lease = replace(opening, number=self._leases, opens=False, worker=worker, incarnation=incarnation,
                                min_version=self.published if opening.version is None else opening.version,
                                assignments=self.leasing.next_attempts(group, slots))  # fmt: skip
                decision.lease(lease)
                self._leased(lease)

    def _answer(self, decision: Decision) -> None:
        waiting, self._requests = self._requests, deque()
        for request in waiting:
            if (again := self.leasing.asked_again(request)) is not None:
                self._lease_again(decision, request, *again)
                continue
            trains = request.purpose == Purpose.TRAIN
            task = self._source.at(self._cursor) if request.task is None else self._source.find(request.task)
            if task is None:
                continue  # the producer's own time limit tells it
            if trains and self.room <= 0:
                self._requests.append(request)
                continue
            cursor = self._cursor + (request.task is None)
            spec = requested_spec(self.settings, request.size, request.attempts)
            lease = Lease(f"g{self._opened:08d}", self._leases, True, False, request.worker, request.incarnation,
                          request.purpose, self.published if request.version is None else request.version,
                          tuple(Assignment(slot, 0) for slot in range(spec.slots)), spec, task, cursor,
                          request.request, request.version)  # fmt: skip
            decision.lease(lease)
            self._leased(lease)

    def _lease_again(self, decision: Decision, request: LeaseRequest, group: OpenGroup, slots: list[int]) -> None:
        opening = group.opening
        lease = replace(opening, number=self._leases, opens=False, worker=request.worker,
                        incarnation=request.incarnation, request=request.request,
                        min_version=self.published if opening.version is None else opening.version,
                        assignments=self.leasing.next_attempts(group, slots))  # fmt: skip
        decision.lease(lease)
        self._leased(lease)

    def _open_groups(self, decision: Decision) -> None:
        spec = self.settings.spec()
        while self.room > 0 and self.leasing.free > 0:
            task = self._source.at(self._cursor)
            if task is None:
                return
            self._open_group(decision, task, spec)

    def _open_group(self, decision: Decision, task: Task, spec: GroupSpec) -> None:
        name, opens = f"g{self._opened:08d}", True
        for worker, incarnation, slots in self.leasing.place(list(range(spec.slots))):
            lease = Lease(name, self._leases, opens, False, worker, incarnation, Purpose.TRAIN, self.published,
                          tuple(Assignment(slot, 0) for slot in slots), spec, task, self._cursor + opens,
                          None)  # fmt: skip
            decision.lease(lease)
            self._leased(lease)
            opens = False


def requested_spec(settings: RunSettings, size: int | None, attempts: int = 1) -> GroupSpec:
    """The rules of a group that a producer asked for: whoever asks runs its slots, so often each."""
    spec = settings.spec()
    size = size or spec.group_size
    survivors = min(settings.rollout.min_survivors or math.ceil(size / 2), size)
    return replace(spec, group_size=size, reserves=0, max_attempts=max(1, attempts), min_survivors=survivors)

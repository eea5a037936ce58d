"""The worker: runs the slots that a lease names for this incarnation, and nothing else.

One thread drives everything in turn: leases in, prompts from the environment host, slots that the scheduler lets begin,
one engine step, spans out, verdicts in, weights between steps, a heartbeat each second. So a heartbeat means that the
loop itself is alive. The incarnation is new at each start, and the end of `tasks` is sought before the first heartbeat:
an older lease can't be taken up.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from headrace.schemas.errors import BlobError, EngineError, RecordTooLarge, UndecodableRecord
from headrace.schemas.events import Event, HandBack, Heartbeat, Lease, LeaseEnded
from headrace.schemas.outcomes import (
    REASON_BLOB_FAILED,
    REASON_BUDGET_SPENT,
    REASON_ENGINE_LOST,
    REASON_ENVIRONMENT_FAILED,
    REASON_FENCED,
    REASON_HANDED_BACK,
    REASON_LENGTH,
    REASON_OTHER_VERSION,
    REASON_PROMPT_TOO_LONG,
    REASON_RECORD_TOO_LARGE,
    REASON_STOP,
    REASON_WEIGHTS,
    Boundary,
    Outcome,
    Purpose,
    Source,
)
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import FLEET, TASKS, TRAJECTORIES, WEIGHTS, RunTopics
from headrace.schemas.waiting import Idle
from headrace.streams.log.blobs import open_blobs
from headrace.streams.log.direct import Following, HandedOver
from headrace.streams.log.policy import Schemas
from headrace.streams.log.reader import Reader, end_offsets

from .engines import Engine, Progress, Sampling
from .engines.opening import EngineChoice, open_engine
from .environments.host import EnvironmentHost, Failed, Reply
from .episodes import Attempt, EpisodeWriter
from .jobs import Job, Phase, budget_of
from .outbox import Outbox
from .receiver import Receiver
from .refusals import Refusals
from .scheduler import EngineLoad, Pace, Scheduler, SlotKey
from .tooling import SandboxChoice, open_tools
from .toolloop import Next, ToolLoop
from .updating import Fence, UpdatePolicy

log = logging.getLogger("headrace.worker")

HEARTBEAT_S = 1.0
IDLE_WAIT_S = 0.02  # how long an idle worker waits for a lease before it looks elsewhere
OUTAGE_S = 600.0  # a broker that is away so long ends the process; until then the worker holds still
DRAIN_S = 30.0


class Worker:
    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, engine: Engine,
                 receiver: Receiver, *, name: str, incarnation: str, capacity: int,
                 tools: ToolLoop | None = None) -> None:  # fmt: skip
        self._topics, self._settings = topics, settings
        self._engine, self._receiver = engine, receiver
        self.name, self.incarnation = name, incarnation
        self._capacity = capacity
        self._outbox = Outbox(kafka)
        self._refusals = Refusals()
        blobs = open_blobs(settings.log, topics.run)
        self._put_blob = None if blobs is None else blobs.put
        self._tools = tools  # where the environment has any
        self._host = EnvironmentHost(settings.tasks.source) if tools is None else tools.sessions
        self._asked: dict[int, list[Job]] = {}  # by request number of the environment host
        self._decoding: dict[str, Job] = {}  # by request of the engine
        self._jobs: dict[SlotKey, Job] = {}  # all of them
        self._scheduler = Scheduler(capacity, engine.capacity)
        self._pace = Pace()
        self._update = UpdatePolicy.of(settings.weights)
        self._fence = Fence(settings.weights.fence_after_s)
        self._fingerprint = engine.fingerprint()
        self._gpus = int(self._fingerprint.get("device", "").startswith("cuda"))
        self._counters: dict[str, float] = collections.defaultdict(float)
        self._last_beat = 0.0
        self._draining = False
        name_of_tasks = topics.name(TASKS)
        self._schemas = Schemas(kafka, topics)
        self._tasks = Reader(kafka, {(name_of_tasks, 0): end_offsets(kafka, name_of_tasks)[0]})

    # ------------------------------------------------------------------------------------------------- the loop

    def run(self, stop: threading.Event) -> None:
        log.info("worker %s serves version %d (incarnation %s)", self.name, self._engine.version, self.incarnation[:8])
        while not stop.is_set():
            self.turn()
        self._drain()

    def turn(self) -> None:
        """Everything once."""
        began = time.monotonic()
        self._beat(began)
        # A worker that only waits (for leases, for weights, for its environment) must not spin.
        self._take_leases(0.0 if self._decoding or self._asked else IDLE_WAIT_S)
        self._take_replies(0.0 if self._decoding or not self._asked else IDLE_WAIT_S)
        applied_s = self._take_weights()
        self._begin()
        progress = self._engine.step()
        for one in progress:
            self._progressed(one)
        if progress:
            self._receiver.sampled(progress[-1].version)
        self._outbox.poll()
        self._take_refusals()
        now = time.monotonic()
        for job in self._decoding.values():
            job.writer.flush_older(now)
        reason = None if progress else self._idle_reason()
        self._counters["busy_s" if reason is None else f"idle_{reason}_s"] += now - began - applied_s
        self._counters[f"idle_{Idle.WEIGHTS}_s"] += applied_s
        self._counters["gpu_s"] += self._gpus * (now - began)

    def _idle_reason(self) -> Idle | None:
        """Why the engine had nothing to show; None where it is at work. Whether `no_requests` is the pacing's doing is
        for the reader of the log to say: a worker doesn't know what the coordinator has room for."""
        if self._decoding:  # an engine whose replicas are elsewhere says whether it has any
            return Idle.UNROUTED if getattr(self._engine, "unrouted", False) else None
        if not self._jobs:
            return Idle.NO_REQUESTS
        if self._tools is not None and not self._tools.sessions.free:
            return Idle.ENVIRONMENT
        return Idle.WEIGHTS if any(job.phase is Phase.READY for job in self._jobs.values()) else Idle.ENVIRONMENT

    def _drain(self) -> None:
        """Hand back what hasn't begun, finish what has, within a bound."""
        self._draining = True
        for job in [job for job in self._jobs.values() if not job.begun]:
            self._hand_back(job)
        end = time.monotonic() + DRAIN_S
        while self._jobs and time.monotonic() < end:
            self.turn()
        for job in list(self._jobs.values()):
            self._hand_back(job)
        self.close()

    def close(self) -> None:
        self._host.close()
        self._tasks.close()
        unsent = self._outbox.close()
        if unsent.events:
            log.error("worker %s ends with %s: the broker doesn't take them", self.name, unsent)

    # ------------------------------------------------------------------------------------------------- leases

    def _take_leases(self, wait_s: float) -> None:
        for record in self._tasks.poll(200, wait_s):
            try:
                event = self._schemas.decode(record.value)
            except UndecodableRecord as error:
                log.error("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
                continue
            if isinstance(event, Lease) and event.incarnation == self.incarnation:
                self._take(event)
            elif isinstance(event, LeaseEnded) and event.incarnation == self.incarnation:
                for job in list(self._jobs.values()):
                    own = (job.attempt.group, job.lease.number) == (event.group, event.number)
                    if own and job.attempt.slot in event.slots:
                        self._forget(job)

    def _take(self, lease: Lease) -> None:
        jobs = []
        for assignment in lease.assignments:
            attempt = Attempt(lease.group, assignment.slot, assignment.attempt, self.incarnation)
            writer = EpisodeWriter(attempt, self._send, self._settings.log.span_tokens, self._put_blob)
            job = Job(lease, attempt, writer, budget_of(lease))
            self._jobs[job.key] = job
            self._scheduler.leased(job.key, reserve=assignment.slot >= lease.spec.group_size)
            if self._draining:
                self._hand_back(job)
            else:
                jobs.append(job)
        if jobs:
            # Asked once for all siblings, so that they begin together and the engine prefills their prompt once.
            self._asked[self._host.ask_messages(lease.task, self._settings.rollout.score_timeout_s)] = jobs

    def _hand_back(self, job: Job, reason: str = REASON_HANDED_BACK) -> None:
        lease = job.lease
        self._forget(job)
        self._put_fleet(HandBack(self.name, self.incarnation, lease.group, lease.number, (job.attempt.slot,),
                                 reason))  # fmt: skip

    def _forget(self, job: Job, lost: bool = False) -> None:
        self._engine.cancel(job.request)
        self._decoding.pop(job.request, None)
        self._jobs.pop(job.key, None)
        self._scheduler.ended(job.key, lost)
        if self._tools is not None:
            self._tools.sessions.end(job.name)
        if not job.writer.ended:
            job.writer.abandon()

    # --------------------------------------------------------------------------------------------- environment

    def _take_replies(self, wait_s: float) -> None:
        for reply in self._host.poll(wait_s):
            jobs = [job for job in self._asked.pop(reply.request) if job.key in self._jobs]
            prompt = None if reply.messages is None else self._engine.encode_chat(reply.messages)
            for job in jobs:
                if prompt is not None:
                    job.prompt, job.phase = prompt, Phase.READY
                elif self._tools is not None and reply.opening is not None:
                    try:
                        self._tools.prompted(job, reply.opening)
                    except ValueError as error:
                        self._failed_to_start(job, Failed(REASON_ENVIRONMENT_FAILED, Boundary.ENVIRONMENT, str(error)))
                elif job.phase is Phase.PROMPT:
                    assert reply.failed is not None
                    self._failed_to_start(job, reply.failed)
                elif self._tools is not None:
                    self._goes_on(job, self._tools.answered(job, reply))
                else:
                    self._judged(job, reply)

    def _failed_to_start(self, job: Job, failed: Failed) -> None:
        self._start_writer(job)
        self._end(job, Outcome.INFRA_FAILURE, failed.reason, Boundary(failed.boundary), text=failed.message)
        self._forget(job, lost=True)

    def _goes_on(self, job: Job, then: Next) -> None:
        """As the tool loop says: its session was asked something, it is over, or its next turn begins."""
        assert self._tools is not None
        if isinstance(then, int):
            self._asked[then] = [job]
        elif then is None:
            self._ask(job)
        else:
            ending, verdict, lost = then.ending, then.verdict, then.ending.outcome is Outcome.INFRA_FAILURE
            timings = job.scored(time.monotonic()) if job.phase is Phase.SCORING else job.timings_ms
            reason = job.stop_reason if ending.reason == REASON_STOP else ending.reason
            self._tools.record_end(job, then.facts)
            self._end(job, ending.outcome, reason, ending.boundary,
                      reward=verdict.reward if verdict else None if lost else 0.0,
                      rewards=verdict.components if verdict else {}, text=then.error if lost else self._text(job),
                      timings_ms=timings)  # fmt: skip
            self._forget(job, lost=lost)

    def _judged(self, job: Job, reply: Reply) -> None:
        text, timings = self._text(job), job.scored(time.monotonic())
        if reply.failed is not None:
            self._end(job, Outcome.INFRA_FAILURE, reply.failed.reason, Boundary(reply.failed.boundary), text=text,
                           timings_ms=timings)  # fmt: skip
        else:
            assert reply.verdict is not None
            verdict = reply.verdict
            outcome = Outcome.MODEL_SUCCESS if verdict.success else Outcome.MODEL_FAILURE
            self._end(job, outcome, job.stop_reason, Boundary.NONE if verdict.success else Boundary.MODEL,
                           reward=verdict.reward, rewards=verdict.components, text=text,
                           timings_ms=timings)  # fmt: skip
        self._forget(job, lost=reply.failed is not None)

    def _end(self, job: Job, outcome: Outcome, reason: str, boundary: Boundary, **facts: Any) -> None:
        try:
            job.writer.end(outcome, reason, boundary, **facts)
        except RecordTooLarge as error:
            job.writer.end(Outcome.INFRA_FAILURE, REASON_RECORD_TOO_LARGE, Boundary.PRODUCER, text=str(error))
        except BlobError as error:
            job.writer.end(Outcome.INFRA_FAILURE, REASON_BLOB_FAILED, Boundary.PRODUCER, text=str(error))

    def _text(self, job: Job) -> str:
        return self._engine.decode(job.tokens)

    # -------------------------------------------------------------------------------------------------- engine

    def _take_weights(self) -> float:
        """Seconds that it took to apply what has come."""
        began, ready = time.monotonic(), self._receiver.ready
        if ready and not self._reserved and self._update.applies(len(self._decoding)):
            if self._update.aborts:
                for job in list(self._decoding.values()):
                    self._hand_back(job, REASON_WEIGHTS)
            clocks, spent = self._receiver.apply_ready(self._engine, self._recompute), True
        else:
            clocks, spent = self._receiver.take_clocks(), False
        for clock in clocks:
            self._put_fleet(clock)
        return time.monotonic() - began if spent else 0.0

    @property
    def _reserved(self) -> bool:
        """Pinned to the version that is served: what has come is applied afterwards."""
        return any(job.lease.version == self._engine.version for job in self._jobs.values())

    def _recompute(self) -> None:
        """Preempt what decodes, where caches are cleared: it goes on from its tokens, on keys of the new weights."""
        if not self._update.recomputes:
            return
        for job in list(self._decoding.values()):
            self._engine.cancel(job.request)
            del self._decoding[job.request]
            job.preempted, job.cache_version = job.preempted + 1, None
            self._ask(job)

    def _begin(self) -> None:
        """Let slots begin, as the scheduler says: each only at a version that its lease allows."""
        for job in [job for job in self._jobs.values() if not job.begun and job.lease.version is not None]:
            if self._engine.version > (job.lease.version or 0):
                self._hand_back(job, REASON_OTHER_VERSION)  # served weights never go back
        active, capacity = self._engine.active, self._engine.capacity
        self._scheduler.observe(EngineLoad(min(active, capacity), max(0, active - capacity), capacity),
                                None if self._tools is None else self._tools.sessions.free)  # fmt: skip
        for key in self._scheduler.starts(self._may_begin):
            self._submit(self._jobs[key])

    def _may_begin(self, key: SlotKey) -> bool:
        job = self._jobs[key]
        may = self._fence.reason is None and self._update.begins(self._receiver.ready and not self._reserved)
        return may and job.phase is Phase.READY and self._engine.version >= job.lease.min_version

    def _submit(self, job: Job) -> None:
        job.sampling = self._start_writer(job)
        if self._ask(job):
            job.submitted, job.phase = time.monotonic(), Phase.DECODING
            if self._tools is None:
                job.writer.context(job.prompt, Source.PROMPT)
            else:
                self._tools.begin(job)

    def _ask(self, job: Job) -> bool:
        """Whether the engine takes what the job asks for now."""
        try:
            self._engine.submit(job.asks(self._engine.eos_ids, self._settings.model.max_length))
        except EngineError as error:
            self._end(job, Outcome.INFRA_FAILURE, REASON_PROMPT_TOO_LONG, Boundary.ENVIRONMENT, text=str(error))
            self._forget(job, lost=True)
            return False
        self._decoding[job.request] = job
        return True

    def _start_writer(self, job: Job) -> Sampling:
        rollout, a = self._settings.rollout, job.attempt
        words = f"{self._settings.seed}/{a.group}/{a.slot}/{a.attempt}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        sampling = Sampling(rollout.temperature, job.lease.spec.max_tokens, seed,
                            greedy=job.lease.purpose == Purpose.EVAL)  # fmt: skip
        job.writer.start(worker=self.name, engine=self._fingerprint,
                         temperature=0.0 if sampling.greedy else sampling.temperature,
                         max_new_tokens=sampling.max_new_tokens, seed=seed)  # fmt: skip
        return sampling

    def _progressed(self, one: Progress) -> None:
        job = self._decoding.get(one.request_id)
        if job is None:
            return
        job.first_token = job.first_token or time.monotonic()
        if len(one.token_ids):
            if job.cache_version is None:
                job.cache_version = one.version
                job.writer.cached(one.version)
            job.writer.model(one.token_ids, one.logprobs, one.version)
        job.tokens += one.token_ids.tolist()
        self._counters["sampled_tokens"] += len(one.token_ids)
        if one.finished == "lost":
            self._end(job, Outcome.INFRA_FAILURE, REASON_ENGINE_LOST, Boundary.ENGINE, text=self._text(job))
            self._forget(job, lost=True)
            return
        now, reason = time.monotonic(), REASON_STOP if one.finished == "stop" else REASON_LENGTH
        if one.finished is None:
            most = job.budget.model_left_s()
            if len(job.tokens) * self._pace.token_s < most or now - job.first_token < most:
                return
            self._engine.cancel(job.request)  # its model's time is spent: it is judged as it stands
            reason = REASON_BUDGET_SPENT
        job.writer.timed(job.decoded(now, reason, self._pace))
        end = job.writer.cut(reason)
        job.writer.flush()
        del self._decoding[job.request]
        if self._tools is not None:
            self._goes_on(job, self._tools.turn_over(job, self._text(job), reason, end))
            return
        assert isinstance(self._host, EnvironmentHost)
        number = self._host.ask_score(job.lease.task, self._text(job), self._settings.rollout.score_timeout_s)
        self._asked[number] = [job]

    # ---------------------------------------------------------------------------------------------------- out

    def _beat(self, now: float) -> None:
        if now - self._last_beat < HEARTBEAT_S:
            return
        self._last_beat = now
        fenced = self._fenced(now)
        free = 0 if self._draining or fenced else max(0, self._capacity - len(self._jobs))
        self._put_fleet(Heartbeat(self.name, self.incarnation, self._engine.version,
                                  0 if self._draining else self._capacity, free, not self._draining,
                                  json.dumps(self._fingerprint, sort_keys=True), dict(self._counters),
                                  fenced))  # fmt: skip

    def _fenced(self, now: float) -> str | None:
        """Why this replica may take no work now; what hasn't begun is handed back to where it may run."""
        before, receiver = self._fence.reason, self._receiver
        waits = self._reserved or receiver.ready
        reason = self._fence.observe(self._engine.version, receiver.newest, receiver.refusals, waits, now)
        if reason != before and (reason is None or before is None):
            log.warning("worker %s %s", self.name, f"is fenced: {reason}" if reason else "has caught up")
        if reason is not None:
            for job in [job for job in self._jobs.values() if not job.begun and job.lease.version is None]:
                self._hand_back(job, REASON_FENCED)
        return reason

    def _take_refusals(self) -> None:
        """What the broker refuses for good ends its attempt: the log gets an end, never a silent gap."""
        for failure in self._outbox.take_failures():
            log.error("the broker refused a %s of %s for good: %s", failure.kind, failure.attempt or failure.key,
                      failure.reason)  # fmt: skip
            end = self._refusals.end_for(failure)
            if end is None:
                continue
            for job in [job for job in self._jobs.values() if job.attempt == failure.attempt]:
                self._forget(job)
            self._send(end.group, end)

    def _put_fleet(self, event: Event) -> None:
        self._outbox.put(self._topics.name(FLEET), self.name, event, wait_s=OUTAGE_S)

    def _send(self, key: str, event: Event) -> None:
        self._outbox.put(self._topics.name(TRAJECTORIES), key, event, wait_s=OUTAGE_S)


def run_worker(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
               choice: EngineChoice, *, name: str | None = None, threads: int | None = None,
               weights_socket: str | None = None, sandboxes: SandboxChoice | None = None) -> None:  # fmt: skip
    """Load the model, catch up with the newest published version, then serve leases until `stop`.

    As many sequences as decode at once may wait, so that the engine never idles while the coordinator learns of a free
    slot. Raises ModelError, WeightsRefused, ReplicaLost, EnvironmentFailed.
    """
    import torch

    from .engines.served import ModelFolder

    if threads:
        torch.set_num_threads(threads)
    model = settings.model
    name, incarnation = name or _default_name(), uuid.uuid4().hex
    tools = open_tools(settings, sandboxes or SandboxChoice())
    try:
        engine = open_engine(model, choice)
    except BaseException:
        if tools is not None:
            tools.sessions.close()
        raise
    ahead = HandedOver() if weights_socket else None
    following = Following(weights_socket, topics.name(WEIGHTS), ahead) if weights_socket and ahead else None
    receiver = Receiver(kafka, topics, worker=name, incarnation=incarnation,
                        initial=lambda: ModelFolder(model.path, model.dtype, model.lora).bits, ahead=ahead)  # fmt: skip
    try:
        if not receiver.load(engine, stop):
            return
        worker = Worker(kafka, topics, settings, engine, receiver, name=name, incarnation=incarnation,
                        capacity=2 * engine.capacity, tools=tools)  # fmt: skip
        worker.run(stop)
    finally:
        receiver.close()
        if following is not None:
            following.close()
        if tools is not None:
            tools.sessions.close()
        engine.close()


def _default_name() -> str:
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"

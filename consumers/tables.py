"""What a run consists of, as rows: episodes, groups, batches, versions, replicas, tasks.

Pure functions over records of the small topics. A row is a dict of plain values in the order in which people want to
see them; `id` comes first.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from headrace.schemas.events import (
    AttemptEnded,
    Disposed,
    GroupClosed,
    Heartbeat,
    Lease,
    Manifest,
    Publication,
    PublicationClock,
    RunCreated,
    SlotFate,
    Suspicion,
    Version,
)
from headrace.schemas.outcomes import Closure, Disposition
from headrace.schemas.suspicion import Answers
from headrace.schemas.topics import BATCHES, FLEET, GROUPS, POLICY, TASKS

from .facts import Fact, Failures, read_facts
from .health import Rate, task_set
from .proofs import max_lag
from .source import LogSource

Row = dict[str, Any]
Facts = Sequence[Fact[Any]]
SMALL = (POLICY, TASKS, FLEET, BATCHES, GROUPS)


def read_small(source: LogSource) -> list[Fact[Any]]:
    """Every record of the small topics. What can't be decoded is the ledger's matter: left out."""
    return SmallTopics().read(source)


class SmallTopics:
    """For who reads a run again and again as it goes on: each record is read once, and kept."""

    def __init__(self) -> None:
        self._facts: dict[tuple[str, int], list[Fact[Any]]] = {}
        self._read: dict[tuple[str, int], int] = {}

    def read(self, source: LogSource) -> list[Fact[Any]]:
        """What `read_small` says of this source; one that is newer than the last."""
        ignored = Failures()
        for topic in SMALL:
            for p in range(source.partitions(topic)):
                known = self._facts.setdefault((topic, p), [])
                known += read_facts(source, topic, p, ignored, self._read.get((topic, p), 0))
                self._read[topic, p] = source.end(topic, p)
        return [fact for facts in self._facts.values() for fact in facts]


def fates(facts: Facts) -> dict[str, tuple[str, int | None, int | None]]:
    """(disposition, batch, lag) of the candidates that have one."""
    out: dict[str, tuple[str, int | None, int | None]] = {}
    for event in (fact.event for fact in facts):
        if isinstance(event, Manifest):
            out |= {ref.group: (Disposition.BATCHED, event.batch, ref.max_lag) for ref in event.groups}
        elif isinstance(event, Disposed):
            out[event.group] = (event.disposition, None, None)
    return out


def episodes(facts: Facts) -> list[Row]:
    """The last attempt of each slot of closed groups, and each ended attempt of open ones. `suspicious`: the signs that
    its reward was not earned, with what shows them, by all that the run has seen since."""
    rows = []
    closed = {fact.event.group: fact.event for fact in facts if isinstance(fact.event, GroupClosed)}
    answers = Answers.of(closed.values())
    for closure in closed.values():
        for fate in closure.slots:
            row = _episode(closure.group, fate, closure.closure, fate.counted, _span(fate))
            said = "; ".join(f"{one.sign}: {one.evidence}" for one in suspicions(fate, answers))
            rows.append(row | {"suspicious": said or None})
    for event in (fact.event for fact in facts):
        if isinstance(event, AttemptEnded) and event.group not in closed:
            rows.append(_episode(event.group, event, "open", False, ""))
    return sorted(
        rows, key=lambda row: (row["id"].rpartition("/")[0], int(row["id"].rpartition("/")[2]), row["attempt"])
    )


def _episode(group: str, of: SlotFate | AttemptEnded, closure: str, counted: bool, versions: str) -> Row:
    return {
        "id": f"{group}/{of.slot}", "attempt": of.attempt, "outcome": of.outcome, "reason": of.reason,
        "boundary": of.boundary, "reward": of.reward, "counted": counted, "tokens": of.model_tokens,
        "versions": versions, "closure": closure, "suspicious": None,
    }  # fmt: skip


def suspicions(fate: SlotFate, answers: Answers) -> tuple[Suspicion, ...]:
    """Those of its group's closure, and that its answer passed in too many tasks: which shows with time."""
    again = answers.suspicion(fate)
    return fate.suspicions if again is None else (*fate.suspicions, again)


def _span(fate: SlotFate) -> str:
    versions = [run.version for run in fate.versions]
    return "" if not versions else f"{min(versions)}" if len(set(versions)) == 1 else f"{min(versions)}-{max(versions)}"


def groups(facts: Facts) -> list[Row]:
    """Every group of the run and its fate."""
    rows: dict[str, Row] = {}
    decided = fates(facts)
    for fact in facts:
        if isinstance(fact.event, Lease):
            rows.setdefault(fact.event.group, {"id": fact.event.group, "closure": "open", "disposition": "open",
                                               "task": fact.event.task.id})  # fmt: skip
    for fact in facts:
        if isinstance(event := fact.event, GroupClosed):
            waits = ("open", None, None)
            fate = (
                decided.get(event.group, waits) if event.closure == Closure.CANDIDATE else (event.closure, None, None)
            )
            rewards = [slot.reward for slot in event.slots if slot.counted and slot.reward is not None]
            rows[event.group] = {
                "id": event.group,
                "closure": event.closure,
                "disposition": fate[0],
                "batch": fate[1],
                "lag": fate[2],
                "reward": sum(rewards) / len(rewards) if rewards else None,
                "counted": sum(slot.counted for slot in event.slots),
                "slots": len(event.slots),
                "tokens": sum(slot.model_tokens for slot in event.slots),
                "open_s": event.open_ms / 1000,
                "held_up_by": event.held_up_by,
                "task": event.task,
                "at": str(fact),
            }
    return list(rows.values())


def batches(facts: Facts) -> list[Row]:
    """Every manifest, with the version that it was committed as."""
    committed = {fact.event.batch: fact.event.version for fact in facts if isinstance(fact.event, Version)}
    return [
        {"id": event.batch, "target": event.target, "version": committed.get(event.batch), "groups": len(event.groups),
         "tokens": sum(ref.model_tokens for ref in event.groups), "max_lag": max_lag(event),
         "closures": event.closures_since, "decided_ms": event.decided_ms, "at": str(fact)}
        for fact in facts if isinstance(event := fact.event, Manifest)
    ]  # fmt: skip


def versions(facts: Facts) -> list[Row]:
    """`ratio`: bytes of all weights to those of the delta. Times are those of the slowest replica: from the publication
    to its last fetched chunk and to its first token, and its pause."""
    published: dict[int, list[Publication]] = defaultdict(list)
    clocks: dict[int, list[PublicationClock]] = defaultdict(list)
    width = 0
    for event in (fact.event for fact in facts):
        if isinstance(event, Publication):
            published[event.version].append(event)
        elif isinstance(event, PublicationClock):
            clocks[event.version].append(event)
        elif isinstance(event, RunCreated):
            width = 4 if json.loads(event.settings)["model"].get("dtype", "bfloat16") == "float32" else 2
    rows = []
    for fact in facts:
        if isinstance(event := fact.event, Version):
            out, times = published[event.version], [_times(clock) for clock in clocks[event.version]]
            delta = next((one for one in out if one.kind == "delta" and one.size), None)
            rows.append({
                "id": event.version, "batch": event.batch if event.version else None,
                "trained": sum(count.trained for count in event.groups),
                "masked": sum(count.masked for count in event.groups), "rho": event.rho,
                "published": " ".join(one.kind for one in out) or None, "bytes": sum(one.size for one in out),
                "ratio": width * delta.elements / delta.size if delta else None,
                "changed": out[0].changed / out[0].elements if out and out[0].elements else None,
                "replicas": sum(clock.applied_ms is not None for clock in clocks[event.version]),
                **{name: max((s for one in times if (s := one[name]) is not None), default=None)
                   for name in ("fetch_s", "pause_s", "first_token_s")},
                "hash": event.served_hash.hex(), "committed_ms": event.committed_ms, "at": str(fact),
            })  # fmt: skip
    return rows


def _times(clock: PublicationClock | None) -> dict[str, float | None]:
    """Seconds of a version's way to one replica; None where it didn't get so far."""

    def between(begin: float | None, end: float | None) -> float | None:
        return None if begin is None or end is None else (end - begin) / 1000

    if clock is None:
        return dict.fromkeys(("fetch_s", "decode_s", "wait_s", "pause_s", "first_token_s"))
    return {
        "fetch_s": between(clock.published_ms, clock.fetched_ms),
        "decode_s": between(clock.fetched_ms, clock.decoded_ms),
        "wait_s": between(clock.decoded_ms, clock.paused_ms),
        "pause_s": between(clock.paused_ms, clock.resumed_ms),
        "first_token_s": between(clock.published_ms, clock.first_token_ms),
    }


def replicas(facts: Facts) -> list[Row]:
    """The newest heartbeat of each incarnation, newest last, with the clocks of the newest publication that it applied.
    `behind`: versions that are published and not served."""
    beats: dict[str, Fact[Heartbeat]] = {}
    clocks: dict[str, PublicationClock] = {}
    newest = -1
    for fact in facts:
        if isinstance(fact.event, Heartbeat):
            beats.pop(fact.event.incarnation, None)
            beats[fact.event.incarnation] = fact
        elif isinstance(fact.event, PublicationClock):
            clocks[fact.event.incarnation] = fact.event
        elif isinstance(fact.event, Publication):
            newest = max(newest, fact.event.version)
    rows = []
    for incarnation, fact in beats.items():
        beat, clock = fact.event, clocks.get(incarnation)
        rows.append({
            "id": incarnation, "worker": beat.worker, "version": beat.version, "behind": max(0, newest - beat.version),
            "state": "serving" if beat.fenced is None else f"fenced: {beat.fenced}", "free": beat.free,
            "capacity": beat.capacity, "managed": beat.managed, "tokens": beat.counters.get("sampled_tokens"),
            "busy_s": beat.counters.get("busy_s"), **_times(clock), "heard_ms": fact.timestamp_ms,
        })  # fmt: skip
    return rows


def tasks(facts: Facts) -> list[Row]:
    """Every task that was leased or closed, with what its groups came to. `solved`, `low`, `high`: share of counted
    episodes that are successes, with its interval; `newest`: the same, of the newest version that sampled any. `state`:
    see `health`."""
    leased = {fact.event.group: fact.event.task for fact in facts if isinstance(fact.event, Lease)}
    health = {one.task: one for one in task_set(facts).health()}
    count = Counter(task.id for task in leased.values())
    rows = []
    for task in {task.id: task for task in leased.values()}.values():
        one = health.get(task.id)
        rate = one.solved if one else Rate(0, 0)
        version = max(one.by_version, default=None) if one else None
        rows.append({
            "id": task.id, "source": task.source, "seed": task.seed, "groups": count[task.id],
            "closed": one.groups if one else 0, "episodes": rate.count, "reward": one.reward if one else None,
            "solved": rate.value, "low": rate.low if rate.count else None, "high": rate.high if rate.count else None,
            "version": version, "newest": one.by_version[version].value if one and version is not None else None,
            "state": one.state if one else None, "suspicious": one.suspicious if one else 0,
            "lost": one.lost if one else 0,
        })  # fmt: skip
    return rows


KINDS: dict[str, Callable[[Facts], list[Row]]] = {
    "episodes": episodes,
    "groups": groups,
    "batches": batches,
    "versions": versions,
    "replicas": replicas,
    "tasks": tasks,
}

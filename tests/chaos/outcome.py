"""What a run came to, and where two runs differ: closures with their counted slots, rewards and content hashes.

Which batch a group fell into, how often a slot was tried and where records lie may differ; what was decided may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.codec import decode
from headrace.schemas.events import Disposed, GroupClosed, Manifest
from headrace.schemas.outcomes import Closure
from headrace.schemas.topics import BATCHES, GROUPS, RunTopics
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range

SHOWN = 10  # differences of one kind


@dataclass(frozen=True, slots=True)
class Closed:
    task: str
    closure: str
    slots: tuple[tuple[int, str, str, float | None, int], ...]  # counted: number, outcome, reason, reward, tokens
    content_hash: str


@dataclass(frozen=True, slots=True)
class Outcome:
    groups: dict[str, Closed]
    closures: Counter[str]  # records of closure, by group
    fates: Counter[str]  # records that decide a candidate's fate, by group
    attempts: int  # slots counted that needed more than one


def outcome(kafka: Mapping[str, Any], topics: RunTopics) -> Outcome:
    groups: dict[str, Closed] = {}
    closures: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    again = 0
    for topic in (GROUPS, BATCHES):
        name = topics.name(topic)
        ends = end_offsets(kafka, name)
        for partition, begin in beginning_offsets(kafka, name).items():
            for record in read_range(kafka, name, partition, begin, ends[partition]):
                event = decode(record.value)
                if isinstance(event, GroupClosed):
                    closures[event.group] += 1
                    counted = [slot for slot in event.slots if slot.counted]
                    again += sum(slot.attempt > 0 for slot in counted)
                    groups[event.group] = Closed(
                        event.task, event.closure,
                        tuple((s.slot, s.outcome, s.reason, s.reward, s.model_tokens) for s in counted),
                        (event.content_hash or b"").hex(),
                    )  # fmt: skip
                elif isinstance(event, Manifest):
                    fates.update(ref.group for ref in event.groups)
                elif isinstance(event, Disposed):
                    fates[event.group] += 1
    return Outcome(groups, closures, fates, again)


def lost(calm: Outcome, disturbed: Outcome) -> list[str]:
    """Groups without an end: no closure, or a candidate without a fate."""
    candidates = [name for name, one in disturbed.groups.items() if one.closure == Closure.CANDIDATE]
    return [*(f"{name}: no closure" for name in calm.groups.keys() - disturbed.groups.keys()),
            *(f"{name}: a candidate without a fate" for name in candidates if not disturbed.fates[name])]  # fmt: skip


def doubled(disturbed: Outcome) -> list[str]:
    """Groups with more than one end, or more than one fate."""
    return [*(f"{name}: {n} closures" for name, n in disturbed.closures.items() if n > 1),
            *(f"{name}: {n} fates" for name, n in disturbed.fates.items() if n > 1)]  # fmt: skip


def differences(calm: Outcome, disturbed: Outcome) -> list[str]:
    """Groups that ended differently, or that only the disturbed run has."""
    out = [f"{name}: only in the disturbed run" for name in disturbed.groups.keys() - calm.groups.keys()]
    for name in sorted(calm.groups.keys() & disturbed.groups.keys()):
        if calm.groups[name] != disturbed.groups[name]:
            out.append(f"{name}: {calm.groups[name]}\n    disturbed: {disturbed.groups[name]}")
    return out

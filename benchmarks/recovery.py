"""What an assembler that is killed costs, and what it holds in memory.

*Recovery*: groups are open, each with every sibling at work and none at its end, when the assembler is killed. One more
group is then finished, and a new assembler started: the time from its start (the process's, Python and all) until a
read-committed reader of `groups` sees that closure. It has to fold again from the oldest open group on.

*Memory*: what each open group adds to the process; and the resident memory while groups are opened, sampled and closed,
as candidates that no trainer ever takes. Those lie in `samples`, so memory has to stay flat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.schemas.codec import decode
from headrace.schemas.events import GroupClosed
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import GROUPS, RunTopics
from headrace.streams.log.reader import Reader, beginning_offsets, end_offsets

from . import harness
from .harness import CannotMeasure, Result
from .streams_load import SIBLINGS, Rollouts, create, role, settings

TOKENS = 8  # of each open sibling: here the groups are many, not their tokens
GIVE_UP_S = 1800.0


def measure(options: argparse.Namespace, result: Result) -> None:
    counts = (100, 1000) if options.quick else (1000, 10_000, 100_000)
    with harness.temporary_broker() as broker:
        kafka = harness.kafka_of(broker)
        base = 0
        times = {}
        for count in (0, *counts):
            times[count], resident = _recovery(kafka, f"recovery-{count}", count)
            subject = f"{count:,} open groups"
            result.row("killed to first new output", subject, times[count], "s")
            if count == 0:
                base = resident
            else:
                result.row("memory", subject, (resident - base) / count, "bytes per group")
        for few, many in zip(counts, counts[1:], strict=False):
            grown = (times[many] - times[few]) / (many - few) * 1000
            result.row("growth", f"from {few:,} to {many:,} open groups", grown, "s per 1,000 groups")
        tokens = 400_000 if options.quick else 10_000_000
        curve = _resident(kafka, "resident", tokens)
        for at, resident in curve:
            result.row("resident", f"{at / 1e6:.2f} M tokens", resident / 2**20, "MiB")
        quarter = max(1, len(curve) // 4)
        second, last = (float(np.mean([r for _, r in part])) for part in (curve[quarter : 2 * quarter],
                                                                          curve[-quarter:]))  # fmt: skip
        result.at_most("resident memory: last quarter over the second", last / second, 1.1)
    result.note(f"Groups of {SIBLINGS}; a lease, {SIBLINGS} starts and {SIBLINGS} spans of {TOKENS} tokens each. The "
                f"process without an open group takes {base / 2**20:.0f} MiB.")  # fmt: skip


def _finish(rollouts: Rollouts, group: str, rules: RunSettings) -> None:
    rollouts.open(group, rules)
    rollouts.all_but_the_end(group, TOKENS)
    for slot in range(SIBLINGS):
        rollouts.end(group, slot, 2)


def _recovery(kafka: Mapping[str, Any], run: str, count: int) -> tuple[float, int]:
    """Seconds until the first new output, and the resident bytes of the killed one."""
    rules = settings()
    topics, bootstrap, partitions = create(kafka, run, rules), str(kafka["bootstrap.servers"]), rules.log.partitions
    rollouts = Rollouts(kafka, topics)
    with role("assembler", run, bootstrap) as first:
        with _closures(kafka, topics) as reader:
            for number in range(count):
                rollouts.open(f"g{number}", rules)
                rollouts.all_but_the_end(f"g{number}", TOKENS)
            # One group in each partition that ends: what was read until then is settled, and the fold has seen it all.
            missing, number = set(range(partitions)), 0
            end = time.monotonic() + GIVE_UP_S
            while missing:
                _finish(rollouts, f"settled-{number}", rules)
                rollouts.flush()
                number += 1
                seen: set[int] = set()
                while not seen:
                    if not first.alive() or time.monotonic() > end:
                        raise CannotMeasure(f"the assembler doesn't get on:\n{first.output()[-2000:]}")
                    seen = {r.partition for r in reader.poll(1000, 0.1) if isinstance(decode(r.value), GroupClosed)}
                missing -= seen
        resident = harness.rss_of(first.pid)
        first.signal(9)
        first.wait()
    _finish(rollouts, "new", rules)
    rollouts.flush()
    with _closures(kafka, topics, end_offsets(kafka, topics.name(GROUPS))) as reader:
        began = time.monotonic()
        with role("assembler", run, bootstrap) as second:
            while not any(isinstance(decode(r.value), GroupClosed) for r in reader.poll(1000, 0.02)):
                if not second.alive() or time.monotonic() - began > GIVE_UP_S:
                    raise CannotMeasure(f"the assembler doesn't get on:\n{second.output()[-2000:]}")
            return time.monotonic() - began, resident


def _closures(kafka: Mapping[str, Any], topics: RunTopics, at: Mapping[int, int] | None = None) -> Reader:
    name = topics.name(GROUPS)
    return Reader(kafka, {(name, p): offset for p, offset in (at or beginning_offsets(kafka, name)).items()})


def _resident(kafka: Mapping[str, Any], run: str, tokens: int) -> list[tuple[int, int]]:
    """(model tokens so far, resident bytes) while groups come and close, with a few open at any time."""
    rules = settings()
    topics, bootstrap = create(kafka, run, rules), str(kafka["bootstrap.servers"])
    rollouts, at_once, per_span, spans = Rollouts(kafka, topics), 16, 512, 4
    per_group = SIBLINGS * per_span * spans
    groups = -(-tokens // (per_group * at_once)) * at_once
    curve: list[tuple[int, int]] = []
    with role("assembler", run, bootstrap) as process, _closures(kafka, topics) as reader:
        written = closed = 0
        while closed < groups:
            if written < groups and written - closed <= at_once:
                for number in range(written, written + at_once):
                    rollouts.open(f"r{number}", rules)
                    rollouts.all_but_the_end(f"r{number}", per_span, spans)
                for number in range(written, written + at_once):
                    for slot in range(SIBLINGS):
                        rollouts.end(f"r{number}", slot, 1 + spans)
                rollouts.flush()
                written += at_once
            closed += sum(isinstance(decode(r.value), GroupClosed) for r in reader.poll(1000, 0.05))
            if not process.alive():
                raise CannotMeasure(f"the assembler doesn't get on:\n{process.output()[-2000:]}")
            if not curve or closed * per_group - curve[-1][0] >= tokens / 40:
                curve.append((closed * per_group, harness.rss_of(process.pid)))
    return curve[1:]


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("recovery", __doc__, measure, argv)


if __name__ == "__main__":
    raise SystemExit(main())

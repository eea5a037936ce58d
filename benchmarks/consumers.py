"""What reading a run costs: tokens per CPU second from the log to Arrow, and to Parquet, against bare consume + decode
of the same events; and the memory of each over runs of different length.

The bare loop decodes every event and unpacks no column; the table has every token's id, log-probability, version,
position and origin in Arrow's buffers. Each is a process of its own, taken in turn. Spans have 256 tokens, ids and
log-probabilities are drawn with the spread of sampled ones.

Last, what three attached consumers (every event, closed groups, `headrace status --follow`) cost a training on this
machine, as a share of its step time: one real run with a tiny model, with and without them in turn. The interval is the
95 % one of Student's t over the pairs. An audit reads the whole run again and ends: `benchmarks.ledger` has its cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from headrace.consumers import open_run
from headrace.schemas.topics import TRAJECTORIES

from . import harness
from ._attached import windows
from .baselines.bare_consumer import count_tokens
from .harness import CannotMeasure, Result, Spread, spread
from .streams_load import SIBLINGS, Rollouts, create, settings

SPAN = 256
SPANS = 16  # of an episode: 4,096 tokens
SHORT, LONG = 2_000_000, 10_000_000  # tokens
QUICK = 500_000, 1_500_000
PAIRS, VERSIONS = 10, 12  # of windows with and without consumers; of a window
QUICK_PAIRS, QUICK_VERSIONS = 2, 3
T95 = {1: 12.706, 9: 2.262}  # two-sided 95 % quantiles of Student's t, by degrees of freedom
SUBJECTS = ("bare consume + decode", "log to Arrow", "log to Parquet")


def one(subject: str, run: str, bootstrap: str) -> dict[str, Any]:
    """In this process; what it cost."""
    kafka = {"bootstrap.servers": bootstrap}
    opened = open_run(run, kafka)
    if subject == SUBJECTS[0]:
        began = time.process_time()
        tokens = count_tokens(kafka, opened.topics.name(TRAJECTORIES))
    else:
        import pyarrow as pa
        import pyarrow.parquet

        pa.array([0])  # which imports pandas, once, for some seconds: importing is no part of the figure
        table = opened.table("tokens")
        began = time.process_time()
        if subject == SUBJECTS[1]:
            tokens = sum(batch.num_rows for batch in table.batches())
        else:
            with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
                tokens = table.to_parquet(file.name)
    return {"tokens": tokens, "cpu_s": time.process_time() - began, "rss": harness.peak_rss()}


def fill(kafka: dict[str, Any], run: str, tokens: int) -> int:
    """A run of at least so many tokens; how many there are."""
    rules = settings()
    rollouts = Rollouts(kafka, create(kafka, run, rules))
    groups = -(-tokens // (SIBLINGS * SPANS * SPAN))
    for number in range(groups):
        group = f"g{number:08d}"
        rollouts.open(group, rules)
        rollouts.all_but_the_end(group, SPAN, SPANS)
        for slot in range(SIBLINGS):
            rollouts.end(group, slot, 1 + SPANS)
    rollouts.flush()
    return groups * SIBLINGS * SPANS * SPAN


def measure(options: argparse.Namespace, result: Result) -> None:
    with harness.temporary_broker() as broker:
        kafka = harness.kafka_of(broker)
        runs = {f"n{size}": fill(kafka, f"n{size}", size) for size in (QUICK if options.quick else (SHORT, LONG))}

        def measured(subject: str, run: str) -> dict[str, Any]:
            argv = [sys.executable, "-m", "benchmarks.consumers", "--one", subject, run, broker.bootstrap]
            found: dict[str, Any] = harness.run_process(argv, timeout_s=3600).last_json()
            if found["tokens"] != runs[run]:
                raise CannotMeasure(f"{subject} saw {found['tokens']} tokens of {runs[run]}")
            return found

        short, long = runs
        found = harness.alternate({subject: partial(measured, subject, short) for subject in SUBJECTS},
                                  2 if options.quick else 5, warm=not options.quick)  # fmt: skip
        whole = {subject: measured(subject, long) for subject in SUBJECTS[1:]}
        pairs = QUICK_PAIRS if options.quick else PAIRS
        times = windows(kafka, pairs, QUICK_VERSIONS if options.quick else VERSIONS)
    rates: dict[str, Spread] = {}
    for subject, each in found.items():
        rates[subject] = spread([one["tokens"] / one["cpu_s"] for one in each])
        result.row("speed", subject, rates[subject], "tokens per CPU s")
    for subject in SUBJECTS[1:]:
        few, many = max(one["rss"] for one in found[subject]), whole[subject]["rss"]
        result.row(f"peak memory, {subject}", f"{runs[short]:,} tokens", few / 2**20, "MiB")
        result.row(f"peak memory, {subject}", f"{runs[long]:,} tokens", many / 2**20, "MiB")
        result.at_most(f"memory of the longer run to that of the shorter, {subject}", many / few, 1.15)
    result.at_least("log to Arrow, of the speed of bare consume + decode",
                    rates[SUBJECTS[1]].median / rates[SUBJECTS[0]].median, 0.5)  # fmt: skip
    result.row("step time of a training", "alone", spread(times.alone), "s a version")
    result.row("step time of a training", "attached", spread(times.attached), "s a version")
    for kind, cores in times.cpu.items():
        result.row("CPU of an attached consumer", kind, spread([100 * share for share in cores]), "% of a core")
    shares = [with_them / without - 1 for with_them, without in zip(times.attached, times.alone, strict=True)]
    mean = statistics.mean(shares)
    error = T95[pairs - 1] * statistics.stdev(shares) / pairs**0.5
    result.row("cost of three attached consumers", "mean over the pairs", 100 * mean, "%")
    result.row("cost of three attached consumers", "95 % interval, lower end", 100 * (mean - error), "%")
    result.row("cost of three attached consumers", "95 % interval, upper end", 100 * (mean + error), "%")
    noise = mean - error <= 0 <= mean + error
    result.at_most("cost of three attached consumers, % of the step time (0: inside the noise)",
                   0.0 if noise else 100 * mean, 1.0)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--one"]:
        print(json.dumps(one(*given[1:4])))
        return 0
    return harness.run("consumers", __doc__, measure, given, packages=("pyarrow",))


if __name__ == "__main__":
    sys.exit(main())

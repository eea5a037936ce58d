"""What the audit of a run costs, and whether its memory depends on the run's length.

Runs of the same shape and of different lengths (groups of 4 episodes, 1,024 model tokens each, as one batch of 16 after
the other) are written to files, and read by processes of their own: once decoded and nothing else ("bare"), once
audited. The same is done once through a real broker. Peak memory is the process's, all of it: interpreter, libraries,
SQLite's cache, librdkafka's queues.

The goal allows the longest run 1.3 times the memory of the shortest, beside 8 MiB: the pages of the index on disk that
SQLite may keep in memory, of which a short run fills few.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.consumers.index import CACHE_KB
from headrace.consumers.ledger import audit
from headrace.consumers.source import LogSource, Snapshot
from headrace.schemas.codec import decode
from headrace.schemas.topics import ALL_TOPICS, BY_GROUP, RunTopics
from headrace.streams.log import clients

from . import harness
from ._long_run import FileLog, Shape, write_run
from .harness import CannotMeasure, Result

SIZES, QUICK = (1_000, 10_000, 100_000), (50, 200, 500)
BROKER, BROKER_QUICK = (1_000, 10_000), (50, 200)
RUN = "long"


def bare(source: LogSource) -> int:
    """Consume and decode; the number of records."""
    count = 0
    for topic in ALL_TOPICS:
        for partition in range(source.partitions(topic)):
            for record in source.records(topic, partition):
                decode(record.value)
                count += 1
    return count


def one(what: str, where: str) -> dict[str, Any]:
    """Read a run, in this process. `where`: a folder, or a broker's address."""
    source: LogSource
    if Path(where).is_dir():
        source = FileLog(Path(where), RUN)
    else:
        source = Snapshot({"bootstrap.servers": where}, RunTopics(RUN))
    began, found = time.process_time(), {"records": 0}
    if what == "bare":
        found = {"records": bare(source)}
    else:
        ledger = audit(source)
        if not ledger.closes:
            raise CannotMeasure(f"the ledger does not close: {ledger.failures[:3]}")
        found = {"tokens": ledger.tokens.total()}
    return {**found, "cpu_s": time.process_time() - began, "rss": harness.peak_rss()}


def measured(what: str, where: str) -> dict[str, Any]:
    """The same in a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.ledger", "--one", what, where]
    found: dict[str, Any] = harness.run_process(argv, timeout_s=7200).last_json()
    return found


def fill(kafka: dict[str, Any], folder: Path, shape: Shape) -> None:
    """The run in these files, on a broker. Offsets begin at 0 and have no gaps there either."""
    topics, log = RunTopics(RUN), FileLog(folder, RUN)
    clients.create_topics(kafka, topics.specs(shape.partitions, 1))
    producer = clients.producer(kafka)
    for topic in ALL_TOPICS:
        for partition in range(shape.partitions if topic in BY_GROUP else 1):
            for record in log.records(topic, partition):
                while True:
                    try:
                        producer.produce(topics.name(topic), record.value, partition=partition)
                        break
                    except BufferError:
                        producer.poll(0.1)
    producer.flush()


def report(result: Result, size: int, through: str, where: str, shape: Shape) -> int:
    """Rows for one run; the audit's peak memory."""
    plain, full = measured("bare", where), measured("audit", where)
    records, tokens = plain["records"], size * shape.group_tokens
    subject = f"{size:,} groups {through}"
    result.row("bare consume + decode", subject, records / plain["cpu_s"], "records per CPU s")
    result.row("audit", subject, records / full["cpu_s"], "records per CPU s")
    result.row("bare consume + decode (tokens)", subject, tokens / plain["cpu_s"], "tokens per CPU s")
    result.row("audit (tokens)", subject, tokens / full["cpu_s"], "tokens per CPU s")
    result.row("audit to bare", subject, full["cpu_s"] / plain["cpu_s"], "times the CPU")
    result.row("peak memory, bare", subject, plain["rss"] / 2**20, "MiB")
    result.row("peak memory, audit", subject, full["rss"] / 2**20, "MiB")
    return int(full["rss"])


def measure(options: argparse.Namespace, result: Result) -> None:
    shape = Shape()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        peaks = []
        for size in QUICK if options.quick else SIZES:
            folder = Path(home) / str(size)
            write_run(folder, size, shape)
            peaks.append(report(result, size, "in files", str(folder), shape))
        through = []
        for size in BROKER_QUICK if options.quick else BROKER:
            with harness.temporary_broker() as broker:
                kafka = harness.kafka_of(broker)
                folder = Path(home) / str(size)
                fill(kafka, folder, shape)
                through.append(report(result, size, "through Kafka", str(kafka["bootstrap.servers"]), shape))
    for what, held in (("in files", peaks), ("through Kafka", through)):
        result.at_most(f"memory of the longest run to that of the shortest, beside {CACHE_KB >> 10} MiB, {what}",
                       (held[-1] - (CACHE_KB << 10)) / held[0], 1.3)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--one"]:
        print(json.dumps(one(*given[1:3])))
        return 0
    return harness.run("ledger", __doc__, measure, given)


if __name__ == "__main__":
    sys.exit(main())

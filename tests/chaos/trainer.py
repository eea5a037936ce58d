"""A trainer of the load: reads batches, proves them, commits and publishes versions by the trainer's real code, and
trains nothing. `python -m tests.chaos.trainer RUN --config FILE --pace FILE`: a version takes at least so many seconds
as the file says at the moment: `[seconds, seconds from that version on, version or null]`."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.producers.lifeline import die_with_parent
from headrace.schemas import delta
from headrace.schemas.codec import kind_of
from headrace.schemas.errors import HeadraceError, InvalidRecord, ReplayMismatch
from headrace.schemas.events import Disposed, GroupCount, Version
from headrace.schemas.topics import BATCHES, POLICY, RunTopics
from headrace.settings import kafka_config, load_site
from headrace.streams.log.hanging import check_settled
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import Reader, Record, beginning_offsets
from headrace.streams.log.transactions import Transactor
from headrace.trainer.fetch import Batch, fetch_batch
from headrace.trainer.publish import Make, Policy, Publisher, read_policy
from tests.chaos import load

POLL_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--pace", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    site = load_site(given.config)
    try:
        run_trainer(kafka_config(site), RunTopics(given.run, site.prefix), stop, given.pace)
    except HeadraceError as error:
        print(f"trainer: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 3 if isinstance(error, InvalidRecord | ReplayMismatch) else 1
    return 0


def run_trainer(kafka: Mapping[str, Any], topics: RunTopics, stop: threading.Event, pace: Path) -> None:
    transactor = Transactor(kafka, topics.transactional_id("trainer"))
    check_settled(kafka, [(topics.name(POLICY), 0)])
    opened = open_settings(kafka, topics)
    head = read_policy(kafka, topics, opened)
    policy = Policy(topics, transactor, head.chain)
    publisher = Publisher(kafka, topics, policy, opened.settings.weights)
    publisher.remember(head.publications)

    # 1. Where the log stands: version 0, or the newest version, published where that is still to be done.
    version = head.committed
    state = load.weights(max(0, version))
    served_hash = delta.state_hash(state)
    if version < 0:
        publisher.publish_initial(_version(0, served_hash, None), "synthetic", state, served_hash)
        version = 0
    else:
        if head.versions[version].served_hash != served_hash:
            raise ReplayMismatch(f"version {version} has other weights on the log than here")
        publisher.rebase(version, state, served_hash)
        if head.published < version:
            publisher.publish_snapshot(version, state, served_hash)

    # 2. Batch after batch: fetch and prove, commit, publish.
    batches = topics.name(BATCHES)
    at = head.versions[version].batch_offset + 1 if version > 0 else beginning_offsets(kafka, batches)[0]
    with Reader(kafka, {(batches, 0): at}) as manifests, Reader(kafka) as reader:
        while (record := _next_manifest(manifests, stop)) is not None:
            due = time.monotonic() + _seconds(pace, version)
            batch = fetch_batch(reader, topics, record, opened.settings.staleness)
            if batch.manifest.batch != version + 1:
                said = f"batch {batch.manifest.batch} where {version + 1} is due"
                raise InvalidRecord(said, batches, 0, record.offset)
            version += 1
            changes, served_hash = publisher.compare(load.weights(version))
            policy.write(_version(version, served_hash, batch))
            publisher.publish(version, changes, served_hash)
            stop.wait(max(0.0, due - time.monotonic()))
    publisher.close()
    transactor.close()


def _seconds(pace: Path, version: int) -> float:
    free, braked, until = json.loads(pace.read_text())
    return float(free if until is None or version < until else braked)


def _next_manifest(reader: Reader, stop: threading.Event) -> Record | None:
    while not stop.is_set():
        for record in reader.poll(1, POLL_S):
            if kind_of(record.value) is not Disposed:
                return record
    return None


def _version(number: int, served_hash: bytes, batch: Batch | None) -> Make:
    groups = tuple(GroupCount(ref.group, ref.model_tokens, 0) for ref in batch.manifest.groups) if batch else ()

    def make(**link: Any) -> Version:
        return Version(
            **link, version=number, parent=number - 1, batch=number, batch_offset=batch.offset if batch else -1,
            batch_digest=batch.digest if batch else b"", hash_algorithm=delta.HASH_ALGORITHM, served_hash=served_hash,
            train_hash=b"", rho=0.0, rho_tokens=0, groups=groups, metrics={}, fingerprint="{}",
            committed_ms=int(time.time() * 1000),
        )  # fmt: skip

    return make


if __name__ == "__main__":
    sys.exit(main())

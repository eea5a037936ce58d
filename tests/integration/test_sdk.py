"""The reader's SDK on a real broker: where it begins, what it selects, what a service's position promises, and that no
reader changes anything."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import TopicPartition

from headrace.consumers import FromVersion, Output, Run, audit, open_run
from headrace.consumers.asof import AsOf
from headrace.schemas.errors import DataLossError, Fenced, SettingsError
from headrace.schemas.events import FleetTick, GroupClosed, Manifest, Span, Version
from headrace.schemas.outcomes import Account
from headrace.schemas.topics import BATCHES, FLEET, GROUPS, POLICY, TRAJECTORIES, RunTopics, TopicSpec
from headrace.streams.log.clients import admin, create_topics
from headrace.streams.log.reader import end_offsets, read_range
from tests.scripted_run import ScriptedRun, scripted_settings

NAME = "sdk"
VERSIONS = 4


@pytest.fixture(scope="module")
def scripted(kafka: Mapping[str, Any]) -> Iterator[ScriptedRun]:
    run = ScriptedRun(kafka, RunTopics(NAME), scripted_settings())
    run.until(VERSIONS)
    yield run
    run.close()


@pytest.fixture
def run(scripted: ScriptedRun) -> Run:
    return open_run(NAME, scripted.kafka)


def places(run: Run, *topics: str, **how: Any) -> list[tuple[str, int, int]]:
    return [(r.topic, r.partition, r.offset) for r, _ in run.events(*topics, **how)]


def test_reading_begins_at_an_offset_a_time_or_a_version(run: Run) -> None:
    policy = list(run.events(POLICY))
    record, version = next((r, e) for r, e in policy if isinstance(e, Version) and e.version == 2)
    later = [(r.topic, r.partition, r.offset) for r, _ in policy if r.offset >= record.offset]
    assert places(run, POLICY, start=record.offset) == later
    assert places(run, POLICY, start=FromVersion(2)) == later
    moment = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC)
    assert places(run, POLICY, start=moment)[-len(later) :] == later
    # In the other topics a version begins with its manifest, or with its time.
    assert isinstance(version, Version)
    assert next(iter(run.records(BATCHES, start=FromVersion(2)))).offset == version.batch_offset
    assert all(r.timestamp_ms >= version.committed_ms for r in run.records(FLEET, start=FromVersion(2)))
    with pytest.raises(SettingsError, match="no version 99"):
        list(run.records(POLICY, start=FromVersion(99)))


def test_exact_positions_go_on_where_they_stood_and_a_deleted_one_is_an_error(run: Run) -> None:
    stream = run.records(GROUPS)
    seen = {}
    for record in stream:
        seen[GROUPS, record.partition] = record.offset + 1
        if len(seen) == 2:
            break
    rest = {(r.partition, r.offset) for r in run.records(GROUPS, start=seen)}
    everything = {(r.partition, r.offset) for r in run.records(GROUPS)}
    assert rest == {(p, o) for p, o in everything if o >= seen[GROUPS, p]}
    name = run.topics.name(FLEET)
    first = next(iter(run.records(FLEET))).offset
    client = admin(run.kafka)
    for future in client.delete_records([TopicPartition(name, 0, first + 2)]).values():
        future.result(30)
    with pytest.raises(DataLossError, match="fleet"):
        list(run.records(FLEET, start={(FLEET, 0): first}))
    assert next(iter(run.records(FLEET, start=first))).offset >= first + 2  # an offset alone: what is retained


def test_events_are_selected_by_group_episode_version_and_kind(run: Run) -> None:
    closed = [e for _, e in run.events(GROUPS, kinds=GroupClosed)]
    group = next(e for e in closed if isinstance(e, GroupClosed) and e.closure == "candidate")
    spans = [e for _, e in run.events(TRAJECTORIES, episode=f"{group.group}/0", kinds=Span)]
    assert spans and {(s.group, s.slot) for s in spans if isinstance(s, Span)} == {(group.group, 0)}
    every = [e for _, e in run.events(TRAJECTORIES) if getattr(e, "group", None) == group.group]
    assert [e for _, e in run.events(TRAJECTORIES, group=group.group)] == every
    manifests = [e for _, e in run.events(BATCHES, version=3)]
    assert [e.batch for e in manifests if isinstance(e, Manifest)] == [3]


def test_async_iteration_gives_the_same_events_and_follows(run: Run, scripted: ScriptedRun) -> None:
    async def read() -> list[tuple[str, int, int]]:
        return [(r.topic, r.partition, r.offset) async for r, _ in run.events(GROUPS, BATCHES)]

    assert sorted(asyncio.run(read())) == sorted(places(run, GROUPS, BATCHES))

    async def follow() -> object:
        async for _, event in run.events(FLEET, start="latest", follow=True, kinds=FleetTick):
            return event
        return None

    async def main() -> object:
        task = asyncio.ensure_future(follow())
        for number in range(40):
            scripted.send(FLEET, "w", FleetTick("sdk", number))
            scripted.flush()
            done, _ = await asyncio.wait([task], timeout=0.25)
            if done:
                break
        return await asyncio.wait_for(task, 10)

    found = asyncio.run(main())
    assert isinstance(found, FleetTick) and found.writer == "sdk"


def test_readers_join_no_consumer_group(run: Run) -> None:
    client = admin(run.kafka)
    before = {g.group_id for g in client.list_consumer_groups().result(30).valid}
    list(run.events())
    list(run.groups())
    assert {g.group_id for g in client.list_consumer_groups().result(30).valid} == before


def test_a_service_goes_on_where_it_committed_and_repeats_what_it_had_not(run: Run) -> None:
    everything = sorted((r.partition, r.offset) for r in run.records(GROUPS))
    seen: list[tuple[int, int]] = []
    with run.service("counter", GROUPS) as service:
        for batch in service.batches():
            seen += [(r.partition, r.offset) for r, _ in batch]
        service.commit()
    assert sorted(seen) == everything
    with run.service("counter", GROUPS) as service:
        assert list(service.batches()) == []
    # Another name has another position; what was handed out and not committed comes again.
    for _ in range(2):
        with run.service("other", GROUPS) as service:
            assert sorted((r.partition, r.offset) for b in service.batches() for r, _ in b) == everything
    with run.service("counter", GROUPS) as service, pytest.raises(SettingsError, match="exactly_once"):
        service.commit([Output("elsewhere", 0, b"")])


MIRROR = """
import os, sys
from headrace.consumers import Output, open_run
run = open_run(sys.argv[1], {"bootstrap.servers": sys.argv[2]})
die_after, done = int(sys.argv[4]), 0
with run.service("mirror", "groups", exactly_once=True) as service:
    for batch in service.batches():
        outputs = [Output(sys.argv[3], 0, f"{r.partition}@{r.offset}".encode()) for r, _ in batch]
        done += 1
        if done == die_after:  # in the middle of its transaction: everything is sent, nothing committed
            service._transactor.commit(lambda send: (send(outputs), os._exit(9)))
        service.commit(outputs)
"""


def test_a_service_that_is_killed_in_its_transaction_mirrors_each_record_exactly_once(run: Run) -> None:
    target = "sdk-mirror"
    create_topics(run.kafka, [TopicSpec(target, 1, 1, {})])
    address = str(run.kafka["bootstrap.servers"])
    codes = [subprocess.run([sys.executable, "-c", MIRROR, NAME, address, target, die_after], timeout=120).returncode
             for die_after in ("1", "2", "0")]  # fmt: skip
    assert codes[0] == 9 and codes[-1] == 0
    mirrored = [r.value for r in read_range(run.kafka, target, 0, 0, end_offsets(run.kafka, target)[0])]
    assert sorted(v.decode() for v in mirrored if v) == sorted(f"{r.partition}@{r.offset}" for r in run.records(GROUPS))


def test_a_second_instance_fences_the_first_and_the_runs_topics_are_taboo(run: Run) -> None:
    with run.service("twin", GROUPS, exactly_once=True) as first:
        next(first.batches())
        with pytest.raises(SettingsError, match="written by its roles alone"):
            first.commit([Output(run.topics.name(GROUPS), 0, b"")])
        with run.service("twin", GROUPS, exactly_once=True) as second:
            with pytest.raises(Fenced):
                first.commit()
            second.commit()


CRASHING = """
import os, sys
from headrace.consumers import open_run
run = open_run(sys.argv[1], {"bootstrap.servers": sys.argv[2]})
for number, _ in enumerate(run.events(follow=True)):
    if number == int(sys.argv[3]):
        print("there", flush=True)
        if sys.argv[4] == "crash":
            os._exit(9)
"""


@pytest.mark.slow
def test_consumers_that_crash_stall_or_join_late_change_nothing_in_the_run(
    kafka: Mapping[str, Any], run_name: str
) -> None:
    """Two runs of one script, synchronous and in one partition, so that everything follows from the script; one of them
    is watched by a reader that crashes, one that is stopped in the middle of a batch (as long as the run lasts), and
    one that joins late. Ledgers and manifests are equal."""
    settings = scripted_settings(batch={"groups": 2, "max_lag": 0}, log={"partitions": 1, "commit_ms": 50})

    def judge(group: str, slot: int, attempt: int) -> float:
        return float(slot == 0)

    calm, watched = (ScriptedRun(kafka, RunTopics(f"{run_name}-{name}"), settings, judge=judge)
                     for name in ("calm", "watched"))  # fmt: skip
    watchers: list[subprocess.Popen[str]] = []
    stop = threading.Event()

    def join_late() -> None:
        for _ in open_run(watched.topics.run, kafka).groups(follow=True, stop=stop):
            pass

    late = threading.Timer(0.5, join_late)
    try:
        calm.until(4)
        argv = [sys.executable, "-c", CRASHING, watched.topics.run, str(kafka["bootstrap.servers"]), "40"]
        watchers += [subprocess.Popen([*argv, end], stdout=subprocess.PIPE, text=True) for end in ("crash", "stall")]
        late.start()
        watched.until(1)
        assert watchers[1].stdout is not None and watchers[1].stdout.readline() == "there\n"
        watchers[1].send_signal(signal.SIGSTOP)
        watched.until(4)
        assert watchers[0].stdout is not None and watchers[0].stdout.readline() == "there\n"
        assert watchers[0].wait(30) == 9
        assert psutil.Process(watchers[1].pid).status() == psutil.STATUS_STOPPED
    finally:
        stop.set()
        for watcher in watchers:
            watcher.kill()
            watcher.wait()
        calm.close()
        watched.close()
    late.join(10)
    found = [_decided(open_run(one.topics.run, kafka), 4) for one in (calm, watched)]
    assert found[0][0] == found[1][0] and found[0][0]["tokens"]["trained"] > 0
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert asdict(one) == asdict(other)


def _decided(run: Run, batch: int) -> tuple[dict[str, Any], list[Manifest]]:
    """Ledger and manifests up to that batch, without what follows from the clock: groups that are open for the next
    batch, places on the log, times, the name, and hashes over these."""
    placed = [(record, event) for record, event in run.events(BATCHES) if isinstance(event, Manifest)]
    place = next(record.offset for record, event in placed if event.batch == batch)
    ledger = audit(AsOf(run.snapshot(), offset=place))
    assert ledger.closes, ledger.failures
    manifests = []
    for _, event in placed[:batch]:
        groups = tuple(replace(ref, offset=0) for ref in event.groups)
        manifests.append(replace(event, groups=groups, positions=(), decided_ms=0, previous=b"",
                                 settings_digest=b""))  # fmt: skip
    account = {"groups": {name: n for name, n in ledger.groups.items() if name != ("open", "open")},
               "tokens": {name: n for name, n in ledger.tokens.items() if name != Account.OPEN},
               "lengths": [row for row in ledger.lengths if row.account != Account.OPEN],
               "numbers": (ledger.batches, ledger.versions, ledger.duplicates, ledger.dead_letters, ledger.reuses)}
    return account, manifests


def test_export_writes_every_table_of_a_run_and_tables_come_with_one_call(run: Run, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "headrace", "export", NAME, str(tmp_path / "out"), "--json", "--bootstrap",
            str(run.kafka["bootstrap.servers"])]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    written = {row["table"]: row["rows"] for row in json.loads(done.stdout)}
    assert written["batches"] >= VERSIONS and written["tokens"] > 0
    assert {path.stem for path in (tmp_path / "out").iterdir()} == written.keys()
    frame = run.table("groups").to_pandas()
    closed = [group.id for group in run.groups()]
    assert sorted(frame[frame["closure"] != "open"]["id"]) == sorted(closed)
    done = subprocess.run([*argv, "--table", "nothing"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1

"""A run that stands still on a real broker ends within the bound, and says which part does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import NoProgress
from headrace.schemas.events import DeadLetter, Heartbeat, Lease, Manifest, SettingsChanged
from headrace.schemas.hashes import GENESIS
from headrace.schemas.topics import BATCHES, DEADLETTER, FLEET, GROUPS, POLICY, TASKS, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.coordinating import run_coordinator
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range
from headrace.streams.tasks import task_source
from tests.roles import role
from tests.running import Running
from tests.scripted_run import ScriptedRun, scripted_settings

Kafka = Mapping[str, Any]
BOUND_S = 5
START_S = 90.0  # longer than roles take to load PyTorch on a busy machine
GARBAGE = b"garbage"
WAIT_S = 120.0


class Standing(ScriptedRun):
    """A scripted run of which a part does nothing."""

    beats = works = trains = True

    def turn(self) -> None:
        if self.beats:
            version = max(0, self.version)
            self.send(FLEET, "w", Heartbeat("w", self.incarnation, version, self.capacity, 0, True, "{}", {}))
        for record in self._reader.poll(100, 0.2):
            event = decode(record.value) if record.value != GARBAGE else None
            if isinstance(event, Lease) and event.incarnation == self.incarnation and self.works:
                self._work(event)
            elif isinstance(event, Manifest) and self.trains:
                self._commit(event, record.value or b"", record.offset)
        self.flush()

    def until(self, condition: Callable[[], Any]) -> None:  # type: ignore[override]
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            self.turn()


@pytest.fixture
def standing(kafka: dict[str, Any], run_name: str) -> Iterator[Standing]:
    rollout = {"group_size": 2, "no_progress_s": BOUND_S, "lease_timeout_s": 2.0}
    run = Standing(kafka, RunTopics(run_name), scripted_settings(rollout=rollout))
    yield run
    run.close()


def coordinator(run: ScriptedRun) -> tuple[Any, ...]:
    return (run_coordinator, run.kafka, run.topics, run.settings, task_source(run.settings.tasks))


def assembler(run: ScriptedRun) -> tuple[Any, ...]:
    return (run_assembler, run.kafka, run.topics, run.settings)


def said(raised: list[BaseException]) -> str:
    (error,) = raised
    assert isinstance(error, NoProgress), error
    return str(error)


def test_run_whose_version_0_never_comes_names_the_trainer(standing: Standing) -> None:
    with role(*coordinator(standing), join_s=60.0) as raised:
        standing.until(lambda: raised)
    assert "the trainer of run" in said(raised) and "version 0" in said(raised)


def test_run_without_workers_names_them(standing: Standing) -> None:
    standing.beats = False
    standing._commit(None, b"", -1)
    with role(*coordinator(standing), join_s=60.0) as raised:
        standing.until(lambda: raised)
    assert "no worker reports" in said(raised)


def test_worker_that_only_beats_is_named_with_its_oldest_lease(standing: Standing) -> None:
    standing.works = False
    standing._commit(None, b"", -1)
    with role(*assembler(standing), join_s=60.0), role(*coordinator(standing), join_s=60.0) as raised:
        standing.until(lambda: raised)
    assert "produce nothing; the oldest is slot 0 of group g00000000" in said(raised)
    assert f"held by w (incarnation {standing.incarnation[:8]})" in said(raised)
    assert f"`headrace status {standing.topics.run}`" in said(raised)


def test_trainer_that_takes_no_batch_is_named(standing: Standing) -> None:
    standing.trains = False
    standing._commit(None, b"", -1)
    with role(*assembler(standing), join_s=60.0), role(*coordinator(standing), join_s=60.0) as raised:
        standing.until(lambda: raised)
    assert "waits for the trainer, and no version has come since version 0" in said(raised)


def test_assembler_that_is_stopped_is_named_with_the_first_record_that_waits_for_it(
    standing: Standing, tmp_path: Path
) -> None:
    standing._commit(None, b"", -1)
    log = tmp_path / "assembler.log"
    with open(log, "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "start", "assembler", standing.topics.run], stderr=err,
            env={**os.environ, "HEADRACE_BOOTSTRAP_SERVERS": str(standing.kafka["bootstrap.servers"])},
        )  # fmt: skip
    try:
        standing.until(lambda: "assembling" in log.read_text())
        groups = standing.topics.name(GROUPS)
        with role(*coordinator(standing), join_s=60.0) as raised:
            standing.until(lambda: raised or sum(end_offsets(standing.kafka, groups).values()) > 0)
            assert not raised, raised
            process.send_signal(signal.SIGSTOP)
            standing.until(lambda: raised)
    finally:
        process.kill()
        process.wait()
    assert "the assembler of run" in said(raised) and f"{standing.topics.name('trajectories')}[" in said(raised)


def test_garbage_that_the_coordinator_reads_gets_one_letter_and_the_run_goes_on(
    kafka: dict[str, Any], run_name: str
) -> None:
    run = Standing(kafka, RunTopics(run_name), scripted_settings())
    run._commit(None, b"", -1)
    wrong: dict[str, Any] = {
        FLEET: encode(Lease("g", 0, True, False, "w", "w0", "train", 0, (), run.settings.spec(),
                            task_source(run.settings.tasks).at(0), 0, None)),  # type: ignore[arg-type]
        POLICY: encode(SettingsChanged(0, GENESIS, "set", '{"batch.groups": "many"}', 0)),
    }  # fmt: skip

    def pollute() -> None:
        for topic in (FLEET, GROUPS, TASKS, BATCHES, POLICY):
            run.send(topic, "x", GARBAGE)
            if topic in wrong:
                run.send(topic, "x", wrong[topic])
        run.flush()

    def letters() -> list[DeadLetter]:
        name = run.topics.name(DEADLETTER)
        records = read_range(kafka, name, 0, beginning_offsets(kafka, name)[0], end_offsets(kafka, name)[0])
        return [one for record in records if isinstance(one := decode(record.value), DeadLetter)]

    def short() -> list[str]:
        return sorted(letter.topic.rsplit(".", 1)[1] for letter in letters())

    others = [FLEET, FLEET, GROUPS, POLICY, POLICY]
    try:
        for expected in (others, [*others, BATCHES, TASKS]):  # the last two are read at a start alone
            with role(*assembler(run), join_s=60.0) as fallen, role(*coordinator(run), join_s=60.0) as raised:
                before = run.version
                run.until(lambda before=before: fallen or raised or run.version > before)  # type: ignore[misc]
                if expected is others:
                    pollute()
                    run.until(lambda: fallen or raised or len(letters()) == 5)
                before = run.version
                run.until(lambda before=before: fallen or raised or run.version > before + 1)  # type: ignore[misc]
                assert not fallen and not raised, (fallen, raised)
            assert short() == sorted(expected)
        assert {letter.kind for letter in letters()} == {"UndecodableRecord", "InvalidRecord"}
        assert {letter.value for letter in letters()} == {GARBAGE, *wrong.values()}
    finally:
        run.close()


# ------------------------------------------------------------------------------------------- as a person runs it


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_that_cannot_start_end_the_run_with_the_reason(
    tmp_path: Path, kafka: dict[str, Any], run_name: str
) -> None:
    running = Running(tmp_path, kafka, run_name, max_deaths='max_deaths = 1000\ndevice = "no-such-device"',
                      lease_timeout_s=f"lease_timeout_s = 2\nno_progress_s = {START_S}")  # fmt: skip
    try:
        running.start()
        assert running.finish() == 1
        out = (running.folder / "out").read_text()
        assert "coordinator ended the run" in out and "no worker reports" in out and "/logs/*.log" in out, out
    finally:
        running.kill_all()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["coordinator", "trainer"])
def test_role_that_hangs_is_named_and_the_run_ends(
    victim: str, tmp_path: Path, kafka: dict[str, Any], run_name: str
) -> None:
    running = Running(tmp_path, kafka, run_name, lease_timeout_s=f"lease_timeout_s = 4\nno_progress_s = {START_S}")
    try:
        running.start()
        running.wait_for(1)
        process = running.role(victim)
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        assert running.finish() == 1
        assert f"the {victim} of run {run_name} stands still" in (running.folder / "out").read_text(), running.said()
    finally:
        running.kill_all()

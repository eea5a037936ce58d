"""The commands that read a run, on a real broker: what they print, what they prove, how they fail."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from headrace.consumers import audit, list_runs, open_run
from headrace.consumers.figures import measure
from headrace.consumers.tables import SMALL
from headrace.schemas.events import FleetTick, Heartbeat, Lease, Span
from headrace.schemas.topics import FLEET, TRAJECTORIES, RunTopics
from tests.command import Command
from tests.memory_log import MemoryLog
from tests.reference_fold import check_batches
from tests.scripted import Script
from tests.scripted_run import ScriptedRun, scripted_settings
from tests.tampering import check_every_tampering

NAME = "reading"
VERSIONS = 4


def _mischief(run: ScriptedRun, lease: Lease) -> None:
    """What goes wrong in the field: garbage, a stranger, events of nobody's group, repetitions, a latecomer."""
    group = lease.group
    if group == "g00000001":
        run.send(TRAJECTORIES, group, b"garbage")
        run.send(TRAJECTORIES, "nobody", Script("nobody", 0).span(5))
        run.send(TRAJECTORIES, group, Script(group, 0, 0, "stranger", sequence=7).span(3))
    if group == "g00000002":
        first = Script(group, 0, 0, run.incarnation, max(0, run.version))
        for event in first.whole(1.0):  # what the worker is about to send
            run.send(TRAJECTORIES, group, event)
    if group == "g00000008":
        run.send(TRAJECTORIES, "g00000001", Script("g00000001", 1, 0, run.incarnation, sequence=9).span(2))


@pytest.fixture(scope="module")
def scripted(kafka: Mapping[str, Any]) -> Iterator[ScriptedRun]:
    run = ScriptedRun(kafka, RunTopics(NAME), scripted_settings(), extra=_mischief)
    run.until(VERSIONS)
    yield run
    run.close()


def test_a_run_with_every_kind_of_mischief_closes(scripted: ScriptedRun) -> None:
    source = open_run(NAME, scripted.kafka).snapshot()
    ledger = audit(source)
    assert ledger.closes, ledger.failures
    assert ledger.retained and ledger.tokens.total() == ledger.logged_tokens - ledger.repeated_tokens
    assert ledger.versions == VERSIONS + 1 and ledger.dead_letters == 1
    assert ledger.tokens["trained"] >= VERSIONS * 2 * 2 * 4
    assert (ledger.tokens["foreign"], ledger.tokens["late"]) == (5 + 3, 2) and ledger.tokens["superseded"] > 0
    assert (ledger.duplicates, ledger.repeated_tokens) == (4, 4)
    assert (
        ledger.groups["candidate", "batched"] >= VERSIONS * 2 and ledger.groups["zero_variance", "zero_variance"] >= 1
    )


def test_the_batches_are_those_that_a_reference_fold_makes_of_the_log(scripted: ScriptedRun) -> None:
    log = MemoryLog.copy_of(open_run(NAME, scripted.kafka).snapshot())
    assert check_batches(log) == []


@pytest.mark.slow
def test_every_tampering_with_a_copy_of_a_real_run_is_named(scripted: ScriptedRun) -> None:
    assert check_every_tampering(MemoryLog.copy_of(open_run(NAME, scripted.kafka).snapshot())) > 300


def test_the_ledger_closes_at_every_moment_of_a_run(kafka: Mapping[str, Any]) -> None:
    run = ScriptedRun(kafka, RunTopics("moments"), scripted_settings(), extra=_mischief)
    thread = threading.Thread(target=run.until, args=(12,))
    thread.start()
    opened, audits = open_run("moments", kafka), 0
    while thread.is_alive():
        ledger = audit(opened.snapshot())
        assert ledger.closes, ledger.failures
        audits += 1
    thread.join()
    run.close()
    assert audit(opened.snapshot()).versions == 13 and audits > 2


def test_figures_of_a_real_run(scripted: ScriptedRun) -> None:
    found = measure(open_run(NAME, scripted.kafka).snapshot())
    assert found.version == found.published == VERSIONS
    assert found.time_to_trainable_batch_s is not None and 0 < found.time_to_trainable_batch_s < 60
    # A group that is retried may be overtaken, so that it lags more than `max_lag`; the hard limit holds.
    assert found.lag is not None and found.lag.max <= scripted.settings.staleness.hard_lag


def test_groups_come_with_their_fates_and_a_follower_sees_new_events(scripted: ScriptedRun) -> None:
    run = open_run(NAME, scripted.kafka)
    groups = list(run.groups())
    batched = [group for group in groups if group.disposition == "batched"]
    assert len({group.id for group in groups}) == len(groups)
    assert batched and all(group.max_lag is not None and group.batch is not None for group in batched)
    assert run.settings == scripted.settings and NAME in list_runs(scripted.kafka)


def test_a_follower_sees_what_comes_and_ends_when_told(scripted: ScriptedRun) -> None:
    stop, seen = threading.Event(), []

    def later() -> None:
        scripted.send(FLEET, "w", FleetTick("test", 7))
        scripted.flush()

    threading.Timer(1.0, later).start()
    for _, event in open_run(NAME, scripted.kafka).events(FLEET, start="latest", follow=True, stop=stop):
        seen.append(event)
        stop.set()
    assert seen == [FleetTick("test", 7)]


def test_cat_prints_decoded_events_and_garbage_as_json_lines(scripted: ScriptedRun, headrace: Command) -> None:
    code, out, error = headrace("cat", NAME)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and not error
    assert {row["topic"] for row in rows} >= {*SMALL, "trajectories", "samples", "deadletter"}
    span = next(row["event"] for row in rows if row["kind"] == Span.__name__ and row["event"]["source"] == "model")
    assert len(span["tokens"]) == len(span["logprobs"]) == span["count"]
    assert [row["error"] for row in rows if row["kind"] is None] and json.dumps(rows, allow_nan=False)
    _, later, _ = headrace("cat", NAME, "policy", "--from", "3")
    assert min(json.loads(line)["offset"] for line in later.splitlines()) >= 3
    assert headrace("cat", NAME, "policy", "--from", "2100-01-01")[1] == ""


@pytest.mark.slow
def test_status_says_where_the_run_stands_and_what_holds_it_up(scripted: ScriptedRun, headrace: Command) -> None:
    found = headrace.json("status", NAME)
    assert (found["version"], found["published"], found["dead_letters"]) == (VERSIONS, VERSIONS, 1)
    assert found["held_up_by"] and found["workers"]
    assert {"run": NAME, "version": VERSIONS}.items() <= next(
        r for r in headrace.json("status") if r["run"] == NAME
    ).items()
    assert found["letters"]["newest"]["origin"].startswith("trajectories[") and found["letters"]["exact"]
    assert found["waits"]["stragglers"] and found["waits"]["advice"]
    shown = headrace("status", NAME)[1]
    assert "held up by" in shown and "\nbottleneck " in shown and "1 UndecodableRecord of trajectories" in shown


def test_status_follows_in_a_terminal_until_ctrl_c(scripted: ScriptedRun) -> None:
    """A terminal of its own; the run is kept alive by heartbeats."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    argv = [sys.executable, "-m", "headrace", "status", NAME, "--follow", "--bootstrap",
            str(scripted.kafka["bootstrap.servers"])]  # fmt: skip
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(argv, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    said, frames = b"", 0
    os.set_blocking(parent, False)
    end = time.monotonic() + 120
    while frames < 2:
        assert time.monotonic() < end and process.poll() is None, said.decode()
        scripted.send(FLEET, "w", Heartbeat("w", "alive", 0, 8, 8, True, "{}", {}))
        scripted.flush()
        with contextlib.suppress(BlockingIOError):
            said += os.read(parent, 1 << 16)
        frames = said.count(f"run         {NAME}".encode())
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    os.close(parent)
    assert b"Is the next batch ready in time?" in said and b"Traceback" not in said


@pytest.mark.parametrize("kind", ["episodes", "groups", "batches", "versions", "replicas", "tasks"])
def test_show_lists_each_kind_and_shows_one_in_full(scripted: ScriptedRun, headrace: Command, kind: str) -> None:
    last = str(headrace.json("show", NAME, kind)[-1]["id"])
    found = headrace.json("show", NAME, f"{kind}/{last}")
    assert str(found["id"]) == last and found["records"]
    assert last in headrace("show", NAME, kind)[1] and last in headrace("show", NAME, f"{kind}/{last}")[1]


def test_show_narrows_down(scripted: ScriptedRun, headrace: Command) -> None:
    rows = headrace.json("show", NAME, "groups", "--where", "closure=candidate", "--where", "batch=1")
    assert [(row["closure"], row["batch"]) for row in rows] == [("candidate", 1)] * 2
    code, _, error = headrace("show", NAME, "groups", "--where", "nonsense=1")
    assert code == 2 and "closure" in error


def test_ledger_prints_the_account_and_exits_0(scripted: ScriptedRun, headrace: Command) -> None:
    code, out, _ = headrace("ledger", NAME)
    assert code == 0 and out.splitlines()[-1] == "closes"
    assert "trained" in out and "zero_variance" in out
    assert headrace.json("ledger", NAME)["closes"] is True


def test_ledger_prints_the_account_as_it_stood_at_a_decision_or_time(scripted: ScriptedRun, headrace: Command) -> None:
    decisions = [json.loads(line) for line in headrace("cat", NAME, "batches")[1].splitlines()]
    first, last = decisions[0]["offset"], decisions[-1]["offset"]
    early = headrace.json("ledger", NAME, "--at", str(first))
    assert early["batches"] == 1 and early["closes"] and early["at"] == str(first)
    whole, late = headrace.json("ledger", NAME), headrace.json("ledger", NAME, "--at", str(last))
    assert late == whole | {"at": str(last)}
    assert headrace.json("ledger", NAME, "--at", "1d")["batches"] == 0
    assert headrace.json("ledger", NAME, "--at", "2100-01-01")["batches"] == whole["batches"]


def test_cat_shows_dead_letters_with_origin_reason_and_bytes(scripted: ScriptedRun, headrace: Command) -> None:
    row = json.loads(headrace("cat", NAME, "deadletter")[1])
    assert row["origin"].startswith("trajectories[") and base64.b64decode(row["event"]["value"]) == b"garbage"
    text = headrace("cat", NAME, "deadletter", "--text")[1]
    assert row["origin"] in text and "not a single-object Avro record" in text and "67 61 72 62" in text


@pytest.mark.parametrize(
    "args",
    [("ledger", "nowhere"), ("cat", "nowhere"), ("show", "nowhere", "groups"), ("status", "nowhere"),
     ("ledger", NAME, "--at", "yesterday"), ("ledger", NAME, "--at", "999999"), ("cat", NAME, "nothing"),
     ("cat", NAME, "--from", "yesterday"), ("show", NAME, "things"), ("show", NAME, "groups/g99")],
)  # fmt: skip
def test_wrong_use_is_one_line_and_exit_2(scripted: ScriptedRun, headrace: Command, args: tuple[str, ...]) -> None:
    code, out, error = headrace(*args)
    assert code == 2 and not out
    assert len(error.strip().splitlines()) == 1 and "Traceback" not in error


def test_an_unreachable_broker_is_one_line(headrace: Command) -> None:
    headrace.address = "127.0.0.1:9"
    code, _, error = headrace("ledger", NAME)
    assert code == 1 and len(error.strip().splitlines()) == 1 and "127.0.0.1:9" in error


def test_a_reader_that_has_seen_enough_is_no_error(scripted: ScriptedRun) -> None:
    address = str(scripted.kafka["bootstrap.servers"])
    command = f"{sys.executable} -m headrace cat {NAME} --bootstrap {address} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=240)
    assert not done.stderr and len(done.stdout.splitlines()) == 1

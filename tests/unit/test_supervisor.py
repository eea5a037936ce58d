"""What is started, who dies again and again, and who is silent: the supervisor's own decisions, without processes."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.progress import Progress
from headrace.schemas.codec import encode
from headrace.schemas.events import AttemptEnded, Event, Lease
from headrace.schemas.hashes import GENESIS
from headrace.schemas.topics import RunTopics
from headrace.settings import SiteSettings
from headrace.streams.log.reader import Record
from headrace.supervisor import RoleFailed, Supervisor, _Child, _Pulse
from tests.scripted import lease

NAME = f"{socket.gethostname()}-worker"


def observe(progress: Progress, *events: Event) -> None:
    for event in events:
        progress.observe(Record("t", 0, 0, 0, None, encode(event)))


def leased(incarnation: str, group: str) -> Lease:
    return lease(group, incarnation=incarnation, worker=NAME)


def ended(incarnation: str, group: str, outcome: str, reason: str = "stop") -> AttemptEnded:
    return AttemptEnded(0, GENESIS, 0, group, 0, 0, incarnation, outcome, reason, "none", None, 0, True)


@pytest.fixture
def supervisor(tmp_path: Path) -> tuple[Supervisor, _Child, list[str]]:
    said: list[str] = []
    made = Supervisor({}, RunTopics("demo"), SiteSettings(max_deaths=3), tmp_path / "run.toml", said.append)
    return made, _Child("worker", "worker", tmp_path / "worker.log"), said


def die(supervisor: Supervisor, child: _Child, progress: Progress) -> None:
    child.started = time.monotonic()
    supervisor._died(child, -11, time.monotonic(), progress)


def test_worker_that_dies_of_one_task_after_another_group_was_done_goes_on(supervisor: Any) -> None:
    made, child, said = supervisor
    progress = Progress()
    for n in range(10):
        observe(progress, leased(f"i{n}", "poison"), leased(f"i{n}", f"other{n}"),
                ended(f"i{n}", f"other{n}", "model_failure"))  # fmt: skip
        die(made, child, progress)
    assert child.deaths == 1
    assert "died by signal 11 while it ran" in said[0] and "poison (task chain_sum-0-0)" in said[0]


def test_worker_that_never_finishes_anything_ends_the_run_and_names_what_it_ran_each_time(supervisor: Any) -> None:
    made, child, _ = supervisor
    progress = Progress()
    for n in range(2):
        observe(progress, leased(f"i{n}", "poison"), leased(f"i{n}", f"other{n}"))
        die(made, child, progress)
    observe(progress, leased("i2", "poison"))
    with pytest.raises(RoleFailed, match=r"(?s)died 3 times in a row.*Each time it ran poison \(task chain_sum-0-0\)"):
        die(made, child, progress)


def test_group_whose_workers_were_all_lost_is_told() -> None:
    progress = Progress()
    observe(progress, leased("i0", "g"), ended("i0", "g", "infra_failure", "worker_lost"))
    assert list(progress.given_up) == ["g"]


def test_silence_of_the_coordinator_counts_only_while_the_broker_answers() -> None:
    pulse = _Pulse(at=0.0)
    assert pulse.silent(1.0, 1, False, lambda: True) == 0.0
    for now in range(2, 12):
        silent = pulse.silent(float(now), 1, False, lambda: True)
    assert silent == 10.0
    for now in range(12, 100):
        assert pulse.silent(float(now), 1, False, lambda: False) == 10.0
    assert pulse.silent(5000.0, 1, False, lambda: True) == 12.0, "this process was away itself"
    assert pulse.silent(5001.0, 2, False, lambda: True) == 0.0
    assert pulse.silent(5003.0, 2, True, lambda: True) == 0.0


class _Enough(Exception):
    """Every child has been asked for."""


@pytest.mark.parametrize(
    ("assemblers", "expected"),
    [(1, [("assembler", None)]), (2, [("assembler-0", "0/2"), ("assembler-1", "1/2")])],
)
def test_each_supervised_assembler_has_a_share_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assemblers: int, expected: list[tuple[str, str | None]]
) -> None:
    started: list[_Child] = []

    def start(_: Supervisor, child: _Child) -> None:
        started.append(child)
        if child.role == "trainer":
            raise _Enough

    monkeypatch.setattr(Supervisor, "_start", start)
    site = SiteSettings(assemblers=assemblers, state_dir=str(tmp_path))
    with pytest.raises(_Enough):
        Supervisor({}, RunTopics("r"), site, tmp_path / "run.toml", print)._run()
    assert [(child.name, child.share) for child in started if child.role == "assembler"] == expected
    assert {child.name for child in started} >= {"coordinator", "worker", "trainer"}

"""The contract of the benchmarks: how each is started, and what it says."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import CannotMeasure, Result

ROOT = Path(__file__).parents[2]
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                 for path in (ROOT / "benchmarks").rglob("*.py"))  # fmt: skip
# Started by name from the command line: what the Makefile finds.
NAMES = [path.stem for path in sorted((ROOT / "benchmarks").glob("[!_]*.py")) if "\ndef main" in path.read_text()]


@pytest.mark.slow
def test_a_quick_run_of_the_wire_says_every_figure_and_goal_as_json() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.wire", "--quick", "--json"], capture_output=True,
                          text=True, cwd=ROOT, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows, goals = [one for one in said if "measure" in one], [one for one in said if "goal" in one]
    assert said == rows + goals
    assert {"measure", "subject", "value", "unit"} <= set.intersection(*(set(row) for row in rows))
    assert len(goals) == 5
    exact = [row["value"] for row in rows if row["measure"].startswith("same bits")]
    assert set(exact) == {"yes"}


def test_routing_finds_the_prefixes_of_a_trace_and_keeps_the_load_even(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("benchmarks.routing").main(["--quick", "--json", "--check"]) == 0
    said = json.loads(capsys.readouterr().out)
    hits = {row["subject"]: row["value"] for row in said if row.get("measure", "").endswith("unlimited caches")
            and row["measure"].startswith("hit")}  # fmt: skip
    assert hits["prefix under bounded load"] == hits["ours, as estimated"] > 1.5 * hits["round-robin"]


def test_line_of_a_trace_that_is_no_request_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1}\n')
    assert importlib.import_module("benchmarks.routing").main([str(path)]) == 2
    assert f"{path}, line 2" in capsys.readouterr().err


def sample(options: argparse.Namespace, result: Result) -> None:
    result.row("speed", "ours", harness.spread([3.0, 1.0, 2.0]), "tokens/s")
    result.row("survives kill -9", "theirs", "no")
    result.at_least("faster than theirs", 2.0, 1.5)
    result.at_most("size", None if options.quick else 6.0, 5.2)
    result.note("A note.")


def broken(options: argparse.Namespace, result: Result) -> None:
    raise CannotMeasure("no broker here")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_and_needs_no_other_environment_to_be_imported(module: str) -> None:
    assert (importlib.import_module(module).__doc__ or "").strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_answers_help(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--help"], capture_output=True, text=True,
                          cwd=ROOT, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for option in ("--quick", "--json", "--save", "--check"):
        assert option in done.stdout


def test_json_is_rows_and_then_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.run("sample", "What it shows.", sample, ["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"measure": "speed", "subject": "ours", "value": 2.0, "unit": "tokens/s", "low": 1.0, "high": 3.0},
        {"measure": "survives kill -9", "subject": "theirs", "value": "no", "unit": ""},
        {"goal": "faster than theirs", "got": 2.0, "want": 1.5, "ok": True},
        {"goal": "size", "got": 6.0, "want": 5.2, "ok": False},
    ]


def test_a_goal_that_was_not_measured_is_not_met(capsys: pytest.CaptureFixture[str]) -> None:
    harness.run("sample", "What it shows.", sample, ["--json", "--quick"])
    assert json.loads(capsys.readouterr().out)[-1] == {"goal": "size", "got": None, "want": 5.2, "ok": False}


def test_exit_code_says_missed_goals_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.run("sample", "What it shows.", sample, []) == 0
    assert "NO" in capsys.readouterr().out
    assert harness.run("sample", "What it shows.", sample, ["--check"]) == 1


def test_what_cannot_be_measured_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.run("sample", "What it shows.", broken, []) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "benchmarks.sample: no broker here\n")


def test_saved_results_name_machine_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.run("sample", "What it shows.", sample, ["--save"])
    saved = json.loads((tmp_path / "sample.json").read_text())
    assert {"cores", "cpu", "memory", "kernel"} <= saved["machine"].keys()
    assert {"python", "headrace", "kafka", "confluent-kafka", "fastavro", "numpy"} <= saved["versions"].keys()
    assert saved["results"][0]["measure"] == "speed"
    assert "| speed | ours | 2.000 | tokens/s |" in (tmp_path / "sample.md").read_text()


def test_subjects_take_turns_in_an_order_that_reverses() -> None:
    order: list[str] = []
    harness.alternate({name: lambda name=name: order.append(name) for name in "ab"}, 3, warm=False)  # type: ignore[misc]
    assert "".join(order) == "abbaab"


def test_cpu_time_of_a_process_counts_its_threads_and_children() -> None:
    burn = "import time\ndef burn():\n while time.thread_time() < 0.3: pass\n"
    threads = burn + "from threading import Thread\nt = [Thread(target=burn) for _ in 'ab']\n[x.start() for x in t]"
    children = burn + f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn + 'burn()'!r}])"
    for code, least in ((threads, 0.6), (children, 0.3)):
        ended = harness.run_process([sys.executable, "-c", code])
        assert ended.code == 0, ended.output
        assert ended.cpu_s >= least


def test_peak_memory_of_a_child_is_not_that_of_its_parent() -> None:
    held = bytearray(300 << 20)
    ended = harness.run_process([sys.executable, "-c", "from benchmarks import harness; print(harness.peak_rss())"])
    assert 1 << 20 < int(ended.output.split()[-1]) < len(held)


def test_killed_process_is_reported_by_its_signal() -> None:
    with harness.Started([sys.executable, "-c", "import time; print('up', 7, flush=True); time.sleep(60)"]) as process:
        assert process.expect("up") == "7"
        process.signal(9)
        assert process.wait().code == -9
        assert not process.alive()
    assert not os.path.exists(f"/proc/{process.pid}")

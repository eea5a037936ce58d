"""What all benchmarks share: how one is started, how a figure is taken, and how it is shown.

A benchmark is a module with a docstring, a function `measure(options, result)` and two lines:

    def main(argv: Sequence[str] | None = None) -> int:
        return harness.run("wire", __doc__, measure, argv)

`python -m benchmarks.NAME` prints a table, `--json` a list of rows `{measure, subject, value, unit}` (with `low` and
`high` where it was repeated) and last one `{goal, got, want, ok}` for each goal. `--save` writes both, with the machine
and the versions, to `benchmarks/results/NAME.json` and `.md`. The exit code is 0 whether goals are met or not, 1 with
`--check` where one is missed, 2 where it couldn't be measured.

CPU time is the process's, so native threads (librdkafka compresses and talks to the broker in its own) are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil

from headrace.broker import KAFKA_VERSION, Broker, BrokerError, start_broker

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
VERSIONS = ("headrace", "confluent-kafka", "fastavro", "numpy", "orjson", "zstandard", "xxhash", "psutil")


class CannotMeasure(Exception):
    """Something that the benchmark needs isn't here; the message says what."""


# ------------------------------------------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: `measure` of `subject`. A string as the value says in words what can't be a number."""

    measure: str
    subject: str
    value: float | str
    unit: str = ""
    low: float | None = None  # of the repetitions; `value` is their median
    high: float | None = None

    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items()
                if value is not None or name not in ("low", "high")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goal:
    """`got` is None where it wasn't measured (a part that --quick leaves out)."""

    goal: str
    got: float | None
    want: float
    ok: bool

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of repetitions."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Result:
    """Filled by a benchmark as it goes."""

    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences under the table

    def row(self, measure: str, subject: str, value: float | str | Spread, unit: str = "") -> None:
        if isinstance(value, Spread):
            self.rows.append(Row(measure, subject, value.median, unit, value.low, value.high))
        else:
            self.rows.append(Row(measure, subject, value, unit))

    def at_most(self, goal: str, got: float | None, want: float) -> None:
        self.goals.append(Goal(goal, got, want, got is not None and got <= want))

    def at_least(self, goal: str, got: float | None, want: float) -> None:
        self.goals.append(Goal(goal, got, want, got is not None and got >= want))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def plain(self) -> list[dict[str, Any]]:
        return [row.plain() for row in self.rows] + [goal.plain() for goal in self.goals]


def show(value: float | str | None) -> str:
    """A figure for a reader: three to four digits that mean something."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 3 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, min(digits, 6))}f}" if abs(value) < 1000 else f"{value:,.0f}"


def lines(result: Result) -> tuple[list[list[str]], list[list[str]]]:
    """Table and goals as cells, the first line of each being its head."""
    rows, last = [["measure", "subject", "value", "unit", "lowest to highest"]], ""
    for row in result.rows:
        between = f"{show(row.low)} to {show(row.high)}" if row.low is not None else ""
        rows.append([row.measure if row.measure != last else "", row.subject, show(row.value), row.unit, between])
        last = row.measure
    goals = [["goal", "got", "want", "met"]]
    goals += [[g.goal, show(g.got), show(g.want), "yes" if g.ok else "NO"] for g in result.goals]
    return rows, goals


def text(result: Result) -> str:
    out = []
    for cells in lines(result):
        if len(cells) > 1:
            widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
            right = cells[0].index("value") if "value" in cells[0] else -1
            out += ["  ".join(cell.rjust(width) if i == right else cell.ljust(width)
                              for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
                    for line in cells] + [""]  # fmt: skip
    return "\n".join([*out, *result.notes]).rstrip()


def markdown(name: str, doc: str, result: Result, about: Mapping[str, Any]) -> str:
    out = [f"# {name}", "", *doc.strip().splitlines(), ""]
    out += [f"- {key}: {', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}"
            for key, value in about.items()] + [""]  # fmt: skip
    for cells in lines(result):
        if len(cells) > 1:
            head, *body = cells
            out += ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)] + [""]
    return "\n".join([*out, *(f"{note}\n" for note in result.notes)]).rstrip() + "\n"


# ------------------------------------------------------------------------------------------------ how it is started

Measure = Callable[[argparse.Namespace, Result], None]


def run(name: str, doc: str | None, measure: Measure, argv: Sequence[str] | None = None,
        arguments: Callable[[argparse.ArgumentParser], None] | None = None,
        packages: Sequence[str] = ()) -> int:  # fmt: skip
    """The whole command line of one benchmark; the exit code. `packages`: whose versions matter beside the usual."""
    assert doc
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a small load: shows that it works; the figures are rough")
    parser.add_argument("--json", action="store_true", help="rows and goals as one JSON list")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{name}.json and .md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    if arguments:
        arguments(parser)
    options = parser.parse_args(argv)
    result = Result()
    began = time.monotonic()
    try:
        measure(options, result)
    except CannotMeasure as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    took_s = round(time.monotonic() - began, 1)
    print(json.dumps(result.plain(), indent=1) if options.json else text(result))
    if options.save:
        about = {"machine": machine(), "versions": versions(packages), "took": f"{took_s:g} s",
                 "load": "--quick" if options.quick else "full"}  # fmt: skip
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(
            json.dumps(about | {"results": result.plain(), "notes": result.notes}, indent=1) + "\n"
        )
        (RESULTS / f"{name}.md").write_text(markdown(name, doc, result, about))
    return 1 if options.check and not all(goal.ok for goal in result.goals) else 0


def machine() -> dict[str, str]:
    """What the figures were taken on, and how busy it was besides."""
    model = next((line.split(":", 1)[1].strip() for line in _read("/proc/cpuinfo").splitlines()
                  if line.startswith("model name")), platform.processor() or platform.machine())  # fmt: skip
    return {"cores": str(os.cpu_count()), "cpu": model, "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
            "kernel": f"{platform.system()} {platform.release()}",
            "load average": " ".join(f"{x:.1f}" for x in os.getloadavg())}  # fmt: skip


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    import confluent_kafka

    found = {"python": platform.python_version(), "kafka": KAFKA_VERSION, "librdkafka": confluent_kafka.libversion()[0]}
    for package in (*VERSIONS, *packages):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# ----------------------------------------------------------------------------------------------- how a figure is taken


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds (user and system, all threads) and wall-clock seconds."""

    cpu_s: float
    wall_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)


def cost(call: Callable[[], object]) -> Cost:
    """What one call costs this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def alternate(subjects: Mapping[str, Callable[[], T]], repetitions: int, warm: bool = True) -> dict[str, list[T]]:
    """What each subject returned, `repetitions` times. They take turns, in an order that reverses each time, so that a
    neighbour's load or a warming machine meets all of them alike. `warm`: one turn before that doesn't count."""
    if warm:
        for call in subjects.values():
            call()
    results: dict[str, list[T]] = {name: [] for name in subjects}
    for turn in range(repetitions):
        for name in list(subjects) if turn % 2 == 0 else list(subjects)[::-1]:
            results[name].append(subjects[name]())
    return results


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended. Its children are counted as far as it waited for them."""

    code: int  # negative: by that signal
    output: str  # stdout and stderr
    cpu_s: float
    wall_s: float

    def last_json(self) -> Any:
        """What it printed on its last line. Raises CannotMeasure where it printed something else, or failed."""
        try:
            if self.code == 0:
                return json.loads(self.output.strip().splitlines()[-1])
        except (ValueError, IndexError):
            pass
        raise CannotMeasure(f"a measured process ended with {self.code}:\n{self.output[-2000:]}")


class Started:
    """A process that is measured from outside; killed at the end of `with`. What it prints, errors too, is kept."""

    def __init__(self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
        """`env`: over this process's own variables."""
        self._output = tempfile.TemporaryFile("w+")
        self._began = time.monotonic()
        self._process = subprocess.Popen([str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=self._output,
                                         stderr=subprocess.STDOUT, cwd=cwd,
                                         env={**os.environ, **(env or {})})  # fmt: skip
        self.pid = self._process.pid
        self._ended: Ended | None = None

    def cpu_s(self) -> float:
        """CPU seconds so far, with the children it waited for and those that live."""
        return cpu_of(self.pid)

    def output(self) -> str:
        """What it printed so far."""
        self._output.flush()
        return os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0).decode(errors="replace")

    def expect(self, marker: str, timeout_s: float = 600.0) -> str:
        """Wait until it has printed a line that begins with `marker`; the rest of that line. Raises CannotMeasure."""
        end = time.monotonic() + timeout_s
        while True:
            for line in self.output().splitlines(keepends=True):
                if line.startswith(marker) and line.endswith("\n"):
                    return line[len(marker) :].strip()
            if not self.alive() or time.monotonic() > end:
                raise CannotMeasure(f"a measured process never said {marker!r}:\n{self.output()[-2000:]}")
            time.sleep(0.01)

    def alive(self) -> bool:
        if self._ended is None and psutil.pid_exists(self.pid):
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        return False

    def signal(self, number: int = signal.SIGTERM) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 600.0) -> Ended:
        """Its end. One that takes longer is killed, and CannotMeasure raised."""
        if self._ended is not None:
            return self._ended
        end = time.monotonic() + timeout_s
        while True:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                self.wait(10.0)
                raise CannotMeasure(f"a measured process took longer than {timeout_s:g} s:\n{self.output()[-2000:]}")
            time.sleep(0.005)
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code  # it is reaped: the Popen object must not wait for it again
        self._ended = Ended(code, self.output(), usage.ru_utime + usage.ru_stime, time.monotonic() - self._began)
        return self._ended

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ended is None:
            self.signal(signal.SIGKILL)
            self.wait(30.0)
        self._output.close()


def run_process(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT,
                timeout_s: float = 600.0) -> Ended:  # fmt: skip
    """Run a process to its end. Raises CannotMeasure where it takes too long; its code is the caller's to judge."""
    with Started(argv, env=env, cwd=cwd) as process:
        return process.wait(timeout_s)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, with its children. 0.0 where it is gone."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    except psutil.NoSuchProcess:
        pass
    return total


def rss_of(pid: int) -> int:
    """Resident bytes of a process now; 0 where it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def peak_rss() -> int:
    """Bytes: the most that this process held since it was started. (What the kernel says in `ru_maxrss` would also hold
    what its parent held when it forked.)"""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ----------------------------------------------------------------------------------------------------------- the broker


@contextlib.contextmanager
def temporary_broker(config: Mapping[str, str | int] | None = None) -> Iterator[Broker]:
    """A real broker for this benchmark alone; it dies with this process and its data are removed.
    `config`: broker properties over the defaults of the development broker."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        broker = _patiently(Path(home) / "broker", config)
        try:
            yield broker
        finally:
            broker.stop()


def _patiently(home: Path, config: Mapping[str, str | int] | None) -> Broker:
    """Starting has a time limit, which a machine busy with other work can miss once."""
    for again in (True, True, False):
        try:
            return start_broker(home, owner=True, config=config)
        except BrokerError as error:
            if not again:
                raise CannotMeasure(str(error)) from error
    raise AssertionError("unreachable")


def kafka_of(broker: Broker) -> dict[str, Any]:
    """The client properties that reach it."""
    return {"bootstrap.servers": broker.bootstrap}


def log_bytes(broker: Broker, topic: str) -> int:
    """Bytes of a topic on the broker's disk: record batches as they were sent, framing and control records included,
    indexes and unused room not."""
    files = (broker.home / "data").glob(f"{topic}-*/*.log")
    return sum(file.stat().st_size for file in files if file.parent.name.rpartition("-")[0] == topic)

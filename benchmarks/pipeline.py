"""The pipeline: from producers to the manifest, through the real broker, beside what others would use.

(a) The assembler, a process of its own, against a process that only consumes and decodes the same records of
`trajectories` (`decode`: to our event objects; `columns`: the token columns to arrays too).
(b) Tokens per CPU second from producer to manifest of all of Headrace's processes, against a pipeline of the same shape
in JSON. (c) The same episodes through other data planes, each in its own environment (`--setup` makes them).

Tokens are model tokens; groups of eight episodes, batches of groups. The episodes are those that a real model sampled
(benchmarks/planes/load.py): as they are (a few hundred tokens), and sixteen of them as one (several thousand), since
JSON costs by the token and a log by the record. CPU seconds are of all processes of a plane from the first event on,
their start left out; a broker's, or a framework's own servers', stand apart. Wall-clock runs from the producer's start
to the last batch. Bytes: what a plane writes to topics, or sends through sockets, per token. "Survives kill -9": the
process that holds episodes between producer and batch is killed when the first batch is there and, where it can be,
started again; then every group has to arrive, once.

The docstrings of benchmarks/planes say how each plane is used and what it does not do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from . import harness, samples
from .harness import CannotMeasure, Result, spread
from .planes import atropos, headrace, json_kafka, load, quix, transferqueue
from .planes.running import Ran, Work
from .planes.venvs import NotInstallable

BATCH = 16  # groups, of the short load
CHAIN = 16  # completions in an episode of the long one
Plane = Callable[[Work, bool], Ran]
OWN: dict[str, Plane] = {headrace.NAME: headrace.run, json_kafka.NAME: json_kafka.run}
OTHERS: dict[str, Plane] = {quix.NAME: quix.run, transferqueue.NAME: transferqueue.run, atropos.NAME: atropos.run}


def measure(options: argparse.Namespace, result: Result) -> None:
    planes = OWN if options.own else {**OWN, **OTHERS}
    if options.setup:
        for name, module in ((quix.NAME, quix), (transferqueue.NAME, transferqueue), (atropos.NAME, atropos)):
            try:
                result.row("environment", name, str(module.VENV.make()))
            except NotInstallable as error:
                result.row("environment", name, f"not installable: {error}")
        return
    groups, repetitions = (32, 1) if options.quick else (options.groups, options.repetitions)
    completions = samples.load()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, harness.temporary_broker() as broker:

        def work(chain: int) -> Work:
            path = Path(folder) / f"load-{chain}.npz"
            count = max(2, groups // chain)
            tokens = load.write(path, completions, count, chain)
            batch = max(1, min(BATCH, groups // 2) // chain)
            about = f"{tokens / count / 8:,.0f} tokens an episode"
            return Work(broker, Path(folder), path, count, batch, tokens, about)

        short, long = work(1), work(CHAIN)
        bare = {one.about: against_bare(one, repetitions, result) for one in (short, long)}
        rates = {one.about: throughput(one, one_planes, repetitions, result)
                 for one, one_planes in ((short, planes), (long, OWN))}  # fmt: skip
        survival(short, planes, result)
    for one in (short, long):
        result.at_most(f"assembler's CPU: times bare consume + decode, {one.about}", bare[one.about], 2)
        times = rates[one.about][headrace.NAME] / rates[one.about][json_kafka.NAME]
        result.at_least(f"producer to manifest, tokens per CPU second: times JSON, {one.about}", times, 10)
        result.note(f"{one.about}: {one.groups} groups of 8 episodes, {one.tokens:,} model tokens, batches of "
                    f"{one.batch} groups.")  # fmt: skip


def against_bare(work: Work, repetitions: int, result: Result) -> float:
    """(a). How many times the assembler costs what decoding alone costs."""
    turns = [headrace.assembler_and_bare(work) for _ in range(repetitions)]
    for name in turns[0]:
        speed = spread([work.tokens / turn[name] for turn in turns])
        result.row(f"same records, {work.about}", name, speed, "tokens per CPU second")
    ratios = {bare: spread([turn["assembler"] / turn[bare] for turn in turns])
              for bare in (headrace.BARE, headrace.COLUMNS)}  # fmt: skip
    for bare, ratio in ratios.items():
        result.row(f"same records, {work.about}", f"assembler against {bare}", ratio, "times the CPU")
    return ratios[headrace.BARE].median


def throughput(work: Work, planes: dict[str, Plane], repetitions: int, result: Result) -> dict[str, float]:
    """(b) and (c): median tokens per CPU second of each plane that could be measured."""
    runs: dict[str, list[Ran]] = {name: [] for name in planes}
    reasons: dict[str, str] = {}
    for turn in range(repetitions):
        for name in list(planes) if turn % 2 == 0 else list(planes)[::-1]:
            if name in reasons:
                continue
            try:
                runs[name].append(whole(name, planes[name](work, False), work))
            except (NotInstallable, CannotMeasure) as error:
                if name in OWN:
                    raise
                reasons[name] = f"not measured: {error}".splitlines()[0]
    measured = {name: ran for name, ran in runs.items() if ran and name not in reasons}
    rates: dict[str, float] = {}
    for name, ran in measured.items():
        speed = spread([work.tokens / sum(one.cpu_s.values()) for one in ran])
        rates[name] = speed.median
        result.row(f"producer to batch, {work.about}", name, speed, "tokens per CPU second")
    for name, reason in reasons.items():
        result.row(f"producer to batch, {work.about}", name, reason)
    for name, ran in measured.items():
        result.row(f"wall-clock, {work.about}", name, spread([one.wall_s for one in ran]), "s")
    for name, ran in measured.items():
        result.row(f"bytes, {work.about}", name, spread([one.moved / work.tokens for one in ran]), "per token")
    for name, ran in measured.items():
        for process in ran[0].cpu_s:
            cpu = spread([one.cpu_s[process] * 1e6 / work.tokens for one in ran])
            result.row(f"CPU of {name}, {work.about}", process, cpu, "s per million tokens")
        for process in ran[0].beside_s:
            cpu = spread([one.beside_s[process] * 1e6 / work.tokens for one in ran])
            result.row(f"CPU of {name}, {work.about}", f"{process} (apart)", cpu, "s per million tokens")
    return rates


def whole(name: str, ran: Ran, work: Work) -> Ran:
    lost, doubled = ran.lost(work.groups), ran.doubled()
    if lost or doubled:
        raise CannotMeasure(f"{name}: of {work.groups} groups {lost} didn't arrive and {doubled} came twice")
    return ran


def survival(work: Work, planes: dict[str, Plane], result: Result) -> None:
    for name, plane in planes.items():
        try:
            ran = plane(work, True)
        except (NotInstallable, CannotMeasure) as error:
            result.row("survives kill -9", name, f"not measured: {error}".splitlines()[0])
            continue
        lost, doubled = ran.lost(work.groups), ran.doubled()
        survives = "no" if lost or doubled else "yes"
        result.row("survives kill -9", name, f"{survives}: {ran.killed}; of {work.groups} groups {lost} lost, "
                                             f"{doubled} twice")  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--setup", action="store_true", help="only make the other planes' environments")
    parser.add_argument("--own", action="store_true", help="leave the other planes out")
    parser.add_argument("--groups", type=int, default=192, help="length of the load (default: 192)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each run (default: 3)")


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("pipeline", __doc__, measure, argv, arguments)


if __name__ == "__main__":
    sys.exit(main())

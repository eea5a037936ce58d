"""`python -m tests.chaos [--faults N] [--seed S]`: chaos, with a table at its end. Exit 1 where anything differs."""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from headrace.broker import KAFKA_VERSION

from .faults import schedule
from .run import Done, Result, chaos

SHOWN = 20  # differences of one kind
FULL = 100  # faults from which on the result goes to benchmarks/results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, help="how many (default: the short schedule, one of most kinds)")
    parser.add_argument("--seed", type=int, help="of schedule and load (default: drawn, and printed)")
    parser.add_argument("--out", type=Path, help="folder for chaos-SEED.json and .md (default from "
                                                 f"{FULL} faults on: benchmarks/results)")  # fmt: skip
    given = parser.parse_args()
    if sys.platform != "linux" or shutil.which("cc") is None:
        parser.error("it needs Linux and a C compiler: clocks of processes are set by a library made here")
    seed = random.SystemRandom().randrange(10_000) if given.seed is None else given.seed
    for signum in (signal.SIGINT, signal.SIGTERM):  # what it started ends in every case; like this in good order
        signal.signal(signum, _interrupted)
    home = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    kinds = schedule(seed, given.faults)
    print(f"chaos: {len(kinds)} faults, seed {seed}, in {home}", flush=True)
    result = Result(seed)
    try:
        chaos(home, kinds, result, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        result.failed = "interrupted"
    lines = [*report(result), ""]
    print("\n".join(lines))
    if result.good:
        shutil.rmtree(home, ignore_errors=True)
    else:
        length = "" if given.faults is None else f" --faults {given.faults}"
        print(f"logs and data are kept in {home}; the same again: python -m tests.chaos --seed {seed}{length}")
    out = given.out or (Path("benchmarks/results") if len(kinds) >= FULL and result.good else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        facts = {**_machine(), **asdict(result)}
        for fault in facts["faults"]:  # times of a clock that nobody else has
            fault["seconds"] = fault.pop("ended") - fault.pop("began")
        (out / f"chaos-{seed}.json").write_text(json.dumps(facts, indent=1))
        (out / f"chaos-{seed}.md").write_text("\n".join([f"# Chaos: {len(result.faults)} faults, seed {seed}", "",
                                                         *(f"{k}: {v}  " for k, v in _machine().items()), "",
                                                         *report(result)]) + "\n")  # fmt: skip
        print(f"written to {out}/chaos-{seed}.json and .md")
    return 0 if result.good else 1


def _interrupted(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def report(result: Result) -> Iterator[str]:
    """The table by kind of fault, then the account; as Markdown."""
    yield "| fault | count | longest stall, s | roles that died of it |"
    yield "|---|---|---|---|"
    by_kind: dict[str, list[Done]] = {}
    for fault in result.faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    for kind, faults in sorted(by_kind.items(), key=lambda item: -max(f.stall_s for f in item[1])):
        yield f"| {kind} | {len(faults)} | {max(f.stall_s for f in faults):.1f} | {sum(f.deaths for f in faults)} |"
    yield f"| all | {len(result.faults)} | {max((f.stall_s for f in result.faults), default=0.0):.1f} | |"
    yield ""
    if result.groups:
        yield (f"{result.groups} groups, {result.attempts} counted slots tried again; lost {len(result.lost)}, doubled "
               f"{len(result.doubled)}, different {len(result.different)}; "
               f"ledgers {'do not close' if result.ledger else 'close'}")  # fmt: skip
    else:
        yield "nothing was compared"
    if result.faults:
        worst = max(result.faults, key=lambda f: f.stall_s)
        yield (f"longest stall {worst.stall_s:.1f} s, by fault {worst.number}: {worst.kind} ({worst.what}); without "
               f"faults {result.calm_stall_s:.1f} s")  # fmt: skip
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())
    yield f"calm and disturbed run are {'equal' if result.good else 'NOT proved equal'} ({took})"
    if result.deaths:
        yield "roles that died by themselves, and were started again:"
        said = collections.Counter(line[:200] for line in result.deaths)
        yield from (f"- {count} x {line}" for line, count in said.most_common())
    for what in ("lost", "doubled", "different", "ledger"):
        found = getattr(result, what)
        yield from (f"{what}: {line}" for line in found[:SHOWN])
        if len(found) > SHOWN:
            yield f"{what}: and {len(found) - SHOWN} more"
    if result.failed:
        yield f"FAILED (seed {result.seed}): {result.failed}"
        yield "faults so far: " + "; ".join(f"{f.number} {f.kind} ({f.what})" for f in result.faults)


def _machine() -> dict[str, str]:
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": f"headrace {version('headrace')}, Python {platform.python_version()}, Kafka {KAFKA_VERSION}, "
                    f"confluent-kafka {version('confluent-kafka')}",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

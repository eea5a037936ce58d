"""`python -m tests.oracle FILE`: compare what peers' own code computed with what ours does, case by case.

Prints a line per case, then `N passed, M failed, K deviating`: deviating cases are those of docs/corrections.md, in
which ours differs on purpose and is what is stated there. Exit 1 where anything failed (a function or a setting that
isn't known is a failure), 2 where the file can't be read.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import HeadraceError

from . import peers, verl
from .cases import RTOL, Case, NotCovered, differences, read
from .deviations import DEVIATIONS

FUNCTIONS = {**verl.FUNCTIONS, **peers.FUNCTIONS}


@dataclass(frozen=True)
class Outcome:
    id: str
    verdict: str  # passed | failed | deviates
    detail: str


def run(case: Case) -> Outcome:
    if case.function not in FUNCTIONS:
        return Outcome(case.id, "failed", f"no counterpart to function {case.function!r}")
    rtol = RTOL["float32" if case.function in peers.SINGLE else case.dtype]
    try:
        got = FUNCTIONS[case.function](case.parameters, case.inputs)
    except NotCovered as error:
        return Outcome(case.id, "failed", f"no counterpart to {error}")
    except (HeadraceError, ValueError) as error:  # settings that are refused: as the peer's, or a failure
        refused = f"refused: {error}".splitlines()
        expected = "raises" in case.expected
        return Outcome(case.id, "passed" if expected else "failed", " ".join(line.strip() for line in refused))
    except (KeyError, TypeError, IndexError, RuntimeError) as error:
        return Outcome(case.id, "failed", f"inputs or parameters of another form: {type(error).__name__}: {error}")
    wrong = (["expected to raise " + case.expected["raises"]] if "raises" in case.expected
             else differences(got, case.expected, rtol))  # fmt: skip
    if case.id in DEVIATIONS:
        deviation = DEVIATIONS[case.id]
        if not wrong:
            return Outcome(case.id, "failed", "listed as deviating, and equal")
        if stated := differences(got, deviation.ours, max(rtol, 1e-6)):
            return Outcome(case.id, "failed", "deviates otherwise than stated: " + "; ".join(stated))
        return Outcome(case.id, "deviates", deviation.why)
    return Outcome(case.id, "failed" if wrong else "passed", "; ".join(wrong))


def summary(outcomes: Iterable[Outcome]) -> str:
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    said = f"{counts['passed']} passed, {counts['failed']} failed"
    return said + (f", {counts['deviates']} deviating (docs/corrections.md)" if counts["deviates"] else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).parents[1] / "data/oracle/cases.json",
                        help="cases; default: the repository's own copy")  # fmt: skip
    outcomes = [run(case) for case in read(parser.parse_args(argv).file)]
    for outcome in outcomes:
        print(f"{outcome.verdict:<8} {outcome.id}" + (f": {outcome.detail}" if outcome.detail else ""))
    print(summary(outcomes))
    return int(any(outcome.verdict == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

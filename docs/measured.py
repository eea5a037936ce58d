"""Figures in pages: taken from benchmarks/results/ by `python -m docs.reference`, so that a page can't say what a newer
result no longer says.

A page names what it shows in a comment: the benchmark, then the rows, each a line `measure`, or `measure | subject |
...` for some of its subjects. All goals of that benchmark follow, missed ones too: a page can't leave one out. Up to
`<!-- end -->` nothing is written by hand. `<!-- measured: all -->` is the table of all benchmarks with the goals that
they miss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Goal, Result, Row, lines, show

PAGES = Path(__file__).parent
_PLACE = re.compile(r"(<!-- measured: ([\w-]+)\n?(.*?)-->\n).*?(<!-- end -->)", re.DOTALL)


class NoSuchFigure(Exception):
    """A page names a row that the results don't have."""


def pages() -> dict[Path, str]:
    """Each page of docs/ that shows figures -> what it must hold. Raises NoSuchFigure."""
    found = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    return {path: filled(text) for path, text in found.items() if _PLACE.search(text)}


def filled(text: str) -> str:
    """The page with its figures as they are in the results. Raises NoSuchFigure."""
    return _PLACE.sub(lambda m: f"{m[1]}\n{_all() if m[2] == 'all' else _shown(m[2], m[3])}\n\n{m[4]}", text)


def prose(text: str) -> str:
    """What of a page is written by hand."""
    return _PLACE.sub("", text)


def _shown(name: str, wanted: str) -> str:
    facts = _facts(name)
    if facts is None:
        return f"No result is saved yet; `{_command(name)} --save` makes it."
    result = _result(name, facts)
    rows = [row for line in wanted.strip().splitlines() for row in _named(name, result.rows, line)]
    tables = lines(Result(rows, result.goals))
    said = f"`{_command(name)}`: [all rows, machine and versions](../benchmarks/results/{name}.md)."
    return "\n\n".join([said, *("\n".join(_markdown(cells)) for cells in tables if len(cells) > 1)])


def _named(name: str, rows: Sequence[Row], line: str) -> list[Row]:
    measure, *subjects = (part.strip() for part in line.split(" | "))
    found = [row for row in rows if row.measure == measure]
    if missing := set(subjects) - {row.subject for row in found} if found else {measure}:
        raise NoSuchFigure(f"benchmarks/results/{name}.json has no row {', '.join(sorted(missing))!r} (asked for by "
                           f"{line!r}): name one that is there, or measure again")  # fmt: skip
    return [row for row in found if not subjects or row.subject in subjects]


def _markdown(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *body = cells
    for line in (head, ["---"] * len(head), *body):
        yield "| " + " | ".join("**NO**" if cell == "NO" else cell for cell in line) + " |"


def _all() -> str:
    cells = [["benchmark", "goals", "missed", "which"]]
    for name in _benchmarks():
        facts = _facts(name)
        if facts is None:
            cells.append([f"`{_command(name)}`", "", "", "no result is saved yet"])
            continue
        goals = _result(name, facts).goals
        missed = [f"{goal.goal}: {show(goal.got)}, wanted {show(goal.want)}" for goal in goals if not goal.ok]
        cells.append([f"`{_command(name)}`", str(len(goals)), str(len(missed)), "; ".join(missed)])
    return "\n".join(_markdown(cells))


def _benchmarks() -> list[str]:
    """All that can be measured, with a result or without."""
    modules = (path for path in RESULTS.parent.glob("[!_]*.py") if "\ndef main" in path.read_text())
    return sorted({path.stem for path in modules} | {path.stem for path in RESULTS.glob("*.json")})


def _command(name: str) -> str:
    if name.startswith("chaos"):
        return "make chaos FAULTS=200"
    return "python -m benchmarks.collect --real" if name == "collect_real" else f"python -m benchmarks.{name}"


def _facts(name: str) -> dict[str, Any] | None:
    """What is saved of it; None where nothing is, or only a --quick run, whose figures are rough."""
    path = RESULTS / f"{name}.json"
    facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"load": "--quick"}
    return None if facts.get("load") == "--quick" else facts


def _result(name: str, facts: Mapping[str, Any]) -> Result:
    if name.startswith("chaos"):
        return _chaos(facts)
    rows = [Row(**one) for one in facts["results"] if "measure" in one]
    return Result(rows, [Goal(**one) for one in facts["results"] if "goal" in one])


def _chaos(facts: Mapping[str, Any]) -> Result:
    """The chaos run's facts (`tests/chaos/outcome.py`) as rows and goals."""
    result = Result()
    result.row("faults", f"of {len({one['kind'] for one in facts['faults']})} kinds", len(facts["faults"]))
    result.row("groups", "", facts["groups"])
    result.row("slots tried again", "", facts["attempts"])
    result.row("longest time without a closure", "with faults", max(one["stall_s"] for one in facts["faults"]), "s")
    result.row("longest time without a closure", "calm", facts["calm_stall_s"], "s")
    result.row("roles that ended by themselves, and were started again", "", len(facts["deaths"]))
    for what in ("lost", "doubled", "different"):
        result.at_most(f"groups {what}", len(facts[what]), 0)
    result.at_most("findings of the ledger", len(facts["ledger"]), 0)
    return result

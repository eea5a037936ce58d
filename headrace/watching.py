"""`headrace status RUN --follow`: the same as `status`, and the report's verdicts, live until Ctrl-C or the run's end.

Each record of the small topics is read once. The ledger isn't audited here: that takes every event again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from headrace.consumers.letters import dead_letters
from headrace.consumers.report import Report, glance
from headrace.consumers.run import Run
from headrace.consumers.tables import SmallTopics

from .plain import dumps
from .reading import status_lines, until_interrupted
from .reporting import report_row, verdict_lines

EVERY_S = 2.0
ENDED = "It has ended: no process of the run writes any more."


def watch(run: Run, as_json: bool) -> None:
    """Until Ctrl-C, or until no process of the run has written for a while. A terminal shows the newest state in place;
    elsewhere a block is printed whenever something has happened, or one JSON object a line."""
    small = SmallTopics()
    with until_interrupted() as stop, _screen() as show:
        before: object = None
        while not stop.is_set():
            source = run.snapshot()
            letters = dead_letters(source)
            found = glance(source, run.settings, int(time.time() * 1000), small.read(source), letters)
            if as_json or show is not _print or before != (before := _happened(found)) or found.state.over:
                lines = [*status_lines(run.name, found.state, letters, found.figures.waits), "", *verdict_lines(found)]
                show([dumps(report_row(found))] if as_json else [*lines, *([ENDED] if found.state.over else [])])
            if found.state.over:
                return
            stop.wait(EVERY_S)


def _happened(found: Report) -> object:
    """What makes a new block worth printing: not that time passes."""
    now = found.state
    return now.version, now.published, now.batch, sum(now.closed.values()), now.dead_letters


@contextmanager
def _screen() -> Iterator[Callable[[Iterable[str]], None]]:
    if not sys.stdout.isatty():
        yield _print
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda lines: live.update(Text("\n".join(lines)), refresh=True)


def _print(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)

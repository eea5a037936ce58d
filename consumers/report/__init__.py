"""The report of a run: six questions on one page, each with its verdict, figures and a plot.

`gather` reads the log once and holds every number; `sections` says in words what they mean; `page` lays it out. The
command line's `--json` are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import EVALS

from ..calibration import Calibration, calibration
from ..facts import Fact, Failures, read_facts
from ..figures import Figures, figures
from ..ledger import Ledger, audit
from ..letters import DeadLetters, dead_letters
from ..source import LogSource
from ..state import State, state
from ..tables import read_small
from .questions import (
    Alignment,
    Freshness,
    Reliability,
    Suite,
    Transport,
    alignment,
    evaluation,
    freshness,
    reliability,
    transport,
)

__all__ = ["Report", "gather", "glance"]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the page shows, as of one moment."""

    run: str
    model: str
    made_ms: int
    state: State
    figures: Figures
    freshness: Freshness
    calibration: Calibration
    alignment: Alignment
    reliability: Reliability
    transport: Transport
    evaluation: tuple[Suite, ...]
    ledger: Ledger | None  # None: not audited, since that takes reading every event

    @property
    def begun(self) -> bool:
        """Whether anything was asked for or leased yet."""
        return self.figures.elapsed_s is not None

    @property
    def running(self) -> bool:
        """Whether any worker is alive."""
        return bool(self.state.alive)


def gather(source: LogSource, settings: RunSettings, now_ms: int) -> Report:
    """Reads all of the run's small topics, and the raw events for the ledger."""
    return glance(source, settings, now_ms, read_small(source), dead_letters(source), audit(source))


def glance(source: LogSource, settings: RunSettings, now_ms: int, facts: Sequence[Fact[Any]], letters: DeadLetters,
           ledger: Ledger | None = None) -> Report:  # fmt: skip
    """As `gather`, of small topics and dead letters that were read already."""
    scores = [fact.event for fact in read_facts(source, EVALS, 0, Failures())]
    return Report(
        run=source.run, model=settings.model.path, made_ms=now_ms,
        state=state(facts, settings, now_ms, letters.count), figures=figures(facts),
        freshness=freshness(facts), calibration=calibration(facts, settings.staleness.floor),
        alignment=alignment(facts), reliability=reliability(facts),
        transport=transport(facts, settings.weights), evaluation=evaluation(scores), ledger=ledger,
    )  # fmt: skip

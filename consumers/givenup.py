"""Which versions were trained for nothing: those that a rollback gave up. Their tokens are excluded, not trained.

Read beforehand, since a rollback comes after the versions that it is about; `policy` is small.
"""

from __future__ import annotations

from headrace.schemas.events import Reconciled, Version
from headrace.schemas.topics import POLICY

from .facts import Failures, read_facts
from .source import LogSource

ROLLED_BACK = "rolled_back"


def given_up(source: LogSource) -> frozenset[int]:
    """Their numbers."""
    parents: dict[int, int] = {}
    gone: set[int] = set()
    tip = -1
    for fact in read_facts(source, POLICY, 0, Failures()):
        event = fact.event
        if isinstance(event, Version):
            tip, parents[event.version] = event.version, event.parent
        elif isinstance(event, Reconciled) and event.rule == "rollback":
            while tip > event.checkpoint and tip in parents:
                gone.add(tip)
                tip = parents[tip]
            tip = event.checkpoint
    return frozenset(gone)

"""Whoever reads a run: the reader's SDK, the ledger, the figures."""

from .ledger import Ledger, audit
from .run import GroupView, Run, list_runs, open_run

__all__ = ["GroupView", "Ledger", "Run", "audit", "list_runs", "open_run"]

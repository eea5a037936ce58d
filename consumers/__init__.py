"""Whoever reads a run: the reader's SDK, its tables and lineage, the ledger, the figures, the report.

What is named here is the public surface. It follows semantic versioning with the package: until the next major version
names stay, arguments are only added, with defaults, and columns of tables are only added. What is in a module and not
named here may change. Importing it loads neither pyarrow nor pandas nor polars.
"""

from headrace.streams.log.transactions import Output

from .groups import GroupView
from .ledger import Ledger, audit
from .run import Run, list_runs, open_run
from .selection import FromVersion, Start
from .service import Service
from .stream import Stream

__all__ = ["FromVersion", "GroupView", "Ledger", "Output", "Run", "Service", "Start", "Stream", "audit", "list_runs",
           "open_run"]  # fmt: skip

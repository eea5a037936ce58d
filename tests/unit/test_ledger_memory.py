"""The audit remembers what is open or undecided, and nothing else."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from benchmarks._long_run import FileLog, Shape, write_run
from headrace.consumers.ledger import audit

SHAPE = Shape(slots=2, spans=1, span_tokens=8, prompt_tokens=4, batch=8, partitions=2)


def peak(folder: Path, groups: int) -> int:
    """Bytes of Python objects that the audit of so long a run held at most. (SQLite's cache has a limit of its own.)"""
    write_run(folder, groups, SHAPE)
    log = FileLog(folder)
    tracemalloc.start()
    try:
        ledger = audit(log)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        assert ledger.failures == [] and ledger.tokens == {"trained": groups * SHAPE.group_tokens}


def test_the_audits_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    peak(tmp_path / "warm", 8)  # what is loaded once
    short, long = peak(tmp_path / "short", 40), peak(tmp_path / "long", 240)
    assert long < 1.2 * short, (short, long)

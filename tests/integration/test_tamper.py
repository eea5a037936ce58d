"""Whatever is removed, altered or repeated on the log, the ledger fails and names it."""

from __future__ import annotations

from headrace.consumers.ledger import audit
from tests.memory_log import MemoryLog
from tests.synthetic_log import synthetic_run
from tests.tampering import referred_to, tamperings


def check_every_tampering(log: MemoryLog) -> int:
    assert audit(log).closes, audit(log).failures
    unnoticed, tried = [], 0
    for tampering in tamperings(log, referred_to(log)):
        tried += 1
        if not tampering.noticed():
            unnoticed.append(f"{tampering}: {audit(tampering.log).failures}")
    assert not unnoticed, f"{len(unnoticed)} of {tried}:\n" + "\n".join(unnoticed)
    return tried


def test_every_tampering_with_a_written_run_is_named() -> None:
    assert check_every_tampering(synthetic_run().log) > 500

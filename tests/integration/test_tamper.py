"""Whatever is removed, altered or repeated on the log, the ledger fails and names it."""

from __future__ import annotations

from tests.synthetic_log import synthetic_run
from tests.tampering import check_every_tampering


def test_every_tampering_with_a_written_run_is_named() -> None:
    assert check_every_tampering(synthetic_run().log) > 500

"""Which publications lead from what is served to what is wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.producers.publications import Publications, Published
from headrace.schemas.codec import encode
from headrace.schemas.delta import DELTA, HASH_ALGORITHM, PATH, SNAPSHOT
from headrace.schemas.errors import WrongBase
from headrace.schemas.events import Publication
from headrace.schemas.hashes import GENESIS
from headrace.streams.log.reader import Record

Row = tuple[int, str, int, int]  # version, kind, base, bytes


def publications(*rows: Row) -> Publications:
    found = Publications()
    for offset, (version, kind, base, size) in enumerate(rows):
        record = Publication(offset, GENESIS, "trainer", version, kind, base, b"", HASH_ALGORITHM, b"", None, (), size,
                             0, 0, 0)  # fmt: skip
        assert found.note(Record("policy", 0, offset, 0, None, encode(record)))
    return found


def way(route: list[Published]) -> list[tuple[int, str]]:
    return [(p.record.version, p.record.kind) for p in route]


CHAIN: tuple[Row, ...] = (
    (0, PATH, -1, 0), (1, DELTA, 0, 10), (2, DELTA, 1, 10), (3, DELTA, 2, 10), (3, SNAPSHOT, -1, 25), (4, DELTA, 3, 10),
    (5, DELTA, 4, 10),
)  # fmt: skip


def test_deltas_follow_one_another() -> None:
    assert way(publications(*CHAIN).route(3, 5)) == [(4, DELTA), (5, DELTA)]
    assert way(publications(*CHAIN).route(2, 3)) == [(3, DELTA)], "a snapshot of the same version costs more"
    assert publications(*CHAIN).route(5, 5) == []


def test_newcomer_takes_the_way_with_the_fewest_bytes() -> None:
    assert way(publications(*CHAIN).route(0, 5)) == [(3, SNAPSHOT), (4, DELTA), (5, DELTA)]
    cheap = [(v, k, b, 1 if k == DELTA else s) for v, k, b, s in CHAIN]
    assert [v for v, _ in way(publications(*cheap).route(0, 5))] == [1, 2, 3, 4, 5]


def test_publication_that_was_refused_is_bypassed_by_a_later_snapshot() -> None:
    assert way(publications(*CHAIN).route(0, 5, without={1})) == [(3, SNAPSHOT), (4, DELTA), (5, DELTA)]


def test_break_without_a_later_snapshot_is_an_error_that_says_where() -> None:
    with pytest.raises(WrongBase, match="breaks at version 5"):
        publications(*CHAIN).route(3, 5, without={6})
    with pytest.raises(WrongBase, match="breaks at version 2"):
        publications(*CHAIN[:4]).route(0, 3, without={2})


def test_snapshot_of_an_older_version_is_no_way_forward() -> None:
    with pytest.raises(WrongBase):
        publications(*CHAIN).route(4, 5, without={6})


def test_from_nothing_the_way_begins_with_full_weights() -> None:
    found = publications(*CHAIN)
    assert way(found.route(None, 5)) == [(3, SNAPSHOT), (4, DELTA), (5, DELTA)]
    assert way(found.route(None, 5, without={4}))[0] == (0, PATH)
    assert way(found.route(None, 2))[0] == (0, PATH)
    with pytest.raises(WrongBase, match="any full weights"):
        found.route(None, 5, without={0, 4})


def test_receiver_needs_no_torch() -> None:
    code = "import sys, headrace.producers.receiver; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

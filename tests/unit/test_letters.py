"""What readers see of dead letters: how many, of what, and the bytes themselves; by a read that stays small."""

from __future__ import annotations

import base64
from dataclasses import replace

from headrace.consumers.letters import dead_letters
from headrace.plain import hexdump, record_row, record_text
from headrace.reading import letters_row, letters_text
from headrace.schemas.codec import decode
from headrace.schemas.events import DeadLetter
from headrace.schemas.topics import RunTopics
from tests.memory_log import MemoryLog

TOPICS = RunTopics("dead")
GARBAGE = b"not avro \x00\xff" * 20


def letters(count: int) -> MemoryLog:
    """Every third one of another kind."""
    log = MemoryLog.empty("dead", {})
    for number in range(count):
        kind = "InvalidRecord" if number % 3 == 2 else "UndecodableRecord"
        origin = (TOPICS.name("trajectories"), 1, number)
        log.append("deadletter", 0, DeadLetter(*origin, kind, f"reason {number}", b"\xfe", GARBAGE))
    return log


def test_letters_are_counted_by_kind_and_topic_with_the_newest_one() -> None:
    found = dead_letters(letters(10))
    assert (found.count, found.exact, found.read) == (10, True, 10)
    assert found.by_kind == {("UndecodableRecord", "trajectories"): 7, ("InvalidRecord", "trajectories"): 3}
    assert found.newest is not None
    assert (found.newest.at, found.newest.origin) == ("deadletter[0]@9", "trajectories[1]@9")
    assert "newest deadletter[0]@9 about trajectories[1]@9: reason 9" in letters_text(found)
    assert letters_row(found)["by_kind"][0] == {"kind": "UndecodableRecord", "topic": "trajectories", "count": 7}
    assert dead_letters(letters(0)).count == 0 and letters_text(dead_letters(letters(0))) == "no letters"


def test_a_topic_full_of_letters_is_bounded_by_its_offsets_and_only_its_end_is_read() -> None:
    log = letters(500)
    found = dead_letters(log, read=100)
    assert (found.count, found.exact, found.read) == (500, False, 100)
    assert sum(found.by_kind.values()) == 100 and "at most 500 letters, the newest 100" in letters_text(found)
    assert dead_letters(log, read_bytes=10 * len(GARBAGE)).read < 20
    trimmed = log.trimmed(("deadletter", 0), 300)
    assert dead_letters(trimmed, read=100).count == 200 and dead_letters(trimmed).exact


def test_a_letter_is_shown_with_origin_reason_and_bytes() -> None:
    log = letters(1)
    record = replace(log.logs["deadletter", 0][0], topic=TOPICS.name("deadletter"))
    row = record_row(record, decode(record.value), TOPICS)
    assert row["origin"] == "trajectories[1]@0" and row["event"]["reason"] == "reason 0"
    assert base64.b64decode(row["event"]["value"]) == GARBAGE and base64.b64decode(row["event"]["key"]) == b"\xfe"
    lines = list(record_text(record, decode(record.value), TOPICS))
    assert "trajectories[1]@0" in lines[0] and "UndecodableRecord: reason 0" in lines[0]
    assert lines[1] == "    0000  6e 6f 74 20 61 76 72 6f 20 00 ff 6e 6f 74 20 61  not avro ..not a"
    assert lines[-1] == f"    {len(GARBAGE) - 128} more bytes"


def test_a_dump_shows_short_values_whole_and_missing_ones_as_such() -> None:
    assert list(hexdump(b"ab")) == ["    0000  61 62" + " " * 44 + "ab"]
    assert list(hexdump(None)) == ["    no value"] and list(hexdump(b"")) == []

"""The tables of a run whose every record is known: against values that are taken from the raw events by another way."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.consumers.facts import Failures, read_facts
from headrace.consumers.frames import SPECS, export, open_table
from headrace.consumers.frames.schema import markdown
from headrace.consumers.frames.tokens import tokens
from headrace.consumers.ledger import audit
from headrace.schemas.codec import decode
from headrace.schemas.columns import pack_float32, pack_ids
from headrace.schemas.errors import SettingsError, UndecodableRecord
from headrace.schemas.events import (
    AttemptEnded,
    EpisodeEnded,
    GroupClosed,
    Heartbeat,
    Lease,
    PublicationClock,
    Score,
    Span,
    VersionRun,
)
from tests.memory_log import MemoryLog
from tests.synthetic_log import synthetic_run
from tests.tables_page import PAGE


@pytest.fixture(scope="module")
def log() -> MemoryLog:
    log = synthetic_run().log
    counters = {"busy_s": 1.0, "idle_weights_s": 0.5, "idle_no_requests_s": 0.25, "sampled_tokens": 8.0}
    for second in range(3):
        log.append("fleet", 0, Heartbeat("w", "w1", 2, 8, second, True, "{}", counters), at_ms=second)
    log.append("fleet", 0, PublicationClock("w", "w1", 2, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, None))
    times = {"queue": 5.0, "decode": 20.0}
    log.append("groups", 0, AttemptEnded(0, b"", 0, "open-one", 0, 0, "w1", "model_success", "stop", "none", 1.0, 4,
                                         True, times))  # fmt: skip
    log.append("evals", 0, Score("suite", 2, b"\1" * 16, 10, 9, 0.5, 0.1, "{}", "{}", 7))
    return log


def table(log: MemoryLog, name: str) -> pa.Table:
    return open_table(log, name).to_arrow()


def raw(log: MemoryLog, kind: type) -> list[tuple[int, int, Any]]:
    """(partition, offset, event) of `trajectories`, by a loop of its own."""
    out = []
    for (topic, partition), records in log.logs.items():
        for record in records if topic == "trajectories" else ():
            try:
                event = decode(record.value)
            except UndecodableRecord:
                continue
            if isinstance(event, kind):
                out.append((partition, record.offset, event))
    return out


def test_the_document_is_made_from_the_definition() -> None:
    assert PAGE.read_text() == markdown(), "run `.venv/bin/python -m tests.tables_page`"


@pytest.mark.parametrize("name", SPECS)
def test_every_table_has_the_columns_and_types_that_are_documented(log: MemoryLog, name: str) -> None:
    found = table(log, name)
    assert found.num_rows > 0
    assert found.schema.names == [column.name for column in SPECS[name].columns]
    assert found.schema.equals(SPECS[name].arrow())
    for column in SPECS[name].columns:  # a column that is never null is never null
        assert column.null or found[column.name].null_count == 0, column.name


def test_tokens_are_those_of_the_raw_spans_to_the_bit(log: MemoryLog) -> None:
    rows = table(log, "tokens").to_pylist()
    at = 0
    for partition, offset, span in raw(log, Span):
        logprobs = span.behaviour_logprobs()
        for i, token in enumerate(span.token_ids().tolist()):
            row = rows[at]
            assert (row["partition"], row["offset"], row["token"]) == (partition, offset, token)
            assert row["logprob"] == (None if logprobs is None else float(logprobs[i]))
            assert row["version"] == (None if logprobs is None else int(span.version_column()[i]))
            assert (row["group"], row["slot"], row["source"]) == (span.group, span.slot, span.source)
            at += 1
    assert at == len(rows)


def test_a_token_has_its_position_in_its_branch_of_the_episode() -> None:
    """Prompt of 3, a turn of 2, then two branches that both continue that turn."""
    log = MemoryLog.empty("branches", {})

    def span(sequence: int, count: int, parent: int = -1, source: str = "model") -> Span:
        model = source == "model"
        return Span("g", 0, 0, "w", sequence, source, 0, parent, count, (VersionRun(1, count),) if model else (), None,
                    None, None, {}, pack_ids(np.arange(count, dtype=np.int32)),
                    pack_float32(np.full(count, -1.0, np.float32)) if model else None, None, None)  # fmt: skip

    for one in (span(1, 3, source="prompt"), span(2, 2), span(3, 2), span(4, 4, parent=2)):
        log.append("trajectories", 0, one)
    found = table(log, "tokens").to_pydict()
    assert found["position"] == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    log.append("trajectories", 0, span(7, 2))  # what it continues was never seen
    assert table(log, "tokens").to_pydict()["position"][-2:] == [None, None]


def test_every_column_of_spans_of_every_form_is_what_a_plain_loop_says() -> None:
    """Ids of two to four bytes, several versions in a span, masks, entropies that aren't known, no token at all."""
    random = np.random.default_rng(7)
    log, expected = MemoryLog.empty("forms", {"trajectories": 2}), list[dict[str, Any]]()
    ends: dict[tuple[int, int], int] = {}
    for number in range(120):
        slot, attempt = int(random.integers(3)), int(random.integers(2))
        sequence = 2 if (slot, attempt) in ends else 1
        model, count = bool(random.integers(2)), int(random.integers(9))
        ids = random.integers(0, random.choice([1 << 16, 1 << 20, 1 << 31]), count).astype(np.int32)
        logprobs, entropies = (random.random((2, count)) * -3).astype(np.float32)
        entropies[::2] = np.nan
        cuts = [int(n) for n in (count // 2, count - count // 2) if n] if model else []
        mask = random.integers(0, 2, count).astype(np.uint8) if random.integers(2) else None
        known, engine = bool(random.integers(2)), [None, "a", "b"][int(random.integers(3))]
        versions = tuple(VersionRun(number + i, n) for i, n in enumerate(cuts))
        parent = -1 if (slot, attempt) not in ends else 1
        span = Span("g", slot, attempt, f"w{slot}", sequence, "model" if model else "environment", number % 4, parent,
                    count, versions, None, engine, None, {}, pack_ids(ids), pack_float32(logprobs) if model else None,
                    mask.tobytes() if mask is not None else None,
                    pack_float32(entropies) if known else None)  # fmt: skip
        begin = 0 if parent < 0 else ends[slot, attempt]
        ends.setdefault((slot, attempt), begin + count)  # the others all continue the attempt's first span
        offset = log.append("trajectories", number // 60, span).offset
        column = [run.version for run in versions for _ in range(run.count)]
        for i in range(count):
            expected.append({
                "group": "g", "slot": slot, "attempt": attempt, "incarnation": f"w{slot}", "sequence": sequence,
                "position": begin + i, "source": span.source, "turn": number % 4, "token": int(ids[i]),
                "logprob": float(logprobs[i]) if model else None, "version": column[i] if model else None,
                "trainable": model and (mask is None or bool(mask[i])),
                "entropy": float(entropies[i]) if known and i % 2 else None, "engine": engine,
                "partition": number // 60, "offset": offset,
            })  # fmt: skip
    for rows in (1, 50, 10_000):
        assert [row for batch in tokens(log, rows) for row in batch.to_pylist()] == expected


def test_episodes_have_the_fates_that_the_ledger_counts(log: MemoryLog) -> None:
    rows = table(log, "episodes").to_pylist()
    fates = Counter((row["closure"], row["disposition"]) for row in
                    {row["group"]: row for row in rows}.values() if row["closure"] != "open")  # fmt: skip
    ledger = audit(log)
    assert fates == Counter({key: n for key, n in ledger.groups.items() if key[0] != "open"})
    # Tokens of counted episodes in batches that were committed are trained or masked, as the ledger has it.
    committed = {row["batch"] for row in table(log, "batches").to_pylist() if row["version"] is not None}
    trained = sum(row["model_tokens"] for row in rows if row["counted"] and row["batch"] in committed)
    assert trained == ledger.tokens["trained"] + ledger.tokens["masked"]
    # Each attempt that ended says what its last event says; the one that runs has no outcome.
    ends = {(e.group, e.slot, e.attempt): e for _, _, e in raw(log, EpisodeEnded) if e.incarnation == "w1"}
    for row in rows:
        end = ends.get((row["group"], row["slot"], row["attempt"]))
        if row["outcome"] is not None and end is not None:
            assert (row["outcome"], row["reward"], row["ended_ms"]) == (end.outcome, end.reward, end.ended_ms)
    retried = [row for row in rows if row["id"] == "g1/1"]
    assert [(r["attempt"], r["last"], r["counted"], r["outcome"]) for r in retried] == [
        (0, False, False, "infra_failure"), (1, True, True, "model_failure")]  # fmt: skip


def test_groups_have_times_rewards_and_accounts_of_their_closures(log: MemoryLog) -> None:
    rows = {row["id"]: row for row in table(log, "groups").to_pylist()}
    opened = {e.group: None for _, _, e in raw(log, Lease) if e.opens}
    assert rows.keys() == opened.keys()
    for p in range(2):
        for fact in read_facts(log, "groups", p, Failures()):
            if isinstance(event := fact.event, GroupClosed):
                row = rows[event.group]
                rewards = [s.reward for s in event.slots if s.counted and s.reward is not None]
                assert row["reward_mean"] == (float(np.mean(rewards)) if rewards else None)
                last = sum(s.model_tokens for s in event.slots)
                assert row["model_tokens"] == last + event.accounts.get("superseded", 0)
                assert (row["closed_ms"], row["offset"]) == (fact.timestamp_ms, fact.offset)
    assert {row["closure"] for row in rows.values()} > {"open", "candidate", "zero_variance", "unmanaged"}
    assert rows["g6"]["disposition"] == "stale" and rows["g8"]["batch"] == 3 and rows["g8"]["version"] is None


def test_trimmed_trajectories_leave_what_groups_and_batches_know(log: MemoryLog) -> None:
    trimmed = log
    for p in range(2):
        trimmed = trimmed.trimmed(("trajectories", p), log.end("trajectories", p))
    before = [row for row in table(log, "groups").to_pylist() if row["closure"] != "open"]
    after = table(trimmed, "groups").to_pylist()
    assert after == [row | {"opened_ms": None} for row in before]
    assert all(row["started_ms"] is None and row["outcome"] for row in table(trimmed, "episodes").to_pylist())
    assert table(trimmed, "tokens").num_rows == 0


def test_waits_heartbeats_clocks_and_scores_are_as_recorded(log: MemoryLog) -> None:
    waits = table(log, "waits").to_pylist()
    assert [(w["group"], w["step"], w["wait_ms"]) for w in waits] == [("open-one", "queue", 5.0),
                                                                      ("open-one", "decode", 20.0)]  # fmt: skip
    assert [row["idle_s"] for row in table(log, "replicas").to_pylist()] == [0.75] * 3
    assert table(log, "publications").to_pylist()[0]["first_token_ms"] is None
    assert table(log, "evals").to_pylist()[0]["scored"] == 9


def test_a_table_comes_in_batches_whose_size_does_not_grow_with_the_run(log: MemoryLog) -> None:
    sizes = [batch.num_rows for batch in tokens(log, rows=50)]
    assert sum(sizes) == table(log, "tokens").num_rows and len(sizes) > 4 and max(sizes) < 60


def test_pandas_and_polars_keep_whole_numbers_whole(log: MemoryLog) -> None:
    frame = open_table(log, "episodes").to_pandas()
    assert str(frame["batch"].dtype) == "Int32" and frame["batch"].isna().any()
    polars = open_table(log, "episodes").to_polars()
    assert str(polars["batch"].dtype) == "Int32" and polars.height == len(frame)


def test_duckdb_reads_an_exported_run_with_one_line(log: MemoryLog, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    written = {t.name: count for t, _, count in export(log, tmp_path / "out")}
    assert written.keys() == SPECS.keys()
    trained = duckdb.sql(f"SELECT sum(model_tokens) FROM '{tmp_path}/out/episodes.parquet' "
                         "WHERE counted AND batch <= 2").fetchall()[0]  # fmt: skip
    ledger = audit(log)
    assert trained[0] == ledger.tokens["trained"] + ledger.tokens["masked"]
    versions = duckdb.sql(f"SELECT version, count(*) FROM '{tmp_path}/out/tokens.parquet' "
                          "WHERE source = 'model' GROUP BY version").fetchall()  # fmt: skip
    counted: dict[int, int] = defaultdict(int)
    for _, _, span in raw(log, Span):
        for run in span.versions:
            counted[run.version] += run.count
    assert dict(versions) == counted
    assert pq.read_schema(tmp_path / "out" / "tokens.parquet").field("logprob").metadata[b"unit"] == b"nats"


def test_an_empty_run_has_empty_tables(tmp_path: Path) -> None:
    empty = MemoryLog.empty("empty", {})
    assert [count for _, _, count in export(empty, tmp_path)] == [0] * len(SPECS)
    assert open_table(empty, "tokens").to_arrow().schema.equals(SPECS["tokens"].arrow())


def test_an_export_that_fails_leaves_no_file(log: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: object) -> Any:
        yield {column.name: None for column in SPECS["evals"].columns}
        raise RuntimeError("the broker died")

    monkeypatch.setitem(__import__("headrace.consumers.frames", fromlist=["_MAKE"])._MAKE, "evals", broken)
    with pytest.raises(RuntimeError):
        list(export(log, tmp_path, ["evals"]))
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingsError, match="can't be made"):
        list(export(log, file / "below"))


def test_an_unknown_table_is_a_typed_error_that_names_the_tables(log: MemoryLog) -> None:
    with pytest.raises(SettingsError, match="tokens, spans"):
        open_table(log, "token")


def test_the_sdk_imports_no_frames_and_asks_for_the_extra_where_it_is_missing() -> None:
    code = ("import sys, headrace.consumers as c, headrace.consumers.frames as f; "
            "assert not {'pyarrow', 'pandas', 'polars', 'matplotlib'} & set(sys.modules); "
            "sys.modules['pyarrow'] = None; f.open_table(None, 'tokens')")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "headrace[frames]" in done.stderr.strip().splitlines()[-1], done.stderr

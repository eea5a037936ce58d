"""Lineage over a run whose every record is known: there and back again, and what is said when the way is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.consumers.lineage import trace_episode, trace_token
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import DataLossError, InvalidRecord, SettingsError
from headrace.schemas.events import Span
from tests.memory_log import MemoryLog
from tests.synthetic_log import EPISODE_TOKENS, PROMPT, TOKENS, synthetic_run


@pytest.fixture(scope="module")
def log() -> MemoryLog:
    return synthetic_run().log


def at(log: MemoryLog, address: str) -> object:
    topic, rest = address.split("[")
    partition, offset = rest.split("]@")
    return decode(next(r for r in log.logs[topic, int(partition)] if r.offset == int(offset)).value)


@pytest.mark.parametrize("group", ["g0", "g1", "g4"])
def test_every_trained_token_leads_to_the_event_that_made_it(log: MemoryLog, group: str) -> None:
    for slot in (0, 1):
        for index in range(PROMPT + EPISODE_TOKENS):
            origin = trace_token(log, group, slot, index)
            assert origin.event is not None
            event = at(log, origin.event)
            assert isinstance(event, Span)
            assert (event.group, event.slot, event.attempt) == (group, slot, origin.attempt)
            assert event.token_ids()[origin.index_in_event] == origin.token
            if index < PROMPT:
                assert (origin.source, origin.version, origin.logprob) == ("prompt", None, None)
            else:
                assert (origin.source, origin.logprob) == ("model", -0.5)
                assert origin.version == event.versions[0].version
                assert origin.index_in_event == (index - PROMPT) % TOKENS
            assert (origin.worker, origin.engine, origin.incarnation) == ("worker", "{}", "w1")
            assert [use.version for use in origin.uses] == [1 if group in ("g0", "g1") else 2]
    assert trace_token(log, "g1", 1, 5).attempt == 1  # the one that counts, not the one that was lost


def test_an_episode_leads_to_its_batch_and_version_and_these_lead_back(log: MemoryLog) -> None:
    found = trace_episode(log, "g1", 1)
    assert (found.closure, found.disposition, found.counted) == ("candidate", "batched", True)
    assert [one.outcome for one in found.attempts] == ["infra_failure", "model_failure"]
    (use,) = found.uses
    assert (use.batch, use.target, use.version, use.lag, use.published) == (1, 0, 1, 0, True)
    assert use.weights == {0: 1.0} and found.tokens == {0: EPISODE_TOKENS}
    manifest, version = at(log, use.manifest), at(log, use.committed or "")
    assert "g1" in [ref.group for ref in manifest.groups]  # type: ignore[attr-defined]
    assert version.batch_offset == int(use.manifest.partition("@")[2])  # type: ignore[attr-defined]


def test_what_was_not_trained_says_why(log: MemoryLog) -> None:
    assert (trace_episode(log, "g2", 0).disposition, trace_episode(log, "g2", 0).uses) == ("zero_variance", ())
    assert trace_episode(log, "g6", 0).disposition == "stale"
    assert trace_episode(log, "g10", 0).disposition is None
    assert trace_episode(log, "g8", 0).uses[0].version is None
    assert not trace_episode(log, "g4", 2).counted
    with pytest.raises(SettingsError, match="zero_variance"):
        trace_token(log, "g2", 0, 0)


@pytest.mark.parametrize("wrong", [("nobody", 0, 0), ("g0", 0, 999), ("g0", 0, -1), ("g4", 2, 0)])
def test_a_token_that_is_none_is_a_typed_error(log: MemoryLog, wrong: tuple[str, int, int]) -> None:
    with pytest.raises(SettingsError):
        trace_token(log, *wrong)


def test_trimmed_trajectories_leave_the_token_and_its_record_of_samples(log: MemoryLog) -> None:
    trimmed = log
    for p in range(2):
        trimmed = trimmed.trimmed(("trajectories", p), log.end("trajectories", p))
    origin = trace_token(trimmed, "g0", 0, PROMPT)
    whole = trace_token(log, "g0", 0, PROMPT)
    assert (origin.token, origin.logprob, origin.samples) == (whole.token, whole.logprob, whole.samples)
    assert (origin.event, origin.engine) == (None, None)


def test_a_copy_that_differs_is_an_error_and_a_deleted_one_too(log: MemoryLog) -> None:
    origin = trace_token(log, "g0", 0, PROMPT)
    partition, offset = (int(x) for x in (origin.event or "").removeprefix("trajectories[").split("]@"))
    record = next(r for r in log.logs["trajectories", partition] if r.offset == offset)
    event = decode(record.value)
    assert isinstance(event, Span)
    altered = replace(event, tokens=bytes(len(event.tokens)))
    with pytest.raises(InvalidRecord, match=f"trajectories.{partition}.@{offset}"):
        trace_token(log.altered(record, ("trajectories", partition), encode(altered)), "g0", 0, PROMPT)
    samples = log.end("samples", partition)
    with pytest.raises(DataLossError, match="samples"):
        trace_token(log.trimmed(("samples", partition), samples), "g0", 0, PROMPT)

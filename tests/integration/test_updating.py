"""Weights that change while a real worker samples: each policy, on the real broker and the hf engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models import tiny_model
from headrace.producers.engines.hf import HfEngine
from headrace.schemas.errors import WeightsRefused
from headrace.schemas.events import EpisodeEnded, HandBack, Heartbeat
from headrace.schemas.outcomes import REASON_FENCED, REASON_WEIGHTS
from headrace.schemas.topics import FLEET, TRAJECTORIES
from tests.publishing import Publishing
from tests.working import NEW, SLOTS, Working, versions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32)


@pytest.fixture
def working(kafka: Any, run_name: str, model: Path, monkeypatch: pytest.MonkeyPatch,
            request: pytest.FixtureRequest) -> Iterator[Working]:  # fmt: skip
    """`request.param`: (requests, caches)."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "unit"))
    torch.set_num_threads(1)
    requests, caches = getattr(request, "param", ("keep", "keep"))
    first = HfEngine(model, slots=1, max_tokens=128).served_arrays()
    tasks = {"source": "jsonl", "path": "unused", "score": "scorers:vowels"}
    sizes = {"path": str(model), "max_length": 128}
    source = Publishing(kafka, run_name, arrays=first, flip=16, tasks=tasks, model=sizes,
                        weights={"requests": requests, "caches": caches, "fence_after_s": 1.0})  # fmt: skip
    source.begin()
    engine = HfEngine(model, slots=4, max_tokens=source.settings.model.max_length)
    one = Working(source, engine)
    yield one
    one.close()


def fresh_logprobs(engine: HfEngine, prompt: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
    """What the weights that are served now give, without any cache."""
    with torch.no_grad():
        logits = engine._model(input_ids=torch.tensor([prompt + tokens])).logits[0]
    logprobs = torch.log_softmax(logits.float(), dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def run_through(working: Working, group: str = "g") -> None:
    """Sample some, change the weights, sample to the end."""
    working.lease(group)
    working.sample(20)
    working.change_weights()
    working.until(lambda: working.ended(group))


@pytest.mark.parametrize("working", [("keep", "keep")], indirect=True)
def test_tokens_carry_the_version_that_sampled_them_and_those_on_an_old_cache_are_marked(working: Working) -> None:
    run_through(working)
    for spans in working.spans("g"):
        assert set(versions(spans)) == {0, 1} and versions(spans) == sorted(versions(spans))
        for span in spans:
            crosses = any(run.version > 0 for run in span.versions)
            assert span.cache_version == (0 if crosses else None)
    working.lease("later")
    working.until(lambda: working.ended("later"))
    for spans in working.spans("later"):
        assert set(versions(spans)) == {1} and all(span.cache_version is None for span in spans)


@pytest.mark.parametrize("working", [("keep", "clear")], indirect=True)
def test_cleared_caches_are_computed_anew_and_nothing_is_lost(working: Working) -> None:
    run_through(working)
    prompt = working.engine.encode_chat([{"role": "user", "content": "Say it."}])
    for spans in working.spans("g"):
        assert set(versions(spans)) == {0, 1} and all(span.cache_version is None for span in spans)
        tokens = [int(t) for span in spans for t in span.token_ids()]
        recorded = np.concatenate([span.behaviour_logprobs() for span in spans])
        new = np.array(versions(spans)) == 1
        computed = fresh_logprobs(working.engine, prompt, tokens)
        assert np.abs(recorded - computed)[new].max() < 1e-4, "sampled as by an engine that never knew other weights"
        assert np.abs(recorded - computed)[~new].max() > 1e-3, "the weights did change"
        assert len(tokens) == NEW or tokens[-1] in working.engine.eos_ids


@pytest.mark.parametrize("working", [("finish", "clear")], indirect=True)
def test_finish_lets_active_requests_end_and_nothing_begin_before_the_weights_change(working: Working) -> None:
    working.lease("g")
    working.sample(20)
    working.change_weights()
    working.lease("later")
    working.until(lambda: working.ended("g") and working.ended("later"))
    assert {v for spans in working.spans("g") for v in versions(spans)} == {0}
    assert {v for spans in working.spans("later") for v in versions(spans)} == {1}


@pytest.mark.parametrize("working", [("abort", "clear")], indirect=True)
def test_aborted_requests_are_handed_back_and_applied_at_once(working: Working) -> None:
    working.lease("g")
    working.sample(20)
    working.change_weights()
    working.until(lambda: len(working.events(FLEET, HandBack)) == SLOTS)
    assert working.engine.version == 1 and working.engine.active == 0
    back = working.events(FLEET, HandBack)
    assert {one.reason for one in back} == {REASON_WEIGHTS} and {s for one in back for s in one.slots} == {0, 1}
    assert working.events(TRAJECTORIES, EpisodeEnded) == []


@pytest.mark.parametrize("working", [("keep", "keep")], indirect=True)
def test_version_is_announced_as_served_only_once_it_is_applied(working: Working) -> None:
    working.until(lambda: len(working.events(FLEET, Heartbeat)) >= 1)
    working.change_weights()
    working.worker._last_beat = 0.0
    working.worker._beat(time.monotonic())  # ready, and not applied
    working.worker._outbox.poll()
    working.until(lambda: working.engine.version == 1)
    working.until(lambda: working.events(FLEET, Heartbeat)[-1].version == 1)
    beats = [beat.version for beat in working.events(FLEET, Heartbeat)]
    assert beats == sorted(beats) and beats[:2] == [0, 0]


@pytest.mark.parametrize("working", [("keep", "keep")], indirect=True)
def test_replica_whose_engine_says_no_is_fenced_until_it_has_caught_up(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, broken = HfEngine.apply, [True]

    def apply(self: HfEngine, version: int, changes: Any) -> None:
        if broken:
            raise WeightsRefused("out of memory")
        honest(self, version, changes)

    monkeypatch.setattr(HfEngine, "apply", apply)
    working.source.publish()
    working.until(lambda: any(beat.fenced for beat in working.events(FLEET, Heartbeat)))
    beat = working.events(FLEET, Heartbeat)[-1]
    assert "version 1 was refused: out of memory" in beat.fenced and (beat.free, beat.version) == (0, 0)
    working.lease("g")
    working.until(lambda: bool(working.events(FLEET, HandBack)))
    assert {one.reason for one in working.events(FLEET, HandBack)} == {REASON_FENCED}
    broken.clear()
    working.until(lambda: working.engine.version == 1)
    working.until(lambda: working.events(FLEET, Heartbeat)[-1].fenced is None)
    assert working.events(FLEET, Heartbeat)[-1].free > 0

"""Replicas are probed at the version that they serve, and judged with that version's weights, however late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.producers.alignment import Prober
from headrace.producers.engines import Progress
from headrace.schemas.columns import pack_float32, unpack_float32
from headrace.schemas.errors import InvalidRecord
from headrace.schemas.events import AlignmentProbe
from headrace.schemas.settings import AlignmentSettings

SETTINGS = AlignmentSettings(every=2, contexts=3, tokens=4)


def ready(count: int = 3) -> Prober:
    prober = Prober(SETTINGS, 0.8)
    for number in range(count):
        prober.served([1, 2, 3], [10 + number] * 8)
    return prober


def came(name: str, version: int, token: int, finished: Any = None) -> Progress:
    return Progress(name, np.array([token], np.int32), np.array([-0.5], np.float32), version, finished)


def test_probe_is_due_once_at_each_version_that_is_to_be_probed_and_once_enough_was_served() -> None:
    assert ready(2).begin(0, frozenset()) == []
    prober = ready()
    assert prober.begin(1, frozenset()) == []
    asked = prober.begin(2, frozenset({7}))
    # contexts end at another place each
    assert [request.prompt for request in asked] == [[1, 2, 3], [1, 2, 3, 11, 11], [1, 2, 3, 12, 12, 12, 12]]
    assert {request.sampling.temperature for request in asked} == {0.8} and prober.begin(2, frozenset()) == []
    for request in asked:
        assert prober.took(came(request.request_id, 2, 5)) and prober.result("w", "i", {}) is None
        assert prober.took(came(request.request_id, 2, 6, "length"))
    probe = prober.result("w", "i", {"engine": "x"})
    assert probe is not None and (probe.version, probe.contexts, probe.counts) == (2, (3, 5, 7), (2, 2, 2))
    assert [(list(c), list(t)) for c, t, _ in probe.continuations()] == [(r.prompt, [5, 6]) for r in asked]
    assert prober.result("w", "i", {}) is None and prober.begin(2, frozenset()) == []
    assert not prober.took(came("g/0/0", 2, 5)), "the work's own tokens are not the probe's"


def test_probe_is_given_up_where_weights_change_and_comes_again_at_the_next_version_that_is_due() -> None:
    for changed in (True, False):
        prober = ready()
        first, *rest = prober.begin(2, frozenset())
        prober.took(came(first.request_id, 2, 5))
        if changed:
            assert set(prober.give_up()) == {one.request_id for one in (first, *rest)}
        assert prober.took(came(first.request_id, 3, 5)), "what still comes of it is no work's"
        assert prober.result("w", "i", {}) is None and prober.begin(3, frozenset()) == []
        assert len(prober.begin(4, frozenset())) == 3


def test_columns_that_contradict_each_other_are_refused() -> None:
    probe = AlignmentProbe("w", "i", 0, "{}", 1.0, (2,), (1,), 0, bytes(6), bytes(4))
    assert len(probe.continuations()) == 1
    for wrong in (replace(probe, counts=(1, 1)), replace(probe, contexts=(0,), counts=(3,)),
                  replace(probe, logprobs=bytes(8)), replace(probe, tokens=bytes(7))):  # fmt: skip
        with pytest.raises(InvalidRecord, match="alignment probe of w"):
            wrong.continuations()


# ------------------------------------------------------------------------------------- by a real engine and trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from headrace.models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def probed(engine: Any, temperature: float = 0.7) -> AlignmentProbe:
    """Of what the engine serves now."""
    prober, rng = Prober(AlignmentSettings(every=1, contexts=12, tokens=8), temperature), np.random.default_rng(0)
    for number in range(12):
        prompt = engine.encode_chat([{"role": "user", "content": "count " + "x" * number}])
        prober.served(prompt, rng.integers(3, 250, 16).tolist())
    for request in prober.begin(engine.version, frozenset()):
        engine.submit(request)
    probe = None
    while probe is None:
        for one in engine.step():
            assert prober.took(one)
        probe = prober.result("w", "i", engine.fingerprint())
    assert sum(probe.counts) == 96
    return probe


def test_late_probe_is_judged_with_the_version_that_it_sampled_and_changes_nothing(model: Path) -> None:
    from headrace.producers.engines.hf import HfEngine
    from headrace.trainer.probes import as_group
    from headrace.trainer.step import TrainState
    from tests.unit.test_step import SETTINGS as STEP
    from tests.unit.test_step import bits, same, sampled

    engine, state, other = HfEngine(model, slots=16, max_tokens=120), TrainState(model), TrainState(model)
    probe, batches = probed(engine), [sampled(engine), sampled(engine, temperature=0.9)]
    state.keep_served()
    for number, batch in enumerate(batches):  # the trainer goes on, and the probe comes late
        assert state.train_batch(batch, number, STEP).loss == other.train_batch(batch, number, STEP).loss

    def told(change: Callable[[Any], Any] = lambda column: column, **over: Any) -> Any:
        changed = pack_float32(change(unpack_float32(probe.logprobs)).astype(np.float32))
        ((prefill, decode),) = state.align([as_group(replace(probe, logprobs=changed, **over))], STEP)
        assert prefill is not None and decode is not None and (prefill.tokens, decode.tokens) == (12, 84)
        return prefill, decode

    for one in told():
        assert one.kind == "aligned" and one.mismatch < 1e-8 and abs(one.bias) < 1e-4
    for one in told(temperature=1.0):  # what it says isn't what it samples with
        assert one.kind == "meaning" and float(one.what.split()[1]) == pytest.approx(0.7, abs=0.02)
    late = told(lambda column: np.roll(column.reshape(12, 8), 1, axis=1))[1]
    assert (late.kind, late.what) == ("meaning", "reported one token late")
    rng = np.random.default_rng(0)
    for one in told(lambda column: column + 0.05 * rng.normal(size=96)):
        assert one.kind == "noise" and one.good
    assert same(bits(state), bits(other))
    assert state.train_batch(batches[0], 2, STEP).loss == other.train_batch(batches[0], 2, STEP).loss
    assert same(bits(state), bits(other)), "what is computed with afterwards is the newest version again"
    state.keep_served()
    assert told()[1].mismatch > 1e-6, "another version's weights show"


# --------------------------------------------------------------------------------------------- what the report says


def test_report_tells_the_engines_and_their_ways_apart_and_names_the_replica_that_means_something_else() -> None:
    from headrace.consumers.facts import Fact
    from headrace.consumers.report.questions import alignment
    from headrace.schemas.events import Alignment, ReplicaAlignment, Version

    def version(number: int) -> Version:
        return Version(number, b"", "t", number, number - 1, number, 0, b"", "", b"", b"", 0.0, 0, (), {},
                       '{"quantisation": "none"}', 0)

    def found(kind: str, mismatch: float, tokens: int = 10) -> Alignment:
        return Alignment(kind, "raw: at temperature 1", tokens, mismatch, 0.0, 0.0, None, 0.01)

    def told(worker: str, engine: str, at: int, prefill: Alignment, decode: Alignment | None) -> ReplicaAlignment:
        return ReplicaAlignment(worker, worker, at, f'{{"engine": "{engine}"}}', prefill, decode)

    versions = [replace(version(1), replicas=(told("w1", "hf", 0, found("aligned", 0.0001), found("noise", 0.0004)),)),
                replace(version(2), replicas=(told("w2", "vllm", 0, found("meaning", 0.09), None),
                                              told("w3", "hf", 0, found("aligned", 0.0004, 30), None))),
                replace(version(3), replicas=(told("w4", 'hf", "quantisation": "int8', 0, found("noise", 0.01),
                                                   None),))]  # fmt: skip
    facts = [Fact("policy", 0, 0, 0, b"", one) for one in versions]
    probes = {(one.engine, one.way): one for one in alignment(facts).probes}
    rounded = "hf (weights on int8, the trainer's on none)"
    assert probes.keys() == {("hf", "prefill"), ("hf", "decode"), ("vllm", "prefill"), (rounded, "prefill")}
    prefill = probes["hf", "prefill"]
    assert (prefill.replicas, prefill.tokens, prefill.kinds, prefill.wrong) == (2, 40, {"aligned": 2}, None)
    assert prefill.mismatch == pytest.approx(np.sqrt((10 * 0.0001 + 30 * 0.0004) / 40))
    assert probes["vllm", "prefill"].wrong == "w2 at version 0: raw: at temperature 1"

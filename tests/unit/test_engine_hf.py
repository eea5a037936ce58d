"""What the Hugging Face engine promises: the distribution it reports, batches that change nothing, weights in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import tiny_model
from headrace.producers.engines import GenerationRequest, Progress, Sampling
from headrace.schemas.errors import EngineError, ModelError, WeightsRefused

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.producers.engines.hf import HfEngine, _sample  # noqa: E402

WORDS = ["one", "two", "one", "a longer prompt than the others", "one", "three", "two"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def engine_of(path: Path, **changes: Any) -> HfEngine:
    return HfEngine(path, **{"slots": 4, "max_tokens": 160} | changes)


def prompt(engine: HfEngine, text: str) -> list[int]:
    return engine.encode_chat([{"role": "user", "content": text}])


def finish(engine: HfEngine) -> dict[str, list[Progress]]:
    """Run until nothing is active: request id -> its progress, in order."""
    out: dict[str, list[Progress]] = {}
    while engine.active:
        for progress in engine.step():
            out.setdefault(progress.request_id, []).append(progress)
    return out


def ids(steps: Sequence[Progress]) -> list[int]:
    return [int(i) for step in steps for i in step.token_ids]


def reference(engine: HfEngine, tokens: list[int], start: int, temperature: float) -> Any:
    """Log-probabilities of tokens[start:] by one plain forward pass, without a cache, a mask or a batch."""
    with torch.no_grad():
        logits = engine._model(torch.tensor([tokens])).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs[range(start - 1, len(tokens) - 1), tokens[start:]].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_logprobs_are_those_of_a_plain_forward_while_requests_join_and_leave(tmp_path: Path, kind: str) -> None:
    engine = engine_of(tiny_model(tmp_path / kind, seed=2, kind=kind))
    prompts = [prompt(engine, word) for word in WORDS]
    for index, tokens in enumerate(prompts):
        engine.submit(GenerationRequest(str(index), tokens, Sampling(0.7, 3 + 4 * index, seed=index)))
    out = finish(engine)
    for index, tokens in enumerate(prompts):
        steps = out[str(index)]
        assert len(steps) == 3 + 4 * index and steps[-1].finished == "length"
        reported = np.concatenate([step.logprobs for step in steps])
        expected = reference(engine, tokens + ids(steps), len(tokens), temperature=0.7)
        assert reported.dtype == np.float32
        np.testing.assert_allclose(reported, expected, atol=2e-5, rtol=0)


def test_raw_logprobs_at_a_temperature_would_be_noticed(model: Path) -> None:
    engine = engine_of(model)
    tokens = prompt(engine, "one")
    engine.submit(GenerationRequest("a", tokens, Sampling(0.5, 12, seed=3)))
    steps = finish(engine)["a"]
    raw = reference(engine, tokens + ids(steps), len(tokens), temperature=1.0)
    assert np.abs(np.concatenate([step.logprobs for step in steps]) - raw).max() > 0.1


def test_a_request_gives_the_same_tokens_alone_and_in_company(model: Path) -> None:
    engine = engine_of(model)
    asked = [GenerationRequest(w + str(i), prompt(engine, w), Sampling(1.0, 20, seed=i)) for i, w in enumerate(WORDS)]
    alone: dict[str, list[Progress]] = {}
    for request in asked:
        engine.submit(request)
        alone |= finish(engine)
    for request in asked:
        engine.submit(request)
    together = finish(engine)
    assert {name: ids(steps) for name, steps in together.items()} == {n: ids(steps) for n, steps in alone.items()}


def test_siblings_differ_by_seed_and_share_one_prefill(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    tokens = prompt(engine, "one")
    sizes = []
    original = engine._model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["input_ids"].numel())
        return original(*args, **kwargs)

    monkeypatch.setattr(engine._model, "forward", spy)
    for seed in range(4):
        engine.submit(GenerationRequest(str(seed), tokens, Sampling(1.0, 6, seed=seed)))
    out = finish(engine)
    assert sizes[0] == len(tokens)
    assert len({tuple(ids(steps)) for steps in out.values()}) == 4


def test_a_cached_beginning_is_computed_once_per_version_and_never_across_versions(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    sizes = []
    original = engine._prefill

    def spy(*joining: Any) -> Any:
        monkeypatch.setattr(engine._model, "forward", counted_forward)
        return original(*joining)

    plain = engine._model.forward

    def counted_forward(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(engine._model, "forward", plain)
        sizes.append(kwargs["input_ids"].numel())
        return plain(*args, **kwargs)

    monkeypatch.setattr(engine, "_prefill", spy)
    tokens = prompt(engine, "the same beginning, then 1")
    for number in range(3):
        if number == 2:
            engine.apply(1, {})
        engine.submit(GenerationRequest(str(number), tokens, Sampling(1.0, 2, seed=0)))
        finish(engine)
    assert sizes == [len(tokens), 1, len(tokens)]


def test_the_first_stop_token_ends_a_request_and_is_reported(model: Path) -> None:
    engine = engine_of(model)
    tokens = prompt(engine, "one")
    engine.submit(GenerationRequest("free", tokens, Sampling(1.0, 30, seed=5)))
    free = ids(finish(engine)["free"])
    stop = free[7]
    engine.submit(GenerationRequest("stopped", tokens, Sampling(1.0, 30, seed=5), frozenset({stop})))
    steps = finish(engine)["stopped"]
    assert ids(steps) == free[: free.index(stop) + 1]
    assert [step.finished for step in steps] == [None] * (len(steps) - 1) + ["stop"]


def test_greedy_takes_the_likeliest_token_whatever_the_seed(model: Path) -> None:
    engine = engine_of(model)
    tokens = prompt(engine, "two")
    for seed in range(2):
        engine.submit(GenerationRequest(str(seed), tokens, Sampling(1.0, 8, seed=seed, greedy=True)))
    out = finish(engine)
    assert ids(out["0"]) == ids(out["1"])
    whole = tokens + ids(out["0"])
    with torch.no_grad():
        best = engine._model(torch.tensor([whole])).logits[0].argmax(-1)
    assert best[len(tokens) - 1 : -1].tolist() == ids(out["0"])


def test_sampled_frequencies_match_the_reported_probabilities() -> None:
    class Row:
        def __init__(self, seed: int):
            self.request = GenerationRequest("x", [1], Sampling(0.8, 1, seed))
            self.random = np.random.Generator(np.random.Philox(key=seed))

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -float("inf")]])
    rows: list[Any] = [Row(seed) for seed in range(20_000)]
    tokens, logprobs = _sample(logits.expand(len(rows), -1), rows)
    probability = torch.softmax(logits[0] / 0.8, -1).numpy()
    share = np.bincount(tokens, minlength=5) / len(rows)
    assert share[4] == 0
    assert np.abs(share - probability).max() < 4 * np.sqrt(0.25 / len(rows))
    np.testing.assert_allclose(np.exp(logprobs), probability[tokens], rtol=1e-5)


def test_new_weights_act_between_steps_on_requests_that_keep_their_cache(model: Path) -> None:
    engine = engine_of(model)
    tokens = prompt(engine, "one")
    engine.submit(GenerationRequest("a", tokens, Sampling(1.0, 20, seed=9)))
    engine.submit(GenerationRequest("b", prompt(engine, "two"), Sampling(1.0, 20, seed=9)))
    before = [engine.step() for _ in range(6)]
    name, bits = next(iter(engine.served_arrays().items()))
    positions = np.arange(0, bits.size, 3)
    values = torch.full((len(positions),), 0.03125, dtype=torch.bfloat16).view(torch.uint16).numpy()
    engine.apply(3, {name: (positions, values)})
    after = [engine.step() for _ in range(4)]
    assert {p.version for step in before for p in step} == {0}
    assert {p.version for step in after for p in step} == {3}
    assert engine.version == 3
    assert np.array_equal(engine.served_arrays()[name].reshape(-1)[positions], values)
    # The computing model holds the same values, exactly.
    for served, parameter in zip(engine._served.values(), engine._model.parameters(), strict=True):
        assert torch.equal(served.float(), parameter)


def test_a_changed_engine_equals_a_fresh_one_with_those_weights(model: Path, tmp_path: Path) -> None:
    changed, other = engine_of(model), engine_of(tiny_model(tmp_path / "other", seed=7))
    changed.apply(1, {name: (None, bits.copy()) for name, bits in other.served_arrays().items()})
    for engine in (changed, other):
        engine.submit(GenerationRequest("a", prompt(engine, "two"), Sampling(1.0, 30, seed=1)))
    (mine, theirs) = (finish(engine)["a"] for engine in (changed, other))
    assert ids(mine) == ids(theirs)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(mine, theirs, strict=True))


def test_a_refused_change_leaves_every_weight_and_the_version_as_they_were(model: Path) -> None:
    engine = engine_of(model)
    before = {name: bits.copy() for name, bits in engine.served_arrays().items()}
    first, second = list(before)[:2]
    good = (np.array([0]), np.array([1], np.uint16))
    bad: list[dict[str, Any]] = [
        {first: good, "no.such.tensor": good},
        {first: good, second: (np.array([10**9]), np.array([1], np.uint16))},
        {first: good, second: (np.array([-1]), np.array([1], np.uint16))},
        {first: good, second: (np.array([0, 1]), np.array([1], np.uint16))},
        {first: good, second: (np.array([0]), np.array([1], np.uint32))},
        {first: good, second: (None, np.array([1], np.uint16))},
        {first: good, second: (np.array([0], np.int32), np.array([1], np.uint16))},
    ]
    for changes in bad:
        with pytest.raises(WeightsRefused):
            engine.apply(1, changes)
    with pytest.raises(WeightsRefused, match="can't follow"):
        engine.apply(0, {first: good})
    assert engine.version == 0
    assert all(np.array_equal(bits, before[name]) for name, bits in engine.served_arrays().items())


def test_served_arrays_are_read_only_views_and_name_tied_tensors_once(model: Path) -> None:
    engine = engine_of(model)
    arrays = engine.served_arrays()
    assert "lm_head.weight" not in arrays
    assert all(bits.dtype == np.uint16 and not bits.flags.writeable for bits in arrays.values())


def test_a_cancelled_request_is_never_heard_of_again_and_others_go_on(model: Path) -> None:
    engine = engine_of(model, slots=2)
    asked = [GenerationRequest(str(i), prompt(engine, w), Sampling(1.0, 12, seed=i)) for i, w in enumerate(WORDS[:4])]
    for request in asked:
        engine.submit(request)
    whole = finish(engine)
    for request in asked:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.cancel("0")
    engine.cancel("3")
    engine.cancel("unknown")
    rest = finish(engine)
    assert set(rest) == {"1", "2"}
    assert ids(rest["2"]) == ids(whole["2"])
    assert ids(rest["1"]) == ids(whole["1"])[3:]


def test_what_can_never_run_is_refused_at_the_door(model: Path) -> None:
    engine = engine_of(model)
    good = prompt(engine, "one")
    sampling = Sampling(1.0, 4, seed=0)
    engine.submit(GenerationRequest("a", good, sampling))
    for request in [
        GenerationRequest("a", good, sampling),
        GenerationRequest("b", [], sampling),
        GenerationRequest("c", [10**6], sampling),
        GenerationRequest("d", good * 20, sampling),
    ]:
        with pytest.raises(EngineError, match=request.request_id):
            engine.submit(request)
    with pytest.raises(ValueError, match="temperature"):
        Sampling(0.0, 4, seed=0)


def test_more_requests_than_slots_wait_in_order_and_all_finish(model: Path) -> None:
    engine = engine_of(model, slots=2)
    for index in range(9):
        engine.submit(GenerationRequest(str(index), prompt(engine, "one"), Sampling(1.0, 1 + index % 3, seed=index)))
    order = list(finish(engine))
    assert len(order) == 9 and [int(name) for name in order] == sorted(int(name) for name in order)
    assert engine.active == 0 and engine.step() == []


def test_a_path_that_is_no_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json"):
        engine_of(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelError, match="can't be loaded"):
        engine_of(tmp_path)


def greedy(engine: HfEngine) -> list[int]:
    engine.submit(GenerationRequest("r", prompt(engine, "one"), Sampling(1.0, 12, 0, greedy=True)))
    return ids(finish(engine)["r"])


def test_an_engine_asleep_holds_nothing_and_wakes_with_whole_weights_alone(model: Path) -> None:
    engine = engine_of(model)
    before, bits = greedy(engine), [(name, array.copy()) for name, array in engine.served_arrays().items()]
    engine.submit(GenerationRequest("r", [1, 2], Sampling(1.0, 4, 0)))
    with pytest.raises(EngineError, match="1 requests are active"):
        engine.sleep()
    engine.cancel("r")
    with pytest.raises(WeightsRefused, match="awake"):
        engine.wake(1, bits)
    engine.sleep()
    assert not any(one.untyped_storage().nbytes() for one in engine._parameters.values()) and not engine._served
    for wrong, why in ((bits[1:], "without"), ([*bits, bits[0]], "isn't one that this engine lacks"),
                       ([("other", bits[0][1])], "'other'"), ([(bits[0][0], bits[0][1].reshape(-1))], "shape")):
        with pytest.raises(WeightsRefused, match=why):
            engine.wake(1, wrong)
        assert not engine._served, "it sleeps on"
    with pytest.raises(EngineError, match="sleeps"):
        engine.submit(GenerationRequest("r", [1, 2], Sampling(1.0, 4, 0)))
    engine.wake(1, reversed(bits))
    assert engine.version == 1 and greedy(engine) == before
    assert all(np.array_equal(engine.served_arrays()[name], array) for name, array in bits)

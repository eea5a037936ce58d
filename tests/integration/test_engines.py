"""What every engine promises, whichever it is: one suite, run against each kind on the same tiny model in float32.

The reference is a plain forward pass of transformers over the bits that the engine says it serves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import tiny_model
from headrace.producers.engines import Changes, Engine, GenerationRequest, Progress, Sampling
from headrace.producers.engines.probe import probe
from headrace.schemas.errors import EngineError, WeightsRefused
from tests.engines import open_kind

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SLOTS, MAX_TOKENS = 4, 256
WORDS = ["one", "two", "a longer prompt than the others, so that siblings differ in length", "one", "three"]
numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1, kind="qwen3", hidden=128)


@pytest.fixture(scope="module", params=[
    "hf", "local", pytest.param("vllm", marks=pytest.mark.slow), pytest.param("openai", marks=pytest.mark.slow),
])  # fmt: skip
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with open_kind(request.param, model, tmp_path_factory.mktemp(request.param), slots=SLOTS,
                   max_tokens=MAX_TOKENS) as opened:  # fmt: skip
        yield opened


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def prompt(engine: Engine, text: str) -> list[int]:
    return engine.encode_chat([{"role": "user", "content": text}])


def ask(engine: Engine, tokens: Sequence[int], sampling: Sampling, stop: frozenset[int] = frozenset()) -> str:
    name = f"request-{next(numbers)}"
    engine.submit(GenerationRequest(name, tokens, sampling, stop))
    return name


def finish(engine: Engine) -> dict[str, list[Progress]]:
    out: dict[str, list[Progress]] = {}
    while engine.active:
        for one in engine.step():
            out.setdefault(one.request_id, []).append(one)
    return out


def one_of(engine: Engine, tokens: Sequence[int], sampling: Sampling, stop: frozenset[int] = frozenset()
           ) -> list[Progress]:  # fmt: skip
    name = ask(engine, tokens, sampling, stop)
    return finish(engine)[name]


def ids(steps: Sequence[Progress]) -> list[int]:
    return [int(i) for step in steps for i in step.token_ids]


def logprobs(steps: Sequence[Progress]) -> Any:
    return np.concatenate([step.logprobs for step in steps])


def expected(plain: Any, engine: Engine, tokens: Sequence[int], start: int, temperature: float) -> Any:
    """Log-probabilities of tokens[start:], float32 [n], by one forward without cache, mask or batch."""
    with torch.no_grad():
        parameters = dict(plain.named_parameters())
        for name, bits in engine.served_arrays().items():
            parameters[name].copy_(torch.from_numpy(bits.view(np.float32).copy()))
        logits = plain(torch.tensor([list(tokens)])).logits[0].float()
    found = torch.log_softmax(logits / temperature, -1)
    return found[range(start - 1, len(tokens) - 1), list(tokens)[start:]].numpy()


def next_version(engine: Engine, share: int = 7, scale: float = 0.9) -> Changes:
    """Every `share`th value of each tensor, scaled."""
    changes: dict[str, Any] = {}
    for name, bits in engine.served_arrays().items():
        where = np.arange(0, bits.size, share)
        values = (bits.reshape(-1)[where].view(np.float32) * np.float32(scale)).view(np.uint32)
        changes[name] = (where, values)
    return changes


def test_logprobs_are_those_of_a_plain_forward_at_the_temperature_that_was_asked_for(engine: Engine, plain: Any
                                                                                     ) -> None:  # fmt: skip
    asked = {}
    for index, word in enumerate(WORDS):
        tokens, temperature = prompt(engine, word), 0.5 + 0.25 * index
        asked[ask(engine, tokens, Sampling(temperature, 5 + 6 * index, seed=index))] = tokens, temperature
    for name, steps in finish(engine).items():
        tokens, temperature = asked[name]
        found = logprobs(steps)
        assert found.dtype == np.float32 and steps[0].token_ids.dtype == np.int32
        wanted = expected(plain, engine, tokens + ids(steps), len(tokens), temperature)
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
        if temperature != 1.0:  # the raw ones would be noticed
            raw = expected(plain, engine, tokens + ids(steps), len(tokens), 1.0)
            assert np.abs(found - raw).max() > 0.05


def test_greedy_takes_the_likeliest_tokens_and_reports_them_at_temperature_1(engine: Engine, plain: Any) -> None:
    tokens = prompt(engine, "greedy")
    first, second = (one_of(engine, tokens, Sampling(0.6, 24, seed, greedy=True)) for seed in (0, 1))
    whole = tokens + ids(first)
    np.testing.assert_allclose(logprobs(first), expected(plain, engine, whole, len(tokens), 1.0), atol=1e-4, rtol=0)
    with torch.no_grad():
        best = plain(torch.tensor([whole])).logits[0].argmax(-1)[len(tokens) - 1 : -1].tolist()
    assert ids(first) == ids(second) == best


def test_a_seed_gives_the_same_tokens_alone_and_in_company_and_another_gives_others(engine: Engine) -> None:
    tokens = prompt(engine, "seeds")
    alone = {seed: ids(one_of(engine, tokens, Sampling(1.0, 16, seed))) for seed in (3, 4)}
    names = {ask(engine, tokens, Sampling(1.0, 16, seed)): seed for seed in (3, 4, 5, 6)}
    together = {names[name]: ids(steps) for name, steps in finish(engine).items()}
    assert {seed: together[seed] for seed in alone} == alone
    assert len({tuple(found) for found in together.values()}) == 4


def test_a_stop_token_ends_a_request_and_is_its_last(engine: Engine) -> None:
    tokens = prompt(engine, "stop")
    free = one_of(engine, tokens, Sampling(1.0, 24, seed=5))
    stop = ids(free)[9]
    stopped = one_of(engine, tokens, Sampling(1.0, 24, seed=5), frozenset({stop, 10**6}))
    assert ids(stopped) == ids(free)[: ids(free).index(stop) + 1]
    assert [steps[-1].finished for steps in (free, stopped)] == ["length", "stop"]
    assert {step.finished for step in (*free[:-1], *stopped[:-1])} == {None}


def test_the_models_own_end_of_turn_is_no_end_unless_it_is_asked_for(engine: Engine) -> None:
    """Otherwise an engine's defaults would decide what is sampled."""
    steps = one_of(engine, prompt(engine, "on and on"), Sampling(3.0, 200, seed=8))  # hot: it comes up
    assert set(ids(steps)) & engine.eos_ids and len(ids(steps)) == 200


def test_a_cancelled_request_is_never_heard_of_again_and_others_go_on(engine: Engine) -> None:
    names = [ask(engine, prompt(engine, word), Sampling(1.0, 40, seed=1)) for word in WORDS]
    heard: set[str] = set()
    while not heard:
        heard |= {one.request_id for one in engine.step()}
    engine.cancel(names[0])
    engine.cancel(names[4])
    engine.cancel("unknown")
    rest = finish(engine)
    assert set(rest) == set(names[1:4])
    assert all(steps[-1].finished == "length" for steps in rest.values())
    assert ids(one_of(engine, prompt(engine, "after"), Sampling(1.0, 3, seed=1)))


def test_what_can_never_run_is_refused_at_the_door(engine: Engine) -> None:
    good = prompt(engine, "one")
    active = ask(engine, good, Sampling(1.0, 30, seed=0))
    for name, bad in ((active, good), ("empty", []), ("unknown-token", [10**6]), ("too-long", good * 40)):
        with pytest.raises(EngineError, match=name):
            engine.submit(GenerationRequest(name, bad, Sampling(1.0, 4, seed=0)))
    assert set(finish(engine)) == {active}
    exact = (good * 40)[: MAX_TOKENS - 4]
    assert len(ids(one_of(engine, exact, Sampling(1.0, 4, seed=0)))) == 4
    assert engine.step() == []


def test_more_requests_than_fit_wait_and_all_finish(engine: Engine) -> None:
    assert engine.capacity == SLOTS
    names = [ask(engine, prompt(engine, "many"), Sampling(1.0, 2 + i % 3, seed=i)) for i in range(3 * SLOTS)]
    assert engine.active == 3 * SLOTS
    out = finish(engine)
    assert set(out) == set(names) and engine.active == 0
    assert [len(ids(out[name])) for name in names] == [2 + i % 3 for i in range(3 * SLOTS)]


def test_each_token_carries_the_version_that_sampled_it_across_an_update(engine: Engine, plain: Any) -> None:
    tokens = prompt(engine, "versions")
    old = engine.version
    name = ask(engine, tokens, Sampling(1.0, 120, seed=2))
    steps: list[Progress] = []
    while len(ids(steps)) < 10:
        steps += [one for one in engine.step() if one.request_id == name]
    before = {n: bits.copy() for n, bits in engine.served_arrays().items()}
    engine.apply(old + 1, next_version(engine))
    assert engine.version == old + 1
    assert any(not np.array_equal(before[n], bits) for n, bits in engine.served_arrays().items())
    steps += finish(engine)[name]
    versions = [step.version for step in steps for _ in step.token_ids]
    assert sorted(set(versions)) == [old, old + 1] and versions == sorted(versions)
    assert len(versions) == 120 and steps[-1].finished == "length"
    if old_tokens := versions.count(old):  # and the old ones were sampled by the old weights
        kept = {n: bits.view() for n, bits in before.items()}

        class Before:
            def served_arrays(self) -> Any:
                return kept

        whole = tokens + ids(steps)[:old_tokens]
        wanted = expected(plain, Before(), whole, len(tokens), 1.0)  # type: ignore[arg-type]
        np.testing.assert_allclose(logprobs(steps)[:old_tokens], wanted, atol=1e-4, rtol=0)


def test_a_request_after_an_update_meets_nothing_that_an_earlier_version_cached(engine: Engine, plain: Any) -> None:
    """The same prompt before and after, long enough that it fills whole blocks of any cache."""
    tokens = (prompt(engine, "the same beginning") * 8)[:150]
    for _ in range(2):
        one_of(engine, tokens, Sampling(1.0, 4, seed=0))
    engine.apply(engine.version + 1, next_version(engine, share=3, scale=0.7))
    steps = one_of(engine, tokens, Sampling(1.0, 20, seed=0))
    assert steps[0].cached_tokens in (None, 0)
    wanted = expected(plain, engine, tokens + ids(steps), len(tokens), 1.0)
    np.testing.assert_allclose(logprobs(steps), wanted, atol=1e-4, rtol=0)
    again = one_of(engine, tokens, Sampling(1.0, 20, seed=0))
    assert ids(again) == ids(steps)
    assert again[0].cached_tokens is None or again[0].cached_tokens > 0  # within a version it is used


def test_requests_that_wait_through_an_update_begin_on_the_new_weights(engine: Engine, plain: Any) -> None:
    tokens = (prompt(engine, "they wait") * 8)[:150]
    names = [ask(engine, tokens, Sampling(1.0, 6, seed=i)) for i in range(3 * SLOTS)]
    engine.apply(engine.version + 1, next_version(engine, share=5, scale=1.2))
    out = finish(engine)
    assert set(out) == set(names)
    for steps in out.values():
        if {step.version for step in steps} == {engine.version}:
            wanted = expected(plain, engine, tokens + ids(steps), len(tokens), 1.0)
            np.testing.assert_allclose(logprobs(steps), wanted, atol=1e-4, rtol=0)
    assert {step.version for step in out[names[-1]]} == {engine.version}


def test_whole_tensors_can_be_replaced(engine: Engine, plain: Any) -> None:
    whole = {name: (None, np.ascontiguousarray((bits.view(np.float32) * np.float32(1.01)).view(np.uint32)))
             for name, bits in engine.served_arrays().items()}  # fmt: skip
    engine.apply(engine.version + 3, whole)
    tokens = prompt(engine, "whole")
    steps = one_of(engine, tokens, Sampling(1.0, 20, seed=0))
    assert all(np.array_equal(bits.reshape(-1), whole[name][1].reshape(-1))
               for name, bits in engine.served_arrays().items())  # fmt: skip
    wanted = expected(plain, engine, tokens + ids(steps), len(tokens), 1.0)
    np.testing.assert_allclose(logprobs(steps), wanted, atol=1e-4, rtol=0)


def test_a_refused_update_changes_nothing(engine: Engine, plain: Any) -> None:
    before, version = {name: bits.copy() for name, bits in engine.served_arrays().items()}, engine.version
    first, second = list(before)[:2]
    good = (np.array([0]), np.array([1], np.uint32))
    bad: list[Any] = [
        {first: good, "no.such.tensor": good},
        {first: good, second: (np.array([10**9]), np.array([1], np.uint32))},
        {first: good, second: (np.array([0, 1]), np.array([1], np.uint32))},
        {first: good, second: (np.array([0]), np.array([1], np.uint16))},
        {first: good, second: (None, np.array([1], np.uint32))},
    ]
    for changes in bad:
        with pytest.raises(WeightsRefused):
            engine.apply(version + 1, changes)
    with pytest.raises(WeightsRefused, match="can't follow"):
        engine.apply(version, {first: good})
    assert engine.version == version
    assert all(np.array_equal(bits, before[name]) for name, bits in engine.served_arrays().items())
    tokens = prompt(engine, "refused")
    steps = one_of(engine, tokens, Sampling(1.0, 12, seed=0))
    assert {step.version for step in steps} == {version}
    wanted = expected(plain, engine, tokens + ids(steps), len(tokens), 1.0)
    np.testing.assert_allclose(logprobs(steps), wanted, atol=1e-4, rtol=0)


def test_served_arrays_are_read_only_and_name_tied_tensors_once(engine: Engine) -> None:
    arrays = engine.served_arrays()
    assert "lm_head.weight" not in arrays and "model.embed_tokens.weight" in arrays
    assert all(bits.dtype == np.uint32 and not bits.flags.writeable for bits in arrays.values())


def test_it_says_what_decides_its_numbers_and_passes_the_probe(engine: Engine) -> None:
    facts = engine.fingerprint()
    assert facts["engine"] and all(isinstance(value, str) for value in facts.values())
    assert engine.decode(prompt(engine, "hello")).strip().endswith("assistant") and engine.eos_ids
    probe(engine)

"""A wrong meaning of an engine's log-probabilities is told from noise: each is planted, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.models import tiny_model  # noqa: E402
from headrace.trainer.alignment import Verdict, meanings, verdict  # noqa: E402

EPISODES, LENGTH, VOCABULARY, TEMPERATURE = 24, 10, 50, 0.7


def judged(plant: Callable[[Any, Any, Any, Any], Any], noise: float = 0.003, top_p: float = 1.0, forwards: float = 0.0,
           seed: int = 0) -> Verdict:  # fmt: skip
    """The engine samples from softmax(logits / 0.7), filtered by `top_p`, and reports what `plant(scores, before,
    tokens, mass)` makes of it, with rounding on top. scores, before: the right log-probabilities of all tokens, and
    those of the position before; mass: of what `top_p` keeps."""
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    count = EPISODES * LENGTH
    logits = 2 * torch.randn(count, VOCABULARY, generator=torch_rng, dtype=torch.float64)
    before = logits.roll(1, 0)
    scores, earlier = (torch.log_softmax(one / TEMPERATURE, -1) for one in (logits, before))
    ordered, order = scores.exp().sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p
    mass = (ordered * keep).sum(-1)
    tokens = order.gather(1, torch.multinomial(ordered * keep, 1, generator=torch_rng))[:, 0]
    engine = plant(scores, earlier, tokens, mass).numpy() + noise * rng.normal(size=count)
    number = np.repeat(np.arange(EPISODES), LENGTH)
    found = meanings(logits, before, tokens, torch.full((count,), TEMPERATURE), number, engine)
    return verdict(engine, found, number, forwards)


def right(scores: Any, before: Any, tokens: Any, mass: Any) -> Any:
    return scores.gather(1, tokens[:, None])[:, 0]


def at_temperature(factor: float) -> Callable[..., Any]:
    return lambda scores, *rest: right(torch.log_softmax(scores / factor, -1), *rest)


PLANTED: dict[str, dict[str, Any]] = {
    "raw: at temperature 1": dict(plant=at_temperature(1 / TEMPERATURE)),
    "at 1.25": dict(plant=at_temperature(1.25)),
    "at 0.8": dict(plant=at_temperature(0.8)),
    "top-p 0.9": dict(plant=lambda *a: right(*a) - a[3].log(), top_p=0.9),
    "top-p 0.6": dict(plant=lambda *a: right(*a) - a[3].log(), top_p=0.6),
    "scored one position early": dict(plant=lambda scores, before, *rest: right(before, before, *rest)),
    "reported one token late": dict(plant=lambda *a: right(*a).roll(1)),
    "reported one token early": dict(plant=lambda *a: right(*a).roll(-1)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_meaning_is_named(name: str) -> None:
    planted = dict(PLANTED[name])
    found = judged(planted.pop("plant"), **planted)
    assert found.kind == "meaning" and not found.good
    assert found.what.startswith(name[:9]) and found.left < 0.25 * found.mismatch
    if name.startswith("at"):
        assert float(found.what.split()[1]) == pytest.approx(float(name.split()[1]), abs=0.02)


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_meaning_is_named_although_bfloat16_rounds_beside_it(name: str) -> None:
    planted = dict(PLANTED[name])
    found = judged(planted.pop("plant"), noise=0.02, forwards=0.02, **planted)
    assert found.kind == "meaning" and found.what.startswith(name[:9])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.3])
def test_noise_of_any_size_is_no_meaning(noise: float, seed: int) -> None:
    found = judged(right, noise=noise, seed=seed)
    assert found.kind == "noise" and found.good and found.mismatch == pytest.approx(noise**2, rel=0.3)


def test_what_the_trainers_own_forwards_differ_by_is_aligned() -> None:
    assert judged(right, noise=0.02, forwards=0.02).kind == "aligned"
    assert judged(right, noise=1e-5).kind == "aligned"


def test_difference_to_one_side_is_no_noise_although_no_meaning_explains_it() -> None:
    found = judged(lambda *a: right(*a) - 0.1, noise=0.02)
    assert found.kind == "biased" and not found.good and found.mean == pytest.approx(-0.1, abs=0.01)


def test_bias_that_is_left_is_that_of_the_corrections_weights() -> None:
    engine, number = np.full(4, -1.0), np.array([0, 0, 1, 1])
    found = {"as stated": engine + np.log(np.array([1.2, 1.2, 4.0, 1.0]))}
    assert verdict(engine, found, number, 0.0).bias == pytest.approx(7.4 / 4 - 1)
    assert verdict(engine, found, number, 0.0, np.array([1.2, 1.2, 2.0, 1.0])).bias == pytest.approx(5.4 / 4 - 1)


# ------------------------------------------------------------------------------------- by a real engine and trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def test_step_tells_what_an_engine_reports(model: Path) -> None:
    from headrace.producers.engines.hf import HfEngine
    from headrace.trainer.step import TrainState
    from tests.unit.test_step import SETTINGS, sampled

    def told(change: Callable[[Any], Any]) -> Verdict:
        state = TrainState(model)
        groups = [replace(group, episodes=tuple(change(one) for one in group.episodes)) for group in good]
        found = state.train_batch(groups, 0, replace(SETTINGS, probe_tokens=256)).alignment
        assert found is not None and found.tokens > 40
        return found

    good = sampled(HfEngine(model, slots=8, max_tokens=120), temperature=0.6)
    assert told(lambda one: one).kind == "aligned"
    late = told(lambda one: replace(one, logprobs=np.roll(one.logprobs, 1)))
    assert (late.kind, late.what) == ("meaning", "reported one token late")
    hotter = told(lambda one: replace(one, temperature=1.0))  # what is recorded isn't what was sampled
    assert hotter.kind == "meaning" and float(hotter.what.split()[1]) == pytest.approx(0.6, abs=0.02)
    rng = np.random.default_rng(0)
    noisy = told(lambda one: replace(one, logprobs=one.logprobs + 0.05 * rng.normal(size=len(one.tokens))))
    assert noisy.kind == "noise" and abs(noisy.bias) < 0.05
    old = TrainState(model)
    assert old.train_batch([replace(g, episodes=tuple(replace(e, versions=e.versions - 1) for e in g.episodes))
                            for g in good], 0, SETTINGS).alignment is None  # fmt: skip

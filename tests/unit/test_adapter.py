"""LoRA: the adapter alone is trained and served, both ends begin with the same one, and peft reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.models import tiny_model
from headrace.producers.engines.opening import EngineChoice, open_engine
from headrace.schemas.errors import ModelError, SettingsError
from headrace.schemas.settings import LoraSettings, ModelSettings
from tests.unit.test_step import SETTINGS, bits, follow, same, sampled

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from headrace.producers.engines.hf import HfEngine  # noqa: E402
from headrace.producers.engines.served import ModelFolder  # noqa: E402
from headrace.trainer.step import TrainState  # noqa: E402

LORA = LoraSettings(rank=4, alpha=16, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1, hidden=32)


def test_engine_serves_what_is_trained_and_peft_reads_it(model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    engine, state = HfEngine(model, slots=8, max_tokens=120, lora=LORA), TrainState(model, lora=LORA)
    assert same(dict(engine.served_arrays()), bits(state))
    assert same(bits(state), ModelFolder(model, "bfloat16", LORA).bits)
    plain = HfEngine(model, slots=8, max_tokens=120)
    assert [e.tokens.tolist() for g in sampled(engine) for e in g.episodes] == [
        e.tokens.tolist() for g in sampled(plain) for e in g.episodes], "version 0 is the model folder's"
    base = {name: p.detach().clone() for name, p in state._model.named_parameters() if not p.requires_grad}
    for version in range(3):
        (lag,) = state.train_batch(sampled(engine), version, replace(SETTINGS, learning_rate=3e-2)).lags
        assert lag.max_abs < 1e-4, f"at version {version}"
        follow(engine, state)
    assert same(dict(engine.served_arrays()), bits(state)) and len(base) > 10
    parameters = dict(state._model.named_parameters())
    assert all(torch.equal(parameters[name], before) for name, before in base.items()), "the base stays"

    adapter = {name: served.float() for name, served in state._served.items()}
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16,
        "target_modules": sorted({name.split(".")[-3] for name in adapter}),
    }))  # fmt: skip
    folder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in folder.parameters():
            parameter.copy_(parameter.bfloat16())
        ids = torch.arange(3, 40)[None]
        before = folder(ids).logits.clone()
        theirs = PeftModel.from_pretrained(folder, tmp_path)(ids).logits
        ours = state._model(ids).logits
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    assert (theirs - before).abs().max() > 1e-2


def test_layers_that_are_not_there_and_engines_that_cannot_are_told(model: Path) -> None:
    with pytest.raises(ModelError, match="model.lora.targets.*no_such_layer"):
        TrainState(model, lora=LoraSettings(targets=("no_such_layer",)))
    some = TrainState(model, lora=LoraSettings(targets=("q_proj",), rank=2))
    assert all(".q_proj.lora_" in name for name in some.served_bits())
    settings = ModelSettings(path=str(model), lora=LORA)
    with pytest.raises(SettingsError, match="can't serve an adapter"):
        open_engine(settings, EngineChoice(kind="openai", replicas=("http://127.0.0.1:1",)))


def test_activations_computed_again_give_the_same_bits(model: Path) -> None:
    batch = sampled(HfEngine(model, slots=8, max_tokens=120))
    kept, again = TrainState(model), TrainState(model, recompute=True)
    calls = {"kept": 0, "again": 0}
    for name, state in (("kept", kept), ("again", again)):

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        state._model.model.layers[0].mlp.register_forward_pre_hook(count)
        state.train_batch(batch, 0, SETTINGS)
    assert same(bits(kept), bits(again)) and not np.array_equal(*(
        next(iter(bits(state).values())) for state in (kept, TrainState(model))))  # fmt: skip
    assert calls["again"] > calls["kept"], "nothing was computed again"

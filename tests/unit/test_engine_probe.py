"""Which log-probabilities are refused, and which parameters of a distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import tiny_model
from headrace.producers.engines import Progress
from headrace.producers.engines.opening import EngineChoice, open_engine
from headrace.producers.engines.probe import judge, probe, refused_for_training
from headrace.schemas.errors import ModelError
from headrace.schemas.settings import ModelSettings

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.producers.engines import hf  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def answer(tokens: list[int], logprobs: list[float]) -> list[Progress]:
    return [Progress("p", np.array(tokens, np.int32), np.array(logprobs, np.float32), 0, "length")]


def test_an_engine_that_reports_raw_logprobs_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = hf._sample

    def raw(logits: Any, rows: Any) -> Any:
        tokens, _ = sample(logits, rows)
        found = torch.log_softmax(logits.float(), -1).gather(1, torch.from_numpy(tokens).long()[:, None])
        return tokens, found[:, 0].numpy()

    settings = ModelSettings(path=str(model), max_length=64)
    engine = open_engine(settings, EngineChoice(slots=2))
    assert engine.active == 0 and engine.capacity == 2
    monkeypatch.setattr(hf, "_sample", raw)
    with pytest.raises(ModelError, match="raw log-probabilities"):
        open_engine(settings, EngineChoice(slots=2))
    with pytest.raises(ModelError, match="raw log-probabilities"):
        probe(engine)


def test_tokens_that_any_temperature_would_give_prove_nothing() -> None:
    assert not judge(answer([3, 4], [-0.001, -0.0005]), answer([3, 4], [-0.001, -0.0005]), "x")
    assert not judge(answer([3, 4], [-2.0, -1.0]), answer([5, 4], [-2.0, -1.0]), "x")  # other tokens from the start
    assert judge(answer([3, 4], [-2.0, -1.0]), answer([3, 5], [-0.1, -1.0]), "x")
    with pytest.raises(ModelError, match="raw"):
        judge(answer([3, 4], [-0.001, -1.0]), answer([3, 4], [-0.001, -1.0]), "x")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_what_is_no_logprob_is_refused(value: float) -> None:
    with pytest.raises(ModelError, match="as the log-probability"):
        judge(answer([3], [-1.0]), answer([3], [value]), "x")


def test_whatever_bends_the_distribution_is_refused_for_training() -> None:
    harmless = {"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0.0, "presence_penalty": 0, "logit_bias": {},
                "repetition_penalty": 1.0, "response_format": {"type": "text"}, "stop": ["x"]}  # fmt: skip
    assert refused_for_training(harmless) == []
    assert refused_for_training({}) == []
    for name, value in {"temperature": 0, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5,
                        "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": 2},
                        "response_format": {"type": "json_object"}, "guided_regex": "a+"}.items():  # fmt: skip
        assert refused_for_training(harmless | {name: value}) == [f"{name}={value!r}"]

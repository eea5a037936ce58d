"""One table of what combines with what: in the docs as in the code, with warnings and refusals that name settings."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.settings import LossSettings, RunSettings
from headrace.trainer.combinations import TABLE, as_markdown, idle

DOCUMENT = (Path(__file__).parents[2] / "docs/corrections.md").read_text()


def run_settings(**sections: Any) -> RunSettings:
    base: dict[str, Any] = {"model": {"path": "m"}, "tasks": {"dataset": "chain_sum"}}
    return RunSettings.model_validate(base | sections)


def test_document_shows_the_table() -> None:
    assert as_markdown() in DOCUMENT, "docs/corrections.md: put trainer.combinations.as_markdown() into it"


@pytest.mark.parametrize("part", TABLE, ids=lambda part: part.name)
def test_each_part_names_settings_that_exist_and_a_function_with_formula_and_source(part: Any) -> None:
    pytest.importorskip("torch")
    module, _, function = part.function.partition(".")
    found = getattr(importlib.import_module(f"headrace.trainer.{module}"), function)
    document = inspect.getdoc(found) or ""
    beside = inspect.getsource(importlib.import_module(found.__module__))  # a source may stand for several functions
    assert document and ("arXiv" in document or "Source" in document + beside)
    alone = "advantage|objective|kl|lone|reject|denominator|normalise"
    names = re.findall(rf"[a-z0-9_]+_[a-z_]+|\b(?:{alone})\b", part.settings)
    known = {*LossSettings.model_fields, "group_size", *(v for v in re.findall(r"= ([a-z0-9_]+)", part.settings))}
    assert names and set(names) <= known, set(names) - known


def test_every_loss_setting_stands_in_the_table() -> None:
    shown = " ".join(part.settings for part in TABLE)
    missing = {name for name in LossSettings.model_fields if name not in shown}
    assert missing == {"advantage_epsilon", "bypass", "reject_shrinks"}, "those that go with several parts"


@pytest.mark.parametrize("block", re.findall(r"```toml settings\n(.*?)```", DOCUMENT, re.S))
def test_other_frameworks_settings_are_possible(block: str) -> None:
    run_settings(**tomllib.loads(block))


def test_defaults_are_never_idle() -> None:
    assert idle(run_settings()) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"loss": {"objective": "ppo"}}, "'ppo': its clip can't act: with one optimizer step per version"),
        ({"loss": {"objective": "gspo"}}, "'gspo': its clip can't act"),
        ({"loss": {"tv_low": 0.2}}, "loss.tv_low and loss.tv_high can't act"),
        ({"loss": {"clip_high": 0.28}}, "loss.clip_low and loss.clip_high can't act"),
        ({"loss": {"bypass": True, "objective": "ppo", "truncate_above": 3.0}}, "would count it twice"),
        ({"loss": {"truncate_above": 9.0}}, "loss.truncate_above can't act: loss.mask_above"),
        ({"loss": {"truncate_below": 0.1}}, "loss.truncate_below can't act: loss.mask_below"),
        ({"loss": {"reject_shrinks": True}}, "loss.reject_shrinks can't act: nothing rejects"),
        ({"loss": {"lone": "none"}}, "loss.lone can't act"),
        ({"loss": {"lone": "none", "advantage": "rloo"}, "rollout": {"group_size": 1}}, "a group of one has no others"),
        ({"loss": {"kl": "k1", "kl_coefficient": 0.1}}, "loss.kl = 'k1' restrains nothing"),
    ],
)
def test_settings_that_cant_act_are_named(sections: dict[str, Any], said: str) -> None:
    (sentence,) = idle(run_settings(**sections))
    assert said in sentence


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"objective": "ppo", "bypass": True}},
        {"loss": {"objective": "ppo"}, "optimizer": {"epochs": 2}},
        {"loss": {"objective": "cispo", "tv_low": 0.2, "tv_high": 0.2}, "optimizer": {"minibatches": 2}},
        {"loss": {"objective": "reinforce", "bypass": True, "truncate_above": 3.0}},
    ],
)
def test_settings_that_act_are_not(sections: dict[str, Any]) -> None:
    assert idle(run_settings(**sections)) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"loss": {"mask_below": 3.0, "mask_above": 2.0}}, "`mask_above` must be greater"),
        ({"loss": {"truncate_below": 3.0}}, "`truncate_above` must be greater"),
        ({"loss": {"veto_below": 3.0, "veto_above": 2.0}}, "`veto_above` must be greater"),
        ({"loss": {"dual_clip": 3.0}}, "bounds the clip of objective 'ppo'"),
        ({"loss": {"objective": "ppo", "dual_clip": 0.5}}, "greater than 1"),
        ({"loss": {"ratio_level": "geometric", "normalise": True}}, "no meaning for geometric ratios"),
        ({"loss": {"kl": "k3"}}, "go together"),
        ({"loss": {"reject": [{"by": "k3"}]}}, "needs `below` or `above`"),
        ({"loss": {"reject": [{"by": "k1", "below": 1.0, "above": 0.0}]}}, "`above` must be greater than `below`"),
        ({"loss": {"reject": [{"by": "ratio", "above": 0.0}]}}, "greater than 0"),
        ({"rollout": {"group_size": 1}}, "leaves nothing to compare"),
        ({"optimizer": {"minibatches": 99}}, "a group isn't cut"),
        ({"loss": {"bypass": True, "m2_limit": 0.04}, "optimizer": {"epochs": 2}}, "takes ratios anew"),
        ({"reuse": {"enabled": True}, "optimizer": {"epochs": 2},
          "tasks": {"source": "jsonl", "path": "t.jsonl", "score": "m:f"}}, "one optimizer step per version"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        run_settings(**sections)


def test_settings_recorded_before_there_were_more_are_read_as_they_acted() -> None:
    old = {"truncate_above": 2.0, "mask_below": 0.125, "mask_above": 8.0, "advantage": "grpo",
           "denominator": "token_mean"}  # fmt: skip
    assert LossSettings.model_validate(old) == LossSettings()
    assert RunSettings.model_validate_json(run_settings().model_dump_json()) == run_settings()

"""Objectives, rejection, penalties, minibatches and branches in the trainer's step, on a real (tiny) model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import tiny_model
from headrace.schemas.columns import pack_float32, pack_ids
from headrace.schemas.errors import InvalidRecord, NonFiniteGradient
from headrace.schemas.events import PayloadEpisode, PayloadSpan, VersionRun
from headrace.schemas.settings import RunSettings
from headrace.trainer.batches import Episode, Group, Strand, pack
from headrace.trainer.layout import laid_out
from tests.unit.rows import groups

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.trainer.loop import step_settings  # noqa: E402
from headrace.trainer.rejection import Rejection  # noqa: E402
from headrace.trainer.step import TrainState  # noqa: E402
from headrace.trainer.weighing import StepSettings  # noqa: E402

PLAIN = StepSettings(learning_rate=3e-3, micro_batch_tokens=60, probe_tokens=60, truncate_above=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1, hidden=32)


def gradients(path: Path, batch: list[Group], settings: StepSettings) -> dict[str, Any]:
    state = TrainState(path, compute_dtype="float64")
    state._accumulate(batch, settings)
    return {name: p.grad.clone() for name, p in state._parameters.items() if p.grad is not None}


def close(left: dict[str, Any], right: dict[str, Any], tolerance: float = 1e-6) -> bool:
    return left.keys() == right.keys() and all(
        float((left[name] - right[name]).abs().max()) <= tolerance * max(1.0, float(right[name].abs().max()))
        for name in left
    )


def equal(left: TrainState, right: TrainState) -> bool:
    ours, theirs = left.state_tensors()[0], right.state_tensors()[0]
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


RULES = {
    "sequence weights": replace(PLAIN, ratio_level="sequence", truncate_above=5.0),
    "gspo": replace(PLAIN, objective="gspo", bypass=True, weigh=False, clip_low=0.05, clip_high=0.05),
    "ppo, decoupled by bypass": replace(PLAIN, objective="ppo", bypass=True, weigh=False),
    "cispo": replace(PLAIN, objective="cispo", bypass=True, weigh=False, clip_low=1.0),
    "dppo": replace(PLAIN, bypass=True, weigh=False, tv_low=0.001, tv_high=0.001),
    "normalised, rejected": replace(PLAIN, normalise=True, reject=(Rejection("k3", "mean", above=0.1),)),
    "m2po": replace(PLAIN, m2_limit=0.05),
    "shrinking": replace(PLAIN, reject=(Rejection("k2", "token", above=0.05),), reject_shrinks=True),
    "kl": replace(PLAIN, kl="k2", kl_coefficient=0.5, kl_reference="behaviour"),
}


@pytest.mark.parametrize("name", RULES)
def test_rows_and_order_change_no_gradient(model: Path, name: str) -> None:
    batch, settings = groups(), RULES[name]
    whole = gradients(model, batch, replace(settings, micro_batch_tokens=10_000))
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-6
    for budget in (1, 30):
        assert len(list(pack(batch, budget))) > 1
        assert close(gradients(model, batch, replace(settings, micro_batch_tokens=budget)), whole)
    turned = [replace(g, episodes=g.episodes[::-1]) for g in batch[::-1]]
    assert close(gradients(model, turned, settings), whole)


def test_scoring_the_batch_first_changes_no_bit(model: Path) -> None:
    """A limit that rejects nothing makes the trainer score all of the batch before it trains."""
    states = [TrainState(model) for _ in range(2)]
    ahead = replace(PLAIN, m2_limit=1e6)
    assert ahead.looks_ahead and not PLAIN.looks_ahead
    reports = [state.train_batch(groups(), 0, settings) for state, settings in zip(states, (PLAIN, ahead), strict=True)]
    assert equal(*states) and reports[0].loss == reports[1].loss


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "reinforce"])
def test_at_one_step_per_version_every_objective_trains_alike(model: Path, objective: str) -> None:
    plain = gradients(model, groups(), PLAIN)
    assert close(gradients(model, groups(), replace(PLAIN, objective=objective)), plain, 1e-9)


def test_bypass_puts_the_behaviour_policys_ratio_into_the_objective(model: Path) -> None:
    """Unclipped it is the weighted REINFORCE that the default computes with the ratio as a weight."""
    weighed = gradients(model, groups(), PLAIN)
    for objective in ("surrogate", "reinforce"):
        own = replace(PLAIN, objective=objective, bypass=True, weigh=objective == "reinforce")
        assert close(gradients(model, groups(), own), weighed)


# ------------------------------------------------------------------------------------------------ minibatches, epochs


def test_minibatches_are_optimizer_steps_on_shares_of_the_groups_inside_one_version(model: Path) -> None:
    """Without ratios two minibatches are two versions on the shares, but for the count."""
    settings = replace(PLAIN, objective="reinforce", weigh=False, minibatches=2)
    one, two, batch = TrainState(model), TrainState(model), groups(count=4)
    report = one.train_batch(batch, 0, settings)
    assert (one.version, one.optimizer_steps, report.optimizer_steps) == (1, 2, 2)
    parts = [two.train_batch(batch[:2], 0, replace(settings, minibatches=1)),
             two.train_batch(batch[2:], 1, replace(settings, minibatches=1))]  # fmt: skip
    assert equal(one, two)
    assert report.loss == pytest.approx(np.mean([part.loss for part in parts]))
    assert [g.trained for g in report.groups] == [g.trained for part in parts for g in part.groups]


def test_ratios_and_counts_are_taken_as_the_version_begins_and_clips_act_from_the_second_step(model: Path) -> None:
    settings = replace(PLAIN, objective="ppo", minibatches=2, epochs=2, learning_rate=1e-2, clip_low=0.01,
                       clip_high=0.01)  # fmt: skip
    state, single = TrainState(model), TrainState(model)
    report = state.train_batch(groups(), 0, settings)
    first = single.train_batch(groups(), 0, PLAIN)
    assert report.optimizer_steps == 4 and state.version == 1
    assert report.clipped > 0 and first.clipped == 0
    assert (report.groups, report.lags, report.ess) == (first.groups, first.lags, first.ess)
    assert report.rho > first.rho > 0


def test_steps_of_a_bypass_take_their_ratios_anew(model: Path) -> None:
    settings = replace(PLAIN, objective="reinforce", bypass=True, epochs=2, learning_rate=1e-2)
    anew, once = TrainState(model), TrainState(model)
    anew.train_batch(groups(), 0, settings)
    once.train_batch(groups(), 0, replace(settings, bypass=False))
    assert not equal(anew, once)


def test_a_later_step_that_is_refused_leaves_the_version_as_it_was(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, untouched, honest = TrainState(model), TrainState(model), TrainState._clip
    calls: list[float] = []

    def clip(self: TrainState, limit: float) -> float:
        calls.append(limit)
        if len(calls) == 2:
            raise NonFiniteGradient("the second step's")
        return honest(self, limit)

    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "_clip", clip)
        with pytest.raises(NonFiniteGradient):
            state.train_batch(groups(), 0, replace(PLAIN, epochs=2))
    assert state.version == 0 and state.optimizer_steps == 0 and equal(state, untouched)
    state.train_batch(groups(), 0, PLAIN)
    untouched.train_batch(groups(), 0, PLAIN)
    assert equal(state, untouched)


def test_batch_without_a_sampled_token_is_refused(model: Path) -> None:
    silent = [replace(g, episodes=tuple(replace(e, mask=np.zeros_like(e.mask)) for e in g.episodes)) for g in groups()]
    state = TrainState(model)
    with pytest.raises(InvalidRecord, match="nothing to train"):
        state.train_batch(silent, 0, PLAIN)
    some = [groups()[0], *silent[1:]]
    assert state.train_batch(some, 0, replace(PLAIN, minibatches=3)).optimizer_steps == 1, "no step on an empty share"


# ---------------------------------------------------------------------------------------- rejection, penalties, groups


def test_tokens_are_counted_under_the_first_rule_that_masks_them(model: Path) -> None:
    batch = groups()
    far = batch[1].episodes[0]
    batch[1] = replace(batch[1], episodes=(replace(far, logprobs=far.logprobs + 5), *batch[1].episodes[1:]))
    settings = replace(PLAIN, mask_above=1.5, reject=(Rejection("k3", "mean", above=0.5),), veto_below=1e-4)
    report = TrainState(model).train_batch(batch, 0, settings)
    for counts, group in zip(report.groups, batch, strict=True):
        assert counts.trained + sum(counts.masked.values()) == sum(int(e.mask.sum()) for e in group.episodes)
    assert set(report.groups[0].masked) == {"stale", "ratio", "rejected", "veto"}
    assert report.groups[1].masked["rejected"] == int(far.mask.sum()) and report.groups[0].masked["rejected"] == 0


def test_rejected_tokens_leave_the_denominators_only_where_asked(model: Path) -> None:
    rule = replace(PLAIN, reject=(Rejection("k2", "token", above=0.02),))
    kept, shrunk = gradients(model, groups(), rule), gradients(model, groups(), replace(rule, reject_shrinks=True))
    counts = TrainState(model).train_batch(groups(), 0, rule).groups
    left = sum(g.trained for g in counts) / sum(g.trained + sum(g.masked.values()) for g in counts)
    assert 0 < left < 1 and close({n: g / left for n, g in kept.items()}, shrunk)


def test_penalty_pulls_towards_version_0_and_is_nothing_there(model: Path) -> None:
    state, pulled = TrainState(model), TrainState(model)
    penal = replace(PLAIN, kl="k3", kl_coefficient=10.0)
    first = [one.train_batch(groups(), 0, s) for one, s in ((state, PLAIN), (pulled, penal))]
    assert first[1].penalty == 0
    for version in range(1, 6):
        reports = [one.train_batch(groups(), version, s) for one, s in ((state, PLAIN), (pulled, penal))]
    assert reports[1].penalty > 0
    start = {n: p.clone() for n, p in TrainState(model)._masters.items()}
    moved = [sum(float((p - start[n]).square().sum()) for n, p in one._masters.items()) for one in (state, pulled)]
    assert moved[1] < moved[0]


def test_groups_of_one_are_compared_with_the_batch(model: Path) -> None:
    batch = [replace(g, episodes=g.episodes[:1]) for g in groups(count=4)]
    nothing = gradients(model, batch, PLAIN)
    assert max(float(g.abs().max()) for g in nothing.values()) == 0
    alone = gradients(model, batch, replace(PLAIN, group_size=1, advantage="centered"))
    together = [Group("all", tuple(replace(g.episodes[0], slot=i) for i, g in enumerate(batch)))]
    assert close(alone, gradients(model, together, replace(PLAIN, advantage="centered")))


# ------------------------------------------------------------------------------------------------------------ branches


def split(one: Episode, at: int) -> Episode:
    """The same tokens as two strands: the second under the whole context that stands before it."""
    later = {name: getattr(one, name)[at:] for name in ("tokens", "mask", "logprobs", "versions", "weights")}
    first = {name: getattr(one, name)[:at] for name in later}
    return replace(one, **first, branches=(Strand(np.concatenate([one.prompt, one.tokens[:at]]), **later),))


@pytest.mark.parametrize("name", ["sequence weights", "gspo", "normalised, rejected", "m2po"])
def test_branches_without_a_change_of_context_leave_the_gradient_unchanged(model: Path, name: str) -> None:
    batch = groups()
    branched = [replace(g, episodes=tuple(split(e, 2) if e.slot == 1 else e for e in g.episodes)) for g in batch]
    for budget in (1, 60, 10_000):
        settings = replace(RULES[name], micro_batch_tokens=budget)
        assert close(gradients(model, branched, settings), gradients(model, batch, settings))


def span(source: str, tokens: list[int], parent: int = -1) -> PayloadSpan:
    logprobs = pack_float32(np.full(len(tokens), -5.5, np.float32)) if source == "model" else None
    versions = (VersionRun(0, len(tokens)),) if source == "model" else ()
    return PayloadSpan(source, 0, parent, len(tokens), versions, pack_ids(np.array(tokens, np.int32)), logprobs, None)


def recorded(*spans: PayloadSpan) -> PayloadEpisode:
    return PayloadEpisode(0, 0, "w", "model_success", 1.0, 1.0, spans, ())


# A long context (spans 1 to 4: prompt, answer, tool, summary), then the summary as the prompt of a new one.
COMPACTED = recorded(
    span("prompt", [5, 6, 7]), span("model", [8, 9]), span("environment", [10, 11]), span("model", [12, 13]),
    span("prompt", [20, 12, 13], parent=0), span("model", [14, 15]),
)  # fmt: skip


def test_compacted_episode_trains_summary_and_continuation_each_under_its_own_prefix(model: Path) -> None:
    one = laid_out(COMPACTED)
    (branch,) = one.branches
    assert (one.prompt.tolist(), one.tokens.tolist()) == ([5, 6, 7], [8, 9, 10, 11, 12, 13])
    assert (branch.prompt.tolist(), branch.tokens.tolist()) == ([20, 12, 13], [14, 15])
    assert one.column("mask").tolist() == [True, True, False, False, True, True, True, True]
    other = replace(one, slot=1, reward=0.0, branches=())
    batch = [Group("g", (one, other))]
    got = gradients(model, batch, PLAIN)
    state, total = TrainState(model, compute_dtype="float64"), 6 + 4
    advantage = {0: 0.5 / (np.sqrt(0.5) + 1e-6), 1: -0.5 / (np.sqrt(0.5) + 1e-6)}
    for episode in (one, other):
        for strand in episode.strands:
            ids = torch.from_numpy(np.concatenate([strand.prompt, strand.tokens])).long()
            logits = state._model(ids[None]).logits[0, len(strand.prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[len(strand.prompt) :, None])[:, 0]
            weight = (logprobs.detach() + 5.5).exp() * torch.from_numpy(strand.mask)
            (-(weight * logprobs).sum() * advantage[episode.slot] / total).backward()
    assert close(got, {name: p.grad for name, p in state._parameters.items() if p.grad is not None}, 1e-5)


def test_every_sampled_token_is_scored_once_in_the_context_in_which_it_was_sampled() -> None:
    tree = recorded(span("prompt", [5, 6]), span("model", [7, 8]), span("model", [9]), span("environment", [10], 2),
                    span("model", [11, 12]), span("model", [13], 1))  # fmt: skip
    one = laid_out(tree)
    contexts = {}
    for (row,) in ([r] for r in pack([Group("g", (one,))], 1)):
        index = np.arange(len(row.ids))
        for keep, target, offset in zip(row.keep, row.targets, row.offset, strict=True):
            seen = row.visible[row.segment[keep], row.segment] & (index <= keep)
            assert row.positions[seen].tolist() == list(range(int(seen.sum())))
            contexts[int(offset)] = (row.ids[seen].tolist(), int(target))
    assert contexts == {
        0: ([5, 6], 7), 1: ([5, 6, 7], 8), 2: ([5, 6, 7, 8], 9),
        3: ([5, 6, 7, 8, 10], 11), 4: ([5, 6, 7, 8, 10, 11], 12), 5: ([5, 6], 13),
    }  # fmt: skip


def test_a_span_that_continues_what_comes_later_or_nothing_before_a_model_token_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="slot 0: span 2 continues span 5"):
        laid_out(recorded(span("prompt", [5]), span("model", [6], parent=5)))
    with pytest.raises(InvalidRecord, match="slot 0 has no prompt"):
        laid_out(recorded(span("prompt", [5]), span("model", [6], parent=0)))


# ------------------------------------------------------------------------------------------------------------ settings


def test_run_settings_reach_the_step() -> None:
    settings = RunSettings.model_validate({
        "model": {"path": "m"}, "tasks": {"dataset": "chain_sum"}, "batch": {"groups": 4},
        "loss": {"objective": "ppo", "clip_high": 0.28, "dual_clip": 3.0, "mask_above": "none", "opsm_delta": 0.5,
                 "reject": [{"by": "k3", "over": "mean", "above": 0.01}], "denominator": "budget"},
        "optimizer": {"minibatches": 2, "epochs": 3},
    })  # fmt: skip
    step = step_settings(settings)
    assert step.optimizer_steps == 6 and step.looks_ahead and step.weigh and step.budget == 64
    assert (step.clip_high, step.dual_clip, step.mask_above, step.opsm_delta) == (0.28, 3.0, None, 0.5)
    assert step.reject == (Rejection("k3", "mean", None, 0.01),)
    default = step_settings(RunSettings.model_validate({"model": {"path": "m"}, "tasks": {"dataset": "chain_sum"}}))
    assert (default.objective, default.optimizer_steps, default.looks_ahead) == ("surrogate", 1, False)

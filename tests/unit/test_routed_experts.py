"""Which experts tokens go through: the engine records it, the log carries it, the trainer's forward does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import tiny_model
from headrace.producers.engines import GenerationRequest, Sampling
from headrace.producers.engines.opening import EngineChoice, open_engine
from headrace.producers.episodes import Attempt, EpisodeWriter
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import InvalidRecord, ModelError, SettingsError
from headrace.schemas.events import GroupPayload, PayloadEpisode, Span, Task, routed_experts
from headrace.schemas.outcomes import Source
from headrace.schemas.payload import content_hash, payload_span
from headrace.schemas.settings import ModelSettings
from headrace.trainer.batches import Group, pack
from headrace.trainer.following import told, train_word
from headrace.trainer.layout import laid_out

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.producers.engines.hf import HfEngine  # noqa: E402
from headrace.schemas.routing import Replay, routers  # noqa: E402
from headrace.trainer.step import StepSettings, TrainState  # noqa: E402

STEP = StepSettings(learning_rate=3e-3, micro_batch_tokens=150, probe_tokens=60)
KINDS = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, seed=1, kind=request.param, hidden=32)


def flipping(engine: HfEngine) -> None:
    """The engine's routers choose as if their logits were computed with a coarse rounding; they weigh as ever."""
    for number, router in enumerate(routers(engine._model)):
        own, noise, summed = router.forward, torch.Generator().manual_seed(number), "Mixtral" in type(router).__name__

        def forward(hidden: Any, own: Any = own, noise: Any = noise, summed: bool = summed) -> Any:
            logits, scores, chosen = own(hidden)
            other = (logits + 0.5 * torch.randn(logits.shape, generator=noise)).topk(chosen.shape[1], -1).indices
            weights = logits.float().softmax(-1).gather(-1, other)
            return logits, (weights / (weights.sum(-1, keepdim=True) if summed else 1)).to(scores.dtype), other

        router.forward = forward


def spans_of(prompt: list[int], steps: list[Any], limit: int) -> list[Span]:
    written: list[Any] = []
    writer = EpisodeWriter(Attempt("g", 0, 0, "w0"), lambda key, event: written.append(decode(encode(event))), limit)
    writer.start(worker="w", engine={}, temperature=0.8, max_new_tokens=99, seed=0)
    writer.context(prompt, Source.PROMPT)
    for step in steps:
        writer.model(step.token_ids, step.logprobs, step.version, experts=step.experts)
    writer.flush()
    spans = [one for one in written if isinstance(one, Span)]
    for one in spans:
        one.check()
    return spans


def sampled(engine: HfEngine, limit: int = 5) -> list[PayloadEpisode]:
    """Two siblings of each of three prompts that begin alike, as they come out of `samples`."""
    prompts = [engine.encode_chat([{"role": "user", "content": "count " + "x" * n}]) for n in range(3)]
    found: dict[str, list[Any]] = {}
    for number, prompt in enumerate(prompts):
        for slot in range(2):
            sampling = Sampling(0.8, 9 + 2 * slot, 100 * number + slot)
            engine.submit(GenerationRequest(f"{number}/{slot}", prompt, sampling))
        for one in engine.step():  # each prompt joins while the others decode
            found.setdefault(one.request_id, []).append(one)
    while engine.active:
        for one in engine.step():
            found[one.request_id].append(one)
    episodes = []
    for number, prompt in enumerate(prompts):
        for slot in range(2):
            spans = spans_of(prompt, found[f"{number}/{slot}"], limit)
            episodes.append(PayloadEpisode(2 * number + slot, 0, "w0", "model_success", float(slot), 0.8,
                                           tuple(map(payload_span, spans)), ()))  # fmt: skip
    payload = decode(encode(GroupPayload("g", Task("t", "s", "{}", 0), tuple(episodes))))
    assert isinstance(payload, GroupPayload)
    return list(payload.episodes)


def laid(episodes: list[PayloadEpisode]) -> list[Group]:
    return [Group(str(n), tuple(laid_out(one) for one in episodes[2 * n : 2 * n + 2])) for n in range(3)]


def chosen(engine: HfEngine, ids: Any) -> Any:
    """By a plain forward: [tokens, layers, each]."""
    found: list[Any] = []
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2])) for router in routers(engine._model)]
    with torch.no_grad():
        engine._model(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


def test_engine_records_what_a_plain_forward_chooses_whoever_shares_prompt_and_batch(model: Path) -> None:
    engine = HfEngine(model, slots=8, max_tokens=120, record_experts=True)
    for one in (laid_out(episode) for episode in sampled(engine)):
        ids = np.concatenate([one.prompt, one.tokens])
        assert one.experts is not None and one.experts.shape == (len(ids), 2, 2)
        assert np.array_equal(one.experts[:-1], chosen(engine, ids)[:-1])
        assert (one.experts[-1] == -1).all(), "nothing was computed from the last token"
    without = HfEngine(model, slots=8, max_tokens=120)
    assert all(laid_out(episode).experts is None for episode in sampled(without))


def test_mismatch_of_other_choices_is_gone_where_they_are_replayed(model: Path) -> None:
    engine = HfEngine(model, slots=8, max_tokens=120, record_experts=True)
    flipping(engine)
    groups = laid(sampled(engine))
    for recompute in (False, True):
        apart = {replayed: TrainState(model, replay_routing=replayed, recompute=recompute).train_batch(groups, 0, STEP)
                 for replayed in (False, True)}  # fmt: skip
        ((own,), (replayed,)) = apart[False].lags, apart[True].lags
        assert own.max_abs > 0.02 and own.second_moment > 1e-5
        assert replayed.max_abs < 1e-5
        verdict = apart[True].alignment
        assert verdict is not None and verdict.kind == "aligned"


def test_gradients_reach_the_gates_through_the_replayed_choices(model: Path) -> None:
    engine = HfEngine(model, slots=8, max_tokens=120, record_experts=True)
    flipping(engine)
    groups, step = laid(sampled(engine)), replace(STEP, bypass=True, weigh=False)
    state = TrainState(model, compute_dtype="float64", replay_routing=True)
    state._model.config._experts_implementation = "eager"  # the grouped one has no float64
    state._accumulate(groups, step)
    gates = {name: parameter for name, parameter in state._parameters.items() if name.endswith("gate.weight")}
    assert len(gates) == 2
    for gate in gates.values():
        gradient = gate.grad.clone()
        place = tuple(int(i) for i in np.unravel_index(int(gradient.abs().argmax()), gradient.shape))
        losses = []
        for change in (1e-3, -2e-3):
            with torch.no_grad():
                gate[place] += change
            losses.append(state._accumulate(groups, step).loss)
        with torch.no_grad():
            gate[place] += 1e-3
        slope = (losses[0] - losses[1]) / 2e-3  # the router's softmax is in float32
        assert abs(gradient[place]) > 1e-3 and float(gradient[place]) == pytest.approx(slope, rel=1e-2)
        state._zero_grad()
        state._accumulate(groups, step)


def test_rows_and_words_keep_each_tokens_experts(model: Path) -> None:
    groups = laid(sampled(HfEngine(model, slots=8, max_tokens=120, record_experts=True)))
    heard, *_ = told(train_word(groups, 0, STEP, ()))
    for one in (groups, heard):
        for budget in (1, 60, 10_000):
            for row in pack(one, budget):
                assert row.experts is not None and row.experts.shape == (len(row.ids), 2, 2)
                for i, episode in enumerate(row.episode):
                    recorded = one[episode // 2].episodes[episode % 2]
                    place = len(recorded.prompt) + row.offset[i] - 1
                    assert np.array_equal(row.experts[row.keep[i]], recorded.experts[place])


def test_content_hash_covers_the_experts_and_not_where_spans_were_cut(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m", seed=1, kind="qwen3_moe", hidden=32)

    def hashed(episodes: list[PayloadEpisode]) -> bytes:
        return content_hash(GroupPayload("g", Task("t", "s", "{}", 0), tuple(episodes)))

    long, short = (sampled(HfEngine(path, slots=8, max_tokens=120, record_experts=True), limit) for limit in (50, 4))
    bare = sampled(HfEngine(path, slots=8, max_tokens=120), 50)
    assert len(short[0].spans) > len(long[0].spans) == 2
    assert hashed(long) == hashed(short) != hashed(bare)
    prompt, answer = long[0].spans
    assert answer.experts is not None
    rows = answer.experts.column().copy()
    rows[3, 0, 0] ^= 1
    other = replace(long[0], spans=(prompt, replace(answer, experts=routed_experts(rows))))
    assert hashed([other, *long[1:]]) != hashed(long)


def test_branch_goes_on_from_the_experts_of_the_context_that_it_continues() -> None:
    def span(tokens: list[int], rows: list[int], parent: int = -1, sampled: bool = True) -> Any:
        from tests.synthetic_run import span as plain

        source = Source.MODEL if sampled else Source.PROMPT
        made = plain(source, tokens, [-1.0] * len(tokens) if sampled else None, [0] * len(tokens) if sampled else ())
        experts = routed_experts(np.array(rows, np.int16).reshape(-1, 1, 1)) if rows else None
        return replace(made, parent=parent, experts=experts)

    episode = laid_out(PayloadEpisode(0, 0, "w", "model_success", 1.0, 1.0, (
        span([1, 2], [], sampled=False), span([3, 4], [11, 12, 13]),  # the prompt's rows, and that of its first token
        span([5], [14]), span([6, 7], [15, 300], parent=2),  # another answer behind token 4
    ), ()))  # fmt: skip
    assert episode.experts is not None and episode.experts[:, 0, 0].tolist() == [11, 12, 13, 14, -1]
    (branch,) = episode.branches
    assert branch.prompt.tolist() == [1, 2, 3, 4] and branch.experts is not None
    assert branch.experts[:, 0, 0].tolist() == [11, 12, 13, 15, 300, -1]


def test_what_cannot_be_recorded_or_replayed_is_refused_with_a_reason(tmp_path: Path) -> None:
    plain = tiny_model(tmp_path / "plain", seed=1)
    with pytest.raises(ModelError, match="no routers that are known here"):
        TrainState(plain, replay_routing=True)
    with pytest.raises(SettingsError, match="set site.engine = 'hf'"):
        open_engine(ModelSettings(path=str(plain), replay_routing=True), EngineChoice("vllm"))
    moe = TrainState(tiny_model(tmp_path / "moe", seed=1, kind="mixtral", hidden=32))
    replay = Replay(moe._model)
    for wrong in (np.zeros((3, 1, 2), np.int16), np.full((3, 2, 2), 8, np.int16)):
        with pytest.raises(InvalidRecord, match="this model has 8, and takes 2 in each of 2"):
            replay.choose(wrong, "cpu")
    with pytest.raises(InvalidRecord, match="is not the routing of 3 tokens"):
        replace(routed_experts(np.zeros((3, 2, 2), np.int16)), data=b"12").column()

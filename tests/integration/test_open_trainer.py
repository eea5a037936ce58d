"""Another trainer on the real broker: it takes batches as tensors, and what it publishes is what receivers serve."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.plain_pytorch import loss_of, train
from headrace.producers.engines.hf import HfEngine
from headrace.producers.receiver import Receiver
from headrace.schemas.errors import Fenced, ReplayMismatch, WeightsRefused
from headrace.streams.log.policy import open_settings
from headrace.trainer.door import open_trainer
from headrace.trainer.fetch import fetch_batch
from headrace.trainer.publish import Publisher, read_policy
from headrace.trainer.step import TrainState
from tests.synthetic_run import SyntheticRun, episode

Kafka = Mapping[str, Any]


def rounded(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.bfloat16().view(torch.uint16).numpy() for name, tensor in state.items()}


def test_plain_loop_trains_a_run_and_replicas_serve_what_it_published(run: SyntheticRun, model: Path) -> None:
    run.write_random_batches(6)
    state = train(run.topics.run, run.kafka, 6, rate=1e-3)
    head = read_policy(run.kafka, run.topics, open_settings(run.kafka, run.topics))
    assert (head.committed, head.published) == (6, 6)
    assert [(v.version, v.parent, v.batch) for v in head.versions.values()][1:] == [(n, n - 1, n) for n in range(1, 7)]
    assert [p.kind for p in head.publications] == ["path", *["delta"] * 5, "snapshot", "delta"], "a snapshot at 5"
    assert all(v.metrics["loss"] == v.metrics["loss"] for v in list(head.versions.values())[1:])
    engine, receiver = HfEngine(model, slots=4, max_tokens=64), Receiver(run.kafka, run.topics)
    assert receiver.load(engine) and engine.version == 6
    receiver.close()
    wanted, first = rounded(state), TrainState(model).served_bits()
    served = engine.served_arrays()
    assert all(np.array_equal(served[name], wanted[name]) for name in served)
    assert any(not np.array_equal(served[name], first[name]) for name in served)


def test_tensors_are_the_episodes_with_the_runs_advantages_and_recorded_weights(run: SyntheticRun) -> None:
    group = [episode(s, [5, 6, 7], [9, 10 + s], [-5.0, -4.0], [0, 0], float(s % 2)) for s in range(4)]
    run.write_batch([group], weight=0.25)
    with open_trainer(run.topics.run, run.kafka) as trainer:
        batch = next(trainer.batches())
    assert batch.version == 1 and batch.groups == ("g00000000",) * 4
    rows = batch.padded(pad=-1)
    assert rows["tokens"].tolist() == [[5, 6, 7, 9, 10 + s] for s in range(4)]
    assert rows["sampled"].tolist() == [[False, False, False, True, True]] * 4
    assert rows["weights"][0].tolist() == [0, 0, 0, 0.25, 0.25], "a forecast acts, where there may be no exact ratio"
    assert rows["logprobs"][1].tolist() == [0, 0, 0, -5, -4]
    half = 0.5 / (np.std([0, 1, 0, 1], ddof=1) + 1e-6)
    assert rows["advantages"][:, -1].tolist() == pytest.approx([-half, half, -half, half])


def test_its_loss_has_the_gradient_of_our_own_trainers(run: SyntheticRun, model: Path) -> None:
    """The same batch, float32 on the same weights: masked alike, weighed alike."""
    from transformers import AutoModelForCausalLM

    from headrace.streams.log.reader import Reader, read_range
    from headrace.trainer.weighing import StepSettings

    run.write_random_batches(1)
    with open_trainer(run.topics.run, run.kafka) as trainer:
        batch = next(trainer.batches())
        record = next(iter(read_range(run.kafka, run.topics.name("batches"), 0, 0, 1)))
        with Reader(run.kafka) as reader:
            groups = fetch_batch(reader, run.topics, record, run.settings.staleness).groups
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ours = TrainState(model, dtype="float32")
    theirs.load_state_dict({n: p.detach() for n, p in ours._parameters.items()}, strict=False)
    loss_of(theirs, batch).backward()  # type: ignore[no-untyped-call]
    ours._accumulate(groups, StepSettings())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter.grad, ours._parameters[name].grad, rtol=1e-3, atol=1e-6)


def test_a_version_is_published_once_in_its_turn_and_whole(run: SyntheticRun, model: Path) -> None:
    run.write_random_batches(2)
    good = {name: p.detach().clone() for name, p in TrainState(model)._masters.items()}
    with open_trainer(run.topics.run, run.kafka) as trainer:
        batches = trainer.batches()
        with pytest.raises(WeightsRefused, match="no batch is taken"):
            trainer.publish(1, good)
        next(batches)
        with pytest.raises(WeightsRefused, match="version 2 is not due"):
            trainer.publish(2, good)
        name = next(iter(good))
        with pytest.raises(WeightsRefused, match="is missing"):
            trainer.publish(1, {n: t for n, t in good.items() if n != name})
        with pytest.raises(WeightsRefused, match="NaN"):
            trainer.publish(1, {**good, name: torch.full_like(good[name], torch.nan)})
        with pytest.raises(WeightsRefused, match="version 1 is not published yet"):
            next(batches)
        assert trainer.version == 0
        trainer.publish(1, good)
        assert next(trainer.batches()).version == 2


def test_restart_publishes_what_was_committed_and_a_second_trainer_fences_the_first(
    run: SyntheticRun, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_random_batches(2)
    good = {name: p.detach().clone() for name, p in TrainState(model)._masters.items()}
    other = {name: p + 0.5 for name, p in good.items()}
    first = open_trainer(run.topics.run, run.kafka)
    next(first.batches())
    with monkeypatch.context() as patch:  # killed between commit and publication
        patch.setattr(Publisher, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.publish(1, other)
    with open_trainer(run.topics.run, run.kafka) as second:
        assert second.version == 1
        with pytest.raises(WeightsRefused, match=r"call publish\(1, state_dict\)"):
            next(second.batches())
        with pytest.raises(ReplayMismatch):
            second.publish(1, good)
        second.publish(1, other)
        assert next(second.batches()).version == 2
        with pytest.raises(Fenced):
            first._policy.write(lambda **link: first._record(link, 1, None, b"x" * 16))
        second.publish(2, good)
    first.close()
    stop = threading.Event()
    stop.set()
    with open_trainer(run.topics.run, run.kafka) as third:
        assert third.version == 2 and list(third.batches(stop)) == []


@pytest.mark.slow
def test_trl_trains_a_run_with_its_own_loss(run: SyntheticRun, model: Path) -> None:
    pytest.importorskip("trl", reason="headrace[trl] isn't installed")
    from examples.trl_trainer import train as train_with_trl

    run.write_random_batches(3)
    train_with_trl(run.topics.run, run.kafka, 3, rate=1e-3)
    head = read_policy(run.kafka, run.topics, open_settings(run.kafka, run.topics))
    assert (head.committed, head.published) == (3, 3)
    engine, receiver = HfEngine(model, slots=4, max_tokens=64), Receiver(run.kafka, run.topics)
    first = {name: bits.copy() for name, bits in engine.served_arrays().items()}
    assert receiver.load(engine) and engine.version == 3
    receiver.close()
    moved = [name for name, bits in engine.served_arrays().items() if not np.array_equal(bits, first[name])]
    assert moved, "nothing was trained"

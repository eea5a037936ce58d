"""Deltas to measure where none were given: made by the numbers, or by training a model of ours for a few steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.errors import ModelError

from .harness import CannotMeasure

Bits = NDArray[np.uint16]


def to_bfloat16(values: NDArray[np.float32]) -> Bits:
    """Rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def adamw_step(elements: int, learning_rate: float, seed: int = 1) -> tuple[Bits, Bits]:
    """bf16 weights before and after an AdamW step on float32 masters, from gradients that are noise around a drift."""
    rng = np.random.default_rng(seed)
    masters = rng.normal(0, 0.06, elements).astype(np.float32)
    drift = rng.normal(0, 0.3, elements).astype(np.float32)
    mean, square = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    old = to_bfloat16(masters)
    for step in range(1, 13):
        old = to_bfloat16(masters)
        gradient = drift + rng.standard_normal(elements, np.float32)
        mean += 0.1 * (gradient - mean)
        square += 0.05 * (gradient * gradient - square)
        masters -= learning_rate * (mean / (1 - 0.9**step)) / np.sqrt(square / (1 - 0.95**step))
    return old, to_bfloat16(masters)


def trained(model: str, rates: tuple[float, ...], steps: int) -> Iterator[tuple[float, delta.State, delta.State]]:
    """For each learning rate: what is served before and after the last of `steps` steps of our trainer, on episodes
    that the model sampled, from float32 masters. `model` is `tiny` or `smollm2`. The masters begin anywhere within what
    is rounded to the served weights, as they lie after many steps: begun as what is served, all weights of an octave
    would change at the same step."""
    try:
        import torch

        from headrace.models import smollm2, tiny_model
        from headrace.producers.engines import GenerationRequest, Sampling
        from headrace.producers.engines.hf import HfEngine
        from headrace.trainer.batches import Episode, Group
        from headrace.trainer.step import StepSettings, TrainState
    except ImportError as error:
        raise CannotMeasure(f"training needs headrace[train]: {error}") from error
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = smollm2(Path(folder)) if model == "smollm2" else tiny_model(Path(folder) / "tiny", seed=1)
        except ModelError as error:
            raise CannotMeasure(str(error)) from error
        engine = HfEngine(path, slots=8, max_tokens=96)
        prompts = [engine.encode_chat([{"role": "user", "content": f"Name {n} animals."}]) for n in ("two", "three")]
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        for number, prompt in enumerate(prompts):
            for slot in range(4):
                sampling = Sampling(1.0, 16, 10 * number + slot)
                engine.submit(GenerationRequest(f"{number}/{slot}", prompt, sampling, engine.eos_ids))
        while engine.active:
            for progress in engine.step():
                tokens.setdefault(progress.request_id, []).extend(progress.token_ids.tolist())
                logprobs.setdefault(progress.request_id, []).extend(progress.logprobs.tolist())
        del engine

        def episode(number: int, slot: int) -> Episode:
            own = np.array(tokens[f"{number}/{slot}"], np.int32)
            return Episode(
                slot=slot, prompt=np.array(prompts[number], np.int32), tokens=own, mask=np.ones(own.size, np.bool_),
                logprobs=np.array(logprobs[f"{number}/{slot}"], np.float32), versions=np.zeros(own.size, np.int32),
                weights=np.ones(own.size, np.float32), reward=float(slot % 2), counted=True, temperature=1.0,
            )  # fmt: skip

        groups = [Group(f"g{n}", tuple(episode(n, slot) for slot in range(4))) for n in range(len(prompts))]
        for rate in rates:
            state = TrainState(path)
            torch.manual_seed(1)
            for name, master in state.state_tensors()[0].items():
                if name.startswith("master."):
                    bits = master.view(torch.int32)
                    bits += torch.randint_like(bits, -0x7FFF, 0x7FFF) * (bits & 0x7FFFFFFF).bool()  # zeros stay
            before: delta.State = {}
            for version in range(steps):
                before = delta.copy_state(delta.as_state(state.served_bits(), "bfloat16"))
                state.train_batch(groups, version, StepSettings(learning_rate=rate))
            yield rate, before, delta.as_state(state.served_bits(), "bfloat16")

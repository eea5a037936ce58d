"""One engine over several replicas: which weights each serves, and what becomes of one that doesn't take an update."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models import tiny_model
from headrace.producers.engines import Changes, Engine, GenerationRequest, Progress, Sampling
from headrace.producers.engines.local import LocalReplica
from headrace.producers.engines.remote import RemoteEngine, RemoteReplica
from headrace.producers.engines.served import ModelFolder, as_text, from_text, messages, whole
from headrace.producers.replicas import Limits, State
from headrace.schemas.errors import EngineError, LogError, ReplicaLost, WeightsRefused

pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.producers.engines.hf import HfEngine  # noqa: E402

QUICK = Limits(check_every_s=0.02, fence_s=0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


class Fickle(LocalReplica):
    """Fails when it is asked to take or to restore weights, as long as it is told to."""

    def __init__(self, model: Path, name: str) -> None:
        super().__init__(HfEngine(model, slots=4, max_tokens=128), name=name)
        self.failing = False
        self.apply_s = self.restore_s = 0.0  # that it takes
        self.restored = self.begun = 0

    async def apply(self, version: int, changes: Changes) -> None:
        if self.failing:
            raise ReplicaLost("the connection broke")
        await asyncio.sleep(self.apply_s)
        await super().apply(version, changes)

    async def restore(self, version: int, whole: Changes) -> None:
        if self.failing:
            raise ReplicaLost("the connection broke")
        self.begun += 1
        await asyncio.sleep(self.restore_s)
        await super().restore(version, whole)
        self.restored += 1


def engine_of(model: Path, *replicas: Fickle) -> RemoteEngine:
    return RemoteEngine(replicas, ModelFolder(model, "bfloat16"), slots=4 * len(replicas), max_tokens=128,
                        facts={"engine": "local"}, limits=QUICK)  # fmt: skip


def update(engine: RemoteEngine, value: int = 0x3D00) -> dict[str, Any]:
    name = next(iter(engine.served_arrays()))
    return {name: (np.arange(0, 600, 3), np.full(200, value, np.uint16))}


def serving(engine: RemoteEngine) -> set[str]:
    return {name for name, (state, _) in engine.pool.states.items() if state is State.SERVING}


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def sample(engine: RemoteEngine, count: int = 12) -> set[int]:
    """The versions that sampled `count` requests."""
    versions = set()
    for number in range(count):
        engine.submit(GenerationRequest(f"{number}", [5, 6, number + 3], Sampling(1.0, 4, number)))
    while engine.active:
        versions |= {one.version for one in engine.step() if one.token_ids.size}
    return versions


def test_a_replica_that_fails_an_update_serves_nothing_until_it_has_all_weights(model: Path) -> None:
    """slime#2104, dynamo#9131"""
    good, fickle = Fickle(model, "good"), Fickle(model, "fickle")
    engine = engine_of(model, good, fickle)
    try:
        assert sample(engine) == {0}
        fickle.failing = True
        engine.apply(1, update(engine))
        assert serving(engine) == {"good"} and "version 1" in engine.pool.states["fickle"][1]
        assert sample(engine) == {1}
        engine.apply(2, update(engine, 0x3E00))
        assert sample(engine) == {2}
        restored, fickle.failing = fickle.restored, False
        until(lambda: "fickle" in serving(engine))
        assert fickle.restored == restored + 1
        inside = fickle._engine
        assert inside.version == 2
        assert all(np.array_equal(bits, engine.served_arrays()[n]) for n, bits in inside.served_arrays().items())
    finally:
        engine.close()


def test_a_replica_that_hangs_in_an_update_holds_nobody_up_and_catches_up_with_what_came_meanwhile(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.producers.engines.remote.LAGGARD_S", 0.3)
    good, slow = Fickle(model, "good"), Fickle(model, "slow")
    engine = engine_of(model, good, slow)
    try:
        begun, slow.apply_s, slow.restore_s = slow.begun, 30.0, 3.0
        began = time.monotonic()
        engine.apply(1, update(engine))
        assert time.monotonic() - began < 20 and serving(engine) == {"good"}
        slow.apply_s = 0.0
        until(lambda: slow.begun > begun)  # its weights are being made anew, which takes three seconds
        engine.apply(2, update(engine, 0x3E00))
        assert serving(engine) == {"good"}
        until(lambda: "slow" in serving(engine))
        inside = slow._engine
        assert inside.version == 2
        assert all(np.array_equal(bits, engine.served_arrays()[n]) for n, bits in inside.served_arrays().items())
    finally:
        engine.close()


def test_an_update_that_no_replica_takes_ends_the_engine_and_a_refused_one_changes_nothing(model: Path) -> None:
    only = Fickle(model, "only")
    engine = engine_of(model, only)
    try:
        before = {name: bits.copy() for name, bits in engine.served_arrays().items()}
        with pytest.raises(WeightsRefused):
            engine.apply(1, {"no.such.tensor": (np.array([0]), np.array([1], np.uint16))})
        with pytest.raises(WeightsRefused, match="not numbers"):
            engine.apply(1, update(engine, 0x7FC0))
        assert engine.version == 0
        assert all(np.array_equal(bits, before[name]) for name, bits in engine.served_arrays().items())
        only.failing = True
        with pytest.raises(ReplicaLost, match="no replica took version 1"):
            engine.apply(1, update(engine))
    finally:
        engine.close()


def test_where_none_can_be_brought_up_there_is_no_engine(model: Path) -> None:
    only = Fickle(model, "only")
    only.failing = True
    with pytest.raises(ReplicaLost, match="no replica serves.*connection broke"):
        engine_of(model, only)


def test_an_update_travels_in_messages_of_bounded_size_and_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#8076"""
    monkeypatch.setattr("headrace.producers.engines.served.MESSAGE_BYTES", 1000)
    bits = {f"t{n}": np.arange(300, dtype=np.uint16).reshape(30, 10) for n in range(20)}
    changes: dict[str, Any] = {name: (None, array) if n % 2 else (np.arange(0, 300, 7), array.reshape(-1)[::7].copy())
                               for n, (name, array) in enumerate(bits.items())}  # fmt: skip
    sent = list(messages(bits, changes))
    sizes = [sum(len(values) + len(where or b"") for _, _, where, values in parts) for parts in sent]
    assert len(sent) > 5 and max(sizes) <= 1000 + 600
    arrived = [part for parts in sent for part in from_text(as_text(parts))]
    assert [name for name, *_ in arrived] == list(bits)
    for name, shape, where, values in arrived:
        positions, wanted = changes[name]
        assert shape == (30, 10) and np.array_equal(np.frombuffer(values, np.uint16), wanted.reshape(-1))
        assert (where is None) == (positions is None)
        assert where is None or np.array_equal(np.frombuffer(where, "<i8"), positions)
    assert list(whole(bits)) == list(bits)


def test_on_the_engines_own_loop_tokens_come_from_who_serves_across_an_update_and_until_weights_fail(
    model: Path,
) -> None:
    def between(engine: Engine) -> None:
        if fail.is_set():
            raise LogError("the log is gone")

    fail = threading.Event()
    engine = engine_of(model, Fickle(model, "a"))

    async def ask(number: int) -> list[Progress]:
        wanted = GenerationRequest(f"{number}", [5, 6, 7], Sampling(1.0, 6, number), frozenset({10**6}))
        return [one async for one in replica.generate(wanted)]

    async def test() -> None:
        steps = await ask(0)
        assert sum(len(one.token_ids) for one in steps) == 6 and {one.version for one in steps} == {0}
        await asyncio.to_thread(engine.apply, 1, update(engine))
        assert {one.version for one in await ask(1)} == {1} and (await replica.health()).version == 1
        with pytest.raises(EngineError, match="takes 128"):
            replica.generate(GenerationRequest("long", [5] * 120, Sampling(1.0, 60, 1)))
        engine.pool.fence("a", "for a moment")
        assert (await replica.health()).serving  # its requests wait
        assert len(await ask(2)) == 6
        fail.set()
        while True:
            try:
                await replica.health()
            except ReplicaLost as error:
                assert "the log is gone" in str(error)
                break
            await asyncio.sleep(0.02)
        with pytest.raises(ReplicaLost, match="the log is gone"):
            await ask(3)
        await replica.close()

    replica = RemoteReplica(engine, between_steps=between)
    try:
        engine.run(asyncio.wait_for(test(), 60))
    finally:
        engine.close()

"""Engines under live traffic: weights change fifty times while requests run, and a replica dies in an update."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.models import tiny_model
from headrace.producers.engines import Engine, GenerationRequest, Sampling
from headrace.producers.scheduler import SlotKey
from headrace.producers.updating import UpdatePolicy
from headrace.schemas.errors import ReplicaLost
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, HandBack, Heartbeat, Span
from headrace.schemas.outcomes import REASON_WEIGHTS, Purpose, Source
from headrace.schemas.topics import FLEET, TRAJECTORIES
from tests.engines import open_kind
from tests.publishing import DTYPE, Publishing
from tests.working import NEW, SLOTS, Working, versions

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PUBLICATIONS = 52
POLICIES = [("keep", "keep"), ("keep", "clear"), ("finish", "clear"), ("abort", "clear")]
EACH = PUBLICATIONS // len(POLICIES)
# Log-probability by which a greedy token may fall short of the likeliest one: rounding of two implementations.
CLOSE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1, kind="qwen3", hidden=128)


@pytest.fixture
def source(kafka: Any, run_name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Publishing:
    from headrace.producers.engines.served import ModelFolder

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "unit"))
    torch.set_num_threads(1)
    one = Publishing(kafka, run_name, arrays=ModelFolder(model, DTYPE).bits, flip=16,
                     tasks={"source": "jsonl", "path": "unused", "score": "scorers:vowels"},
                     model={"path": str(model), "max_length": 128})  # fmt: skip
    one.begin()
    return one


class Reference:
    """A plain forward pass over the weights of any version."""

    def __init__(self, source: Publishing, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._history = source.history
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._version = -1

    def shortfall(self, version: int, prompt: list[int], tokens: list[int]) -> Any:
        """How far each token's log-probability lies below the likeliest one's, float32 [n]."""
        with torch.no_grad():
            if version != self._version:
                for name, parameter in self._model.named_parameters():
                    bits = torch.from_numpy(self._history[version][name])
                    parameter.copy_(bits.view(torch.bfloat16).view(parameter.shape))
                self._version = version
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        likeliest = torch.log_softmax(logits, -1)
        return (likeliest.max(-1).values - likeliest[torch.arange(len(tokens)), torch.tensor(tokens)]).numpy()


def attempts(working: Working) -> Iterator[tuple[tuple[str, int, int], list[Span]]]:
    """The model's spans of every attempt."""
    every = [one for one in working.events(TRAJECTORIES, Span) if one.source == Source.MODEL]
    every.sort(key=lambda one: (one.group, one.slot, one.attempt, one.sequence))
    for key, spans in itertools.groupby(every, lambda one: (one.group, one.slot, one.attempt)):
        yield key, list(spans)


class Traffic:
    """Two groups are always under way: each that ends is followed by another."""

    def __init__(self, working: Working) -> None:
        self.working = working
        self.leased: set[tuple[str, int]] = set()

    def turn(self) -> None:
        if len(self.working.worker._jobs) <= SLOTS:
            group = f"g{len(self.leased):03}"
            self.working.lease(group, purpose=str(Purpose.EVAL))
            self.leased |= {(group, slot) for slot in range(SLOTS)}
            while (SlotKey(group, 0, 0)) not in self.working.worker._jobs:
                self.working.worker.turn()
        self.working.worker.turn()

    def publish(self, number: int) -> int:
        """The requests that were active when the version came to be applied."""
        self.working.worker._update = UpdatePolicy(*POLICIES[(number - 1) // EACH])
        while not self.working.engine.active:
            self.turn()
        publishing = threading.Thread(target=self.working.source.publish)
        publishing.start()
        busy = 0
        while self.working.engine.version < number:
            if self.working.receiver.ready:
                busy = self.working.engine.active
            self.turn()
        publishing.join()
        return busy


def finish(working: Working, leased: set[tuple[str, int]]) -> None:
    """Lease again what was handed back, until everything has ended."""
    again: set[tuple[str, int]] = set()

    def ended() -> bool:
        done = {(one.group, one.slot) for one in working.events(TRAJECTORIES, EpisodeEnded)}
        for back in working.events(FLEET, HandBack):
            assert back.reason == REASON_WEIGHTS
            for slot in back.slots:
                if (back.group, slot) not in again:
                    again.add((back.group, slot))
                    working.lease(back.group, {slot: 1}, purpose=str(Purpose.EVAL))
        return done >= leased

    working.until(ended, 600)


def greedy(engine: Engine, prompt: list[int]) -> list[int]:
    tokens: list[int] = []
    engine.submit(GenerationRequest("last", prompt, Sampling(1.0, 40, 0, greedy=True)))
    while engine.active:
        tokens += [int(i) for one in engine.step() if one.request_id == "last" for i in one.token_ids]
    return tokens


SIZES: Any = {"slots": 4, "max_tokens": 128, "dtype": DTYPE}


def check_traffic(working: Working, reference: Reference) -> None:
    traffic = Traffic(working)
    active = [traffic.publish(number) for number in range(1, PUBLICATIONS + 1)]
    finish(working, traffic.leased)
    check_no_request_lost(working, traffic.leased)
    # `finish` is the one that waits for them; each of the others met requests that ran.
    assert all(sum(map(bool, active[EACH * i : EACH * (i + 1)])) > EACH // 2 for i in (0, 1, 3)), active
    prompt = working.engine.encode_chat([{"role": "user", "content": "Say it."}])
    check_tokens(working, reference, prompt)
    assert reference.shortfall(PUBLICATIONS, prompt, greedy(working.engine, prompt)).max() < CLOSE


def test_weights_change_fifty_times_under_each_policy(source: Publishing, model: Path) -> None:
    with open_kind("hf", model, **SIZES) as engine:
        working = Working(source, engine)
        check_traffic(working, Reference(source, model))
        working.close()


def test_weights_change_fifty_times_in_vllm_and_a_replica_that_dies_in_an_update_rejoins(source: Publishing,
                                                                                        model: Path
                                                                                        ) -> None:  # fmt: skip
    reference = Reference(source, model)
    with open_kind("vllm", model, **SIZES) as engine:
        working = Working(source, engine)
        check_traffic(working, reference)
        die_half_way(working)
        working.worker._host.close()
        working.receiver.close()
    with open_kind("vllm", model, **SIZES) as engine:
        prompt = engine.encode_chat([{"role": "user", "content": "Say it."}])
        assert engine.version == 0
        working = Working(source, engine, "next")
        assert engine.version == PUBLICATIONS + 1, "it has caught up before it takes work"
        served = engine.served_arrays()
        assert all(np.array_equal(bits, served[name]) for name, bits in source.history[-1].items())
        assert engine.differing() == []  # type: ignore[attr-defined]
        assert reference.shortfall(PUBLICATIONS + 1, prompt, greedy(engine, prompt)).max() < CLOSE
        working.lease("broken-off", {0: 1, 1: 1}, purpose=str(Purpose.EVAL))
        working.until(lambda: working.ended("broken-off"))
        source.publish()
        working.until(lambda: engine.version == PUBLICATIONS + 2)
        working.close()


def check_no_request_lost(working: Working, leased: set[tuple[str, int]]) -> None:
    """Each slot ended once, whole; what was begun and has no end was handed back."""
    ended = [(one.group, one.slot, one.attempt) for one in working.events(TRAJECTORIES, EpisodeEnded)]
    assert len(ended) == len(set(ended)) and {key[:2] for key in ended} == leased
    back = {(one.group, slot, 0) for one in working.events(FLEET, HandBack) for slot in one.slots}
    begun = {(one.group, one.slot, one.attempt) for one in working.events(TRAJECTORIES, EpisodeStarted)}
    assert begun - set(ended) <= back and not back & set(ended)
    assert back, "some were aborted"
    for key, spans in attempts(working):
        tokens = [int(t) for span in spans for t in span.token_ids()]
        if key in ended:
            assert len(tokens) == NEW or tokens[-1] in working.engine.eos_ids


def check_tokens(working: Working, reference: Reference, prompt: list[int]) -> None:
    """Every token carries the version that sampled it: it is the one that this version's weights alone, without any
    cache, find likeliest. Tokens on keys of earlier weights are marked, and come with `keep`, `keep` alone; under
    `finish` and `abort` a request has one version."""
    by_version: dict[int, list[tuple[list[int], list[bool]]]] = {}
    crossed = marked = 0
    for _, spans in attempts(working):
        tokens, own, old = [int(t) for span in spans for t in span.token_ids()], versions(spans), []
        for span in spans:
            oldest = span.cache_version
            old += [oldest is not None and version > oldest for version in versions([span])]
        assert own == sorted(own)
        assert all(version <= EACH for version, stale in zip(own, old, strict=True) if stale)
        assert own[0] < 2 * EACH or len(set(own)) == 1
        crossed, marked = crossed + (len(set(own)) > 1), marked + any(old)
        for version in set(own):
            by_version.setdefault(version, []).append(
                (tokens, [v == version and not stale for v, stale in zip(own, old, strict=True)])
            )
    checked = 0
    for version, every in sorted(by_version.items()):
        for tokens, exact in every:
            if any(exact):
                assert reference.shortfall(version, prompt, tokens)[np.array(exact)].max() < CLOSE, version
                checked += sum(exact)
    assert crossed > EACH // 2 and marked and checked > 10 * PUBLICATIONS and len(by_version) > PUBLICATIONS // 2


def die_half_way(working: Working) -> None:
    """vLLM's process is killed when half of an update is written; the replica says so, and announces nothing."""
    engine: Any = working.engine
    honest = engine._write

    async def write(changes: Any) -> None:
        names = list(changes)
        await honest({name: changes[name] for name in names[: len(names) // 2]})
        children = psutil.Process(os.getpid()).children(recursive=True)
        for process in [one for one in children if "EngineCore" in " ".join(one.cmdline())]:
            process.kill()
        await honest({name: changes[name] for name in names[len(names) // 2 :]})

    engine._write = write
    working.lease("broken-off", purpose=str(Purpose.EVAL))
    while engine.active < SLOTS:
        working.worker.turn()
    working.source.publish()
    with pytest.raises(ReplicaLost):
        while True:
            working.worker.turn()
    assert max(beat.version for beat in working.events(FLEET, Heartbeat)) == PUBLICATIONS

"""Weights through the real broker: what arrives, what is refused, and how a replica recovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.create import create_run
from headrace.producers.publications import served_state
from headrace.producers.receiver import Receiver
from headrace.schemas import delta
from headrace.schemas.chain import Chain
from headrace.schemas.errors import DamagedWeights, WeightsRefused, WrongBase
from headrace.schemas.events import Version, WeightChunk
from headrace.schemas.hashes import digest
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import WEIGHTS, RunTopics
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import beginning_offsets
from headrace.streams.log.transactions import Transactor
from headrace.trainer.publish import Policy, Publisher

Arrays = dict[str, NDArray[Any]]
Kafka = Mapping[str, Any]
DTYPE = "bfloat16"


def model(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (400, 50), "norm": (50,), "mlp": (300, 100)}
    return {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, shape in shapes.items()}


class Target:
    """Stands for an engine: arrays that are overwritten between steps."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays, self.version = {name: bits.copy() for name, bits in arrays.items()}, 0
        self.applied: list[int] = []

    def served_arrays(self) -> Arrays:
        return self.arrays

    def apply(self, version: int, changes: Mapping[str, delta.Change]) -> None:
        if version <= self.version:
            raise WeightsRefused(f"version {version} can't follow {self.version}")
        delta.write(delta.as_state(self.arrays, DTYPE), dict(changes))
        self.version = version
        self.applied.append(version)

    def serves(self, arrays: Arrays) -> bool:
        return all(np.array_equal(self.arrays[name], bits) for name, bits in arrays.items())


class Source:
    """A run whose trainer only publishes: version n differs from n - 1 in a twentieth of its elements."""

    def __init__(self, kafka: Kafka, run: str, snapshot_every: int = 1000, codec: str = "fast") -> None:
        self.kafka, self.topics = kafka, RunTopics(run)
        settings = RunSettings.model_validate({
            "model": {"path": str(Path.cwd()), "dtype": DTYPE}, "tasks": {"dataset": "chain_sum"},
            "log": {"partitions": 1},
        })  # fmt: skip
        create_run(kafka, self.topics, settings)
        self.transactor = Transactor(kafka, self.topics.transactional_id("trainer"))
        opened = open_settings(kafka, self.topics)
        policy = Policy(self.topics, self.transactor, Chain(0, digest(opened.value)))
        self.publisher = Publisher(kafka, self.topics, policy, snapshot_every, codec)
        self.history = [model()]
        self.arrays = {name: bits.copy() for name, bits in self.history[0].items()}

    @property
    def state(self) -> dict[str, delta.Tensor]:
        return delta.as_state(self.arrays, DTYPE)

    def begin(self) -> None:
        hashed = delta.state_hash(self.state)

        def version(**link: Any) -> Version:
            return Version(**link, version=0, parent=-1, batch=0, batch_offset=-1, batch_digest=b"",
                           hash_algorithm=delta.HASH_ALGORITHM, served_hash=hashed, train_hash=b"", rho=0.0,
                           rho_tokens=0, groups=(), metrics={}, fingerprint="{}", committed_ms=0)  # fmt: skip

        self.publisher.publish_initial(version, "somewhere", self.state, hashed)

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.history)
            rng = np.random.default_rng([7, number])
            for bits in self.arrays.values():
                bits[rng.random(bits.shape) < 0.05] ^= 1
            changes, served_hash = self.publisher.compare(self.state)
            self.publisher.publish(number, changes, served_hash)
            self.history.append({name: bits.copy() for name, bits in self.arrays.items()})

    def damage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next delta's chunks get a flipped bit on their way to the log."""
        honest = delta.encode_delta

        def encode(*args: Any) -> Iterator[WeightChunk]:
            for chunk in honest(*args):
                data = bytearray(chunk.data)
                data[len(data) // 2] ^= 4
                yield replace(chunk, data=bytes(data))

        with monkeypatch.context() as patch:
            patch.setattr(delta, "encode_delta", encode)
            self.publish()


@pytest.fixture
def source(kafka: Kafka, run_name: str) -> Source:
    one = Source(kafka, run_name)
    one.begin()
    return one


@contextmanager
def receiving(source: Source, target: Target, **options: Any) -> Iterator[Receiver]:
    receiver = Receiver(source.kafka, source.topics, worker="w", incarnation="i", **options)
    try:
        assert receiver.load(target)
        yield receiver
    finally:
        receiver.close()


def until(condition: Callable[[], bool], step: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        step()
        time.sleep(0.01)


def test_replica_follows_version_by_version_bit_for_bit(source: Source) -> None:
    target = Target(model())
    with receiving(source, target) as receiver:
        for number in range(1, 6):
            source.publish()
            until(lambda n=number: target.version == n, lambda: receiver.apply_ready(target))  # type: ignore[misc]
            assert target.serves(source.history[number])
    assert target.applied == [1, 2, 3, 4, 5]


def test_newcomer_catches_up_by_the_chain_or_by_the_snapshot(kafka: Kafka, run_name: str) -> None:
    source = Source(kafka, run_name, snapshot_every=100)
    source.begin()
    source.publish(7)
    by_chain = Target(model())
    with receiving(source, by_chain):
        assert by_chain.applied == [1, 2, 3, 4, 5, 6, 7] and by_chain.serves(source.history[7])
    source.publisher._snapshot_every = 11
    source.publish(36)
    by_snapshot = Target(model())
    with receiving(source, by_snapshot):
        assert by_snapshot.applied[0] > 7, "deltas of so many versions are more bytes than the weights"
        assert by_snapshot.version == 43 and by_snapshot.serves(source.history[43])


def test_receiver_waits_for_version_0_and_stops_when_asked(kafka: Kafka, run_name: str) -> None:
    source, target, stop = Source(kafka, run_name), Target(model()), threading.Event()
    receiver = Receiver(kafka, source.topics)
    threading.Timer(0.5, stop.set).start()
    assert not receiver.load(target, stop)
    receiver.close()
    threading.Timer(0.5, source.begin).start()
    with receiving(source, target):
        assert target.version == 0


def test_another_model_folder_is_refused_at_the_start(source: Source) -> None:
    receiver = Receiver(source.kafka, source.topics)
    with pytest.raises(WrongBase, match="give every machine the same model folder"):
        receiver.load(Target(model(1)))
    receiver.close()


def test_damaged_delta_is_refused_until_the_next_snapshot(
    kafka: Kafka, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The served version stays, whatever comes after the damage; the snapshot brings it back by itself."""
    source, target = Source(kafka, run_name, snapshot_every=5), Target(model())
    source.begin()
    source.publish()
    with receiving(source, target) as receiver:
        source.damage(monkeypatch)
        source.publish(2)
        until(lambda: len(receiver.refusals) > 0 and receiver.newest == 4, lambda: receiver.apply_ready(target))
        assert isinstance(receiver.refusals[0][1], DamagedWeights)
        assert target.version == 1 and target.serves(source.history[1])
        source.publish(2)
        until(lambda: target.version == 6, lambda: receiver.apply_ready(target))
        assert target.applied == [1, 5, 6] and target.serves(source.history[6])


def test_wrong_served_weights_are_noticed_and_made_anew(source: Source) -> None:
    """A replica whose weights went wrong unnoticed: the next delta doesn't fit, so all is made from the folder."""
    source.publish(3)
    target = Target(model())
    with receiving(source, target, initial=model) as receiver:
        target.arrays["mlp"][:] ^= 1
        source.publish(1)
        until(lambda: target.version == 4, lambda: receiver.apply_ready(target))
        assert isinstance(receiver.refusals[0][1], DamagedWeights)
        assert target.serves(source.history[4])
        source.publish(1)
        until(lambda: target.version == 5, lambda: receiver.apply_ready(target))
        assert target.serves(source.history[5]) and len(receiver.refusals) == 1


def test_audit_names_what_went_wrong_in_memory_and_the_next_version_mends_it(source: Source) -> None:
    """An element that no delta touches: only counting through all of them shows it."""
    source.publish(2)
    target = Target(model())
    with receiving(source, target, initial=model, audit_s=0.0) as receiver:
        target.arrays["mlp"][123, 45] ^= 1 << 9
        until(lambda: bool(receiver.refusals), lambda: receiver.apply_ready(target))
        version, error = receiver.refusals[0]
        assert (version, target.version) == (2, 2)
        assert "tensor 'mlp'" in str(error) and "bit 9 of element 12345 is wrong" in str(error)
        source.publish()
        until(lambda: target.version == 3, lambda: receiver.apply_ready(target))
        assert target.serves(source.history[3]) and len(receiver.refusals) == 1


def test_dense_deltas_are_followed_bit_for_bit(kafka: Kafka, run_name: str) -> None:
    source, target = Source(kafka, run_name, codec="dense"), Target(model())
    source.begin()
    with receiving(source, target) as receiver:
        source.publish(3)
        until(lambda: target.version == 3, lambda: receiver.apply_ready(target))
        assert target.serves(source.history[3])


def test_replica_that_cannot_apply_keeps_its_version_and_tries_anew(source: Source) -> None:
    """One bad apply: the version is not served, its base does not advance, later versions still arrive."""
    target = Target(model())
    honest = target.apply
    failed: list[int] = []

    def apply(version: int, changes: Mapping[str, delta.Change]) -> None:
        if not failed:
            failed.append(version)
            raise WeightsRefused("the engine says no")
        honest(version, changes)

    target.apply = apply  # type: ignore[method-assign]
    with receiving(source, target, initial=model) as receiver:
        source.publish(1)
        until(lambda: bool(failed), lambda: receiver.apply_ready(target))
        assert target.version == 0 and target.serves(source.history[0])
        until(lambda: target.version == 1, lambda: receiver.apply_ready(target))
        assert target.serves(source.history[1])


def test_orphan_chunks_of_a_crash_are_ignored(source: Source) -> None:
    source.publish()
    other = delta.as_state(model(5), DTYPE)
    source.publisher._send(delta.encode_delta(2, source.state, delta.diff(source.state, other)))
    source.publish()
    target = Target(model())
    with receiving(source, target):
        assert target.version == 2 and target.serves(source.history[2])


def test_weights_below_the_last_but_one_snapshot_are_deleted_and_not_missed(kafka: Kafka, run_name: str) -> None:
    source = Source(kafka, run_name, snapshot_every=3)
    source.begin()
    source.publish(10)
    assert beginning_offsets(kafka, source.topics.name(WEIGHTS))[0] > 0
    target = Target(model())
    with receiving(source, target) as receiver:
        assert target.version == 10 and target.serves(source.history[10])
        assert receiver.refusals == []
    found = served_state(kafka, source.topics, model(), 10)
    assert all(np.array_equal(found[name], bits) for name, bits in source.history[10].items())
    with pytest.raises(WrongBase):
        served_state(kafka, source.topics, model(), 2)


def test_clocks_follow_a_publication_to_its_first_token(source: Source) -> None:
    target = Target(model())
    with receiving(source, target) as receiver:
        source.publish()
        until(lambda: target.version == 1, lambda: receiver.apply_ready(target))
        assert receiver.apply_ready(target) == []
        receiver.sampled(0)
        assert receiver.apply_ready(target) == [], "a token of the version before says nothing"
        receiver.sampled(1)
        (clock,) = receiver.apply_ready(target)
        times = [clock.published_ms, clock.fetched_ms, clock.decoded_ms, clock.paused_ms, clock.applied_ms,
                 clock.resumed_ms, clock.first_token_ms]  # fmt: skip
        assert all(t is not None for t in times)
        # published_ms is whole milliseconds of the publisher's clock.
        assert sorted(times, key=float) == times  # type: ignore[arg-type]
        assert (clock.worker, clock.incarnation, clock.version) == ("w", "i", 1)
        source.publish(2)
        until(lambda: target.version == 3, lambda: receiver.apply_ready(target))
        receiver.sampled(3)
        assert receiver.apply_ready(target)[-1].version == 3


def test_pinned_version_is_loaded_and_not_followed(source: Source) -> None:
    source.publish(4)
    target = Target(model())
    receiver = Receiver(source.kafka, source.topics)
    assert receiver.load(target, version=2)
    assert target.serves(source.history[2])
    source.publish()
    assert receiver.apply_ready(target) == [] and target.version == 2
    receiver.close()
    with pytest.raises(WeightsRefused, match="version 9 can't be had"):
        Receiver(source.kafka, source.topics).load(Target(model()), version=9)


def test_served_state_gives_any_version(source: Source) -> None:
    source.publish(4)
    first = model()
    for version in (0, 2, 4):
        found = served_state(source.kafka, source.topics, first, version)
        assert all(np.array_equal(found[name], bits) for name, bits in source.history[version].items())
    assert all(np.array_equal(first[name], bits) for name, bits in model().items()), "what was given is left as it was"
    with pytest.raises(WrongBase):
        served_state(source.kafka, source.topics, first, 9)

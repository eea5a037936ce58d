"""Weights through the real broker: what arrives, what is refused, and how a replica recovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.producers.publications import served_state
from headrace.producers.receiver import Receiver
from headrace.schemas import delta
from headrace.schemas.delta import relative
from headrace.schemas.errors import DamagedWeights, WeightsRefused, WrongBase
from headrace.schemas.topics import WEIGHTS, RunTopics
from headrace.streams.log.direct import Following, HandedOver, Offering
from headrace.streams.log.reader import beginning_offsets
from headrace.trainer.publish import Policy
from headrace.trainer.sending import Abandoned
from tests.publishing import DTYPE, Publishing
from tests.receiving import Kafka, Source, Target, model, receiving, until


@pytest.fixture
def source(kafka: Kafka, run_name: str) -> Source:
    one = Source(kafka, run_name)
    one.begin()
    return one


def test_replica_follows_version_by_version_bit_for_bit(source: Source) -> None:
    target = Target(model())
    with receiving(source, target) as receiver:
        for number in range(1, 6):
            source.publish()
            until(lambda n=number: target.version == n, lambda: receiver.apply_ready(target))  # type: ignore[misc]
            assert target.serves(source.history[number])
    assert target.applied == [1, 2, 3, 4, 5]


def test_newcomer_catches_up_by_the_chain_or_by_the_snapshot(kafka: Kafka, run_name: str) -> None:
    source = Source(kafka, run_name)
    source.begin()
    source.publish(7)
    by_chain = Target(model())
    with receiving(source, by_chain):
        assert by_chain.applied == [1, 2, 3, 4, 5, 6, 7] and by_chain.serves(source.history[7])
    source.publisher._settings = source.settings.weights.model_copy(update={"snapshot_every": 11})
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
    source.publisher._sender.send(delta.encode_delta(2, source.state, delta.diff(source.state, other)))
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


# -------------------------------------------------------------------------------------------------- the rate limit


@pytest.mark.parametrize("through", ["log", "store"])
def test_transfers_keep_to_their_rate_at_both_ends(kafka: Kafka, run_name: str, tmp_path: Path, through: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(relative, "MAX_CHANGES", 500)  # several chunks
    url = (tmp_path / "store").as_uri() if through == "store" else None
    source = Source(kafka, run_name, store_url=url, max_bytes_per_s=6000.0)
    source.begin()
    began = time.monotonic()
    source.publish()
    size = source.publications()[-1].size
    assert size > 2000 and time.monotonic() - began >= 0.9 * size / 6000
    began, target = time.monotonic(), Target(model())
    with receiving(source, target):
        assert target.version == 1 and target.serves(source.history[1])
    assert time.monotonic() - began >= 0.9 * size / 6000


def test_transfer_that_is_abandoned_ends_at_once(kafka: Kafka, run_name: str) -> None:
    source = Source(kafka, run_name, max_bytes_per_s=1.0)
    source.begin()
    threading.Timer(0.5, source.publisher.abandon).start()
    began = time.monotonic()
    with pytest.raises(Abandoned):
        source.publish()
    assert time.monotonic() - began < 10
    assert [p.version for p in source.publications()] == [0]


# ------------------------------------------------------------------------------- beside the log: socket and memory


def hold_until(condition: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication comes on the log only once this holds, so that no receiver is faster."""
    honest = Policy.write

    def write(self: Policy, *makers: Any) -> Any:
        until(condition, lambda: None)
        return honest(self, *makers)

    monkeypatch.setattr(Policy, "write", write)


@pytest.mark.parametrize("way", ["socket", "memory"])
def test_weights_come_directly_and_the_log_has_the_same_records(
    kafka: Kafka, run_name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a socket, or from the publisher in the same process; nothing of them is read from the broker."""
    ahead, target = HandedOver(), Target(model())
    topic = RunTopics(run_name).name(WEIGHTS)
    offering = Offering("127.0.0.1:0", topic) if way == "socket" else None
    tap = ahead.put if offering is None else offering.offer
    source = Publishing(kafka, run_name, arrays=model(), tap=tap)
    source.begin()
    following = Following(f"127.0.0.1:{offering.port}", topic, ahead) if offering is not None else None
    until(lambda: offering is None or offering.listeners == 1, lambda: None)
    with receiving(source, target, ahead=ahead) as receiver:
        hold_until(lambda: bool(ahead._records), monkeypatch)
        for number in range(1, 4):
            source.publish()
            until(lambda n=number: target.version == n, lambda: receiver.apply_ready(target))  # type: ignore[misc]
            assert target.serves(source.history[number])
    assert ahead.taken == sum(len(one.chunks) for one in source.publications()) == 3
    late = Target(model())
    with receiving(source, late):
        assert late.applied == [1, 2, 3] and late.serves(source.history[3])
    if following is not None and offering is not None:
        following.close()
        offering.close()


def test_a_worker_that_is_cut_off_or_gets_damaged_records_directly_reads_the_log(kafka: Kafka, run_name: str,
                                                                                monkeypatch: pytest.MonkeyPatch
                                                                                ) -> None:  # fmt: skip
    ahead, target, given = HandedOver(), Target(model()), []

    def tap(offset: int, value: bytes) -> None:
        given.append(offset)
        if len(given) == 2:
            ahead.put(offset, value[:-40] + bytes(40))
        elif len(given) == 3:
            ahead.put(offset, b"no record")

    source = Publishing(kafka, run_name, arrays=model(), tap=tap)
    source.begin()
    with receiving(source, target, ahead=ahead) as receiver:
        for number in range(1, 4):
            source.publish()
            until(lambda n=number: target.version == n, lambda: receiver.apply_ready(target))  # type: ignore[misc]
            assert target.serves(source.history[number])
        assert receiver.refusals == [] and ahead.taken == 2

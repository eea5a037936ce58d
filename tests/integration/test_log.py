"""Readers and transactions against the real broker: ends behind markers, fencing, kills, outages, lost positions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from headrace.broker import start_broker
from headrace.schemas.errors import (
    BrokerUnreachable,
    DataLossError,
    Fenced,
    HungTransaction,
    LogError,
    RecordTooLarge,
    SettingsError,
)
from headrace.schemas.topics import TopicSpec
from headrace.streams.log import clients
from headrace.streams.log import reader as reader_module
from headrace.streams.log.clients import KafkaConfig
from headrace.streams.log.hanging import check_settled
from headrace.streams.log.reader import (
    Reader,
    beginning_offsets,
    end_offsets,
    last_record,
    offsets_at,
    read_at,
    read_backwards,
    read_backwards_until,
    read_range,
)
from headrace.streams.log.transactions import Output, Send, Transactor


@pytest.fixture
def topic(kafka: KafkaConfig, run_name: str) -> str:
    name = f"test.{run_name}.log"
    clients.create_topics(kafka, [TopicSpec(name, 2, 1, {})])
    return name


@pytest.fixture
def transactor(kafka: KafkaConfig, run_name: str) -> Transactor:
    return Transactor(kafka, f"test.{run_name}")


def outputs(topic: str, values: range, partition: int = 0) -> list[Output]:
    return [Output(topic, partition, b"%d" % value) for value in values]


def values(kafka: KafkaConfig, topic: str, partition: int = 0) -> list[int]:
    end = end_offsets(kafka, topic)[partition]
    return [int(record.value or b"") for record in read_range(kafka, topic, partition, 0, end)]


class Refusal(Exception):
    pass


def abort(transactor: Transactor, records: list[Output]) -> None:
    def build(send: Send) -> None:
        send(records)
        raise Refusal

    with pytest.raises(Refusal):
        transactor.commit(build)


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_read_to_the_end_ends_although_the_log_ends_with_markers(
    kafka: KafkaConfig, topic: str, transactor: Transactor
) -> None:
    offsets = [at for start in range(0, 50, 5) for at in transactor.send(outputs(topic, range(start, start + 5)))]
    abort(transactor, outputs(topic, range(900, 950)))
    end = end_offsets(kafka, topic)[0]
    assert end > offsets[-1] + 50 and offsets[-1] > 50  # markers and aborted records take offsets
    started = time.monotonic()
    assert [(r.offset, r.value) for r in read_range(kafka, topic, 0, 0, end)] == [
        (offset, b"%d" % i) for i, offset in enumerate(offsets)
    ]
    assert time.monotonic() - started < 5.0
    assert [r.offset for r in read_range(kafka, topic, 0, offsets[7], offsets[9])] == offsets[7:9]
    assert list(read_range(kafka, topic, 1, 0, end_offsets(kafka, topic)[1])) == []


def test_the_last_record_is_found_behind_a_long_tail_of_aborted_ones(
    kafka: KafkaConfig, topic: str, transactor: Transactor
) -> None:
    assert last_record(kafka, topic, 0) is None
    transactor.send(outputs(topic, range(3)))
    for _ in range(30):
        abort(transactor, outputs(topic, range(900, 920)))
    record = last_record(kafka, topic, 0)
    assert record is not None and (record.offset, record.value) == (2, b"2")
    assert [r.value for r in read_backwards(kafka, topic, 0)] == [b"2", b"1", b"0"]
    assert [r.value for r in read_backwards_until(kafka, topic, 0, lambda r: r.value == b"1")] == [b"1", b"2"]
    assert [r.value for r in read_backwards_until(kafka, topic, 0, lambda r: False)] == [b"0", b"1", b"2"]


def test_records_are_read_at_their_offsets_and_a_marker_is_none(
    kafka: KafkaConfig, topic: str, transactor: Transactor
) -> None:
    offsets = [at for start in range(0, 5000, 500) for at in transactor.send(outputs(topic, range(start, start + 500)))]
    wanted = [0, 1, 2, 700, 702, 2500, 4999]
    found = read_at(kafka, topic, 0, [offsets[i] for i in wanted])
    assert {offset: record.value for offset, record in found.items()} == {offsets[i]: b"%d" % i for i in wanted}
    with pytest.raises(DataLossError, match=rf"{topic}\[0\]@{offsets[499] + 1}"):
        read_at(kafka, topic, 0, [offsets[499], offsets[499] + 1])


def test_a_record_keeps_its_key_headers_and_time(kafka: KafkaConfig, topic: str, transactor: Transactor) -> None:
    before = int(time.time() * 1000) - 1
    transactor.send([Output(topic, 1, None, b"key", (("a", b"1"), ("b", b"")))])
    record = last_record(kafka, topic, 1)
    assert record is not None
    assert (record.value, record.key, record.headers) == (None, b"key", (("a", b"1"), ("b", b"")))
    assert before <= record.timestamp_ms <= int(time.time() * 1000)
    assert offsets_at(kafka, topic, before) == {0: 0, 1: 0}
    assert offsets_at(kafka, topic, record.timestamp_ms + 1000)[1] == end_offsets(kafka, topic)[1]


def test_a_follower_gets_new_records_at_once_and_knows_when_it_is_at_the_end(
    kafka: KafkaConfig, topic: str, transactor: Transactor
) -> None:
    transactor.send(outputs(topic, range(5)) + outputs(topic, range(5), 1))
    with Reader(kafka, {(topic, 0): 2, (topic, 1): 0}) as reader:
        seen = 0
        while not reader.at_end:
            seen += len(reader.poll())
        assert seen == 8
        assert reader.positions == {(topic, p): end for p, end in end_offsets(kafka, topic).items()}
        assert reader.poll(timeout_s=0.05) == []
        transactor.send(outputs(topic, range(5, 6)))
        started = time.monotonic()
        (record,) = reader.poll(500, timeout_s=10.0)
        assert record.value == b"5" and time.monotonic() - started < 2.0  # the first one is not held for 499 more


def test_a_position_below_retention_is_a_data_loss_that_names_it(
    kafka: KafkaConfig, topic: str, transactor: Transactor
) -> None:
    transactor.send(outputs(topic, range(100)))
    admin = clients.admin(kafka)
    for future in admin.delete_records([TopicPartition(topic, 0, 60)]).values():
        future.result()
    assert beginning_offsets(kafka, topic)[0] == 60
    with pytest.raises(DataLossError, match=rf"{topic}\[0\]@30: .*deleted"):
        list(read_range(kafka, topic, 0, 30, 100))
    with Reader(kafka, {(topic, 0): 0}) as reader, pytest.raises(DataLossError, match=rf"{topic}\[0\]@0"):
        while True:
            reader.poll()
    assert [record.offset for record in read_range(kafka, topic, 0, 60, 100)] == list(range(60, 100))


def test_a_topic_or_partition_that_is_not_there_is_named_at_once(kafka: KafkaConfig, topic: str) -> None:
    for call in (
        lambda: list(read_range(kafka, "no.such.topic", 0, 0, 5)),
        lambda: end_offsets(kafka, "no.such.topic"),
        lambda: last_record(kafka, "no.such.topic", 0),
    ):
        with pytest.raises(LogError, match="there is no topic no.such.topic"):
            call()
    with pytest.raises(LogError, match="there is no partition 7"):
        list(read_range(kafka, topic, 7, 0, 5))


def test_topics_are_created_once_and_left_alone_afterwards(kafka: KafkaConfig, run_name: str) -> None:
    specs = [TopicSpec(f"test.{run_name}.{n}", n, 1, {"retention.ms": "-1"}) for n in (1, 3)]
    assert clients.create_topics(kafka, specs) == [spec.name for spec in specs]
    assert clients.create_topics(kafka, specs) == []
    with pytest.raises(LogError, match=f"topic test.{run_name}.bad was not created: .*nonsense"):
        clients.create_topics(kafka, [TopicSpec(f"test.{run_name}.bad", 1, 1, {"nonsense": "1"})])


# --- transactions ------------------------------------------------------------------------------------------------


def test_a_record_can_name_the_offsets_of_others_in_its_own_transaction(
    kafka: KafkaConfig, topic: str, transactor: Transactor
) -> None:
    def build(send: Send) -> list[int]:
        offsets = send(outputs(topic, range(3)))
        send([Output(topic, 1, repr(offsets).encode())])
        return offsets

    for _ in range(3):
        offsets = transactor.commit(build)
        record = last_record(kafka, topic, 1)
        assert record is not None and record.value == repr(offsets).encode()
        assert [r.value for r in read_at(kafka, topic, 0, offsets).values()] == [b"0", b"1", b"2"]


class Meddler:
    """The real producer, but one call of one method goes wrong."""

    def __init__(self, producer: Any, method: str, wrong: Callable[..., Any]):
        self._producer, self._method, self._wrong, self.meddled = producer, method, wrong, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == self._method and not self.meddled:
                self.meddled += 1
                return self._wrong(self._producer, *args, **kwargs)
            return getattr(self._producer, name)(*args, **kwargs)

        return call


def lose(producer: Any, timeout: float) -> int:
    producer.purge()
    return int(producer.flush(timeout))


def forget(producer: Any, topic: str, *, on_delivery: Callable[[Any, Any], None], **rest: Any) -> None:
    class Nowhere:
        def offset(self) -> int:
            return -1

    producer.produce(topic, on_delivery=lambda error, message: on_delivery(error, Nowhere()), **rest)


@pytest.mark.parametrize(("method", "wrong"), [("flush", lose), ("produce", forget)], ids=["lost", "no offset"])
def test_an_abortable_failure_is_aborted_and_built_again_with_new_offsets(
    kafka: KafkaConfig, topic: str, transactor: Transactor, method: str, wrong: Callable[..., Any]
) -> None:
    seen: list[list[int]] = []

    def build(send: Send) -> None:
        seen.append(send(outputs(topic, range(3))))
        send([Output(topic, 1, repr(seen[-1]).encode())])

    meddler = Meddler(transactor._producer, method, wrong)
    transactor._producer = meddler  # type: ignore[assignment]
    transactor.commit(build)
    assert meddler.meddled == 1
    record = last_record(kafka, topic, 1)
    assert record is not None and record.value == repr(seen[-1]).encode()
    assert values(kafka, topic) == [0, 1, 2]
    assert [r.offset for r in read_range(kafka, topic, 0, 0, end_offsets(kafka, topic)[0])] == seen[-1]


def test_a_commit_that_may_pass_is_asked_for_again(kafka: KafkaConfig, topic: str, transactor: Transactor) -> None:
    def later(producer: Any, timeout: float) -> None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "not yet", False, True, False))

    meddler = Meddler(transactor._producer, "commit_transaction", later)
    transactor._producer = meddler  # type: ignore[assignment]
    transactor.send(outputs(topic, range(3)))
    assert meddler.meddled == 1 and values(kafka, topic) == [0, 1, 2]


def test_what_cannot_be_written_is_a_typed_error_and_the_next_transaction_is_fine(
    kafka: KafkaConfig, run_name: str, topic: str, transactor: Transactor
) -> None:
    small = f"test.{run_name}.small"
    clients.create_topics(kafka, [TopicSpec(small, 1, 1, {"max.message.bytes": "5000"})])
    with pytest.raises(RecordTooLarge, match="a record of 52000000 bytes, and it may hold 990000; nothing of its"):
        transactor.send([*outputs(topic, range(900, 910)), Output(topic, 0, bytes(52_000_000))])
    with pytest.raises(LogError, match=rf"{small}\[0\]: a record of 20000 bytes: .*too large"):  # by the broker
        transactor.send([*outputs(topic, range(900, 910)), Output(small, 0, os.urandom(20_000))])
    with pytest.raises(LogError, match="[Uu]nknown partition"):
        transactor.send([Output(topic, 7, b"")])
    assert transactor.alive
    transactor.send(outputs(topic, range(3)))
    assert values(kafka, topic) == [0, 1, 2]


def test_a_new_owner_fences_the_old_one_whose_open_transaction_never_shows(
    kafka: KafkaConfig, topic: str, run_name: str, transactor: Transactor
) -> None:
    transactor.send(outputs(topic, range(2)))

    def build(send: Send) -> None:
        send(outputs(topic, range(900, 903)))
        other = Transactor(kafka, f"test.{run_name}")
        other.send(outputs(topic, range(2, 4)))
        send(outputs(topic, range(903, 906)))

    with pytest.raises(Fenced, match="another process owns the transactional id"):
        transactor.commit(build)
    assert not transactor.alive
    with pytest.raises(Fenced):  # for good
        transactor.send([])
    transactor.close()
    assert values(kafka, topic) == [0, 1, 2, 3]


def test_an_owner_that_learns_of_its_fencing_between_two_records_says_so(
    kafka: KafkaConfig, topic: str, run_name: str, transactor: Transactor
) -> None:
    def build(send: Send) -> None:
        send(outputs(topic, range(900, 903)))
        other = Transactor(kafka, f"test.{run_name}")
        other.send(outputs(topic, range(2)))
        with pytest.raises(KafkaException, match="_FATAL"):  # what `produce` says, as soon as the client knows more
            for _ in range(600):
                transactor._producer.produce(topic, value=b"", partition=0)
                time.sleep(0.05)
        send(outputs(topic, range(903, 906)))

    with pytest.raises(Fenced, match="another process owns the transactional id"):
        transactor.commit(build)
    assert not transactor.alive and values(kafka, topic) == [0, 1]


WRITER = """
import json, sys, time
from headrace.streams.log.transactions import Output, Transactor
address, topic, identity, start, patience = sys.argv[1:6]
transactor = Transactor({"bootstrap.servers": address}, identity, transaction_timeout_s=float(patience))
def build(send):
    send([Output(topic, 0, b"%d" % i) for i in range(int(start), int(start) + 10)])
    print("open", flush=True)
    if "hold" in sys.argv:
        sys.stdin.readline()
    send([Output(topic, 0, b"%d" % i) for i in range(int(start) + 10, int(start) + 20)])
transactor.commit(build)
print("committed", flush=True)
"""


def writer(kafka: KafkaConfig, topic: str, identity: str, start: int, *, patience_s: float = 60.0, hold: bool = False
           ) -> subprocess.Popen[str]:  # fmt: skip
    arguments = [str(kafka["bootstrap.servers"]), topic, identity, str(start), str(patience_s), *["hold"] * hold]
    return subprocess.Popen([sys.executable, "-c", WRITER, *arguments], text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def held(writer: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """The writer, in the middle of its transaction. Only one that holds may be read a line of and waited for later: one
    that goes on may have written its last line as well by then, into the buffer that `communicate` passes by."""
    assert writer.stdout is not None and writer.stdout.readline() == "open\n"
    return writer


def test_a_writer_killed_inside_its_transaction_loses_and_doubles_nothing(
    kafka: KafkaConfig, topic: str, run_name: str
) -> None:
    for start in (0, 20, 40):
        victim = held(writer(kafka, topic, f"test.{run_name}", start, hold=True))
        victim.kill()
        victim.communicate()
        out, err = writer(kafka, topic, f"test.{run_name}", start).communicate()
        assert out == "open\ncommitted\n", err
    assert values(kafka, topic) == list(range(60))


def test_a_writer_stopped_past_its_transactions_timeout_is_fenced_and_the_next_goes_on(
    kafka: KafkaConfig, topic: str, run_name: str
) -> None:
    zombie = held(writer(kafka, topic, f"test.{run_name}", 0, patience_s=2.0, hold=True))
    zombie.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    zombie.send_signal(signal.SIGCONT)
    out, err = zombie.communicate("\n")
    assert out == "" and "errors.Fenced" in err and "SystemError" not in err.rpartition("direct cause")[2]
    assert writer(kafka, topic, f"test.{run_name}", 0).communicate()[0] == "open\ncommitted\n"
    assert values(kafka, topic) == list(range(20))


# --- outages -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_transactions_and_records_survive_a_broker_that_dies_and_comes_back(tmp_path: Path) -> None:
    broker = start_broker(tmp_path, owner=True)
    kafka: KafkaConfig = {"bootstrap.servers": broker.bootstrap}
    clients.create_topics(kafka, [TopicSpec("committed", 1, 1, {}), TopicSpec("plain", 1, 1, {})])
    transactor = Transactor(kafka, "writer")
    plain = clients.producer(kafka, **{"queue.buffering.max.messages": 1000})
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Any) -> None:
        if error is not None:
            failed.append(error)

    with Reader(kafka, {("committed", 0): 0}) as reader:

        def kill_in_the_middle(send: Send) -> None:
            send(outputs("committed", range(10, 20)))
            nonlocal broker
            if broker.pid == first:
                broker.kill()
                sent = 0
                with pytest.raises(BufferError):  # the queue is bounded, and says so
                    while True:
                        plain.produce("plain", b"%d" % sent, on_delivery=delivered)
                        sent += 1
                assert sent == 1000
                broker = start_broker(tmp_path, owner=True)
            send(outputs("committed", range(20, 30)))

        first = broker.pid
        transactor.send(outputs("committed", range(10)))
        try:
            transactor.commit(kill_in_the_middle)
        except Fenced:  # the broker may have given the transaction up: then nothing of it shows
            transactor = Transactor(kafka, "writer")
            transactor.commit(kill_in_the_middle)
        assert plain.flush(60.0) == 0 and not failed
        seen: list[int] = []
        deadline = time.monotonic() + 60.0
        while len(seen) < 30 and time.monotonic() < deadline:
            seen += [int(record.value or b"") for record in reader.poll()]
        assert seen == list(range(30))
    assert values(kafka, "plain") == list(range(1000))
    broker.stop()


def test_no_broker_is_one_clear_line_and_the_clients_noise_stays_in_the_log() -> None:
    nowhere: KafkaConfig = {"bootstrap.servers": "127.0.0.1:9"}
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:9 within 1 s .*refused.*`headrace broker") as caught:
        clients.check_broker(nowhere, 1.0)
    assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match=r'\[kafka\] table: .*"no\.such"'):
        clients.check_broker({**nowhere, "no.such": 1})
    code = """
from headrace.streams.log import clients
from headrace.streams.log.reader import Reader
from headrace.schemas.errors import HeadraceError
config = {"bootstrap.servers": "127.0.0.1:9"}
producer = clients.producer(config)
producer.produce("t", b"1")
producer.flush(1.0)
try:
    Reader(config).bounds("t", 0, 1.0)
except HeadraceError as error:
    print(error)
producer.purge()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1


# --- transactions that hang --------------------------------------------------------------------------------------


def test_a_transaction_that_never_ends_is_an_error_that_names_where_and_the_way_out(
    kafka: KafkaConfig, topic: str, run_name: str, transactor: Transactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one looks that a dead broker left behind: records beyond which no committed reader comes."""
    transactor.send(outputs(topic, range(3)))
    check_settled(kafka, [(topic, 0), (topic, 1)])
    stranger = clients.transactional_producer(kafka, f"test.{run_name}.stranger", 600.0)
    stranger.init_transactions()
    stranger.begin_transaction()
    stranger.produce(topic, b"open", partition=0)
    stranger.flush()
    with pytest.raises(HungTransaction, match=rf"{topic}\[0\]@4: .* written up to 5,.*--start-offset 4"):
        check_settled(kafka, [(topic, 1), (topic, 0)], within_s=1.0)
    monkeypatch.setattr(reader_module, "LOOK_S", 0.3)
    monkeypatch.setattr(reader_module, "GRACE_S", 1.0)
    patient = {**kafka, "transaction.timeout.ms": 60_000}
    hasty = {**kafka, "transaction.timeout.ms": 1000}
    deadline = time.monotonic() + 60.0
    with Reader(patient, {(topic, 0): 0}) as waits, Reader(hasty, {(topic, 0): 0, (topic, 1): 0}) as stalls:
        with pytest.raises(HungTransaction, match=rf"{topic}\[0\]@4: .* written up to 5,.*--start-offset 4"):
            while time.monotonic() < deadline:
                stalls.poll(timeout_s=0.1)
                waits.poll(timeout_s=0.1)  # within the time-out it may still be aborted: nothing to complain about
    stranger.abort_transaction()
    check_settled(kafka, [(topic, 0)])


def test_a_reader_below_a_transaction_that_the_broker_aborts_in_time_reads_on(
    kafka: KafkaConfig, topic: str, run_name: str, transactor: Transactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "LOOK_S", 0.3)
    short = {**kafka, "transaction.timeout.ms": 3000}
    left = clients.transactional_producer(short, f"test.{run_name}.left", 600.0)
    left.init_transactions()
    left.begin_transaction()
    left.produce(topic, b"open", partition=0)
    left.flush()
    plain = clients.producer(kafka)
    plain.produce(topic, b"behind", partition=0)
    plain.flush()
    seen: list[bytes | None] = []
    deadline = time.monotonic() + 60.0
    with Reader(short, {(topic, 0): 0}) as reader:
        while not seen and time.monotonic() < deadline:
            seen += [record.value for record in reader.poll(timeout_s=0.2)]
    assert seen == [b"behind"]


def test_a_question_that_dies_with_its_broker_is_asked_again(kafka: KafkaConfig, topic: str) -> None:
    """With several brokers the client may have asked the one that dies, and then says `_DESTROY_BROKER`."""

    def dies(*_: Any, **__: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._DESTROY_BROKER))

    with Reader(kafka) as reader:
        for method, ask in (("list_topics", lambda: reader.partitions(topic)),
                            ("get_watermark_offsets", lambda: reader.bounds(topic, 0)),
                            ("offsets_for_times", lambda: reader.offset_at(topic, 0, 0))):  # fmt: skip
            expected = ask()
            reader._partitions.clear()
            meddler, real = Meddler(reader._consumer, method, dies), reader._consumer
            reader._consumer = meddler  # type: ignore[assignment]
            assert ask() == expected and meddler.meddled == 1, method
            reader._consumer = real

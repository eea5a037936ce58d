"""The wire: tokens per CPU second and bytes per token of what Headrace writes, beside what others would write.

Ours is a `Span` record (see schemas/events.py), with its columns shuffled by byte and not; beside it JSON per span,
Avro arrays and one event per token (benchmarks/baselines). The tokens and log-probabilities are those that a real model
sampled (tests/data/logprobs), one completion after another, cut into spans of 256, 512 and 1,024 model tokens; prompts
are left out. All use the same client with the same settings (streams/log/clients.py: idempotent, zstd by the producer),
the same broker, a topic of one partition, and take turns. CPU is that of the whole client process, librdkafka's own
threads included; the broker's is not in it.

Bytes are those of the topic's segments on the broker's disk: record framing, identity fields and batch headers counted.
Every run checks that what comes back has the same bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from headrace.broker import Broker
from headrace.producers.episodes import Attempt, EpisodeWriter
from headrace.schemas.codec import decode, encode
from headrace.schemas.columns import Float32, Int32, pack_float32, pack_ids
from headrace.schemas.events import Event, Span, VersionRun
from headrace.schemas.outcomes import Outcome, Source
from headrace.schemas.topics import TopicSpec
from headrace.streams.log import clients

from . import harness, samples
from .baselines import Columns, Format, Piece
from .baselines.avro_arrays import AvroArrays
from .baselines.json_spans import JsonSpans
from .baselines.token_events import TokenEvents
from .harness import Result, cost, spread

SIZES = (512, 256, 1024)
SIZE = 512  # for which the goals hold
PARTITIONS = 1  # so that a batch holds all that was sampled, as it would under load
CONSUME = 10_000  # records asked for at once; the client answers with fewer
INCARNATION = "5f0c9d3e8b7a4c21a6d2e4f8b1c3d5e7"
VERSION = 12


class Ours:
    name = "Headrace"

    def encode(self, piece: Piece) -> list[bytes]:
        return [encode(self.span(piece, pack_ids(piece.ids), pack_float32(piece.logprobs)))]

    @staticmethod
    def span(piece: Piece, tokens: bytes, logprobs: bytes) -> Span:
        return Span(piece.group, piece.slot, piece.attempt, piece.incarnation, piece.sequence, Source.MODEL, 0, -1,
                    len(piece.ids), (VersionRun(piece.version, len(piece.ids)),), None, None, None, {}, tokens,
                    logprobs, None, None)  # fmt: skip

    def decode(self, values: Sequence[bytes]) -> list[Columns]:
        out: list[Columns] = []
        for value in values:
            span = decode(value)
            assert isinstance(span, Span)
            logprobs = span.behaviour_logprobs()
            assert logprobs is not None
            out.append(((span.group, span.slot), span.token_ids(), logprobs))
        return out

    def episode(self, piece: Piece) -> Hashable:
        return piece.group, piece.slot


class Unshuffled(Ours):
    """The same record with its columns as they lie in memory."""

    name = "Headrace, not shuffled"

    def encode(self, piece: Piece) -> list[bytes]:
        return [encode(self.span(piece, piece.ids.tobytes(), piece.logprobs.tobytes()))]

    def decode(self, values: Sequence[bytes]) -> list[Columns]:
        out: list[Columns] = []
        for value in values:
            span = decode(value)
            assert isinstance(span, Span) and span.logprobs is not None
            columns = np.frombuffer(span.tokens, np.int32), np.frombuffer(span.logprobs, np.float32)
            out.append(((span.group, span.slot), *columns))
        return out


FORMATS: tuple[Format, ...] = (Ours(), Unshuffled(), JsonSpans(), AvroArrays(), TokenEvents())


def cut(completions: Sequence[samples.Completion], size: int) -> list[Piece]:
    """Spans of exactly `size` tokens, as longer episodes would have: the completions one after another, in eight slots
    of as many groups as there are prompts. What is left over after the last whole span is dropped."""
    ids, logprobs = (np.concatenate(column) for column in zip(*((c.tokens, c.logprobs) for c in completions),
                                                              strict=True))  # fmt: skip
    count, pieces, before, sequence = len(ids) // size, [], (-1, -1), 2
    for i in range(count):
        episode = i * len(completions) // count
        group, slot = divmod(episode, samples.GROUP_SIZE)
        sequence = sequence + 1 if (group, slot) == before else 2  # after the episode's start and its prompt
        before, part = (group, slot), slice(i * size, (i + 1) * size)
        pieces.append(Piece(f"g{group:08d}", slot, 0, INCARNATION, sequence, VERSION, ids[part], logprobs[part]))
    return pieces


class Bench:
    """One format, one size of spans: a topic of its own that is filled and read."""

    def __init__(self, broker: Broker, form: Format, pieces: Sequence[Piece], rounds: int, topic: str) -> None:
        self.form, self.pieces, self.rounds, self.topic = form, pieces, rounds, topic
        self.broker, self.kafka = broker, harness.kafka_of(broker)
        self.tokens = sum(len(piece.ids) for piece in pieces)
        # What the first turn writes is read and weighed; the later ones go beside it.
        self.beside = f"{topic}-beside"
        clients.create_topics(self.kafka, [TopicSpec(name, PARTITIONS, 1, {"compression.type": "producer"})
                                           for name in (topic, self.beside)])  # fmt: skip
        self.filled = False

    def encode(self) -> float:
        """CPU seconds for one token."""
        form, pieces = self.form, self.pieces

        def work() -> None:
            for _ in range(self.rounds):
                for piece in pieces:
                    form.encode(piece)

        return cost(work).cpu_s / (self.rounds * self.tokens)

    def produce(self) -> float:
        """Encode and produce, to the last acknowledgement."""
        # No batch holds the same tokens twice: what compresses is in the tokens, not in the repetition. So a batch is
        # what one round makes, and batches follow each other as they do under load, without a wait for each.
        once = sum(len(self.form.encode(piece)) for piece in self.pieces)
        producer = clients.producer(self.kafka, **{"batch.num.messages": once, "linger.ms": 1000})
        topic = self.beside if self.filled else self.topic
        producer.list_topics(topic, timeout=30)  # connected before the clock runs
        spent = cost(lambda: self._produce(producer, topic)).cpu_s
        producer.close()
        self.filled = True
        return spent / (self.rounds * self.tokens)

    def _produce(self, producer: Any, topic: str) -> None:
        form = self.form
        for _ in range(self.rounds):
            for piece in self.pieces:
                values, key = form.encode(piece), piece.group.encode()
                send_many(producer, topic, key, values)
                producer.poll(0)
        assert producer.flush(60) == 0

    def consume(self) -> float:
        """Consume and decode all of the topic."""
        return self._consume(self.form.decode)

    def _consume(self, take: Callable[[list[bytes]], object]) -> float:
        consumer = clients.consumer(self.kafka)
        consumer.list_topics(self.topic, timeout=30)

        def work() -> None:
            consumer.assign([clients_partition(self.topic, p) for p in range(PARTITIONS)])
            ended = 0
            values: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
            while ended < PARTITIONS:
                # One poll waits and one takes what is there, as streams/log/reader.py does.
                first = consumer.poll(1.0)
                for message in (*([first] if first else ()), *consumer.consume(CONSUME, 0)):
                    if message.error() is None:
                        values[message.partition()].append(message.value())
                    else:
                        ended += 1  # of a partition: nothing else is reported here
                for part in values:
                    if part:
                        take(part)
                        part.clear()

        spent = cost(work).cpu_s
        consumer.close()
        return spent / (self.rounds * self.tokens)

    def bytes_per_token(self) -> float:
        return harness.log_bytes(self.broker, self.topic) / (self.rounds * self.tokens)

    def same_bits(self) -> bool:
        """Whether all that lies in the topic is what was sampled, bit for bit."""
        want: dict[Hashable, list[tuple[Int32, Float32]]] = {}
        for piece in self.pieces:
            want.setdefault(self.form.episode(piece), []).append((piece.ids, piece.logprobs))
        got: dict[Hashable, list[tuple[Int32, Float32]]] = {}

        def take(values: list[bytes]) -> None:
            for episode, ids, logprobs in self.form.decode(values):
                got.setdefault(episode, []).append((ids, logprobs))

        self._consume(take)
        return got.keys() == want.keys() and all(
            same(got[name], want[name] * self.rounds, column, bits)
            for name in want for column, bits in ((0, np.int32), (1, np.uint32))
        )  # fmt: skip


def same(got: list[tuple[Any, Any]], want: list[tuple[Any, Any]], column: int, bits: Any) -> bool:
    joined = [np.concatenate([pair[column] for pair in pairs]).view(bits) for pairs in (got, want)]
    return bool(np.array_equal(*joined))


def clients_partition(topic: str, partition: int) -> Any:
    from confluent_kafka import TopicPartition

    return TopicPartition(topic, partition, 0)


def send_many(producer: Any, topic: str, key: bytes, values: Sequence[bytes]) -> None:
    """One record each; waits where the queue is full."""
    produce, i = producer.produce, 0
    while i < len(values):
        try:
            produce(topic, values[i], key)
            i += 1
        except BufferError:
            producer.poll(0.01)


def lonely_bytes(broker: Broker, form: Format, pieces: Sequence[Piece], topic: str) -> float:
    """Bytes per token where each span is sent by itself, as a worker that samples slowly does."""
    kafka = harness.kafka_of(broker)
    clients.create_topics(kafka, [TopicSpec(topic, 1, 1, {"compression.type": "producer"})])
    producer = clients.producer(kafka, **{"linger.ms": 0})
    for piece in pieces:
        for value in form.encode(piece):
            producer.produce(topic, value, piece.group.encode())
        producer.flush(60)
    producer.close()
    return harness.log_bytes(broker, topic) / sum(len(piece.ids) for piece in pieces)


def episode_bytes(broker: Broker, completions: Sequence[samples.Completion], topic: str) -> float:
    """Bytes per model token of whole episodes, as they were sampled: start, spans and end; the prompt is left out."""
    kafka = harness.kafka_of(broker)
    clients.create_topics(kafka, [TopicSpec(topic, PARTITIONS, 1, {"compression.type": "producer"})])
    producer = clients.producer(kafka)

    def send(key: str, event: Event) -> None:
        producer.produce(topic, encode(event), key.encode())

    for one in completions:
        writer = EpisodeWriter(Attempt(f"g{one.group:08d}", one.slot, 0, INCARNATION), send, SIZE)
        writer.start(worker="worker-0", engine={}, temperature=1.0, max_new_tokens=samples.MAX_NEW_TOKENS,
                     seed=one.slot)  # fmt: skip
        writer.model(one.tokens, one.logprobs, VERSION)
        writer.end(Outcome.MODEL_SUCCESS, "stop", reward=1.0, rewards={"score": 1.0})
    producer.flush(60)
    producer.close()
    return harness.log_bytes(broker, topic) / sum(len(one.tokens) for one in completions)


STEPS = ("encode", "encode + produce", "consume + decode", "decode")


def measure(options: argparse.Namespace, result: Result) -> None:
    if options.sample:
        samples.sample()
    completions = samples.load()
    rounds, repetitions = (2, 3) if options.quick else (10, 7)
    per_second: dict[tuple[int, str, str], float] = {}
    size_of: dict[tuple[int, str], float] = {}
    exact = True
    with harness.temporary_broker() as broker:
        for size in SIZES[:1] if options.quick else SIZES:
            pieces = cut(completions, size)
            benches = [Bench(broker, form, pieces, rounds, f"wire-{size}-{i}") for i, form in enumerate(FORMATS)]
            for step, seconds in steps(benches, repetitions).items():
                for name, values in seconds.items():
                    speed = spread([1 / value for value in values])
                    per_second[size, step, name] = speed.median
                    result.row(f"{step}, spans of {size}", name, speed, "tokens per CPU second")
            for bench in benches:
                size_of[size, bench.form.name] = bench.bytes_per_token()
                result.row(f"topic, spans of {size}", bench.form.name, bench.bytes_per_token(), "bytes per token")
                same = bench.same_bits()
                exact &= same
                result.row(f"same bits after the trip, spans of {size}", bench.form.name, "yes" if same else "NO")
        for i, form in enumerate(FORMATS):
            lonely = lonely_bytes(broker, form, cut(completions, SIZE), f"lonely-{i}")
            result.row(f"topic, each span of {SIZE} alone in its batch", form.name, lonely, "bytes per token")
        whole = episode_bytes(broker, completions, "episodes")
        result.row("topic, whole episodes without prompts", FORMATS[0].name, whole, "bytes per model token")

    ours, unshuffled, json, avro, _ = (form.name for form in FORMATS)

    def times(step: str, other: str) -> float:
        return per_second[SIZE, step, ours] / per_second[SIZE, step, other]

    result.at_most(f"bytes per token on the topic, spans of {SIZE}, everything counted", size_of[SIZE, ours], 5.2)
    result.at_least("float32 exact after the trip (1: every bit)", float(exact), 1)
    result.at_least("encode + produce: times JSON", times("encode + produce", json), 5)
    result.at_least("encode + produce: times Avro arrays", times("encode + produce", avro), 2)
    result.at_least("decode: times JSON", times("decode", json), 10)
    tokens = sum(len(one.tokens) for one in completions)
    result.note(f"{tokens:,} model tokens in {len(completions)} completions, sampled at temperature 1; unshuffled "
                f"columns cost {size_of[SIZE, unshuffled] - size_of[SIZE, ours]:+.2f} bytes per token; consume + "
                f"decode is {times('consume + decode', json):.1f} times JSON.")  # fmt: skip


def steps(benches: Sequence[Bench], repetitions: int) -> dict[str, dict[str, list[float]]]:
    """CPU seconds per token: step -> format -> repetitions."""
    encoded = {bench.form.name: [value for piece in bench.pieces for value in bench.form.encode(piece)]
               for bench in benches}  # fmt: skip

    def decoding(bench: Bench) -> Callable[[], float]:
        values = encoded[bench.form.name]

        def work() -> None:
            for _ in range(bench.rounds):
                bench.form.decode(values)

        return lambda: cost(work).cpu_s / (bench.rounds * bench.tokens)

    calls: dict[str, Callable[[Bench], Callable[[], float]]] = {
        "encode": lambda bench: bench.encode,
        "encode + produce": lambda bench: bench.produce,
        "consume + decode": lambda bench: bench.consume,
        "decode": decoding,
    }
    return {step: harness.alternate({b.form.name: calls[step](b) for b in benches}, repetitions) for step in STEPS}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sample", action="store_true", help="first sample the tokens anew (minutes of CPU)")


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("wire", __doc__, measure, argv, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""A custom service over a run: reads on from where it was, also after a crash. Decides what "where it was" promises.

- **Exactly once, into Kafka** (`exactly_once=True`): what the service writes and its position are one transaction under
  its own transactional id. A second instance of the same name fences the first.
- **At least once, elsewhere** (the default): the position is committed after the work was done. What was done between
  the last commit and a crash is done again, so the work must bear repetition (an upsert by a record's address does).

The position is that of a consumer group of the service's own, which nothing joins: no rebalance, and nothing that the
run's roles could notice. A service reads committed records only and may write to no topic of the run. The broker
forgets a position that was not committed for seven days (`offsets.retention.minutes`): a service then begins at `start`
again. One that lags behind what the run retains gets a DataLossError, never a silent gap.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from headrace.schemas.errors import LogError, SettingsError
from headrace.schemas.topics import ALL_TOPICS
from headrace.streams.log.clients import consumer, insist
from headrace.streams.log.reader import Reader
from headrace.streams.log.transactions import Consumed, Output, Transactor

from .selection import Start

if TYPE_CHECKING:
    from .run import Read, Run

_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?")
_TIMEOUT_S = 30.0


class Service:
    """Use `Run.service`. Not for several threads.

        with run.service("mirror", "groups", exactly_once=True) as service:
            for batch in service.batches(follow=True):
                service.commit([Output("closures", 0, ...) for record, event in batch])

    Only `commit` keeps the position: what was handed out since the last one comes again.
    """

    def __init__(self, run: Run, name: str, topics: Sequence[str], *, start: Start, exactly_once: bool) -> None:
        """Raises SettingsError, Fenced, LogError."""
        if not _NAME.fullmatch(name):
            raise SettingsError(f"service {name!r}: use 1 to 64 lower-case letters, digits, '-' or '_', beginning and "
                                "ending with a letter or digit")  # fmt: skip
        if not topics:
            raise SettingsError(f"service {name!r} reads no topic: name at least one of {', '.join(ALL_TOPICS)}")
        self.name, self._run = name, run
        group = run.topics.name(f"service-{name}")
        # 1. Take the name over, which fences an earlier instance and ends its open transaction.
        self._transactor = Transactor(run.kafka, group) if exactly_once else None
        # 2. Only then ask for the position.
        self._offsets = consumer({**run.kafka, "group.id": group})
        begin, self._ends = run.positions(tuple(topics), start)
        asked = [TopicPartition(topic, partition) for topic, partition in begin]
        known = insist(lambda left_s: self._offsets.committed(asked, timeout=left_s), _TIMEOUT_S,
                       f"the position of service {name!r} is not to be had")  # fmt: skip
        begin |= {(one.topic, one.partition): one.offset for one in known if one.offset >= 0}
        # 3. Read on from there.
        self._reader = Reader(run.kafka, begin)
        self._position = dict(begin)  # behind what was handed out

    def batches(self, *, follow: bool = False, stop: threading.Event | None = None) -> Iterator[list[Read]]:
        """What has come since, in lists that are never empty; decoded as by `Run.events`. Without `follow` it ends
        where the log ended when the service was opened."""
        from .run import Decoder

        decode = Decoder(self._run.kafka, self._run.topics)
        while not (stop is not None and stop.is_set()):
            if not follow and all(self._reader.positions[place] >= end for place, end in self._ends.items()):
                return
            records = self._reader.poll(timeout_s=0.2)
            self._position = self._reader.positions
            if records:
                yield decode(records)

    def commit(self, outputs: Sequence[Output] = ()) -> None:
        """Everything that was handed out is done. `outputs` go to Kafka in the same transaction as the position.

        Raises SettingsError for outputs without `exactly_once` or to the run's own topics, Fenced where another
        instance took the name over, RecordTooLarge, LogError.
        """
        own = f"{self._run.topics.prefix}.{self._run.name}."
        for output in outputs:
            if output.topic.startswith(own):
                raise SettingsError(f"service {self.name!r} may not write to {output.topic}: the topics of a run are "
                                    "written by its roles alone")  # fmt: skip
        places = [TopicPartition(topic, partition, offset) for (topic, partition), offset in self._position.items()]
        if self._transactor is not None:
            consumed = Consumed(places, self._offsets.consumer_group_metadata())
            self._transactor.commit(lambda send: send(outputs) if outputs else None, consumed)
            return
        if outputs:
            raise SettingsError(f"service {self.name!r} was opened without exactly_once=True: it writes nothing")
        done = insist(lambda left_s: self._offsets.commit(offsets=places, asynchronous=False), _TIMEOUT_S,
                      f"the position of service {self.name!r} can't be committed")  # fmt: skip
        if failed := [one for one in done or () if one.error is not None]:
            raise LogError(f"the position of service {self.name!r} in {failed[0].topic} can't be committed: "
                           f"{failed[0].error}")  # fmt: skip

    def close(self) -> None:
        """What was handed out since the last `commit` will come again."""
        self._reader.close()
        self._offsets.close()
        if self._transactor is not None:
            self._transactor.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

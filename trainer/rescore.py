"""Decides what a batch is under another verifier: the same tokens, with the rewards that it gives their answers.

What was judged is the text of each episode's last event in `trajectories`. An answer without a verdict leaves its
group, as one whose scorer broke would have: it is in no mean and trains nothing. Groups that the first verifier left
without a batch (all rewards equal) stay out: what was never in a batch can't be trained in its place.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.schemas.errors import DataLossError, InvalidRecord
from headrace.schemas.events import EpisodeEnded, Task
from headrace.schemas.topics import TRAJECTORIES, RunTopics
from headrace.schemas.verifier import Verifier
from headrace.streams.log.blobs import text
from headrace.streams.log.reader import Reader, spans

from .batches import Group
from .fetch import Batch, expect, payloads_of


def rescored(reader: Reader, topics: RunTopics, batch: Batch, verifier: Verifier) -> Batch:
    """Raises DataLossError naming the events that are no longer retained, InvalidRecord where one isn't what was judged
    or none was judged again, BlobError; and what the verifier raises."""
    payloads = payloads_of(reader, topics, batch.manifest.groups, f"manifest {batch.manifest.batch}")
    answers: list[tuple[Task, str]] = []
    for ref, payload in zip(batch.manifest.groups, payloads, strict=True):
        last = {episode.slot: episode.offsets[-1] for episode in payload.episodes if episode.offsets}
        name, low = topics.name(TRAJECTORIES), reader.bounds(topics.name(TRAJECTORIES), ref.partition)[0]
        if gone := sorted(offset for offset in last.values() if offset < low):
            raise DataLossError(f"{name}[{ref.partition}]@{spans(gone)}: the answers of group {ref.group} were judged "
                                "there, and have been deleted: they can't be judged again")  # fmt: skip
        records = reader.read_at(name, ref.partition, last.values())
        for episode in payload.episodes:
            if episode.slot not in last:
                raise InvalidRecord(f"slot {episode.slot} of group {ref.group} names no events: its answer can't be "
                                    "judged again")  # fmt: skip
            record = records[last[episode.slot]]
            judged = text(expect(record, EpisodeEnded))
            if judged is None:
                raise InvalidRecord("it holds no text that could be judged again", record.topic, record.partition,
                                    record.offset)  # fmt: skip
            answers.append((payload.task, judged))
    rewards = iter(verifier.rewards(answers))
    groups = [_judged(group, [next(rewards) for _ in group.episodes]) for group in batch.groups]
    kept = tuple(group for group in groups if any(episode.counted for episode in group.episodes))
    if not kept:
        raise InvalidRecord(f"the verifier has no verdict on any answer of batch {batch.manifest.batch}")
    return replace(batch, groups=kept)


def _judged(group: Group, rewards: list[float | None]) -> Group:
    return replace(group, episodes=tuple(
        replace(episode, reward=reward, counted=reward is not None)
        for episode, reward in zip(group.episodes, rewards, strict=True)
    ))  # fmt: skip

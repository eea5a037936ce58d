"""Decides which publications lead from one version's weights to another's, and proves what they bring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.codec import decode
from headrace.schemas.errors import DamagedWeights, DataLossError, UndecodableRecord, WeightsRefused, WrongBase
from headrace.schemas.events import Publication, SchemaAdded, WeightChunk
from headrace.schemas.topics import POLICY, WEIGHTS, RunTopics
from headrace.streams.log.blobs import get
from headrace.streams.log.direct import HandedOver
from headrace.streams.log.policy import learn_from, open_settings
from headrace.streams.log.reader import Reader, Record, beginning_offsets, end_offsets

Arrays = Mapping[str, NDArray[Any]]



@dataclass(frozen=True, slots=True)
class Published:
    """A publication and its place in `policy`."""

    offset: int
    record: Publication


class Publications:
    """Every version that exists for receivers, from the records of `policy`."""

    def __init__(self) -> None:
        self._by_version: dict[int, list[Published]] = {}
        self.newest = -1

    def note(self, record: Record) -> bool:
        """Whether the record is a publication; raises UndecodableRecord."""
        event = decode(record.value)
        if isinstance(event, SchemaAdded):
            learn_from([record])  # of publications to come, perhaps
        if not isinstance(event, Publication):
            return False
        self._by_version.setdefault(event.version, []).append(Published(record.offset, event))
        self.newest = max(self.newest, event.version)
        return True

    def gone(self, retained_from: int) -> set[int]:
        """Policy offsets of the publications whose chunks lie below the first retained offset of `weights`."""
        every = (p for versions in self._by_version.values() for p in versions)
        return {p.offset for p in every if p.record.chunks and p.record.chunks[0] < retained_from}

    def initial(self) -> Publication | None:
        """Version 0, as a model folder."""
        return next((p.record for p in self._by_version.get(0, ()) if p.record.kind == delta.PATH), None)

    def route(self, start: int | None, target: int, without: Collection[int] = ()) -> list[Published]:
        """The publications with the fewest bytes that lead from version `start` to `target`; None starts from nothing,
        so that the first is a snapshot or the model folder. Those at the policy offsets `without` don't exist. Raises
        WrongBase where there is no way."""
        found: list[list[Published]] = []
        tail: list[Published] = []
        at = target
        # A version may stand under another hash than it was first published with: a way leads over equal ones.
        wanted = newest[-1].record.served_hash if (newest := self._by_version.get(target)) else None
        while at > (-1 if start is None else start):
            known = [p for p in reversed(self._by_version.get(at, ()))
                     if p.offset not in without and p.record.served_hash == wanted]  # fmt: skip
            bases = (delta.SNAPSHOT,) if start is not None else (delta.SNAPSHOT, delta.PATH)
            found += [[p, *tail] for p in known if p.record.kind in bases][:1]
            step = next((p for p in known if p.record.kind == delta.DELTA and p.record.base < at), None)
            if step is None:
                break
            tail, at, wanted = [step, *tail], step.record.base, step.record.base_hash
        if at == start:
            found.append(tail)
        if not found:
            raise WrongBase(
                f"there is no way to version {target} from "
                f"{'any full weights' if start is None else f'version {start}, which is served here'}: the chain of "
                f"deltas breaks at version {at} and no later snapshot is published; the next one will be taken"
            )
        return min(found, key=lambda way: sum(p.record.size for p in way))


def fetch(reader: Reader, topics: RunTopics, publication: Publication,
          pause: Callable[[int], object] = lambda size: None, ahead: HandedOver | None = None
          ) -> list[WeightChunk]:  # fmt: skip
    """The chunks that a publication names, with their data: those that came `ahead`, the others from the log; where the
    run has a store, from there. After each that the log is asked for, `pause` is called with the bytes that it brought.
    Raises DamagedWeights where one isn't a chunk, DataLossError where one is no longer retained, BlobLost and
    BlobDamaged where its file is gone or another one, BlobError where the store doesn't answer."""
    name = topics.name(WEIGHTS)
    wanted = set(publication.chunks)
    found: dict[int, WeightChunk] = {}
    if ahead is not None:
        found = {offset: chunk for offset in publication.chunks if (chunk := _came_ahead(ahead, name, offset))}
    wanted -= found.keys()
    for record in reader.read(name, 0, min(wanted, default=0), max(wanted, default=-1) + 1):
        if record.offset in wanted:
            found[record.offset] = chunk = _chunk(record)
            pause(len(chunk.data))
    if lost := wanted - found.keys():
        raise DataLossError(f"{name}[0]@{min(lost)}: the {publication.kind} of version {publication.version} names it, "
                            "and there is no such record")  # fmt: skip
    return [found[offset] for offset in publication.chunks]


def _came_ahead(ahead: HandedOver, topic: str, offset: int) -> WeightChunk | None:
    """What is damaged is looked for in the log."""
    if (value := ahead.take(offset)) is None:
        return None
    try:
        chunk = _chunk(Record(topic, 0, offset, 0, None, value))
    except DamagedWeights:
        return None
    return chunk if delta.is_intact(chunk) else None


def _chunk(record: Record) -> WeightChunk:
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    try:
        event = decode(record.value)
    except UndecodableRecord as error:
        raise DamagedWeights(f"{where}: {error}") from error
    if not isinstance(event, WeightChunk):
        raise DamagedWeights(f"{where}: a {type(event).__name__} where weights should be")
    return event if event.blob is None else replace(event, data=get(event.blob), blob=None)


def served_state(kafka: Mapping[str, Any], topics: RunTopics, model: Arrays, version: int) -> dict[str, NDArray[Any]]:
    """The served weights of `version`, from those of version 0 (`model`: name -> bits, left as they are) and what was
    published. Raises WrongBase where `model` isn't what the run began with or where no way leads to that version."""
    dtype = open_settings(kafka, topics).settings.model.dtype
    publications = _read_all(kafka, topics)
    state = delta.copy_state(delta.as_state(model, dtype))
    first = check_initial(publications, topics, delta.state_hash(state))
    at, served_hash = 0, first.served_hash
    gone = publications.gone(beginning_offsets(kafka, topics.name(WEIGHTS))[0])
    with Reader(kafka) as reader:
        for published in publications.route(0, version, gone):
            record = published.record
            delta.verify_and_apply(state, at, served_hash, record, fetch(reader, topics, record))
            at, served_hash = record.version, record.served_hash
    return {name: tensor.bits for name, tensor in state.items()}


def _read_all(kafka: Mapping[str, Any], topics: RunTopics) -> Publications:
    name, publications = topics.name(POLICY), Publications()
    with Reader(kafka) as reader:
        for record in reader.read(name, 0, beginning_offsets(kafka, name)[0], end_offsets(kafka, name)[0]):
            publications.note(record)
    return publications


def check_initial(publications: Publications, topics: RunTopics, found: bytes) -> Publication:
    """Version 0's publication, which weights with the hash `found` must be. Raises WeightsRefused where there is none
    yet, WrongBase where they aren't."""
    first = publications.initial()
    if first is None:
        raise WeightsRefused(f"run {topics.run!r} has no version 0 yet: start its trainer")
    if found != first.served_hash:
        raise WrongBase(
            f"the model that was loaded here has weights {found.hex()}, the run began with {first.served_hash.hex()} "
            f"({first.path}): give every machine the same model folder and published dtype"
        )
    return first

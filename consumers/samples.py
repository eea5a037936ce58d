"""Every record of `samples` belongs to exactly one closure, and holds what that closure's hash vouches for.

A commit's samples precede those of the next one, so a partition is read once, in step with its closures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.schemas.errors import HeadraceError
from headrace.schemas.events import GroupClosed, SampleChunk
from headrace.schemas.outcomes import Closure, Source
from headrace.schemas.payload import content_hash, from_chunks
from headrace.schemas.topics import SAMPLES
from headrace.streams.log.blobs import fetched

from .facts import Fact, Failures, address, read_facts
from .source import LogSource


class SampleCheck:
    """One partition. Give it each commit's closures in order, then `finish`."""

    def __init__(self, source: LogSource, partition: int, failures: Failures) -> None:
        self._partition, self._failures = partition, failures
        self._first, self._settled = source.first(SAMPLES, partition), source.settled(SAMPLES, partition)
        self._facts: Iterator[Fact[SampleChunk]] = read_facts(source, SAMPLES, partition, failures)
        self._next: Fact[SampleChunk] | None = next(self._facts, None)
        self._read = self._first  # all below has been read, or was found missing

    def commit(self, closures: Iterable[Fact[GroupClosed]]) -> None:
        """Check what `samples` holds for the closures of one commit: all there, unaltered, nobody else's."""
        owed: dict[int, tuple[Fact[GroupClosed], bytes]] = {}
        for closure in closures:
            refs = closure.event.samples
            if (closure.event.closure == Closure.CANDIDATE) != bool(refs):
                self._fail(closure, f"{closure.event.closure} with {len(refs)} records of samples")
            for ref in refs:
                if ref.offset in owed:
                    self._fail(self._at(ref.offset), f"belongs to {owed[ref.offset][0]} and to {closure}")
                elif self._first <= ref.offset < self._read:
                    self._fail(self._at(ref.offset), f"{closure} refers to it, but others were written after it")
                elif ref.offset >= self._first:
                    owed[ref.offset] = (closure, ref.digest)
        parts: dict[int, list[SampleChunk]] = {}
        for offset in sorted(owed):
            closure, digest = owed[offset]
            fact = self._take(offset)
            if fact is None:
                self._fail(self._at(offset), f"is missing or unreadable: {closure} refers to it")
            elif fact.digest != digest:
                self._fail(fact, f"was altered: {closure} holds another digest of it")
            else:
                chunks = parts.setdefault(closure.offset, [])
                chunks.append(fact.event)
                if len(chunks) == len(closure.event.samples):
                    self._check_payload(parts.pop(closure.offset), fact, closure)

    def finish(self) -> None:
        """What is left belongs to nothing, or to a commit beyond the snapshot."""
        while self._next is not None and self._next.offset < self._settled:
            self._ownerless(self._next)
            self._next = next(self._facts, None)

    def _take(self, offset: int) -> Fact[SampleChunk] | None:
        """The record there. A later closure's were written after those of all closures before it, so that whatever lies
        between belongs to none."""
        while self._next is not None and self._next.offset < offset:
            self._ownerless(self._next)
            self._next = next(self._facts, None)
        self._read = offset + 1
        if self._next is None or self._next.offset != offset:
            return None
        found, self._next = self._next, next(self._facts, None)
        return found

    def _ownerless(self, fact: Fact[SampleChunk]) -> None:
        self._fail(fact, "belongs to no closure: it was added or repeated")

    def _check_payload(self, chunks: list[SampleChunk], last: Fact[SampleChunk], closure: Fact[GroupClosed]) -> None:
        try:
            payload = from_chunks(fetched(chunks))  # what lies in a blob is proven by length and digest
            hashed = content_hash(payload)
        except (HeadraceError, ValueError) as error:
            self._fail(last, f"the payload of {closure} can't be read: {error}")
            return
        if hashed != closure.event.content_hash:
            self._fail(last, f"its content hash is not the one of {closure}")
        fates = {f.slot: f.model_tokens for f in closure.event.slots if f.counted}
        held = {e.slot: sum(s.count for s in e.spans if s.source == Source.MODEL) for e in payload.episodes}
        if payload.group != closure.event.group or held != fates:
            self._fail(last, f"holds other episodes than {closure}: tokens by slot {held}, there {fates}")

    def _at(self, offset: int) -> str:
        return address(SAMPLES, self._partition, offset)

    def _fail(self, where: object, message: str) -> None:
        self._failures.add("sample", where, message)

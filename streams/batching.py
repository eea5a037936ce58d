"""Which candidates make a batch, and when: manifests, dispositions, and the judgement that a run gets nowhere.

Batch n trains v(n-1) into v(n); its manifest is written once n <= committed version + 1 + `max_ahead`. Candidates are
taken in the order in which their groups were completed. Staleness is that of the batch's target; a candidate without a
trainable token left for the next target has none for a later one either, so it is disposed of as `stale` at once, which
gives its place back. So is one whose counted success gave an answer that passed in too many tasks, as `suspicious`,
where the settings exclude that. When the task source has ended and nothing is open, what is left makes a last, shorter
batch, or, below `min_last_groups`, is left over for good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.schemas.chain import Chain
from headrace.schemas.columns import pack_float32, pack_int32
from headrace.schemas.errors import NoProgress, TooUniform
from headrace.schemas.events import Disposed, GroupClosed, GroupRef, Manifest, PartitionPosition, Version
from headrace.schemas.outcomes import Closure, Disposition, Outcome
from headrace.schemas.settings import RunSettings
from headrace.schemas.suspicion import Answers, Sign

from .reuse import Reusing
from .slots import ACCOUNT_CANDIDATE
from .staleness import Drifts, Staleness, assess, dropped, pushed_out

Entry = tuple[Manifest | Disposed, bytes]  # a record of `batches` and its bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A closure that waits for a batch."""

    partition: int
    offset: int
    closure: GroupClosed


@dataclass(frozen=True, slots=True)
class _Segment:
    slot: int
    version: int
    count: int
    staleness: Staleness


class Batching:
    """Candidates and the batches that were made of them, folded from `groups`, `policy` and `batches`."""

    def __init__(self) -> None:
        self.batch = 0  # the newest decided
        self.committed = -1
        self.candidates: list[Candidate] = []
        self.positions: dict[int, int] = {}  # of `groups`, read so far
        self.reusing = Reusing()
        self._answers = Answers()
        self._chain = Chain()
        self._sizes: dict[int, int] = {}  # groups of each batch whose version is not yet published
        self._drifts = Drifts()
        self._decided: set[str] = set()  # groups that `batches` names and whose closure is still to be read
        self._marks: dict[int, int] = {}  # positions of the newest manifest
        self._closures = self._solved = self._judged = self._left_out = 0  # since then

    def unpublished(self, published: int) -> int:
        """Groups in manifests whose version is not yet published."""
        self._sizes = {batch: size for batch, size in self._sizes.items() if batch > published}
        return sum(self._sizes.values())

    # ------------------------------------------------------------------------------------------------- facts

    def read(self, record: Manifest | Disposed, value: bytes) -> None:
        """A record of `batches`; at a start these come before those of `groups`."""
        self._chain = Chain.after(record, value)
        self._decided |= {ref.group for ref in record.groups} if isinstance(record, Manifest) else {record.group}
        if isinstance(record, Manifest):
            self._manifested(record)

    def version(self, version: Version) -> None:
        self.committed = max(self.committed, version.version)
        self._drifts.publish(version)

    def closed(self, candidate: Candidate, settings: RunSettings) -> None:
        """The closure of a group that the coordinator opened for training."""
        closure = candidate.closure
        fresh = candidate.offset >= self._marks.get(candidate.partition, 0)
        self._answers.see(closure.task, closure.slots)
        if settings.reuse.enabled:
            self.reusing.closed(candidate.partition, candidate.offset, closure, settings.reuse.window, fresh=fresh)
        if fresh:
            self._closures += 1
            outcomes = [fate.outcome for fate in closure.slots if Outcome(fate.outcome).trainable]
            self._judged += len(outcomes)
            self._left_out += sum(fate.excluded for fate in closure.slots)
            self._solved += outcomes.count(Outcome.MODEL_SUCCESS)
        if closure.group in self._decided:
            self._decided.discard(closure.group)
        elif closure.closure == Closure.CANDIDATE:
            self.candidates.append(candidate)

    def _manifested(self, manifest: Manifest) -> None:
        self.batch = manifest.batch
        self._sizes[manifest.batch] = len(manifest.groups)
        self.reusing.manifested(manifest)
        self._marks = {one.partition: one.offset for one in manifest.positions}
        self._closures = self._solved = self._judged = self._left_out = 0

    # ------------------------------------------------------------------------------------------------- decisions

    def decide(self, settings: RunSettings, settings_at: tuple[int, bytes], now_ms: int, *, last: bool,
               open_since: Sequence[int] = ()) -> list[Entry]:  # fmt: skip
        """Manifests and dispositions that are due. `last`: nothing is open and no task is left, so a short batch is
        due too. `open_since`: of each group that is open for training, the oldest version that may have sampled it.
        Raises TooUniform, or NoProgress where infrastructure fails, after `give_up_after` closures."""
        out: list[Entry] = []
        while self.candidates and self.batch < self.committed + 1 + settings.batch.max_ahead:
            target = self.batch
            if settings.staleness.on_stale == "wait":  # what the next batch couldn't train any more goes into this one
                self.candidates.sort(key=lambda one: not self._pushes(_versions(one), target, settings))
            left: list[tuple[Candidate, list[_Segment]]] = []
            for candidate in self.candidates:  # all of them, so that each stale one gives its place back now
                if (why := self._suspicious(candidate.closure, settings)) is not None:
                    out.append(self._dispose(candidate, Disposition.SUSPICIOUS, why, target))
                    continue
                segments = self._segments(candidate.closure, target, settings)
                if any(segment.staleness.weight > 0 for segment in segments):
                    left.append((candidate, segments))
                else:
                    out.append(self._dispose(candidate, Disposition.STALE, _stale(segments), target))
            self.candidates, taken = [candidate for candidate, _ in left], left[: settings.batch.groups]
            if not taken or len(taken) < settings.batch.groups and not last:
                break
            if settings.staleness.on_stale == "wait" and self._pushes(open_since, target, settings):
                break
            self.candidates = self.candidates[len(taken) :]
            least = settings.batch.min_last_groups
            if len(taken) < least:
                why = f"{len(taken)} left when the tasks were used up; a last batch needs {least}"
                out += [self._dispose(candidate, Disposition.LEFTOVER, why, target) for candidate, _ in taken]
                break
            manifest = self._manifest(taken, settings, settings_at, now_ms)
            out.append(self._put(manifest))
            self._manifested(manifest)
        if self._closures > settings.batch.give_up_after and len(self.candidates) < settings.batch.groups:
            raise self._give_up(settings)
        return out

    def _suspicious(self, closure: GroupClosed, settings: RunSettings) -> str | None:
        """Only whoever sees all groups sees an answer come back: the one sign that a closure can't show by itself."""
        if Sign.SAME_ANSWER not in settings.rollout.exclude_suspicious:
            return None
        for fate in closure.slots:
            if fate.counted and (found := self._answers.suspicion(fate)) is not None:
                return f"slot {fate.slot}: {found.evidence}"
        return None

    def _dispose(self, candidate: Candidate, disposition: Disposition, reason: str, target: int) -> Entry:
        return self._put(Disposed(
            **self._chain.link(), group=candidate.closure.group, partition=candidate.partition,
            offset=candidate.offset, disposition=disposition, reason=reason, target=target,
        ))  # fmt: skip

    def _put(self, record: Manifest | Disposed) -> Entry:
        return record, self._chain.extend(record)

    def _segments(self, closure: GroupClosed, target: int, settings: RunSettings) -> list[_Segment]:
        out = []
        for fate in closure.slots:
            runs = fate.versions if fate.counted else ()
            found = [assess(run.version, target, self._drifts, settings.staleness) for run in runs]
            if dropped([one.weight for one in found], settings.staleness):
                found = [replace(one, weight=0.0) for one in found]
            out += [_Segment(fate.slot, run.version, run.count, one) for run, one in zip(runs, found, strict=True)]
        return out

    def _pushes(self, versions: Iterable[int], target: int, settings: RunSettings) -> bool:
        """Whether the version that a batch for `target` makes puts any of these beyond a limit."""
        return any(pushed_out(version, target, self._drifts, settings.staleness) for version in versions)

    def _manifest(self, taken: list[tuple[Candidate, list[_Segment]]], settings: RunSettings,
                  settings_at: tuple[int, bytes], now_ms: int) -> Manifest:  # fmt: skip
        rows = [(index, one) for index, (_, segments) in enumerate(taken) for one in segments]

        def ints(values: Iterable[int]) -> bytes:
            return pack_int32(np.array(list(values), np.int32))

        return Manifest(
            **self._chain.link(), batch=self.batch + 1, target=self.batch, settings_offset=settings_at[0],
            decided_ms=now_ms, groups=tuple(_reference(candidate, segments) for candidate, segments in taken),
            positions=tuple(PartitionPosition(p, self.positions[p]) for p in sorted(self.positions)),
            closures_since=self._closures,
            segment_group=ints(index for index, _ in rows),
            segment_slot=ints(one.slot for _, one in rows),
            segment_version=ints(one.version for _, one in rows),
            segment_count=ints(one.count for _, one in rows),
            segment_drift=pack_float32(np.array([one.staleness.drift for _, one in rows], np.float32)),
            segment_weight=pack_float32(np.array([one.staleness.weight for _, one in rows], np.float32)),
            reused=self.reusing.choose(settings.reuse, self.batch, {c.closure.group for c, _ in taken}),
            settings_digest=settings_at[1],
            segment_extrapolated=ints(one.staleness.extrapolated for _, one in rows),
        )  # fmt: skip

    def _give_up(self, settings: RunSettings) -> NoProgress:
        said = f"{self._closures} groups closed since batch {self.batch} and gave {len(self.candidates)} candidates"
        if not self._judged:
            return NoProgress(f"{said}: not one episode was judged, so the workers or the environment fail; see the "
                              "reasons in `headrace show RUN episodes`")  # fmt: skip
        if 2 * self._left_out > self._solved:
            return NoProgress(f"{said}: {self._left_out} of {self._solved} successes were left out as suspicious (see "
                              "`headrace show RUN episodes --where suspicious`); mend the verifiers, or take signs out "
                              "of rollout.exclude_suspicious")  # fmt: skip
        rate = self._solved / self._judged
        how, what = ("hard", "easier tasks or solved examples") if rate < 0.5 else ("easy", "harder tasks")
        return TooUniform(f"{said}: the tasks are too {how} for this policy ({rate:.1%} of {self._judged} episodes "
                          f"solved), so siblings' rewards are equal; take {what}, or raise batch.max_groups_per_batch "
                          f"(now {settings.batch.give_up_after})")  # fmt: skip


def _versions(candidate: Candidate) -> set[int]:
    return {run.version for fate in candidate.closure.slots if fate.counted for run in fate.versions}


def _reference(candidate: Candidate, segments: list[_Segment]) -> GroupRef:
    closure = candidate.closure
    assert closure.content_hash is not None
    return GroupRef(closure.group, candidate.partition, candidate.offset, closure.content_hash,
                    closure.accounts.get(ACCOUNT_CANDIDATE, 0), max(one.staleness.lag for one in segments))  # fmt: skip


def _stale(segments: list[_Segment]) -> str:
    if not segments:
        return "no model token"
    return f"lag {min(one.staleness.lag for one in segments)} or more" + (
        "" if any(math.isnan(one.staleness.drift) for one in segments)
        else f", drift {min(one.staleness.drift for one in segments):.4f} or more"
    )  # fmt: skip

"""Decides which recorded success is trained on once more, beside a group of its task whose attempts all failed.

Off by default, and biased: what is used again was drawn by an older policy and chosen because it succeeded, so the
gradient is no longer that of the expected reward. Bounded therefore by count (`max_uses` of one success,
`max_per_batch`), by weight ((1 - recent solve rate of the task) x coefficient, as a constant) and, at use, by exact
drift. The siblings of the failed group keep an advantage of zero. Everything here follows from `batches` and `groups`;
a failed group may be helped by the next manifest and by no later one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Set
from dataclasses import dataclass, field

from headrace.schemas.events import GroupClosed, GroupRef, Manifest, Reuse
from headrace.schemas.outcomes import Closure, Outcome
from headrace.schemas.settings import ReuseSettings

from .slots import ACCOUNT_CANDIDATE


@dataclass(frozen=True, slots=True)
class _Success:
    """The newest of a task: a counted success in a candidate, whose payload is kept."""

    closure: GroupClosed
    partition: int
    offset: int
    slot: int
    model_tokens: int

    @property
    def name(self) -> tuple[str, int]:
        return self.closure.group, self.slot


@dataclass(slots=True)
class Reusing:
    """Successes that may be used again, and failed groups that they may help, folded from `groups` and `batches`."""

    _successes: dict[str, _Success] = field(default_factory=dict)  # by task
    _recent: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)  # by task: (solved, judged) of closures
    _failed: list[tuple[GroupClosed, _Success]] = field(default_factory=list)  # since the newest manifest
    _uses: Counter[tuple[str, int]] = field(default_factory=Counter)

    def manifested(self, manifest: Manifest) -> None:
        self._failed = []
        for one in manifest.reused:
            self._uses[one.source.group, one.slot] += 1

    def closed(self, partition: int, offset: int, closure: GroupClosed, window: int, *, fresh: bool) -> None:
        """The closure of a group for training; `fresh`: the newest manifest was decided without it."""
        judged = [fate for fate in closure.slots if Outcome(fate.outcome).trainable]
        solved = [fate for fate in judged if fate.outcome == Outcome.MODEL_SUCCESS]
        recent = self._recent.setdefault(closure.task, deque())
        recent.append((len(solved), len(judged)))
        while len(recent) > window:
            recent.popleft()
        if closure.closure == Closure.CANDIDATE:
            for fate in solved:
                if fate.counted and fate.model_tokens:
                    self._successes[closure.task] = _Success(closure, partition, offset, fate.slot, fate.model_tokens)
                    break
        elif closure.closure == Closure.ZERO_VARIANCE and not solved and fresh:
            if success := self._successes.get(closure.task):  # of an earlier group
                self._failed.append((closure, success))

    def choose(self, settings: ReuseSettings, target: int, own: Set[str]) -> tuple[Reuse, ...]:
        """For the manifest that is being written, whose `own` groups train their successes themselves; it must be
        handed to `manifested` then."""
        out: list[Reuse] = []
        uses = self._uses.copy()
        for failed, success in self._failed:
            if len(out) == settings.max_per_batch:
                break
            if uses[success.name] >= settings.max_uses or success.closure.group in own:
                continue
            uses[success.name] += 1
            solved, judged = (sum(column) for column in zip(*self._recent[failed.task], strict=True))
            out.append(Reuse(failed.group, _reference(success, target), success.slot,
                             (1 - solved / max(1, judged)) * settings.coefficient, uses[success.name],
                             success.model_tokens))  # fmt: skip
        return tuple(out)


def _reference(success: _Success, target: int) -> GroupRef:
    closure = success.closure
    assert closure.content_hash is not None
    oldest = min(run.version for fate in closure.slots if fate.slot == success.slot for run in fate.versions)
    return GroupRef(closure.group, success.partition, success.offset, closure.content_hash,
                    closure.accounts.get(ACCOUNT_CANDIDATE, 0), target - oldest)  # fmt: skip

"""Signs that a reward was not earned: which there are, and what of an episode's events shows each of them.

This module decides what is suspicious, and nothing of what follows from it: the assembler marks a group's episodes when
the group closes, and leaves out of training what its settings say. Only successes are judged. A sign is no proof: the
evidence stands beside it. What is looked at is what the events say of tool calls; a call that hides its target (in a
variable, in another encoding) shows none of it, so a verifier must be safe without this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, Protocol

from xxhash import xxh3_64

from .calls import RecordedCall, calls_of, parsed_detail
from .columns import halves
from .events import GroupClosed, SlotFate, Span, Suspicion
from .outcomes import Outcome, Source
from .waiting import MODEL_TIME, Step


class Sign(StrEnum):
    """Why a reward is suspicious."""

    NO_WORK = "no_work"  # the verifier passed without a tool call, where tools were offered, or without any token
    VERIFIER_TOUCHED = "verifier_touched"  # a call names files of the verifier, of the tests or of the solution
    REWARD_WRITTEN = "reward_written"  # a call writes where the verifier leaves its reward
    UNREAD = "unread"  # a call's record was too large to be looked at
    TOO_FAST = "too_fast"  # a small part of the time that the siblings' successes took
    CONTRADICTED = "contradicted"  # a sibling gave the very same answer and got another reward
    SAME_ANSWER = "same_answer"  # the very same answer passed in other tasks


REWARD_PATHS = ("/logs/verifier",)  # of a task folder in the format of Terminal-Bench and Harbor
VERIFIER_PATHS = ("/tests", "/solution", *REWARD_PATHS)
GUARDED = "guarded"  # of `Task.data`: a list of further paths that the model has no business with

EVIDENCE = 240  # characters
PEERS = 3  # other successes of its group below which none is too fast
SLOW_MS = 5_000.0  # the median time of all of them must be at least this,
FAST_SHARE = 0.05  # and it took less than this part of it
ANSWER_TOKENS = 16  # a shorter answer may be right in many tasks
TASKS = 3  # in so many tasks the same answer is suspicious
ANSWERS = 1 << 18  # remembered, the newest: about 60 MB at most

_WRITES = re.compile(r">|\b(?:tee|cp|mv|dd|ln|install|sed\s+-i|truncate|touch|rm|write|open)\b")


# ------------------------------------------------------------------------------------------------------ an attempt


@dataclass(slots=True)
class Signs:
    """What an attempt's events have shown so far. Feed it the spans in order."""

    offered: bool = False  # tools
    calls: int = 0
    found: dict[Sign, str] = field(default_factory=dict)
    _answer: xxh3_64 | None = None

    def see(self, span: Span, about: Guarding) -> None:
        """The next span of the attempt."""
        if span.source == Source.MODEL:
            if self._answer is None:
                self._answer = xxh3_64()
            self._answer.update(halves(span.tokens, span.count)[0])
            return
        if span.blob is not None:
            self.calls += 1
            self._note(Sign.UNREAD, span.turn, f"what it says of the turn lies in {span.blob.address}")
        elif span.detail is not None:
            self._detail(span.detail, span.turn, about)

    @property
    def answer(self) -> bytes | None:
        """8 bytes that stand for all tokens of the model; None where there are none. (XXH3-64 of the ids' low 16 bits:
        it doesn't depend on where spans were cut.)"""
        return None if self._answer is None else self._answer.digest()

    def _detail(self, detail: str, turn: int, about: Guarding) -> None:
        said = parsed_detail(detail)
        self.offered |= bool(said.get("tools"))
        if (why := said.get("left_out")) is not None:
            self.calls += 1
            self._note(Sign.UNREAD, turn, f"what it says of the turn was left out: {why}")
        for call in calls_of(said, turn):
            self.calls += 1
            if call.arguments:
                self._call(call, about.guarded)

    def _call(self, call: RecordedCall, guarded: re.Pattern[str]) -> None:
        words = "\n".join(_texts(call.arguments))
        met = guarded.search(words)
        if met is None:
            return
        writes = any(_below(one, REWARD_PATHS) for one in guarded.findall(words)) and _WRITES.search(words)
        self._note(Sign.REWARD_WRITTEN if writes else Sign.VERIFIER_TOUCHED, call.turn,
                   f"{call.name}: {_around(words, met.start())}")  # fmt: skip

    def _note(self, sign: Sign, turn: int, evidence: str) -> None:
        self.found.setdefault(sign, f"turn {turn}: {evidence}"[:EVIDENCE])


class Guarding(Protocol):
    """A task, as far as it says which paths are none of its model's business."""

    @property
    def guarded(self) -> re.Pattern[str]:
        """As `guarded_paths` gives it; asked for at the first tool call."""


def guarded_paths(task_data: str) -> re.Pattern[str]:
    """What finds the paths in a call with which the model of this task has no business: each whole, or with what lies
    below it."""
    try:
        said = json.loads(task_data)
    except ValueError:
        said = None
    more = said.get(GUARDED) if isinstance(said, dict) else None
    paths = [*VERIFIER_PATHS, *(str(path).rstrip("/") for path in (more if isinstance(more, list) else ()))]
    either = "|".join(re.escape(path) for path in sorted({p for p in paths if p}, key=len, reverse=True))
    return re.compile(rf"(?<![\w.\-/])(?:{either})(?=/|[^\w.\-]|$)[\w.\-/*]*")


def _below(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots)


def _texts(value: Any) -> Iterable[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _around(text: str, at: int) -> str:
    begin = max(0, at - EVIDENCE // 3)
    return ("..." if begin else "") + " ".join(text[begin : begin + EVIDENCE].split())


# --------------------------------------------------------------------------------------------------------- a group


@dataclass(frozen=True, slots=True)
class Judged:
    """An ended episode, as its group's closure finds it. `own_ms`: time of its model and its tools; 0: not recorded."""

    outcome: str
    reward: float | None
    model_tokens: int
    own_ms: float
    signs: Signs


def own_ms(times: dict[str, float]) -> float:
    """Milliseconds of the model and of its tools; what the machine made an attempt wait for is left out."""
    return times.get(MODEL_TIME, 0.0) + times.get(Step.ENVIRONMENT, 0.0)


def suspicions(episodes: Sequence[Judged]) -> list[tuple[Suspicion, ...]]:
    """Of each of a group's episodes, what makes its reward suspicious: nothing where it is no success."""
    group = _Group.of(episodes)
    return [tuple(Suspicion(str(sign), evidence) for sign, evidence in group.signs(one))
            if one.outcome == Outcome.MODEL_SUCCESS else () for one in episodes]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Group:
    """What an episode is compared with."""

    calls: int  # the most that one of them made
    tools: bool
    times: list[float]  # of its successes, where recorded
    rewards: dict[bytes | None, set[float]]  # by answer

    @classmethod
    def of(cls, episodes: Sequence[Judged]) -> _Group:
        calls = max((one.signs.calls for one in episodes), default=0)
        times = [one.own_ms for one in episodes if one.outcome == Outcome.MODEL_SUCCESS and one.own_ms > 0]
        rewards: dict[bytes | None, set[float]] = {}
        for one in episodes:
            if one.reward is not None:
                rewards.setdefault(one.signs.answer, set()).add(one.reward)
        return cls(calls, calls > 0 or any(one.signs.offered for one in episodes), times, rewards)

    def signs(self, one: Judged) -> Iterable[tuple[Sign, str]]:
        if not one.model_tokens:
            yield Sign.NO_WORK, "passed without a token of the model"
        elif self.tools and not one.signs.calls:
            yield Sign.NO_WORK, f"passed without a tool call; siblings made up to {self.calls}"
        yield from one.signs.found.items()
        usual = median(self.times) if len(self.times) > PEERS else 0.0
        if usual >= SLOW_MS and 0 < one.own_ms < FAST_SHARE * usual:
            yield Sign.TOO_FAST, (f"{one.own_ms / 1000:.2f} s of model and tools; the median of {len(self.times)} "
                                  f"successes is {usual / 1000:.1f} s")  # fmt: skip
        others = self.rewards[one.signs.answer] - {one.reward} if one.reward is not None else set()
        if one.model_tokens and others:
            yield Sign.CONTRADICTED, f"the same {one.model_tokens} tokens got {_numbers(others)} and {one.reward:g}"


def _numbers(values: Iterable[float | None]) -> str:
    return " and ".join(f"{value:g}" for value in sorted(v for v in values if v is not None))


# ---------------------------------------------------------------------------------------------------------- a run


class Answers:
    """Successes by what the model said, over the groups of a run: which tasks the same answer passed in."""

    def __init__(self) -> None:
        self._tasks: dict[bytes, tuple[str, ...]] = {}

    @classmethod
    def of(cls, closures: Iterable[GroupClosed]) -> Answers:
        """What these closed groups show."""
        found = cls()
        for closure in closures:
            found.see(closure.task, closure.slots)
        return found

    def see(self, task: str, fates: Iterable[SlotFate]) -> None:
        """A closed group of `task`."""
        for fate in fates:
            if (answer := _telling(fate)) is None:
                continue
            known = self._tasks.pop(answer, ())
            self._tasks[answer] = known if task in known or len(known) > TASKS else (*known, task)
            if len(self._tasks) > ANSWERS:
                del self._tasks[next(iter(self._tasks))]

    def suspicion(self, fate: SlotFate) -> Suspicion | None:
        """Where its answer passed in too many tasks."""
        answer = _telling(fate)
        tasks = self._tasks.get(answer, ()) if answer is not None else ()
        if len(tasks) < TASKS:
            return None
        said = f"the same {fate.model_tokens} tokens passed in {', '.join(tasks[:TASKS])}"
        return Suspicion(str(Sign.SAME_ANSWER), (said + (" and others" if len(tasks) > TASKS else ""))[:EVIDENCE])


def _telling(fate: SlotFate) -> bytes | None:
    """The answer of a success that is long enough to say something."""
    return fate.answer if fate.outcome == Outcome.MODEL_SUCCESS and fate.model_tokens >= ANSWER_TOKENS else None

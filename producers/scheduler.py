"""Which leased slot begins next, and how many run at once: a pure state machine, without tasks, clients or clocks.

- **Order**: of the slots that wait, one of the group nearest to completion begins (fewest slots of it open here), then
  the one launched first. So groups end one after another, and none is left for long with one slot to go.
- **Fairness**: no group is overtaken by more than `OVERTAKEN` starts of groups that were launched after it.
- **Reserves** begin when a counted slot of their group was lost, and otherwise only in room that nobody else wants.
- **Never idle**: while a slot may begin and there is room, one begins. Room is what the concurrency limit and the free
  sandboxes leave; the limit follows the engine's queue (below) and is never less than the engine runs at once.
- **Concurrency**: an episode that waits for its environment needs no engine, so more of them may run than the engine
  takes. The limit moves until the engine is full with a short queue (`QUEUED` of its capacity) before it: up only where
  it is the limit that holds starts back, down only by starting fewer. What runs is never stopped for it.

Retries are the coordinator's, and bounded by a group's `max_attempts`: here a next attempt is a slot like another,
which waits with its group and so tends to come first.

`Budget` is an episode's own clock. It counts tokens, turns, the time that its model would have taken with the engine to
itself, and the time of its tools: not the queue, not a neighbour's share of the engine. A spent budget is the model's
doing; a busy cluster isn't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

OVERTAKEN = 64  # starts of later groups while one waits: eight groups of eight
QUEUED = 0.1  # of the engine's capacity: enough that an ended request has a successor at once
PACED_TOKENS = 8  # a shorter turn says little of the engine's pace
GAIN = 0.5  # of the distance to the target that one observation moves the limit by: it overshoots no more than once


class SlotKey(NamedTuple):
    group: str
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine, or all replicas together, said: requests that decode, that wait, and that could decode."""

    running: int
    waiting: int
    capacity: int


@dataclass(slots=True)
class _Group:
    launched: int
    waiting: dict[int, SlotKey] = field(default_factory=dict)  # counted slots, by number
    reserves: dict[int, SlotKey] = field(default_factory=dict)  # waiting ones
    running: set[SlotKey] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # counted slots that ended in infrastructure failure
    overtaken: int = 0

    @property
    def open(self) -> int:
        """Slots still to end here, of those that may count."""
        return len(self.waiting) + len(self.running)

    @property
    def waits(self) -> bool:
        """Whether a slot of it is to begin; a reserve stands in for a lost one."""
        return bool(self.waiting or self.reserves and self.lost)

    def next(self, able: Callable[[SlotKey], bool]) -> SlotKey | None:
        """The slot that begins next: the first by number that may. One whose sandbox takes long keeps no sibling."""
        slots = self.waiting or (self.reserves if self.lost else {})
        return next((slots[number] for number in sorted(slots) if able(slots[number])), None)


class Scheduler:
    """`most` episodes run at once, whatever the engine says; `first` until it has said anything."""

    def __init__(self, most: int, first: int | None = None, overtaken: int = OVERTAKEN) -> None:
        if most < 1 or overtaken < 1:
            raise ValueError(f"most is {most} and overtaken {overtaken}: both must be at least 1")
        self._most, self.limit = most, min(most, first or most)
        self._overtaken = overtaken
        self._groups: dict[str, _Group] = {}  # in order of launch
        self._running: dict[SlotKey, None] = {}  # in order of start
        self._launched = 0
        self._sandboxes: int | None = None  # free ones; None: nothing here needs any

    # ------------------------------------------------------------------------------------------------ facts

    def leased(self, key: SlotKey, reserve: bool = False) -> None:
        """A slot waits to begin."""
        group = self._groups.get(key.group)
        if group is None:
            group = self._groups[key.group] = _Group(self._launched)
            self._launched += 1
        group.lost.discard(key.slot)
        (group.reserves if reserve else group.waiting)[key.slot] = key

    def ended(self, key: SlotKey, lost: bool = False) -> None:
        """It is over here, for whatever reason. `lost`: by a failure of the infrastructure."""
        group = self._groups.get(key.group)
        if group is None:
            return
        self._running.pop(key, None)
        group.running.discard(key)
        for waiting in (group.waiting, group.reserves):
            if waiting.get(key.slot) == key:
                del waiting[key.slot]
        if lost:
            group.lost.add(key.slot)
        if not group.open and not group.reserves:
            del self._groups[key.group]

    def observe(self, engine: EngineLoad, sandboxes_free: int | None = None) -> None:
        """What engine and sandboxes say now: move the limit."""
        self._sandboxes = sandboxes_free
        low, running = min(engine.capacity, self._most), len(self._running)
        short = engine.capacity * (1 + QUEUED) - engine.running - engine.waiting
        if short > 0:
            if running >= self.limit:
                self.limit += math.ceil(GAIN * short)
        elif short < 0:
            self.limit = min(self.limit, max(running, low)) + math.floor(GAIN * short)
        self.limit = max(low, min(self._most, self.limit))

    # ------------------------------------------------------------------------------------------------ decisions

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(len(group.waiting) + len(group.reserves) for group in self._groups.values())

    def room(self) -> int:
        """How many more may begin now."""
        room = self.limit - len(self._running)
        return max(0, room if self._sandboxes is None else min(room, self._sandboxes))

    def starts(self, able: Callable[[SlotKey], bool] = lambda _: True) -> list[SlotKey]:
        """The slots that begin now, in order; they run from now on. `able`: whether one may begin at all now (the
        engine serves the version that its lease asks for)."""
        begin: list[SlotKey] = []
        while self.room() and (key := self._next(able)) is not None:
            self._start(key)
            begin.append(key)
        return begin

    def order(self, keys: Iterable[SlotKey]) -> list[SlotKey]:
        """The same order for what runs: whose next request goes to the engine first."""
        return sorted(keys, key=lambda key: self._rank(self._groups[key.group]) if key.group in self._groups else (0,))

    def _rank(self, group: _Group) -> tuple[int, ...]:
        """Least first: overdue groups in order of launch, then those nearest to completion."""
        if group.overtaken >= self._overtaken:
            return 0, group.launched
        return 1, group.open, group.launched

    def _next(self, able: Callable[[SlotKey], bool]) -> SlotKey | None:
        for group in sorted((group for group in self._groups.values() if group.waits), key=self._rank):
            if (key := group.next(able)) is not None:
                return key
        spare = (key for group in self._groups.values() if group.reserves
                 for _, key in sorted(group.reserves.items()) if able(key))  # fmt: skip
        return next(spare, None)

    def _start(self, key: SlotKey) -> None:
        group = self._groups[key.group]
        stands_in = group.reserves.pop(key.slot, None) is not None
        if stands_in and group.lost:
            group.lost.discard(min(group.lost))
        group.waiting.pop(key.slot, None)
        group.running.add(key)
        self._running[key] = None
        group.overtaken = 0
        for other in self._groups.values():
            if other.launched >= group.launched:
                break
            if other.waits:
                other.overtaken += 1
        if self._sandboxes is not None:
            self._sandboxes -= 1


@dataclass(slots=True)
class Pace:
    """How long an engine needs for a token with nothing else to do: the least mean of any turn so far, in seconds."""

    token_s: float = math.inf

    def see(self, tokens: int, decode_s: float) -> None:
        """A turn took `decode_s` from its first token to its last."""
        if tokens >= PACED_TOKENS:
            self.token_s = min(self.token_s, decode_s / tokens)


@dataclass(slots=True)
class Budget:
    """One episode's own clock: what it may use (None: any amount) and what it has used. Times in seconds."""

    max_tokens: int
    max_turns: int | None = None
    max_model_s: float | None = None
    max_tool_s: float | None = None
    max_agent_s: float | None = None  # of model and tools together: the task's own limit
    tokens: int = 0
    turns: int = 0
    model_s: float = 0.0
    tool_s: float = 0.0

    def model(self, tokens: int, decode_s: float, token_s: float) -> float:
        """A turn of the model took `decode_s` for its tokens; the engine needs `token_s` for one where it has nothing
        else to do. Returns the seconds that are the model's: the lesser of the two."""
        model_s = min(decode_s, tokens * token_s) if tokens else 0.0
        self.tokens += tokens
        self.turns += 1
        self.model_s += model_s
        return model_s

    def tool(self, seconds: float) -> None:
        self.tool_s += seconds

    def model_left_s(self) -> float:
        """Of the model's time; infinite where nothing limits it."""
        return min(_left(self.max_model_s, self.model_s), _left(self.max_agent_s, self.model_s + self.tool_s))

    def tool_left_s(self) -> float:
        return min(_left(self.max_tool_s, self.tool_s), _left(self.max_agent_s, self.model_s + self.tool_s))

    def spent(self) -> str | None:
        """The budget that is used up, by name: no further turn begins, and the episode is judged as it stands."""
        for name, used, most in (("tokens", self.tokens, self.max_tokens), ("turns", self.turns, self.max_turns),
                                 ("model_time", self.model_s, self.max_model_s),
                                 ("tool_time", self.tool_s, self.max_tool_s),
                                 ("agent_time", self.model_s + self.tool_s, self.max_agent_s)):  # fmt: skip
            if most is not None and used >= most:
                return name
        return None


def _left(most: float | None, used: float) -> float:
    return math.inf if most is None else most - used

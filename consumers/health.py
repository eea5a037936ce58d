"""The health of a run's tasks: how often each is solved, by version; which teach nothing any more; whose infrastructure
fails more often than that of the others, or more often from version to version.

Pure: records of the small topics in, figures out. Every rate has its interval (Wilson's, 95 %), and nothing is said of
a task on few episodes. Three states call for something:

- `saturated`: of its newest episodes nearly all are successes: siblings' rewards are equal, and nothing is learnt;
- `never_solved`: enough episodes, and no success in any;
- `flaky`: the very same answer of the model got different verdicts, so its reward is not a function of what it judges.

An alert is a one-sided test at 1 %, divided by the number of tests (Bonferroni): of a task's rate of attempts that were
lost (`infra_failure`) or that nobody can judge (`unknown`) against that of all other tasks together (binomial), and of
its trend over versions (Cochran and Armitage), also for all tasks together. A model that learns to make its failures
look like ours shows there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.events import AttemptEnded, GroupClosed, Lease, SlotFate
from headrace.schemas.outcomes import Closure, Outcome, Purpose

from .facts import Fact

WINDOW = 32  # newest episodes of a task, by which it is saturated
FEWEST = 16  # episodes: with fewer no task is called anything
SATURATED = 0.8  # the interval of the newest lies above; 16 of 16 do, and 31 of 32
FEWEST_LOST = 3  # attempts, below which there is no alert
TIMES = 2.0  # a rate that is less than so many times the others' calls nobody
SIGNIFICANT = 0.01
Z = 1.959964  # of 95 %
LOST = (Outcome.INFRA_FAILURE, Outcome.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Rate:
    """`hits` of `count`. `low` and `high`: Wilson's interval (E. B. Wilson, 1927), 95 %; nothing is known of none."""

    hits: int
    count: int

    @property
    def value(self) -> float | None:
        return self.hits / self.count if self.count else None

    @property
    def low(self) -> float:
        return self._bounds()[0]

    @property
    def high(self) -> float:
        return self._bounds()[1]

    def _bounds(self) -> tuple[float, float]:
        if not self.count:
            return 0.0, 1.0
        n, p = self.count, self.hits / self.count
        middle, spread = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        low, high = (middle - spread) / (1 + Z * Z / n), (middle + spread) / (1 + Z * Z / n)
        return (0.0 if not self.hits else low), (1.0 if self.hits == n else high)

    def __str__(self) -> str:
        return f"{self.hits} of {self.count} ({self.low:.0%} to {self.high:.0%})"


@dataclass(frozen=True, slots=True)
class TaskHealth:
    """One task over its closed groups for training. `reward` is the mean over counted episodes."""

    task: str
    groups: int
    reward: float | None
    solved: Rate  # counted episodes that are successes
    recent: Rate  # the same, of the newest ones
    by_version: Mapping[int, Rate]  # the same, by the newest version that sampled the episode
    repeats: Rate  # answers that had been given before, and how many of them got another verdict
    suspicious: int  # successes with a sign that they were not earned
    uniform: int  # groups without a difference between siblings
    lost: int  # attempts that the infrastructure lost, or that nobody can judge
    attempts: int
    tokens: int

    @property
    def episodes(self) -> int:
        return self.solved.count

    @property
    def successes(self) -> int:
        return self.solved.hits

    @property
    def state(self) -> str | None:
        """`flaky`, `saturated` or `never_solved`, the first that it is; None: neither, or too little is known."""
        if self.repeats.hits:
            return "flaky"
        if self.recent.count >= FEWEST and self.recent.low > SATURATED:
            return "saturated"
        return "never_solved" if self.solved.count >= FEWEST and not self.solved.hits else None


@dataclass(frozen=True, slots=True)
class Alert:
    """Attempts of a task (None: of all) end with `outcome` more often than chance explains."""

    task: str | None
    outcome: str
    rate: Rate
    against: float | None  # the rate of all other tasks; None: it rises from version to version
    p: float

    def __str__(self) -> str:
        who, how = self.task or "all tasks", self.outcome.replace("_", " ")
        what = "rises with the version" if self.against is None else f"is {self.against:.1%} in the other tasks"
        return f"{who}: {how} ends {self.rate} of its attempts, which {what} (p = {self.p:.1g})"


@dataclass(slots=True)
class _Task:
    """What is known of one."""

    groups: int = 0
    uniform: int = 0
    tokens: int = 0
    suspicious: int = 0
    rewards: float = 0.0
    rewarded: int = 0
    episodes: list[tuple[int, int, bool]] = field(default_factory=list)  # when its group closed, version (-1), success
    verdicts: dict[bytes, bool] = field(default_factory=dict)  # the first, by answer
    repeated: list[int] = field(default_factory=lambda: [0, 0])  # contradicted, all

    def closed(self, at: int, event: GroupClosed) -> None:
        self.groups += 1
        self.uniform += event.closure == Closure.ZERO_VARIANCE or event.flagged == "zero_variance"
        self.tokens += sum(event.accounts.values())
        for slot in event.slots:
            self.suspicious += bool(slot.suspicions)
            self._verdict(slot)
            if slot.counted:
                version = max((run.version for run in slot.versions), default=-1)
                self.episodes.append((at, version, slot.outcome == Outcome.MODEL_SUCCESS))
                if slot.reward is not None:
                    self.rewards, self.rewarded = self.rewards + slot.reward, self.rewarded + 1

    def _verdict(self, slot: SlotFate) -> None:
        if slot.answer is None or not Outcome(slot.outcome).trainable or slot.reason == "budget_spent":
            return
        success = slot.outcome == Outcome.MODEL_SUCCESS
        if slot.answer in self.verdicts:
            self.repeated[0] += self.verdicts[slot.answer] != success
            self.repeated[1] += 1
        else:
            self.verdicts[slot.answer] = success


class TaskSet:
    """Feed it the records of `tasks` and `groups`, in any order of the topics; then ask."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        self._attempts: list[tuple[str, int, int, str]] = []  # group, slot, attempt, outcome
        self._leased: dict[tuple[str, int, int], int] = {}  # to the version that was served at least
        self._task_of: dict[str, str] = {}

    def feed(self, fact: Fact[Any]) -> None:
        match fact.event:
            case Lease() as lease:
                self._task_of.setdefault(lease.group, lease.task.id)
                for one in lease.assignments:
                    self._leased[lease.group, one.slot, one.attempt] = lease.min_version
            case GroupClosed() as closed if closed.purpose == Purpose.TRAIN:
                self._task_of.setdefault(closed.group, closed.task)
                self._tasks.setdefault(closed.task, _Task()).closed(fact.timestamp_ms, closed)
            case AttemptEnded() as ended if ended.reason != "surplus":  # a reserve that wasn't needed hasn't failed
                self._attempts.append((ended.group, ended.slot, ended.attempt, ended.outcome))
            case _:
                pass

    def health(self) -> tuple[TaskHealth, ...]:
        """Of tasks with closed groups, most groups first."""
        lost: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for group, _, _, outcome in self._attempts:
            count = lost[self._task_of.get(group, "")]
            count[0], count[1] = count[0] + (outcome in LOST), count[1] + 1
        rows = [_health(task, one, *lost[task]) for task, one in self._tasks.items()]
        return tuple(sorted(rows, key=lambda row: (-row.groups, row.task)))

    def alerts(self) -> tuple[Alert, ...]:
        """The least likely first."""
        counts: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
        for group, slot, attempt, outcome in self._attempts:
            if (task := self._task_of.get(group)) is not None:
                row = counts[task][self._leased.get((group, slot, attempt), -1)]
                row[outcome], row[""] = row[outcome] + 1, row[""] + 1
        found = [alert for outcome in LOST for alert in _alerts(counts, str(outcome))]
        return tuple(sorted(found, key=lambda alert: alert.p))


def task_set(facts: Iterable[Fact[Any]]) -> TaskSet:
    """Fed all of them."""
    found = TaskSet()
    for fact in facts:
        found.feed(fact)
    return found


def _health(task: str, one: _Task, lost: int, attempts: int) -> TaskHealth:
    by_version: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for _, version, success in one.episodes:
        if version >= 0:
            count = by_version[version]
            count[0], count[1] = count[0] + success, count[1] + 1
    newest = sorted(one.episodes, key=lambda episode: episode[0])[-WINDOW:]
    return TaskHealth(
        task, one.groups, one.rewards / one.rewarded if one.rewarded else None, _rate(one.episodes), _rate(newest),
        {version: Rate(*by_version[version]) for version in sorted(by_version)}, Rate(*one.repeated), one.suspicious,
        one.uniform, lost, attempts, one.tokens,
    )  # fmt: skip


def _rate(episodes: Sequence[tuple[int, int, bool]]) -> Rate:
    return Rate(sum(success for _, _, success in episodes), len(episodes))


# ---------------------------------------------------------------------------------------------------------- alerts


def _alerts(counts: Mapping[str, Mapping[int, Mapping[str, int]]], outcome: str) -> Iterable[Alert]:
    """`counts`: by task, version and outcome; "" for all outcomes, version -1 where it isn't known."""
    totals = {task: _sum(rows.values(), outcome) for task, rows in counts.items()}
    fleet = Rate(sum(one.hits for one in totals.values()), sum(one.count for one in totals.values()))
    limit = SIGNIFICANT / (2 * len(totals) + 1)
    for task, rate in totals.items():
        others = fleet.count - rate.count
        if rate.hits < FEWEST_LOST:
            continue
        against = (fleet.hits - rate.hits + 0.5) / (others + 1)  # of none one doesn't know that it is 0
        if others and rate.hits >= TIMES * against * rate.count:
            if (p := _binomial_tail(rate, against)) < limit:
                yield Alert(task, outcome, rate, (fleet.hits - rate.hits) / others, p)
        if (p := _trend(counts[task], outcome)) < limit:
            yield Alert(task, outcome, rate, None, p)
    if len(totals) > 1 and fleet.hits >= FEWEST_LOST:
        versions: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for rows in counts.values():
            for version, row in rows.items():
                for name, n in row.items():
                    versions[version][name] += n
        if (p := _trend(versions, outcome)) < limit:
            yield Alert(None, outcome, fleet, None, p)


def _sum(rows: Iterable[Mapping[str, int]], outcome: str) -> Rate:
    rows = list(rows)
    return Rate(sum(row.get(outcome, 0) for row in rows), sum(row[""] for row in rows))


def _binomial_tail(rate: Rate, p: float) -> float:
    """P(X >= hits) for `count` trials of probability p."""
    n = rate.count
    terms = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p)
             + (n - k) * math.log1p(-p) for k in range(rate.hits, n + 1))  # fmt: skip
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def _trend(by_version: Mapping[int, Mapping[str, int]], outcome: str) -> float:
    """That so steep a rise with the version comes by chance, one-sided (P. Armitage, 1955); 1 where there is none."""
    rows = [(version, row.get(outcome, 0), row[""]) for version, row in by_version.items() if version >= 0]
    total, hits = sum(n for _, _, n in rows), sum(k for _, k, _ in rows)
    if len(rows) < 2 or hits < FEWEST_LOST or hits == total:
        return 1.0
    p = hits / total
    middle = sum(version * n for version, _, n in rows) / total
    rise = sum((version - middle) * (k - n * p) for version, k, n in rows)
    variance = p * (1 - p) * sum(n * (version - middle) ** 2 for version, _, n in rows)
    return 0.5 * math.erfc(rise / math.sqrt(2 * variance)) if variance > 0 else 1.0

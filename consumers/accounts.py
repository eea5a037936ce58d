"""The token accounts by the length of the episodes, and whether long episodes are trained less than others.

Lengths are model tokens of one attempt, in buckets that are powers of two: `<= 32`, `<= 64`, ... Of a late, foreign or
repeated event only its own tokens are known, and it is put by these. Masked tokens that a manifest gave weight 0 are
known by slot; what the trainer masks by rules of its own is known by group, and is spread over the group's episodes in
proportion to their tokens.

The bias is judged over the episodes that are decided: the last attempts of slots of groups for training, with at least
one token. Each has the share of its tokens that was trained. The mean share of the longest ones (buckets from the
longest down, until they come from `LONG_GROUPS` groups) is compared with that of the others by a one-sided z-test of
two proportions. Siblings share their group's fate, so an observation is a group, not an episode; and the variance of a
share in [0, 1] is at most p (1 - p). Both make the test conservative: it speaks late, and not without cause.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.schemas.outcomes import Account

SHORTEST = 32  # the first bucket
LONG_GROUPS = 20
SIGNIFICANT = 0.01

Key = tuple[str, str, int]  # account, reason ("" where there is none), bucket


def bucket(tokens: int) -> int:
    """The bucket's upper bound; 0 for none at all."""
    return 0 if tokens <= 0 else max(SHORTEST, 1 << (tokens - 1).bit_length())


UNKNOWN = -1  # bucket of tokens whose episodes' lengths are not known


@dataclass(frozen=True, slots=True)
class Bias:
    """Long episodes (more than `above` tokens) against the others: mean share of their tokens that was trained."""

    above: int
    long_share: float
    other_share: float
    long_episodes: int
    long_groups: int
    other_groups: int
    p: float  # one-sided: that so low a share comes by chance
    cause: str  # the account and reason that long episodes meet more often than others do

    @property
    def significant(self) -> bool:
        return self.p < SIGNIFICANT

    def __str__(self) -> str:
        return (f"episodes above {self.above} tokens are trained less: {self.long_share:.1%} of their tokens, "
                f"{self.other_share:.1%} of the others'; most of it is {self.cause} ({self.long_groups} and "
                f"{self.other_groups} groups, one-sided z-test over groups, p = {self.p:.2g})")  # fmt: skip


@dataclass(slots=True)
class _Settled:
    """Decided episodes of one bucket."""

    episodes: int = 0
    shares: float = 0.0
    longest: int = 0  # groups whose longest episode is here
    shortest: int = 0
    fates: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Accounts:
    """Tokens and episodes by account, reason and length."""

    tokens: Counter[Key] = field(default_factory=Counter)
    episodes: Counter[Key] = field(default_factory=Counter)
    _settled: dict[int, _Settled] = field(default_factory=dict)

    def count(self, account: Account, tokens: int, length: int | None, reason: str = "", episodes: int = 1) -> None:
        """`tokens` of `episodes` of this length go into the account; a length of None is not known."""
        key = (str(account), str(reason), UNKNOWN if length is None else bucket(length))
        if tokens:
            self.tokens[key] += tokens
        if episodes:
            self.episodes[key] += episodes

    def settle(self, episodes: Iterable[tuple[int, int, str]]) -> None:
        """A group's episodes, decided: (model tokens, of these trained, where the others went)."""
        held = [one for one in episodes if one[0] > 0]
        if not held:
            return
        for tokens, trained, fate in held:
            one = self._settled.setdefault(bucket(tokens), _Settled())
            one.episodes += 1
            one.shares += trained / tokens
            if trained < tokens:
                one.fates[fate] += 1
        lengths = [bucket(tokens) for tokens, _, _ in held]
        self._settled[max(lengths)].longest += 1
        self._settled[min(lengths)].shortest += 1

    def by_account(self) -> Counter[str]:
        out: Counter[str] = Counter()
        for (account, _, _), tokens in self.tokens.items():
            out[account] += tokens
        return out

    def by_reason(self) -> dict[str, Counter[str]]:
        """Accounts whose tokens have reasons."""
        out: dict[str, Counter[str]] = {}
        for (account, reason, _), tokens in self.tokens.items():
            if reason:
                out.setdefault(account, Counter())[reason] += tokens
        return out

    def bias(self) -> Bias | None:
        """None where there are too few groups to tell, or only one length."""
        populated = sorted(self._settled)
        for at in reversed(populated[1:]):
            parts = [self._settled[b] for b in populated if b >= at], [self._settled[b] for b in populated if b < at]
            groups = sum(one.longest for one in parts[0])
            if groups >= LONG_GROUPS:
                others = sum(one.shortest for one in parts[1])
                return _compare(at // 2, *parts, groups, others) if others >= LONG_GROUPS else None
        return None


def _compare(above: int, long: Sequence[_Settled], other: Sequence[_Settled], groups: int, others: int) -> Bias:
    counts = sum(one.episodes for one in long), sum(one.episodes for one in other)
    shares = sum(one.shares for one in long) / counts[0], sum(one.shares for one in other) / counts[1]
    pooled = (shares[0] * counts[0] + shares[1] * counts[1]) / sum(counts)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / groups + 1 / others))
    p = 0.5 * math.erfc((shares[1] - shares[0]) / deviation / math.sqrt(2)) if deviation else 1.0
    excess: dict[str, float] = {}
    for part, count, sign in ((long, counts[0], 1), (other, counts[1], -1)):
        for one in part:
            for fate, n in one.fates.items():
                excess[fate] = excess.get(fate, 0.0) + sign * n / count
    cause = max(excess, key=lambda fate: excess[fate]) if excess else ""
    return Bias(above, shares[0], shares[1], counts[0], groups, others, p, cause)


def spread(total: int, sizes: Sequence[int]) -> list[int]:
    """`total` in whole parts proportional to `sizes`; nothing where all sizes are 0."""
    whole, parts, seen, given = sum(sizes), [], 0, 0
    for size in sizes:
        seen += size
        upto = total * seen // whole if whole else 0
        parts.append(upto - given)
        given = upto
    return parts

"""What the collection benchmark assumes of engines, caches and sandboxes, and the grid it runs over.

This file was committed before the first figure was computed, and is read by every arm alike. Nothing in it is fitted to
a result. The traces time whole model calls of a hosted engine; what contention, a lost prefix and a set-up add to that
is assumed here, over a grid, since no trace tells it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

Cache = Literal["none", "half", "unlimited"]

GROUPS, GROUP_SIZE = 32, 8  # of a batch: 256 trajectories
STEADY_BATCHES = 8  # after the first
LONG_BATCHES = 50
SEEDS = 100
SLOTS = (64, 128, 256)  # episodes whose agent runs at once; the engine below is the same for all three
LAGS: tuple[int | None, ...] = (0, 1, 2, 4, None)
MAX_LAG = 2
UNLIMITED_LAG = 10_000  # what `None` means to settings that want a number
HARD_LAG = 8  # the default of `staleness.hard_lag`: what is older would train with weight 0; its share is printed

# --------------------------------------------------------------------------------------------------- the engine

REPLICAS = 8
FULL_LOAD = 32  # running calls of one replica at which the slow-down is reached: 256 in all
# A call that begins as the n-th on its replica takes (time in the trace + that of its missing prefix) x
# (1 + (s - 1) n / 32)
# for a slow-down of s. It keeps the pace at which it began: a call takes seconds, an episode minutes.
PREFILL_TOKENS_PER_S = 10_000.0  # of what the replica's prefix cache lacks
DECODE_TOKENS_PER_S = 50.0  # turns a call's seconds in the trace into tokens, for lengths, contexts and lag
PROMPT_TOKENS = 2_000  # system prompt and task, which siblings share
TOOL_TOKENS = 300  # that a tool call's result adds to the context
# `half`: a replica's cache holds half of what its calls at full load need, at this much for each (least recently used
# goes first). `none`: every call computes its whole context. `unlimited`: what the replica has once seen stays.
CONVERSATION_TOKENS = 12_000  # about the mean context of a call
HALF_CACHE_TOKENS = FULL_LOAD * CONVERSATION_TOKENS // 2

# ---------------------------------------------------------------------------------------------------- sandboxes

# Sandboxes that may exist at once, as a multiple of the slots, where they are sized apart from them: running, being set
# up ahead and being verified in. A set-up belongs to its trajectory: starting another would take as long.
SANDBOXES_PER_SLOT = 1.5
SETUP_P99 = {3.0: 97.0, 11.0: 830.0}  # seconds, by p50: log-normal through both points
Z99 = 2.3263478740408408


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid."""

    slowdown: float  # at full load
    cache: Cache
    setup_p50_s: float

    @property
    def setup_sigma(self) -> float:
        """Of the logarithm."""
        return math.log(SETUP_P99[self.setup_p50_s] / self.setup_p50_s) / Z99

    @property
    def cache_tokens(self) -> float:
        """That one replica keeps."""
        return {"none": 0.0, "half": float(HALF_CACHE_TOKENS), "unlimited": math.inf}[self.cache]

    def __str__(self) -> str:
        return f"{self.slowdown:g}x, cache {self.cache}, set-up {self.setup_p50_s:g} s"


SLOWDOWNS = (1.0, 2.0, 4.0)
CACHES: tuple[Cache, ...] = ("none", "half", "unlimited")
GRID = tuple(Cell(*one) for one in itertools.product(SLOWDOWNS, CACHES, SETUP_P99))

# ---------------------------------------------------------------------------------------------------- the goals

FIRST_SOONER = 65.0  # percent, against the barrier, at max_lag 2 and 256 slots, in the median cell of the grid
STEADY_SOONER = {64: 60.0, 128: 75.0, 256: 85.0}  # percent, by slots
LENGTH_WITHIN = 3.0  # percent: mean length of trained episodes against that of sampled ones, over 50 batches

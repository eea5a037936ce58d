"""What is compared: collectors that differ in four things, everything else equal.

- `assembly`: a barrier over the batch, or a first-in-first-out collector without one (both in `baselines/`), or
  Headrace's coordinator and fold, which admit `max_lag` batches of groups beyond the one that is collected.
- `schedule`: launch order, or Headrace's scheduler.
- `routing`: replicas in turn, or Headrace's router.
- `sandboxes`: started cold in their episode's slot, which also waits for the verifier; or sized apart, ordered ahead
  from a pool (its sizing decision) and kept through the verifier while the slot goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .collect_parameters import LAGS, MAX_LAG

Assembly = Literal["barrier", "fifo", "headrace"]


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    assembly: Assembly = "barrier"
    schedule: bool = False
    routing: bool = False
    sandboxes: bool = False
    max_lag: int | None = MAX_LAG  # of the assembly `headrace`; None: as far as there are slots


BARRIER = Arm("barrier")
FIFO = Arm("fifo without a barrier", "fifo")
ALL = Arm("all", "headrace", True, True, True)
ADDED = (
    Arm("barrier + assembly", "headrace"),
    Arm("barrier + schedule", schedule=True),
    Arm("barrier + routing", routing=True),
    Arm("barrier + sandboxes", sandboxes=True),
)
REMOVED = (
    replace(ALL, name="all - assembly", assembly="barrier"),
    replace(ALL, name="all - schedule", schedule=False),
    replace(ALL, name="all - routing", routing=False),
    replace(ALL, name="all - sandboxes", sandboxes=False),
)
BY_LAG = tuple(replace(ALL, name=f"max_lag {'none' if lag is None else lag}", max_lag=lag) for lag in LAGS)
ALONE = replace(ALL, name="all, without over-admission", max_lag=0)

"""Which partitions an assembler takes: a fixed share, by number; never what a consumer group happens to give it.

Share i of n is every partition p with p % n == i, taken by assign(). A consumer group was rejected:

- Each join or leave hands partitions over, and whoever gets one has to fold again from its low mark: for the group's
  rebalance to be safe, its loser must drain and be fenced before the winner begins, partition by partition. The
  transactional id per partition does that anyway; then the group adds only the waiting.
- A member that is killed keeps its partitions until its session ends: 45 s at the broker's defaults (measured: 2.8 s
  with a session of 3 s), while an assigned assembler that starts again goes on after 0.2 to 1.7 s. Static members that
  restart at once end in UNRELEASED_INSTANCE_ID under the newer protocol.
- A member held up beyond its session comes back as a zombie whose partitions another one has; here it keeps them, and
  goes on where it stood.

So nothing moves by itself: whoever spreads a run over more processes starts them with other shares. Where two overlap
(a mistake, or the moment of a change), each partition belongs to who took its transactional id last; the other one
commits what is its own, and ends as Fenced.
"""

from __future__ import annotations

import re

from headrace.schemas.errors import SettingsError

WHOLE = "0/1"


def share(text: str, partitions: int) -> list[int]:
    """The partitions of share "i/n" of a run with so many. Raises SettingsError where there is none."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if not found or int(found[1]) >= int(found[2]):
        raise SettingsError(f"share {text!r}: write i/n with 0 <= i < n, as in 0/2 and 1/2 for two assemblers")
    index, of = int(found[1]), int(found[2])
    mine = list(range(index, partitions, of))
    if not mine:
        raise SettingsError(f"share {text!r}: the run has {partitions} partitions, so at most {partitions} assemblers "
                            "have work")  # fmt: skip
    return mine

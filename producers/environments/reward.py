"""What a verifier's reward file says: `reward.json` (named numbers, or one number) or `reward.txt` (one number).

The total is the number called `reward`, or the only one, or the mean of all. Whatever can't be read so is no verdict.
As the format has it, a total of 1 or more is a success.
"""

from __future__ import annotations

import json
import math

from . import Verdict


def verdict_of(text: str, named: bool) -> Verdict | None:
    """`named`: it is the JSON file."""
    try:
        found = json.loads(text) if named else float(text)
    except (ValueError, RecursionError):
        return None
    numbers = found if isinstance(found, dict) else {"reward": found}
    rewards: dict[str, float | None] = {}
    for name, value in numbers.items():
        if isinstance(value, bool | int | float) and math.isfinite(value):
            rewards[name] = float(value)
        else:
            return None
    known = [value for value in rewards.values() if value is not None]
    if not known:
        return None
    total = rewards.get("reward")
    total = sum(known) / len(known) if total is None else total
    return Verdict(total, total >= 1.0, rewards)

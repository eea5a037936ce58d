"""What held up the slowest batches? For each, the group that closed last, its slowest slot, and where that slot's time
went, step by step.

    python examples/slowest_batches.py RUN [--batches 5]        (HEADRACE_BOOTSTRAP_SERVERS names the broker)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pandas as pd

from headrace.consumers import Run, open_run


def slowest(run: Run, count: int = 5) -> pd.DataFrame:
    """One row a batch, the longest span first: its last group, and that group's slowest slot with its steps (s)."""
    groups, episodes, waits = (run.table(name).to_pandas() for name in ("groups", "episodes", "waits"))
    batches = run.table("batches").to_pandas().set_index("batch")
    members = groups[groups["batch"].notna()]
    # A batch lasts from the opening of its oldest group to its manifest; the group that closed last ended it.
    begun = members.groupby("batch")["opened_ms"].min()
    last = members.sort_values("closed_ms").groupby("batch").last()
    found = pd.DataFrame({
        "span_s": (batches["decided_ms"] - begun) / 1000, "group": last["id"].astype(str),
        "task": last["task"].astype(str), "slot": last["held_up_by"],
    }).dropna(subset=["span_s"])  # fmt: skip
    attempts = episodes[episodes["last"]].set_index(["group", "slot"])["attempt"]
    found["attempts"] = [int(attempts.loc[(row.group, row.slot)]) + 1 for row in found.itertuples()]
    steps = waits[waits["step"] != "model"].pivot_table(index=["group", "slot"], columns="step", values="wait_ms",
                                                        aggfunc="sum", observed=True)  # fmt: skip
    found = found.reset_index().merge(steps / 1000, how="left", left_on=["group", "slot"], right_index=True)
    return found.sort_values("span_s", ascending=False).head(count)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--batches", type=int, default=5)
    options = parser.parse_args(argv)
    print(slowest(open_run(options.run), options.batches).to_string(index=False, float_format="%.2f"))


if __name__ == "__main__":
    main()

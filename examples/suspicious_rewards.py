"""Which tasks' rewards are suspicious? The marks that Headrace puts on episodes (docs/suspicious.md), counted by task,
and beside them two signs of a scorer that is wrong:

- `contradicted`: answers given again that got another verdict (a scorer that isn't a function of what it judges);
- `silent`: the share of attempts that ended without a verdict.

    python examples/suspicious_rewards.py RUN                   (HEADRACE_BOOTSTRAP_SERVERS names the broker)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pandas as pd

from headrace.consumers import Run, open_run


def suspicious(run: Run) -> pd.DataFrame:
    """One row a task that shows a sign, the most marked first."""
    episodes = run.table("episodes").to_pandas().astype({"task": str, "boundary": str})
    marked = episodes[episodes["suspicious"].notna()].groupby("task")
    tasks = run.table("tasks").to_pandas().astype({"task": str}).groupby("task")
    found = pd.DataFrame({
        "episodes": episodes.groupby("task").size(),
        "reward": episodes[episodes["reward"].notna()].groupby("task")["reward"].mean(),
        "marked": marked.size(),
        "signs": marked["suspicious"].agg(lambda signs: ",".join(sorted({one for s in signs for one in s.split(",")}))),
        "contradicted": tasks["contradicted"].first(),
        "silent": (episodes["boundary"] == "scorer").groupby(episodes["task"]).mean(),
        "evidence": marked["evidence"].first(),
    }).fillna({"marked": 0, "contradicted": 0, "signs": "", "evidence": ""})  # fmt: skip
    signs = (found["marked"] > 0) | (found["contradicted"] > 0) | (found["silent"] > 0)
    return found[signs].sort_values(["marked", "contradicted", "silent"], ascending=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    found = suspicious(open_run(parser.parse_args(argv).run))
    print(found.to_string(float_format="%.3f") if len(found) else "no task shows a sign")


if __name__ == "__main__":
    main()

"""Which tasks' rewards are suspicious? Three signs that a scorer is wrong or is being fooled, each from the log alone:

- `contradicted`: the very same answer got different rewards (a scorer that isn't a function of what it judges);
- `one_answer`: every success of a task is one and the same answer (a verifier that one string opens);
- `silent`: the share of attempts that ended without a verdict.

    python examples/suspicious_rewards.py RUN                   (HEADRACE_BOOTSTRAP_SERVERS names the broker)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from hashlib import blake2b

import pandas as pd

from headrace.consumers import Run, open_run

FEW = 4  # successes below which one common answer says nothing


def answers(run: Run) -> pd.Series:
    """The model's tokens of each attempt as a fingerprint; streamed, so a long run takes little memory."""
    held: dict[tuple[str, int, int], blake2b] = {}
    for batch in run.table("tokens").batches():
        frame = batch.select(["group", "slot", "attempt", "source", "token"]).to_pandas()
        model = frame[frame["source"] == "model"]
        for key, tokens in model.groupby(["group", "slot", "attempt"], observed=True)["token"]:
            held.setdefault(key, blake2b(digest_size=8)).update(tokens.to_numpy().tobytes())
    index = pd.MultiIndex.from_tuples(held, names=["group", "slot", "attempt"])
    return pd.Series([one.hexdigest() for one in held.values()], index=index, name="answer")


def suspicious(run: Run) -> pd.DataFrame:
    """One row a task that shows a sign, the most contradicted first."""
    episodes = run.table("episodes").to_pandas().astype({"group": str, "task": str, "boundary": str})
    episodes = episodes.merge(answers(run), left_on=["group", "slot", "attempt"], right_index=True)
    judged = episodes[episodes["reward"].notna()]
    rewards = judged.groupby(["task", "answer"])["reward"].nunique()
    won = judged[judged["outcome"] == "model_success"].groupby("task")["answer"]
    found = pd.DataFrame({
        "episodes": episodes.groupby("task").size(),
        "reward": judged.groupby("task")["reward"].mean(),
        "contradicted": (rewards > 1).groupby("task").sum(),
        "one_answer": (won.nunique() == 1) & (won.size() >= FEW),
        "silent": (episodes["boundary"] == "scorer").groupby(episodes["task"]).mean(),
    }).fillna({"contradicted": 0, "one_answer": False})  # fmt: skip
    signs = (found["contradicted"] > 0) | found["one_answer"].astype(bool) | (found["silent"] > 0)
    return found[signs].sort_values(["contradicted", "silent"], ascending=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    found = suspicious(open_run(parser.parse_args(argv).run))
    print(found.to_string(float_format="%.3f") if len(found) else "no task shows a sign")


if __name__ == "__main__":
    main()

"""Where do engines compute other log-probabilities than the model itself, by token position and by engine?

Every token of one version is scored again by a plain forward of that version's weights (a model folder: version 0 is
the run's own), and compared with the log-probability that its engine reported. A mismatch that grows with the position
points to the cache or to positions, one at a single engine to that engine's build or dtype.

    python examples/mismatch.py RUN [--model FOLDER --version N] (HEADRACE_BOOTSTRAP_SERVERS names the broker)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from headrace.consumers import Run, open_run

BUCKETS = (0, 8, 32, 128, 512, 2048, 8192)


def mismatch(run: Run, folder: str | None = None, version: int = 0, episodes: int = 200) -> pd.DataFrame:
    """|engine's minus the model's log-probability| in nats, over at most so many episodes: one row for each engine and
    bucket of positions, with mean, largest, and the number of tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder or run.settings.model.path, dtype=torch.float32).eval()
    known = run.table("episodes").to_pandas().set_index(["group", "slot", "attempt"])
    rows = []
    for number, (key, tokens) in enumerate(_episodes(run, version)):
        if number == episodes:
            break
        if key not in known.index:  # not ended yet
            continue
        ids = torch.tensor(tokens["token"].to_numpy(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double() / run.settings.rollout.temperature
        scored = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        own = tokens.iloc[1:].assign(difference=np.abs(tokens["logprob"].to_numpy(np.float64)[1:] - scored))
        rows.append(own[own["version"] == version].assign(engine=_name(known.loc[key, "engine"])))
    found = pd.concat(rows)
    found["position"] = pd.cut(found["position"].astype(int), BUCKETS, right=False)
    grouped = found.groupby(["engine", "position"], observed=True)["difference"]
    return grouped.agg(["mean", "max", "count"]).reset_index()


def _episodes(run: Run, version: int) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Whole episodes in one branch with tokens of this version, each as its tokens in order."""
    held: dict[Any, list[pd.DataFrame]] = {}
    columns = ["group", "slot", "attempt", "position", "token", "logprob", "version"]
    for batch in run.table("tokens").batches():
        frame = batch.select(columns).to_pandas().astype({"group": str})
        for key, part in frame.groupby(["group", "slot", "attempt"]):
            held.setdefault(key, []).append(part)
    for key, parts in held.items():
        whole = pd.concat(parts)
        if (whole["version"] == version).any() and (np.diff(whole["position"]) == 1).all():
            yield key, whole


def _name(fingerprint: str) -> str:
    """The engine's name, or all that is told of it."""
    told = json.loads(fingerprint)
    return str(told.get("name") or told.get("engine") or fingerprint)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--model", help="folder of the version's weights (default: the run's model, version 0)")
    parser.add_argument("--version", type=int, default=0)
    options = parser.parse_args(argv)
    print(mismatch(open_run(options.run), options.model, options.version).to_string(index=False))


if __name__ == "__main__":
    main()

"""A train state on several processes: who computes which row, what is said between them, and that they equal one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models import tiny_model
from headrace.trainer.batches import Group, pack
from headrace.trainer.spread import rows_of, spread
from tests.unit.rows import groups

pytest.importorskip("torch")

from headrace.trainer.following import told, train_word  # noqa: E402
from headrace.trainer.rejection import Rejection  # noqa: E402
from headrace.trainer.reused import Reused  # noqa: E402
from headrace.trainer.weighing import StepSettings  # noqa: E402

ROOT = Path(__file__).parents[2]
sizes_of_rows = st.lists(st.integers(1, 2048), min_size=1, max_size=40)


@settings(deadline=None)
@given(sizes_of_rows, st.integers(1, 8))
def test_every_row_has_one_rank_and_no_rank_waits_more_than_a_row(sizes: list[int], ranks: int) -> None:
    shares = spread(sizes, ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(sizes)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    tokens = [sum(sizes[row] for row in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(sizes)


@settings(deadline=None)
@given(st.lists(st.integers(1, 2048), min_size=8, max_size=8), st.integers(2, 4))
def test_rows_of_one_pass_are_those_next_to_each_other_in_length(sizes: list[int], ranks: int) -> None:
    shares = spread(sizes, ranks)
    passes = [[sizes[share[at]] for share in shares if at < len(share)] for at in range(max(map(len, shares)))]
    assert all(min(before) >= max(after) for before, after in zip(passes, passes[1:], strict=False))


def test_one_rank_takes_the_rows_as_they_come() -> None:
    assert spread([3, 9, 5], 1) == [[0, 1, 2]]


def test_rows_are_cut_shorter_where_ranks_would_have_none() -> None:
    batch = groups()
    assert len(rows_of(batch, 10_000, 1)) == len(list(pack(batch, 10_000))) == 1
    assert len(rows_of(batch, 10_000, 2)) >= 2


def test_word_holds_a_batch_with_its_settings_to_the_bit() -> None:
    batch = groups()
    lost = replace(batch[0].episodes[0], counted=False, reward=None, logprobs=batch[0].episodes[0].logprobs * np.nan)
    batch = [Group("ä", (lost, *batch[0].episodes[1:])), *batch[1:]]
    rules = StepSettings(reject=(Rejection("k3", "mean", above=0.1),), betas=(0.8, 0.99), truncate_above=None)
    again = [Reused("failed", batch[1].episodes[0], 0.75)]
    got, target, rules_got, reused = told(train_word(batch, 7, rules, again))
    assert (target, rules_got) == (7, rules)
    assert [g.group_id for g in got] == [g.group_id for g in batch]
    assert (reused[0].group_id, reused[0].advantage) == ("failed", 0.75)
    pairs = [(one, other) for g, h in zip(batch, got, strict=True)
             for one, other in zip(g.episodes, h.episodes, strict=True)]  # fmt: skip
    for one, other in [*pairs, (again[0].episode, reused[0].episode)]:
        for name in ("slot", "reward", "counted", "temperature"):
            assert getattr(one, name) == getattr(other, name)
        for a, b in zip(one.strands, other.strands, strict=True):
            for name in ("prompt", "tokens", "mask", "logprobs", "versions", "weights"):
                assert getattr(a, name).dtype == getattr(b, name).dtype
                assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name == "logprobs")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Gradients in float64, and what a checkpoint holds: by FSDP2 through torchrun, on gloo."""
    model = tiny_model(tmp_path / "tiny", seed=1, hidden=32)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                           "tests.two_ranks", str(model)], capture_output=True, text=True, cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found.keys() == {"one step", "recomputed", "adapter", "one row", "batch scored first", "several steps"}
    assert found["one step"]["rows"] % 2, "no rank goes over a row once more"
    for case, figures in found.items():
        assert figures["loss"] < 1e-9 and figures["same counts"], (case, figures)
        assert max(figures[name] for name in ("norm", "rho", "masters")) < 1e-6, (case, figures)  # float32 masters
        assert figures["resumed"], (case, figures)
        assert figures["gradients"] < 1e-6, (case, figures)
        assert figures["part"] == pytest.approx(0.5, abs=0.02), (case, figures)

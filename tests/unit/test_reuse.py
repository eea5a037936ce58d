"""Successes that are used again: when, which, with what weight, and the same after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.events import GroupClosed, Manifest, Reuse
from headrace.schemas.outcomes import Outcome
from tests.scripted import run_settings
from tests.simulation import Sim


def simulation(folder: Path, tasks: int = 1, **reuse: Any) -> Sim:
    """Batches of one group, over tasks that go round."""
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(tasks)))
    sim = Sim(run_settings(
        tasks={"source": "jsonl", "path": str(file), "score": "m:f"},
        rollout={"group_size": 4, "max_attempts": 1}, batch={"groups": 1, "max_lag": 0},
        reuse={"enabled": True} | reuse,
    ))  # fmt: skip
    sim.beat()
    sim.publish()
    sim.decide()
    return sim


def close(sim: Sim, *rewards: float) -> str:
    """The open group's slots end so; its name."""
    (group,) = sim.open
    for held, reward in zip([h for h in sim.held if h[0].group == group], rewards, strict=True):
        sim.end(held, reward)
    sim.decide()
    return group


def batch(sim: Sim, *rewards: float) -> Manifest:
    """The open group becomes the next batch, and its version is published."""
    close(sim, *rewards)
    manifest = sim.manifests[-1]
    sim.publish()
    sim.decide()
    return manifest


def test_group_that_failed_altogether_gets_its_tasks_success_beside_the_next_batch(tmp_path: Path) -> None:
    sim = simulation(tmp_path, coefficient=0.5)
    source = batch(sim, 0, 1, 1, 0).groups[0]
    assert not sim.manifests[-1].reused
    failed = close(sim, 0, 0, 0, 0)
    manifest = batch(sim, 1, 0, 0, 0)
    (reuse,) = manifest.reused
    assert (reuse.group, reuse.source.group, reuse.slot, reuse.use, reuse.model_tokens) == (
        failed, source.group, 1, 1, 4)  # fmt: skip
    assert (reuse.source.offset, reuse.source.content_hash) == (source.offset, source.content_hash)
    assert reuse.source.max_lag == 1
    # 3 of 12 were solved: the group of this batch is among the recent ones.
    assert reuse.advantage == pytest.approx(0.5 * (1 - 3 / 12))
    assert len(manifest.groups) == 1, "beside its groups, not instead of one"
    assert not batch(sim, 1, 0, 0, 0).reused, "once for each group that failed"


def test_uses_are_bounded_by_success_and_by_batch(tmp_path: Path) -> None:
    sim = simulation(tmp_path, tasks=2, max_uses=2, max_per_batch=1)
    batch(sim, 1, 0, 0, 0)
    uses: list[Reuse] = []
    for _ in range(4):
        # Only task 0 has ever been solved.
        close(sim, 0, 0, 0, 0)
        close(sim, 0, 0, 0, 0)
        close(sim, 0, 0, 0, 0)
        uses += batch(sim, 0.25, 0, 0, 0).reused if sim.held[0][0].task.id.endswith("1") else ()
    for manifest in sim.manifests:
        assert len(manifest.reused) <= 1
    everything = [one for manifest in sim.manifests for one in manifest.reused]
    by_success: dict[tuple[str, int], list[int]] = {}
    for one in everything:
        by_success.setdefault((one.source.group, one.slot), []).append(one.use)
    assert everything and all(found == list(range(1, len(found) + 1)) for found in by_success.values())
    assert max(map(len, by_success.values())) <= 2


def test_success_of_the_batch_itself_is_not_used_again_in_it(tmp_path: Path) -> None:
    sim = simulation(tmp_path)
    sim.settings = run_settings(**(sim.settings.model_dump() | {"batch": {"groups": 2, "max_lag": 0}}))
    sim.restart()
    sim.beat()
    sim.decide()
    for group, rewards in zip(sim.open[:2], ((1, 0, 0, 0), (0, 0, 0, 0)), strict=True):
        for held, reward in zip([h for h in sim.held if h[0].group == group], rewards, strict=True):
            sim.end(held, reward)
        sim.decide()
    for held, reward in zip(list(sim.held), (1, 0, 0, 0), strict=True):
        sim.end(held, reward)
    sim.decide()
    assert len(sim.manifests[-1].groups) == 2 and not sim.manifests[-1].reused


def test_only_groups_whose_every_attempt_the_model_failed_count(tmp_path: Path) -> None:
    sim = simulation(tmp_path)
    batch(sim, 1, 0, 0, 0)
    close(sim, 1, 1, 1, 1)  # solved by all
    (group,) = sim.open
    for held in list(sim.held):
        sim.end(held, None, Outcome.INFRA_FAILURE)
    sim.decide()
    assert not batch(sim, 1, 0, 0, 0).reused
    closures = {one.group: one.closure for one in sim.wrote(GroupClosed)}
    assert closures[group] == "too_few_survivors"


def test_restart_at_any_point_decides_the_same(tmp_path: Path) -> None:
    def run(restart_at: int) -> list[tuple[Reuse, ...]]:
        sim, step = simulation(tmp_path, tasks=2, max_uses=3, max_per_batch=2, window=3), 0
        for round_ in range(6):
            for rewards in ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)) if round_ % 3 else ():
                close(sim, *rewards)
            if step == restart_at:
                sim.restart()
                sim.beat()
                sim.decide()
            batch(sim, 1, 0, 0, 0)
            step += 1
        return [manifest.reused for manifest in sim.manifests]

    undisturbed = run(-1)
    assert any(undisturbed)
    for point in range(6):
        assert run(point) == undisturbed


def test_without_the_option_no_manifest_names_any_and_it_needs_tasks_that_recur(tmp_path: Path) -> None:
    sim = simulation(tmp_path, enabled=False)
    batch(sim, 1, 0, 0, 0)
    close(sim, 0, 0, 0, 0)
    assert not batch(sim, 1, 0, 0, 0).reused
    with pytest.raises(ValidationError, match="needs tasks that recur"):
        run_settings(reuse={"enabled": True})

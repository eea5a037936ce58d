"""Who waited for what, over records that are written down here so that each figure can be computed by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.consumers.facts import Fact
from headrace.consumers.waits import ENVIRONMENT, GENERATION, PUBLICATION, TRAINING, Waiting, Waits, advise
from headrace.schemas.events import (
    AttemptEnded,
    GroupClosed,
    GroupRef,
    Heartbeat,
    Manifest,
    Publication,
    RunCreated,
    SettingsChanged,
    Version,
)
from headrace.schemas.hashes import GENESIS
from tests.scripted import lease, run_settings, spec

LINK: dict[str, Any] = {"number": 0, "previous": GENESIS}


class Story:
    """Records at their times, in seconds."""

    def __init__(self, **batch: int) -> None:
        self._seen = Waiting()
        settings = run_settings(batch=batch).model_dump_json()
        self.at(0, RunCreated(**LINK, writer="create", run="r", settings=settings, software="", created_ms=0))

    def at(self, second: float, event: Any) -> None:
        self._seen.observe(Fact("t", 0, 0, round(1000 * second), b"", event))

    def beat(self, second: float, **counters: float) -> None:
        self.at(second, Heartbeat("w", "w0", 0, 8, 8, True, "{}", counters))

    def leased(self, second: float, group: str, slots: dict[int, int] | None = None) -> None:
        self.at(second, lease(group, slots, rules=spec(2), opens=slots is None))

    def ended(self, second: float, group: str, slot: int, attempt: int = 0, **timings: float) -> None:
        ms = {name: 1000 * value for name, value in timings.items()}
        self.at(second, AttemptEnded(**LINK, cause=0, group=group, slot=slot, attempt=attempt, incarnation="w0",
                                     outcome="model_success", reason="stop", boundary="none", reward=1.0,
                                     model_tokens=9, ends_slot=True, timings_ms=ms))  # fmt: skip

    def closed(self, second: float, group: str, held_up_by: int = 0, closure: str = "candidate") -> None:
        self.at(second, GroupClosed(**LINK, cause=0, group=group, closure=closure, purpose="train", task="sum-7",
                                    opened=0, open_ms=5000, flagged=None, slots=(), accounts={}, context_tokens=0,
                                    content_hash=None, samples=(), held_up_by=held_up_by))  # fmt: skip

    def manifest(self, second: float, batch: int, *groups: str) -> None:
        refs = tuple(GroupRef(group, 0, 0, b"", 9, 0) for group in groups)
        self.at(second, Manifest(**LINK, batch=batch, target=batch - 1, settings_offset=0, decided_ms=0, groups=refs,
                                 positions=(), closures_since=0, segment_group=b"", segment_slot=b"",
                                 segment_version=b"", segment_count=b"", segment_drift=b"",
                                 segment_weight=b""))  # fmt: skip

    def published(self, second: float, version: int, device: str = "cpu", **metrics: float) -> None:
        self.at(second, Version(**LINK, writer="trainer", version=version, parent=version - 1, batch=version,
                                batch_offset=0, batch_digest=b"", hash_algorithm="", served_hash=b"", train_hash=b"",
                                rho=0.0, rho_tokens=0, groups=(), metrics=metrics,
                                fingerprint=json.dumps({"device": device}), committed_ms=0))  # fmt: skip
        self.at(second, Publication(**LINK, writer="trainer", version=version, kind="delta", base=-1, base_hash=b"",
                                    hash_algorithm="", served_hash=b"", path=None, chunks=(), size=0, changed=0,
                                    elements=0, published_ms=0))  # fmt: skip

    def waits(self) -> Waits:
        return self._seen.waits()


def test_idle_engine_is_paced_only_while_no_group_may_be_opened() -> None:
    """max_lag = 0, one group a batch: no room from its lease at 10 s until its version is published at 30 s."""
    story = Story(groups=1, max_lag=0)
    story.published(0, 0)
    story.beat(10, busy_s=0.0, idle_no_requests_s=10.0)
    story.leased(10, "g0")
    story.beat(14, busy_s=4.0, idle_no_requests_s=10.0)
    story.closed(14, "g0")
    story.manifest(15, 1, "g0")
    story.beat(24, busy_s=4.0, idle_no_requests_s=20.0)
    story.published(30, 1)
    story.beat(34, busy_s=4.0, idle_no_requests_s=30.0)
    assert story.waits().engine_s == pytest.approx({"busy": 4.0, "no_requests": 10.0 + 4.0, "paced": 10.0 + 6.0})


def test_more_lag_leaves_room_and_a_change_of_settings_is_heeded() -> None:
    story = Story(groups=1, max_lag=1)
    story.published(0, 0)
    story.leased(0, "g0")
    story.beat(10, idle_no_requests_s=10.0)  # room for one more: nothing came of it
    story.at(10, SettingsChanged(**LINK, writer="operator", changes='{"batch.max_lag": 0}', changed_ms=0))
    story.beat(20, idle_no_requests_s=20.0)
    story.closed(20, "g0", closure="zero_variance")  # gives its room back by itself
    story.beat(30, idle_no_requests_s=30.0)
    assert story.waits().engine_s == pytest.approx({"no_requests": 20.0, "paced": 10.0})


def test_before_version_0_is_published_engines_wait_for_weights() -> None:
    story = Story(groups=1, max_lag=0)
    story.beat(8, idle_no_requests_s=8.0)
    story.published(6, 0)
    assert story.waits().engine_s == pytest.approx({"weights": 6.0, "no_requests": 2.0})


def test_reasons_that_a_worker_knows_are_taken_as_it_says() -> None:
    story = Story(groups=1, max_lag=0)
    story.published(0, 0)
    story.beat(10, busy_s=3.0, idle_environment_s=4.0, idle_weights_s=2.0, idle_unrouted_s=1.0, gpu_s=36.0)
    found = story.waits()
    assert found.engine == pytest.approx({"busy": 0.3, "environment": 0.4, "weights": 0.2, "unrouted": 0.1})
    assert found.gpu_hours == pytest.approx(0.01)


def test_steps_of_episodes_are_summed_and_the_models_own_time_stands_beside_them() -> None:
    story = Story(groups=1, max_lag=0)
    story.ended(5, "g0", 0, queue=1.0, prefill=0.5, decode=2.0, model=0.4, scorer=0.5)
    story.ended(5, "g0", 1, queue=1.0, decode=3.0, model=3.0)
    assert story.waits().steps_s == {"queue": 2.0, "prefill": 0.5, "decode": 5.0, "scorer": 0.5}


def test_straggler_of_a_batch_is_named_with_the_state_that_it_was_in() -> None:
    story = Story(groups=2, max_lag=0)
    for group in ("g0", "g1"):
        story.leased(0, group)
        story.ended(4, group, 0, queue=1.0, decode=2.5)
        story.ended(5, group, 1, queue=1.0, decode=1.0, environment=3.0, model=9.0)
    story.closed(4, "g1", held_up_by=0)
    story.closed(5, "g0", held_up_by=1)
    story.manifest(6, 1, "g0", "g1")
    [found] = story.waits().stragglers
    assert (found.batch, found.group, found.slot, found.attempt, found.task) == (1, "g0", 1, 0, "sum-7")
    assert (found.state, found.state_s, found.open_s) == ("environment", 3.0, 5.0)


def test_straggler_that_had_to_be_run_again_says_so() -> None:
    story = Story(groups=1, max_lag=0)
    story.leased(0, "g0")
    story.leased(60, "g0", {1: 1})
    story.ended(65, "g0", 1, attempt=1, decode=4.0)
    story.closed(65, "g0", held_up_by=1)
    story.manifest(66, 1, "g0")
    [found] = story.waits().stragglers
    assert (found.state, found.state_s, found.attempt) == ("earlier attempts", 60.0, 1)


def test_trainer_time_is_what_its_versions_say_and_counts_as_gpu_time_on_one() -> None:
    story = Story(groups=1, max_lag=0)
    story.published(1, 0, device="cuda")
    story.published(9, 1, device="cuda", waiting_s=6.0, compute_s=2.0, fetching_s=1.0)
    story.published(19, 2, device="cuda", waiting_s=6.0, compute_s=2.0, committing_s=0.5, publishing_s=0.5)
    found = story.waits()
    assert (found.first_wait_s, found.trainer_waits_s) == (6.0, (6.0,))
    assert found.trainer_s == {"compute": 4.0, "waiting": 6.0, "fetching": 1.0, "committing": 0.5, "publishing": 0.5}
    assert found.gpu_hours == pytest.approx(18.0 / 3600)


def test_status_and_report_say_the_same_of_a_run_with_one_version() -> None:
    """Its trainer waited 45 s for its first batch and never again: no share, and no bottleneck."""
    story = Story(groups=1, max_lag=0)
    story.published(0, 0)
    story.beat(100, busy_s=100.0)
    story.published(100, 1, waiting_s=45.0, compute_s=55.0)
    found = story.waits()
    assert found.trainer == {"compute": 1.0} and (found.first_wait_s, found.trainer_waits_s) == (45.0, ())
    assert found.bottleneck is None


@pytest.mark.parametrize(("engine", "trainer", "max_lag", "bottleneck", "said"), [
    ({"busy": 0.5, "paced": 0.5}, {"waiting": 0.5, "compute": 0.5}, 0, GENERATION, "batch.max_lag = 1"),
    ({"busy": 0.7, "paced": 0.3}, {"waiting": 0.3, "compute": 0.7}, 1, GENERATION, "batch.max_lag = 2"),
    ({"busy": 1.0}, {"waiting": 0.6, "compute": 0.4}, 1, GENERATION, "site.workers"),
    ({"busy": 0.5, "environment": 0.5}, {"waiting": 0.6, "compute": 0.4}, 1, ENVIRONMENT, "site.slots"),
    ({"busy": 0.5, "unrouted": 0.5}, {"waiting": 0.6, "compute": 0.4}, 1, GENERATION, "fenced"),
    ({"busy": 0.5, "paced": 0.5}, {"waiting": 0.05, "compute": 0.95}, 1, TRAINING, "samples older"),
    ({"busy": 0.6, "weights": 0.4}, {"waiting": 0.1, "publishing": 0.4, "compute": 0.5}, 1, PUBLICATION, "codec"),
    ({"busy": 0.9, "paced": 0.1}, {"waiting": 0.1, "compute": 0.9}, 1, None, "no setting"),
    ({}, {}, 1, None, "nothing to advise yet"),
])  # fmt: skip
def test_bottleneck_is_named_with_the_setting_to_change(
        engine: dict[str, float], trainer: dict[str, float], max_lag: int, bottleneck: str | None,
        said: str) -> None:  # fmt: skip
    found, advice = advise(engine, trainer, max_lag)
    assert found == bottleneck
    assert said in advice


def test_more_lag_is_never_advised_where_waiting_is_below_the_worth_of_it() -> None:
    for share in (0.0, 0.05, 0.149):
        _, advice = advise({"busy": 1 - share, "paced": share}, {"waiting": share, "compute": 1 - share}, 1)
        assert "max_lag" not in advice

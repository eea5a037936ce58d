"""What chaos relies on: a schedule from its seed, a load from its input, and a comparison that sees what is wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.producers.engines import GenerationRequest, Sampling
from headrace.schemas.outcomes import Closure
from tests.chaos import load
from tests.chaos.clock import Clocks
from tests.chaos.faults import KINDS, REST, schedule
from tests.chaos.outcome import Closed, Outcome, differences, doubled, lost
from tests.chaos.worker import SyntheticEngine


def test_schedule_is_a_function_of_its_seed_and_every_kind_comes_before_any_comes_again() -> None:
    assert schedule(3, 200) == schedule(3, 200) != schedule(4, 200)
    assert schedule(3, 200)[:7] == schedule(3, 7)
    for begin in range(0, 200, len(KINDS)):
        deck = schedule(3, 200)[begin : begin + len(KINDS)]
        assert len(set(deck)) == len(deck)
    assert Counter(schedule(3, None)) == Counter(KINDS.keys() - REST)
    assert REST < KINDS.keys()


def test_what_is_sampled_depends_on_prompt_and_slot_alone_however_the_batch_is_mixed() -> None:
    def sample(names: list[str], capacity: int) -> dict[str, tuple[list[int], list[float]]]:
        engine = SyntheticEngine(capacity)
        for name in names:
            group, _, attempt = name.split("/")
            prompt = engine.encode_chat([{"role": "user", "content": f"task {group}"}])
            engine.submit(GenerationRequest(name, prompt, Sampling(1.0, load.LONGEST, int(attempt)), engine.eos_ids))
        out: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in names}
        while engine.active:
            for one in engine.step():
                assert one.version == 0
                out[one.request_id][0].extend(one.token_ids.tolist())
                out[one.request_id][1].extend(one.logprobs.tolist())
        return out

    together = sample(["a/0/0", "a/1/0", "b/0/0"], 8)
    alone = sample(["a/1/7"], 1)
    assert together["a/1/0"] == alone["a/1/7"]
    assert len({tuple(tokens) for tokens, _ in together.values()}) == 3
    tokens, logprobs = together["b/0/0"]
    assert tokens[-1] == load.EOS and load.SHORTEST <= len(tokens) < load.LONGEST and max(logprobs) <= 0
    assert load.score({"equal": False}, load.text_of(tokens)) == load.score({"equal": False}, load.text_of(tokens))


def test_policies_of_versions_differ_in_one_element() -> None:
    for version in (1, 2, load.WEIGHTS, load.WEIGHTS + 1):
        before, after = load.weights(version - 1)["w"].bits, load.weights(version)["w"].bits
        assert np.count_nonzero(before != after) == 1


SOLVED = (0, "model_success", "stop", 1.0, 5)
CALM = Outcome(
    {"g0": Closed("t-0", Closure.CANDIDATE, (SOLVED, (1, "model_failure", "stop", 0.0, 7)),
                  "aa"),
     "g1": Closed("t-1", Closure.ZERO_VARIANCE, (SOLVED,), "")},
    Counter(g0=1, g1=1), Counter(g0=1), 0,
)  # fmt: skip


def changed(**of_g0: object) -> Outcome:
    return replace(CALM, groups=CALM.groups | {"g0": replace(CALM.groups["g0"], **of_g0)})  # type: ignore[arg-type]


def test_equal_runs_have_nothing_lost_doubled_or_different() -> None:
    again = replace(CALM, attempts=9)
    assert (lost(CALM, again), doubled(again), differences(CALM, again)) == ([], [], [])


@pytest.mark.parametrize(
    "other",
    [changed(content_hash="ab"), changed(closure=Closure.TOO_FEW_SURVIVORS), changed(slots=CALM.groups["g1"].slots),
     replace(CALM, groups=CALM.groups | {"g2": CALM.groups["g0"]})],
)  # fmt: skip
def test_group_that_ends_otherwise_or_alone_is_a_difference(other: Outcome) -> None:
    assert len(differences(CALM, other)) == 1


def test_group_without_closure_and_candidate_without_fate_are_lost() -> None:
    assert lost(CALM, replace(CALM, groups={"g0": CALM.groups["g0"]})) == ["g1: no closure"]
    assert lost(CALM, replace(CALM, fates=Counter())) == ["g0: a candidate without a fate"]


def test_second_closure_and_second_fate_are_doubled() -> None:
    assert doubled(replace(CALM, closures=Counter(g0=2, g1=1))) == ["g0: 2 closures"]
    assert doubled(replace(CALM, fates=Counter(g0=2))) == ["g0: 2 fates"]


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of single processes are set by a library for Linux")
def test_clock_of_one_process_jumps_while_its_spans_stay_true(tmp_path: Path) -> None:
    code = "import time\nwhile True:\n    input()\n    print(time.time(), time.monotonic(), flush=True)"
    clocks = Clocks(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env=clocks.environment) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None

        def told() -> tuple[float, float]:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            date, span = child.stdout.readline().split()
            return float(date) - time.time(), float(span) - time.monotonic()

        told()  # from here on its clock can be set
        for seconds in (0, 3600, -15, 0):
            clocks.set(child.pid, seconds)
            date, span = told()
            assert abs(date - seconds) < 5 and abs(span) < 5
        child.kill()

"""What peers' own code computed is what ours computes; where it isn't, theirs breaks a rule that holds beside it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headrace.schemas.errors import NonFiniteLogprob  # noqa: E402
from headrace.trainer.weighing import refuse_non_finite  # noqa: E402
from tests.oracle.__main__ import FUNCTIONS, Outcome, main, run, summary  # noqa: E402
from tests.oracle.cases import Case, differences, read  # noqa: E402
from tests.oracle.deviations import DEVIATIONS  # noqa: E402
from tests.unit.rows import member, row  # noqa: E402

FILE = Path(__file__).parents[1] / "data/oracle/cases.json"
CASES = {case.id: case for case in read(FILE)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_peers_value_is_ours_or_a_stated_deviation(case: Case) -> None:
    outcome = run(case)
    assert outcome.verdict == ("deviates" if case.id in DEVIATIONS else "passed"), outcome.detail


def test_no_more_than_eight_deviate_and_each_is_documented_and_shown_to_be_wrong() -> None:
    assert len(CASES) == 94 and len(DEVIATIONS) <= 8 and set(DEVIATIONS) <= set(CASES)
    document = (Path(__file__).parents[2] / "docs/corrections.md").read_text()
    shown = Path(__file__).read_text()
    for case in DEVIATIONS:
        assert f"`{case}`" in document and f'"{case}"' in shown, case


def computed(case: str, parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
    known = CASES[case]
    return FUNCTIONS[known.function]({**known.parameters, **(parameters or {})}, {**known.inputs, **inputs})


# ---------------------------------------------------------------- each deviation: the rule that the peer's value breaks


def test_masking_the_last_token_too_changes_no_more_than_masking_the_others_did() -> None:
    """Effective sample size goes to 0 with the weights, and is no error at 0."""
    case = "verl.is.icepop_all_oob"
    assert CASES[case].expected["raises"] == "ZeroDivisionError"
    sizes = []
    for kept in (2, 1, 0):
        found = computed(case, log_ratio=[[0.1] * kept + [3.0] * (2 - kept)])
        sizes.append(found["metrics"]["rollout_is_eff_sample_size"])
    assert sizes == [pytest.approx(1.0), pytest.approx(0.5), 0.0]


@pytest.mark.parametrize(
    ("case", "column", "good"),
    [("trl.is.nan_in_padding", "sampling", [[-1.0, -7.0]]), ("slime.nan_padding", "train", [[-1.0, -7.0]]),
     ("prime.dppo_nan_padding", "trainer_logprobs", [-7.0, -1.0])],
)  # fmt: skip
def test_what_stands_at_padding_changes_nothing(case: str, column: str, good: Any) -> None:
    """Any number there gives the result that a peer gives for a finite one; theirs for NaN is NaN."""
    assert "NaN" in json.dumps(CASES[case].expected)
    known = computed(case)
    finite = computed(case, **{column: good})
    assert not differences(known, json.loads(json.dumps(finite)), 1e-12)
    assert not any(math.isnan(x) for x in numbers({k: known[k] for k in known if k != "metrics"}))


def test_groups_are_normalised_one_by_one_whatever_is_missing_beside_them() -> None:
    case = CASES["slime.rewards.one_member_dropped"]
    first, second = case.inputs["rewards"][:4], case.inputs["rewards"][4:]
    whole = computed(case.id)["rewards"]
    assert whole == computed(case.id, rewards=first)["rewards"] + computed(case.id, rewards=second)["rewards"]
    assert whole[4:] == [0.0] * 3 and case.expected["rewards"][4:] != [0.0] * 3, "equal rewards teach nothing"


def test_a_probability_that_vanishes_has_the_weight_that_it_has_just_before() -> None:
    case = "areal.nonfinite_ratio"
    limit = [computed(case, proximal=[[-1.0, x]]) for x in (-30.0, -300.0, "-Infinity")]
    assert limit[0] == limit[1] == limit[2] and limit[2]["weight"] == [[1.0, 0.0]]
    assert CASES[case].expected["weight"] == [[1.0, 1.0]]


def test_the_outlier_that_a_filter_is_for_is_filtered_however_wild_it_is() -> None:
    case = "openrlhf.icepop_inf"
    losses = [computed(case, rollout_log_probs=[[x, -1.0]])["loss"] for x in (-10.0, -80.0, -800.0)]
    assert losses == [-0.5] * 3 and CASES[case].expected["loss"] == "NaN"


def test_a_truncated_weight_never_falls_as_its_ratio_grows() -> None:
    case = "nemo.tis_overflow"
    grown = [computed(case, gen=[[-1.0, -2.0, -0.5 - x], [-0.1, -3.0, -0.2]]) for x in (0.1, 1, 10, 100, 800)]
    means = [found["sampling_importance_ratio"] for found in grown]
    assert means == sorted(means) and means[-1] == pytest.approx(7 / 6)
    assert CASES[case].expected["sampling_importance_ratio"] < means[0], "theirs falls below that of a ratio of 1.1"


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for one in value.values() for x in numbers(one)]
    if isinstance(value, list):
        return [x for one in value for x in numbers(one)]
    return [] if value is None else [float(value)]


@pytest.mark.parametrize("case", ["verl.is.nan_tis", "verl.rs.nan", "trl.is.nan_mask"])
def test_what_peers_let_pass_as_nan_the_trainer_refuses_at_its_door(case: str) -> None:
    """The pure functions give NaN for NaN, as the peers' do; no batch of a trainer gets so far."""
    inputs = CASES[case].inputs
    (values, *_) = inputs["log_ratio"] if "log_ratio" in inputs else inputs["old"]
    logprobs = torch.tensor([float("nan") if value == "NaN" else value for value in values])
    with pytest.raises(NonFiniteLogprob, match="1 of"):
        refuse_non_finite([member(len(logprobs))], [row(len(logprobs))], logprobs.double().numpy())


# -------------------------------------------------------------------------------------------------------- the runner


def test_unknown_functions_settings_and_forms_are_failures() -> None:
    good = CASES["verl.is.token_tis"]
    assert run(good).verdict == "passed"
    for wrong, said in [
        (replace(good, function="compute_everything"), "no counterpart to function"),
        (replace(good, parameters={"rollout_is": "paragraph"}), "ratio_level"),
        (replace(CASES["skyrl.seq_tis"], parameters={"entropy": 1}), "parameters entropy"),
        (replace(good, inputs={}), "KeyError"),
        (replace(good, expected={"weights": [[1.0] * 4] * 2}), "expected 1.0"),
        (replace(good, expected={"weight": [[1.0]]}), "missing"),
    ]:
        outcome = run(wrong)
        assert outcome.verdict == "failed" and said in outcome.detail, outcome


def test_deviation_must_be_the_one_that_is_stated() -> None:
    case = CASES["openrlhf.icepop_inf"]
    other = replace(case, inputs={**case.inputs, "advantages": [[1.0, 2.0]]})
    assert run(other).detail.startswith("deviates otherwise")
    equal = replace(case, expected={"loss": -0.5})
    assert run(equal).detail == "listed as deviating, and equal"


def test_any_file_of_cases_runs_and_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = json.loads(FILE.read_text())
    wanted = {"verl.kl.k3", "openrlhf.icepop_inf"}
    own = [case for case in held["cases"] if case["id"] in wanted]
    own.append({**own[0], "id": "mine", "source": {"function": "unheard_of"}})
    (tmp_path / "own.json").write_text(json.dumps({"cases": own}))
    assert main([str(tmp_path / "own.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["passed", "deviates", "failed"]
    assert lines[-1] == "1 passed, 1 failed, 1 deviating (docs/corrections.md)"
    assert main([str(FILE)]) == 0
    assert summary([Outcome("a", "passed", "")]) == "1 passed, 0 failed"
    with pytest.raises(SystemExit, match="not a file of cases"):
        main([str(tmp_path / "none.json")])

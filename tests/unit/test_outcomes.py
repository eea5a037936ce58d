"""One table of reasons: what is documented, what is decided and what the code writes are the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.schemas import errors, outcomes
from headrace.schemas.errors import DaemonLost, EnvironmentFailed, ReplicaLost, SandboxFailed, SandboxLost
from headrace.schemas.outcomes import REASONS, Boundary, Limit, Outcome, of_error

ROOT = Path(__file__).parents[2]
FOLDERS = ("schemas", "streams", "producers", "trainer", "consumers", "headrace")
# Why a lease ended or a span was cut, not an attempt.
NO_ENDS = {"handed_back", "replica_fenced", "weights_changed", "other_version", "orphaned", "slot_ended"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def constants() -> dict[str, str]:
    return {target.id: str(node.value.value) for _, tree in modules() for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets if isinstance(target, ast.Name) and target.id.startswith("REASON_")}  # fmt: skip


def test_every_reason_in_the_code_is_in_the_table_or_no_attempt_s_end() -> None:
    assert set(constants().values()) == set(REASONS) | NO_ENDS


def test_documentation_is_the_table() -> None:
    assert outcomes.markdown() in (ROOT / "docs/outcomes.md").read_text()


def test_code_writes_each_reason_with_the_outcome_and_boundary_of_the_table() -> None:
    """Wherever a call names all three, or two of them beside each other."""
    names, wrong, seen = constants(), [], 0
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call | ast.Tuple):
                continue
            words = [ast.unparse(one) for one in (node.args if isinstance(node, ast.Call) else node.elts)]
            for at, word in enumerate(words):
                reason = REASONS.get(names.get(word, ""))
                if reason is None or reason.outcome is None:
                    continue
                for beside in words[max(0, at - 1) : at + 2]:
                    kind, _, member = beside.rpartition(".")
                    told = {"Outcome": reason.outcome, "Boundary": reason.boundary}.get(kind)
                    if told is not None:
                        seen += 1
                        if told.name != member:
                            wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {beside} with {reason}")
    assert not wrong, "\n".join(wrong)
    assert seen > 20


def test_only_what_the_model_did_may_train_it() -> None:
    for one in REASONS.values():
        ours = one.boundary not in (Boundary.MODEL, Boundary.NONE)
        assert one.ending().outcome.trainable != (ours or one.outcome is Outcome.UNKNOWN)
        assert one.meaning


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SandboxLost("killed"), "sandbox_lost"),
        (SandboxLost("ended", from_within=True), "sandbox_ended"),
        (SandboxLost("ended", {Limit.TIME, Limit.DISK}), "disk_exhausted"),
        (SandboxLost("ended", {Limit.TIME}), "step_timeout"),
        (SandboxLost("silent", daemon=True), "daemon_lost"),
        # What runs must not be able to hide behind a daemon that it made hang.
        (SandboxLost("silent", {Limit.PROCESSES}, daemon=True), "processes_exhausted"),
        (DaemonLost("silent"), "daemon_lost"),
        (SandboxFailed("no image"), "sandbox_failed"),
        (EnvironmentFailed("died"), "environment_failed"),
        (ReplicaLost("died"), "engine_lost"),
        (ZeroDivisionError(), "producer_raised"),
        (errors.HeadraceError("new"), "producer_raised"),
    ],
)
def test_error_is_classified_by_what_it_says_and_an_unforeseen_one_is_ours(error: BaseException, reason: str) -> None:
    ending = of_error(error)
    assert ending == REASONS[reason].ending()
    assert (ending.outcome is Outcome.MODEL_FAILURE) == (ending.boundary is Boundary.MODEL)

"""An attempt whose world is a sandbox: its steps, its own clock, its score, and how it ended, decided here.

Steps run until the attempt's tool time is spent. The score is taken in a fork of the sandbox's files, so nothing of the
model's runs beside the scorer, and the scorer's files are never where the model was. A scorer that gives no verdict
there is tried on the task as it was given, and then once more on what the model left: if it works on the one and not
on the other, the model's files have broken it, and that is the model's failure; else the scorer is at fault.

What the scorer reads its verdict from lies in folders that are empty when it begins, so no file of the model's is taken
for one.

Nothing is raised: whatever happens ends the attempt, with an `Ending`.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from headrace.schemas.errors import DaemonLost, HeadraceError, SandboxFailed, SandboxLost
from headrace.schemas.outcomes import (
    REASON_BUDGET_SPENT,
    REASON_SCORER_BROKEN,
    REASON_SCORER_FAILED,
    REASON_SCORER_TIMEOUT,
    REASON_STOP,
    REASONS,
    Ending,
    Outcome,
    of_error,
)

from ..environments import Verdict
from . import OUTPUT_BYTES, Sandbox, SandboxSpec, StepResult
from .pool import Order, Pool

TAKE_S = 120.0
SNAPSHOT_S = 60.0
WRITE_S = 30.0
SUCCESS, FAILURE = 0, 1  # of a scorer's command; whatever else it exits with is no verdict


def by_exit_status(sandbox: Sandbox, result: StepResult) -> Verdict | None:
    if result.code not in (SUCCESS, FAILURE):
        return None
    return Verdict(float(result.code == SUCCESS), result.code == SUCCESS)


@dataclass(frozen=True, slots=True)
class Scorer:
    """`files` (absolute paths) are written before `command` runs. `fresh` folders are empty before that, and
    `variables` are set. `verdict` says what it came to (None: nothing), and may still ask the sandbox."""

    command: str
    timeout_s: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    verdict: Callable[[Sandbox, StepResult], Verdict | None] = by_exit_status


class Attempt:
    """`budget_s`: of tool time in all; `step_s`: of one step, at most. Used by one thread."""

    def __init__(self, pool: Pool, spec: SandboxSpec | None = None, *, budget_s: float, step_s: float,
                 order: Order | None = None, take_s: float = TAKE_S) -> None:  # fmt: skip
        self._pool, self._spec, self._step_s, self._take_s = pool, spec or pool.standard, step_s, take_s
        self.left_s = budget_s
        self.ending: Ending | None = None
        self.error: HeadraceError | None = None  # in words, of an end that has one
        self.verdict: Verdict | None = None  # once it is scored, where there is one
        self.said = b""  # by the scorer
        self._sandbox: Sandbox | None = None
        try:
            self._sandbox = (order or pool.order(self._spec)).take(take_s)
        except SandboxFailed as error:
            self._failed(error)

    def step(self, command: str) -> StepResult | Ending:
        """The result, or how the attempt ended."""
        if self.ending or self._sandbox is None:
            return self._end(self.ending)
        try:
            result = self._sandbox.step(command, min(self._step_s, self.left_s))
        except (SandboxLost, SandboxFailed) as error:
            return self._failed(error)
        self.left_s -= result.seconds
        return result if self.left_s > 0 else self._end(REASONS[REASON_BUDGET_SPENT].ending())

    def score(self, scorer: Scorer) -> Ending:
        """The model is done: the verdict, or why there is none. Over afterwards."""
        if self.ending or self._sandbox is None:
            return self._end(self.ending)
        try:
            snapshot = self._sandbox.snapshot(SNAPSHOT_S)
        except (SandboxLost, SandboxFailed) as error:
            return self._failed(error)
        self._release()
        try:
            return self._end(self._judged(scorer, snapshot))
        finally:
            self._pool.remove(snapshot)

    def close(self) -> None:
        self._release()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------- the score

    def _judged(self, scorer: Scorer, snapshot: str) -> Ending:
        said = self._run(scorer, replace(self._spec, base=snapshot))
        if said.outcome is not Outcome.INFRA_FAILURE or isinstance(self.error, DaemonLost):
            return said
        words, error = self.said, self.error
        sound = self._run(scorer, self._spec).outcome is not Outcome.INFRA_FAILURE
        self.verdict, self.said, self.error = None, words, error
        if not sound:
            return said
        again = self._run(scorer, replace(self._spec, base=snapshot))  # it may have been a passing fault
        if again.outcome is not Outcome.INFRA_FAILURE or isinstance(self.error, DaemonLost):
            return again
        return REASONS[REASON_SCORER_BROKEN].ending()

    def _run(self, scorer: Scorer, spec: SandboxSpec) -> Ending:
        self.error, self.verdict, self.said = None, None, b""
        spec = replace(spec, fresh=scorer.fresh, variables=spec.variables + scorer.variables,
                       output_bytes=max(OUTPUT_BYTES, spec.output_bytes))  # fmt: skip
        try:
            with self._pool.sandbox(spec, self._take_s) as one:
                for path, data in scorer.files.items():
                    write(one, path, data)
                result = one.step(scorer.command, scorer.timeout_s)
                self.said = result.output
                if result.timed_out:
                    return REASONS[REASON_SCORER_TIMEOUT].ending()
                self.verdict = scorer.verdict(one, result)
        except (SandboxLost, SandboxFailed) as error:
            self.error = error
            return of_error(error)
        if self.verdict is None:
            return REASONS[REASON_SCORER_FAILED].ending()
        return REASONS[REASON_STOP].ending(success=self.verdict.success)

    # ------------------------------------------------------------------------------------------------- the end

    def _failed(self, error: HeadraceError) -> Ending:
        self.error = error
        return self._end(of_error(error))

    def _end(self, ending: Ending | None) -> Ending:
        assert ending is not None
        self.ending = self.ending or ending
        self._release()
        return self.ending

    def _release(self) -> None:
        if self._sandbox is not None:
            self._pool.release(self._sandbox)
            self._sandbox = None


def write(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Write a file into a sandbox, with the folders above it. Raises SandboxLost, SandboxFailed."""
    folder, name = shlex.quote(path.rpartition("/")[0] or "/"), shlex.quote(path)
    text = base64.b64encode(data).decode()
    result = sandbox.step(f"mkdir -p {folder} && base64 -d > {name} <<'END'\n{text}\nEND", WRITE_S)
    if result.code != 0:
        said = result.output.decode(errors="replace").strip()
        raise SandboxFailed(f"{path} couldn't be written into a sandbox: exit status {result.code} {said}".rstrip())

"""`headrace replay RUN --episode ID`: repeat one attempt's tool calls in a fresh sandbox, and say what came out.

What had a sandbox is repeated in one of the same kind, made as its task says; what only answered is judged again. It
writes nothing, to no topic. The exit status says whether the outcome (with its reward) is the same; a difference on the
way is shown, and is no failure by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.consumers.recording import Recording, recording
from headrace.consumers.run import Run
from headrace.producers.reproduction import Again, repeat
from headrace.schemas.errors import EnvironmentFailed, SandboxFailed, SettingsError
from headrace.schemas.events import Task
from headrace.schemas.outcomes import REASON_BUDGET_SPENT, Outcome
from headrace.schemas.topics import TRAJECTORIES

if TYPE_CHECKING:
    from headrace.producers.environments import Judged, ToolEnvironment

JUDGED_ALONE = ("reasoning_gym", "jsonl")  # sources whose environments only ask and judge


@dataclass(frozen=True, slots=True)
class Reproduction:
    """`first`: the first call whose result differs. `reward`, `outcome`, `reason`: as it came out now."""

    recording: Recording
    how: str
    calls: int  # made again
    first: Again | None
    outcome: str
    reason: str
    reward: float | None
    error: str | None

    @property
    def same(self) -> bool:
        """Whether outcome and reward are those that were recorded."""
        was = self.recording.ended
        assert was is not None
        if was.reward is None or self.reward is None:
            return was.outcome == self.outcome and was.reward is self.reward
        return was.outcome == self.outcome and math.isclose(was.reward, self.reward, rel_tol=1e-9)


def reproduce(run: Run, episode: str, attempt: int | None = None, docker: str | None = None,
              watch: Callable[[Again], None] = lambda _: None) -> Reproduction:  # fmt: skip
    """`watch` is told of each call; `docker`: the daemon's address. Raises SettingsError where there is nothing to
    repeat, SandboxFailed where its kind of sandbox can't be had here, EnvironmentFailed where its task isn't what it
    was."""
    events = (event for _, event in run.events(TRAJECTORIES, episode=episode))
    found = recording(events, episode, attempt)
    if found.ended is None:
        raise SettingsError(f"episode {episode} of run {run.name!r} has not ended (attempt {found.attempt}): there is "
                            "no outcome yet that could come out again")  # fmt: skip
    if found.task.source in JUDGED_ALONE:
        return _judged_again(found, run.settings.rollout.score_timeout_s)
    return _repeated(found, docker, watch)


def _judged_again(found: Recording, timeout_s: float) -> Reproduction:
    from headrace.producers.environments.host import EnvironmentHost

    if found.text is None:
        raise SettingsError(f"episode {found.group}/{found.slot} has no answer on record that could be judged again")
    host = EnvironmentHost(found.task.source)
    try:
        number, reply = host.ask_score(found.task, found.text, timeout_s), None
        while reply is None:
            reply = next((one for one in host.poll(0.2) if one.request == number), None)
    finally:
        host.close()
    how = f"no sandbox: its answer was judged again by {found.task.source}"
    if reply.failed is not None:
        return Reproduction(found, how, 0, None, Outcome.INFRA_FAILURE, reply.failed.reason, None, reply.failed.message)
    assert reply.verdict is not None
    outcome = Outcome.MODEL_SUCCESS if reply.verdict.success else Outcome.MODEL_FAILURE
    return Reproduction(found, how, 0, None, outcome, "judged", reply.verdict.reward, None)


def _repeated(found: Recording, docker: str | None, watch: Callable[[Again], None]) -> Reproduction:
    elsewhere = [call for call in found.calls if call.arguments is None]
    if elsewhere:
        raise SettingsError(f"episode {found.group}/{found.slot}: its agent made {len(elsewhere)} calls elsewhere, and "
                            "the log holds only what came back: whoever ran the agent can repeat them")  # fmt: skip
    environment, kind = environment_of(found, docker)
    first, calls, judged = None, 0, None
    timed_out = found.ended is not None and found.ended.reason == REASON_BUDGET_SPENT
    try:
        session = environment.open(found.task)
        try:
            for one in repeat(found.calls, session, score=not timed_out):
                if isinstance(one, Again):
                    watch(one)
                    calls, first = calls + 1, first or (one if one.differs else None)
                else:
                    judged = one
        finally:
            session.close()
    finally:
        environment.close()
    how = f"a fresh sandbox of kind {kind}"
    if judged is None:
        assert found.ended is not None  # its clock was spent: the model's time on it can't come again
        return Reproduction(found, f"{how}; its clock had been spent, so that nothing was scored, then or now", calls,
                            first, found.ended.outcome, found.ended.reason, found.ended.reward, None)  # fmt: skip
    return _ended(found, how, calls, first, judged)


def _ended(found: Recording, how: str, calls: int, first: Again | None, judged: Judged) -> Reproduction:
    reward = judged.verdict.reward if judged.verdict is not None else (
        0.0 if judged.ending.outcome is Outcome.MODEL_FAILURE else None)  # fmt: skip
    return Reproduction(found, how, calls, first, judged.ending.outcome, judged.ending.reason, reward, judged.error)


def environment_of(found: Recording, docker: str | None = None) -> tuple[ToolEnvironment, str]:
    """An environment for one attempt of its task, and the kind of its sandbox. Raises SettingsError where this package
    has none for such tasks, SandboxFailed where that kind can't be had here."""
    if found.task.source != "terminal":
        raise SettingsError(f"episode {found.group}/{found.slot}: its task is of the source {found.task.source!r}, for "
                            "which there is no environment here: whoever ran it can repeat it")  # fmt: skip
    from headrace.producers.environments.terminal import Terminal
    from headrace.producers.tooling import open_backend

    kind = str(found.sandbox.get("kind") or _data(found.task).get("sandbox"))
    try:
        backend = open_backend(kind, docker)
    except SandboxFailed as error:
        raise SandboxFailed(f"the episode ran in a sandbox of kind {kind}, and there is none here: {error}") from error
    return Terminal(backend, 2, 1), kind  # one for the calls, one for the score


def _data(task: Task) -> dict[str, Any]:
    try:
        found = json.loads(task.data)
    except ValueError as error:
        raise EnvironmentFailed(f"task {task.id}: its data is no JSON ({error})") from error
    return found if isinstance(found, dict) else {}

"""The work of the collection benchmark: groups of trajectories, each with its model calls, tools, set-up and verifier.

Group i of a seed is the same whoever asks for it and when. Siblings are trials of one task. Without files they come
from distributions that were fitted to public Terminal-Bench logs (see `Fitted`); with `--trials` a trial's agent and
verifier time are drawn, with replacement, from those of its task, and with `--steps` its turns are those of a recorded
run (of the same task where there is one), stretched to its agent time. Set-up times are a dimension of the grid.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .collect_parameters import (
    DECODE_TOKENS_PER_S,
    GROUP_SIZE,
    PROMPT_TOKENS,
    TOOL_TOKENS,
    Cell,
)
from .harness import CannotMeasure

BLOCK = 32  # groups drawn at a time
MAX_TURNS = 200

# Fitted to the logs: median and deviation of the logarithm; tools are a body with a share that hits its time limit.
AGENT = (5.57, 0.87)  # seconds
OF_TASK = 0.40  # share of the variance of log agent time that lies between tasks
TURNS = (math.log(17.0), 0.535)  # p50 17, p95 41
TURNS_WITH_TIME = 0.83  # correlation of the logarithms of a run's turns and its time
CALL = (1.37, 0.74)  # seconds
TOOL_LIMIT_S, TOOL_LIMIT_SHARE = 30.0, 0.097
TOOL = (-3.86, 2.58)  # seconds: with the share at the limit, p50 0.03 and p90 23.5
VERIFIER = (math.log(12.0), 1.04)  # seconds: p50 12, p99 134, the middle of the logs' 4 to 35 and 86 to 208


@dataclass(slots=True)
class Trajectory:
    """One episode as it would go on an idle engine with its prefix at hand. Seconds and tokens, by turn."""

    calls: list[float]
    tools: list[float]
    tokens: list[int]  # that the call samples
    context: list[int]  # before the call
    agent_s: float
    verify_s: float
    setup_z: float  # standard normal; a cell makes seconds of it

    def setup_s(self, cell: Cell) -> float:
        return cell.setup_p50_s * math.exp(cell.setup_sigma * self.setup_z)

    @property
    def length(self) -> int:
        """Model tokens."""
        return sum(self.tokens)


class Source(Protocol):
    def block(self, draw: np.random.Generator) -> list[list[Trajectory]]:
        """`BLOCK` groups of `GROUP_SIZE`."""
        ...


class Load:
    """The groups of one seed, drawn as they are asked for and kept: arms that are compared share one."""

    def __init__(self, source: Source, seed: int) -> None:
        self._source, self._seed = source, seed
        self._blocks: list[list[list[Trajectory]]] = []

    def group(self, index: int) -> list[Trajectory]:
        while len(self._blocks) <= index // BLOCK:
            self._blocks.append(self._source.block(np.random.default_rng([self._seed, len(self._blocks)])))
        return self._blocks[index // BLOCK][index % BLOCK]


def _trajectory(calls: np.ndarray[Any, Any], tools: np.ndarray[Any, Any], agent_s: float, verify_s: float,
                setup_z: float) -> Trajectory:  # fmt: skip
    stretch = agent_s / max(float(calls.sum() + tools.sum()), 1e-9)
    calls, tools = calls * stretch, tools * stretch
    tokens = np.maximum(1, np.rint(calls * DECODE_TOKENS_PER_S)).astype(int)
    before = PROMPT_TOKENS + np.concatenate(([0], np.cumsum(tokens + TOOL_TOKENS)[:-1]))
    return Trajectory(calls.tolist(), tools.tolist(), tokens.tolist(), before.tolist(), agent_s, verify_s, setup_z)


class Fitted:
    """Draws from the distributions above."""

    def block(self, draw: np.random.Generator) -> list[list[Trajectory]]:
        shape = (BLOCK, GROUP_SIZE)
        z = math.sqrt(OF_TASK) * draw.standard_normal((BLOCK, 1)) + math.sqrt(1 - OF_TASK) * draw.standard_normal(shape)
        agent = np.exp(AGENT[0] + AGENT[1] * z)
        more = TURNS_WITH_TIME * z + math.sqrt(1 - TURNS_WITH_TIME**2) * draw.standard_normal(shape)
        turns = np.clip(np.rint(np.exp(TURNS[0] + TURNS[1] * more)), 1, MAX_TURNS).astype(int)
        verify = np.exp(VERIFIER[0] + VERIFIER[1] * draw.standard_normal(shape))
        setup = draw.standard_normal(shape)
        count = int(turns.sum())
        calls = np.exp(CALL[0] + CALL[1] * draw.standard_normal(count))
        tools = np.minimum(TOOL_LIMIT_S, np.exp(TOOL[0] + TOOL[1] * draw.standard_normal(count)))
        tools[draw.random(count) < TOOL_LIMIT_SHARE] = TOOL_LIMIT_S
        ends = np.cumsum(turns.ravel()).reshape(shape)
        return [[_trajectory(calls[ends[g, s] - turns[g, s] : ends[g, s]], tools[ends[g, s] - turns[g, s] : ends[g, s]],
                             float(agent[g, s]), float(verify[g, s]), float(setup[g, s]))
                 for s in range(GROUP_SIZE)] for g in range(BLOCK)]  # fmt: skip


Shape = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # calls and tools of a recorded run, seconds


class Traced:
    """Draws trials of a task with replacement, and the turns of recorded runs. Raises CannotMeasure on files that don't
    hold what is needed."""

    def __init__(self, trials: Path, steps: Path) -> None:
        self._trials: dict[str, list[tuple[float, float]]] = {}  # by task: agent and verifier seconds
        for number, row in _rows(trials):
            task, agent, verify = (_field(trials, number, row, name) for name in ("task_id", "agent_s", "test_s"))
            # A trial counts that has all its timings, as the others say nothing of their time.
            if all(row.get(name) is not None for name in ("setup_s", "agent_s", "test_s", "trial_s")) and agent > 0:
                self._trials.setdefault(task, []).append((float(agent), float(verify)))
        self._shapes: dict[str, list[Shape]] = {}
        self._any: list[Shape] = []
        for number, row in _rows(steps):
            task, turns = (_field(steps, number, row, name) for name in ("task_id", "steps"))
            try:
                shape = (np.array([float(turn["llm_s"]) for turn in turns]),
                         np.array([float(turn["tool_s"]) for turn in turns]))  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:
                raise CannotMeasure(f"{steps}, line {number}: each of `steps` needs numbers `llm_s`, `tool_s` "
                                    f"({error!r})") from error  # fmt: skip
            if shape[0].sum() > 0:
                self._shapes.setdefault(task, []).append(shape)
                self._any.append(shape)
        if not self._trials or not self._any:
            raise CannotMeasure(f"{trials} holds {len(self._trials)} tasks with whole trials and {steps} "
                                f"{len(self._any)} runs with model calls; at least one of each is needed")  # fmt: skip
        self._tasks = sorted(self._trials)

    def block(self, draw: np.random.Generator) -> list[list[Trajectory]]:
        return [self._group(self._tasks[int(draw.integers(len(self._tasks)))], draw) for _ in range(BLOCK)]

    def _group(self, task: str, draw: np.random.Generator) -> list[Trajectory]:
        trials, shapes = self._trials[task], self._shapes.get(task, self._any)
        out = []
        for setup_z in draw.standard_normal(GROUP_SIZE):
            agent, verify = trials[int(draw.integers(len(trials)))]
            calls, tools = shapes[int(draw.integers(len(shapes)))]
            out.append(_trajectory(calls, tools, agent, verify, float(setup_z)))
        return out


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotMeasure(f"{path} can't be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CannotMeasure(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise CannotMeasure(f"{path}, line {number}: not a JSON object")
            rows.append((number, row))
    return rows


def _field(path: Path, number: int, row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise CannotMeasure(f"{path}, line {number}: no field `{name}`")
    return row[name]


def source_of(trials: Path | None, steps: Path | None) -> Source:
    if (trials is None) != (steps is None):
        raise CannotMeasure("--trials and --steps belong together: give both, or neither for the fitted distributions")
    return Fitted() if trials is None or steps is None else Traced(trials, steps)



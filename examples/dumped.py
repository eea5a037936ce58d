"""The files into which verl, prime-rl and TRL dump rollouts, read as one kind of record.

- **verl** (`trainer.rollout_data_dir`; 0.9.1, `verl/trainer/ppo/ray_trainer.py`, `_write_generations`): DIR/STEP.jsonl,
  one object a line with `input`, `output`, `gts`, `score`, `step`, and further scalars of the reward function; the
  newer trainer adds `uid` = SAMPLE_ROLLOUT_OUTPUT. Text only.
- **TRL** (`GRPOConfig(log_completions=True)`; 1.16, `trl/trainer/grpo_trainer.py`, `log`):
  DIR/completions/completions_STEP.parquet with `step`, `prompt`, `completion` (text or messages), a column of floats
  for each reward function (their sum is taken for the reward, as with equal weights), and `advantage`. Text only.
- **prime-rl** (`src/prime_rl/orchestrator/types.py`): DIR/rollouts/step_N/train_rollouts.jsonl, one `verifiers` trace a
  line, whose `nodes` hold `token_ids`, `mask` (sampled or not) and `logprobs` (of the sampled ones, rounded to four
  decimals). Where it came from (`kind`, `env_name`, `group_id`, `policy_version`) stands on the trace, in its
  `info.prime_rl`, or in `prime_rl` beside several `traces`, by version.

A policy version is what sampled a rollout. prime-rl says it; verl and TRL don't, and a rollout of step n is taken to be
sampled by version n - 1, which is true as long as they train synchronously.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.schemas.errors import InvalidRecord, SettingsError

Messages = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Text:
    """Prompt and completion as words: their tokens are to be found again."""

    prompt: Messages
    completion: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one source: ids, and for sampled ones a log-probability each (nats)."""

    sampled: bool
    ids: Sequence[int]
    logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    group: str  # siblings have the same, in one dump
    task: str
    version: int
    content: Text | tuple[Turn, ...]
    reward: float | None  # None: the scorer had no verdict
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    failed: str | None = None  # the infrastructure lost it, and why
    reason: str = "finished"
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    left_out: int = 0  # sampled tokens of other branches of its conversation


def read(framework: str, folder: Path) -> Iterator[Rollout]:
    """Every rollout of the dump, siblings one after the other. Raises SettingsError where there is none, InvalidRecord
    that names file and line where one isn't what that framework writes."""
    if framework not in READERS:
        raise SettingsError(f"no dumps of {framework!r}: use one of {', '.join(READERS)}")
    pattern, reader = READERS[framework]
    files = sorted(folder.rglob(pattern), key=lambda file: (_number(file), str(file)))
    if not files:
        raise SettingsError(f"{folder}: no {pattern} in it, which is what {framework} dumps")
    for file in files:
        found = sorted(reader(file), key=lambda rollout: rollout.group)  # stable: siblings keep their order
        yield from found


# -------------------------------------------------------------------------------------------------------- the formats


def _verl(file: Path) -> Iterator[Rollout]:
    for where, row in _lines(file):
        step, uid = _has(row, "step", where), row.get("uid")
        prompt, completion = _has(row, "input", where), _has(row, "output", where)
        session = re.fullmatch(r"(.+)_\d+_\d+", str(uid)) if uid is not None else None
        others = {name: float(value) for name, value in row.items()
                  if name not in ("step", "score") and isinstance(value, int | float)}  # fmt: skip
        yield Rollout(f"{step}/{session[1] if session else prompt}", prompt, max(0, int(step) - 1),
                      Text(prompt, completion), _number_or_none(_has(row, "score", where)), others)  # fmt: skip


def _trl(file: Path) -> Iterator[Rollout]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(file)
    except pa.ArrowInvalid as error:
        raise InvalidRecord(f"{file}: {error}") from error
    rewards = [f.name for f in table.schema if f.name not in ("step", "advantage") and pa.types.is_floating(f.type)]
    rows = [(f"{file}, row {n}", row) for n, row in enumerate(table.to_pylist())]
    siblings = itertools.groupby(rows, key=lambda one: (one[1].get("step"), json.dumps(one[1].get("prompt"))))
    for number, (_, members) in enumerate(siblings):
        for where, row in members:
            step, prompt = _has(row, "step", where), _has(row, "prompt", where)
            said = {name: _number_or_none(row[name]) for name in rewards}
            known = [value for value in said.values() if value is not None]
            yield Rollout(f"{step}/{number:06d}", _words(prompt), max(0, int(step) - 1),
                          Text(prompt, _words(_has(row, "completion", where))), sum(known) if known else None,
                          said)  # fmt: skip


def _prime(file: Path) -> Iterator[Rollout]:
    for where, row in _lines(file):
        for trace in row.get("traces", [row]):
            stamp = row.get("prime_rl") or (trace.get("info") or {}).get("prime_rl") or row
            if stamp.get("kind", "train") == "train":
                yield _trace(trace, stamp, where)


def _trace(trace: Mapping[str, Any], stamp: Mapping[str, Any], where: str) -> Rollout:
    nodes, errors = _has(trace, "nodes", where), trace.get("errors") or []
    path = _last_branch(nodes)
    others = sum(sum(node.get("mask") or ()) for n, node in enumerate(nodes) if n not in path)
    said = {name: _weighed(value) for name, value in (trace.get("rewards") or {}).items()}
    known = [value for value in said.values() if value is not None]
    failed = str(errors[-1].get("type", "error")) if errors else None
    turns = tuple(turn for n in path for turn in _turns(nodes[n], where))
    return Rollout(str(_has(stamp, "group_id", where)), f"{stamp.get('env_name') or 'task'}/{_key(trace)}",
                   int(_has(stamp, "policy_version", where)), turns, None if failed or not known else sum(known), said,
                   failed, str(trace.get("stop_condition") or "finished"), _times(trace.get("timing") or {}),
                   others)  # fmt: skip


def _key(trace: Mapping[str, Any]) -> str:
    task = trace.get("task") or {}
    data = task.get("data") or task
    found = (task.get("key"), data.get("idx"), task.get("hash"), data.get("prompt"))
    return str(next((one for one in found if one is not None), "?"))


def _last_branch(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """From a root to the newest leaf, by `parent`."""
    path: list[int] = []
    at = len(nodes) - 1 if nodes else None
    while at is not None:
        path.append(at)
        at = nodes[at].get("parent")
    return path[::-1]


def _turns(node: Mapping[str, Any], where: str) -> Iterator[Turn]:
    """A message's tokens, cut where the mask changes."""
    ids, mask, logprobs = node.get("token_ids") or [], node.get("mask") or [], list(node.get("logprobs") or [])
    if len(mask) != len(ids) or len(logprobs) != sum(mask):
        raise InvalidRecord(f"{where}: a node has {len(ids)} tokens, {len(mask)} mask bits ({sum(mask)} set) and "
                            f"{len(logprobs)} logprobs")  # fmt: skip
    at = taken = 0
    for sampled, run in itertools.groupby(mask):
        n = len(list(run))
        yield Turn(bool(sampled), ids[at : at + n], logprobs[taken : taken + n] if sampled else ())
        at, taken = at + n, taken + n * bool(sampled)


def _times(timing: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by step, of a trace's spans (seconds since 1970, or durations)."""
    def span(name: str) -> float:
        one = timing.get(name) or {}
        return 1000 * max(0.0, (one.get("end") or 0.0) - (one.get("start") or 0.0))

    agent = timing.get("agent") or {}
    parts = {"sandbox_start": span("boot") + span("setup"), "scorer": span("scoring"),
             **{step: 1000 * float((agent.get(part) or {}).get("duration") or 0.0)
                for step, part in (("decode", "model"), ("environment", "harness"))}}  # fmt: skip
    return {step: ms for step, ms in parts.items() if ms > 0}


READERS: dict[str, tuple[str, Callable[[Path], Iterator[Rollout]]]] = {
    "verl": ("*.jsonl", _verl), "trl": ("completions_*.parquet", _trl), "prime-rl": ("*rollouts.jsonl", _prime),
}  # fmt: skip

# --------------------------------------------------------------------------------------------------------- the pieces


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding="utf-8") as text:
        for number, line in enumerate(text, 1):
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidRecord(f"{where}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise InvalidRecord(f"{where}: not a JSON object")
            yield where, row


def _has(row: Mapping[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise InvalidRecord(f"{where}: it has no `{name}` (it has {', '.join(sorted(row)) or 'nothing'})")
    return row[name]


def _number(file: Path) -> int:
    """The step that a file's name or its folder's ends with."""
    found = re.findall(r"\d+", file.stem) or re.findall(r"\d+", file.parent.name)
    return int(found[-1]) if found else 0


def _number_or_none(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _weighed(value: Any) -> float | None:
    """Of `rewards`: a number, or a score with its weight."""
    if isinstance(value, Mapping):
        value = None if value.get("score") is None else value["score"] * value.get("weight", 1.0)
    return _number_or_none(value)


def _words(content: Messages) -> str:
    return content if isinstance(content, str) else "\n".join(str(one.get("content") or "") for one in content)

"""What a task folder says, in the format of Harbor and Terminal-Bench, and which of it is kept here.

A folder holds `task.toml`, `instruction.md`, `environment/` with its Dockerfile, `tests/test.sh` (which writes the
reward file) and perhaps `solution/solve.sh`. This module decides what the keys of `task.toml` mean, and refuses those
that can't be kept: a task that needs what isn't there must not run as if it didn't. Keys that the format doesn't know
are left out, as its own tools do, and named by `unknown`. There is never a network, whatever `allow_internet` says.

Of our own are two keys: `metadata.sandboxes`, the kinds of sandbox that the task runs in (without it `docker`), and
`metadata.guarded`, paths with which the model has no business (`suspicion`).
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from .errors import InvalidTask

Kind = Literal["docker", "process"]

SPEC, INSTRUCTION, DOCKERFILE, TEST = "task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh"
PARTS = (SPEC, INSTRUCTION, "environment/", "tests/")  # what an episode depends on
MIB = 1 << 20
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}


def _nothing(value: Any) -> Any:
    if value:
        raise ValueError("it can't be kept here: remove it, or leave this task out")
    return value


def _mebibytes(value: Any) -> Any:
    """`2G`, as earlier versions of the format have it."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMGT])i?B?\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    return round(float(found[1]) * _UNITS[found[2].upper()]) if found else value


def _written_out(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if "${" in value:
            raise ValueError(f"{name} asks for a variable of this machine: nothing of it enters a sandbox")
    return variables


Seconds = Annotated[float, Field(gt=0)]
Mebibytes = Annotated[int, BeforeValidator(_mebibytes), Field(ge=1)]
Variables = Annotated[dict[str, str], AfterValidator(_written_out)]
Nothing = Annotated[Any, AfterValidator(_nothing)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class AgentTable(_Table):
    """`[agent]`: seconds of the whole attempt, scoring apart."""

    timeout_sec: Seconds | None = None
    user: Nothing = None


class VerifierTable(_Table):
    """`[verifier]`: seconds and variables of `tests/test.sh`."""

    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: Nothing = None
    environment: Nothing = None


class EnvironmentTable(_Table):
    """`[environment]`: how the image is built, and the limits of a sandbox of it. Of two names of a limit, `memory` and
    `storage` come before `memory_mb` and `storage_mb`."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    cpus: Annotated[float, Field(gt=0)] = 1.0
    memory_mb: Mebibytes = 2048
    storage_mb: Mebibytes = 10240
    memory: Mebibytes | None = None
    storage: Mebibytes | None = None
    env: Variables = {}
    workdir: str | None = None
    allow_internet: bool = False
    network_mode: str | None = None
    gpus: Nothing = None
    gpu_types: Nothing = None
    mcp_servers: Nothing = None
    skills_dir: Nothing = None
    healthcheck: Nothing = None


class MetadataTable(BaseModel):
    """`[metadata]`: any keys; `sandboxes` are the kinds that the task may run in."""

    model_config = ConfigDict(extra="allow", frozen=True)
    sandboxes: tuple[Kind, ...] = ("docker",)
    guarded: tuple[str, ...] = ()


class TaskFile(_Table):
    """A whole `task.toml`."""

    version: str | None = None
    schema_version: str | None = None
    source: str | None = None
    task: dict[str, Any] = {}
    metadata: MetadataTable = MetadataTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: dict[str, Any] = {}
    artifacts: Nothing = None
    steps: Nothing = None
    multi_step_reward_strategy: Any = None

    @model_validator(mode="after")
    def _some_sandbox(self) -> TaskFile:
        if not self.metadata.sandboxes:
            raise ValueError("metadata.sandboxes names no kind: leave it out, or name docker or process")
        return self

    @property
    def memory_bytes(self) -> int:
        """Of a sandbox."""
        return MIB * (self.environment.memory or self.environment.memory_mb)

    @property
    def disk_bytes(self) -> int:
        """Of a sandbox."""
        return MIB * (self.environment.storage or self.environment.storage_mb)


def parse_task(where: str, text: str) -> TaskFile:
    """`where`: the file, for messages. Raises InvalidTask, which names it with the line and the key."""
    try:
        return TaskFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidTask(f"{where}: not valid TOML: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        loc = [str(part) for part in problem["loc"]]
        said = problem["msg"].removeprefix("Value error, ")
        if problem["type"] != "value_error":
            said += f", got {problem['input']!r}"
        line = _line(text, loc)
        at = f", line {line}" if line else ""
        raise InvalidTask(f"{where}{at}: {'.'.join(loc) or '(the file)'}: {said}") from error


def unknown(text: str) -> list[str]:
    """Keys of a valid file that mean nothing here, dotted."""
    tables: dict[str, type[BaseModel]] = {"agent": AgentTable, "verifier": VerifierTable,
                                          "environment": EnvironmentTable}  # fmt: skip
    out = []
    for name, value in tomllib.loads(text).items():
        if name not in TaskFile.model_fields:
            out.append(name)
        elif name in tables and isinstance(value, dict):
            out += [f"{name}.{key}" for key in value if key not in tables[name].model_fields]
    return out


def missing(files: Mapping[str, bytes]) -> str | None:
    """What a folder with these files (by path within it) lacks of a task; None: nothing."""
    needed = [SPEC, INSTRUCTION, TEST]
    return next((name for name in needed if name not in files), None)


def read_folder(folder: Path) -> dict[str, bytes]:
    """What an episode of a task folder depends on, by path within it. Raises OSError."""
    return {name: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
            and (name := file.relative_to(folder).as_posix()).startswith(PARTS)}  # fmt: skip


def digest_of(files: Mapping[str, bytes]) -> str:
    """Of what an episode depends on: 16 hexadecimal digits of a SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.startswith(PARTS):
            digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()[:16]


def _line(text: str, loc: list[str]) -> int | None:
    """The line on which a key stands, or its table where that is all there is."""
    table, best, known = "", None, ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            table = header[1]
            key = table
        elif found := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            key = ".".join(part for part in (table, found[1].strip("\"'")) if part)
        else:
            continue
        if key == ".".join(loc):
            return number
        if len(key) > len(known) and ".".join(loc).startswith(f"{key}."):
            best, known = number, key
    return best

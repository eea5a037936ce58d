"""Configuration files: one TOML file holds the run settings and, under `[site]`, what belongs to this place only.

Run settings decide what is trained and are recorded; site settings (addresses, credentials, paths, devices, counts) are
never recorded. A wrong file is refused with its name, the key and what was expected.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from headrace.consumers.run import BOOTSTRAP_VARIABLE
from headrace.schemas.errors import SettingsError
from headrace.schemas.settings import RunSettings, Section
from headrace.schemas.topics import RunTopics
from headrace.streams.shares import WHOLE

Positive = Annotated[int, Field(ge=1)]


class GatewaySite(Section):
    """Where agents are served."""

    host: str = Field("127.0.0.1", description="address to listen at; keys travel in the clear, so put TLS in front of "
                                               "anything but this machine")  # fmt: skip
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8011, description="0: any that is free")
    public_url: str | None = Field(None, description="how agents reach it, where that isn't http://HOST:PORT")
    token_file: str | None = Field(None, description="holds the admin token, and is made where it is missing; default "
                                   "in the run's state folder; HEADRACE_GATEWAY_TOKEN goes before it")  # fmt: skip
    on_update: Literal["keep", "hold", "abort"] = Field("keep", description="new weights: between two steps of open "
                                                        "requests, after them, or instead of them")  # fmt: skip
    orphan_grace_s: Annotated[float, Field(ge=0)] = Field(
        20.0, description="a request whose client went away is sampled on for so long, since clients ask again"
    )


class RaySite(Section):
    """What `headrace run --ray` places on the cluster, and on which of its nodes."""

    engine: str | None = Field(None, description="resource of which a worker takes 1 (none: a GPU, where `device` is "
                                                 "one, else a resource called `engine`)")  # fmt: skip
    sandbox: str = Field("sandbox", description="resource of which a sandbox host takes 1; give it to nodes without "
                                                "GPUs")  # fmt: skip
    sandbox_hosts: Positive = Field(1, description="sandbox hosts that all workers share, where tasks need sandboxes; "
                                                   "each has `sandboxes` at once")  # fmt: skip


class SiteSettings(Section):
    """What belongs to this place: never recorded, may differ at each start."""

    kafka: dict[str, str | int | bool] = Field(
        default_factory=dict,
        description="client properties (bootstrap.servers, security.protocol, sasl.*, ssl.*); without an address the "
        "development broker is used",
    )
    prefix: str = Field("headrace", description="prefix of topic names, transactional ids and groups")
    state_dir: str | None = Field(None, description="checkpoints and logs of roles; default below HEADRACE_HOME or "
                                                    "~/.local/share/headrace/runs")  # fmt: skip
    workers: Positive = Field(1, description="worker processes that `headrace run` supervises")
    assemblers: Positive = Field(1, description="assembler processes that `headrace run` supervises; each has a fixed "
                                                "share of the partitions")  # fmt: skip
    assembler_share: str = Field(WHOLE, description="i/n: an assembler started here takes partitions i, i + n, ...")
    assembler_memory_mb: Annotated[int, Field(ge=0)] = Field(256, description="memory of an assembler for the spans of "
                                                             "open groups; what goes beyond is read again")  # fmt: skip
    slots: Positive = Field(32, description="sequences that one worker decodes at once")
    device: str = Field("cpu", description="torch device of the worker's engine")
    trainer_device: str = Field("cpu", description="torch device of the trainer")
    engine: Literal["hf", "vllm", "openai"] = Field("hf", description="what a worker samples with: `hf` is built in, "
                                                    "`vllm` runs in its process, `openai` are the servers in "
                                                    "`replicas`")  # fmt: skip
    replicas: tuple[str, ...] = Field((), description="addresses (http://HOST:PORT) of the vLLM servers that engine "
                                                      "`openai` samples with and keeps up to date")  # fmt: skip
    replica_model: str | None = Field(None, description="the name under which they serve the model (none: the only "
                                                        "one there)")  # fmt: skip
    replica_key_file: str | None = Field(None, description="file with the key that they ask for (none: "
                                                           "HEADRACE_REPLICA_KEY, or no key)")  # fmt: skip
    sandboxes: Positive = Field(8, description="sandboxes that one worker has at once, where its tasks need "
                                           "any; on Ray, one sandbox host")  # fmt: skip
    sandboxes_starting: Positive = Field(2, description="of them, being set up at the same time")
    docker: str | None = Field(None, description="address of the Docker daemon (none: DOCKER_HOST, or the usual "
                                                 "socket)")  # fmt: skip
    worker_threads: Positive | None = Field(None, description="CPU threads of a worker (none: torch's choice)")
    trainer_threads: Positive | None = Field(None, description="CPU threads of the trainer; another count gives other "
                                                               "bits (none: torch's choice)")  # fmt: skip
    trainer_processes: Positive = Field(1, description="of a trainer started here, one for each GPU; more than one "
                                                       "run under torchrun and share every tensor (FSDP2); another "
                                                       "count gives other bits")  # fmt: skip
    weights_socket: str | None = Field(None, description="HOST:PORT at which the trainer hands weights to workers and "
                                       "gateways directly, beside the log (none: the log alone); in the clear, so keep "
                                       "it in a network of its own")  # fmt: skip
    gateway: GatewaySite = GatewaySite()
    ray: RaySite = RaySite()
    stop_at: Positive | None = Field(None, description="the version at which to stop; a greater one goes on later")
    max_deaths: Positive = Field(5, description="a process that dies so often without a minute's life ends the run")

    @model_validator(mode="after")
    def _servers_are_named(self) -> SiteSettings:
        if self.engine == "openai" and not self.replicas:
            raise ValueError("engine 'openai' needs `replicas`")
        if len(set(self.replicas)) != len(self.replicas):
            raise ValueError("`replicas` names a server twice")
        return self


class ConfigFile(RunSettings):
    """A whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str = Field(description="run id: lower-case letters, digits, '-', '_'")
    site: SiteSettings = SiteSettings()


_SITE_ONLY = create_model("SiteOnly", __config__=ConfigDict(extra="ignore"), site=(SiteSettings, SiteSettings()))


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration file that was read and validated."""

    run: str
    settings: RunSettings
    site: SiteSettings
    file: Path

    @property
    def topics(self) -> RunTopics:
        return RunTopics(self.run, self.site.prefix)


def load_config(file: Path) -> Config:
    """Raises SettingsError naming file, key and what was expected."""
    found = _validated(ConfigFile, _read(file), file)
    assert isinstance(found, ConfigFile)
    values = {name: getattr(found, name) for name in RunSettings.model_fields}
    model = found.model.model_copy(update={"path": str((file.parent / found.model.path).resolve())})
    tasks = found.tasks
    if tasks.path is not None:
        tasks = tasks.model_copy(update={"path": str((file.parent / tasks.path).resolve())})
    config = Config(found.run, RunSettings(**(values | {"model": model, "tasks": tasks})), found.site, file.resolve())
    _ = config.topics  # a run id that can't be a topic name is refused here
    return config


def load_site(file: Path | None, bootstrap: str | None = None) -> SiteSettings:
    """The `[site]` part of a file alone; the defaults without one. `bootstrap`: Kafka's address, over the file's."""
    site = SiteSettings() if file is None else _validated(_SITE_ONLY, _read(file), file).site  # type: ignore[attr-defined]
    assert isinstance(site, SiteSettings)
    if bootstrap:
        site = site.model_copy(update={"kafka": {**site.kafka, "bootstrap.servers": bootstrap}})
    return site


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        raise SettingsError(f"{file}: no such file") from error
    except IsADirectoryError as error:
        raise SettingsError(f"{file}: a folder; give the TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from error


def _validated(model: type[BaseModel], data: dict[str, Any], file: Path) -> BaseModel:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"]) or "(the file)"
            said = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                said = f"unknown key{_near(model, problem['loc'])}"
            elif problem["type"] not in ("missing", "value_error"):
                said += f", got {problem['input']!r}"
            lines.append(f"{file}: {key}: {said}")
        raise SettingsError("\n".join(lines)) from error


def _near(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """A hint: the known key that looks most like the unknown one."""
    import difflib

    known: Any = model
    for part in loc[:-1]:
        field = known.model_fields.get(str(part)) if isinstance(known, type) and issubclass(known, BaseModel) else None
        known = field.annotation if field is not None else None
    if not (isinstance(known, type) and issubclass(known, BaseModel)):
        return ""
    close = difflib.get_close_matches(str(loc[-1]), list(known.model_fields), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known.model_fields)}"


def describe(value: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, meaning) of every setting."""
    for name, field in type(value).model_fields.items():
        inner = getattr(value, name)
        if isinstance(inner, BaseModel):
            yield from describe(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner, field.description or ""


def differences(recorded: RunSettings, given: RunSettings) -> list[str]:
    """One line for each setting that differs."""
    was = {key: value for key, value, _ in describe(recorded)}
    now = {key: value for key, value, _ in describe(given)}
    return [f"  {key}: the run has {was.get(key)!r}, given {now.get(key)!r}"
            for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]  # fmt: skip


def home() -> Path:
    """Where Headrace keeps what belongs to this user and machine."""
    if own := os.environ.get("HEADRACE_HOME"):
        return Path(own)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "headrace"


def state_dir(site: SiteSettings, run: str) -> Path:
    """Where this machine keeps a run's checkpoints and logs."""
    return (Path(site.state_dir) if site.state_dir else home() / "runs") / run


def kafka_config(site: SiteSettings, start: bool = False) -> dict[str, str | int | bool]:
    """Client properties: the site's, else the address in HEADRACE_BOOTSTRAP_SERVERS, else the development broker's
    (which `start` brings up where it isn't running). Raises BrokerUnreachable."""
    from headrace.schemas.errors import BrokerUnreachable
    from headrace.streams.log.clients import check_broker

    from .broker import broker_status, ensure_broker

    if "bootstrap.servers" in site.kafka:
        kafka = dict(site.kafka)
    elif address := os.environ.get(BOOTSTRAP_VARIABLE):
        kafka = {**site.kafka, "bootstrap.servers": address}
    elif start:
        return {**site.kafka, "bootstrap.servers": ensure_broker()}
    elif broker := broker_status():
        return {**site.kafka, "bootstrap.servers": broker.bootstrap}
    else:
        raise BrokerUnreachable(
            "no broker: the configuration names none and the development broker isn't running; start it with "
            "`headrace broker start`, give --bootstrap HOST:PORT, or set bootstrap.servers under [site.kafka]"
        )
    check_broker(kafka)
    return kafka

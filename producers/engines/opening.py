"""Decides which engine a role drives: the one place that knows every kind, and that asks each whether it may serve."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.schemas.errors import SettingsError
from headrace.schemas.settings import ModelSettings

from . import Engine
from .probe import probe

if TYPE_CHECKING:
    from .openai import OpenAIReplica
    from .served import ModelFolder

Kind = Literal["hf", "vllm", "openai"]
KEY_VARIABLE = "HEADRACE_REPLICA_KEY"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What belongs to a place, not to a run. `slots`: requests that decode at once, on each replica where there are
    several. `replicas`: addresses of servers, for kind `openai`; `served_as`: the model's name there (None: the only
    one); `key_file`: holds the key that they ask for (else the variable HEADRACE_REPLICA_KEY)."""

    kind: Kind = "hf"
    slots: int = 32
    device: str = "cpu"
    replicas: tuple[str, ...] = ()
    served_as: str | None = None
    key_file: str | None = None


def open_engine(model: ModelSettings, choice: EngineChoice) -> Engine:
    """An engine that serves version 0 and has passed the probe. Raises ModelError, ReplicaLost or SettingsError."""
    engine = _open(model, choice)
    try:
        probe(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def _open(model: ModelSettings, choice: EngineChoice) -> Engine:
    if model.lora is not None and choice.kind != "hf":
        raise SettingsError(f"model.lora: engine {choice.kind!r} can't serve an adapter that changes; set site.engine "
                            "= 'hf', or train all weights")  # fmt: skip
    if model.replay_routing and choice.kind != "hf":
        raise SettingsError(f"model.replay_routing: engine {choice.kind!r} doesn't record which experts tokens go "
                            "through; set site.engine = 'hf', or leave it off")  # fmt: skip
    if choice.kind == "openai":
        from .remote import RemoteEngine
        from .served import ModelFolder

        folder = ModelFolder(model.path, model.dtype)
        replicas = open_replicas(choice, folder)
        facts = {"engine": "openai", "replicas": ",".join(one.name for one in replicas)}
        return RemoteEngine(replicas, folder, slots=choice.slots * len(replicas), max_tokens=model.max_length,
                            facts=facts)  # fmt: skip
    own: dict[str, Any] = {"slots": choice.slots, "max_tokens": model.max_length, "dtype": model.dtype,
                           "compute_dtype": model.compute_dtype, "device": choice.device}  # fmt: skip
    if choice.kind == "vllm":
        if (model.head_dtype, model.quantisation) != ("compute", "none"):
            raise SettingsError("site.engine = 'vllm' computes its head in model.compute_dtype and serves published "
                                "weights: model.head_dtype and model.quantisation are for engine 'hf'")  # fmt: skip
        from .vllm import VllmEngine

        return VllmEngine(model.path, **own)
    from .hf import HfEngine

    return HfEngine(model.path, **own, head_dtype=model.head_dtype, quantisation=model.quantisation, lora=model.lora,
                    record_experts=model.replay_routing)  # fmt: skip


def open_replicas(choice: EngineChoice, folder: ModelFolder | None = None) -> list[OpenAIReplica]:
    """One replica for each address, not connected yet. Without `folder` their weights stay as they are. Raises
    SettingsError without addresses."""
    from .openai import OpenAIReplica

    if not choice.replicas:
        raise SettingsError("site.engine = 'openai' needs the addresses of its servers in site.replicas")
    key = replica_key(choice.key_file)
    return [OpenAIReplica(address, model=choice.served_as, api_key=key, capacity=choice.slots, folder=folder)
            for address in choice.replicas]  # fmt: skip


def replica_key(file: str | None) -> str | None:
    """The key, which is never logged. Raises SettingsError where the file can't be read or is empty."""
    if file is None:
        return os.environ.get(KEY_VARIABLE)
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"site.replica_key_file {file} can't be read: {error}") from error
    if not key:
        raise SettingsError(f"site.replica_key_file {file} is empty")
    return key

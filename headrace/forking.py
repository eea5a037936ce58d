"""`headrace create CONFIG --from RUN@VERSION`: what a fork begins with, put where its processes will look for it.

1. The version's train state, proved against the log (trained again from a checkpoint where need be). 2. Its served
weights as a model folder at the fork's `model.path`, which is its version 0. 3. Masters and optimizer in the fork's
state folder. 4. Only then the run's first records, so that a fork that exists is whole; all of it is safe to repeat.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.schemas import delta
from headrace.schemas.codec import decode, kind_of
from headrace.schemas.errors import ModelError, SettingsError
from headrace.schemas.events import FORK, Derived, Lease, Manifest
from headrace.schemas.topics import BATCHES, TASKS, RunTopics
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range

from .models import whole_folder
from .settings import Config, state_dir

if TYPE_CHECKING:
    from headrace.trainer.step import TrainState

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def prepare_fork(kafka: Mapping[str, Any], loaded: Config, parent: str) -> Callable[..., Derived]:
    """What `create_run` needs to record the fork. Raises SettingsError, RunNotFound, ModelError, ReplayMismatch,
    DataLossError, CheckpointError."""
    import torch

    from headrace.trainer.checkpoint import save_origin
    from headrace.trainer.replay import Replay, derived

    run, at, number = parent.rpartition("@")
    if not at or not number.isdecimal():
        raise SettingsError(f"--from {parent!r}: give RUN@VERSION")
    if run == loaded.run:
        raise SettingsError(f"--from {parent!r}: a fork needs a run id of its own, and CONFIG names the same one")
    topics = RunTopics(run, loaded.site.prefix)
    if loaded.site.trainer_threads is not None:
        torch.set_num_threads(loaded.site.trainer_threads)
    torch.use_deterministic_algorithms(True)
    with Replay(kafka, topics, state_dir(loaded.site, run), loaded.site.trainer_device) as replay:
        theirs, ours = replay.settings.model, loaded.settings.model
        if theirs.dtype != ours.dtype:
            raise SettingsError(f"model.dtype is {ours.dtype!r}, and {run!r} publishes {theirs.dtype!r}: a fork keeps "
                                "it")  # fmt: skip
        if theirs.lora is not None:
            raise SettingsError(f"{run!r} trains an adapter, whose weights alone are on its log: begin a new run from "
                                "its base model instead")  # fmt: skip
        state, recorded = replay.state_at(int(number)), replay.version(int(number))
        _model_folder(Path(ours.path), Path(theirs.path), state, recorded.served_hash, parent)
        save_origin(state_dir(loaded.site, loaded.run), *state.state_tensors())
        cursor = max(replay.cursor, _cursor(kafka, topics, int(number)))
    return derived(FORK, run, recorded, cursor=cursor)


def _model_folder(path: Path, source: Path, state: TrainState, served_hash: bytes, parent: str) -> None:
    """Served weights with the parent's configuration and tokenizer. Raises ModelError where `path` holds others."""
    from headrace.trainer.model import load_model
    from headrace.trainer.step import DTYPES, TrainState

    dtype = state.state_tensors()[1]["dtype"]
    if path.exists():
        found = delta.state_hash(delta.as_state(TrainState(path, dtype=dtype).served_bits(), dtype))
        if found != served_hash:
            raise ModelError(f"model.path: {path}: it exists and holds other weights than {parent}, which a fork puts "
                             "there: name a folder that doesn't exist yet")  # fmt: skip
        return
    model = load_model(source).to(DTYPES[dtype])
    state.copy_served(model)
    model.config.dtype = DTYPES[dtype]
    with whole_folder(path) as draft:
        for file in source.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copy(file, draft / file.name)
        model.save_pretrained(draft)


def _cursor(kafka: Mapping[str, Any], topics: RunTopics, version: int) -> int:
    """Where the tasks went on behind the newest one whose group had been in a batch by then."""
    trained: set[str] = set()
    for record in _all(kafka, topics.name(BATCHES)):
        event = decode(record.value) if kind_of(record.value) is Manifest else None
        if isinstance(event, Manifest) and event.batch <= version:
            trained |= {ref.group for ref in event.groups}
    cursor = 0
    for record in _all(kafka, topics.name(TASKS)):
        event = decode(record.value) if kind_of(record.value) is Lease else None
        if isinstance(event, Lease) and event.opens and event.group in trained:
            cursor = max(cursor, event.cursor)
    return cursor


def _all(kafka: Mapping[str, Any], name: str) -> Any:
    return read_range(kafka, name, 0, beginning_offsets(kafka, name)[0], end_offsets(kafka, name)[0])

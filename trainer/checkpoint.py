"""Decides which saved train state is good: a whole one, whose version and hash are on the log.

A checkpoint is a cache of the log, never a truth of its own: one that is damaged, or that another history wrote, is
named and skipped, and what follows the newest good one is trained again from the manifests.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from headrace.schemas import delta
from headrace.schemas.errors import CheckpointError
from headrace.schemas.events import Derived
from headrace.schemas.hashes import digest

log = logging.getLogger("headrace.trainer")

SUFFIX = ".safetensors"
DRAFT = ".draft"
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A train state as it was saved: flat name -> tensor, and metadata of strings."""

    file: Path
    version: int
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


def train_hash(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """16 bytes (`delta.TREE_ALGORITHM`) over everything that decides the next step: masters, moments, steps taken."""
    arrays: dict[str, NDArray[Any]] = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    arrays["optimizer_steps"] = np.array(int(metadata["optimizer_steps"]), np.int64)
    return delta.tree_hash(arrays)


class Checkpoints:
    """The saved train states of one run, in a folder of their own. One process writes at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def save(self, version: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Path:
        """Write aside, make durable, rename, then forget the oldest. `metadata` gets its own checksum."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left_over in self._folder.glob(f"*{DRAFT}"):
            left_over.unlink()
        file = self._folder / f"{version:08d}{SUFFIX}"
        draft = file.with_suffix(DRAFT)
        _write(draft, tensors, {**metadata, "checksum": _checksum(metadata)})
        os.replace(draft, file)
        _sync(self._folder)
        for old in self._files()[: -self._keep]:
            old.unlink()
        return file

    def newest(self, known: Mapping[int, bytes], at_most: int | None = None) -> Checkpoint | None:
        """The newest whole one (of a version `at_most`) whose version and train hash are in `known`; None where there
        is none."""
        for file in reversed(self._files()):
            if at_most is not None and int(file.stem) > at_most:
                continue
            try:
                return _load(file, known)
            except CheckpointError as error:
                log.warning("checkpoint %s is not used: %s", file, error)
        return None

    def _files(self) -> list[Path]:
        return sorted(f for f in self._folder.glob(f"*{SUFFIX}") if f.stem.isdigit())


ORIGIN = "origin"  # beside the checkpoints, and never forgotten: a fork begins there


def save_origin(state_dir: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Path:
    """The train state with which a fork begins, as its version 0."""
    return Checkpoints(state_dir / ORIGIN, 1).save(0, tensors, {**metadata, "version": "0"})


def origin(state_dir: Path, derived: Derived) -> Checkpoint:
    """The train state with which a fork begins. Raises CheckpointError where it isn't there, whole."""
    found = Checkpoints(state_dir / ORIGIN, 1).newest({0: derived.train_hash})
    if found is None:
        raise CheckpointError(f"{state_dir / ORIGIN}: holds no whole train state of version {derived.version} of run "
                              f"{derived.parent!r}, with which this fork begins: `headrace create CONFIG --from "
                              f"{derived.parent}@{derived.version}` with this state folder makes it again")  # fmt: skip
    return found


def _load(file: Path, known: Mapping[int, bytes]) -> Checkpoint:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata: dict[str, str] = dict(opened.metadata() or {})
            if metadata.pop("checksum", "") != _checksum(metadata):
                raise CheckpointError("its metadata was altered")
            version = int(metadata["version"])
            if version not in known:
                raise CheckpointError(f"the log holds no version {version}")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        found = train_hash(tensors, metadata)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"it can't be read ({error})") from error
    if found != known[version]:
        raise CheckpointError(f"it holds state {found.hex()}, the log has {known[version].hex()} as version {version}")
    return Checkpoint(file, version, tensors, metadata)


def _write(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """A durable safetensors file, straight from the tensors' memory. The library's own writer copies all of it first
    and hands the kernel whole tensors, which takes several times as long as small pieces do."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    columns = []
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}: a train state is float32")
        columns.append(tensor.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8))
        start, end = end, end + columns[-1].size
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(file, "wb", buffering=PIECE) as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for column in columns:
            for at in range(0, column.size, PIECE):
                out.write(column[at : at + PIECE].data)
        out.flush()
        os.fsync(out.fileno())


def _checksum(metadata: Mapping[str, str]) -> str:
    return digest(json.dumps(dict(metadata), sort_keys=True).encode()).hex()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

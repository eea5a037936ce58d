"""A checkpoint is used only when it is whole and the log knows it; otherwise the one before it is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.trainer import checkpoint
from headrace.trainer.checkpoint import Checkpoints, train_hash

Tensors = dict[str, torch.Tensor]


def state(seed: int) -> tuple[Tensors, dict[str, str]]:
    generator = torch.Generator().manual_seed(seed)
    names = ("master.w", "exp_avg.w", "exp_avg_sq.w")
    tensors = {name: torch.randn(40, 7, generator=generator) for name in names}
    tensors["master.scalar"] = torch.tensor(float(seed))
    return tensors, {"version": str(seed), "optimizer_steps": str(seed), "format": "test"}


def saved(folder: Path, versions: range, keep: int = 9) -> tuple[Checkpoints, dict[int, bytes]]:
    checkpoints = Checkpoints(folder, keep)
    known = {}
    for version in versions:
        tensors, metadata = state(version)
        checkpoints.save(version, tensors, metadata)
        known[version] = train_hash(tensors, metadata)
    return checkpoints, known


def test_newest_one_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoints, known = saved(tmp_path / "c", range(1, 4))
    found = checkpoints.newest(known)
    tensors, metadata = state(3)
    assert found is not None and (found.version, found.metadata) == (3, metadata)
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)


def test_folder_without_checkpoints_gives_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "missing", 2).newest({1: b""}) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 12), keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["00000010.safetensors", "00000011.safetensors"]


def test_version_that_the_log_does_not_hold_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint written before a commit that never happened."""
    checkpoints, known = saved(tmp_path, range(1, 4))
    del known[3]
    with caplog.at_level(logging.WARNING):
        found = checkpoints.newest(known)
    assert found is not None and found.version == 2
    assert "00000003.safetensors" in caplog.text and "no version 3" in caplog.text


def test_checkpoint_of_another_history_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, known = saved(tmp_path, range(1, 4))
    known[3] = train_hash(*state(99))
    found = checkpoints.newest(known)
    assert found is not None and found.version == 2
    assert "the log has" in caplog.text


def test_any_damage_is_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes flipped anywhere (header, metadata, tensors), a file cut short, an empty one."""
    checkpoints, known = saved(tmp_path, range(1, 3))
    file = tmp_path / "00000002.safetensors"
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for trial in range(120):
        data = bytearray(whole)
        match trial % 3:
            case 0:
                data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            case 1:
                data[int(rng.integers(600))] ^= 1 << int(rng.integers(8))  # the header
            case _:
                del data[int(rng.integers(len(data))) :]
        file.write_bytes(data)
        caplog.clear()
        found = checkpoints.newest(known)
        assert found is not None
        # Spaces that pad the header are the only bytes that may change without consequence.
        if found.version == 2:
            tensors, metadata = state(2)
            assert found.metadata == metadata and all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)
        else:
            assert found.version == 1 and "00000002.safetensors" in caplog.text


def test_write_that_dies_leaves_the_one_before_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, known = saved(tmp_path, range(1, 3))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    tensors, metadata = state(3)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(3, tensors, metadata)
    monkeypatch.undo()
    known[3] = train_hash(tensors, metadata)
    found = checkpoints.newest(known)
    assert found is not None and found.version == 2
    checkpoints.save(4, *state(4))
    assert not list(tmp_path.glob(f"*{checkpoint.DRAFT}")), "the draft that was left behind is gone"


def test_train_hash_covers_steps_and_every_tensor() -> None:
    tensors, metadata = state(5)
    hashes = {train_hash(tensors, metadata), train_hash(tensors, {**metadata, "optimizer_steps": "6"})}
    for name in tensors:
        changed = {n: t.clone() for n, t in tensors.items()}
        changed[name].view(-1)[0] += 1
        hashes.add(train_hash(changed, metadata))
    assert len(hashes) == 2 + len(tensors)

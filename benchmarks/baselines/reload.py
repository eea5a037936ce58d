"""Weights as most systems send them: a whole checkpoint, written by the trainer and loaded by each replica.

As an expert would do it here: bfloat16 safetensors; the replica maps the file and copies tensor after tensor to its
place, without building a second model. The file is in the page cache, which flatters it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file


def save(file: Path, bits: Mapping[str, NDArray[np.uint16]]) -> int:
    """Write the weights durably; bytes of the file."""
    save_file(dict(bits), file)
    with open(file, "rb") as written:
        os.fsync(written.fileno())
    return file.stat().st_size


def load(file: Path, place: Callable[[str, NDArray[Any]], None]) -> None:
    """Hand each tensor's bits to `place`."""
    with safe_open(file, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118
            place(name, opened.get_tensor(name))

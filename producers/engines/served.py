"""The served weights as an engine's owner sees them: bits in the published dtype, and what may be written over them.

Every engine keeps such a copy beside whatever form its model computes in, so that a weight receiver can prove what is
served and what a change would make of it before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import WeightsRefused

from . import Changes


def check_changes(version: int, served_version: int, bits: Mapping[str, NDArray[Any]], changes: Changes) -> None:
    """All that can be wrong with an update of `bits` (name -> served bits). Raises WeightsRefused; nothing is
    written."""
    if version <= served_version:
        raise WeightsRefused(f"version {version} can't follow version {served_version}, which is served here")
    for name, (positions, values) in changes.items():
        if name not in bits:
            raise WeightsRefused(f"tensor {name!r} is not one that this engine serves")
        served = bits[name]
        if values.dtype != served.dtype:
            raise WeightsRefused(f"tensor {name!r}: values of type {values.dtype}, served are {served.dtype}")
        if positions is None:
            if values.size != served.size:
                raise WeightsRefused(f"tensor {name!r}: {values.size} values for {served.size} positions")
            continue
        if positions.dtype != np.int64 or positions.ndim != 1 or positions.shape != values.shape:
            raise WeightsRefused(f"tensor {name!r}: positions must be int64 [n], and values as many")
        if positions.size and (positions.min() < 0 or positions.max() >= served.size):
            raise WeightsRefused(f"tensor {name!r}: a position lies outside its {served.size} values")


def write_changes(bits: Mapping[str, NDArray[Any]], changes: Changes) -> None:
    """Overwrite `bits` in place with changes that were checked."""
    for name, (positions, values) in changes.items():
        flat = bits[name].reshape(-1)
        flat[slice(None) if positions is None else positions] = values.reshape(-1)


def read_only(bits: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Live views that can't be written through."""
    views = {name: array.view() for name, array in bits.items()}
    for view in views.values():
        view.flags.writeable = False
    return views

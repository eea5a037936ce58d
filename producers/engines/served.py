"""The served weights as an engine's owner sees them: bits in the published dtype, and what may be written over them.

Every engine keeps such a copy beside whatever form its model computes in, so that a weight receiver can prove what is
served and what a change would make of it before anything is written.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.adapter import inject
from headrace.schemas.errors import WeightsRefused
from headrace.schemas.settings import LoraSettings

from . import Changes

MESSAGE_BYTES = 64 << 20


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


def refuse_nan(version: int, changes: Changes, dtype: str) -> None:
    """A NaN means "unchanged" to vLLM's loader of sparse updates. Raises WeightsRefused."""
    for name, (_, values) in changes.items():
        if np.isnan(_as_floats(values, dtype)).any():
            raise WeightsRefused(f"tensor {name!r}: version {version} holds values that are not numbers")


def write_changes(bits: Mapping[str, NDArray[Any]], changes: Changes) -> None:
    """Overwrite `bits` in place with changes that were checked."""
    for name, (positions, values) in changes.items():
        flat = bits[name].reshape(-1)
        if positions is None:
            flat[:] = values.reshape(-1)
        else:
            delta.put(flat, positions, values)


def read_only(bits: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Live views that can't be written through."""
    views = {name: array.view() for name, array in bits.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


class ModelFolder:
    """A model folder as the trainer reads it: names and bits (in the published dtype) of its tensors, its tokenizer
    and its sizes. `rounded`: the published dtype doesn't hold the folder's values exactly. With `lora` the tensors are
    those of the adapter."""

    def __init__(self, path: str | Path, dtype: str, lora: LoraSettings | None = None):
        # Only what opens a folder needs torch.
        from .hf import BITS, DTYPES, eos_ids, load_model

        self.dtype = dtype
        model, self.tokenizer = load_model(path, "float32", "cpu")
        self.bits: dict[str, NDArray[Any]] = {}
        self.rounded = False
        parameters = model.named_parameters() if lora is None else inject(model, lora).items()
        for name, parameter in parameters:
            served = parameter.detach().to(DTYPES[dtype]).contiguous()
            self.rounded = self.rounded or not bool((served.float() == parameter).all())
            self.bits[name] = served.view(BITS[served.dtype]).numpy().reshape(served.shape).copy()
        self.eos_ids = eos_ids(model, self.tokenizer)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._config = model.config.get_text_config()
        self.positions: int | None = getattr(self._config, "max_position_embeddings", None)

    def cache_bytes_per_token(self, compute_dtype: str) -> int:
        """Keys and values of all layers."""
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * width * (4 if compute_dtype == "float32" else 2))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


# One tensor of an update on its way to another process: name, shape, positions (int64, little-endian; None for the
# whole tensor), values (in the published dtype).
Part = tuple[str, tuple[int, ...], bytes | None, bytes]


def messages(bits: Mapping[str, NDArray[Any]], changes: Changes) -> Iterator[list[Part]]:
    """An update in lists of about `MESSAGE_BYTES`; a tensor is never split."""
    parts: list[Part] = []
    size = 0
    for name, (positions, values) in changes.items():
        where = None if positions is None else positions.astype("<i8").tobytes()
        parts.append((name, bits[name].shape, where, values.tobytes()))
        size += values.nbytes + len(where or b"")
        if size > MESSAGE_BYTES:
            yield parts
            parts, size = [], 0
    if parts:
        yield parts


def as_text(parts: Sequence[Part]) -> str:
    """An update's message for a door that only takes text."""
    return json.dumps([(name, shape, None if where is None else base64.b64encode(where).decode(),
                        base64.b64encode(values).decode()) for name, shape, where, values in parts])  # fmt: skip


def from_text(text: str) -> list[Part]:
    """What `to_text` wrote."""
    return [(name, tuple(shape), None if where is None else base64.b64decode(where), base64.b64decode(values))
            for name, shape, where, values in json.loads(text)]  # fmt: skip


def whole(bits: Mapping[str, NDArray[Any]]) -> Changes:
    """The update that makes all of `bits` anew."""
    return {name: (None, array) for name, array in bits.items()}


def _as_floats(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Published bits as numbers."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == "float16" else np.float32)

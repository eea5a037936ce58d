"""How records and rows are shown: JSON for programs, aligned columns for people.

Token columns become lists; digests hex; large payloads only their size, unless the bytes themselves are asked for.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.schemas.codec import to_plain
from headrace.schemas.columns import unpack_float32, unpack_int32, unpack_int64
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import DeadLetter, Event, Manifest, Position, Span
from headrace.schemas.topics import RunTopics
from headrace.streams.log.reader import Record

HASH_BYTES = 32  # what is no longer is shown in hex

_Unpack = Callable[[bytes], Any]
_INT32: _Unpack = lambda data: unpack_int32(data).tolist()  # noqa: E731
_INT64: _Unpack = lambda data: unpack_int64(data).tolist()  # noqa: E731
_FLOAT32: _Unpack = lambda data: [round(value, 7) for value in unpack_float32(data).tolist()]  # noqa: E731
_UINT8: _Unpack = lambda data: np.frombuffer(data, np.uint8).tolist()  # noqa: E731
_TEXT: _Unpack = lambda data: data.decode(errors="backslashreplace")  # noqa: E731

_COLUMNS: Mapping[type, Mapping[str, _Unpack]] = {
    Span: {"tokens": _INT32, "logprobs": _FLOAT32, "mask": _UINT8, "entropies": _FLOAT32},
    Position: {"gaps": _INT64, "crcs": _INT64},
    Manifest: {
        "segment_group": _INT32, "segment_slot": _INT32, "segment_version": _INT32, "segment_count": _INT32,
        "segment_drift": _FLOAT32, "segment_weight": _FLOAT32,
    },
    DeadLetter: {"key": _TEXT, "value": _TEXT},
}  # fmt: skip


def record_row(
    record: Record, event: Event | UndecodableRecord, topics: RunTopics, raw: bool = False
) -> dict[str, Any]:
    """A record with its place, time and contents, as JSON holds it."""
    row: dict[str, Any] = {
        "topic": topics.short(record.topic), "partition": record.partition, "offset": record.offset,
        "time_ms": record.timestamp_ms, "key": record.key.decode(errors="backslashreplace") if record.key else None,
    }  # fmt: skip
    if isinstance(event, UndecodableRecord):
        value = None if record.value is None else base64.b64encode(record.value).decode()
        return row | {"kind": None, "error": str(event), "value": value}
    return row | {"kind": type(event).__name__, "event": event_row(event, raw)}


def event_row(event: Event, raw: bool = False) -> dict[str, Any]:
    """An event's fields. `raw` leaves bytes as they are, in base64."""
    columns = {} if raw else _COLUMNS.get(type(event), {})
    row = to_plain(event)
    for name, unpack in columns.items():
        if row[name] is not None:
            try:
                row[name] = unpack(row[name])
            except ValueError:
                row[name] = f"<damaged: {len(row[name])} bytes>"
    shown = jsonable(row, raw)
    assert isinstance(shown, dict)
    return shown


def jsonable(value: Any, raw: bool = False) -> Any:
    """Bytes as hex, size or base64; numbers that JSON lacks as null; dataclasses as objects."""
    if isinstance(value, bytes):
        if raw:
            return base64.b64encode(value).decode()
        return value.hex() if len(value) <= HASH_BYTES else f"<{len(value)} bytes>"
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name), raw) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            k if isinstance(k, str) else " ".join(k) if isinstance(k, tuple) else str(k): jsonable(v, raw)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [jsonable(item, raw) for item in value]
    return value


def dumps(value: Any) -> str:
    return json.dumps(jsonable(value), ensure_ascii=False)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """A heading and one line a row; numbers to the right, columns that are empty throughout left out."""
    names = [name for name in (dict.fromkeys(n for row in rows for n in row)) if any(_text(name, r) for r in rows)]
    if not names:
        return
    texts = [[_text(name, row) for name in names] for row in rows]
    heads = [name.removesuffix("_ms") for name in names]
    widths = [max(len(heads[i]), *(len(line[i]) for line in texts)) for i in range(len(names))]
    right = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]
    for line in (heads, *texts):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        yield "  ".join(cells).rstrip()


def _text(name: str, row: Mapping[str, Any]) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if name.endswith("_ms"):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value / 1000))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text[:12] if name == "hash" else text

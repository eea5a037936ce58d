"""How records and rows are shown: JSON for programs, aligned columns for people.

Token columns become lists; digests hex; large payloads only their size, unless the bytes themselves are asked for.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.consumers.letters import origin
from headrace.schemas.codec import to_plain
from headrace.schemas.columns import unpack_float32, unpack_ids, unpack_int32, unpack_int64
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import DeadLetter, Event, Manifest, Position, Span
from headrace.schemas.topics import RunTopics
from headrace.streams.log.reader import Record

HASH_BYTES = 32  # what is no longer is shown in hex
DUMP_BYTES = 128
SHORT_TEXT = 60  # characters of a field

_Unpack = Callable[[bytes], Any]
_INT32: _Unpack = lambda data: unpack_int32(data).tolist()  # noqa: E731
_INT64: _Unpack = lambda data: unpack_int64(data).tolist()  # noqa: E731
_FLOAT32: _Unpack = lambda data: [round(value, 7) for value in unpack_float32(data).tolist()]  # noqa: E731
_UINT8: _Unpack = lambda data: np.frombuffer(data, np.uint8).tolist()  # noqa: E731
_BASE64: _Unpack = lambda data: base64.b64encode(data).decode()  # noqa: E731

_COLUMNS: Mapping[type, Mapping[str, _Unpack]] = {
    Span: {"logprobs": _FLOAT32, "mask": _UINT8, "entropies": _FLOAT32},
    Position: {"gaps": _INT64, "crcs": _INT64},
    Manifest: {
        "segment_group": _INT32, "segment_slot": _INT32, "segment_version": _INT32, "segment_count": _INT32,
        "segment_drift": _FLOAT32, "segment_weight": _FLOAT32, "segment_extrapolated": _INT32,
    },
    DeadLetter: {"key": _BASE64, "value": _BASE64},  # whatever they are, they must survive the print
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
    if isinstance(event, DeadLetter):
        row["origin"] = origin(event)
    return row | {"kind": type(event).__name__, "event": event_row(event, raw)}


def record_text(record: Record, event: Event | UndecodableRecord, topics: RunTopics) -> Iterator[str]:
    """A record for people: its address, time and kind, and what it says; of bytes that nobody could use, a dump."""
    where = f"{topics.short(record.topic)}[{record.partition}]@{record.offset}"
    head = f"{where}  {_text('time_ms', {'time_ms': record.timestamp_ms})}"
    if isinstance(event, UndecodableRecord):
        yield f"{head}  {event}"
        yield from hexdump(record.value)
    elif isinstance(event, DeadLetter):
        yield f"{head}  DeadLetter about {origin(event)}  {event.kind}: {event.reason}"
        yield from hexdump(event.value)
    else:
        said = " ".join(f"{name}={_short(value)}" for name, value in event_row(event).items() if value is not None)
        yield f"{head}  {type(event).__name__}  {said}"


def hexdump(data: bytes | None, limit: int = DUMP_BYTES) -> Iterator[str]:
    """The first `limit` bytes, 16 a line, with their ASCII beside them."""
    if data is None:
        yield "    no value"
        return
    for at in range(0, min(limit, len(data)), 16):
        line = data[at : min(at + 16, limit)]
        seen = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        yield f"    {at:04x}  {line.hex(' '):47}  {seen}"
    if len(data) > limit:
        yield f"    {len(data) - limit} more bytes"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else dumps(value)
    return text if len(text) <= SHORT_TEXT else f"{text[:SHORT_TEXT]}..."


def event_row(event: Event, raw: bool = False) -> dict[str, Any]:
    """An event's fields. `raw` leaves bytes as they are, in base64."""
    columns = {} if raw else dict(_COLUMNS.get(type(event), {}))
    if isinstance(event, Span) and not raw:
        count = event.count  # without which a column of ids can't be read
        columns["tokens"] = lambda data: unpack_ids(data, count).tolist()
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
    """One line of JSON, with what JSON has no form for made plain (`jsonable`)."""
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

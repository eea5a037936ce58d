"""The one place that turns records into bytes and back: Avro single-object encoding.

Ten bytes (0xC3 0x01 and the schema's CRC-64-AVRO fingerprint, little-endian), then the Avro body, so no registry is
needed. `avro/<Name>.avsc` is what we write; `avro/<Name>.v<k>.avsc` are schemas that were written before and are still
read. Kafka compresses; we don't.
"""

from __future__ import annotations

import io
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import resources
from typing import Any, Union, get_args, get_origin, get_type_hints

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from . import events
from .errors import UndecodableRecord
from .events import Event

MARKER = b"\xc3\x01"
HEADER = 10

Plain = Any  # what fastavro reads and writes


@dataclass(frozen=True, slots=True)
class _Kind:
    cls: type
    schema: Any
    header: bytes
    dump: Callable[[Any], Plain]
    load: Callable[[Plain], Any]


def schema_header(schema: Any) -> bytes:
    """The ten bytes that precede a body written with `schema`."""
    rabin = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return MARKER + bytes.fromhex(rabin)  # fastavro prints the fingerprint's little-endian bytes


def _identity(value: Plain) -> Plain:
    return value


def _converters(hint: Any) -> tuple[Callable[[Any], Plain], Callable[[Plain], Any]]:
    """(to plain, from plain) for a type hint; identity where fastavro's own types are ours."""
    if is_dataclass(hint):
        return _class_converters(typing.cast(type, hint))
    origin = get_origin(hint)
    if origin is tuple:
        dump, load = _converters(get_args(hint)[0])
        if dump is _identity:
            return list, tuple
        return (lambda value: [dump(v) for v in value]), (lambda value: tuple(load(v) for v in value))
    if origin in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        dump, load = _converters(inner[0])
        if dump is _identity:
            return _identity, _identity
        return (lambda v: None if v is None else dump(v)), (lambda v: None if v is None else load(v))
    return _identity, _identity


@cache
def _class_converters(cls: type) -> tuple[Callable[[Any], Plain], Callable[[Plain], Any]]:
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    special = {name: pair for name in names if (pair := _converters(hints[name]))[0] is not _identity}
    dumps = [(name, special[name][0] if name in special else None) for name in names]
    loads = [(name, pair[1]) for name, pair in special.items()]

    def dump(value: Any) -> Plain:
        return {n: getattr(value, n) if d is None else d(getattr(value, n)) for n, d in dumps}

    def load(plain: Plain) -> Any:
        for name, convert in loads:
            plain[name] = convert(plain[name])
        return cls(**plain)

    return dump, load


@cache
def _registry() -> tuple[dict[type, _Kind], dict[bytes, tuple[Any, _Kind]]]:
    """Kinds by class, and (writer's schema, kind) by header."""
    files = {f.name: json.loads(f.read_text()) for f in (resources.files(__package__) / "avro").iterdir()
             if f.name.endswith(".avsc")}  # fmt: skip
    by_class: dict[type, _Kind] = {}
    by_header: dict[bytes, tuple[Any, _Kind]] = {}
    for cls in get_args(Event):
        schema = fastavro.parse_schema(files[f"{cls.__name__}.avsc"])
        dump, load = _class_converters(cls)
        kind = _Kind(cls, schema, schema_header(files[f"{cls.__name__}.avsc"]), dump, load)
        by_class[cls] = kind
        by_header[kind.header] = (schema, kind)
        for name, old in files.items():
            if name.startswith(f"{cls.__name__}.v"):
                by_header[schema_header(old)] = (fastavro.parse_schema(old), kind)
    return by_class, by_header


def encode(event: Event) -> bytes:
    """A record as bytes. Raises TypeError or ValueError for values that the schema doesn't hold."""
    kind = _registry()[0][type(event)]
    out = io.BytesIO()
    out.write(kind.header)
    fastavro.schemaless_writer(out, kind.schema, kind.dump(event))
    return out.getvalue()


def decode(value: bytes | None) -> Event:
    """A record from bytes. Raises UndecodableRecord, whatever the bytes are."""
    if value is None or len(value) < HEADER or value[:2] != MARKER:
        raise UndecodableRecord("not a single-object Avro record")
    found = _registry()[1].get(bytes(value[:HEADER]))
    if found is None:
        raise UndecodableRecord(
            f"unknown schema fingerprint {value[2:HEADER].hex()}; was it written by a newer version of Headrace?"
        )
    writer, kind = found
    body = io.BytesIO(value)
    body.seek(HEADER)
    try:
        plain = fastavro.schemaless_reader(body, writer, None if writer is kind.schema else kind.schema)
        event = kind.load(plain)
    except Exception as error:  # fastavro raises whatever its parsing meets: EOFError, IndexError, UnicodeError, ...
        raise UndecodableRecord(f"a damaged {kind.cls.__name__} record ({type(error).__name__}: {error})") from error
    if body.tell() != len(value):
        raise UndecodableRecord(f"a {kind.cls.__name__} record with {len(value) - body.tell()} bytes too many")
    return typing.cast(Event, event)


def kind_of(value: bytes | None) -> type | None:
    """The record's class by its header alone, or None."""
    found = None if value is None else _registry()[1].get(bytes(value[:HEADER]))
    return found[1].cls if found else None


def to_plain(event: Event) -> dict[str, Any]:
    """The record as nested dicts and lists (bytes stay bytes): what `cat` and tables are made of."""
    return typing.cast(dict[str, Any], _registry()[0][type(event)].dump(event))


def schema_of(cls: type) -> Any:
    """The Avro schema that records of `cls` are written with."""
    return _registry()[0][cls].schema


__all__ = ["HEADER", "MARKER", "decode", "encode", "events", "kind_of", "schema_header", "schema_of", "to_plain"]

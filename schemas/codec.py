"""The one place that turns records into bytes and back: Avro single-object encoding.

Ten bytes (0xC3 0x01 and the schema's CRC-64-AVRO fingerprint, little-endian), then the Avro body, so no registry is
needed. `avro/<Name>.avsc` is what we write; `avro/<Name>.v<k>.avsc` are schemas that were written before and are still
read; what newer writers use is learned from the run's `policy`. Records of our own schemas go through `compiled`, those
of other versions through fastavro, which resolves one into the other. Kafka compresses; we don't.
"""

from __future__ import annotations

import io
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from . import events
from .compiled import Decode, Encode, compile_record, wrong_field
from .errors import InvalidRecord, UndecodableRecord, UnencodableRecord, UnknownSchema
from .events import Event

MARKER = b"\xc3\x01"
HEADER = 10

Plain = Any  # what fastavro reads and writes


@dataclass(frozen=True, slots=True)
class _Kind:
    cls: type
    schema: Any  # fastavro's parsed form
    canonical: str  # in Avro's parsing canonical form, whose CRC is the fingerprint
    header: bytes
    encode: Encode
    decode: Decode
    dump: Callable[[Any], Plain]
    load: Callable[[Plain], Any]


def fingerprint_of(canonical: str) -> bytes:
    """CRC-64-AVRO, little-endian, of a schema in parsing canonical form."""
    return bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))  # fastavro prints the little-endian bytes


def schema_header(schema: Any) -> bytes:
    """The ten bytes that precede a body written with `schema`."""
    return MARKER + fingerprint_of(to_parsing_canonical_form(schema))


def _identity(value: Plain) -> Plain:
    return value


def _converters(hint: Any) -> tuple[Callable[[Any], Plain], Callable[[Plain], Any]]:
    """(to plain, from plain) for a type hint; identity where fastavro's own types are ours."""
    if is_dataclass(hint):
        return _class_converters(typing.cast(type, hint))
    origin = get_origin(hint)
    if origin is Annotated:
        return _converters(get_args(hint)[0])
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


class Registry:
    """Records by class and by header. `schemas` are the files of `avro`: what each is called, and what it holds."""

    def __init__(self, classes: Iterable[type], schemas: Mapping[str, Any]) -> None:
        self.by_class: dict[type, _Kind] = {}
        # The writer's schema is None where it is our own.
        self.by_header: dict[bytes, tuple[Any, _Kind]] = {}
        for cls in classes:
            own = schemas[f"{cls.__name__}.avsc"]
            header = schema_header(own)
            kind = _Kind(cls, fastavro.parse_schema(own), to_parsing_canonical_form(own), header,
                         *compile_record(cls, own, header), *_class_converters(cls))  # fmt: skip
            self.by_class[cls] = kind
            self.by_header[header] = (None, kind)
            for name, old in schemas.items():
                if name.startswith(f"{cls.__name__}.v"):
                    self.by_header[schema_header(old)] = (fastavro.parse_schema(old), kind)

    def encode(self, event: Any) -> bytes:
        """A record's bytes: marker, fingerprint, body. Raises UnencodableRecord, which names the field."""
        cls = type(event)
        try:
            return self.by_class[cls].encode(event)
        except Exception as error:  # whatever a wrong value leads the compiled code to
            if cls not in self.by_class:
                raise UnencodableRecord(f"a {cls.__name__} is no record of ours") from error
            said = wrong_field(event, cls) or f"{type(error).__name__}: {error}"
            raise UnencodableRecord(f"a {cls.__name__} can't be written: {said}") from error

    def decode(self, value: bytes | None) -> Any:
        """The event that these bytes are. Raises UnknownSchema, UndecodableRecord."""
        if value is None or len(value) < HEADER or value[:2] != MARKER:
            raise UndecodableRecord("not a single-object Avro record")
        found = self.by_header.get(value[:HEADER])
        if found is None:
            raise UnknownSchema(value[2:HEADER])
        writer, kind = found
        try:
            event, end = kind.decode(value, HEADER) if writer is None else _resolved(value, writer, kind)
        except Exception as error:  # whatever damaged bytes lead a parser to: IndexError, UnicodeError, EOFError, ...
            said = f"{type(error).__name__}: {error}"
            raise UndecodableRecord(f"a damaged {kind.cls.__name__} record ({said})") from error
        if end < len(value):
            raise UndecodableRecord(f"a {kind.cls.__name__} record with {len(value) - end} bytes too many")
        if end > len(value):
            raise UndecodableRecord(f"a damaged {kind.cls.__name__} record ({end - len(value)} bytes are missing)")
        return event

    def learn(self, schema: str) -> bool:
        """Read records of this schema from now on. Raises InvalidRecord where it is no schema of a record."""
        try:
            parsed = json.loads(schema)
            name, header = parsed["name"].rpartition(".")[2], schema_header(parsed)
            parsed = fastavro.parse_schema(parsed)
        except Exception as error:
            raise InvalidRecord(f"not the Avro schema of a record: {error}") from error
        kind = next((kind for cls, kind in self.by_class.items() if cls.__name__ == name), None)
        if kind is None:
            return False
        self.by_header.setdefault(header, (parsed, kind))
        return True


def _resolved(value: bytes, writer: Any, kind: _Kind) -> tuple[Any, int]:
    """A record of another version of the schema, as today's class."""
    body = io.BytesIO(value)
    body.seek(HEADER)
    return kind.load(fastavro.schemaless_reader(body, writer, kind.schema)), body.tell()


@cache
def _registry() -> Registry:
    folder = resources.files(__package__) / "avro"
    return Registry(get_args(Event), {file.name: json.loads(file.read_text()) for file in folder.iterdir()
                                      if file.name.endswith(".avsc")})  # fmt: skip


def encode(event: Event) -> bytes:
    """A record as bytes. Raises UnencodableRecord, naming the field, for a value that the schema doesn't hold."""
    return _registry().encode(event)


def decode(value: bytes | None) -> Event:
    """A record from bytes. Raises UndecodableRecord, whatever the bytes are; UnknownSchema where only the schema is
    missing."""
    return typing.cast(Event, _registry().decode(value))


def learn(schema: str) -> bool:
    """Read records of this writer's schema (JSON) from now on. False where it is of a kind that this version of
    Headrace doesn't have. Raises InvalidRecord where it is no schema of a record."""
    return _registry().learn(schema)


def knows(fingerprint: bytes) -> bool:
    """Whether records with these eight bytes after the marker can be decoded."""
    return MARKER + fingerprint in _registry().by_header


def own_schemas() -> Iterator[tuple[str, bytes, str]]:
    """(name, fingerprint, schema in parsing canonical form) of everything that this version writes."""
    return ((cls.__name__, kind.header[2:], kind.canonical) for cls, kind in _registry().by_class.items())


def kind_of(value: bytes | None) -> type | None:
    """The record's class by its header alone, or None."""
    found = None if value is None else _registry().by_header.get(value[:HEADER])
    return found[1].cls if found else None


def to_plain(event: Event) -> dict[str, Any]:
    """The record as nested dicts and lists (bytes stay bytes): what `cat` and tables are made of."""
    return typing.cast(dict[str, Any], _registry().by_class[type(event)].dump(event))


def schema_of(cls: type) -> Any:
    """The Avro schema that records of `cls` are written with."""
    return _registry().by_class[cls].schema


__all__ = ["HEADER", "MARKER", "decode", "encode", "events", "fingerprint_of", "kind_of", "knows", "learn",
           "own_schemas", "schema_header", "schema_of", "to_plain"]  # fmt: skip

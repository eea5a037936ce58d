"""The formats are published: every version of a record is read by every other, and no published schema changes."""

from __future__ import annotations

import io
import json
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import fastavro
import pytest
from fastavro.schema import to_parsing_canonical_form
from hypothesis import given, settings

from headrace.schemas import codec, events
from headrace.schemas.errors import InvalidRecord, UndecodableRecord, UnknownSchema
from tests.published import fingerprint, now, published, schema_files
from tests.unit.test_schemas import values_of

DATA = Path(__file__).parents[1] / "data" / "wire"
CLASSES = {cls.__name__: cls for cls in get_args(events.Event)}
PUBLISHED = [(name, k) for name, versions in schema_files().items() for k in range(1, len(versions) + 1)]

# --------------------------------------------------------------------------- three versions, each way


def _frozen(name: str, *columns: tuple[str, Any] | tuple[str, Any, Any]) -> type:
    return make_dataclass(name, list(columns), frozen=True, slots=True)


Place = _frozen("Place", ("address", str), ("length", int))
OldRun = _frozen("Run", ("version", int), ("count", int))
Run = _frozen("Run", ("version", int), ("count", int), ("weight", float, field(default=1.0)))
_FIRST: list[Any] = [("name", str), ("count", int)]
_DATA: list[Any] = [("data", bytes | None)]
_SECOND: list[Any] = [("tags", tuple[str, ...], ()), ("score", float | None, None)]
_THIRD: list[Any] = [("metrics", dict[str, float], field(default_factory=dict)), ("final", bool, False),
                     ("place", Place | None, None)]  # fmt: skip
READERS = {
    1: _frozen("Probe", *_FIRST, ("runs", tuple[OldRun, ...]), *_DATA),  # type: ignore[valid-type]
    2: _frozen("Probe", *_FIRST, ("runs", tuple[Run, ...]), *_DATA, *_SECOND),  # type: ignore[valid-type]
    3: _frozen("Probe", *_FIRST, ("runs", tuple[Run, ...]), *_DATA, *_SECOND, *_THIRD),  # type: ignore[valid-type]
}


def probe(k: int) -> Any:
    return json.loads((DATA / f"Probe.v{k}.avsc").read_text())


def expected(writer: int, reader: int) -> dict[str, Any]:
    """What a reader of version `reader` knows of the fixture that version `writer` wrote."""
    runs: list[dict[str, Any]] = [{"version": 3, "count": 300}, {"version": 4, "count": 1}]
    if reader >= 2:
        runs = [run | {"weight": weight} for run, weight in zip(runs, (1.0, 0.5 if writer >= 2 else 1.0), strict=True)]
    known: dict[str, Any] = {"name": "probe \u00e9", "count": -5, "runs": runs, "data": b"\x00\xff" * 100}
    if reader >= 2:
        known |= {"tags": ["a", ""], "score": 0.25} if writer >= 2 else {"tags": [], "score": None}
    if reader >= 3:
        place = {"address": "file:///x", "length": 2**40}
        known |= ({"metrics": {"loss": -1.5}, "final": True, "place": place} if writer >= 3
                  else {"metrics": {}, "final": False, "place": None})  # fmt: skip
    return known


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", READERS)
def test_every_version_of_a_record_is_read_by_every_version_of_its_reader(writer: int, reader: int) -> None:
    """Older ones from the files beside the current one, newer ones as they are learned from `policy`."""
    value = (DATA / f"Probe.v{writer}.bin").read_bytes()
    older = {f"Probe.v{k}.avsc": probe(k) for k in range(1, reader)}
    registry = codec.Registry([READERS[reader]], {"Probe.avsc": probe(reader)} | older)
    if writer > reader:
        with pytest.raises(UnknownSchema) as unknown:
            registry.decode(value)
        assert unknown.value.fingerprint.hex() == fingerprint(probe(writer))
        assert registry.learn(to_parsing_canonical_form(probe(writer)))
    event = registry.decode(value)
    assert type(event) is READERS[reader]
    assert registry.by_class[READERS[reader]].dump(event) == expected(writer, reader)
    if writer == reader:
        assert registry.encode(event) == value


def test_damaged_record_of_another_version_is_undecodable() -> None:
    value = (DATA / "Probe.v1.bin").read_bytes()
    registry = codec.Registry([READERS[3]], {"Probe.avsc": probe(3), "Probe.v1.avsc": probe(1)})
    for damaged in (value[:-1], value + b"\0", value[:12]):
        with pytest.raises(UndecodableRecord):
            registry.decode(damaged)


def test_schema_of_a_kind_that_this_version_does_not_have_is_not_learned() -> None:
    unknown = {"type": "record", "name": "Invention", "fields": []}
    assert not codec.learn(json.dumps(unknown))
    assert not codec.knows(bytes.fromhex(fingerprint(unknown)))
    for nothing in ("", "{}", "[]", '"string"', '{"type": "record", "name": "Span", "fields": [{"name": "x"}]}'):
        with pytest.raises(InvalidRecord):
            codec.learn(nothing)


# ------------------------------------------------------------------- the published versions of every record


def projected(plain: Any, schema: Any, named: dict[str, Any] | None = None) -> Any:
    """The value without what the schema doesn't know, and with its defaults for what the value doesn't have."""
    named = {} if named is None else named
    if isinstance(schema, list):
        return None if plain is None else projected(plain, schema[1], named)
    if isinstance(schema, str):
        return projected(plain, named[schema], named) if schema in named else plain
    if schema["type"] == "record":
        named[schema["name"]] = schema
        return {f["name"]: projected(plain[f["name"]] if f["name"] in plain else f["default"], f["type"], named)
                for f in schema["fields"]}  # fmt: skip
    if schema["type"] == "array":
        return [projected(item, schema["items"], named) for item in plain]
    if schema["type"] == "map":
        return {key: projected(item, schema["values"], named) for key, item in plain.items()}
    return plain


@pytest.mark.parametrize(("name", "version"), PUBLISHED)
def test_what_an_older_version_wrote_is_read_and_what_is_written_now_an_older_version_reads(
    name: str, version: int
) -> None:
    old, current = schema_files()[name][version - 1], schema_files()[name][-1]

    @settings(deadline=None, max_examples=30)
    @given(values_of(CLASSES[name]))
    def both_ways(event: events.Event) -> None:
        plain = codec.to_plain(event)
        body = io.BytesIO()
        fastavro.schemaless_writer(body, fastavro.parse_schema(old), projected(plain, old))
        read = codec.decode(codec.schema_header(old) + body.getvalue())
        assert codec.to_plain(read) == projected(projected(plain, old), current)
        written = io.BytesIO(codec.encode(event)[codec.HEADER :])
        reader = fastavro.parse_schema(old)
        assert fastavro.schemaless_reader(written, fastavro.parse_schema(current), reader) == projected(plain, old)

    both_ways()


def test_published_schemas_are_superseded_and_never_changed() -> None:
    there = now()
    for row in published():
        assert row in there, (
            f"{row['name']} version {row['version']} is published as {row['fingerprint']}, and its file says something "
            "else: copy the old file to <Name>.v<k>.avsc before you change it"
        )
    missing = [row for row in there if row not in published()]
    assert not missing, f"new versions: `python -m tests.published` appends them: {missing}"


@pytest.mark.parametrize("name", [name for name, versions in schema_files().items() if len(versions) > 1])
def test_new_versions_only_append_fields_with_defaults(name: str) -> None:
    versions = schema_files()[name]
    for old, new in zip(versions, versions[1:], strict=False):
        assert fingerprint(old) != fingerprint(new)
        check_appended(old, new, name)


def check_appended(old: Any, new: Any, where: str) -> None:
    """Same names and types in the same order; more only at the end of a record, with a default."""
    if isinstance(old, dict) and old["type"] == "record":
        assert isinstance(new, dict) and (new["type"], new["name"], new.get("namespace")) == (
            "record", old["name"], old.get("namespace")), f"{where} is another record"  # fmt: skip
        before, after = old["fields"], new["fields"]
        assert [f["name"] for f in after[: len(before)]] == [f["name"] for f in before], f"{where}: fields moved"
        for one, other in zip(before, after, strict=False):
            check_appended(one["type"], other["type"], f"{where}.{one['name']}")
        for extra in after[len(before) :]:
            assert "default" in extra, f"{where}.{extra['name']} has no default"
    elif isinstance(old, dict):
        assert isinstance(new, dict) and new["type"] == old["type"], f"{where}: {new} for {old}"
        inner = "items" if old["type"] == "array" else "values"
        check_appended(old[inner], new[inner], f"{where}[]")
    elif isinstance(old, list):
        assert isinstance(new, list) and len(new) == len(old), f"{where}: {new} for {old}"
        for one, other in zip(old, new, strict=True):
            check_appended(one, other, where)
    else:
        assert new == old, f"{where}: {new} for {old}; a type is neither widened nor narrowed, since readers differ"


@pytest.mark.parametrize(("before", "after"), [
    ("long", "int"), ("int", "long"), ("string", ["null", "string"]), (["null", "long"], "long"),
    ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}),
])  # fmt: skip
def test_changed_type_breaks_the_rules(before: Any, after: Any) -> None:
    with pytest.raises(AssertionError):
        check_appended(before, after, "field")


@pytest.mark.parametrize("cls", CLASSES.values(), ids=lambda c: c.__name__)
def test_fields_added_later_have_the_same_default_in_class_and_schema(cls: type) -> None:
    """Whoever leaves them out when writing, and whoever misses them when reading, mean the same."""
    versions = schema_files()[cls.__name__]
    first = {f["name"] for f in versions[0]["fields"]}
    defaults = {f["name"]: f["default"] for f in versions[-1]["fields"] if f["name"] not in first}
    hints = get_type_hints(cls)
    for one in (f for f in fields(cls) if f.name in defaults):
        own = one.default if one.default is not MISSING else one.default_factory()  # type: ignore[operator]
        assert codec._converters(hints[one.name])[0](own) == defaults[one.name], one.name


def test_record_that_announces_schemas_never_changes() -> None:
    """An older reader could not learn from it any more."""
    assert len(schema_files()["SchemaAdded"]) == 1

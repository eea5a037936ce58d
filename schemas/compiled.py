"""How a record's class and its Avro schema become two plain functions, compiled once: to bytes and back.

What a library does field by field through dicts is here straight-line code without dicts, lookups or copies, which is
several times faster; the bytes are exactly Avro's binary encoding (a test compares them with fastavro's). Only what our
schemas use is known: records, arrays, maps, `null` or something, and the types in `_PLAIN`. A writer puts each array
and map into one block; a reader takes any blocks. Readers here expect their own schema; bytes of another version of it
are the codec's to resolve.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import index
from struct import Struct
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .events import FINITE

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes, int], tuple[Any, int]]  # value and where the record begins -> the object and where it ends

_SMALL = 4096  # longs from -1 to here are looked up
_PLAIN = ("long", "string", "bytes", "boolean", "double")
_DOUBLE = Struct("<d")
# The long at `p` of `b`, still in zigzag, into `n`; those of one and two bytes without a call.
_NEXT_LONG = (
    "n = b[p]; p += 1",
    "if n > 127:",
    "    n = n & 127 | b[p] << 7; p += 1",
    "    if n > 0x3FFF: n, p = more(b, n, p)",
)


def long_bytes(value: int) -> bytes:
    """Avro's long: zigzag, seven bits a byte, lowest first. Raises OverflowError beyond 64 bits."""
    value = index(value)
    if not -(2**63) <= value < 2**63:
        raise OverflowError(f"{value} does not fit into 64 bits")
    rest = value << 1 if value >= 0 else ~(value << 1)
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _long_at(data: bytes, value: int, at: int) -> tuple[int, int]:
    """The rest of a long of which `value` holds two bytes, still in zigzag, and where it ends."""
    value, shift = value & 0x3FFF, 14
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise ValueError("a long of more than ten bytes")
    if value >> 64:
        raise ValueError("a long beyond 64 bits")
    return value, at


def _bad(what: str) -> typing.NoReturn:
    raise ValueError(what)


def _finite(value: float) -> float:
    if value - value != 0:  # nan and both infinities
        raise ValueError(f"{value} where a finite number must be")
    return value


# Looked up by the value itself: the last one is -1's.
_LONGS = [*(long_bytes(i) for i in range(_SMALL)), long_bytes(-1)]


def compile_record(cls: type, schema: Any, header: bytes) -> tuple[Encode, Decode]:
    """`encode(object)` gives `header` and body; `decode(value, at)` reads a body that begins at `at`. Both raise
    whatever a wrong value or damaged bytes lead to."""
    source = _Source()
    writer, reader = source.record(cls, schema)
    source.lines += [
        "def encode(e):",
        "    out = [HEADER]",
        f"    {writer}(e, out)",
        "    return join(out)",
    ]
    source.names["HEADER"] = header
    exec(compile("\n".join(source.lines), f"<compiled {cls.__name__}>", "exec"), source.names)
    return source.names["encode"], source.names[reader]


class _Source:
    """The text of the functions for one schema and the records inside it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"L": _LONGS, "long": long_bytes, "more": _long_at, "bad": _bad, "join": b"".join,
                                      "pack": _DOUBLE.pack, "unpack": _DOUBLE.unpack_from, "finite": _finite,
                                      "new": object.__new__}  # fmt: skip
        self._known: dict[str, tuple[Any, tuple[str, str]]] = {}  # records by name: schema and functions
        self._locals = 0

    def record(self, cls: type, schema: Any) -> tuple[str, str]:
        """The names of the functions `write(object, out)` and `read(value, at)`, once they are in `lines`."""
        name = schema if isinstance(schema, str) else schema["name"]
        if name in self._known:
            return self._known[name][1]
        assert not hasattr(cls, "__post_init__") and [f["name"] for f in schema["fields"]] == [
            f.name for f in fields(cls)
        ], f"{cls.__name__} and its schema differ"
        hints = get_type_hints(cls, include_extras=True)
        write, read = f"write_{name}", f"read_{name}"
        self.names[f"C_{name}"] = cls
        writing, reading, putting = _Body(), _Body(), []
        for field in schema["fields"]:
            variable = self._local()
            writing.add(f"{variable} = e.{field['name']}")
            self._write(writing, field["type"], hints[field["name"]], variable)
            self._read(reading, field["type"], hints[field["name"]], variable)
            # The slots' own setters: a frozen dataclass's constructor takes five times as long.
            setter = f"S_{name}_{field['name']}"
            self.names[setter] = getattr(cls, field["name"]).__set__
            putting.append(f"{setter}(o, {variable})")
        writing.flush()
        self.lines += [f"def {write}(e, out):", *writing.lines]
        self.lines += [f"def {read}(b, p):", *reading.lines, f"    o = new(C_{name})",
                       *(f"    {line}" for line in putting), "    return o, p"]  # fmt: skip
        self._known[name] = (schema, (write, read))
        return write, read

    def _local(self) -> str:
        self._locals += 1
        return f"v{self._locals}"

    # ------------------------------------------------------------------------------------------------- writing

    def _write(self, body: _Body, kind: Any, hint: Any, v: str) -> None:
        """Put the value in variable `v` out."""
        if isinstance(kind, list):
            assert kind[0] == "null" and len(kind) == 2
            self._write_optional(body, kind[1], _some(hint), v)
        elif isinstance(kind, str) and kind in _PLAIN:
            body.put(*self._pieces(body, kind, hint, v))
        elif isinstance(kind, dict) and kind["type"] in ("array", "map"):
            length = self._local()
            body.add(f"{length} = len({v})")
            body.flush()
            body.add(f"if {length}:")
            body.deeper()
            body.put(_long(length))
            body.flush()
            if kind["type"] == "array":
                item = self._local()
                body.add(f"for {item} in {v}:")
                body.deeper()
                self._write(body, kind["items"], get_args(hint)[0], item)
            else:
                key, item = self._local(), self._local()
                body.add(f"for {key}, {item} in {v}.items():")
                body.deeper()
                self._write(body, "string", str, key)
                self._write(body, kind["values"], get_args(hint)[1], item)
            body.flush()
            body.higher()
            body.higher()
            body.put("b'\\0'")
        else:
            write, _ = self.record(hint, kind)
            body.flush()
            body.add(f"{write}({v}, out)")

    def _write_optional(self, body: _Body, kind: Any, hint: Any, v: str) -> None:
        if not isinstance(kind, str) or kind not in _PLAIN:
            body.flush()
            body.add(f"if {v} is None: out.append(b'\\0')", "else:")
            body.deeper()
            body.put("b'\\2'")
            self._write(body, kind, hint, v)
            body.flush()
            body.higher()
            return
        head, tail = self._local(), self._local()
        body.add(f"if {v} is None:")
        body.add(f"    {head} = b'\\0'; {tail} = b''")
        body.add("else:")
        body.deeper()
        pieces = self._pieces(body, kind, hint, v)
        body.add(f"{head} = b'\\2' + {pieces[0]}; {tail} = {pieces[1] if len(pieces) > 1 else repr(b'')}")
        body.higher()
        body.put(head, tail)

    def _pieces(self, body: _Body, kind: str, hint: Any, v: str) -> list[str]:
        """Expressions for the bytes of a plain value."""
        if kind == "long":
            return [_long(v)]
        if kind == "boolean":
            return [f"(b'\\1' if {v} else b'\\0')"]
        if kind == "double":
            return [f"pack(finite({v}))" if FINITE in get_args(hint)[1:] else f"pack({v})"]
        length = self._local()
        if kind == "string":
            body.add(f"{v} = {v}.encode(); {length} = len({v})")
        else:  # anything with a length would pass, and an array of numbers has another one than its bytes
            body.add(f"if {v}.__class__ is not bytes: bad('bytes are due')")
            body.add(f"{length} = len({v})")
        return [_long(length), v]

    # ------------------------------------------------------------------------------------------------- reading

    def _read(self, body: _Body, kind: Any, hint: Any, v: str) -> None:
        """Read a value at `p` of `b` into variable `v`, and move `p` behind it.

        A slice that ends too early is not looked at: `p` is then beyond the end, where either the next read fails or
        the codec's own look at the end does.
        """
        if isinstance(kind, list):
            body.add("n = b[p]; p += 1", f"if n == 0: {v} = None", "elif n == 2:")
            body.deeper()
            self._read(body, kind[1], _some(hint), v)
            body.higher()
            body.add("else: bad('no such branch of a union')")
        elif kind == "boolean":
            body.add("n = b[p]; p += 1", "if n > 1: bad('a boolean is 0 or 1')", f"{v} = n == 1")
        elif kind == "double":
            body.add(f"{v} = unpack(b, p)[0]; p += 8")
        elif isinstance(kind, str) and kind in _PLAIN:
            body.add(*_NEXT_LONG)
            if kind == "long":
                body.add(f"{v} = (n >> 1) ^ -(n & 1)")
            else:
                body.add("if n & 1: bad('a negative length')", "q = p + (n >> 1)")
                body.add(f"{v} = b[p:q]{'.decode()' if kind == 'string' else ''}; p = q")
        elif isinstance(kind, dict) and kind["type"] in ("array", "map"):
            count, item = self._local(), self._local()
            array = kind["type"] == "array"
            body.add(f"{v} = {'[]' if array else '{}'}")
            body.add("while True:")
            body.deeper()
            body.add(*_NEXT_LONG, "if n == 0: break")
            body.add(f"{count} = (n + 1) >> 1")  # a negative count is followed by the block's size
            body.add("if n & 1:", *(f"    {line}" for line in _NEXT_LONG))
            body.add(f"while {count}:")
            body.deeper()
            body.add(f"{count} -= 1")
            if array:
                self._read(body, kind["items"], get_args(hint)[0], item)
                body.add(f"{v}.append({item})")
            else:
                key = self._local()
                self._read(body, "string", str, key)
                self._read(body, kind["values"], get_args(hint)[1], item)
                body.add(f"{v}[{key}] = {item}")
            body.higher()
            body.higher()
            if array:
                body.add(f"{v} = tuple({v})")
        else:
            _, read = self.record(hint, kind)
            body.add(f"{v}, p = {read}(b, p)")


class _Body:
    """Lines of a function, and the pieces of output that wait to be put out at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 1
        self._waiting: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += ["    " * self._depth + line for line in lines]

    def deeper(self) -> None:
        self._depth += 1

    def higher(self) -> None:
        self._depth -= 1

    def put(self, *pieces: str) -> None:
        self._waiting += pieces

    def flush(self) -> None:
        if self._waiting:
            self.add(f"out += ({', '.join(self._waiting)},)")
            self._waiting = []


def _long(v: str) -> str:
    return f"(L[{v}] if -1 <= {v} < {_SMALL} else long({v}))"


def _some(hint: Any) -> Any:
    """The other branch of a hint that may be None."""
    assert get_origin(hint) in (Union, types.UnionType)
    return next(arg for arg in get_args(hint) if arg is not type(None))


# ------------------------------------------------------------------------------------------------- what went wrong


def wrong_field(value: Any, hint: Any, path: str = "") -> str | None:
    """`field: what is wrong with it` of the first value that its type does not hold; None where all is well.

    For the message after an encoding failed: slow, and says what the compiled code only stumbles over.
    """
    if is_dataclass(hint):
        if type(value) is not hint:
            return f"{path or '(the record)'}: {_shown(value)} where a {typing.cast(type, hint).__name__} must be"
        hints = get_type_hints(hint, include_extras=True)
        found = (wrong_field(getattr(value, f.name), hints[f.name], f"{path}.{f.name}" if path else f.name)
                 for f in fields(hint))  # fmt: skip
        return next((one for one in found if one), None)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else wrong_field(value, _some(hint), path)
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return f"{path}: {_shown(value)} where a tuple must be"
        found = (wrong_field(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(value))
        return next((one for one in found if one), None)
    if origin is dict:
        if not isinstance(value, dict):
            return f"{path}: {_shown(value)} where a dict must be"
        keys = (wrong_field(key, str, f"a key of {path}") for key in value)
        items = (wrong_field(item, arguments[1], f"{path}[{key!r}]") for key, item in value.items())
        return next((one for one in (*keys, *items) if one), None)
    return _wrong_plain(value, hint, path)


def _wrong_plain(value: Any, hint: Any, path: str) -> str | None:
    expected = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if expected is int:
        try:
            long_bytes(value)
        except OverflowError as error:
            return f"{path}: {error}"
        except TypeError:
            return f"{path}: {_shown(value)} where an integer must be"
    elif expected is float:
        try:
            _DOUBLE.pack(value)
            if expected is not hint:
                _finite(value)
        except ValueError as error:
            return f"{path}: {error}"
        except Exception:
            return f"{path}: {_shown(value)} where a float must be"
    elif expected is str and isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"{path}: {_shown(value)} is not UTF-8: {error.reason}"
    elif not isinstance(value, expected):
        return f"{path}: {_shown(value)} where {expected.__name__} must be"
    return None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"

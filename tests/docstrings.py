"""What no docstring linter reads in prose: that what a public function raises is named, and that arrays have a shape.

Linters for both exist for sections of Google's, numpy's or Sphinx's kind; here sentences say it (CONTRIBUTING.md). That
a docstring is there at all is ruff's to say. `python -m tests.docstrings`, a part of `make lint`, prints a line for
each function that raises an error of ours whose name, or a base's, stands neither in its docstring nor in its class's;
and one for each that takes or gives a bare array of which neither they nor the module's say a shape, like [n].

What isn't read: methods without a docstring (they keep a contract that has one), commands, what other functions raise.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.schemas import errors

ROOT = Path(__file__).parents[1]
FOLDERS = ("schemas", "streams", "producers", "trainer", "consumers", "headrace")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_ARRAY = re.compile(r"(torch\.Tensor|NDArray\[.*\]|np\.ndarray.*)( \| None)?")
_SHAPE = re.compile(r"\[[\w, +*-]+\]|\bshapes?\b")


def main() -> int:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [line for path in paths for line in missing(str(path.relative_to(ROOT)), path.read_text())]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def missing(name: str, source: str) -> Iterator[str]:
    """What a module's docstrings don't say, one line for each function and kind."""
    module = ast.parse(source)
    for where, function, said in _public(module, ast.get_docstring(module) or ""):
        place = f"{name}:{function.lineno}: `{where}`"
        if silent := sorted(name for name in _raised(function.body, ()) if not _names(said[:-1], name)):
            yield f"{place} raises {', '.join(silent)}: say so in its docstring, and when"
        if _takes_an_array(function) and not any(_SHAPE.search(text) for text in said):
            yield f"{place} takes or gives an array: say its shape and dtype, like float64 [n]"


def _public(node: ast.Module | ast.ClassDef, *said: str) -> Iterator[tuple[str, Function, tuple[str, ...]]]:
    """Name, function, and what is said of it: by itself, by its class, by its module."""
    for inner in node.body:
        if isinstance(inner, ast.ClassDef) and not inner.name.startswith("_"):
            for where, function, texts in _public(inner, ast.get_docstring(inner) or "", *said):
                yield f"{inner.name}.{where}", function, texts
        elif isinstance(inner, Function) and (not inner.name.startswith("_") or inner.name == "__init__"):
            is_command = re.search(r"(Option|Argument)\b", ast.unparse(inner.args))
            if not is_command and (own := ast.get_docstring(inner)):
                yield inner.name, inner, (own, *said)


def _raised(nodes: list[ast.stmt], caught: tuple[str, ...]) -> Iterator[str]:
    """Errors of ours that are raised here, and not caught here. Functions within are others' to call."""
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc).rpartition(".")[2]
            if name in _OURS and not set(_lineage(name)) & set(caught):
                yield name
        elif isinstance(node, ast.Try):
            handled = [re.findall(r"\w+", ast.unparse(one.type)) for one in node.handlers if one.type]
            yield from _raised(node.body, (*caught, *(name for names in handled for name in names)))
            for part in (node.orelse, node.finalbody, *(one.body for one in node.handlers)):
                yield from _raised(part, caught)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in (getattr(node, "body", []), getattr(node, "orelse", []),
                         *(case.body for case in getattr(node, "cases", []))):  # fmt: skip
                yield from _raised(part, caught)


_OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}


def _lineage(name: str) -> list[str]:
    return [one.__name__ for one in getattr(errors, name).__mro__ if one.__name__ in (*_OURS, "Exception")]


def _names(texts: tuple[str, ...], error: str) -> bool:
    return any(re.search(rf"\b{name}\b", text) for name in _lineage(error) for text in texts)


def _takes_an_array(function: Function) -> bool:
    kinds = [one.annotation for one in (*function.args.args, *function.args.kwonlyargs)] + [function.returns]
    return any(_ARRAY.fullmatch(ast.unparse(kind)) for kind in kinds if kind is not None)


if __name__ == "__main__":
    sys.exit(main())

"""Writes docs/reference/ from the code, and the figures of other pages from benchmarks/results/ (docs/measured.py):
`python -m docs.reference`. What they say is never edited by hand.

Each page is one function of what the code itself declares: settings models, the command line, the tree of errors, the
classes and schemas of records, the dataclasses of figures. A test compares the files with it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel
from typing_extensions import TypeIs

from docs import measured
from headrace import cli, consumers, roles
from headrace.consumers import frames, lineage, selection
from headrace.schemas import codec, errors, events
from headrace.schemas.outcomes import Account, Boundary, Closure, Disposition, Outcome
from headrace.schemas.settings import CHANGEABLE, RunSettings
from headrace.schemas.waiting import Idle, Step, TrainerTime
from headrace.settings import SiteSettings

FOLDER = Path(__file__).parent / "reference"
SETTING = ("setting", "values", "default", "changes", "meaning")
MADE = "This page is made from `{source}` by `python -m docs.reference`."
# Modules whose public dataclasses are figures.
FIGURES = ("headrace.consumers.figures", "headrace.consumers.waits", "headrace.consumers.state",
           "headrace.consumers.health", "headrace.consumers.report.questions")  # fmt: skip
_COMMENTED = re.compile(r"^    (\w+)\s*:[^#]*#\s*(.+)$")


def pages() -> dict[str, str]:
    """Name of each file -> what it must hold."""
    return {"settings.md": _settings(), "commands.md": _commands(), "errors.md": _errors(), "records.md": _records(),
            "figures.md": _figures(), "sdk.md": _sdk()}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
        print(f"wrote {FOLDER / name}")
    for path, text in measured.pages().items():
        path.write_text(text)
        print(f"wrote {path}")


def _page(title: str, source: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MADE.format(source=source), *parts]) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(_cell(one) for one in row) + " |" for row in rows)])


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|").strip()


def _code(value: Any) -> str:
    return f"`{value}`"


# --------------------------------------------------------------------------------------------------------- settings


def _settings() -> str:
    intro = ("Every setting with its default and meaning; `headrace run FILE --print-settings` shows those of a file. "
             "*Run settings* decide what is trained and are the run's first record. *Site settings* belong to a place "
             "and are never recorded. What `headrace set` may change in a living run is marked.")  # fmt: skip
    own = [name for name, field in RunSettings.model_fields.items() if not _is_section(field.annotation)]
    run = ("`run`", "string", "required", "", "run id: lower-case letters, digits, `-`, `_`")
    parts = [intro, "## (top of the file)", _table(SETTING, [run, *_setting_rows(RunSettings, "", own)])]
    for name, field in RunSettings.model_fields.items():
        if _is_section(section := field.annotation):
            said = inspect.cleandoc(section.__doc__ or "") if section.__doc__ else ""
            parts += [f"## [{name}]", *([said] if said else []), _settings_table(section, name)]
            parts += _nested(section, name)
    parts += ["## [site]", inspect.cleandoc(SiteSettings.__doc__ or ""), _settings_table(SiteSettings, "site")]
    parts += _nested(SiteSettings, "site")
    return _page("Settings", "schemas/settings.py", *parts).replace(
        "`schemas/settings.py`", "`schemas/settings.py` and `headrace/settings.py`", 1
    )


def _is_section(kind: Any) -> TypeIs[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _nested(section: type[BaseModel], path: str) -> Iterator[str]:
    """Tables of models inside a section: a part of it, or the rows of a list."""
    for name, field in section.model_fields.items():
        inner = next((kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
                      if _is_section(kind)), None)  # fmt: skip
        if inner is None:
            continue
        is_list = inner is not field.annotation
        yield f"## [{'[' if is_list else ''}{path}.{name}{']' if is_list else ''}]"
        yield _settings_table(inner, f"{path}.{name}")


def _settings_table(section: type[BaseModel], path: str) -> str:
    names = [name for name, field in section.model_fields.items() if not _is_section(field.annotation)]
    return _table(SETTING, list(_setting_rows(section, path, names)))


def _setting_rows(section: type[BaseModel], path: str, names: list[str]) -> Iterator[tuple[str, ...]]:
    schema = section.model_json_schema()
    for name in names:
        found = schema["properties"][name]
        key = f"{path}.{name}" if path else name
        changes = any(key == one or (one.endswith(".") and key.startswith(one)) for one in CHANGEABLE)
        required = section.model_fields[name].is_required()
        default = "required" if required else _code(json.dumps(found.get("default"))) if "default" in found else ""
        yield _code(name), _values(found), default, "yes" if changes else "", found.get("description", "")


def _values(found: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in found:
        inner = [_values(one) for one in found["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(inner)) + (" or none" if any(o.get("type") == "null" for o in found["anyOf"])
                                                    else "")  # fmt: skip
    if "enum" in found:
        return ", ".join(_code(one) for one in found["enum"])
    if "const" in found:
        return _code(found["const"])
    if "$ref" in found:
        return "table"
    kind = {"integer": "integer", "number": "number", "string": "string", "boolean": "`true`, `false`",
            "array": "list", "object": "table"}.get(found.get("type", ""), "any")  # fmt: skip
    bounds = [f"{sign} {found[key]:g}" for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"),
                                                         ("maximum", "<="), ("exclusiveMaximum", "<"))
              if key in found]  # fmt: skip
    return " ".join([kind, ", ".join(bounds)]).strip()


# --------------------------------------------------------------------------------------------------------- commands


def _commands() -> str:
    intro = ("`headrace VERB [RUN] ...`: exit 0 fine, 1 the check or the work failed, 2 wrong use. What goes wrong is "
             "one sentence on standard error. Roles end with 3 after an error that a restart would only "
             "repeat.")  # fmt: skip
    parts = [intro]
    root: Any = typer.main.get_command(cli.app)
    for name, command in _leaves(root, "headrace"):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
        usage = " ".join([name, *(_metavar(one) for one in arguments)])
        parts += [f"## {name}", inspect.cleandoc(command.help or ""), f"`{usage}`"]
        rows = [(_code("/".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else _metavar(p)),
                 p.help or "") for p in [*arguments, *options]]  # fmt: skip
        if rows:
            parts.append(_table(("argument", "meaning"), rows))
    return _page("Commands", "headrace/cli.py", *parts)


def _metavar(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()).strip("[]")
    return word if argument.required else f"[{word}]"


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, inner in command.commands.items():
        yield from _leaves(inner, f"{name} {word}")


# ----------------------------------------------------------------------------------------------------------- errors


def _errors() -> str:
    intro = ("Everything that Headrace raises on purpose, as a tree: catch a class, and what is below it is caught "
             "too. *exit* is the command line's exit code; where *role ends* says so, a supervisor doesn't start the "
             "role again, since the same error would come back.")  # fmt: skip
    rows = []

    def walk(kind: type[Any], depth: int) -> None:
        said = inspect.cleandoc(kind.__doc__ or "")
        code = "2" if issubclass(kind, cli.WRONG_USE) else "1"
        ends = "yes" if issubclass(kind, roles._FINAL_ERRORS) else ""
        rows.append(("&nbsp;" * 4 * depth + _code(kind.__name__), code, ends, said))
        for inner in kind.__subclasses__():
            if inner.__module__ == errors.__name__:
                walk(inner, depth + 1)

    walk(errors.HeadraceError, 0)
    return _page("Errors", "schemas/errors.py", intro, _table(("error", "exit", "role ends", "meaning"), rows))


# ---------------------------------------------------------------------------------------------------------- records


def _records() -> str:
    intro = ("The kinds of record on each topic, with their fields as the Avro schema of today has them. How their "
             "bytes lie, and which rules they keep: [the wire](../wire.md). `headrace cat RUN TOPIC` shows "
             "them.")  # fmt: skip
    parts = [intro]
    shown: set[type] = set()
    for topic, kinds in events.Kinds.BY_TOPIC.items():
        parts.append(f"## {topic}")
        for kind in kinds:
            if kind in shown:
                parts.append(f"`{kind.__name__}`: see above.")
                continue
            shown.add(kind)
            parts += [f"### {kind.__name__}", *_record(kind)]
            if kind is events.SampleChunk:
                parts += ["### GroupPayload", *_record(events.GroupPayload)]
    inside = [kind for kind in vars(events).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)
              and kind.__module__ == events.__name__ and kind not in shown and kind is not events.GroupPayload
              and kind not in (events.Chained, events.Authored)]  # fmt: skip
    parts.append("## Inside records")
    for kind in inside:
        parts += [f"### {kind.__name__}", inspect.cleandoc(_own_doc(kind)), _fields(kind)]
    outcomes = "headrace.schemas.outcomes"
    parts.append(f"## Vocabularies\n\nOf `{outcomes}` and `headrace.schemas.waiting`.")
    for enum in (Outcome, Boundary, Closure, Disposition, Account, Step, Idle, TrainerTime):
        comments = _comments(enum)
        rows = [(_code(member.value), comments.get(member.name, "")) for member in enum]
        said = _own_doc(enum)
        parts += [f"### {enum.__name__}", *([said] if said else []), _table(("value", "meaning"), rows)]
    return _page("Records", "schemas/events.py", *[part for part in parts if part])


def _record(kind: type) -> list[str]:
    folder = resources.files("headrace.schemas") / "avro"
    older = sum(1 for file in folder.iterdir() if file.name.startswith(f"{kind.__name__}.v"))
    fingerprint = next(mark for name, mark, _ in codec.own_schemas() if name == kind.__name__)
    return [inspect.cleandoc(_own_doc(kind)), f"Version {older + 1}, fingerprint `{fingerprint.hex()}`.", _fields(kind)]


def _fields(kind: type) -> str:
    comments: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _comments(base)
    rows = [(_code(f.name), _code(_type(f.type)), comments.get(f.name, "")) for f in dataclasses.fields(kind)]
    return _table(("field", "type", "meaning"), rows)


def _type(said: Any) -> str:
    return str(said if isinstance(said, str) else getattr(said, "__name__", said))


def _own_doc(kind: type) -> str:
    """The docstring that stands in the code; dataclasses make one of their own where there is none."""
    said = kind.__dict__.get("__doc__") or ""
    return "" if said.startswith(f"{kind.__name__}(") or said.startswith("Enum where") else inspect.cleandoc(said)


@cache
def _sources(module: str) -> dict[str, list[str]]:
    """The lines of each class of a module."""
    text = inspect.getsource(importlib.import_module(module))
    lines = text.splitlines()
    return {node.name: lines[node.lineno - 1 : node.end_lineno] for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef)}  # fmt: skip


@cache
def _comments(kind: type) -> dict[str, str]:
    """What stands behind each field or member, as a comment of its line; lines of comments before it belong to it."""
    found: dict[str, str] = {}
    before: list[str] = []
    for line in _sources(kind.__module__)[kind.__name__]:
        if line.startswith("    # "):
            before.append(line.removeprefix("    # "))
            continue
        match = _COMMENTED.match(line) or re.match(r"^    (\w+) = [^#]*#\s*(.+)$", line)
        plain = re.match(r"^    (\w+)\s*[:=]", line)
        if match:
            found[match[1]] = match[2]
        elif plain and before:
            found[plain[1]] = " ".join(before)
        before = []
    return found


# ---------------------------------------------------------------------------------------------------------- figures


def _figures() -> str:
    intro = ("The figures of a run, as `headrace status`, `headrace report` and their `--json` give them. All are "
             "computed from the log; one that the log can't support is null, never 0. Times are seconds, "
             "log-probabilities nats, unless a name says otherwise.")  # fmt: skip
    parts = [intro]
    for name in FIGURES:
        module = importlib.import_module(name)
        kinds = [kind for kind in vars(module).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)
                 and kind.__module__ == name and vars(kind)["__dataclass_params__"].frozen]  # fmt: skip
        path = name.removeprefix("headrace.").replace(".", "/") + ".py"
        parts.append(f"## {path}")
        for kind in kinds:
            said = _own_doc(kind)
            rows = [(_code(f.name), _code(_type(f.type)), _comments(kind).get(f.name, ""))
                    for f in dataclasses.fields(kind)]  # fmt: skip
            parts += [f"### {kind.__name__}", *([said] if said else []), _table(("figure", "type", "meaning"), rows)]
    return _page("Figures", "consumers/figures.py", *parts).replace(
        "`consumers/figures.py`", "the modules that are named below", 1
    )


# -------------------------------------------------------------------------------------------------------------- SDK


def _sdk() -> str:
    """A change of the public surface shows as a change of this page."""
    intro = ("What `headrace.consumers` names is the public surface of reading a run. It follows semantic versioning "
             "with the package: until the next major version names stay, arguments are only added, with defaults, and "
             "columns of [tables](../tables.md) are only added. It is typed (`py.typed`), and importing it loads "
             "neither pyarrow nor pandas nor polars. [Analytics](../analytics.md) shows it at work.")  # fmt: skip
    parts = [intro]
    for name in consumers.__all__:
        parts += [f"## {name}", *_public(name, getattr(consumers, name))]
    parts.append("## What they return")
    for kind in (frames.Table, lineage.TokenOrigin, lineage.EpisodeFate, lineage.Use):
        parts += [f"### {kind.__name__}", *_public(kind.__name__, kind)]
    return _page("The reader's SDK", "consumers/__init__.py", *[part for part in parts if part])


def _public(name: str, thing: Any) -> Iterator[str]:
    if inspect.isfunction(thing):
        yield _code(_call(thing))
        yield inspect.cleandoc(thing.__doc__ or "")
    elif inspect.isclass(thing):
        yield _own_doc(thing)
        if dataclasses.is_dataclass(thing):
            yield _fields(thing)
        own = [(key, one) for key, one in vars(thing).items() if not key.startswith("_")]
        rows = [(_code(_call(one)), one.__doc__ or "") for _, one in own if inspect.isfunction(one)]
        rows += [(_code(f"{key}: {_returns(one.fget)}"), one.__doc__ or "") for key, one in own
                 if isinstance(one, property) and one.fget]  # fmt: skip
        if rows:
            yield _table(("method or property", "meaning"), rows)
    else:  # an alias: what stands behind it in its module
        body = ast.parse(inspect.getsource(selection)).body
        at = next(i for i, node in enumerate(body) if isinstance(node, ast.Assign)
                  and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name)  # fmt: skip
        alias, said = body[at : at + 2]
        assert isinstance(alias, ast.Assign) and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
        yield _code(ast.unparse(alias.value))
        yield inspect.cleandoc(str(said.value.value))


def _call(function: Callable[..., Any]) -> str:
    node = _definition(function)
    arguments = re.sub(r"^self(, /)?(, )?", "", ast.unparse(node.args))
    return f"{node.name}({arguments}) -> {_returns(function)}"


def _returns(function: Callable[..., Any]) -> str:
    node = _definition(function)
    return ast.unparse(node.returns) if node.returns is not None else "None"


def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


if __name__ == "__main__":
    main()

"""What of a Dockerfile can be done without Docker, for the kind `process`: folders, files, variables and commands.

`FROM` is not: the machine's own /usr stands in for the image, which a task has to allow. Whatever else decides what is
in the image, and can't be done here, is refused.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from headrace.schemas.errors import InvalidTask

ABOUT_RUNNING = {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"}


@dataclass(frozen=True, slots=True)
class Folder:
    """The following ones begin here; it is made."""

    path: str


@dataclass(frozen=True, slots=True)
class Files:
    """`sources` below the Dockerfile's folder (patterns, too) go to `target`."""

    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Command:
    text: str


Step = Folder | Files | Variable | Command


def steps(where: str, text: str) -> list[Step]:
    """In order. Raises InvalidTask that names `where` and the line."""
    found: list[Step] = []
    images = 0
    for number, word, rest in _instructions(text):
        at = f"{where}, line {number}"
        if word == "FROM":
            images += 1
            if images > 1:
                raise InvalidTask(f"{at}: several images can't be built without Docker")
        elif word == "RUN":
            if "<<" in rest or rest.startswith("--"):
                raise InvalidTask(f"{at}: RUN with options or a here-document needs Docker")
            found.append(Command(shlex.join(json.loads(rest)) if rest.startswith("[") else rest))
        elif word in ("WORKDIR", "COPY", "ADD", "ENV"):
            if "$" in rest or "--" in rest or "://" in rest:
                raise InvalidTask(f"{at}: {word} with a variable, an option or an address needs Docker")
            found += _plain(at, word, rest)
        elif word not in ABOUT_RUNNING:
            raise InvalidTask(f"{at}: {word} needs Docker")
    return found


def images(text: str) -> list[str]:
    """What it is built from, by name."""
    return [rest.split()[0] for _, word, rest in _instructions(text) if word == "FROM" and not rest.startswith("--")]


def _plain(at: str, word: str, rest: str) -> list[Step]:
    try:
        words = [str(one) for one in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise InvalidTask(f"{at}: {word} can't be read ({error})") from error
    if word == "WORKDIR" and len(words) == 1:
        return [Folder(words[0])]
    if word == "ENV" and words:
        if "=" not in words[0]:
            return [Variable(words[0], " ".join(words[1:]))]
        if all("=" in one for one in words):
            return [Variable(*one.split("=", 1)) for one in words]
    if word in ("COPY", "ADD") and len(words) > 1:
        return [Files(tuple(words[:-1]), words[-1])]
    raise InvalidTask(f"{at}: {word} can't be read")


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line, instruction, what follows), lines put together and comments left out."""
    out: list[tuple[int, str, str]] = []
    parts: list[str] = []
    begin = 0
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*#", line) or (not line.strip() and not parts):
            continue
        if not parts:
            begin = number
        going_on = line.rstrip().endswith("\\")
        parts.append(line.rstrip()[:-1] if going_on else line)
        if not going_on:
            word, _, rest = "\n".join(parts).strip().partition(" ")
            out.append((begin, word.upper(), rest.strip()))
            parts = []
    return out

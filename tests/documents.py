"""The fenced blocks of the pages, and what each says is to be done with it.

The first word of a fence is its language; what follows says what a test does with the block:

- `run` executes it; `run exit=N` expects that exit code. A line of `sh` that begins with `headrace` is the command
  line itself; other lines go to the shell, and `sql` to DuckDB.
- `file=NAME` writes it into the folder in which the blocks run.
- `output` is what the block before printed; `...` stands for anything.
- `settings` is a part of a configuration file, and must be valid as one.
- `diagram` is a drawing.
- `format WHAT` are the bytes of a format, which tests/unit/test_wire.py reads.
- `skip: REASON` can't run here, and says why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# All pages but those that are made from the code, in the order in which they are run: later ones read the run that the
# first one makes.
_FIRST = ("index", "first-run", "concepts", "bring-your-own", "choosing", "publication", "analytics", "replay",
          "trackers", "moving", "operating")  # fmt: skip
_DOCS = sorted((ROOT / "docs").glob("*.md"), key=lambda path: path.name)
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in _FIRST), *(path for path in _DOCS if path.stem not in _FIRST),
         ROOT / "CONTRIBUTING.md", ROOT / "README.md")  # fmt: skip
_FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"run( exit=\d+)?|file=[\w.-]+|output|settings|diagram|format \w+|skip: .{10,}")


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    directive: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.directive.startswith("run")

    @property
    def exit_code(self) -> int:
        _, _, code = self.directive.partition("exit=")
        return int(code or 0)


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    return [Block(name, text.count("\n", 0, found.start()) + 1, *found.groups()) for found in _FENCE.finditer(text)]

"""The fenced blocks of the pages, and what each says is to be done with it.

The first word of a fence is its language; what follows says what a test does with the block:

- `run` executes it; `run exit=N` expects that exit code. A line of `sh` that begins with `headrace` is the command
  line itself; other lines go to the shell.
- `file=NAME` writes it into the folder in which the blocks run.
- `output` is what the block before printed; `...` stands for anything.
- `settings` is a part of a configuration file, and must be valid as one.
- `diagram` is a drawing.
- `skip: REASON` can't run here, and says why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In the order in which they are run: later pages read the run that the first one makes.
PAGES = tuple(ROOT / name for name in (
    "docs/index.md", "docs/first-run.md", "docs/concepts.md", "docs/bring-your-own.md", "docs/choosing.md",
    "docs/publication.md", "docs/analytics.md", "docs/moving.md", "docs/otherwise.md", "docs/operating.md",
    "docs/map.md", "CONTRIBUTING.md", "README.md",
))  # fmt: skip
_FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"run( exit=\d+)?|file=[\w.-]+|output|settings|diagram|skip: .{10,}")


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

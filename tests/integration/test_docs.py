"""Every block of the pages that can run here runs, in the order of a reader, against a real broker; what a page shows
as output is what came out."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest

from headrace.cli import main
from tests.documents import PAGES, Block, blocks

LIMIT_S = 600.0  # of one command, on a busy machine; alone, all of them together take half a minute
_CHECKER = doctest.OutputChecker()
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# These supervise processes and take signals, or set PyTorch's threads: they get a process of their own.
APART = {"run", "start", "replay"}


class Reader:
    """Someone who follows the pages in one folder."""

    def __init__(self, bootstrap: str) -> None:
        self._names: dict[str, Any] = {}
        self._bootstrap = bootstrap

    def begin(self) -> None:
        """A page: its Python blocks share their names."""
        self._names = {"__name__": "page", "BOOTSTRAP": self._bootstrap}

    def run(self, block: Block) -> tuple[int, str]:
        """Exit code and what was printed."""
        if block.language == "python":
            with _printed() as said:
                exec(compile(block.text, str(block), "exec"), self._names)
            return 0, said.getvalue()
        if block.language == "sql":
            return 0, str(duckdb.sql(block.text))
        assert block.language == "sh", f"{block}: only sh, sql and python run"
        parts = []
        for line in block.text.splitlines():
            code, said_line = _command(line)
            parts.append(said_line)
            if code:
                return code, "".join(parts)
        return 0, "".join(parts)


@contextlib.contextmanager
def _printed() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


def _command(line: str) -> tuple[int, str]:
    words = shlex.split(line, comments=True)
    if not words:
        return 0, ""
    if words[0] == "headrace" and words[1] not in APART:
        before, sys.argv = sys.argv, words
        try:
            with _printed() as said:
                code: Any = 0
                try:
                    main()
                except SystemExit as ended:
                    code = ended.code or 0
        finally:
            sys.argv = before
        return int(code), said.getvalue()
    # A supervisor that is killed takes its roles with it; a shell in between would not.
    command = words if words[0] == "headrace" else ["bash", "-euo", "pipefail", "-c", line]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          text=True, timeout=LIMIT_S)  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_pages_runs_and_prints_what_the_page_shows(
    kafka: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADRACE_BOOTSTRAP_SERVERS", str(kafka["bootstrap.servers"]))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    reader, ran = Reader(str(kafka["bootstrap.servers"])), 0
    for page in PAGES:
        reader.begin()
        printed: str | None = None
        for block in blocks(page):
            if block.directive.startswith("file="):
                (tmp_path / block.directive.removeprefix("file=")).write_text(block.text)
            elif block.runs:
                code, printed = reader.run(block)
                assert code == block.exit_code, f"{block}: exit code {code}\n{block.text}\n{printed}"
                ran += 1
            elif block.directive == "output":
                assert printed is not None, f"{block}: the output of nothing"
                same = _CHECKER.check_output(block.text, printed, _LOOSE)
                assert same, f"{block}: the page shows\n{block.text}\nand what came out is\n{printed}"
    assert ran > 25

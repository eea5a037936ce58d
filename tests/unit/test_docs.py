"""The pages: the site builds strictly and without a network, what is made from the code is what the code says, every
block says what is done with it, settings in pages are settings, and files that pages name exist."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docs import measured, pictures, reference
from headrace.schemas.settings import RunSettings
from headrace.settings import ConfigFile
from tests.documents import DIRECTIVE, PAGES, ROOT, Block, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
                          cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    built = sorted(tmp_path.rglob("*.html"))
    assert {page.stem for page in built} >= {page.stem for page in PAGES if page.parent.name == "docs"}
    loads = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//[^"]+"')
    assert not [(page.name, found) for page in built for found in loads.findall(page.read_text())]
    away = re.compile(r"url\([\"']?(?:https?:)?//")
    assert not [sheet for sheet in tmp_path.rglob("*.css") if away.search(sheet.read_text())]


def test_reference_pages_are_made_from_the_code() -> None:
    made = reference.pages()
    there = {path.name: path.read_text() for path in reference.FOLDER.glob("*.md")}
    other = [name for name in made.keys() | there.keys() if made.get(name) != there.get(name)]
    assert not other, f"docs/reference/{', '.join(other)}: run `.venv/bin/python -m docs.reference`"


def test_figures_in_pages_are_those_of_the_results() -> None:
    shown = measured.pages()
    assert ROOT / "docs" / "otherwise.md" in shown
    other = [path.name for path, text in shown.items() if path.read_text() != text]
    assert not other, f"docs/{', '.join(other)}: run `.venv/bin/python -m docs.reference`"


def test_no_figure_is_written_by_hand_where_figures_are_measured() -> None:
    for path in measured.pages():
        words = re.sub(r"`[^`]*`|\]\([^)]*\)", "", measured.prose(path.read_text()))
        assert not re.findall(r".*\b\d.*", words), path.name


def test_a_page_that_asks_for_what_was_not_measured_is_told_which_row() -> None:
    for line, missing in (("speed of light", "speed of light"), ("speed | light", "light")):
        with pytest.raises(measured.NoSuchFigure, match=f"consumers.json has no row '{missing}'"):
            measured.filled(f"<!-- measured: consumers\n{line}\n-->\n<!-- end -->\n")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_what_their_script_draws(name: str) -> None:
    drawn = (pictures.FOLDER / f"{name}.svg").read_text()
    assert drawn == pictures.PICTURES[name]().svg(), "run `.venv/bin/python -m docs.pictures`"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_says_what_is_done_with_it_and_is_what_it_says(block: Block) -> None:
    assert DIRECTIVE.fullmatch(block.directive), f"{block}: {block.directive!r}: see tests/documents.py"
    if block.language == "python":
        ast.parse(block.text)
    elif block.language == "json" and block.directive.startswith("file="):
        assert all(json.loads(line) for line in block.text.splitlines())
    elif block.language == "toml":
        found = tomllib.loads(block.text)
        if block.directive.startswith("skip"):  # another program's
            return
        if block.directive == "settings":  # a part of a file: what it leaves out has to be somewhere
            found = {"run": "page", "model": {"path": "model"}, "tasks": {"dataset": "chain_sum"}, **found}
        settings = ConfigFile.model_validate(found)
        assert RunSettings.model_validate({key: found[key] for key in found if key in RunSettings.model_fields})
        assert settings.run


def named_files(page: Path) -> set[str]:
    """Paths of the repository that a page names in code."""
    words = re.findall(r"`([\w./{},-]+)`", page.read_text())
    tops = ("schemas/", "streams/", "producers/", "trainer/", "consumers/", "headrace/", "tests/", "benchmarks/",
            "docs/", "examples/", ".ci/")  # fmt: skip
    return {word for word in words if word.startswith(tops) and "<" not in word}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [name for name in named_files(page) if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names {', '.join(sorted(missing))}"


def test_the_map_names_every_folder_and_ten_changes_with_files_that_exist() -> None:
    page = ROOT / "docs" / "map.md"
    text = page.read_text()
    changes = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(changes) == 10
    for change in changes:
        title = change.splitlines()[0]
        steps = re.findall(r"^\d+\. (.*)", change, re.MULTILINE)
        assert len(steps) >= 2 and "`" in steps[0], title
    for folder in ("schemas", "streams", "producers", "trainer", "consumers", "headrace"):
        assert f"| `{folder}/` |" in text
    assert len(named_files(page)) > 50

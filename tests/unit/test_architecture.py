"""The walls between the folders, kept by tests: who may import whom, and what no file may do."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folder -> what of ours it may import beside itself.
MAY_IMPORT: dict[str, set[str]] = {
    "schemas": set(),
    "streams": {"schemas"},
    "producers": {"schemas", "streams.log"},
    "trainer": {"schemas", "streams"},
    "consumers": {"schemas", "streams.log"},
    "headrace": {"schemas", "streams", "producers", "trainer", "consumers"},
}
HEAVY = {"torch", "transformers", "ray", "vllm", "accelerate", "safetensors", "gguf", "pandas", "pyarrow", "polars",
         "matplotlib", "jinja2"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Each import of a file, nested ones too, as (line, full name); a relative one is spelled out."""
    package = ("headrace", *path.relative_to(ROOT).parent.parts)
    if package[1:2] == ("headrace",):
        package = package[1:]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_the_table_allows(folder: str) -> None:
    allowed = [f"headrace.{other}" for other in MAY_IMPORT[folder]]
    own = "headrace" if folder == "headrace" else f"headrace.{folder}"
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(folder)
        for line, name in imports(path)
        if within(name, "headrace") and not within(name, own) and not any(within(name, one) for one in allowed)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_are_relative_within_a_folder_and_absolute_across(folder: str) -> None:
    wrong = []
    for path in files(folder):
        depth = len(path.relative_to(ROOT / folder).parent.parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                parts = module.split(".")
                is_own = (parts[:2] == ["headrace", folder]) if folder != "headrace" else (
                    parts[0] == "headrace" and len(parts) > 1 and parts[1] not in MAY_IMPORT)  # fmt: skip
                if node.level > depth + 1 or (node.level == 0 and is_own):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {'.' * node.level}{module}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_a_folder_by_its_bare_name() -> None:
    """From the repository's root `import streams` works, and is a second copy of every class in it."""
    bare = set(MAY_IMPORT) - {"headrace"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(*MAY_IMPORT, "tests", "benchmarks", "examples")
        for line, name in imports(path)
        if name.split(".")[0] in bare
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_unpickles() -> None:
    """It executes what it reads, and breaks at every refactoring."""
    wrong = []
    for path in files(*MAY_IMPORT, "benchmarks", "examples"):
        names = {name.split(".")[0] for _, name in imports(path)}
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in names & {"pickle", "cloudpickle", "dill", "shelve"}]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            on = ast.unparse(node.func.value)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if (on, node.func.attr) == ("torch", "load") and given.get("weights_only") != "True":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.load without weights_only=True")
            if on in ("np", "numpy") and given.get("allow_pickle") == "True":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: allow_pickle")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["headrace.producers", "headrace.consumers", "headrace.streams.assembling",
                                    "headrace.streams.coordinating", "headrace.cli"])  # fmt: skip
def test_the_light_parts_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stdout + done.stderr


def test_every_package_is_named_in_pyproject_and_exists() -> None:
    found = set()
    for folder in MAY_IMPORT:
        for directory in {path.parent for path in files(folder)}:
            parts = directory.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "headrace" else ("headrace", *parts)))
            assert (directory / "__init__.py").exists(), f"{directory} is a folder of modules but no package"
    assert set(PYPROJECT["packages"]) == found
    assert set(PYPROJECT["package-dir"].values()) == set(MAY_IMPORT)


def test_every_file_beside_the_modules_is_named_as_package_data() -> None:
    patterns = []
    for package, globs in PYPROJECT["package-data"].items():
        folder = package if package == "headrace" else package.removeprefix("headrace.").replace(".", "/")
        patterns += [f"{folder}/{glob}" for glob in globs]
    beside = [
        str(path.relative_to(ROOT))
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
    ]
    assert beside
    assert not [path for path in beside if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]

"""The wheel, alone in an environment that holds nothing else of ours: complete, and named as it should be."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a `build` folder left in the tree would keep modules that have been deleted."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_every_data_file_and_nothing_else(wheel: Path) -> None:
    expected = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


ROUND_TRIP = """
import importlib.util, pathlib, sys
import headrace
assert pathlib.Path(headrace.__file__).is_relative_to(sys.prefix), headrace.__file__
for folder in ("schemas", "streams", "producers", "trainer", "consumers"):
    assert importlib.util.find_spec(folder) is None, f"{folder} pollutes the environment"
    assert importlib.util.find_spec("headrace." + folder) is not None
from headrace.schemas.codec import decode, encode
from headrace.schemas.events import Exhausted
event = Exhausted("group", 1, 2, "lost")
assert decode(encode(event)) == event
print("ok")
"""


def test_an_installed_wheel_round_trips_a_record_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Dependencies come from this environment: a plain path in a .pth file adds its packages, while the .pth files in
    # it, the editable install's among them, are not run.
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run([python, "-I", "-c", ROUND_TRIP], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    command = [str(environment / "bin" / "headrace"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "broker" in done.stdout, done.stderr

"""The environments of the other planes: made once, in a cache folder outside the repository, by pip as it is
configured.

`HEADRACE_BENCH_HOME` names another folder. One that couldn't be made is tried again the next time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


class NotInstallable(Exception):
    """The package can't be installed here; the message says why."""


def folder() -> Path:
    own = os.environ.get("HEADRACE_BENCH_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else cache / "headrace-bench"


@dataclass(frozen=True, slots=True)
class Venv:
    """An environment with these requirements, which are pinned. Another pin makes another environment."""

    name: str
    requirements: tuple[str, ...]

    def make(self) -> Path:
        """Its interpreter. Raises NotInstallable."""
        place = folder() / self.name
        python, stamp = place / "bin" / "python", place / "requirements.txt"
        wanted = "\n".join(self.requirements) + "\n"
        if stamp.is_file() and stamp.read_text() == wanted:
            return python
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        for command in (
            [sys.executable, "-m", "venv", str(place)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
             *self.requirements],
        ):  # fmt: skip
            print(f"making {place}: {' '.join(self.requirements)}", file=sys.stderr)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise NotInstallable((done.stderr.strip().splitlines() or ["pip said nothing"])[-1])
        stamp.write_text(wanted)
        return python

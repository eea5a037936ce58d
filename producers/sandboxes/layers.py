"""Snapshots of the kind `process`: what a sandbox had written, as a read-only layer below others.

A snapshot is a folder, named by its owner's label: `0`, `1`, ... are its layers, newest first, and `base` names what
lies below them. A snapshot of a fork takes the layers of its own base over by hard links, so each can be removed alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from headrace.schemas.errors import SandboxFailed

from . import Owner

OPTIONS_BYTES = 3500  # of the 4,096 that a mount's options may have


class Layers:
    """The snapshots in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def below(self, base: str | None) -> tuple[str, str | None]:
        """The layers of a base, as overlayfs wants them, with a colon after each; and the root below them. Raises
        SandboxFailed for a base that is gone, has too many layers, or a path that overlayfs can't take."""
        if base is None or Path(base).parent != self._folder:
            if base is not None and set(base) & set(":,\\"):
                raise SandboxFailed(f"base {base}: overlayfs takes no path with a colon, comma or backslash")
            return "", base
        layers = self._layers(Path(base))
        if not layers:
            raise SandboxFailed(f"snapshot {base}: it was removed")
        text = "".join(f"{layer}:" for layer in layers)
        if len(text) > OPTIONS_BYTES:
            raise SandboxFailed(f"snapshot {base}: {len(layers)} layers are too many; begin from an earlier one")
        return text, (Path(base) / "base").read_text() or None

    def add(self, label: str, upper: Path, base: str | None, timeout_s: float) -> str:
        """A snapshot of these files over that base. Raises SandboxFailed."""
        made = self._folder / label
        try:
            _, root = self.below(base)
            made.mkdir(parents=True)
            self._copy("-a", upper, made / "0", timeout_s)
            for number, layer in enumerate(self._layers(Path(base)) if base and base != root else (), 1):
                self._copy("-al", layer, made / str(number), timeout_s)
            (made / "base").write_text(root or "")
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            shutil.rmtree(made, ignore_errors=True)
            raise SandboxFailed(f"no snapshot: {error} {said.decode(errors='replace').strip()}".rstrip()) from error
        return str(made)

    @staticmethod
    def _copy(how: str, source: Path, target: Path, timeout_s: float) -> None:
        subprocess.run(["cp", how, "--", str(source), str(target)], check=True, capture_output=True, timeout=timeout_s)

    @staticmethod
    def _layers(snapshot: Path) -> list[Path]:
        try:
            return sorted((one for one in snapshot.iterdir() if one.name.isdecimal()), key=lambda one: int(one.name))
        except OSError:
            return []

    def remove(self, snapshot: str) -> None:
        if Path(snapshot).parent == self._folder:
            shutil.rmtree(snapshot, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def sweep(self) -> set[str]:
        """Remove those whose owners are no more; their labels."""
        found = set()
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                owner = Owner.of_label(name)
                if owner is not None and not owner.alive:
                    self.remove(str(self._folder / name))
                    found.add(name)
        return found

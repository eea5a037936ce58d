"""An image for the kind `docker` that needs no registry: made of this machine's own Debian packages.

It holds the files of some packages and of all that they depend on, as they are installed here, without documentation.
Its name carries a digest of the packages' versions, so it is made once, and anew when they change.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from headrace.schemas.errors import SandboxFailed

NAME = "headrace-plain"
PACKAGES = ("base-files", "base-passwd", "bash", "coreutils", "dash", "debianutils", "diffutils", "findutils", "gawk",
            "grep", "gzip", "hostname", "libc-bin", "mawk", "mount", "ncurses-base", "procps", "python3-minimal", "sed",
            "tar", "util-linux")  # fmt: skip
# What the tasks in examples/terminal are built from: with git, and Python's whole library.
TOOLS_IMAGE = f"{NAME}:tools"
ADDED = ("git", "python3")
LEFT_OUT = re.compile(r"^/usr/share/(doc|man|info|locale|lintian|bug)/|^/(var|boot|run|proc|sys|dev)/|^/etc/shadow|"
                      r"^/etc/(apt|ssl|ssh)/")  # fmt: skip
FOLDERS = {"dev": 0o755, "etc": 0o755, "home": 0o755, "home/agent": 0o755, "proc": 0o755, "root": 0o700, "run": 0o755,
           "sys": 0o755, "tmp": 0o1777, "usr": 0o755, "var": 0o755, "var/tmp": 0o1777}  # fmt: skip
# Not in any package, or with something of this machine in it.
MADE = {"etc/passwd": "root:x:0:0:root:/home/agent:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
        "etc/group": "root:x:0:\nnogroup:x:65534:\n", "etc/hostname": "sandbox\n"}  # fmt: skip


def plain_image(api: Any, packages: Sequence[str] = PACKAGES) -> str:
    """The name of the image, which is made where the daemon doesn't have it. `api`: the SDK's low-level client.
    Raises SandboxFailed, and what the SDK raises."""
    chosen = closure(packages)
    digest = hashlib.sha256("\n".join(sorted(chosen)).encode()).hexdigest()[:16]
    name = f"{NAME}:{digest}"
    if api.images(name):
        return name
    with tempfile.TemporaryFile() as file:
        write_tar(file, (one.partition("=")[0] for one in chosen))
        file.seek(0)
        api.import_image_from_data(file, repository=NAME, tag=digest)
    return name


def tools_image(api: Any) -> None:
    """Makes `TOOLS_IMAGE`, or brings it up to date. Raises as `plain_image`."""
    if lacking := set(ADDED) - {one.partition("=")[0] for one in closure(ADDED)}:
        raise SandboxFailed(f"{TOOLS_IMAGE} is made of this machine's Debian packages, and some aren't here: apt-get "
                            f"install {' '.join(sorted(lacking))}")  # fmt: skip
    api.tag(plain_image(api, (*PACKAGES, *ADDED)), NAME, "tools", force=True)


def closure(packages: Sequence[str]) -> list[str]:
    """`package=version` of the installed ones among these, and of what they depend on. Raises SandboxFailed."""
    if shutil.which("dpkg-query") is None:
        raise SandboxFailed("the plain image is made of Debian packages, and this machine has none: name an image")
    fields = "${Package}\t${Version}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    said = subprocess.run(["dpkg-query", "-W", "-f", fields], check=True, capture_output=True, text=True).stdout
    versions: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    provided: dict[str, str] = {}
    for line in said.splitlines():
        package, version, depends, provides = line.split("\t")
        versions[package] = version
        needs[package] = [word for part in depends.split(",") for word in _names(part.split("|"))]
        for name in _names(provides.split(",")):
            provided.setdefault(name, package)
    found, todo = set[str](), list(packages)
    while todo:
        package = todo.pop()
        package = package if package in versions else provided.get(package, "")
        if package and package not in found:
            found.add(package)
            todo += needs[package]
    return [f"{package}={versions[package]}" for package in sorted(found)]


def _names(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        name = part.strip().partition(" ")[0].partition(":")[0]
        if name:
            yield name


def write_tar(file: IO[bytes], packages: Iterable[str]) -> None:
    """The files of these packages, as they are here."""
    names = [line for package in packages for line in _files(package)]
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, mode in FOLDERS.items():
            _add(tar, name, tarfile.DIRTYPE, mode)
        for name, text in MADE.items():
            _add(tar, name, tarfile.REGTYPE, 0o644, text.encode())
        done = {*FOLDERS, *MADE}
        for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin"):
            if Path("/", name).is_symlink():
                _add(tar, name, tarfile.SYMTYPE, 0o777, link=os.readlink(Path("/", name)))
                done.add(name)
        for name in [*names, "/etc/ld.so.cache", "/etc/alternatives/awk", "/usr/bin/awk", "/usr/bin/python3"]:
            # Packages name /bin/x where the machine has /usr/bin/x.
            path = Path(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
            inside = str(path).lstrip("/")
            if inside and inside not in done and os.path.lexists(path) and not LEFT_OUT.search(f"/{inside}"):
                done.add(inside)
                tar.add(path, inside, recursive=False, filter=_plain)


def _files(package: str) -> list[str]:
    for path in sorted(Path("/var/lib/dpkg/info").glob(f"{package}*.list")):
        if path.name.removesuffix(".list").partition(":")[0] == package:
            return path.read_text().splitlines()
    return []


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """No set-user-id programs, no devices, no owners but root."""
    if not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= 0o1777
    return entry


def _add(tar: tarfile.TarFile, name: str, kind: bytes, mode: int, data: bytes = b"", link: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(data), link
    tar.addfile(entry, io.BytesIO(data))

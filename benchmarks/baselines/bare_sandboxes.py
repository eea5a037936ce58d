"""What a careful team writes first: a container or a bubblewrap of its own for everything, nothing kept ready.

`DockerRun` starts a container per episode by the Docker SDK (quicker than the command line) and runs each step by an
exec of its own, with the same isolation and limits as ours. `BwrapStep` runs each step in a fresh bubblewrap over the
episode's folder.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from typing import Any


class DockerRun:
    def __init__(self, api: Any, image: str) -> None:
        self._api = api
        config = api.create_host_config(init=True, network_mode="none", cap_drop=["ALL"], mem_limit=512 << 20,
                                        security_opt=["no-new-privileges"], pids_limit=256,
                                        nano_cpus=10**9)  # fmt: skip
        self.id = api.create_container(image, ["sleep", "infinity"], host_config=config)["Id"]
        api.start(self.id)

    def step(self, command: str) -> bytes:
        made = self._api.exec_create(self.id, ["bash", "-c", command])["Id"]
        output: bytes = self._api.exec_start(made)
        assert self._api.exec_inspect(made)["ExitCode"] == 0
        return output

    def kill(self) -> None:
        self._api.remove_container(self.id, force=True)


class BwrapStep:
    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp()

    def step(self, command: str) -> bytes:
        return subprocess.run(
            ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL",
             "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
             "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
             "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
             "--bind", self._folder, "/home/agent", "--chdir", "/home/agent", "bash", "-c", command],
            check=True, stdin=subprocess.DEVNULL, capture_output=True).stdout  # fmt: skip

    def kill(self) -> None:
        shutil.rmtree(self._folder)

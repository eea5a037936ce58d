"""A process that takes sandboxes until it is killed, and prints a line for each (`KIND FOLDER`)."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

from headrace.producers.sandboxes import Backend
from headrace.producers.sandboxes.docker import DockerBackend
from headrace.producers.sandboxes.pool import Pool
from headrace.producers.sandboxes.process import ProcessBackend
from headrace.producers.sandboxes.sizing import Size

THREADS = 4
STEP_S = 60.0


def backend_of(kind: str, folder: str | None = None) -> Backend:
    """`folder`: for mount point and snapshots of the kind process."""
    return DockerBackend() if kind == "docker" else ProcessBackend(Path(folder) if folder else None)


def main(kind: str, folder: str) -> None:
    pool = Pool(backend_of(kind, folder), Size(2 * THREADS, THREADS, least=2, most=THREADS))
    print("up", flush=True)

    def take(number: int) -> None:
        draw = random.Random()
        while True:
            with pool.sandbox() as one:
                one.step("echo x > file; sleep 100 & true", STEP_S)
                if draw.random() < 0.1:
                    pool.remove(one.snapshot(STEP_S))
                print("take", flush=True)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A server that speaks S3's protocol on a port of 127.0.0.1, for tests of what lies in object storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.node import free_ports

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer

BUCKET = "weights"


class ObjectStore:
    """Objects outlive `stop`, not the process."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0][0]
        self._server: ThreadedMotoServer | None = None
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        if self._server is None:
            self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
            self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def environment(self) -> dict[str, str]:
        """How any process finds it, as it would find another S3-compatible store."""
        return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "someone",
                "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
                "NO_PROXY": "127.0.0.1"}  # fmt: skip


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """With its bucket, and this process's environment set for it."""
    import s3fs

    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # what was opened before knows another address
        try:
            s3fs.S3FileSystem().mkdir(BUCKET)
            yield store
        finally:
            store.stop()
            s3fs.S3FileSystem.clear_instance_cache()

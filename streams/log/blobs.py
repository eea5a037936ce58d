"""What is too large for the log lies beside it, in a blob store; this module decides how it gets there and comes back.

A blob is named by its content, under the store's URL and the run, so writing it twice is writing it once. It is written
*before* the record (or transaction) that names it: a crash between the two leaves an orphan, which no record names and
which does no harm. A reader proves length and digest before anything else looks at the bytes, so a blob that is lost,
cut short or altered is an error that names it, never a wrong payload.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from headrace.schemas.codec import encode
from headrace.schemas.errors import BlobDamaged, BlobError, BlobLost, SettingsError
from headrace.schemas.events import Blob, EpisodeEnded, GroupPayload, SampleChunk, Span
from headrace.schemas.hashes import digest
from headrace.schemas.payload import split
from headrace.schemas.settings import LogSettings, RunSettings


@dataclass(frozen=True, slots=True)
class Blobs:
    """A run's blobs under `url`. `above`: a payload of more bytes becomes a blob."""

    url: str
    run: str
    above: int

    def put(self, data: bytes) -> Blob:
        """Store the bytes and return what a record says of them. Raises BlobError, SettingsError."""
        checksum = digest(data)
        address = f"{self.folder}/{checksum.hex()}"
        store, path = _open(address)
        try:
            if isinstance(store, LocalFileSystem):
                # Elsewhere a put is one step; here a crash would leave part of it under the final name.
                os.makedirs(os.path.dirname(path), exist_ok=True)
                aside = f"{path}.{uuid.uuid4().hex[:8]}"
                with open(aside, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, path)
            else:
                store.pipe_file(path, data)
        except Exception as error:  # each store raises its own
            raise BlobError(f"blob {address} of {len(data)} bytes can't be written ({_said(error)}): check "
                            "log.blob_url or weights.store_url, and the store behind it") from error  # fmt: skip
        return Blob(address, len(data), checksum)

    @property
    def folder(self) -> str:
        """The run's own place under `url`."""
        return f"{self.url.rstrip('/')}/{self.run}"

    def remove_all(self) -> None:
        """All of the run's blobs. Raises BlobError, SettingsError."""
        store, path = _open(self.folder)
        try:
            store.invalidate_cache()
            if store.exists(path):
                store.rm(path, recursive=True)
        except Exception as error:
            raise BlobError(f"the blobs below {self.folder} can't be removed ({_said(error)})") from error

    def pack(self, payload: GroupPayload) -> list[SampleChunk]:
        """The records of `samples` that carry this payload; what they name has been stored. Raises as `put`."""
        data = encode(payload)
        if len(data) <= self.above:
            return split(payload.group, data)
        return [SampleChunk(payload.group, 0, 1, b"", self.put(data))]


def open_blobs(log: LogSettings, run: str) -> Blobs | None:
    """The run's blob store, or None where it has none. Raises SettingsError where no such store can be opened here."""
    if log.blob_url is None:
        return None
    _open(log.blob_url)
    return Blobs(log.blob_url, run, log.blob_bytes)


def open_weights(url: str | None, run: str) -> WeightStore | None:
    """The run's store of weights, or None where they lie in the log. Raises SettingsError where no such store can be
    opened here."""
    if url is None:
        return None
    _open(url)
    return WeightStore(url, run)


@dataclass(frozen=True, slots=True)
class WeightStore:
    """Published weights, a folder for each version; within it files are named by their content, as all blobs."""

    url: str
    run: str

    def put(self, version: int, data: bytes) -> Blob:
        """Raises BlobError, SettingsError."""
        return Blobs(self.url, f"{self._folder}/{version:08d}", 0).put(data)

    def forget_before(self, version: int) -> None:
        """Delete what belongs to earlier versions, orphans of crashes too. Raises BlobError."""
        address = f"{self.url.rstrip('/')}/{self._folder}"
        store, path = _open(address)
        try:
            store.invalidate_cache()  # another process may have written since it was listed
            for folder in store.ls(path, detail=False):
                name = folder.rstrip("/").rpartition("/")[2]
                if name.isdigit() and int(name) < version:
                    store.rm(folder, recursive=True)
        except Exception as error:  # each store raises its own
            raise BlobError(f"weights below {address} can't be deleted ({_said(error)})") from error

    @property
    def _folder(self) -> str:
        return f"{self.run}/weights"


def stores(settings: RunSettings, run: str) -> list[Blobs]:
    """All that a run may have put into stores. Raises SettingsError where one can't be opened here."""
    urls = dict.fromkeys(url for url in (settings.log.blob_url, settings.weights.store_url) if url is not None)
    for url in urls:
        _open(url)
    return [Blobs(url, run, settings.log.blob_bytes) for url in urls]


def get(blob: Blob) -> bytes:
    """The bytes, proved. Raises BlobLost, BlobDamaged, BlobError."""
    store, path = _open(blob.address)
    try:
        data = bytes(store.cat_file(path))
    except FileNotFoundError as error:
        raise BlobLost(f"blob {blob.address} ({blob.length} bytes) is not there: it was deleted, or this machine sees "
                       "another store under that address") from error  # fmt: skip
    except Exception as error:
        raise BlobError(f"blob {blob.address} can't be read ({_said(error)})") from error
    if len(data) != blob.length:
        raise BlobDamaged(f"blob {blob.address} has {len(data)} bytes, its record says {blob.length}: it was cut "
                          "short or replaced")  # fmt: skip
    if digest(data) != blob.digest:
        raise BlobDamaged(f"blob {blob.address} has another digest than its record says: it was altered")
    return data


def fetched(chunks: Sequence[SampleChunk]) -> list[SampleChunk]:
    """The chunks, with the data of those that lie in blobs. Raises as `get`."""
    return [chunk if chunk.blob is None else replace(chunk, data=get(chunk.blob), blob=None) for chunk in chunks]


def text(event: Span | EpisodeEnded) -> str | None:
    """The event's long text (`detail` or `text`), wherever it lies. Raises as `get`."""
    if event.blob is not None:
        return get(event.blob).decode()
    return event.detail if isinstance(event, Span) else event.text


def _open(url: str) -> tuple[Any, str]:
    try:
        store, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SettingsError(f"the store {url} can't be opened here ({_said(error)}): install the fsspec package "
                            "for that kind of store") from error  # fmt: skip
    except Exception as error:
        raise BlobError(f"the blob store at {url} can't be opened ({_said(error)})") from error
    return store, str(path)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""Weights that lie in a store, a folder or S3: what is there, what is refused, and how a replica recovers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from headrace.schemas.codec import decode
from headrace.schemas.errors import BlobDamaged, BlobError, BlobLost
from headrace.schemas.events import WeightChunk
from headrace.schemas.topics import WEIGHTS
from headrace.streams.log.reader import end_offsets, read_range
from headrace.trainer.publish import Policy
from tests.object_store import BUCKET, object_store
from tests.receiving import Kafka, Source, Target, model, receiving, until


@dataclass(frozen=True)
class Place:
    """Where weights are to lie, and how it goes away and comes back."""

    url: str
    go: Callable[[], None]
    come_back: Callable[[], None]


@pytest.fixture(scope="module", params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param == "s3":
        with object_store() as server:
            yield Place(f"s3://{BUCKET}/some/folder", server.stop, server.start)
        return
    away = threading.Event()
    honest = LocalFileSystem.cat_file

    def cat_file(self: Any, *args: Any, **options: Any) -> Any:
        if away.is_set():
            raise ConnectionError("no route to the store")
        return honest(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFileSystem, "cat_file", cat_file)
        yield Place((tmp_path_factory.mktemp("store")).as_uri(), away.set, away.clear)


@pytest.fixture
def stored(kafka: Kafka, run_name: str, place: Place) -> Source:
    one = Source(kafka, run_name, store_url=place.url, snapshot_every=3)
    one.begin()
    return one


def files(source: Source, version: int) -> list[str]:
    """Addresses of what lies there of a version."""
    address = f"{source.settings.weights.store_url}/{source.topics.run}/weights/{version:08d}"
    store, path = fsspec.core.url_to_fs(address)
    store.invalidate_cache()
    return [f"{address}/{Path(one).name}" for one in sorted(store.ls(path, detail=False))] if store.exists(path) else []


def read(address: str) -> bytes:
    store, path = fsspec.core.url_to_fs(address)
    return bytes(store.cat_file(path))


def test_weights_lie_in_the_store_and_the_log_names_them(stored: Source) -> None:
    target = Target(model())
    with receiving(stored, target) as receiver:
        stored.publish(2)
        until(lambda: target.version == 2, lambda: receiver.apply_ready(target))
        assert target.serves(stored.history[2])
    name = stored.topics.name(WEIGHTS)
    found = [decode(r.value) for r in read_range(stored.kafka, name, 0, 0, end_offsets(stored.kafka, name)[0])]
    assert len(found) == 2
    for version, chunk in enumerate(found, 1):
        assert isinstance(chunk, WeightChunk) and chunk.blob is not None and chunk.data == b""
        assert files(stored, version) == [chunk.blob.address]
        assert chunk.blob.address.endswith(f"/{chunk.blob.digest.hex()}")
        assert len(read(chunk.blob.address)) == chunk.blob.length


@pytest.mark.parametrize("fault", ["missing", "altered", "cut short"])
def test_file_that_is_missing_or_damaged_is_refused_with_its_address_and_the_next_snapshot_mends_it(
    stored: Source, fault: str
) -> None:
    target = Target(model())
    stored.publish(1)
    with receiving(stored, target) as receiver:
        assert target.version == 1
        honest = Policy.write
        broken: list[str] = []

        def write(self: Policy, *makers: Any) -> Any:
            """Before the publication is on the log, so that no receiver is faster."""
            (address,) = files(stored, 2)
            data = read(address)
            store, path = fsspec.core.url_to_fs(address)
            store.rm(path)
            if fault != "missing":
                store.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]) if fault == "altered" else data[:-1])
            broken.append(address)
            return honest(self, *makers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Policy, "write", write)
            stored.publish(1)
        until(lambda: bool(receiver.refusals), lambda: receiver.apply_ready(target))
        version, error = receiver.refusals[0]
        assert version == 2 and isinstance(error, BlobLost if fault == "missing" else BlobDamaged)
        assert broken[0] in str(error)
        assert target.version == 1 and target.serves(stored.history[1])
        stored.publish(1)  # and its snapshot
        until(lambda: target.version == 3, lambda: receiver.apply_ready(target))
        assert target.applied == [1, 3] and target.serves(stored.history[3])


def test_store_that_is_away_is_asked_again(stored: Source, place: Place) -> None:
    target = Target(model())
    honest = Policy.write

    def write(self: Policy, *makers: Any) -> Any:
        place.go()  # before any receiver hears of the version
        return honest(self, *makers)

    try:
        with receiving(stored, target) as receiver:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Policy, "write", write)
                stored.publish(1)
            until(lambda: receiver.newest == 1 and receiver._said is not None, lambda: receiver.apply_ready(target), 60)
            assert target.version == 0 and receiver.refusals == [] and "can't be read" in str(receiver._said)
            place.come_back()
            until(lambda: target.version == 1, lambda: receiver.apply_ready(target), 60)
            assert target.serves(stored.history[1])
    finally:
        place.come_back()


def test_files_below_the_last_but_one_snapshot_are_deleted(stored: Source) -> None:
    stored.publish(10)  # snapshots at 3, 6 and 9
    assert [version for version in range(1, 11) if files(stored, version)] == [6, 7, 8, 9, 10]
    target = Target(model())
    with receiving(stored, target) as receiver:
        assert target.version == 10 and target.serves(stored.history[10]) and receiver.refusals == []


def test_store_that_takes_nothing_publishes_nothing(kafka: Kafka, run_name: str, place: Place) -> None:
    """The trainer says so and ends; started again, it publishes what was committed."""
    url = "s3://there-is-no-such-bucket/x" if place.url.startswith("s3") else "file:///proc/no-such-folder"
    source = Source(kafka, run_name, store_url=url)
    source.begin()
    with pytest.raises(BlobError, match="can't be written"):
        source.publish()
    assert [one.version for one in source.publications()] == [0]

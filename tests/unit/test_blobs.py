"""What lies beside the log is found whole, or named: lost, cut short, altered, or never written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from headrace.schemas.columns import pack_float32, pack_int32
from headrace.schemas.errors import BlobDamaged, BlobError, BlobLost, InvalidRecord, RecordTooLarge, SettingsError
from headrace.schemas.events import GroupPayload, Manifest, PayloadEpisode, PayloadSpan, SampleChunk, Task, VersionRun
from headrace.schemas.hashes import GENESIS
from headrace.schemas.payload import content_hash, from_chunks, to_chunks
from headrace.schemas.settings import LogSettings
from headrace.schemas.topics import BATCHES, MANIFEST_BYTES, RECORD_BYTES, RunTopics
from headrace.streams.coordinating import _outputs
from headrace.streams.coordinator import Decision
from headrace.streams.log.blobs import Blobs, fetched, get, open_blobs
from tests.scripted import lease


def payload(tokens: int) -> GroupPayload:
    ids, logprobs = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32)
    span = PayloadSpan("model", 0, -1, tokens, (VersionRun(1, tokens),), pack_int32(ids), pack_float32(logprobs), None)
    episode = PayloadEpisode(0, 0, "i", "model_success", 1.0, 1.0, (span,), (1,))
    return GroupPayload("g", Task("t", "s", "{}", 0), (episode,))


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs((tmp_path / "store").as_uri(), "run", 1000)


def file(address: str) -> Path:
    return Path(address.removeprefix("file://"))


def test_blob_is_named_by_its_content_so_writing_it_twice_is_writing_it_once(blobs: Blobs) -> None:
    first, second, other = blobs.put(b"abc"), blobs.put(b"abc"), blobs.put(b"abd")
    assert first == second != other and first.length == 3
    assert get(first) == b"abc" and get(other) == b"abd"
    assert {path.name for path in file(first.address).parent.iterdir()} == {first.digest.hex(), other.digest.hex()}
    assert blobs.put(b"") == blobs.put(b"") and get(blobs.put(b"")) == b""


def test_blob_that_is_lost_cut_short_or_altered_is_an_error_that_names_it(blobs: Blobs) -> None:
    blob = blobs.put(b"0123456789")
    path = file(blob.address)
    path.write_bytes(b"01234")
    with pytest.raises(BlobDamaged, match=f"{blob.address} has 5 bytes, its record says 10"):
        get(blob)
    path.write_bytes(b"0123456780")
    with pytest.raises(BlobDamaged, match=f"{blob.address} has another digest"):
        get(blob)
    path.unlink()
    with pytest.raises(BlobLost, match=f"{blob.address} .10 bytes. is not there"):
        get(blob)
    assert blobs.put(b"0123456789") == blob and get(blob) == b"0123456789"  # written anew


def test_crash_while_a_blob_is_written_leaves_nothing_under_its_name(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(BlobError, match="can't be written .*disk full.*log.blob_url"):
        blobs.put(b"abc")
    monkeypatch.undo()
    blob = blobs.put(b"abc")
    assert file(blob.address).read_bytes() == b"abc"


def test_payload_is_the_same_whether_chunked_or_in_a_blob(blobs: Blobs) -> None:
    whole = payload(1000)
    chunked, stored = to_chunks(whole, limit=900), blobs.pack(whole)
    assert len(chunked) > 5 and len(stored) == 1 and not stored[0].data
    assert from_chunks(fetched(chunked)) == from_chunks(fetched(stored)) == whole
    assert content_hash(from_chunks(fetched(stored))) == content_hash(whole)
    assert isinstance(stored[0], SampleChunk) and stored[0].blob is not None
    with pytest.raises(InvalidRecord, match="must be fetched first"):
        from_chunks(stored)
    small = Blobs(blobs.url, "run", 1 << 20).pack(whole)
    assert small[0].blob is None and from_chunks(small) == whole


@pytest.mark.parametrize(("url", "said"), [
    ("/data/blobs", "whole URL"),
    ("file://", "whole URL"),
    ("s3://key:secret@bucket/x", "leave user and password out"),
    ("memory://x", "ends with its process"),
])  # fmt: skip
def test_store_that_could_not_work_is_refused_with_the_settings(url: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LogSettings(blob_url=url)


def test_store_whose_kind_is_not_installed_is_a_settings_error_at_the_start() -> None:
    with pytest.raises(SettingsError, match="nosuch://x/y can't be opened here"):
        open_blobs(LogSettings(blob_url="nosuch://x/y"), "run")
    assert open_blobs(LogSettings(), "run") is None


def test_manifest_that_no_record_holds_is_an_error_that_names_the_setting() -> None:
    manifest = Manifest(
        number=0, previous=GENESIS, batch=3, target=2, settings_offset=0, decided_ms=0, groups=(), positions=(),
        closures_since=0, segment_group=b"\0" * MANIFEST_BYTES, segment_slot=b"", segment_version=b"",
        segment_count=b"", segment_drift=b"", segment_weight=b"",
    )  # fmt: skip
    with pytest.raises(RecordTooLarge, match="manifest of batch 3 takes .* lower batch.groups"):
        _outputs(RunTopics("run"), Decision(batches=[(manifest, b"\0" * (MANIFEST_BYTES + 1))]), [])
    huge = lease(task=Task("big-1", "jsonl", "x" * RECORD_BYTES, 0))
    with pytest.raises(RecordTooLarge, match="task big-1"):
        _outputs(RunTopics("run"), Decision(tasks=[huge], trajectories=[huge]), [])


def test_only_batches_take_records_beyond_the_usual_limit() -> None:
    limits = {s.name.rsplit(".", 1)[1]: int(s.config["max.message.bytes"]) for s in RunTopics("r").specs(4, 1)}
    assert limits.pop(BATCHES) > MANIFEST_BYTES
    assert set(limits.values()) == {1_048_588}

"""The report against another way of computing the same: lag and mismatch of trained tokens from the raw records, where
its figures come from manifests and from what the trainer says of itself; and waits against the delays that were
scripted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.consumers import open_run
from headrace.consumers.report import gather
from headrace.models import tiny_model
from headrace.producers.episodes import Attempt, EpisodeWriter
from headrace.producers.jobs import Job, budget_of
from headrace.producers.scheduler import Pace
from headrace.schemas.columns import unpack_float32, unpack_ids
from headrace.schemas.events import AttemptEnded, Manifest
from headrace.schemas.payload import from_chunks
from headrace.schemas.topics import BATCHES, GROUPS, SAMPLES, RunTopics
from tests.scripted import lease
from tests.scripted_run import ScriptedRun, scripted_settings
from tests.synthetic_run import SyntheticRun, run_settings

torch = pytest.importorskip("torch")


@pytest.mark.slow
def test_lag_and_mismatch_are_what_a_plain_forward_over_the_raw_records_says(
    kafka: Mapping[str, Any], run_name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from headrace.trainer.loop import run_trainer

    model = tiny_model(tmp_path / "model", hidden=32)
    written = SyntheticRun(kafka, run_name, run_settings(model))
    written.write_random_batches(2)
    run_trainer(kafka, written.topics, written.settings, threading.Event(), tmp_path / "state", 2, threads=1)
    written.close()
    run = open_run(run_name, kafka)
    payloads = {one.group: one for one in from_records(run)}
    manifests = [event for _, event in run.events(BATCHES) if isinstance(event, Manifest)]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float().eval()  # version 0, as served
    lags: list[int] = []
    off: list[float] = []
    for manifest in manifests:
        for ref in manifest.groups:
            for episode in payloads[ref.group].episodes:
                ids = [int(i) for span in episode.spans for i in unpack_ids(span.tokens, span.count)]
                with torch.inference_mode():
                    logits = plain(torch.tensor([ids])).logits[0].double()
                known = torch.log_softmax(logits, -1)
                at = 0
                for span in episode.spans:
                    versions = [run.version for run in span.versions for _ in range(run.count)]
                    said = unpack_float32(span.logprobs) if span.logprobs is not None else np.zeros(0)
                    for i, version in enumerate(versions):
                        lags.append(manifest.target - version)
                        if version == manifest.target == 0:
                            off.append(abs(float(known[at + i - 1, ids[at + i]]) - float(said[i])))
                    at += span.count
    report = gather(run.snapshot(), run.settings, 0)
    lag = report.figures.lag
    assert lag is not None and (lag.count, lag.max) == (len(lags), max(lags)) and max(lags) == 1
    assert lag.mean == pytest.approx(np.mean(lags)) and lag.p95 == np.percentile(lags, 95)
    first = report.alignment.versions[0]
    assert (first.version, first.tokens) == (1, len(off))
    assert first.mean == pytest.approx(np.mean(off), abs=2e-3) and first.max == pytest.approx(max(off), abs=2e-2)


def scripted(group: str, slot: int) -> dict[str, float]:
    """Seconds of a fake environment, engine and queue, by step; no two attempts have the same."""
    number = int(group[1:])
    return {"queue": 0.25 * slot, "prefill": 0.125, "decode": 1.0 + number, "scorer": 8.0 if slot else 0.5 * number}


def measured(group: str, slot: int) -> dict[str, float]:
    """What the worker's own time-keeping makes of these delays, on a clock that jumps by exactly them."""
    delay = scripted(group, slot)
    one = lease(group)
    writer = EpisodeWriter(Attempt(group, slot, 0, "w0"), lambda key, event: None, 256)
    job = Job(one, writer.attempt, writer, budget_of(one), received=1000.0, tokens=[1, 2, 3, 4])
    job.submitted = job.received + delay["queue"]
    job.first_token = job.submitted + delay["prefill"]
    job.decoded(job.first_token + delay["decode"], "stop", Pace())
    return job.scored(job.finished + delay["scorer"])


def test_scripted_delays_come_back_as_exactly_those_waits(kafka: Mapping[str, Any], run_name: str) -> None:
    written = ScriptedRun(kafka, RunTopics(run_name), scripted_settings(), timings=measured,
                          judge=lambda group, slot, attempt: float(slot == 0))  # fmt: skip
    written.until(3)
    written.close()
    run = open_run(run_name, kafka)
    ended = [event for _, event in run.events(GROUPS) if isinstance(event, AttemptEnded)]
    waits = gather(run.snapshot(), run.settings, 0).figures.waits
    for step in ("queue", "prefill", "decode", "scorer"):
        delayed = [scripted(one.group, one.slot)[step] for one in ended]
        assert waits.steps_s.get(step, 0.0) == sum(delayed)
    assert len(waits.stragglers) >= 3
    for one in waits.stragglers:
        delays = scripted(one.group, one.slot)
        longest = max(delays, key=delays.__getitem__)
        assert (one.state, one.state_s) == (longest, delays[longest])
    table = run.table("waits").to_pandas()
    for row in table[table["step"] != "model"].itertuples():
        assert row.wait_ms == 1000 * scripted(row.group, row.slot)[row.step]
    assert len(table[table["step"] == "scorer"]) == len(ended)


def from_records(run: Any) -> list[Any]:
    chunks: dict[str, list[Any]] = {}
    for _, event in run.events(SAMPLES):
        chunks.setdefault(event.group, []).append(event)
    return [from_chunks(parts) for parts in chunks.values()]

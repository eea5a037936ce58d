"""Reports of runs of every size and kind, for tests in a browser and for the pictures in docs/.

`python -m tests.pages RUN.html PICTURE.png [--phone]` takes a picture of a page.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._long_run import FileLog, Shape, write_run
from headrace.consumers.report import Report, gather
from headrace.schemas.codec import decode, encode
from headrace.schemas.events import AttemptEnded, Chained, Event, Heartbeat, PublicationClock, Score, Version
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Boundary, Outcome
from headrace.schemas.settings import RunSettings
from tests.memory_log import MemoryLog

SETTINGS = RunSettings.model_validate({"model": {"path": "models/none"}, "tasks": {"dataset": "chain_sum"}})
SMALL = Shape(spans=1, span_tokens=8, prompt_tokens=4)
PHONE, DESK = (390, 844), (1280, 900)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def browser_path() -> str | None:
    return next((path for name in CHROMIUM if (path := shutil.which(name))), None)


@contextmanager
def opened_page(width: int, height: int) -> Iterator[Any]:
    """A page of a real browser (Playwright's), of this size."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()


def written(groups: int, shape: Shape = SMALL) -> MemoryLog:
    """A finished run, with every pair of outcome and boundary that an attempt can end with, step times, clocks of
    publications, and evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), groups, shape)
        log = MemoryLog.copy_of(FileLog(Path(folder)))
    ends = [(outcome, boundary) for outcome in Outcome for boundary in Boundary]
    count = 0

    def change(event: Event) -> Event:
        nonlocal count
        if isinstance(event, AttemptEnded):
            count += 1
            outcome, boundary = ends[count // 9 % len(ends)] if count % 9 == 0 else (Outcome.MODEL_SUCCESS, "none")
            slow = 4000.0 if count % 13 == 0 else 0.0
            times = {"queue": 10.0, "prefill": 20.0, "decode": 300.0 + 10 * event.slot, "environment": slow}
            return replace(event, outcome=str(outcome), boundary=str(boundary), timings_ms=times,
                           reason="stop" if boundary == "none" else f"{boundary}_broke")  # fmt: skip
        if isinstance(event, Version) and event.version:
            told = {"mismatch_mean": 0.01, "mismatch_max": 0.3, "mismatch_tokens": 64.0, "ess": 0.97,
                    "ratio_mean": 1.01, "waiting_s": 1.0, "compute_s": 4.0, "fetching_s": 0.1, "publishing_s": 0.2}
            return replace(event, metrics=told)
        return event

    for place in [place for place in log.logs if place[0] in ("groups", "policy")]:
        log = _rechained(log, place, change)
    last = max((record.timestamp_ms for records in log.logs.values() for record in records), default=0)
    for version in range(1, groups // shape.batch + 1):
        clocks = [float(last + 1000 * version + ms) for ms in (0, 100, 150, 200, 230, 240, 300)]
        log.append("fleet", 0, PublicationClock("w", "w1", version, *clocks), at_ms=last)
        counters = {"busy_s": 4.0 * version, "idle_paced_s": 1.0 * version, "gpu_s": 5.0 * version}
        log.append("fleet", 0, Heartbeat("w", "w1", version, 8, 0, True, "{}", counters), at_ms=last + 1000 * version)
        log.append("evals", 0, Score("held-out", version, b"", 100, 100, 1 - 0.5 / version, 0.04, "{}", "{}", version))
    return log


def _rechained(log: MemoryLog, place: tuple[str, int], change: Callable[[Event], Event]) -> MemoryLog:
    """Every record as `change` has it, and each again with the digest of the one before it."""
    records, heads = [], dict[str, bytes]()
    for record in log.logs[place]:
        event = change(decode(record.value))
        assert isinstance(event, Chained)
        writer = str(getattr(event, "writer", ""))
        before = heads.get("create" if writer == "trainer" and writer not in heads else writer)
        value = encode(event if before is None else replace(event, previous=before))
        heads[writer] = digest(value)
        records.append(replace(record, value=value))
    return MemoryLog(log.run, {**log.logs, place: records})


def reports() -> dict[str, Report]:
    """By name: 1, 100 and 5,000 episodes, an empty run, one that has just begun, one in progress."""
    logs = {"1": written(1, replace(SMALL, slots=1, batch=1)), "100": written(25), "5000": written(1250)}
    empty = MemoryLog.empty("empty", dict.fromkeys(("groups", "trajectories", "samples"), 4))
    whole = logs["100"]
    times = sorted(record.timestamp_ms for record in whole.logs["policy", 0])
    cut = times[3] + 1  # version 1 is committed and published; the rest of its second batch is on the way
    running = MemoryLog("running", {place: [r for r in records if r.timestamp_ms < cut]
                                    for place, records in whole.logs.items()})  # fmt: skip
    logs |= {"empty": empty, "running": running}
    return {name: gather(log, SETTINGS, 1 + max((r.timestamp_ms for rs in log.logs.values() for r in rs), default=0))
            for name, log in logs.items()}  # fmt: skip


def main(argv: list[str]) -> None:
    page_file, picture = Path(argv[0]).resolve(), Path(argv[1])
    with opened_page(*(PHONE if "--phone" in argv else DESK)) as page:
        page.goto(page_file.as_uri())
        page.screenshot(path=picture)


if __name__ == "__main__":
    main(sys.argv[1:])

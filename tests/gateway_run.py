"""A run that lives from its gateway: real broker, assembler, coordinator and trainer, a real (tiny) model, and the
gateway as a process of its own, to be killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.consumers import Ledger, audit, open_run
from headrace.create import create_run
from headrace.models import tiny_model
from headrace.schemas.codec import decode
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Event, Span
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import TRAJECTORIES, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.coordinating import run_coordinator
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range
from headrace.streams.tasks import task_source
from tests.roles import role

TESTS = Path(__file__).parent
TOKEN = "the admin token"
START_S = 180.0


class Answered(Exception):
    """An HTTP error, with its body."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body
        super().__init__(f"{status}: {body}")


class GatewayRun:
    """Start it with `roles`; then `start_gateway`."""

    def __init__(self, folder: Path, kafka: dict[str, Any], run: str, *, model: Path | None = None,
                 engine: str = "", **sections: Any) -> None:  # fmt: skip
        """`engine`: lines of [site] that choose one; `sections`: of the run settings, over those here."""
        self.folder, self.kafka, self.topics = folder, kafka, RunTopics(run)
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("a", "bb", "so", "tree")))
        plain: dict[str, Any] = {
            "model": {"path": str(model or tiny_model(folder / "model")), "max_length": 1024},
            "tasks": {"source": "jsonl", "path": str(tasks), "score": "scorers:vowels"},
            "rollout": {"group_size": 2, "max_new_tokens": 400, "lease_timeout_s": 3, "max_attempts": 3},
            "batch": {"groups": 1, "max_lag": 6},
            "log": {"partitions": 2, "commit_ms": 50},
        }
        self.settings = RunSettings.model_validate(plain | sections)
        self.config = folder / "site.toml"
        self.config.write_text(
            f'[site]\nslots = 16\nworker_threads = 1\n{engine}\n[site.gateway]\nport = 0\norphan_grace_s = 10\n'
            f'[site.kafka]\n"bootstrap.servers" = "{kafka["bootstrap.servers"]}"\n'
        )
        self.gateway: subprocess.Popen[bytes] | None = None
        self.url = ""

    @contextlib.contextmanager
    def roles(self) -> Iterator[None]:
        """Assembler, coordinator and trainer in threads; the gateway, if one runs, is killed at the end."""
        from headrace.trainer.loop import run_trainer  # torch: whoever only asks a gateway needs none

        create_run(self.kafka, self.topics, self.settings)
        what = (self.kafka, self.topics, self.settings)
        state = self.folder / "state"
        with role(run_assembler, *what) as a, role(run_coordinator, *what, task_source(self.settings.tasks)) as b:
            with contextlib.ExitStack() as stack:
                stop, raised = threading.Event(), list[BaseException]()

                def train() -> None:
                    try:
                        run_trainer(*what, stop, state_dir=state)
                    except BaseException as error:
                        raised.append(error)

                thread = threading.Thread(target=train)
                thread.start()
                stack.callback(thread.join, 60.0)
                stack.callback(stop.set)
                stack.callback(self.kill_gateway)
                yield
                assert not (a or b or raised), (a, b, raised)

    def start_gateway(self, name: str = "gw") -> None:
        log = self.folder / f"{name}.log"
        environment = {**os.environ, "HEADRACE_HOME": str(self.folder / "home"), "HEADRACE_GATEWAY_TOKEN": TOKEN,
                       "PYTHONPATH": str(TESTS / "unit"), "OMP_NUM_THREADS": "1"}  # fmt: skip
        before = log.read_text().count(" at http://") if log.exists() else 0
        with open(log, "ab") as out:
            self.gateway = subprocess.Popen(
                [sys.executable, "-m", "headrace", "start", "gateway", self.topics.run, "--config", str(self.config),
                 "--name", name, "--parent", str(os.getpid())],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment)  # fmt: skip
        end = time.monotonic() + START_S
        while (said := log.read_text()).count(" at http://") <= before:
            assert self.gateway.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.1)
        line = [line for line in said.splitlines() if " at http://" in line][-1]
        self.url = line.split(" at ")[1].split("/v1;")[0]

    def kill_gateway(self) -> None:
        if self.gateway is not None:
            self.gateway.kill()
            self.gateway.wait()

    # ------------------------------------------------------------------------------------------------- requests

    def call(self, path: str, body: Any = None, key: str = TOKEN, timeout_s: float = 120.0,
             headers: Mapping[str, str] | None = None) -> Any:  # fmt: skip
        """POST where there is a body, else GET. Raises Answered."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"authorization": f"Bearer {key}",
                                                                     "content-type": "application/json",
                                                                     **(headers or {})})  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise Answered(error.code, json.loads(error.read() or b"null")) from None

    def episodes(self, **asked: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.call("/v1/episodes", {"wait_s": 60, **asked})
        return found

    def one(self, purpose: str = "eval") -> dict[str, Any]:
        """One episode (id, key, slot, attempt), with its group."""
        given = self.episodes(size=1, purpose=purpose)
        found: dict[str, Any] = given["episodes"][0] | {"group": given["group"]}
        return found

    def chat(self, key: str, messages: list[Any], **more: Any) -> Any:
        return self.call("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 8, **more}, key)

    def finish(self, episode: str, reward: float | None, **more: Any) -> Any:
        return self.call(f"/v1/episodes/{episode}/finish", {"reward": reward, **more})

    # ------------------------------------------------------------------------------------------------- the log

    def events(self, group: str | None = None) -> list[Event]:
        """Of `trajectories`, in order."""
        name = self.topics.name(TRAJECTORIES)
        ends = end_offsets(self.kafka, name)
        found = [decode(record.value) for p, begin in beginning_offsets(self.kafka, name).items()
                 for record in read_range(self.kafka, name, p, begin, ends[p])]  # fmt: skip
        return [event for event in found if group is None or getattr(event, "group", None) == group]

    def attempt(self, one: Mapping[str, Any]) -> list[EpisodeStarted | Span | EpisodeEnded]:
        """An episode's events, once it has ended."""
        end = time.monotonic() + 30
        while True:
            found = [event for event in self.events(one["group"])
                     if isinstance(event, EpisodeStarted | Span | EpisodeEnded)
                     and (event.slot, event.attempt) == (one["slot"], one["attempt"])]  # fmt: skip
            if found and isinstance(found[-1], EpisodeEnded):
                return found
            assert time.monotonic() < end, found
            time.sleep(0.1)

    def closed(self, groups: list[str], timeout_s: float = 60.0) -> dict[str, Any]:
        """Views of these groups, once all of them have closed."""
        end = time.monotonic() + timeout_s
        while True:
            views = {view.id: view for view in open_run(self.topics.run, self.kafka).groups() if view.id in groups}
            if all(name in views and views[name].closure for name in groups):
                return views
            assert time.monotonic() < end, (groups, views)
            time.sleep(0.2)

    def ledger(self) -> Ledger:
        return audit(open_run(self.topics.run, self.kafka).snapshot())


def path_of(spans: list[Span], last: int) -> list[int]:
    """The token ids from the root to the end of span number `last`: each span's parent is followed."""
    by_number = {span.sequence: span for span in spans}
    ids: list[int] = []
    while last > 0:
        span = by_number[last]
        ids = span.token_ids().tolist() + ids
        last = span.sequence - 1 if span.parent < 0 else span.parent
    return ids

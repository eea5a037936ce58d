"""Decides what a gateway process is made of: a replica (an engine of its own, or others' servers), a producer, HTTP.

The port is taken first, so that a wrong address ends the process at once, and opened for requests last.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from headrace.schemas.errors import ReplicaLost, SettingsError
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import RunTopics

from ..engines import Replica
from ..engines.local import LocalReplica
from ..engines.opening import EngineChoice, open_engine
from ..engines.remote import RemoteEngine, RemoteReplica
from ..loops import new_loop
from ..receiver import open_receiver
from ..sdk import Producer
from .app import application
from .lessee import Gateway
from .protocol import Refused
from .tokenizer import Tokenizer
from .updates import OnUpdate, Updates

log = logging.getLogger("headrace.gateway")

TOKEN_VARIABLE = "HEADRACE_GATEWAY_TOKEN"
LOOK_S = 0.2
DRAIN_S = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how a gateway serves here; see the site settings."""

    host: str
    port: int
    public_url: str | None
    token_file: Path
    on_update: OnUpdate
    orphan_grace_s: float


def run_gateway(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
                place: Place, choice: EngineChoice, *, name: str | None = None, threads: int | None = None,
                weights_socket: str | None = None) -> None:  # fmt: skip
    """Open the engine, catch up with the newest published version, then serve until `stop`. Raises SettingsError,
    ModelError, WeightsRefused, ReplicaLost where the engine failed."""
    token = admin_token(place.token_file)
    try:
        listening = socket.create_server((place.host, place.port))
    except OSError as error:
        raise SettingsError(f"site.gateway: can't listen at {place.host}:{place.port}: {error}") from error
    if threads:
        import torch

        torch.set_num_threads(threads)
    name = name or f"{socket.gethostname().split('.')[0]}-gateway"
    model = settings.model

    tokenizer, engine = Tokenizer(model.path), open_engine(model, choice)
    with contextlib.closing(Producer(kafka, topics, settings, unmanaged=False, worker=name)) as producer:
        with open_receiver(kafka, topics, model, worker=name, incarnation=producer.incarnation,
                           weights_socket=weights_socket) as receiver:  # fmt: skip
            if not receiver.load(engine, stop):
                return
            updates = Updates(place.on_update, receiver, producer.to_fleet)
            updates.version = engine.version
            fingerprint = engine.fingerprint()

            async def serve() -> None:
                replica: Replica
                if isinstance(engine, RemoteEngine):
                    replica = RemoteReplica(engine, name=name, between_steps=updates.between_steps)
                else:
                    replica = LocalReplica(engine, name=name, between_steps=updates.between_steps)
                gateway = Gateway(producer, settings, tokenizer, replica, updates, engine=fingerprint,
                                  grace_s=place.orphan_grace_s)  # fmt: skip
                await serve_http(gateway, replica, updates, listening, place, token, topics.run, stop)

            # What is here now stays: a collection that looked through all of it would hold every stream for as long.
            gc.collect()
            gc.freeze()
            if isinstance(engine, RemoteEngine):  # it lives on its engine's loop
                with contextlib.closing(engine):
                    engine.run(serve())
            else:
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    runner.run(serve())


async def serve_http(gateway: Gateway, replica: Any, updates: Updates, listening: socket.socket, place: Place,
                     token: str, run: str, stop: threading.Event) -> None:  # fmt: skip
    """Until `stop`. Raises ReplicaLost where the only replica is gone."""
    loop = asyncio.get_running_loop()
    updating = Refused(503, "new weights are being applied: ask again", code="weights_updated", retry_after_s=0.1)
    updates.abort = lambda: loop.call_soon_threadsafe(gateway.abort_all, updating)
    host, port = listening.getsockname()[:2]
    url = (place.public_url or f"http://{host}:{port}").rstrip("/")
    app = application(gateway, token=token, model=run, base_url=f"{url}/v1")
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off",
                                    proxy_headers=False, timeout_graceful_shutdown=DRAIN_S))  # fmt: skip
    tasks = [loop.create_task(work) for work in (server.serve([listening]), gateway.look_after())]
    log.info("serving version %d at %s/v1; the admin token is in %s", updates.version, url,
             TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else place.token_file)  # fmt: skip
    try:
        while not stop.is_set():
            await asyncio.sleep(LOOK_S)
            await replica.health()
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
            if tasks[0].done():
                raise ReplicaLost("the HTTP server ended by itself")
    finally:
        server.should_exit = True
        await gateway.close()
        with contextlib.suppress(Exception):
            await tasks[0]
        for task in tasks[1:]:
            task.cancel()


def admin_token(file: Path) -> str:
    """The token of the admin side: from the environment, else from the file, which is made where it is missing.
    Raises SettingsError."""
    if given := os.environ.get(TOKEN_VARIABLE):
        return given
    try:
        with contextlib.suppress(FileExistsError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
                handle.write(secrets.token_urlsafe(32))
        token = file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"site.gateway.token_file: {file}: {error}") from error
    if not token:
        raise SettingsError(f"site.gateway.token_file: {file} is empty: delete it, or write a token into it")
    return token


class _Server(uvicorn.Server):
    """Signals are the role's to handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

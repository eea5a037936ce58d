"""A trainer that kills itself (SIGKILL) at a chosen boundary, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import RunTopics

BOUNDARIES = (
    "before commit",
    "inside the commit's transaction",
    "after commit, before publishing",
    "between chunks",
    "after the chunks, before the publication",
    "inside the publication's transaction",
    "after publishing",
    "during the checkpoint's write",
    "after the checkpoint",
)


class _Process(Protocol):
    exitcode: int | None

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, state_dir: Path, stop_at: int,
            boundary: str, version: int) -> int | None:  # fmt: skip
    """Run a trainer until it dies at `boundary` of `version`; its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headrace.trainer.loop"])  # importing torch takes longer than training here
    arguments = (dict(kafka), topics, settings, state_dir, stop_at, boundary, version)
    process = cast(_Process, context.Process(target=_run, args=arguments))
    process.start()
    process.join(120)
    return process.exitcode


def _run(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, state_dir: Path, stop_at: int,
         boundary: str, version: int) -> None:  # fmt: skip
    from headrace.schemas import delta
    from headrace.schemas.codec import decode
    from headrace.schemas.delta import relative
    from headrace.schemas.events import Publication, Version
    from headrace.streams.log.transactions import Output, Transactor
    from headrace.trainer import checkpoint, loop, publish

    def before(owner: Any, name: str, condition: Callable[..., bool]) -> None:
        honest = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if condition(*args):
                die()
            return honest(*args, **kwargs)

        setattr(owner, name, replaced)

    def after(owner: Any, name: str, condition: Callable[..., bool]) -> None:
        honest = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            result = honest(*args, **kwargs)
            if condition(*args):
                die()
            return result

        setattr(owner, name, replaced)

    def writes(kind: type) -> Callable[..., bool]:
        def condition(_: Transactor, outputs: Sequence[Output]) -> bool:
            event = decode(outputs[0].value)
            return isinstance(event, kind) and getattr(event, "version", None) == version

        return condition

    match boundary:
        case "before commit":
            before(loop.Trainer, "_commit", lambda trainer, *_: trainer.version == version)
        case "inside the commit's transaction":
            after(Transactor, "_send", writes(Version))
        case "after commit, before publishing":
            before(publish.Publisher, "publish", lambda _, v, *__: v == version)
        case "between chunks":
            relative.MAX_CHANGES = 1_000  # several chunks, although the model is tiny
            honest = delta.encode_delta

            def encode(v: int, *args: Any) -> Any:
                chunks = honest(v, *args)
                assert len(chunks) > 2
                for index, chunk in enumerate(chunks):
                    if v == version and index == 2:
                        publisher[0]._producer.flush(10)
                        die()
                    yield chunk

            publisher: list[Any] = []
            made = publish.Publisher.__init__

            def remember(self: Any, *args: Any) -> None:
                publisher.append(self)
                made(self, *args)

            setattr(publish.Publisher, "__init__", remember)  # noqa: B010
            setattr(delta, "encode_delta", encode)  # noqa: B010
        case "after the chunks, before the publication":
            before(publish.Publisher, "_publication", lambda _, v, *__: v == version)
        case "inside the publication's transaction":
            after(Transactor, "_send", writes(Publication))
        case "after publishing":
            after(publish.Publisher, "publish", lambda _, v, *__: v == version)
        case "during the checkpoint's write":
            before(os, "replace", lambda draft, _: int(Path(draft).stem) == version)
        case "after the checkpoint":
            after(checkpoint.Checkpoints, "save", lambda _, v, *__: v == version)
        case _:
            raise ValueError(boundary)
    loop.run_trainer(kafka, topics, settings, threading.Event(), state_dir, stop_at, threads=1)

"""A trainer that kills itself (SIGKILL) at a chosen boundary, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import RunTopics

BOUNDARIES = (
    "before fetching",
    "fetched, before training",
    "within the optimizer's step",
    "before commit",
    "inside the commit's transaction",
    "after commit, before publishing",
    "between chunks",
    "after the chunks, before the publication",
    "inside the publication's transaction",
    "after publishing",
    "training again",
    "during the checkpoint's write",
    "after the checkpoint",
)
# The version before is at a boundary of its publication while the trainer, another thread, is at one of its own.
BOUNDARIES_BETWEEN = (
    "training the next version, between chunks",
    "training the next version, before the publication",
    "training the next version, inside the publication's transaction",
    "trained the next version, waiting for the publication",
    "after the checkpoint, before the publication",
    "after the next commit, within the snapshot",
)


class _Process(Protocol):
    exitcode: int | None

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


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
    process.join(240)  # on a busy machine
    code = process.exitcode
    process.kill()
    return code


def _run(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, state_dir: Path, stop_at: int,
         boundary: str, version: int) -> None:  # fmt: skip
    from headrace.schemas import delta
    from headrace.schemas.codec import decode
    from headrace.schemas.delta import relative
    from headrace.schemas.events import Publication, Version
    from headrace.streams.log.transactions import Output, Transactor
    from headrace.trainer import background, checkpoint, inbox, loop, publish, sending, step

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

    def pause() -> None:
        """Hold the publisher's thread where it is, for ever."""
        held.set()
        threading.Event().wait()

    def pausing(condition: Callable[..., bool]) -> Callable[..., bool]:
        def holds(*args: Any) -> bool:
            if condition(*args):
                pause()
            return False

        return holds

    def noting(versions: set[int], of: Callable[..., int]) -> Callable[..., bool]:
        def note(*args: Any) -> bool:
            versions.add(of(*args))
            return False

        return note

    def when_held(condition: Callable[..., bool]) -> Callable[..., bool]:
        """For the trainer's thread: where `condition` holds, die once the publisher is held."""
        return lambda *args: condition(*args) and held.wait(60)

    def between_chunks(act: Callable[[], None]) -> None:
        """Several chunks, although the model is tiny; act behind the second one of `version`, which is sent."""
        relative.MAX_CHANGES = 1_000
        honest, made = delta.encode_delta, sending.Sender.__init__
        senders: list[Any] = []

        def encode(v: int, *args: Any) -> Any:
            chunks = honest(v, *args)
            assert len(chunks) > 2
            for index, chunk in enumerate(chunks):
                if v == version and index == 2:
                    senders[0]._producer.flush(10)
                    act()
                yield chunk

        def remember(self: Any, *args: Any, **options: Any) -> None:
            senders.append(self)
            made(self, *args, **options)

        setattr(sending.Sender, "__init__", remember)  # noqa: B010
        setattr(delta, "encode_delta", encode)  # noqa: B010

    held = threading.Event()
    publishes = lambda _, v, *__: v == version  # noqa: E731
    trains_next = lambda trainer, *_: trainer.version == version  # noqa: E731
    match boundary:
        case "before fetching":
            before(inbox.Inbox, "fetch", lambda _, record, due, *__: due == version)
        case "fetched, before training":
            before(loop.Trainer, "_train", lambda trainer, *_: trainer.version == version - 1)
        case "within the optimizer's step":  # masters have moved, what is served hasn't
            before(step.TrainState, "_round", lambda state: state.version == version - 1)
        case "training again":  # what a trainer that died earlier has committed
            before(loop.Trainer, "_train", lambda trainer, *_: trainer.version == version - 1
                   and trainer._history.committed >= version)  # fmt: skip
        case "before commit":
            before(loop.Trainer, "_commit", lambda trainer, *_: trainer.version == version)
        case "inside the commit's transaction":
            after(Transactor, "_send", writes(Version))
        case "after commit, before publishing":
            before(publish.Publisher, "publish_delta", publishes)
        case "between chunks":
            between_chunks(die)
        case "after the chunks, before the publication":
            before(publish.Publisher, "_publication", publishes)
        case "inside the publication's transaction":
            after(Transactor, "_send", writes(Publication))
        case "after publishing":
            after(publish.Publisher, "publish_delta", publishes)
        case "during the checkpoint's write":
            before(os, "replace", lambda draft, _: int(Path(draft).stem) == version)
        case "after the checkpoint":
            after(checkpoint.Checkpoints, "save", publishes)
        case "training the next version, between chunks":
            between_chunks(pause)
            before(loop.Trainer, "_train", when_held(trains_next))
        case "training the next version, before the publication":
            before(publish.Publisher, "_publication", pausing(publishes))
            before(loop.Trainer, "_train", when_held(trains_next))
        case "training the next version, inside the publication's transaction":
            after(Transactor, "_send", pausing(writes(Publication)))
            before(loop.Trainer, "_train", when_held(trains_next))
        case "trained the next version, waiting for the publication":
            before(publish.Publisher, "_publication", pausing(publishes))
            submitted: set[int] = set()
            before(background.Background, "publish", noting(submitted, lambda _, v, *__: v))
            before(background.Background, "settled", when_held(lambda *_: version in submitted))
        case "after the checkpoint, before the publication":
            before(publish.Publisher, "_publication", pausing(publishes))
            after(checkpoint.Checkpoints, "save", when_held(publishes))
        case "after the next commit, within the snapshot":
            looked: set[int] = set()  # versions of which it is settled that no snapshot is due

            def in_snapshot(trainer: Any, *_: Any) -> bool:
                while trainer.version > version and not held.is_set() and trainer.version - 1 not in looked:
                    time.sleep(0.01)
                return held.is_set()

            before(delta, "encode_snapshot", pausing(lambda v, _: v >= version))
            after(publish.Publisher, "publish_snapshot_if_due", noting(looked, lambda one: one._base.version))
            after(loop.Trainer, "_commit", in_snapshot)
        case _:
            raise ValueError(boundary)
    loop.run_trainer(kafka, topics, settings, threading.Event(), state_dir, stop_at, threads=1)

"""What `headrace start ROLE RUN` runs: each role with the site settings that concern it.

A role ends by itself (exit 0), asks to be started again by dying, or ends with `FINAL`: an error that a restart would
only repeat, and that a person must see.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.schemas.errors import (
    BlobDamaged,
    BlobLost,
    CheckpointError,
    EnvironmentFailed,
    HeadraceError,
    HungTransaction,
    InvalidRecord,
    ModelError,
    NonFiniteLogprob,
    NoProgress,
    RecordTooLarge,
    ReplayMismatch,
    RunNotFound,
    SettingsError,
    TasksExhausted,
    UndecodableRecord,
)
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import RunTopics

from .settings import SiteSettings, state_dir

if TYPE_CHECKING:
    from headrace.producers.engines.opening import EngineChoice
    from headrace.producers.environments import ToolEnvironment
    from headrace.producers.tooling import SandboxChoice

FINAL = 3
_FINAL_ERRORS = (SettingsError, RunNotFound, ModelError, NoProgress, TasksExhausted, NonFiniteLogprob, ReplayMismatch,
                 CheckpointError, EnvironmentFailed, InvalidRecord, UndecodableRecord, BlobLost, BlobDamaged,
                 RecordTooLarge, HungTransaction)  # fmt: skip

Role = Callable[[Mapping[str, Any], RunTopics, RunSettings, SiteSettings, threading.Event, str | None], None]


def _assembler(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, site: SiteSettings,
               stop: threading.Event, name: str | None) -> None:  # fmt: skip
    from headrace.streams.assembling import run_assembler
    from headrace.streams.shares import share

    run_assembler(kafka, topics, settings, stop, share(site.assembler_share, settings.log.partitions),
                  memory_bytes=site.assembler_memory_mb << 20)  # fmt: skip


def _coordinator(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, site: SiteSettings,
                 stop: threading.Event, name: str | None) -> None:  # fmt: skip
    from headrace.streams.coordinating import run_coordinator
    from headrace.streams.tasks import task_source

    run_coordinator(kafka, topics, settings, stop, task_source(settings.tasks))


def worker(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, site: SiteSettings,
           stop: threading.Event, name: str | None,
           elsewhere: Callable[[], ToolEnvironment] | None = None) -> None:  # fmt: skip
    """`elsewhere`: makes the environment of tasks that need sandboxes, where those are on other hosts."""
    from headrace.producers.worker import run_worker

    run_worker(kafka, topics, settings, stop, _engine(site), name=name, threads=site.worker_threads,
               weights_socket=site.weights_socket, sandboxes=sandbox_choice(site, elsewhere))  # fmt: skip


def sandbox_choice(site: SiteSettings, elsewhere: Callable[[], ToolEnvironment] | None = None) -> SandboxChoice:
    """As the site says; `elsewhere` opens an environment whose sandboxes another host holds."""
    from headrace.producers.tooling import SandboxChoice

    return SandboxChoice(site.sandboxes, site.sandboxes_starting, site.docker, elsewhere)


def _engine(site: SiteSettings) -> EngineChoice:
    from headrace.producers.engines.opening import EngineChoice

    return EngineChoice(site.engine, site.slots, site.device, site.replicas, site.replica_model, site.replica_key_file)


def _trainer(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, site: SiteSettings,
             stop: threading.Event, name: str | None) -> None:  # fmt: skip
    from headrace.trainer.loop import run_trainer

    if site.trainer_processes > 1 and "RANK" not in os.environ:
        _under_torchrun(site.trainer_processes)
    run_trainer(kafka, topics, settings, stop, state_dir=state_dir(site, topics.run), stop_at=site.stop_at,
                threads=site.trainer_threads, device=site.trainer_device,
                weights_socket=site.weights_socket)  # fmt: skip


def _under_torchrun(processes: int) -> NoReturn:
    """This command again, as torchrun's, in this process: each rank runs it and ends with it."""
    given = sys.argv[1:]
    if "--parent" in given:
        at = given.index("--parent")
        given[at + 1] = str(os.getpid())
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                              str(processes), "-m", "headrace", *given])  # fmt: skip


def follow_trainer(site: SiteSettings) -> int:
    """What a rank of a torchrun job that isn't 0 runs: it needs no Kafka. Returns the exit code."""
    from headrace.trainer.loop import run_follower

    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    for signum in (signal.SIGTERM, signal.SIGINT):  # rank 0 ends a step before it says so
        signal.signal(signum, signal.SIG_IGN)
    try:
        run_follower(site.trainer_threads, site.trainer_device)
        return 0
    except HeadraceError as error:
        print(f"headrace trainer: {error}", file=sys.stderr, flush=True)
        return 1
    except RuntimeError as error:  # of the connection
        print(f"headrace trainer: rank 0 is gone ({error})", file=sys.stderr, flush=True)
        return 1


def _gateway(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, site: SiteSettings,
             stop: threading.Event, name: str | None) -> None:  # fmt: skip
    try:
        from headrace.producers.gateway.serving import Place, run_gateway
    except ImportError as error:
        raise SettingsError(f"the gateway needs {error.name}: install headrace[gateway]") from error

    here = site.gateway
    token_file = Path(here.token_file) if here.token_file else state_dir(site, topics.run) / "gateway.token"
    place = Place(here.host, here.port, here.public_url, token_file, here.on_update, here.orphan_grace_s)
    run_gateway(kafka, topics, settings, stop, place, _engine(site), name=name, threads=site.worker_threads,
                weights_socket=site.weights_socket)  # fmt: skip


ROLES: dict[str, Role] = {
    "assembler": _assembler,
    "coordinator": _coordinator,
    "worker": worker,
    "trainer": _trainer,
    "gateway": _gateway,
}


def run_role(role: str, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, site: SiteSettings,
             name: str | None = None) -> int:  # fmt: skip
    """Run one role until it ends or the process is asked to. Returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    code, words = ended(role, lambda: ROLES[role](kafka, topics, settings, site, stop, name))
    if words:
        print(words, file=sys.stderr, flush=True)
    return code


def ended(role: str, body: Callable[[], None]) -> tuple[int, str]:
    """Carry a role out: its exit code and its last words (none where it ended by itself)."""
    try:
        body()
        return 0, ""
    except HeadraceError as error:
        return FINAL if isinstance(error, _FINAL_ERRORS) else 1, f"headrace {role}: {error}"
    except Exception as error:  # a fault of ours: its traceback goes to the log, its name comes last
        logging.getLogger(f"headrace.{role}").exception("this should not happen")
        return 1, f"headrace {role}: unexpected {type(error).__name__}: {error}"

"""From a trainer's new weights to a replica's first token: bytes, times, pause, memory, and what rollouts lose.

The trainer's own publisher and background thread publish deltas of weights that change as in an AdamW step, through the
broker, directly over a socket, or through a folder; replicas (processes) follow by the worker's own receiver.
SmolLM2-135M is served by the real engine, full of requests; 1.5 billion synthetic weights are only held (one replica:
four would not fit). The baseline is a full checkpoint that each replica loads in place. A step of training is a real
one of the same model, which the publication of the version before runs beside; its stall is what the trainer's thread
spends on publishing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.broker import Broker
from headrace.create import create_run
from headrace.schemas import delta
from headrace.schemas.chain import Chain
from headrace.schemas.errors import ModelError
from headrace.schemas.events import Version
from headrace.schemas.hashes import digest
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import WEIGHTS, RunTopics
from headrace.streams.log.direct import Offering
from headrace.streams.log.policy import open_settings
from headrace.streams.log.transactions import Transactor

from . import harness
from ._publication_load import Replica, adamw_changes, replica, synthetic
from .baselines import reload
from .harness import CannotMeasure, Result, spread

SHARES = (0.002, 0.01, 0.03)
SYNTHETIC = 1_500_000_000
TIMES = 3  # publications of each share
LIMIT = 0.25  # the rate limit: so much of an unlimited delta at 1 % a second


def measure(options: argparse.Namespace, result: Result) -> None:
    with harness.temporary_broker() as broker, tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder, parts = Path(name), options.parts.split(",")
        if "sampled" in parts:
            _sampled(options, result, broker, folder)
        if "synthetic" in parts:
            size = 20_000_000 if options.quick else SYNTHETIC
            _compare(result, broker, folder, f"synthetic:{size}", f"{size / 1e9:g}B", (1,), options.quick)
        if "step" in parts and not options.quick:
            _step(result, broker, _model(options, folder))


def _sampled(options: argparse.Namespace, result: Result, broker: Broker, folder: Path) -> None:
    _compare(result, broker, folder, _model(options, folder), "135M" if not options.quick else "tiny",
             (1,) if options.quick else (1, 4), options.quick, limited=True)  # fmt: skip


def _model(options: argparse.Namespace, folder: Path) -> str:
    if options.model:
        return str(options.model)
    from headrace.models import smollm2, tiny_model

    try:
        options.model = str(tiny_model(folder / "tiny", hidden=32) if options.quick else smollm2(folder))
    except ModelError as error:
        raise CannotMeasure(str(error)) from error
    return str(options.model)


def _state(model: str) -> dict[str, delta.Tensor]:
    kind, _, size = model.partition(":")
    if kind == "synthetic":
        return delta.as_state(synthetic(int(size)), "bfloat16")
    from headrace.producers.engines.hf import HfEngine

    served = HfEngine(model, slots=1, max_tokens=64).served_arrays()
    return delta.as_state({name: bits.copy() for name, bits in served.items()}, "bfloat16")


@dataclass(frozen=True, slots=True)
class Published:
    compared_s: float  # new weights with the base: what changed, and the hash
    published_s: float  # encoding, sending, and the publication
    changed: int  # elements
    size: int  # bytes


class Source:
    """A run whose trainer only publishes. The base is the only copy of the weights that it holds."""

    def __init__(self, broker: Broker, run: str, model: str, *, direct: bool = False, **weights: Any) -> None:
        kafka = harness.kafka_of(broker)
        self.topics, self.bootstrap, self.model = RunTopics(run), str(kafka["bootstrap.servers"]), model
        path = model if ":" not in model else "synthetic"
        settings = RunSettings.model_validate({
            "model": {"path": path, "dtype": "bfloat16"}, "tasks": {"dataset": "chain_sum"}, "log": {"partitions": 1},
            "weights": {"snapshot_every": 10_000, **weights},
        })  # fmt: skip
        create_run(kafka, self.topics, settings)
        from headrace.trainer.background import Background
        from headrace.trainer.publish import Policy, Publisher

        self._transactor = Transactor(kafka, self.topics.transactional_id("trainer"))
        opened = open_settings(kafka, self.topics)
        policy = Policy(self.topics, self._transactor, Chain(0, digest(opened.value)))
        self.offering = Offering("127.0.0.1:0", self.topics.name(WEIGHTS)) if direct else None
        tap = None if self.offering is None else self.offering.offer
        self.publisher = Publisher(kafka, self.topics, policy, settings.weights, tap)
        self.background = Background(self.publisher)
        state = _state(model)
        hashed = delta.state_hash(state)

        def version(**link: Any) -> Version:
            return Version(**link, version=0, parent=-1, batch=0, batch_offset=-1, batch_digest=b"",
                           hash_algorithm=delta.HASH_ALGORITHM, served_hash=hashed, train_hash=b"", rho=0.0,
                           rho_tokens=0, groups=(), metrics={}, fingerprint="{}", committed_ms=0)  # fmt: skip

        self.publisher.publish_initial(version, path, state, hashed)
        self.version = 0

    @property
    def state(self) -> dict[str, delta.Tensor]:
        base = self.publisher._base
        assert base is not None
        return base.state

    def publish(self, share: float) -> Published:
        """The comparison is made a tensor at a time, since only the base is held whole."""
        changes = adamw_changes(self.state, share, self.version)
        compared = 0.0
        found: delta.Changes = {}
        for name, change in changes.items():
            old = {name: self.state[name]}
            new = delta.copy_state(old)
            delta.write(new, {name: change})
            began = time.monotonic()
            found |= delta.diff(old, new)
            compared += time.monotonic() - began
            del new
        began = time.monotonic()
        base = self.publisher._base
        assert base is not None
        served_hash = delta.updated_hash(base.hash, base.state, found)
        compared += time.monotonic() - began
        self.version += 1
        began, before = time.monotonic(), self.publisher._since.size
        self.background.publish(self.version, found, served_hash)
        self.background.settled()
        return Published(compared, time.monotonic() - began, delta.changed(found),
                         self.publisher._since.size - before)  # fmt: skip

    def close(self) -> None:
        self.background.close()
        self.publisher.close()
        if self.offering is not None:
            self.offering.close()
        self._transactor.close()

    def replica(self, checkpoint: Path, name: str) -> contextlib.AbstractContextManager[Replica]:
        direct = None if self.offering is None else f"127.0.0.1:{self.offering.port}"
        return replica(self.topics.run, self.bootstrap, self.model, checkpoint, name, direct)


def _compare(result: Result, broker: Broker, folder: Path, model: str, label: str, counts: Sequence[int], quick: bool,
             limited: bool = False) -> None:  # fmt: skip
    checkpoint = folder / "whole.safetensors"
    whole = 0
    for through in ("broker", "socket", "folder"):
        for count in counts:
            store = {"store_url": (folder / f"store-{label}").as_uri()} if through == "folder" else {}
            source = Source(broker, f"{through}-{count}-{time.monotonic_ns():x}", model, direct=through == "socket",
                            **store)  # fmt: skip
            try:
                if not whole:
                    began = time.monotonic()
                    whole = reload.save(checkpoint, {name: t.bits for name, t in source.state.items()})
                    result.row("full reload, write", label, time.monotonic() - began, "s")
                    result.row("full reload, bytes", label, whole, "bytes")
                _follow(result, source, checkpoint, f"{label}, {through}, {count} replica{'s' * (count > 1)}", count,
                        whole, 1 if quick or ":" in model else TIMES)  # fmt: skip
            finally:
                source.close()
                del source
                gc.collect()
    if limited:
        _throughput(result, broker, model, label, checkpoint, quick)
    checkpoint.unlink()


def _follow(result: Result, source: Source, checkpoint: Path, subject: str, count: int, whole: int,
            times: int) -> None:  # fmt: skip
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(source.replica(checkpoint, f"w{i}")) for i in range(count)]
        for one in replicas:
            one.wait_for("ready")
        full = [one["pause_s"] for each in replicas for one in each.said("reloaded")[1:]]
        result.row("full reload, pause", subject, spread(full), "s")
        for share in SHARES:
            sent, clocks = [], []
            for _ in range(times):
                sent.append(source.publish(share))
                clocks += [_clock(one, source.version) for one in replicas]
            what = f"{subject}, {100 * share:g} %"
            paused = [(c["resumed"] - c["paused"]) / 1e3 for c in clocks]
            extra, size = [float(c["extra"]) for c in clocks], float(np.median([one.size for one in sent]))
            result.row("bytes", what, size, "bytes")
            result.row("bytes, full / delta", what, whole / size, "x")
            result.row("trainer: compare and hash", what, spread([one.compared_s for one in sent]), "s")
            result.row("trainer: encode and send (in the background)", what, spread([one.published_s for one in sent]),
                       "s")  # fmt: skip
            result.row("published to fetched", what, spread(_between(clocks, "published", "fetched")), "s")
            result.row("fetched to proved", what, spread(_between(clocks, "fetched", "decoded")), "s")
            result.row("pause", what, spread(paused), "s")
            result.row("pause, full / delta", what, float(np.median(full)) / float(np.median(paused)), "x")
            result.row("published to first token", what, spread(_between(clocks, "published", "first_token")), "s")
            result.row("peak extra memory of a replica", what, spread([one / 1e6 for one in extra]), "MB")
            if share == 0.01:
                result.at_least(f"pause 20x smaller ({what})", float(np.median(full) / np.median(paused)), 20)
                result.at_least(f"bytes 100x smaller ({what})", whole / size, 100)
                if source.model.startswith("synthetic"):  # beside an engine its own memory moves by more
                    decoded = 262_144 * 12  # positions, old and new values of one chunk
                    result.at_most(f"extra memory: the delta and one decoded chunk ({what}), MB",
                                   float(np.median(extra)) / 1e6, (size + decoded) / 1e6)  # fmt: skip
            result.row("elements changed", what, sent[-1].changed)


def _between(clocks: Sequence[Mapping[str, float]], begin: str, end: str) -> list[float]:
    return [(clock[end] - clock[begin]) / 1e3 for clock in clocks]


def _clock(one: Replica, version: int) -> dict[str, float]:
    return one.wait_for("clock", lambda said: said["version"] == version)


def _throughput(result: Result, broker: Broker, model: str, label: str, checkpoint: Path, quick: bool) -> None:
    """Tokens a second of one replica while nothing comes, and from the moment at which a delta is on its way."""
    size = 0.0
    for limit in (False, True):
        weights: dict[str, Any] = {"max_bytes_per_s": max(1.0, LIMIT * size)} if limit else {}
        source = Source(broker, f"limit-{time.monotonic_ns():x}", model, **weights)
        try:
            with source.replica(checkpoint, "w") as one:
                one.wait_for("ready")
                settled = 2.0 if quick else 8.0
                time.sleep(settled)
                now = time.time()
                alone = one.tokens_per_s(now - settled, now)
                shares, lasted = [], []
                for _ in range(1 if quick else TIMES):
                    sent = source.publish(0.01)
                    clock = _clock(one, source.version)
                    begin, end = clock["published"] / 1e3, clock["applied"] / 1e3
                    during = one.tokens_per_s(begin - 0.1, end + 0.1)
                    lasted.append(end - begin)
                    if during is not None and alone:
                        shares.append(100 * during / alone)
                    time.sleep(1.0)
                size = float(sent.size)
                limited = f"at most {weights.get('max_bytes_per_s', 0) / 1e6:.2g} MB/s" if limit else "no limit"
                what = f"{label}, {limited}"
                if alone:
                    result.row("tokens a second, nothing on its way", what, alone, "tokens/s")
                if shares:
                    result.row("tokens a second during a transfer", what, spread(shares), "% of that")
                result.row("published to applied", what, spread(lasted), "s")
        finally:
            source.close()


def _step(result: Result, broker: Broker, model: str) -> None:
    """A step of the real trainer alone, and one beside the publication of 1 %."""
    import torch

    from headrace.trainer.batches import Episode, Group
    from headrace.trainer.step import TrainState
    from headrace.trainer.weighing import StepSettings

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)

    def episode(slot: int) -> Any:
        tokens = rng.integers(10, 40_000, 64).astype(np.int32)
        return Episode(slot=slot, prompt=np.arange(20, 52, dtype=np.int32), tokens=tokens, mask=np.ones(64, np.bool_),
                       logprobs=np.full(64, -9.0, np.float32), versions=np.zeros(64, np.int32),
                       weights=np.ones(64, np.float32), reward=float(slot % 2), temperature=1.0,
                       counted=True)  # fmt: skip

    group = Group("g", tuple(episode(slot) for slot in range(4)))
    train, settings = TrainState(model, dtype="bfloat16"), StepSettings(learning_rate=0.0)
    source = Source(broker, f"step-{time.monotonic_ns():x}", model)
    try:
        alone: list[float] = []
        beside: list[float] = []
        stalls: list[float] = []
        for turn in range(5):
            if turn:
                compared = source.publish(0.01).compared_s  # its comparison; then the same again, behind a step
                changes = adamw_changes(source.state, 0.01, 100 + turn)
                base = source.publisher._base
                assert base is not None
                served_hash = delta.updated_hash(base.hash, base.state, changes)
                source.version += 1
                began = time.monotonic()
                source.background.publish(source.version, changes, served_hash)
                handed = time.monotonic() - began
            began = time.monotonic()
            train.train_batch([group], train.version, settings)
            (beside if turn else alone).append(time.monotonic() - began)
            if turn:
                began = time.monotonic()
                source.background.settled()
                stalls.append(compared + handed + time.monotonic() - began)
            else:
                began = time.monotonic()
                train.train_batch([group], train.version, settings)
                alone[-1] = time.monotonic() - began  # the first one was slower: nothing was warm
        share = 100 * float(np.median(stalls)) / float(np.median(beside))
        result.row("a step of 256 tokens, alone", "135M", spread(alone), "s")
        result.row("a step of 256 tokens, beside a publication", "135M", spread(beside), "s")
        result.row("trainer stall (compare, hand over, wait)", "135M", spread(stalls), "s")
        result.at_most("trainer stall under 2 % of a step of 256 tokens (135M)", share, 2.0)
        result.note("A real step has thousands of tokens; the stall doesn't grow with it.")
    finally:
        source.close()


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default="sampled,synthetic,step", help="sampled (135M), synthetic (1.5B), step")
    parser.add_argument("--model", help="model folder to use instead of SmolLM2-135M")


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return harness.run("publication", __doc__, measure, argv, _arguments, ["torch", "safetensors"])


if __name__ == "__main__":
    raise SystemExit(main())

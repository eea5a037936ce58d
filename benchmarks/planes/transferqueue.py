"""TransferQueue: samples in the memory of Ray actors, moved over ZeroMQ, found through a controller.

Used as its documentation shows for GRPO: `init` with GRPOGroupNSampler and two storage units (the default), a producer
that puts the eight samples of a group as one TensorDict with jagged columns, and a trainer that asks `get_meta` for the
next batch of whole groups, gets its data and clears it; polling mode, so that nobody waits a second for metadata. The
producer is a Ray actor, the trainer is Ray's driver. A batch arrives with its data; the trainer's process (which also
gets and unpacks the tensors) stands apart, as do Ray's own servers. Bytes are those of the tensors, put and got.

What it doesn't do: a log (what a killed storage unit or controller held is gone, unless `save_checkpoint` was
called before; Ray starts no actor again), spans or events below a whole sample (columns can be added later), attempts,
duplicates, deadlines, hashes. Groups are complete only if their samples are put next to each other.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from . import load
from .venvs import Venv

if TYPE_CHECKING:
    from .running import Ran, Work

NAME = "TransferQueue"
VENV = Venv("transferqueue", ("TransferQueue==0.1.11",))
FIELDS = ("prompts", "responses", "logprobs", "rewards", "group", "version")
PARTITION, TASK = "train", "trainer"
POLL_S = 0.02
QUIET_S = 30.0  # after a kill: what hasn't come by then is lost
# What the plane's own processes are called in the list of processes; the others are Ray's.
PLANE = {"ray::TransferQueueController": "controller", "ray::SimpleStorageUnit": "storage units",
         "ray::Maker": "producer"}  # fmt: skip


def trainer(path: str, size: str, batch: str, *_: str) -> None:
    """Ray's driver. Prints a line for each batch: its groups. Ends when all groups came, or none for long."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    groups = int(size)
    for last in (False, False, True):  # Ray waits 30 s for its own servers, which a busy machine needs longer for
        try:
            ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            break
        except Exception:
            ray.shutdown()
            if last:
                raise
    conf = OmegaConf.create({"controller": {"sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=8),
                                            "polling_mode": True}}, flags={"allow_objects": True})  # fmt: skip
    tq.init(conf)
    client = tq.get_client()
    maker = ray.remote(Maker).options(num_cpus=1).remote(path)
    ray.get(maker.prepare.remote())
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})
    done = maker.work.remote()
    got, heard = 0, time.monotonic()
    while got < groups - groups % int(batch) and time.monotonic() - heard < QUIET_S:
        try:
            meta = client.get_meta(list(FIELDS), int(batch) * 8, PARTITION, mode="fetch", task_name=TASK)
            if meta.size == 0:
                time.sleep(POLL_S)
                continue
            data = client.get_data(meta)
            moved = sum(_bytes(data[name]) for name in FIELDS)
            for name in ("responses", "logprobs"):
                [row.numpy() for row in data[name].unbind()]
            names = [f"g{int(row.flatten()[0]):08d}" for row in data["group"].unbind()[::8]]
            client.clear_samples(meta)
        except Exception as error:  # a storage unit is gone
            print(f"failed: {type(error).__name__}: {error}", flush=True)
            time.sleep(1)
            continue
        got, heard = got + len(names), time.monotonic()
        print("batch " + json.dumps({"groups": names, "bytes": moved}), flush=True)
    ready, _ = ray.wait([done], timeout=5)
    sent = ray.get(done) if ready else 0
    print("done " + json.dumps({"sent": sent}), flush=True)
    signal.sigwait({signal.SIGUSR1})  # until the last figure is taken
    ray.shutdown()


def _bytes(column: Any) -> int:
    return sum(int(row.numel() * row.element_size()) for row in column.unbind())


class Maker:
    """The producer; Ray makes an actor of it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def prepare(self) -> None:
        import transfer_queue as tq

        self._groups = load.read(self._path)
        tq.init()
        self._client = tq.get_client()

    def work(self) -> int:
        """Put every group; the bytes of its tensors."""
        import torch
        from tensordict import TensorDict

        sent = 0
        for number, group in enumerate(self._groups):

            def column(values: list[Any]) -> Any:
                return torch.nested.as_nested_tensor([torch.from_numpy(v) for v in values], layout=torch.jagged)

            data = TensorDict({
                "prompts": column([e.prompt for e in group]),
                "responses": column([e.tokens for e in group]),
                "logprobs": column([e.logprobs for e in group]),
                "rewards": torch.tensor([[e.reward] for e in group]),
                "group": torch.full((len(group), 1), number, dtype=torch.int32),
                "version": torch.full((len(group), 1), load.VERSION, dtype=torch.int32),
            }, batch_size=len(group))  # fmt: skip
            self._client.put(data, partition_id=PARTITION)
            sent += sum(_bytes(data[name]) for name in FIELDS)
        return sent


def run(work: Work, kill: bool) -> Ran:
    from contextlib import ExitStack

    from ..harness import CannotMeasure, Started
    from .running import Ran, module

    python = VENV.make()
    env = {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "5",
           "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(work.folder)}  # fmt: skip
    ran, taken, shot = Ran(0.0, 0), 0, False
    with ExitStack() as stack:
        driver = stack.enter_context(Started(module("transferqueue", "trainer", work.path, work.groups, work.batch,
                                                    python=python), env=env))  # fmt: skip
        stack.callback(_end, driver.pid)
        driver.expect("ready")
        before = _cpu(driver.pid)
        driver.signal(signal.SIGUSR1)
        began = time.monotonic()
        while True:
            lines = [line for line in driver.output().splitlines(keepends=True) if line.endswith("\n")]
            batches = [json.loads(line[6:]) for line in lines if line.startswith("batch ")]
            for one in batches[taken:]:
                ran.arrived.update(one["groups"])
                ran.moved += one["bytes"]
                ran.wall_s = time.monotonic() - began
            taken = len(batches)
            if kill and taken and not shot:
                shot, ran.killed = True, f"one of two storage units after {len(ran.arrived)} groups"
                _kill_storage(driver.pid)
            if (done := next((line for line in lines if line.startswith("done ")), None)) is not None:
                break
            if shot and (not driver.alive() or time.monotonic() - began > 120):
                break
            if not driver.alive() or time.monotonic() - began > 300:
                raise CannotMeasure(f"the trainer gave {taken} batches:\n{driver.output()[-2000:]}")
            time.sleep(0.02)
        if not taken:
            raise CannotMeasure(next((line.strip() for line in lines if line.startswith("failed")), "no batch came"))
        after = _cpu(driver.pid) if driver.alive() else {}
        spent = {name: after[name] - before.get(name, 0.0) for name in after}
        ran.cpu_s = {name: spent[name] for name in PLANE.values() if name in spent}
        ran.beside_s = {name: spent[name] for name in ("trainer", "Ray") if name in spent}
        ran.moved += json.loads(done[5:])["sent"] if done else 0
        driver.signal(signal.SIGUSR1)
        driver.wait(60)
    return ran


def _processes(driver: int) -> list[Any]:
    import psutil

    root = psutil.Process(driver)
    return [root, *root.children(recursive=True)]


def _name(process: Any, driver: int) -> str:
    command = " ".join(process.cmdline())
    own = next((name for title, name in PLANE.items() if command.startswith(title)), "Ray")
    return "trainer" if process.pid == driver else own


def _cpu(driver: int) -> dict[str, float]:
    """CPU seconds so far, by kind of process."""
    import psutil

    spent: dict[str, float] = {}
    for process in _processes(driver):
        try:
            times = process.cpu_times()
            name = _name(process, driver)
        except psutil.NoSuchProcess:
            continue
        spent[name] = spent.get(name, 0.0) + times.user + times.system
    return spent


def _kill_storage(driver: int) -> None:
    for process in _processes(driver):
        if _name(process, driver) == "storage units":
            process.kill()
            return


def _end(driver: int) -> None:
    """End what Ray started, should its driver have ended without doing so."""
    import psutil

    try:
        for process in _processes(driver)[1:]:
            process.kill()
    except psutil.NoSuchProcess:
        pass


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    trainer(*sys.argv[2:])

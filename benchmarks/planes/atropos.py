"""Atropos: environments post scored groups to a web server, which holds them in memory until a trainer fetches them.

The server is the one that the package starts (`atroposlib.cli.run_api`, one uvicorn process). The environment posts a
group as BaseEnv does (JSON, gzip above 1 kB, `/scored_data`), four at a time over one session; the trainer registers,
polls `/batch` and decodes what it gets. Its batch arrives with the data, so the trainer's own decoding stands apart.
A group's name travels in `generation_params`, so that it can be recognised.

What it doesn't do: a log (a killed server forgets queue, registrations and step), spans or events below a whole group,
policy versions, attempts, exactly-once delivery (an environment that retries posts twice), deadlines, hashes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import load
from .venvs import Venv

if TYPE_CHECKING:
    from .running import Ran, Work

NAME = "Atropos"
VENV = Venv("atroposlib", ("atroposlib==0.4.0", "numpy==2.4.6"))
AT_ONCE = 4
POLL_S = 0.05
QUIET_S = 15.0  # after a kill: what hasn't come by then is lost


def environment(url: str, path: str, *_: str) -> None:
    import asyncio
    import gzip

    import aiohttp

    groups = load.read(path)
    sent = 0

    async def post(session: Any, number: int, env: int, room: Any) -> None:
        nonlocal sent
        group = groups[number]
        async with room:
            payload = {
                "tokens": [[*e.prompt.tolist(), *e.tokens.tolist()] for e in group],
                "masks": [[-100] * len(e.prompt) + e.tokens.tolist() for e in group],
                "scores": [e.reward for e in group],
                "inference_logprobs": [[1.0] * len(e.prompt) + e.logprobs.tolist() for e in group],
                "generation_params": {"group": f"g{number:08d}", "version": load.VERSION},
                "env_id": env,
            }
            body = gzip.compress(json.dumps(payload).encode())
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            for _ in range(100):  # BaseEnv gives up after three tries; here it must outlive a restart
                try:
                    async with session.post(f"{url}/scored_data", data=body, headers=headers) as answer:
                        if answer.status == 200:
                            sent += len(body)
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)

    async def work() -> float:
        async with aiohttp.ClientSession() as session:
            registration = {"max_token_length": 2048, "desired_name": "bench", "weight": 1.0,
                            "group_size": len(groups[0])}  # fmt: skip
            while True:
                async with session.post(f"{url}/register-env", json=registration) as answer:
                    said = await answer.json()
                if said["status"] == "success":
                    break
                await asyncio.sleep(0.1)
            print("ready", flush=True)
            signal.sigwait({signal.SIGUSR1})
            began, room = time.process_time(), asyncio.Semaphore(AT_ONCE)
            await asyncio.gather(*(post(session, n, said["env_id"], room) for n in range(len(groups))))
            return time.process_time() - began

    print(json.dumps({"cpu_s": asyncio.run(work()), "sent": sent}), flush=True)


def trainer(url: str, batch: str, *_: str) -> None:
    """Prints a line for each batch: its groups. Ends by SIGTERM."""
    import asyncio

    import aiohttp
    import numpy as np

    async def work() -> None:
        async with aiohttp.ClientSession() as session:

            async def register() -> None:
                about = {"wandb_group": "bench", "wandb_project": "bench", "batch_size": int(batch) * 8,
                         "max_token_len": 2048, "checkpoint_dir": "", "save_checkpoint_interval": 0,
                         "starting_step": 0, "num_steps": 1_000_000}  # fmt: skip
                async with session.post(f"{url}/register", json=about):
                    pass

            await register()
            print("registered", flush=True)
            while True:
                try:
                    async with session.get(f"{url}/batch") as answer:
                        size, said = int(answer.headers.get("Content-Length", 0)), await answer.json()
                except aiohttp.ClientError:
                    await asyncio.sleep(POLL_S)
                    continue
                if said.get("status") == "error":  # a server that was started again knows no trainer
                    await register()
                if not said["batch"]:
                    await asyncio.sleep(POLL_S)
                    continue
                for group in said["batch"]:
                    for tokens, logprobs in zip(group["tokens"], group["inference_logprobs"], strict=True):
                        np.array(tokens, np.int32), np.array(logprobs, np.float32)
                names = [group["generation_params"]["group"] for group in said["batch"]]
                print("batch " + json.dumps({"groups": names, "bytes": size}), flush=True)

    asyncio.run(work())


def run(work: Work, kill: bool) -> Ran:
    import socket
    from contextlib import ExitStack

    from ..harness import CannotMeasure, Started
    from .running import Ran, module

    python = VENV.make()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = (str(python), "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port))
    ran, taken, shot = Ran(0.0, 0), 0, False
    with ExitStack() as stack:
        server = stack.enter_context(Started(command))
        _answers(server, port)
        fetcher = stack.enter_context(Started(module("atropos", "trainer", url, work.batch, python=python)))
        fetcher.expect("registered")
        maker = stack.enter_context(Started(module("atropos", "environment", url, work.path, python=python)))
        maker.expect("ready")
        before, fetched_before = server.cpu_s(), fetcher.cpu_s()
        maker.signal(signal.SIGUSR1)
        began = heard = time.monotonic()
        while len(ran.arrived) < work.batched:
            batches = [json.loads(line[6:]) for line in fetcher.output().splitlines(keepends=True)
                       if line.startswith("batch ") and line.endswith("\n")]  # fmt: skip
            for one in batches[taken:]:
                ran.arrived.update(one["groups"])
                ran.moved += one["bytes"]
                heard = time.monotonic()
                ran.wall_s = heard - began
            taken = len(batches)
            if kill and taken and not shot:
                server.signal(signal.SIGKILL)
                server.wait(30)
                shot, ran.killed = True, f"the server after {len(ran.arrived)} groups"
                server = stack.enter_context(Started(command))
            quiet = time.monotonic() - heard
            if shot and not maker.alive() and quiet > QUIET_S:
                break
            if quiet > 300:
                raise CannotMeasure(f"no batch for {quiet:.0f} s:\n{server.output()[-1000:]}{maker.output()[-1000:]}")
            time.sleep(0.02)
        ran.cpu_s = {"server": server.cpu_s() - (0.0 if shot else before)}
        ran.beside_s = {"trainer": fetcher.cpu_s() - fetched_before}
        said = maker.wait(300).last_json()
        ran.cpu_s["environment"] = said["cpu_s"]
        ran.moved += said["sent"]
    return ran


def _answers(server: Any, port: int) -> None:
    import socket

    from ..harness import CannotMeasure

    end = time.monotonic() + 120
    while time.monotonic() < end and server.alive():
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise CannotMeasure(f"the server didn't start:\n{server.output()[-2000:]}")


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    roles: dict[str, Callable[..., None]] = {"environment": environment, "trainer": trainer}
    roles[sys.argv[1]](*sys.argv[2:])

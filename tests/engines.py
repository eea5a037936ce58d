"""Engines of each kind on one model folder, for the suite that all of them must pass, and a vLLM server to talk to."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.node import free_ports
from headrace.producers.engines import Engine
from headrace.producers.replicas import Limits

NO_VLLM = "vLLM isn't installed here: `make vllm` installs its CPU build"
EXTENSION = "headrace.producers.engines.vllm_worker.Extension"


def needs_vllm() -> None:
    """Skips where it can't be had; .ci/run installs it and fails on a skip."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(NO_VLLM)
    # One place for what vLLM finds out about a class of models, which takes a process and ten seconds.
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm-cache"))


class Server:
    """vLLM's own server on a port of 127.0.0.1."""

    def __init__(self, model: Path, log: Path, *, slots: int = 4, max_tokens: int = 256, key: str | None = None,
                 processed: bool = True, weights: bool = True) -> None:  # fmt: skip
        needs_vllm()
        self.port = free_ports(1)[0][0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._arguments = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_tokens),
            "--max-num-seqs", str(slots), "--block-size", "32", "--seed", "0", "--served-model-name", "policy",
            "--logprobs-mode", "processed_logprobs" if processed else "raw_logprobs",
            *(["--worker-extension-cls", EXTENSION] if weights else []), *(["--api-key", key] if key else []),
        ]  # fmt: skip
        self._environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_SERVER_DEV_MODE": "1" if weights else "0",
        }  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self._arguments, env=self._environment, stdout=out,
                                            stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def wait(self, seconds: float = 280.0) -> None:
        assert self.process is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"no vLLM server after {seconds} s: {self.log.read_text()[-3000:]}")

    def signal(self, number: int) -> None:
        """To the server and its engine process."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait(30)


@contextmanager
def servers(model: Path, folder: Path, count: int = 1, **given: Any) -> Iterator[list[Server]]:
    started = [Server(model, folder / f"server-{number}.log", **given) for number in range(count)]
    try:
        for server in started:
            server.start()
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.stop()


def remote_engine(model: Path, addresses: Sequence[str], *, slots: int, max_tokens: int, dtype: str = "float32",
                  limits: Limits | None = None) -> Engine:  # fmt: skip
    from headrace.producers.engines.openai import OpenAIReplica
    from headrace.producers.engines.remote import RemoteEngine
    from headrace.producers.engines.served import ModelFolder

    folder = ModelFolder(model, dtype)
    replicas = [OpenAIReplica(address, capacity=slots, folder=folder) for address in addresses]
    return RemoteEngine(replicas, folder, slots=slots * len(replicas), max_tokens=max_tokens,
                        facts={"engine": "openai"}, limits=limits)  # fmt: skip


def local_engine(model: Path, *, slots: int, max_tokens: int, dtype: str = "float32") -> Engine:
    from headrace.producers.engines.hf import HfEngine
    from headrace.producers.engines.local import LocalReplica
    from headrace.producers.engines.remote import RemoteEngine
    from headrace.producers.engines.served import ModelFolder

    replica = LocalReplica(HfEngine(model, slots=slots, max_tokens=max_tokens, dtype=dtype))
    return RemoteEngine([replica], ModelFolder(model, dtype), slots=slots, max_tokens=max_tokens,
                        facts={"engine": "local"})  # fmt: skip


@contextmanager
def open_kind(kind: str, model: Path, folder: Path, **sizes: Any) -> Iterator[Engine]:
    given: dict[str, Any] = {"dtype": "float32", **sizes}
    engine: Engine
    if kind == "openai":
        with servers(model, folder, slots=sizes["slots"], max_tokens=sizes["max_tokens"]) as (server,):
            engine = remote_engine(model, [server.url], **given)
            try:
                yield engine
            finally:
                engine.close()
        return
    if kind == "hf":
        from headrace.producers.engines.hf import HfEngine

        engine = HfEngine(model, **given)
    elif kind == "local":
        engine = local_engine(model, **given)
    else:
        needs_vllm()
        from headrace.producers.engines.vllm import VllmEngine

        engine = VllmEngine(model, **given)
    try:
        yield engine
    finally:
        engine.close()

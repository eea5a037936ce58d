"""Decides how vLLM is driven in process: its asynchronous engine on a loop of its own, behind the synchronous protocol.

vLLM computes in a child process, so that its steps don't wait for the worker's other work. Every output of that process
carries the policy version that sampled it, and weights change only while it is paused, so that a token's version is
exact whatever is still on its way. A request is salted with the version at its beginning: no later one meets its keys.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import platform
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import EngineError, ModelError, ReplicaLost, WeightsRefused

from . import Changes, Finished, GenerationRequest, Progress, check_request
from .served import check_changes, read_only, write_changes

log = logging.getLogger("headrace.engines.vllm")

T = TypeVar("T")

STEP_S = 0.02  # how long a step waits for tokens before its caller may do something else
CLOSE_S = 0.2  # vLLM's process holds nothing that is worth waiting for
PART_BYTES = 64 << 20  # weights travel to vLLM's process in messages of about this size
BLOCK = 32  # tokens of one cache block on a CPU
# Set where the user hasn't: no calls home, no look for a newer file, and what vLLM's CPU build needs.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING",
               "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # fmt: skip
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip


class _Active:
    """One request on its way: the task that reads its tokens, and whether any have come."""

    __slots__ = ("request", "task", "begun", "cancelled")

    def __init__(self, request: GenerationRequest):
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.begun = self.cancelled = False


class VllmEngine:
    """Any model that vLLM serves, by path; see `Engine` for the contract.

    `slots`: requests that decode at once; `max_tokens`: prompt and completion of one request at most. Raises ModelError
    where vLLM or the model can't be had, or holds other weights than the folder.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        slots: int,
        max_tokens: int,
        dtype: str = "bfloat16",
        compute_dtype: str = "float32",
        device: str = "cpu",
        version: int = 0,
    ) -> None:
        self._slots, self._max_tokens, self._version, self._dtype = slots, max_tokens, version, dtype
        folder = _Folder(model_path, dtype)
        self._tokenizer, self._eos_ids, self._vocabulary = folder.tokenizer, folder.eos_ids, folder.vocabulary
        self._bits = folder.bits
        self._active: dict[str, _Active] = {}
        self._numbers = itertools.count()
        self._arrived = threading.Condition()
        self._out: list[tuple[_Active, Progress]] = []
        self._failure: Exception | None = None
        self._facts = {"engine": "vllm", "dtype": dtype, "compute_dtype": compute_dtype, "device": device}
        for name, value in {**ENVIRONMENT, **(CPU_ENVIRONMENT if device == "cpu" else {})}.items():
            os.environ.setdefault(name, value)
        os.environ["HEADRACE_ENGINE_PARENT"] = str(os.getpid())
        arguments: dict[str, Any] = dict(
            model=str(model_path), dtype=compute_dtype, max_model_len=max_tokens, max_num_seqs=slots, seed=0,
            skip_tokenizer_init=True, generation_config="vllm", logprobs_mode="processed_logprobs",
            enable_prefix_caching=True, disable_log_stats=True, enable_log_requests=False,
            worker_extension_cls="headrace.producers.engines.vllm_worker.Extension",
        )  # fmt: skip
        if device == "cpu":
            blocks = slots * -(-max_tokens // BLOCK) + slots
            arguments |= {"enforce_eager": True, "block_size": BLOCK,
                          "kv_cache_memory_bytes": blocks * BLOCK * folder.cache_bytes_per_token(compute_dtype)}  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._engine = self._on_loop(self._start(arguments))
            if folder.rounded:  # vLLM read the folder's values, which the published dtype rounds
                self._on_loop(self._write(self._whole()))
            differing = self._differing()
            if differing:
                raise ModelError(f"{model_path}: vLLM can't serve these tensors by their names, so it can't be kept up "
                                 f"to date: {', '.join(differing[:5])}")  # fmt: skip
        except BaseException:
            self.close()
            raise

    # --- what is served -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def served_arrays(self) -> dict[str, NDArray[Any]]:
        return read_only(self._bits)

    def apply(self, version: int, changes: Changes) -> None:
        check_changes(version, self._version, self._bits, changes)
        for name, (_, values) in changes.items():
            # A NaN means "unchanged" to vLLM's loader of sparse updates.
            if np.isnan(_floats(values, self._dtype)).any():
                raise WeightsRefused(f"tensor {name!r}: version {version} holds values that are not numbers")
        self._check_alive()
        write_changes(self._bits, changes)
        self._on_loop(self._update(version, changes))
        self._version = version

    def differing(self) -> list[str]:
        """Names of the tensors that vLLM computes with other bits of than `served_arrays` says. Slow; between steps."""
        return self._on_loop(self._paused(self._compare))

    def fingerprint(self) -> dict[str, str]:
        import torch
        import vllm

        return {
            **self._facts,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
            "machine": platform.machine(),
        }

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        if request.request_id in self._active:
            raise EngineError(f"request {request.request_id!r} is already active: use another id")
        check_request(request, self._vocabulary, self._max_tokens)
        self._check_alive()
        active = self._active[request.request_id] = _Active(request)
        self._loop.call_soon_threadsafe(self._begin, active)

    def cancel(self, request_id: str) -> None:
        active = self._active.pop(request_id, None)
        if active is not None:
            active.cancelled = True
            self._loop.call_soon_threadsafe(lambda: active.task and active.task.cancel())

    def step(self) -> list[Progress]:
        with self._arrived:
            if self._active and not self._out and self._failure is None:
                self._arrived.wait(STEP_S)
            out, self._out = self._out, []
        self._check_alive()
        progress = [one for active, one in out if not active.cancelled]
        for one in progress:
            if one.finished is not None:
                del self._active[one.request_id]
        return progress

    def close(self) -> None:
        async def stop() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            if hasattr(self, "_engine"):
                self._engine.shutdown(timeout=CLOSE_S)
                del self._engine  # its finaliser would run when Python is half gone

        if not self._loop.is_closed():
            self._on_loop(stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise ReplicaLost(f"vLLM's process is gone: {self._failure!r}") from self._failure

    # --- on the loop's thread -------------------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        waiting: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return waiting.result()

    async def _start(self, arguments: dict[str, Any]) -> Any:
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ModelError(f"vLLM can't be imported ({error}): install headrace[vllm], or choose another engine") from (
                error)  # fmt: skip
        try:
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:  # of many kinds; the process' own log has said more
            raise ModelError(f"vLLM can't serve {arguments['model']}: {error}") from error
        await engine.update_weight_version(str(self._version))
        return engine

    def _begin(self, active: _Active) -> None:
        if not active.cancelled:
            active.task = self._loop.create_task(self._read(active))

    async def _read(self, active: _Active) -> None:
        """Turn one request's outputs into progress."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        request, sampling = active.request, active.request.sampling
        name = f"{next(self._numbers)}/{request.request_id}"
        prompt = TokensPrompt(prompt_token_ids=[int(i) for i in request.prompt], cache_salt=f"v{self._version}")
        parameters = SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature, max_tokens=sampling.max_new_tokens,
            seed=sampling.seed % 2**63, stop_token_ids=sorted(request.stop_ids), ignore_eos=True, logprobs=0,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        outputs = self._engine.generate(prompt, parameters, name)
        state, told, cached = None, 0, None
        tokens: list[int] = []
        logprobs: list[float] = []
        try:
            async for output in outputs:
                completion = output.outputs[0]
                tokens += completion.token_ids
                logprobs += [entry[token].logprob for entry, token in
                             zip(completion.logprobs or [], completion.token_ids, strict=True)]  # fmt: skip
                cached = output.num_cached_tokens
                state = state or self._state_of(name)
                if output.finished:
                    starts = [(span.version, span.start) for span in completion.weight_versions]
                elif state is not None:
                    starts = state.weight_version_starts
                else:
                    continue  # it ended meanwhile: its last output is next, and says all
                finished = _finished(completion.finish_reason) if output.finished else None
                active.begun = True
                self._tell(active, _progress(request.request_id, tokens, logprobs, told, starts, finished,
                                             cached if told == 0 else None))  # fmt: skip
                told += len(tokens)
                tokens, logprobs = [], []
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)
        finally:
            await outputs.aclose()

    def _state_of(self, name: str) -> Any:
        """vLLM's record of a request, which knows the versions of its tokens while it runs."""
        processor = self._engine.output_processor
        internal = processor.external_req_ids.get(name)
        return processor.request_states.get(internal[0]) if internal else None

    def _tell(self, active: _Active, progress: list[Progress]) -> None:
        with self._arrived:
            self._out += [(active, one) for one in progress]
            self._arrived.notify()

    def _fail(self, error: Exception) -> None:
        with self._arrived:
            self._failure = self._failure or error
            self._arrived.notify()

    # --- weights --------------------------------------------------------------------------------------------------

    async def _paused(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        result = await work()
        await self._engine.resume_generation()
        return result

    async def _update(self, version: int, changes: Changes) -> None:
        async def work() -> None:
            await self._write(changes)
            await self._engine.update_weight_version(str(version))
            self._version = version
            # What has no token yet may have cached its prompt's keys by the old weights: it begins again.
            for active in self._active.copy().values():
                if active.task is not None and not active.begun:
                    active.task.cancel()
                    await asyncio.wait([active.task])
                    self._begin(active)

        try:
            await self._paused(work)
        except Exception as error:
            self._fail(error)
            raise ReplicaLost(f"vLLM failed while it took version {version}: {error}") from error

    async def _write(self, changes: Changes) -> None:
        for parts in self._messages(changes):
            await self._engine.collective_rpc("headrace_write", args=(self._dtype, parts))

    async def _compare(self) -> list[str]:
        differing: list[str] = []
        for parts in self._messages(self._whole()):
            answers = await self._engine.collective_rpc("headrace_differing", args=(self._dtype, parts))
            differing += [name for answer in answers for name in answer]
        return differing

    def _differing(self) -> list[str]:
        return self._on_loop(self._compare())

    def _whole(self) -> Changes:
        return {name: (None, bits) for name, bits in self._bits.items()}

    def _messages(self, changes: Changes) -> Iterator[list[tuple[str, tuple[int, ...], bytes | None, bytes]]]:
        """What is sent to vLLM's process, in lists of bounded size; a tensor is never split."""
        parts, size = [], 0
        for name, (positions, values) in changes.items():
            where = None if positions is None else positions.astype("<i8").tobytes()
            parts.append((name, self._bits[name].shape, where, values.tobytes()))
            size += values.nbytes + len(where or b"")
            if size > PART_BYTES:
                yield parts
                parts, size = [], 0
        if parts:
            yield parts


class _Folder:
    """A model folder as the trainer reads it: names and bits of its tensors, its tokenizer, its sizes."""

    def __init__(self, path: str | Path, dtype: str):
        from .hf import BITS, DTYPES, eos_ids, load_model

        model, self.tokenizer = load_model(path, "float32", "cpu")
        self.bits: dict[str, NDArray[Any]] = {}
        self.rounded = False
        for name, parameter in model.named_parameters():
            served = parameter.detach().to(DTYPES[dtype]).contiguous()
            self.rounded = self.rounded or not bool((served.float() == parameter).all())
            self.bits[name] = served.view(BITS[served.dtype]).numpy().reshape(served.shape).copy()
        self.eos_ids = eos_ids(model, self.tokenizer)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._config = model.config.get_text_config()

    def cache_bytes_per_token(self, compute_dtype: str) -> int:
        """Keys and values of all layers."""
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * width * (4 if compute_dtype == "float32" else 2))


def _floats(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == "float16" else np.float32)


def _finished(reason: str) -> Finished:
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    return "lost"


def _progress(request_id: str, tokens: Sequence[int], logprobs: Sequence[float], told: int,
              starts: Sequence[tuple[str, int]], finished: Finished | None, cached: int | None) -> list[Progress]:  # fmt: skip
    """Cut new tokens where the version changes. `told` of the request were told before; `starts`: where in the whole
    completion each version begins."""
    out = []
    for index, (version, start) in enumerate(starts):
        end = starts[index + 1][1] if index + 1 < len(starts) else told + len(tokens)
        begin = max(start, told)
        if begin < end:
            piece = slice(begin - told, end - told)
            out.append(Progress(request_id, np.array(tokens[piece], np.int32), np.array(logprobs[piece], np.float32),
                                int(version), finished if end == told + len(tokens) else None,
                                cached if not out else None))  # fmt: skip
    if not out and finished is not None:
        version = int(starts[-1][0]) if starts else 0
        out.append(Progress(request_id, np.empty(0, np.int32), np.empty(0, np.float32), version, finished, cached))
    return out

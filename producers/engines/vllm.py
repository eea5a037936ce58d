"""Decides how vLLM is driven in process: its asynchronous engine on a loop of its own, behind the synchronous protocol.

vLLM computes in a child process, so that its steps don't wait for the worker's other work. Every output of that process
carries the policy version that sampled it, and weights change only while it is paused, so that a token's version is
exact whatever is still on its way. A request is salted with the version at its beginning: no later one meets its keys.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.schemas.errors import EngineError, ModelError, ReplicaLost

from . import Changes, Finished, GenerationRequest, Progress
from .driven import LoopEngine
from .served import ModelFolder, check_changes, messages, refuse_nan, whole, write_changes

T = TypeVar("T")

CLOSE_S = 0.2  # vLLM's process holds nothing that is worth waiting for
ALIVE_S = 0.5  # how often a call's wait looks whether vLLM's process is there
BLOCK = 32  # tokens of one cache block on a CPU
# Set where the user hasn't: no calls home, no look for a newer file, and what vLLM's CPU build needs.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR",
               "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # fmt: skip
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip


class VllmEngine(LoopEngine):
    """Any model that vLLM serves, by path; see `Engine` for the contract.

    `slots`: requests that decode at once; `max_tokens`: prompt and completion of one request at most. Raises ModelError
    where vLLM or the model can't be had, or vLLM holds other weights than the folder.
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
    ) -> None:
        folder = ModelFolder(model_path, dtype)
        max_tokens = min(max_tokens, folder.positions or max_tokens)  # vLLM insists
        super().__init__(folder, slots, max_tokens)
        self._bits, self._dtype = folder.bits, dtype
        self._numbers = itertools.count()
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
            blocks = slots * (-(-max_tokens // BLOCK) + 1)
            cache = blocks * BLOCK * folder.cache_bytes_per_token(compute_dtype)
            arguments |= {"enforce_eager": True, "block_size": BLOCK, "kv_cache_memory_bytes": cache}
        try:
            self._engine = self.run(self._start(arguments))
            if folder.rounded:  # vLLM read the folder's values, not what the published dtype makes of them
                self.run(self._write(whole(self._bits)))
            if differing := self.run(self._compare()):
                raise ModelError(f"{model_path}: vLLM serves these tensors under no such name, so they can't be kept "
                                 f"up to date: {', '.join(differing[:5])}")  # fmt: skip
        except BaseException:
            self.close()
            raise

    # --- what is served -------------------------------------------------------------------------------------------

    def apply(self, version: int, changes: Changes) -> None:
        check_changes(version, self._version, self._bits, changes)
        refuse_nan(version, changes, self._dtype)
        self._check_alive()
        write_changes(self._bits, changes)
        self.run(self._update(version, changes))

    def differing(self) -> list[str]:
        """Names of the tensors where what vLLM computes with isn't what `served_arrays` says. Reads all of them."""
        return self.run(self._paused(self._compare))

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

    # --- on the loop ----------------------------------------------------------------------------------------------

    async def _start(self, arguments: dict[str, Any]) -> Any:
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ModelError(f"vLLM can't be imported ({error}): install headrace[vllm], or choose another engine"
                             ) from error  # fmt: skip
        try:
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:  # of many kinds; its process has said more in the log
            raise ModelError(f"vLLM can't serve {arguments['model']}: {error}") from error
        await engine.update_weight_version(str(self._version))
        return engine

    async def _stop(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown(timeout=CLOSE_S)
            # Its finaliser would do so again, and fail where Python is half gone by then.
            self._engine.shutdown = lambda: None

    async def _generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        name = f"{next(self._numbers)}/{request.request_id}"
        prompt = TokensPrompt(prompt_token_ids=[int(i) for i in request.prompt], cache_salt=f"v{self._version}")
        state, told, outputs = None, 0, None
        tokens: list[int] = []
        logprobs: list[float] = []
        try:
            parameters = SamplingParams(
                temperature=0.0 if sampling.greedy else sampling.temperature, max_tokens=sampling.max_new_tokens,
                seed=sampling.seed % 2**63, stop_token_ids=sorted(request.stop_ids), ignore_eos=True, logprobs=0,
                detokenize=False, output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            outputs = self._engine.generate(prompt, parameters, name)
            async for output in outputs:
                completion = output.outputs[0]
                tokens += completion.token_ids
                logprobs += [entry[token].logprob for entry, token in
                             zip(completion.logprobs or [], completion.token_ids, strict=True)]  # fmt: skip
                state = state or self._state_of(name)
                if output.finished:
                    starts = [(span.version, span.start) for span in completion.weight_versions or []]
                elif state is not None:
                    starts = state.weight_version_starts
                else:
                    continue  # it has ended meanwhile: its last output comes next, and says all
                finished = _finished(completion.finish_reason) if output.finished else None
                cached = output.num_cached_tokens if told == 0 else None
                for one in cut(request.request_id, tokens, logprobs, told, starts, finished, cached):
                    yield one
                told += len(tokens)
                tokens, logprobs = [], []
        except VLLMClientError as error:
            raise EngineError(f"vLLM refuses request {request.request_id!r}: {error}") from error
        finally:
            if outputs is not None:
                await outputs.aclose()

    def _state_of(self, name: str) -> Any:
        """vLLM's record of a request, which knows the versions of its tokens while it runs."""
        processor = self._engine.output_processor
        internal = processor.external_req_ids.get(name)
        return processor.request_states.get(internal[0]) if internal else None

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
            for active in [one for one in self._active.values() if not one.begun]:
                await self._begin_again(active)

        try:
            await self._while_alive(self._paused(work))
        except Exception as error:
            self._fail(error)
            raise ReplicaLost(f"vLLM failed while it took version {version}: {error}") from error

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """vLLM leaves a call unanswered whose process died meanwhile. Raises ReplicaLost then."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=ALIVE_S))[0]:
            if self._engine.errored:
                task.cancel()
                raise ReplicaLost("its process has ended")
        return task.result()

    async def _write(self, changes: Changes) -> None:
        for parts in messages(self._bits, changes):
            await self._engine.collective_rpc("headrace_write", args=(self._dtype, parts))

    async def _compare(self) -> list[str]:
        differing: list[str] = []
        for parts in messages(self._bits, whole(self._bits)):
            answers = await self._engine.collective_rpc("headrace_differing", args=(self._dtype, parts))
            differing += [name for answer in answers for name in answer]
        return differing


def _finished(reason: str | None) -> Finished:
    return reason if reason in ("stop", "length") else "lost"  # type: ignore[return-value]


def cut(request_id: str, tokens: Sequence[int], logprobs: Sequence[float], told: int,
        starts: Sequence[tuple[str, int]], finished: Finished | None, cached: int | None
        ) -> list[Progress]:  # fmt: skip
    """New tokens of a request as progress of one version each. `told` of its tokens came before; `starts`: (version,
    where in the whole completion it begins), perhaps beyond what has come so far."""
    out: list[Progress] = []
    end = told + len(tokens)
    for index, (version, start) in enumerate(starts):
        begin = max(start, told)
        until = min(end, starts[index + 1][1]) if index + 1 < len(starts) else end
        if begin < until:
            piece = slice(begin - told, until - told)
            ids, values = np.array(tokens[piece], np.int32), np.array(logprobs[piece], np.float32)
            last, first = until == end, not out
            out.append(Progress(request_id, ids, values, int(version), finished if last else None,
                                cached if first else None))  # fmt: skip
    if not out and finished is not None:
        version = starts[-1][0] if starts else "0"
        out.append(Progress(request_id, np.empty(0, np.int32), np.empty(0, np.float32), int(version), finished, cached))
    return out

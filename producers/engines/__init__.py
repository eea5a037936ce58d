"""The engine protocols: what may be asked of whatever samples tokens, and the facts that come back.

This module decides the contracts alone and imports no framework, so that a worker, a receiver or a test can speak them
without torch. An `Engine` is driven from one thread: `submit` and `cancel` only queue, `step` does one unit of decoding
for every active request, and weights change in `apply`, between steps and nowhere else. Whoever drives it decides
when; the engine decides how. A `Replica` is the asynchronous form, for whoever serves many requests at once: one served
copy of the policy, here (`local`) or behind an address (`openai`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import EngineError

# "lost": the engine gave the request up through no fault of the request (its replicas died); what was sampled so far
# is whole, nothing more comes.
Finished = Literal["stop", "length", "lost"]

# The new bits of one named tensor: flat positions (int64, or None for the whole tensor) and values (uint8, 16, 32 or
# 64: the bits of the published dtype, one per position).
Change = tuple[NDArray[np.int64] | None, NDArray[Any]]
Changes = Mapping[str, Change]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every parameter of the sampled distribution; there is no top-p or top-k, so what is recorded is what was
    sampled.

    `temperature` > 0. `greedy` takes the likeliest token instead of a sampled one and reports its log-probability at
    temperature 1; it is for evaluation, and a worker refuses it for purpose `train`. `seed` names the request's own
    random stream: the same seed, prompt and weights give the same tokens whoever shares the batch.
    """

    temperature: float
    max_new_tokens: int
    seed: int
    greedy: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be above 0 (greedy takes the likeliest)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class Affinity:
    """What routing may know of a request: the conversation, whose earlier turns lie in one replica's prefix cache, and
    the group, whose siblings share their prompt."""

    conversation: str
    group: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue. `prompt` is token ids; the sequence ends after any of `stop_ids` (which is reported as
    its last token)."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    affinity: Affinity | None = None


def check_request(request: GenerationRequest, vocabulary: int, max_tokens: int) -> None:
    """Raises EngineError for a request that an engine of this vocabulary and length can never run."""
    name = f"request {request.request_id!r}"
    if not len(request.prompt):
        raise EngineError(f"{name} has an empty prompt")
    if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        raise EngineError(f"{name} has a token outside the vocabulary of {vocabulary}: another tokenizer's?")
    total = len(request.prompt) + request.sampling.max_new_tokens
    if total > max_tokens:
        raise EngineError(f"{name} needs {total} tokens (prompt {len(request.prompt)}), the engine takes {max_tokens}:"
                          " raise its max_tokens or shorten the task")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step added to one request.

    token_ids int32 [n]; logprobs float32 [n], in nats, of exactly the distribution that was sampled; `version` sampled
    all n of them. n may be 0 where a request only ends. `cached_tokens`: how much of the prompt the engine found in its
    prefix cache; only in a request's first progress, and None where the engine doesn't tell. experts int16
    [m, layers, each]: where they are recorded, those of the m tokens that were computed for these (the prompt, for the
    first; else the token before each).
    """

    request_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version: int
    finished: Finished | None
    cached_tokens: int | None = None
    experts: NDArray[np.int16] | None = None


class Engine(Protocol):
    """Continuous batching over `capacity` slots. Requests beyond it wait inside, in the order of submission."""

    @property
    def version(self) -> int:
        """The policy version whose weights the next step samples from."""

    @property
    def capacity(self) -> int:
        """How many requests decode at once."""

    @property
    def active(self) -> int:
        """Requests submitted and neither finished nor cancelled, waiting ones included."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens with which the model ends a turn."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError where it can never run: empty or over-long prompt, id in use, token
        outside the vocabulary."""

    def cancel(self, request_id: str) -> None:
        """Forget a request; nothing more is reported of it. Unknown ids are ignored: it may have just finished."""

    def step(self) -> list[Progress]:
        """Admit what fits, decode one token for each active request, and report them. Without a request it returns an
        empty list."""

    def apply(self, version: int, changes: Changes) -> None:
        """Overwrite served weights in place and serve `version` from the next step on. Active requests go on with
        their cache (policy keep); a request admitted later never meets cached keys of an earlier version. All names,
        positions and types are checked before the first write; on an error nothing has changed."""

    def served_arrays(self) -> dict[str, NDArray[Any]]:
        """Name -> the served weights' bits in the published dtype (bfloat16 and float16 as uint16, float32 as uint32),
        live and read-only: they change with `apply`. Tied tensors appear once."""

    def fingerprint(self) -> dict[str, str]:
        """What decides the numbers besides the weights: engine, library versions, device, dtypes, threads."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to and including the opening of the model's next turn."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""

    def close(self) -> None:
        """Free what the engine holds. Nothing may be asked of it afterwards."""


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """What a replica says of itself. `running` decode now, `waiting` queue inside it, `capacity` decode at most.
    `serving` is False where it takes no requests (starting, closing, broken)."""

    version: int
    serving: bool
    running: int
    waiting: int
    capacity: int


class Replica(Protocol):
    """One served copy of the policy. All methods on one asyncio loop."""

    @property
    def name(self) -> str:
        """Unique among the replicas of a pool."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        """The request's tokens as they come; the last item says how it `finished`. Closing the iterator, or cancelling
        the task that waits for it, aborts the request. Raises ReplicaLost where nothing more comes from this replica,
        though the request may run elsewhere, and EngineError where it can never run."""

    async def health(self) -> ReplicaHealth:
        """Raises ReplicaLost where the replica doesn't answer."""

    async def close(self) -> None:
        """Abort what runs (it raises ReplicaLost) and free what the replica holds."""

"""Decides how a Hugging Face causal language model samples: batched, with requests that join and leave between steps.

Each active request owns one row of a key-value cache; active rows are contiguous, so a step runs on views of the cache
and copies nothing. Prompts that wait together are prefilled as one row laid out as a tree (their common beginning
once, then the rest of each distinct prompt), and siblings copy the result. The served weights are kept in the
published dtype, bit for bit what the trainer published; the model that computes holds the same values in the compute
dtype.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headrace.schemas.adapter import inject
from headrace.schemas.errors import EngineError, ModelError, WeightsRefused
from headrace.schemas.forward import fake_quantised, quantised_names, widen_head
from headrace.schemas.routing import Experts, Recording
from headrace.schemas.settings import LoraSettings

from . import Changes, Finished, GenerationRequest, Progress, check_request
from .served import check_changes, read_only, write_changes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}

# The cache grows to the longest admitted request in blocks, since growing copies it.
CACHE_BLOCK = 64


class _Row:
    """One active request. `length` tokens of it are in the cache; `pending` is the sampled token that isn't yet."""

    __slots__ = ("request", "random", "length", "pending", "sampled")

    def __init__(self, request: GenerationRequest):
        self.request = request
        # A request draws one number per token from a stream of its own, so its tokens don't depend on its neighbours.
        self.random = np.random.Generator(np.random.Philox(key=request.sampling.seed % 2**64))
        self.length = 0
        self.pending = 0
        self.sampled = 0


class _RowCache(Cache):
    """Keys and values of all rows: per layer [slots, heads, length, dim]. A decode step writes one position per
    row."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.positions = torch.empty(0, dtype=torch.long)
        self.rows = torch.empty(0, dtype=torch.long)

    def allocate(self, like: Sequence[torch.Tensor], slots: int, length: int) -> None:
        """Make room for `length` tokens a row, keeping what is there. `like`: per layer keys [1, heads, any, dim]."""
        if self.keys and self.keys[0].shape[2] >= length:
            return
        length = -(-length // CACHE_BLOCK) * CACHE_BLOCK
        for store in (self.keys, self.values):
            for layer, example in enumerate(like):
                # Zeros, not uninitialised memory: masked positions are multiplied by 0, and 0 * nan is nan.
                fresh = example.new_zeros(slots, example.shape[1], length, example.shape[3])
                if layer < len(store):
                    fresh[:, :, : store[layer].shape[2]] = store[layer]
                    store[layer] = fresh
                else:
                    store.append(fresh)

    def move(self, source: int, target: int, length: int) -> None:
        for store in (*self.keys, *self.values):
            store[target, :, :length] = store[source, :, :length]

    def begin(self, lengths: torch.Tensor) -> None:
        """Set the position that the next step writes in each of the first n rows: int64 [n]."""
        self.positions, self.rows = lengths, torch.arange(len(lengths), device=lengths.device)
        self._span = int(lengths.max()) + 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.rows, :, self.positions] = key_states[:, :, 0]
        values[self.rows, :, self.positions] = value_states[:, :, 0]
        count = len(self.rows)
        return keys[:count, :, : self._span], values[:count, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._span - 1


class HfEngine:
    """Any Hugging Face causal language model by path; see `Engine` for the contract.

    `slots`: requests that decode at once; `max_tokens`: prompt and completion of one request at most. With `lora` the
    adapter's weights are what is served. `record_experts`: which ones tokens go through, in a mixture of experts.
    Raises ModelError for a path that isn't a causal language model with full attention and a tokenizer.
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
        prefill_tokens: int = 2048,
        head_dtype: str = "compute",
        quantisation: str = "none",
        lora: LoraSettings | None = None,
        record_experts: bool = False,
    ) -> None:
        self._model, self._tokenizer = load_model(model_path, compute_dtype, device)
        self._grid = quantisation
        self._on_grid = frozenset[str]() if quantisation == "none" else quantised_names(self._model)
        self._parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        if lora is not None:  # the adapter is served; what it adapts is rounded as any weights are, and stays
            for parameter in self._parameters.values():
                parameter.data.copy_(parameter.to(DTYPES[dtype]))
            self._parameters = inject(self._model, lora)
            self._model.to(device=device, dtype=getattr(torch, compute_dtype)).requires_grad_(False)
        if head_dtype == "float32":
            widen_head(self._model)
        self._served = {
            name: parameter.detach().to("cpu", DTYPES[dtype], copy=True).contiguous()
            for name, parameter in self._parameters.items()
        }
        self._bits = {
            name: served.view(BITS[served.dtype]).numpy().reshape(served.shape) for name, served in
            self._served.items()
        }
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._computed(name))
        self._dtype = dtype
        self._shapes = {name: tuple(bits.shape) for name, bits in self._bits.items()}
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self._slots, self._max_tokens, self._prefill_tokens = slots, max_tokens, prefill_tokens
        self._device = torch.device(device)
        self._version = version
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache = _RowCache()
        self._prefix: tuple[list[int], list[torch.Tensor], list[torch.Tensor]] = ([], [], [])
        self._asleep = False
        self._recording = Recording(self._model) if record_experts else None
        self._prefix_experts: Experts | None = None
        self._facts = {"engine": "hf", "dtype": dtype, "compute_dtype": compute_dtype, "device": device,
                       "head_dtype": head_dtype, "quantisation": quantisation}  # fmt: skip

    # --- what is served -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def active(self) -> int:
        return len(self._waiting) + len(self._rows)

    @property
    def eos_ids(self) -> frozenset[int]:
        return eos_ids(self._model, self._tokenizer)

    def served_arrays(self) -> dict[str, NDArray[Any]]:
        return read_only(self._bits)

    def apply(self, version: int, changes: Changes) -> None:
        if self._asleep:
            raise WeightsRefused(f"version {version} can't be applied to an engine that sleeps: wake it")
        check_changes(version, self._version, self._bits, changes)
        write_changes(self._bits, changes)
        with torch.no_grad():
            for name, (positions, _) in changes.items():
                served = self._served[name]
                if positions is None or name in self._on_grid:  # a channel's scale moves all of its weights
                    self._parameters[name].copy_(self._computed(name))
                else:
                    index = torch.from_numpy(positions)
                    parameter = self._parameters[name].view(-1)
                    parameter[index.to(parameter.device)] = served.view(-1)[index].to(parameter.device,
                    parameter.dtype)
        self._version = version
        self._prefix = ([], [], [])  # a later request never meets another version's cached prefix

    def sleep(self) -> None:
        """Give the memory of weights, keys and values to whoever shares the device, a trainer say, until `wake`. No
        receiver may follow an engine that sleeps. With LoRA what is adapted stays. Raises EngineError where requests
        are active."""
        if self.active:
            raise EngineError(f"{self.active} requests are active: an engine can't sleep below them")
        self._asleep = True
        self._served, self._bits, self._cache, self._prefix = {}, {}, _RowCache(), ([], [], [])
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def wake(self, version: int, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Serve `version` after `sleep`. `tensors`: name and published bits of every served tensor, in any order; each
        is copied to its place before the next is asked for. Raises WeightsRefused where they aren't those of this
        model, and then it sleeps on."""
        if not self._asleep:
            raise WeightsRefused("the engine is awake: weights come by `apply`")
        try:
            for name, bits in tensors:
                shape, dtype = self._shapes.get(name), BITS[DTYPES[self._dtype]]
                fits = (bits.shape, torch.from_numpy(bits).dtype) == (shape, dtype)
                if shape is None or name in self._served or not fits:
                    raise WeightsRefused(f"tensor {name!r} of shape {bits.shape}, {bits.dtype} isn't one that this "
                                         "engine lacks")  # fmt: skip
                self._served[name] = torch.from_numpy(bits).clone().view(DTYPES[self._dtype])
                self._bits[name] = self._served[name].view(dtype).numpy()
                parameter = self._parameters[name]
                parameter.data = parameter.data.new_empty(shape)
                parameter.copy_(self._computed(name))
            if lacking := self._shapes.keys() - self._served.keys():
                raise WeightsRefused(f"version {version} came without {', '.join(sorted(lacking)[:3])}")
        except BaseException:
            self.sleep()
            raise
        self._version, self._asleep = version, False

    def _computed(self, name: str) -> torch.Tensor:
        """The values of a served tensor that the forward computes with."""
        served = self._served[name]
        return fake_quantised(served, self._grid) if name in self._on_grid else served

    def fingerprint(self) -> dict[str, str]:
        return {
            **self._facts,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": str(torch.get_num_threads()),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
        }

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def close(self) -> None:
        """Memory alone, which the process gives back."""

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        if self._asleep:
            raise EngineError(f"request {request.request_id!r}: the engine sleeps")
        if any(row.request.request_id == request.request_id for row in (*self._waiting, *self._rows)):
            raise EngineError(f"request {request.request_id!r} is already active: use another id")
        check_request(request, self._vocabulary, self._max_tokens)
        self._waiting.append(_Row(request))

    def cancel(self, request_id: str) -> None:
        self._waiting = deque(row for row in self._waiting if row.request.request_id != request_id)
        for index, row in enumerate(self._rows):
            if row.request.request_id == request_id:
                self._leave(index)
                return

    @torch.no_grad()
    def step(self) -> list[Progress]:
        joining = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._slots - len(self._rows)))]
        logits: list[torch.Tensor] = []
        experts: list[Experts] = []  # of each row, where they are recorded
        if self._rows:
            logits.append(self._decode_rows())
            if self._recording is not None:
                experts += list(self._recording.take()[:, None])
        for batch in self._prefill_batches(joining):
            logits.append(self._prefill(batch, experts))
            self._rows += batch
        if not logits:
            return []
        tokens, logprobs = _sample(torch.cat(logits), self._rows)
        progress = []
        for index in reversed(range(len(self._rows))):  # from the end, so that a leaving row moves no row still to see
            row, token = self._rows[index], tokens[index]
            row.pending = int(token)
            row.sampled += 1
            finished: Finished | None = None
            if row.pending in row.request.stop_ids:
                finished = "stop"
            elif row.sampled == row.request.sampling.max_new_tokens:
                finished = "length"
            if finished:
                self._leave(index)
            progress.append(
                Progress(
                    row.request.request_id, tokens[index : index + 1], logprobs[index : index + 1], self._version,
                    finished, experts=experts[index] if experts else None
                )
            )
        return progress[::-1]

    def _leave(self, index: int) -> None:
        last = self._rows.pop()
        if index < len(self._rows):
            self._cache.move(len(self._rows), index, last.length)
            self._rows[index] = last

    def _decode_rows(self) -> torch.Tensor:
        """Logits [n, vocabulary] that follow each active row's pending token, which goes into the cache."""
        lengths = torch.tensor([row.length for row in self._rows], device=self._device)
        self._cache.begin(lengths)
        seen = torch.arange(int(lengths.max()) + 1, device=self._device) <= lengths[:, None]
        output = self._model(
            input_ids=torch.tensor([[row.pending] for row in self._rows], device=self._device),
            attention_mask=_additive(seen[:, None, None], self._model.dtype),
            position_ids=lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        for row in self._rows:
            row.length += 1
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _prefill_batches(self, joining: list[_Row]) -> list[list[_Row]]:
        """Requests in order, cut so that the distinct prompts of one forward pass stay within `prefill_tokens`."""
        batches: list[list[_Row]] = []
        prompts: set[tuple[int, ...]] = set()
        for row in joining:
            prompts.add(tuple(row.request.prompt))
            if not batches or sum(map(len, prompts)) > self._prefill_tokens:
                prompts = {tuple(row.request.prompt)}
                batches.append([])
            batches[-1].append(row)
        return batches

    def _prefill(self, joining: list[_Row], experts: list[Experts]) -> torch.Tensor:
        """Logits [n, vocabulary] that follow each prompt; the keys and values go into rows after the active ones. Where
        they are recorded, each prompt's experts join `experts`."""
        members: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(joining):
            members.setdefault(tuple(int(i) for i in row.request.prompt), []).append(index)
        prompts = list(members)
        known, keys, values = self._prefix
        # At least one token of each prompt is computed, since its hidden state gives the first logits.
        stem = min(_common(prompt[:-1], prompts[0]) for prompt in prompts)
        known_length = _common(prompts[0][:stem], known)
        cache = DynamicCache()
        if known_length:
            for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
                cache.update(key[:, :, :known_length], value[:, :, :known_length], layer)
        ids, positions, segments = list(prompts[0][known_length:stem]), list(range(known_length, stem)), []
        segments += [0] * len(ids)
        for number, prompt in enumerate(prompts, start=1):
            ids += prompt[stem:]
            positions += range(stem, len(prompt))
            segments += [number] * (len(prompt) - stem)
        segment = torch.tensor(segments, device=self._device)
        seen = torch.ones(len(ids), known_length + len(ids), dtype=torch.bool, device=self._device)
        seen[:, known_length:] = ((segment[:, None] == segment) | (segment == 0)).tril()
        starts = np.cumsum([stem, *(len(prompt) - stem for prompt in prompts)])
        output = self._model(
            input_ids=torch.tensor([ids], device=self._device),
            attention_mask=_additive(seen[None, None], self._model.dtype),
            position_ids=torch.tensor([positions], device=self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(starts[1:] - 1 - known_length).to(self._device),
        )
        longest = max(len(row.request.prompt) + row.request.sampling.max_new_tokens for row in joining)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        self._cache.allocate([key for key, _ in layers], self._slots, longest)
        # Where each joining row's own tokens (all after the stem) lie in this forward; a shorter prompt's row ends with
        # repeats, which stay masked until decoding overwrites them.
        number_of = {index: number for number, indices in enumerate(members.values()) for index in indices}
        order = torch.tensor([number_of[index] for index in range(len(joining))], device=self._device)
        first, after = torch.from_numpy(starts[:-1]).to(self._device), torch.from_numpy(starts[1:]).to(self._device)
        longest_own = max(len(prompt) for prompt in prompts) - stem
        own = first[order, None] + torch.arange(longest_own, device=self._device)
        own = torch.minimum(own, after[order, None] - 1)
        rows = slice(len(self._rows), len(self._rows) + len(joining))
        for layer, (key, value) in enumerate(layers):
            for store, computed in ((self._cache.keys[layer], key), (self._cache.values[layer], value)):
                store[rows, :, :stem] = computed[:, :, :stem]
                store[rows, :, stem : stem + longest_own] = computed[0][:, own].transpose(0, 1)
        for row in joining:
            row.length = len(row.request.prompt)
        kept = [torch.cat([x[:, :, :stem], x[:, :, stem : len(prompts[0])]], dim=2) for pair in layers for x in pair]
        self._prefix = (list(prompts[0]), kept[::2], kept[1::2])
        if self._recording is not None:
            computed = self._recording.take()
            if known_length and self._prefix_experts is not None:
                computed = np.concatenate([self._prefix_experts[:known_length], computed])
            each = [np.concatenate([computed[:stem], computed[start:end]])
                    for start, end in zip(starts[:-1], starts[1:], strict=True)]  # fmt: skip
            self._prefix_experts = each[0]
            experts += [each[number_of[index]] for index in range(len(joining))]
        logits: torch.Tensor = output.logits[0][order]
        return logits


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled dot-product attention; a decode step with grouped heads doesn't copy each key to all heads of its group,
    since for one query token the heads of a group are as good as a few query tokens of one head."""
    rows, heads, tokens, width = query.shape
    if tokens != 1 or heads == key.shape[1]:
        attended: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, width), None


AttentionInterface.register("headrace_grouped", _attention)


def load_model(model_path: str | Path, compute_dtype: str, device: str) -> tuple[Any, Any]:
    """The model in the compute dtype, without dropout, and its tokenizer; from a local folder only. Raises
    ModelError."""
    if not (Path(model_path) / "config.json").is_file():
        raise ModelError(f"{model_path} holds no config.json: model_path must be a Hugging Face model folder")
    transformers.utils.logging.disable_progress_bar()
    try:
        # Loaded in float32 whatever the file holds, so that rounding to the published dtype happens once, as in the
        # trainer.
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="headrace_grouped", local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path} can't be loaded as a causal language model: {error}") from error
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(f"{model_path} has layers of type {sorted(kinds)}; this engine handles full attention only")
    return model.to(device=device, dtype=getattr(torch, compute_dtype)).eval().requires_grad_(False), tokenizer


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens with which the model ends a turn, as its folder says."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as what is added to attention scores. Every query sees itself, so -inf never fills a whole
    line."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _sample(logits: torch.Tensor, rows: Sequence[_Row]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """One token per row from softmax(logits / temperature), by inverting the distribution function at the row's own
    uniform number, and its log-probability in float32; a greedy row's at temperature 1."""
    sampling = [row.request.sampling for row in rows]
    temperatures = [[1.0 if s.greedy else s.temperature] for s in sampling]
    temperature = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = logprobs.argmax(dim=-1)
    drawn = [index for index, s in enumerate(sampling) if not s.greedy]
    if drawn:
        cumulative = logprobs[drawn].double().exp_().cumsum_(dim=-1)
        uniform = torch.tensor([[rows[i].random.random()] for i in drawn], dtype=torch.float64, device=logits.device)
        # The first token whose cumulated probability exceeds the number: one of probability 0 is never taken.
        picked = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        chosen[drawn] = picked[:, 0].clamp_(max=logits.shape[-1] - 1)
    taken = logprobs.gather(1, chosen[:, None])[:, 0]
    return chosen.int().cpu().numpy(), taken.cpu().numpy()

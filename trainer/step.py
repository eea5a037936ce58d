"""Decides how a batch becomes the next version: forward on served weights, loss, gradients, optimizer, and rounding to
what is served.

The whole step is in the order in which it happens. Nothing here reads or writes a log. The same state, batch and
settings give the same bits on the same machine with the same number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from headrace.schemas.adapter import inject
from headrace.schemas.errors import CheckpointError, InvalidRecord, NonFiniteGradient
from headrace.schemas.forward import fake_quantised, quantised_names, widen_head
from headrace.schemas.routing import Replay
from headrace.schemas.settings import LoraSettings

from . import corrections
from .alignment import QUIET, STATED, Verdict, meanings, verdict
from .batches import Group, MicroBatch, counted, pack
from .drift import SHIFT, change, probe_of
from .gathered import gathered, joined, own_rows
from .losses import clipped, token_losses, token_shares
from .model import load_model, recompute_activations
from .penalties import penalty
from .ranks import ALONE, Ranks
from .reductions import CLAMP, Tokens
from .report import Scored, StepReport, effective, figures, group_counts, lags_of
from .reused import Reused, ReusedCounts
from .reused import share as reused_share
from .reused import term as reused_term
from .spread import rows_of
from .weighing import Begun, batch_advantages, corrected, lengths, minibatches, refuse_non_finite
from .weighing import StepSettings as StepSettings

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}

ALIGNED_TOKENS = 192  # row tokens whose logits are compared, each a whole vocabulary of numbers

CHECKPOINT_FORMAT = "headrace-train-state-1"


@dataclass(frozen=True, slots=True)
class _Pass:
    """One optimizer step's share of the batch: its loss without reuse, and sums over its tokens."""

    scored: Scored
    loss: float
    row_tokens: int
    clipped: int
    penalty: float


class TrainState:
    """Float32 masters, AdamW moments, and the model that computes with the served weights.

    `dtype` is the published one (bfloat16 | float16 | float32), `compute_dtype` that of the forward pass, in which
    served weights are exactly representable; `head_dtype` (compute | float32) that of its head. `quantisation` (none |
    int8 | fp8): the forward computes with served weights rounded to that grid. Tied tensors are one parameter, named as
    `named_parameters()` names it. With `lora` only the adapter is trained and served. `recompute`: activations are
    computed again in the backward pass; `replay_routing`: tokens go through the experts that were recorded. Where
    `ranks` are several, each holds a part of every tensor, makes every call beside the others, and rank 0 has what is
    served and saved in whole.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: str = "bfloat16",
        compute_dtype: str = "float32",
        version: int = 0,
        *,
        head_dtype: str = "compute",
        quantisation: str = "none",
        lora: LoraSettings | None = None,
        recompute: bool = False,
        replay_routing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.version = version
        self._grid, self._head_dtype = quantisation, head_dtype
        self.optimizer_steps = 0
        self._dtype, self._device, self._ranks = dtype, ranks.device, ranks
        self._model_path, self._reference = model_path, None
        model = load_model(model_path)
        trained = dict(model.named_parameters())
        if lora is not None:  # what is adapted is rounded as it is served, and stays
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.to(DTYPES[dtype]))
            trained = inject(model, lora)
        names = {id(parameter): name for name, parameter in trained.items()}
        own = {own: names[id(p)] for own, p in model.named_parameters() if id(p) in names}
        self._shapes = {name: tuple(p.shape) for name, p in trained.items()}
        self._masters = {name: ranks.part(p.detach()).to(self._device, copy=True) for name, p in trained.items()}
        self._served = {name: master.to("cpu", DTYPES[dtype], copy=True) for name, master in self._masters.items()}
        self._model = model.to(device=self._device, dtype=getattr(torch, compute_dtype))
        if head_dtype == "float32":
            widen_head(self._model)
        self._on_grid = frozenset[str]() if quantisation == "none" else quantised_names(self._model)
        self._rotary = any(name.endswith("rotary_emb") for name, _ in self._model.named_modules())
        self._replay = Replay(self._model) if replay_routing else None
        if recompute:
            recompute_activations(self._model)
        ranks.shard(self._model)
        self._parameters = {own[name]: p for name, p in self._model.named_parameters() if name in own}
        self._serve(self._served)
        self._kept: dict[str, torch.Tensor] = {}  # served weights of the version that replicas were last probed at
        self._optimizer = torch.optim.AdamW(list(self._masters.values()), fused=True)
        for master in self._masters.values():
            self._optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=self._device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        self._seconds: dict[str, float] = {}  # of the step under way, by part
        self._whole: dict[str, torch.Tensor] = {}  # of everyone's parts, on rank 0 of several
        self._collect()

    def train_batch(self, groups: Sequence[Group], target_version: int, settings: StepSettings,
                    reused: Sequence[Reused] = ()) -> StepReport:  # fmt: skip
        """Make the next version from a batch that targets `target_version`, which must be the present one:
        `minibatches` x `epochs` optimizer steps, each on its share of the groups, in the manifest's order.

        Raises NonFiniteLogprob, NonFiniteGradient, and InvalidRecord where there is no token; then nothing has changed.
        Raises ValueError for another target.
        """
        if target_version != self.version:
            raise ValueError(f"the batch targets version {target_version}, the trainer is at version {self.version}")
        self._seconds = dict.fromkeys(("forward", "backward", "optimizer", "rounding", "probe"), 0.0)
        rate = settings.learning_rate * min(1.0, (self.version + 1) / max(1, settings.warmup_versions))
        parts = minibatches(groups, settings.minibatches)
        if not parts:
            raise InvalidRecord("the batch holds no token that a model sampled: there is nothing to train")
        several = settings.optimizer_steps > 1  # a later one may be refused
        kept = {name: tensor.clone() for name, tensor in self._parts().items()} if several else None
        steps = self.optimizer_steps
        passes, norms, reuses = [], [], []
        try:
            with self._timed("probe"):
                alignment = self._alignment(groups, settings)
            begun = self._begin(groups, settings)
            for _ in range(settings.epochs):
                for at, part in parts:
                    passes.append(self._accumulate(part, settings, begun, at))
                    reuses += [self._reuse(one, part, settings) for one in reused]
                    with self._timed("optimizer"):
                        norms.append(self._clip(settings.max_grad_norm))
                        self._update(rate, settings)
                        self._zero_grad()
                    with self._timed("rounding"):
                        self._round()
        except Exception:
            if kept is not None:
                for name, tensor in self._parts().items():
                    tensor.copy_(kept[name])
                self._at_step(steps)
            raise
        finally:
            self._zero_grad()
        self.version += 1
        self._collect()
        scored = begun.scored or Scored.joined([one.scored for one in passes[: len(parts)]])
        with self._timed("probe"):
            rho, noise, probe_tokens = self._rho(groups, scored, settings)
        rewards = [episode.reward for _, episode in counted(groups) if episode.reward is not None]
        tokens = max(1, sum(len(one.scored.current) for one in passes))
        return StepReport(
            version=self.version,
            loss=sum(one.loss for one in passes) / len(passes) + sum(part for _, part in reuses),
            grad_norm=sum(norms) / len(norms),
            learning_rate=rate,
            reward_mean=float(np.mean(rewards)),
            groups=group_counts(groups, scored),
            lags=lags_of(scored),
            ess=effective(scored),
            rho=rho,
            rho_noise=noise,
            probe_tokens=probe_tokens,
            row_tokens=sum(one.row_tokens for one in passes),
            seconds=self._seconds,
            reused=tuple(counts for counts, _ in reuses),
            optimizer_steps=len(passes),
            clipped=sum(one.clipped for one in passes) / tokens,
            penalty=sum(one.penalty for one in passes) / tokens,
            figures=figures(groups, scored),
            alignment=alignment,
        )

    # --- the parts of a step, in order ------------------------------------------------------------------------------

    def _begin(self, groups: Sequence[Group], settings: StepSettings) -> Begun:
        advantage = batch_advantages(groups, settings)
        if not settings.looks_ahead:
            return Begun(advantage, None, None)
        members, rows = counted(groups), rows_of(groups, settings.micro_batch_tokens, self._ranks.size)
        found_here: dict[int, dict[str, NDArray[Any]]] = {}
        spare: dict[int, dict[str, NDArray[Any]]] = {}
        with torch.no_grad():
            for number, row, idle in own_rows(rows, self._ranks):
                with self._timed("forward"):
                    (spare if idle else found_here)[number] = {"current": self._logprobs(row).double().cpu().numpy()}
        current = gathered(rows, found_here, spare, self._ranks)["current"]
        refuse_non_finite(members, rows, current)
        whole = {name: np.concatenate([getattr(row, name) for row in rows])
                 for name in ("behaviour", "weights", "versions", "episode")}  # fmt: skip
        scored, found = corrected(current, whole, advantage, settings)
        kept = None
        if settings.reject_shrinks:
            out = torch.zeros(len(current), dtype=torch.bool)
            for rejected in found.rejected.values():
                out |= rejected
            kept = lengths(members) - torch.bincount(torch.from_numpy(scored.episode)[out], minlength=len(members))
        return Begun(advantage, scored, kept)

    def _accumulate(self, groups: Sequence[Group], settings: StepSettings, begun: Begun | None = None, at: int = 0
                    ) -> _Pass:  # fmt: skip
        """Leave the gradient of a share of the batch in the parameters: the groups whose counted episodes begin with
        number `at` of the batch. Everything that normalises is taken over the share, never over a row."""
        begun = begun or self._begin(groups, settings)
        members = counted(groups)
        advantage = begun.advantage[at : at + len(members)]
        counts = lengths(members) if begun.kept is None else begun.kept[at : at + len(members)]
        share = token_shares(settings.denominator, counts, settings.budget).to(self._device)
        rows = rows_of(groups, settings.micro_batch_tokens, self._ranks.size)
        places = np.cumsum([0, *(len(row.targets) for row in rows)])
        if begun.scored is not None:
            places += int(np.searchsorted(begun.scored.episode, at))
        loss, row_tokens, held, cost = 0.0, 0, 0, 0.0
        parts: dict[int, Scored] = {}
        spare: dict[int, Scored] = {}
        for number, micro, idle in own_rows(rows, self._ranks):
            with self._timed("forward"):
                logprobs = self._logprobs(micro)
            current = logprobs.detach().double()
            if begun.scored is None or (settings.bypass and settings.optimizer_steps > 1):
                whole = {name: getattr(micro, name) for name in ("behaviour", "weights", "versions", "episode")}
                scored, _ = corrected(current.cpu().numpy(), whole, advantage, settings)
            else:
                scored = begun.scored.part(int(places[number]), int(places[number + 1]), at)
            if idle:  # the others are at their last row, and every layer is gathered from all
                (logprobs.sum() * 0).backward()  # type: ignore[no-untyped-call]
                spare[number] = scored
                continue
            behaviour = torch.from_numpy(micro.behaviour).to(self._device)
            staleness = torch.from_numpy(micro.weights).to(self._device)
            episode = torch.from_numpy(micro.episode).to(self._device)
            tokens = Tokens(episode, staleness > 0, len(members))
            proximal = behaviour.double() if settings.bypass else None
            if begun.scored is not None and not settings.bypass:
                proximal = torch.from_numpy(scored.current).to(self._device)
            # A masked token's numbers may be anything: they are replaced before any arithmetic, not multiplied by 0.
            weight = torch.from_numpy(scored.correction).to(self._device)
            constant = torch.where(tokens.used, weight * staleness, torch.zeros_like(weight)) * share[episode]
            own = advantage.to(self._device)[episode]
            total = token_losses(settings, tokens, logprobs, own, constant, proximal).sum()
            held += int(clipped(settings, tokens, logprobs, own, proximal).sum())
            if settings.kl is not None:
                reference = behaviour if settings.kl_reference == "behaviour" else self._reference_logprobs(micro)
                apart = penalty(settings.kl, logprobs, reference, tokens.used)
                total = total + settings.kl_coefficient * (apart * share[episode]).sum()
                cost += float(apart.detach().sum())
            with self._timed("backward"):
                total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach())
            row_tokens += len(micro.ids)
            parts[number] = replace(scored, current=current.cpu().numpy())
        scored = joined(rows, parts, spare, self._ranks)
        refuse_non_finite(members, rows, scored.current)
        sums = self._ranks.total(torch.tensor([loss, row_tokens, held, cost], dtype=torch.float64)).tolist()
        return _Pass(scored, sums[0], int(sums[1]), int(sums[2]), sums[3])

    def _reuse(self, one: Reused, groups: Sequence[Group], settings: StepSettings) -> tuple[ReusedCounts, float]:
        """Add a success that is used again to the gradient; what of it was trained, and its loss."""
        whole = Group(one.group_id, (one.episode,))
        (micro,) = pack([whole], settings.micro_batch_tokens)  # one episode is one row, however long
        logprobs = self._logprobs(micro)
        weights = torch.from_numpy(micro.weights).to(self._device)
        behaviour = torch.from_numpy(micro.behaviour).to(self._device)
        refuse_non_finite([(whole, one.episode)], [micro], logprobs.detach().double().cpu().numpy())
        allowed = weights > 0
        ratios = corrections.log_ratio(logprobs, behaviour)
        ratios = torch.where(allowed, ratios, torch.zeros_like(ratios))
        correction = corrections.weights(
            ratios.exp(), settings.truncate_above, settings.mask_below, settings.mask_above
        )
        share = reused_share(settings.denominator, lengths(counted(groups)), len(micro.targets), settings.budget)
        total, counts = reused_term(one, logprobs, ratios, allowed, correction, share, settings.reuse_drift_limit)
        if total is None:
            return counts, 0.0
        (total if self._ranks.rank == 0 else total * 0).backward()  # type: ignore[no-untyped-call]
        return counts, float(total.detach())

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Under version 0's served weights, whose model is loaded when it is first asked for."""
        if self._reference is None:
            model = load_model(self._model_path)
            for name, parameter in model.named_parameters():  # as served; buffers are computed with as they are
                parameter.copy_(self._computed(name, parameter.to(DTYPES[self._dtype])))
            self._reference = model.to(device=self._device, dtype=self._model.dtype)
            if self._head_dtype == "float32":
                widen_head(self._reference)
        return self._logprobs(micro, self._reference)

    def _logprobs(self, micro: MicroBatch, model: Any = None) -> torch.Tensor:
        """Log-probabilities [k] of a row's scored tokens at their recorded temperatures, at least float32."""
        logits = self._logits(micro, model)
        logits = logits / torch.from_numpy(micro.temperature).to(self._device)[:, None]
        targets = torch.from_numpy(micro.targets).to(self._device)
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    def _logits(self, micro: MicroBatch, model: Any = None) -> torch.Tensor:
        """Of the positions that predict the scored tokens, [k, vocabulary], at least float32."""
        model = self._model if model is None else model
        segment = torch.from_numpy(micro.segment).to(self._device)
        seen = torch.from_numpy(micro.visible).to(self._device)[segment[:, None], segment].tril()
        # One row of logits per position: siblings share the prompt's last one, and a position that is asked for twice
        # would sum its gradient in an order that depends on threads.
        keep, line = np.unique(micro.keep, return_inverse=True)
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=self._device).masked_fill_(~seen, -torch.inf)
        if self._replay is not None and model is self._model:
            self._replay.choose(micro.experts, self._device)
        output = model(
            input_ids=torch.from_numpy(micro.ids)[None].to(self._device),
            attention_mask=mask[None, None],
            position_ids=torch.from_numpy(micro.positions)[None].to(self._device),
            logits_to_keep=torch.from_numpy(keep).to(self._device),
            use_cache=False,
        )
        logits: torch.Tensor = output.logits[0].index_select(0, torch.from_numpy(line).to(self._device))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _clip(self, limit: float) -> float:
        """Move the gradients to the masters, scaled down to the norm `limit`; the norm before that."""
        for name, master in self._masters.items():
            gradient = self._parameters[name].grad
            own = None if gradient is None else self._ranks.local(gradient).to(master.dtype)
            master.grad = torch.zeros_like(master) if own is None else own
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        norm = float(self._ranks.total(norms.square().sum()).sqrt())
        if not np.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm}: lower the learning rate, or compute in float32")
        if norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def _update(self, rate: float, settings: StepSettings) -> None:
        """AdamW (arXiv:1711.05101) on the masters."""
        for group in self._optimizer.param_groups:
            group.update(lr=rate, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        self._optimizer.step()
        self.optimizer_steps += 1
        for master in self._masters.values():
            master.grad = None

    def _zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _round(self) -> None:
        """What is served is the masters rounded to the published dtype."""
        for name, master in self._masters.items():
            self._served[name].copy_(master)
        self._serve(self._served)

    def _serve(self, served: Mapping[str, torch.Tensor]) -> None:
        """Compute with these."""
        self._ranks.reshard(self._model)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._ranks.local(parameter).copy_(self._computed(name, served[name]))

    def _computed(self, name: str, served: torch.Tensor) -> torch.Tensor:
        """The values of a served tensor that the forward computes with; each row of a part is whole. Where they are
        quantised, the gradient with respect to them is taken for the master's (straight through, arXiv:1308.3432)."""
        return fake_quantised(served, self._grid) if name in self._on_grid else served

    @torch.no_grad()
    def _rho(self, groups: Sequence[Group], scored: Scored, settings: StepSettings) -> tuple[float, float, int]:
        """The change of log-probability that the step made, what of it is noise (both RMS), and the probe's tokens."""
        probe, numbers = probe_of(groups, settings.probe_tokens)
        after = self._columns(probe, settings.micro_batch_tokens)
        again = self._columns(probe, 1, SHIFT if self._rotary else 0)
        before = scored.current[np.isin(scored.episode, numbers)]  # both are in the batch's order
        return *change(before, after, again), len(after)

    @torch.no_grad()
    def _alignment(self, groups: Sequence[Group], settings: StepSettings) -> Verdict | None:
        """Whether the engine means the same, on episodes that the served weights sampled themselves; None: there are
        none."""
        fresh = [replace(group, episodes=tuple(one for one in group.episodes if one.counted and not one.branches
                                               and bool((one.versions[one.mask] == self.version).all())))
                 for group in groups]  # fmt: skip
        probe, _ = probe_of(fresh, min(settings.probe_tokens, ALIGNED_TOKENS))
        return self._verdicts(probe, settings, lambda offset: [offset >= 0])[0] if probe else None

    @torch.no_grad()
    def align(self, probes: Sequence[Group], settings: StepSettings) -> list[tuple[Verdict | None, Verdict | None]]:
        """Whether replicas mean the same, by what each sampled of the version that is kept, which is computed with
        meanwhile: for each of `probes` a verdict on the first token of its episodes (prefill) and one on the others
        (decode)."""
        self._serve(self._kept)
        try:
            found = [self._verdicts([one], settings, lambda offset: [offset == 0, offset > 0]) for one in probes]
        finally:
            self._serve(self._served)
        return [(prefill, decoded) for prefill, decoded in found]

    def keep_served(self) -> None:
        """What is served now is what `align` computes with from here on."""
        self._kept = {name: served.clone() for name, served in self._served.items()}

    def _verdicts(self, probe: Sequence[Group], settings: StepSettings,
                  parts: Callable[[NDArray[np.int64]], list[NDArray[np.bool_]]]) -> list[Verdict | None]:  # fmt: skip
        """Of one engine's tokens, on the weights that are computed with; `parts`: from each token's offset in its
        episode, which of them are judged together. None where there are none, or one of them isn't finite: such are
        refused where it matters. The alternatives are only computed where there is something to explain."""
        rows = list(pack(probe, settings.micro_batch_tokens))
        whole = {name: np.concatenate([getattr(row, name) for row in rows])
                 for name in ("behaviour", "targets", "temperature", "episode", "offset")}  # fmt: skip
        engine, own = whole["behaviour"].astype(np.float64), self._columns(probe, settings.micro_batch_tokens)
        taken = parts(whole["offset"])
        if not np.isfinite(engine).all():
            return [None] * len(taken)
        ratio = torch.from_numpy(np.clip(own - engine, -CLAMP, CLAMP)).exp()
        weights = corrections.weights(ratio, settings.truncate_above, settings.mask_below, settings.mask_above,
                                      settings.truncate_below).numpy()  # fmt: skip
        noise, logits, before = 0.0, None, None
        if any(out.any() and np.mean((engine[out] - own[out]) ** 2) > QUIET for out in taken):
            again = self._columns(probe, 1, SHIFT if self._rotary else 0)
            noise = float(np.sqrt(np.mean((own - again) ** 2)))
            logits = torch.cat([self._logits(row).cpu() for row in rows])
            before = torch.cat([self._logits(replace(row, keep=np.maximum(row.keep - 1, 0))).cpu() for row in rows])
        found: list[Verdict | None] = []
        for out in taken:
            if not out.any():
                found.append(None)
                continue
            columns: dict[str, NDArray[np.float64]] = {STATED: own[out]}
            if logits is not None and before is not None:
                columns = meanings(logits[out], before[out], torch.from_numpy(whole["targets"][out]),
                                   torch.from_numpy(whole["temperature"][out]), whole["episode"][out],
                                   engine[out])  # fmt: skip
            found.append(verdict(engine[out], columns, whole["episode"][out], noise, weights[out]))
        return found

    @torch.no_grad()
    def _columns(self, groups: Sequence[Group], budget: int, shift: int = 0) -> NDArray[np.float64]:
        """Log-probabilities of all their tokens, in order, by rows of `budget` tokens whose positions begin at `shift`.
        """
        rows = [replace(micro, positions=micro.positions + shift) for micro in pack(groups, budget)]
        return np.concatenate([self._logprobs(micro).double().cpu().numpy() for micro in rows])

    # --- what outlives a step ---------------------------------------------------------------------------------------

    def served_bits(self) -> dict[str, NDArray[Any]]:
        """Name -> the served weights' bits (bfloat16 and float16 as uint16, float32 as uint32), live and read-only, in
        the order of `named_parameters()`. They change in `train_batch`: copy what must outlive it."""
        views = {}
        for name, part in self._served.items():
            served = part if self._ranks.size == 1 else self._whole[name]
            views[name] = served.view(BITS[served.dtype]).numpy()
            views[name].flags.writeable = False
        return views

    def served_everywhere(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Name and bits as `served_bits` gives them, on every rank: for an engine in the same process. A tensor is put
        together when it is asked for, so that nobody holds more than one in whole; all ranks go through them
        together."""
        for name, part in self._served.items():
            yield name, self._ranks.everywhere(part, self._shapes[name]).view(BITS[part.dtype]).numpy()

    @torch.no_grad()
    def copy_served(self, model: torch.nn.Module) -> None:
        """Into another model of the same parameters, in the published dtype."""
        for name, parameter in model.named_parameters():
            parameter.copy_(self._served[name])

    def state_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What a checkpoint needs, in whole: flat name -> tensor (live, not copied) and metadata, for safetensors. On
        rank 0."""
        tensors = self._parts()
        if self._ranks.size > 1:
            tensors = {name: self._whole[name] for name in tensors if name in self._whole}
        metadata = {
            "format": CHECKPOINT_FORMAT,
            "version": str(self.version),
            "optimizer_steps": str(self.optimizer_steps),
            "dtype": self._dtype,
        }
        return tensors, metadata

    def _parts(self) -> dict[str, torch.Tensor]:
        """What of it lies here, live."""
        tensors = {}
        for name, master in self._masters.items():
            moments = self._optimizer.state[master]
            tensors[f"master.{name}"] = master
            tensors[f"exp_avg.{name}"] = moments["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return tensors

    def _collect(self) -> None:
        """Bring what is served, and the train state that is hashed and saved with each version, to rank 0."""
        if self._ranks.size == 1:
            return
        for key, part in {**self._served, **self._parts()}.items():
            whole = self._ranks.collect(part, self._shapes[key if key in self._shapes else key.partition(".")[2]])
            if whole is not None:
                self._whole.setdefault(key, whole).copy_(whole)

    def load_state(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Back to a checkpoint's state, bit for bit. Raises CheckpointError, and changes nothing, where it isn't one
        of this model and published dtype. Rank 0 alone needs the tensors."""
        if self._ranks.rank == 0:
            self.check_state(tensors, metadata)
        for name, part in self._parts().items():
            self._ranks.hand_out(tensors.get(name), part, self._shapes[name.partition(".")[2]])
        self.version = int(metadata["version"])
        self._at_step(int(metadata["optimizer_steps"]))
        self._collect()

    def check_state(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Raises CheckpointError where `load_state` would. On rank 0."""
        own, _ = self.state_tensors()
        if metadata.get("format") != CHECKPOINT_FORMAT or metadata.get("dtype") != self._dtype:
            raise CheckpointError(f"not a train state in {self._dtype}: its metadata is {dict(metadata)}")
        if {name: (t.shape, t.dtype) for name, t in tensors.items()} != {n: (t.shape, t.dtype) for n, t in own.items()}:
            raise CheckpointError("the checkpoint's tensors are not those of this model: check model_path")

    def _at_step(self, optimizer_steps: int) -> None:
        """Masters and moments were written: what follows from them."""
        self.optimizer_steps = optimizer_steps
        for moments in self._optimizer.state.values():
            moments["step"].fill_(self.optimizer_steps)
        self._round()

    def fingerprint(self) -> dict[str, str]:
        """What decides the bits besides the data."""
        return {
            "dtype": self._dtype,
            "compute_dtype": str(self._model.dtype).removeprefix("torch."),
            "head_dtype": self._head_dtype,
            "quantisation": self._grid,
            "device": str(self._device),
            "ranks": str(self._ranks.size),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": str(torch.get_num_threads()),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }


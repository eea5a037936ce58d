"""Decides how a batch becomes the next version: forward on served weights, loss, gradients, optimizer, and rounding to
what is served.

The whole step is in the order in which it happens. Nothing here reads or writes a log. The same state, batch and
settings give the same bits on the same machine with the same number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from headrace.schemas.errors import CheckpointError, InvalidRecord, ModelError, NonFiniteGradient

from . import corrections
from .batches import Group, MicroBatch, counted, pack
from .losses import clipped, token_losses, token_shares
from .penalties import penalty
from .reductions import Tokens
from .report import Scored, StepReport, effective, figures, group_counts, lag_statistics
from .reused import Reused, ReusedCounts
from .reused import share as reused_share
from .reused import term as reused_term
from .weighing import Begun, batch_advantages, corrected, lengths, minibatches, refuse_non_finite
from .weighing import StepSettings as StepSettings

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}

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
    served weights are exactly representable. Tied tensors are one parameter, named as `named_parameters()` names it.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: str = "bfloat16",
        compute_dtype: str = "float32",
        device: str = "cpu",
        version: int = 0,
    ) -> None:
        self.version = version
        self.optimizer_steps = 0
        self._dtype, self._device = dtype, torch.device(device)
        self._model_path, self._reference = model_path, None
        model = load_model(model_path)
        self._masters = {name: p.detach().to(self._device, copy=True) for name, p in model.named_parameters()}
        self._served = {name: master.to("cpu", DTYPES[dtype], copy=True) for name, master in self._masters.items()}
        self._model = model.to(device=self._device, dtype=getattr(torch, compute_dtype))
        self._parameters = dict(self._model.named_parameters())
        self._serve()
        self._optimizer = torch.optim.AdamW(list(self._masters.values()), fused=True)
        for master in self._masters.values():
            self._optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=self._device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def train_batch(self, groups: Sequence[Group], target_version: int, settings: StepSettings,
                    reused: Sequence[Reused] = ()) -> StepReport:  # fmt: skip
        """Make the next version from a batch that targets `target_version`, which must be the present one:
        `minibatches` x `epochs` optimizer steps, each on its share of the groups, in the manifest's order.

        Raises NonFiniteLogprob, NonFiniteGradient, and InvalidRecord where there is no token; then nothing has changed.
        """
        if target_version != self.version:
            raise ValueError(f"the batch targets version {target_version}, the trainer is at version {self.version}")
        started = time.perf_counter()
        rate = settings.learning_rate * min(1.0, (self.version + 1) / max(1, settings.warmup_versions))
        parts = minibatches(groups, settings.minibatches)
        if not parts:
            raise InvalidRecord("the batch holds no token that a model sampled: there is nothing to train")
        kept = self._copied() if settings.optimizer_steps > 1 else None  # a later step may be refused
        passes, norms, reuses, updating = [], [], [], 0.0
        try:
            begun = self._begin(groups, settings)
            for _ in range(settings.epochs):
                for at, part in parts:
                    passes.append(self._accumulate(part, settings, begun, at))
                    reuses += [self._reuse(one, part, settings) for one in reused]
                    norms.append(self._clip(settings.max_grad_norm))
                    before = time.perf_counter()
                    self._update(rate, settings)
                    self._model.zero_grad(set_to_none=True)
                    updating += time.perf_counter() - before
        except Exception:
            if kept is not None:
                self.load_state(*kept)
            raise
        finally:
            self._model.zero_grad(set_to_none=True)
        self.version += 1
        updated = time.perf_counter()
        scored = begun.scored or Scored.joined([one.scored for one in passes[: len(parts)]])
        rho, probe_tokens = self._rho(groups, scored, settings)
        rewards = [episode.reward for _, episode in counted(groups) if episode.reward is not None]
        tokens = max(1, sum(len(one.scored.current) for one in passes))
        return StepReport(
            version=self.version,
            loss=sum(one.loss for one in passes) / len(passes) + sum(part for _, part in reuses),
            grad_norm=sum(norms) / len(norms),
            learning_rate=rate,
            reward_mean=float(np.mean(rewards)),
            groups=group_counts(groups, scored),
            lags=lag_statistics(scored),
            ess=effective(scored),
            rho=rho,
            probe_tokens=probe_tokens,
            row_tokens=sum(one.row_tokens for one in passes),
            seconds={
                "forward_backward": updated - started - updating,
                "optimizer": updating,
                "probe": time.perf_counter() - updated,
            },
            reused=tuple(counts for counts, _ in reuses),
            optimizer_steps=len(passes),
            clipped=sum(one.clipped for one in passes) / tokens,
            penalty=sum(one.penalty for one in passes) / tokens,
            figures=figures(groups, scored),
        )

    # --- the parts of a step, in order ------------------------------------------------------------------------------

    def _begin(self, groups: Sequence[Group], settings: StepSettings) -> Begun:
        advantage = batch_advantages(groups, settings)
        if not settings.looks_ahead:
            return Begun(advantage, None, None)
        members, columns = counted(groups), []
        with torch.no_grad():
            for micro in pack(groups, settings.micro_batch_tokens):
                logprobs = self._logprobs(micro)
                refuse_non_finite(members, micro, logprobs)
                columns.append((logprobs.double().cpu().numpy(), micro))
        current = np.concatenate([logprobs for logprobs, _ in columns])
        whole = {name: np.concatenate([getattr(micro, name) for _, micro in columns])
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
        place = 0 if begun.scored is None else int(np.searchsorted(begun.scored.episode, at))
        loss, row_tokens, held, cost, parts = 0.0, 0, 0, 0.0, []
        for micro in pack(groups, settings.micro_batch_tokens):
            logprobs = self._logprobs(micro)
            refuse_non_finite(members, micro, logprobs)
            current = logprobs.detach().double()
            if begun.scored is None or (settings.bypass and settings.optimizer_steps > 1):
                whole = {name: getattr(micro, name) for name in ("behaviour", "weights", "versions", "episode")}
                scored, _ = corrected(current.cpu().numpy(), whole, advantage, settings)
            else:
                scored = begun.scored.part(place, place + len(micro.targets), at)
            place += len(micro.targets)
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
            total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach())
            row_tokens += len(micro.ids)
            parts.append(replace(scored, current=current.cpu().numpy()))
        return _Pass(Scored.joined(parts), loss, row_tokens, held, cost)

    def _reuse(self, one: Reused, groups: Sequence[Group], settings: StepSettings) -> tuple[ReusedCounts, float]:
        """Add a success that is used again to the gradient; what of it was trained, and its loss."""
        whole = Group(one.group_id, (one.episode,))
        (micro,) = pack([whole], settings.micro_batch_tokens)  # one episode is one row, however long
        logprobs = self._logprobs(micro)
        weights = torch.from_numpy(micro.weights).to(self._device)
        behaviour = torch.from_numpy(micro.behaviour).to(self._device)
        refuse_non_finite([(whole, one.episode)], micro, logprobs)
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
        total.backward()  # type: ignore[no-untyped-call]
        return counts, float(total.detach())

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Under version 0's served weights, whose model is loaded when it is first asked for."""
        if self._reference is None:
            model = load_model(self._model_path)
            for parameter in model.parameters():  # as they are served; buffers are computed with as they are
                parameter.copy_(parameter.to(DTYPES[self._dtype]))
            self._reference = model.to(device=self._device, dtype=self._model.dtype)
        return self._logprobs(micro, self._reference)

    def _logprobs(self, micro: MicroBatch, model: Any = None) -> torch.Tensor:
        """Log-probabilities [k] of a row's scored tokens at their recorded temperatures, at least float32."""
        model = self._model if model is None else model
        segment = torch.from_numpy(micro.segment).to(self._device)
        seen = torch.from_numpy(micro.visible).to(self._device)[segment[:, None], segment].tril()
        # One row of logits per position: siblings share the prompt's last one, and a position that is asked for twice
        # would sum its gradient in an order that depends on threads.
        keep, line = np.unique(micro.keep, return_inverse=True)
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=self._device).masked_fill_(~seen, -torch.inf)
        output = model(
            input_ids=torch.from_numpy(micro.ids)[None].to(self._device),
            attention_mask=mask[None, None],
            position_ids=torch.from_numpy(micro.positions)[None].to(self._device),
            logits_to_keep=torch.from_numpy(keep).to(self._device),
            use_cache=False,
        )
        logits = output.logits[0].index_select(0, torch.from_numpy(line).to(self._device))
        if logits.dtype != torch.float64:
            logits = logits.float()
        logits = logits / torch.from_numpy(micro.temperature).to(self._device)[:, None]
        targets = torch.from_numpy(micro.targets).to(self._device)
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    def _clip(self, limit: float) -> float:
        """Move the gradients to the masters, scaled down to the norm `limit`; the norm before that."""
        for name, master in self._masters.items():
            gradient = self._parameters[name].grad
            master.grad = torch.zeros_like(master) if gradient is None else gradient.to(master.dtype)
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        norm = float(norms.square().sum().sqrt())
        if not np.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm}: lower the learning rate, or compute in float32")
        if norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def _update(self, rate: float, settings: StepSettings) -> None:
        """AdamW (arXiv:1711.05101) on the masters; what is served is the masters rounded to the published dtype."""
        for group in self._optimizer.param_groups:
            group.update(lr=rate, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        self._optimizer.step()
        self.optimizer_steps += 1
        for master in self._masters.values():
            master.grad = None
        self._round()

    def _round(self) -> None:
        for name, master in self._masters.items():
            self._served[name].copy_(master)
        self._serve()

    def _serve(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._served[name])

    @torch.no_grad()
    def _rho(self, groups: Sequence[Group], scored: Scored, settings: StepSettings) -> tuple[float, int]:
        """RMS change of log-probability that the step made, on the first row of the batch that fits `probe_tokens`."""
        micro = next(pack(groups, settings.probe_tokens))
        after = self._logprobs(micro).double().cpu().numpy()
        change = after - scored.current[: len(after)]  # rows keep the batch's order, so its first tokens are the same
        return float(np.sqrt(np.mean(change**2))), len(after)

    # --- what outlives a step ---------------------------------------------------------------------------------------

    def served_bits(self) -> dict[str, NDArray[Any]]:
        """Name -> the served weights' bits (bfloat16 and float16 as uint16, float32 as uint32), live and read-only, in
        the order of `named_parameters()`. They change in `train_batch`: copy what must outlive it."""
        views = {}
        for name, served in self._served.items():
            views[name] = served.view(BITS[served.dtype]).numpy()
            views[name].flags.writeable = False
        return views

    @torch.no_grad()
    def copy_served(self, model: torch.nn.Module) -> None:
        """Into another model of the same parameters, in the published dtype."""
        for name, parameter in model.named_parameters():
            parameter.copy_(self._served[name])

    def state_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What a checkpoint needs: flat name -> tensor (live, not copied) and metadata, for safetensors."""
        tensors = {}
        for name, master in self._masters.items():
            moments = self._optimizer.state[master]
            tensors[f"master.{name}"] = master
            tensors[f"exp_avg.{name}"] = moments["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        metadata = {
            "format": CHECKPOINT_FORMAT,
            "version": str(self.version),
            "optimizer_steps": str(self.optimizer_steps),
            "dtype": self._dtype,
        }
        return tensors, metadata

    def _copied(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        tensors, metadata = self.state_tensors()
        return {name: tensor.clone() for name, tensor in tensors.items()}, metadata

    def load_state(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Back to a checkpoint's state, bit for bit. Raises CheckpointError, and changes nothing, where it isn't one
        of this model and published dtype."""
        own, _ = self.state_tensors()
        if metadata.get("format") != CHECKPOINT_FORMAT or metadata.get("dtype") != self._dtype:
            raise CheckpointError(f"not a train state in {self._dtype}: its metadata is {dict(metadata)}")
        if {name: (t.shape, t.dtype) for name, t in tensors.items()} != {n: (t.shape, t.dtype) for n, t in own.items()}:
            raise CheckpointError("the checkpoint's tensors are not those of this model: check model_path")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.version, self.optimizer_steps = int(metadata["version"]), int(metadata["optimizer_steps"])
        for moments in self._optimizer.state.values():
            moments["step"].fill_(self.optimizer_steps)
        self._round()

    def fingerprint(self) -> dict[str, str]:
        """What decides the bits besides the data."""
        return {
            "dtype": self._dtype,
            "compute_dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": str(torch.get_num_threads()),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }


def load_model(model_path: str | Path) -> Any:
    """The float32 model of a folder, without dropout. Raises ModelError."""
    if not (Path(model_path) / "config.json").is_file():
        raise ModelError(f"{model_path} holds no config.json: model_path must be a Hugging Face model folder")
    transformers.utils.logging.disable_progress_bar()
    try:
        # Without dropout (eval): what is differentiated is the policy that is served.
        return AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path} can't be loaded as a causal language model: {error}") from error

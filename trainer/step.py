"""Decides how a batch becomes the next version: forward on served weights, loss, gradients, optimizer, and rounding to
what is served.

The whole step is in the order in which it happens. Nothing here reads or writes a log. The same state, batch and
settings give the same bits on the same machine with the same number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from headrace.schemas.errors import CheckpointError, ModelError, NonFiniteGradient, NonFiniteLogprob

from . import corrections
from .advantages import advantages
from .batches import Group, MicroBatch, counted, pack
from .losses import surrogate, token_shares
from .reused import Reused, ReusedCounts
from .reused import share as reused_share
from .reused import term as reused_term

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}

CHECKPOINT_FORMAT = "headrace-train-state-1"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What of the run settings decides a step: those under which the batch's manifest was decided."""

    learning_rate: float = 1e-5
    warmup_versions: int = 0  # the rate rises linearly over the first versions
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    advantage: str = "grpo"  # grpo | centered
    truncate_above: float | None = 2.0  # the cap on a token's ratio
    mask_below: float = 0.0  # a token with a smaller ratio counts 0
    mask_above: float | None = None  # a token with a larger ratio counts 0
    denominator: str = "token_mean"  # token_mean | sequence_mean
    reuse_drift_limit: float = 0.04  # second moment of a reused success beyond which all of its tokens count 0
    micro_batch_tokens: int = 1024  # row tokens of one forward and backward pass; never changes the gradient
    probe_tokens: int = 256  # row tokens of the forward pass that measures rho


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Model tokens of one group's counted episodes: trained, and masked by rule ("stale": staleness weight 0; "ratio":
    correction weight 0)."""

    group_id: str
    trained: int
    masked: dict[str, int]


@dataclass(frozen=True, slots=True)
class LagStatistics:
    """Log-ratio (served weights of the target version over behaviour, nats) of the tokens that one version sampled."""

    version: int
    tokens: int
    mean_abs: float
    max_abs: float
    second_moment: float  # of |log-ratio| winsorised at 1


@dataclass(frozen=True, slots=True)
class StepReport:
    version: int  # the version that this step made
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    reward_mean: float  # over counted episodes
    groups: tuple[GroupCounts, ...]
    lags: tuple[LagStatistics, ...]  # by behaviour version, ascending
    ess: float  # effective sample size of the correction's weights, as a share of the trained tokens
    rho: float  # RMS change of log-probability, nats, from the version before to this one, on the probe
    probe_tokens: int  # how many model tokens rho rests on
    row_tokens: int  # tokens that went through the forward pass
    seconds: dict[str, float]  # forward_backward, optimizer, probe
    reused: tuple[ReusedCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class _Scored:
    """Every model token of the batch's counted episodes, in their order; arrays [k]."""

    current: NDArray[np.float64]  # log-probability under the served weights of the target version
    log_ratio: NDArray[np.float64]
    staleness: NDArray[np.float32]
    correction: NDArray[np.float64]
    versions: NDArray[np.int32]
    episode: NDArray[np.int64]


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
        model = _load_model(model_path)
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
        """Make the next version from a batch that targets `target_version`, which must be the present one.

        Raises NonFiniteLogprob and NonFiniteGradient; then nothing has changed.
        """
        if target_version != self.version:
            raise ValueError(f"the batch targets version {target_version}, the trainer is at version {self.version}")
        started = time.perf_counter()
        try:
            scored, loss, row_tokens = self._accumulate(groups, settings)
            reuses = [self._reuse(one, groups, settings) for one in reused]
            norm = self._clip(settings.max_grad_norm)
            accumulated = time.perf_counter()
            rate = settings.learning_rate * min(1.0, (self.version + 1) / max(1, settings.warmup_versions))
            self._update(rate, settings)
        finally:
            self._model.zero_grad(set_to_none=True)
        self.version += 1
        updated = time.perf_counter()
        rho, probe_tokens = self._rho(groups, scored, settings)
        rewards = [episode.reward for _, episode in counted(groups) if episode.reward is not None]
        return StepReport(
            version=self.version,
            loss=loss + sum(part for _, part in reuses),
            grad_norm=norm,
            learning_rate=rate,
            reward_mean=float(np.mean(rewards)),
            groups=_group_counts(groups, scored),
            lags=_lag_statistics(scored),
            ess=_effective_share(scored),
            rho=rho,
            probe_tokens=probe_tokens,
            row_tokens=row_tokens,
            seconds={
                "forward_backward": accumulated - started,
                "optimizer": updated - accumulated,
                "probe": time.perf_counter() - updated,
            },
            reused=tuple(counts for counts, _ in reuses),
        )

    # --- the parts of a step, in order ------------------------------------------------------------------------------

    def _accumulate(self, groups: Sequence[Group], settings: StepSettings) -> tuple[_Scored, float, int]:
        """Leave the batch's gradient in the parameters; what was scored, the loss, and the row tokens it took."""
        members = counted(groups)
        advantage = torch.cat([_group_advantages(group, settings.advantage) for group in groups])
        lengths = torch.tensor([int(episode.mask.sum()) for _, episode in members])
        share = token_shares(settings.denominator, lengths)
        loss, row_tokens, parts = 0.0, 0, []
        for micro in pack(groups, settings.micro_batch_tokens):
            logprobs = self._logprobs(micro)
            staleness = torch.from_numpy(micro.weights).to(self._device)
            behaviour = torch.from_numpy(micro.behaviour).to(self._device)
            _refuse_non_finite(members, micro, logprobs, behaviour, staleness)
            ratios = corrections.log_ratio(logprobs, behaviour)
            trainable = staleness > 0
            # A masked token's numbers may be anything: they are replaced before any arithmetic, not multiplied by 0.
            exact = torch.where(trainable, ratios.exp(), torch.ones_like(ratios))
            weight = corrections.weights(
                exact, settings.truncate_above, settings.mask_below, settings.mask_above
            )
            episode = torch.from_numpy(micro.episode)
            constant = (weight * staleness).to(self._device) * share[episode].to(self._device)
            total = surrogate(logprobs, advantage[episode].to(self._device), constant).sum()
            total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach())
            row_tokens += len(micro.ids)
            current = logprobs.detach().double()
            parts.append([x.cpu().numpy() for x in (current, ratios, staleness, weight)])
            parts[-1] += [micro.versions, micro.episode]
        return _Scored(*(np.concatenate(column) for column in zip(*parts, strict=True))), loss, row_tokens

    def _reuse(self, one: Reused, groups: Sequence[Group], settings: StepSettings) -> tuple[ReusedCounts, float]:
        """Add a success that is used again to the gradient; what of it was trained, and its loss."""
        whole = Group(one.group_id, (one.episode,))
        (micro,) = pack([whole], settings.micro_batch_tokens)  # one episode is one row, however long
        logprobs = self._logprobs(micro)
        weights = torch.from_numpy(micro.weights).to(self._device)
        behaviour = torch.from_numpy(micro.behaviour).to(self._device)
        _refuse_non_finite([(whole, one.episode)], micro, logprobs, behaviour, weights)
        allowed = weights > 0
        ratios = corrections.log_ratio(logprobs, behaviour)
        ratios = torch.where(allowed, ratios, torch.zeros_like(ratios))
        correction = corrections.weights(
            ratios.exp(), settings.truncate_above, settings.mask_below, settings.mask_above
        )
        lengths = torch.tensor([int(episode.mask.sum()) for _, episode in counted(groups)])
        share = reused_share(settings.denominator, lengths, len(micro.targets))
        total, counts = reused_term(one, logprobs, ratios, allowed, correction, share, settings.reuse_drift_limit)
        if total is None:
            return counts, 0.0
        total.backward()  # type: ignore[no-untyped-call]
        return counts, float(total.detach())

    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probabilities [k] of a row's scored tokens at their recorded temperatures, at least float32."""
        segment = torch.from_numpy(micro.segment).to(self._device)
        seen = torch.from_numpy(micro.visible).to(self._device)[segment[:, None], segment].tril()
        # One row of logits per position: siblings share the prompt's last one, and a position that is asked for twice
        # would sum its gradient in an order that depends on threads.
        keep, line = np.unique(micro.keep, return_inverse=True)
        mask = torch.zeros(seen.shape, dtype=self._model.dtype, device=self._device).masked_fill_(~seen, -torch.inf)
        output = self._model(
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
    def _rho(self, groups: Sequence[Group], scored: _Scored, settings: StepSettings) -> tuple[float, int]:
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


def _load_model(model_path: str | Path) -> Any:
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


def _group_advantages(group: Group, rule: str) -> torch.Tensor:
    rewards = [episode.reward for episode in group.episodes if episode.counted]
    return advantages(rule, torch.tensor(rewards, dtype=torch.float64))


def _refuse_non_finite(
    members: Sequence[Any], micro: MicroBatch, logprobs: torch.Tensor, behaviour: torch.Tensor, staleness: torch.Tensor
) -> None:
    bad = (staleness > 0) & ~(torch.isfinite(logprobs.detach()) & torch.isfinite(behaviour))
    if not bool(bad.any()):
        return
    first = int(bad.nonzero()[0])
    group, episode = members[micro.episode[first]]
    raise NonFiniteLogprob(
        f"{int(bad.sum())} of {len(bad)} tokens have no finite log-probability; first, token {micro.offset[first]} of"
        f" group {group.group_id}, slot {episode.slot}: behaviour {float(behaviour[first])}, trainer"
        f" {float(logprobs.detach()[first])}. The batch was not trained"
    )


def _group_counts(groups: Sequence[Group], scored: _Scored) -> tuple[GroupCounts, ...]:
    number = [index for index, group in enumerate(groups) for episode in group.episodes if episode.counted]
    group_of = np.array(number)[scored.episode]
    stale = scored.staleness == 0
    rejected = ~stale & (scored.correction == 0)
    counts = []
    for index, group in enumerate(groups):
        own = group_of == index
        masked = {"stale": int((own & stale).sum()), "ratio": int((own & rejected).sum())}
        counts.append(GroupCounts(group.group_id, int((own & ~stale & ~rejected).sum()), masked))
    return tuple(counts)


def _lag_statistics(scored: _Scored) -> tuple[LagStatistics, ...]:
    statistics = []
    for version in np.unique(scored.versions):
        own = np.abs(scored.log_ratio[(scored.versions == version) & np.isfinite(scored.log_ratio)])
        if len(own):
            second = float(np.mean(np.minimum(own, 1.0) ** 2))
            statistics.append(LagStatistics(int(version), len(own), float(own.mean()), float(own.max()), second))
    return tuple(statistics)


def _effective_share(scored: _Scored) -> float:
    """(sum w)^2 / (k sum w^2) over the correction's weights of the k tokens that aren't stale; 0 where all are 0."""
    weights = scored.correction[scored.staleness > 0]
    squares = float(np.sum(weights**2))
    return float(np.sum(weights)) ** 2 / (len(weights) * squares) if squares > 0 else 0.0

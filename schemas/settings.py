"""Run settings: everything that decides what is trained. They are the first record of `policy`.

Every role reads them there; nothing here may depend on where a role runs (addresses, paths of caches, devices and
counts are site settings, which are never recorded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from .events import GroupSpec

Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


def _store_without_secrets(url: str) -> str:
    """An fsspec URL that every role can open, and that may stand in the run's first record."""
    parts = urlsplit(url)
    if "://" not in url or not (parts.netloc or parts.path.strip("/")):
        raise ValueError("it must be a whole URL, such as file:///data/store or s3://bucket/folder")
    if "@" in parts.netloc:
        raise ValueError("it is recorded in the run: leave user and password out of it")
    if parts.scheme == "memory":
        raise ValueError("memory:// ends with its process: name a store that every role reaches")
    return url


StoreUrl = Annotated[str, AfterValidator(_store_without_secrets)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraSettings(Section):
    """An adapter is trained and published instead of the model's own weights."""

    rank: Positive = Field(16, description="of each layer's update")
    alpha: Positive = Field(32, description="updates are scaled by alpha / rank")
    targets: tuple[str, ...] = Field((), description="names of the layers that get one (q_proj, ...); none: all linear "
                                                     "layers but the head")  # fmt: skip
    seed: Annotated[int, Field(ge=0)] = Field(0, description="draws what version 0 begins with")


class ModelSettings(Section):
    path: str = Field(description="folder of a Hugging Face causal language model: version 0")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="published dtype: served weights are the masters rounded to it"
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the forward in engine and trainer alike"
    )
    head_dtype: Literal["compute", "float32"] = Field(
        "compute", description="of the logits' product in engine and trainer alike: `compute_dtype`, or wider"
    )
    quantisation: Literal["none", "int8", "fp8"] = Field(
        "none", description="grid to which the engine's linear weights are rounded (hf: fake-quantised; openai: as the "
        "server was started)"
    )
    train_quantised: bool = Field(False, description="the trainer's forward computes on that grid too; gradients pass "
                                                     "straight through to the masters")  # fmt: skip
    max_length: Positive = Field(2048, description="prompt and completion together, tokens")
    lora: LoraSettings | None = Field(None, description="train a LoRA adapter (engine `hf`); none: all weights")

    @model_validator(mode="after")
    def _there_is_a_grid(self) -> ModelSettings:
        if self.train_quantised and self.quantisation == "none":
            raise ValueError("train_quantised needs `quantisation`: which grid the engine computes on")
        if self.lora is not None and self.quantisation != "none":
            raise ValueError("`quantisation` is for runs that train all weights: set lora or quantisation, not both")
        return self


class TaskSettings(Section):
    source: Literal["reasoning_gym", "jsonl", "terminal"] = Field(
        "reasoning_gym", description="a reasoning-gym data set, a file with one JSON task a line, or task folders in "
        "the format of Terminal-Bench and Harbor"
    )
    dataset: str | None = Field(None, description="name of the reasoning-gym data set")
    config: dict[str, Any] = Field(default_factory=dict, description="its configuration (sizes, ranges)")
    size: Positive | None = Field(None, description="tasks in all; then the run ends (none: no end)")
    path: str | None = Field(None, description="jsonl: a file whose lines have `prompt` and what the scorer needs; "
                                               "terminal: a task's folder, or one that holds such folders")  # fmt: skip
    score: str | None = Field(None, description="`module:function`, called as score(task, text) -> float or None")
    seed: int = Field(0, description="draws the tasks")
    system: str | None = Field(None, description="system message")
    examples: tuple[tuple[str, str], ...] = Field((), description="solved examples (question, answer) as earlier turns")
    template: str = Field("{question}", description="the user's message; {question} is the task's prompt")
    sandbox: Literal["docker", "process"] = Field("docker", description="terminal: the kind of sandbox that tasks "
                                                                        "run in")  # fmt: skip
    step_timeout_s: PositiveFloat = Field(120.0, description="terminal: a command that takes longer is killed, and the "
                                                             "model is told")  # fmt: skip
    output_bytes: Positive = Field(8192, description="terminal: of a command's output, what the model is shown")

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> TaskSettings:
        if self.source == "reasoning_gym" and not self.dataset:
            raise ValueError("source 'reasoning_gym' needs `dataset`")
        if self.source == "jsonl" and not (self.path and self.score):
            raise ValueError("source 'jsonl' needs `path` and `score`")
        if self.source == "terminal" and not self.path:
            raise ValueError("source 'terminal' needs `path`")
        if "{question}" not in self.template:
            raise ValueError("`template` has no {question}")
        return self


class RolloutSettings(Section):
    group_size: Positive = Field(8, description="siblings of one task that are compared")
    reserves: Annotated[int, Field(ge=0)] = Field(0, description="extra slots that replace infra-failed ones")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature; the trainer applies it too")
    max_new_tokens: Positive = Field(64, description="budget of model tokens per episode")
    max_turns: Positive | None = Field(None, description="budget of model turns per episode; none: no limit")
    model_time_s: PositiveFloat | None = Field(None, description="budget per episode of its model's time, as if it had "
                                                                 "the engine to itself; none: no limit")  # fmt: skip
    tool_time_s: PositiveFloat | None = Field(None, description="budget per episode of its tools' time; none: no limit")
    max_attempts: Positive = Field(3, description="attempts per slot after infrastructure failures")
    min_survivors: Positive | None = Field(None, description="fewer counted siblings close a group without training; "
                                                             "none: half the group, rounded up")  # fmt: skip
    deadline_s: PositiveFloat = Field(600.0, description="a group closes at the latest then, on the log's clock")
    max_age_s: PositiveFloat = Field(3600.0, description="bound of `on_deadline = wait`")
    on_deadline: Literal["survivors", "cancel", "wait"] = Field("survivors", description="what a deadline does")
    zero_variance: Literal["refill", "keep"] = Field("refill", description="groups whose rewards are all equal")
    score_timeout_s: PositiveFloat = Field(30.0, description="a verifier that takes longer has failed (infrastructure)")
    lease_timeout_s: PositiveFloat = Field(15.0, description="a worker silent for so long has lost its slots")
    agent_timeout_s: PositiveFloat = Field(300.0, description="an agent at the gateway that asks for nothing so long "
                                                              "is gone: its attempt ends as `unknown`")  # fmt: skip
    no_progress_s: PositiveFloat = Field(
        600.0,
        description="a part that has work and from which nothing comes for so long ends the run, with the reason; "
        "choose it longer than the trainer's longest step and start, and than an episode's longest silence (an "
        "environment step); hours are fine",
    )


class BatchSettings(Section):
    groups: Positive = Field(8, description="groups per batch")
    max_lag: Annotated[int, Field(ge=0)] = Field(1, description="versions that sampling may run ahead of training; 0, "
                                                                "the simple mode, takes turns; 1 overlaps them; more "
                                                                "only where `headrace status` advises it: where both "
                                                                "sides wait for over 15 % of their time")  # fmt: skip
    max_ahead: Annotated[int, Field(ge=0)] = Field(1, description="manifests written before the version they wait for")
    max_groups_per_batch: Positive | None = Field(None, description="groups without a batch before the run gives "
                                                                    "up; none: 50 batches' worth")  # fmt: skip

    min_last_groups: Positive = Field(1, description="when the tasks are used up, fewer candidates than this make no "
                                                     "short last batch and are left over")  # fmt: skip

    @property
    def give_up_after(self) -> int:
        return self.max_groups_per_batch or 50 * self.groups


class StalenessSettings(Section):
    hard_lag: Annotated[int, Field(ge=0)] = Field(8, description="tokens of an older version get weight 0")
    drift_limit: PositiveFloat = Field(0.04, description="nats squared over the floor; beyond it a token gets weight 0")
    floor: Annotated[float, Field(ge=0)] = Field(0.0, description="drift between equal weights: engine against trainer")
    ramp_from: Annotated[float, Field(ge=0)] = Field(0.01, description="full weight up to here over the floor")
    rule: Literal["ramp", "limit"] = Field("ramp", description="how weights fall: linearly from `ramp_from`, or all at "
                                                               "`drift_limit`")  # fmt: skip
    on_stale: Literal["mask", "wait", "drop"] = Field(
        "mask", description="beyond a limit: `mask` tokens; `wait` with the next batch for open groups that it would "
        "push beyond; `drop` the episode, baseline too"
    )
    apply: Literal["auto", "always", "never"] = Field("auto", description="`auto`: recorded, and used only by trainers "
                                                                          "without exact ratios")  # fmt: skip


class ReuseSettings(Section):
    """BIASED: a success that an older policy drew is trained on again because it is one."""

    enabled: bool = Field(False, description="biased: beside a group whose attempts all failed, train once more on a "
                                             "recorded success of its task (needs tasks that recur)")  # fmt: skip
    coefficient: PositiveFloat = Field(1.0, description="its advantage is this x (1 - recent solve rate of the task)")
    max_uses: Positive = Field(2, description="uses of one success")
    max_per_batch: Positive = Field(1, description="uses in one batch")
    window: Positive = Field(8, description="closed groups of a task that its recent solve rate is taken over")
    drift_limit: PositiveFloat = Field(0.04, description="nats squared, exact at use, over staleness.floor; beyond it "
                                                         "the success gets weight 0")  # fmt: skip


class RejectionSettings(Section):
    """One rule of `loss.reject`."""

    by: Literal["ratio", "k1", "k2", "k3", "k3_reverse", "factor"] = Field(description="what is measured on each token")
    over: Literal["token", "sum", "mean", "max"] = Field("token", description="of each token, or over its episode; a "
                                                         "`ratio` is then the product, the geometric mean, the "
                                                         "greatest")  # fmt: skip
    below: float | None = Field(None, description="less is rejected (none: no limit)")
    above: float | None = Field(None, description="more is rejected (none: no limit); nats, or a ratio")

    @model_validator(mode="after")
    def _limits_are_possible(self) -> RejectionSettings:
        limits = [limit for limit in (self.below, self.above) if limit is not None]
        if not limits:
            raise ValueError("a rule of `reject` needs `below` or `above`")
        if len(limits) == 2 and limits[0] >= limits[1]:
            raise ValueError("`above` must be greater than `below`")
        if self.by in ("ratio", "factor") and min(limits) <= 0:
            raise ValueError(f"limits on a {self.by} must be greater than 0")
        return self


class LossSettings(Section):
    """Objective, weights, rejection, penalty, denominators; what combines with what: docs/corrections.md."""

    advantage: Literal["grpo", "centered", "rloo", "rloo_scaled"] = Field(
        "grpo", description="divide by the deviation, only centre, or compare with the others (rloo)"
    )
    advantage_epsilon: Annotated[float, Field(ge=0)] = Field(1e-6, description="added to the deviation")
    lone: Literal["batch_mean", "none"] | None = Field(None, description="what a group of one is compared with")

    objective: Literal["surrogate", "reinforce", "ppo", "gspo", "cispo"] = Field(
        "surrogate", description="what is minimised; `surrogate` is the ratio without a clip"
    )
    clip_low: Annotated[float, Field(ge=0)] = Field(0.2, description="ppo, gspo, cispo: ratios clip at 1 - this")
    clip_high: Annotated[float, Field(ge=0)] = Field(0.2, description="ppo, gspo, cispo: ratios clip at 1 + this")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(None, description="ppo: bound of the ratio where the "
                                                                              "advantage is negative")  # fmt: skip
    tv_low: PositiveFloat | None = Field(None, description="DPPO-TV: a probability that fell by more is pushed no "
                                                           "further down")  # fmt: skip
    tv_high: PositiveFloat | None = Field(None, description="DPPO-TV: a probability that rose by more is pushed no "
                                                            "further up")  # fmt: skip
    bypass: bool = Field(False, description="the proximal policy is the behaviour policy: the objective's own ratio "
                                            "then corrects, and weights act in `reinforce` alone")  # fmt: skip

    ratio_level: Literal["token", "sequence", "geometric"] = Field("token", description="what weighs: the token's "
                                                                   "ratio, its episode's, or its mean")  # fmt: skip
    truncate_below: Annotated[float, Field(ge=0)] = Field(0.0, description="importance ratios are lifted to this")
    truncate_above: PositiveFloat | None = Field(2.0, description="importance ratios are cut off here (TIS); 'none': "
                                                                  "nowhere")  # fmt: skip
    mask_below: Annotated[float, Field(ge=0)] = Field(0.125, description="a smaller ratio gets no gradient")
    mask_above: PositiveFloat | None = Field(8.0, description="a larger ratio gets no gradient; 'none': no limit")
    normalise: bool = Field(False, description="divide weights by their mean over the batch")

    reject: tuple[RejectionSettings, ...] = Field((), description="tokens or episodes outside these limits get no "
                                                                  "gradient")  # fmt: skip
    veto_below: Annotated[float, Field(ge=0)] = Field(0.0, description="one token of a smaller ratio, and its episode "
                                                                       "gets no gradient")  # fmt: skip
    veto_above: PositiveFloat | None = Field(None, description="the same with a larger ratio; none: no limit")
    opsm_delta: PositiveFloat | None = Field(None, description="an episode of negative advantage, mean log-ratio "
                                                               "below minus this, gets no gradient")  # fmt: skip
    m2_limit: PositiveFloat | None = Field(None, description="M2PO: the mean squared log-ratio that a batch may have; "
                                                             "the worst tokens get no gradient")  # fmt: skip
    reject_shrinks: bool = Field(False, description="rejected tokens leave the denominators too")

    kl: Literal["k1", "k2", "k3", "abs"] | None = Field(None, description="penalty for leaving the reference")
    kl_coefficient: Annotated[float, Field(ge=0)] = Field(0.0, description="its weight")
    kl_reference: Literal["initial", "behaviour"] = Field("initial", description="version 0, or whoever sampled")

    denominator: Literal["token_mean", "sequence_mean", "sequence_sum", "budget"] = Field(
        "token_mean", description="what the loss averages over; `budget`: episodes x rollout.max_new_tokens (Dr. GRPO)"
    )

    @field_validator("truncate_above", "mask_above", mode="before")
    @classmethod
    def _a_limit_may_be_lifted(cls, limit: Any) -> Any:
        return None if limit == "none" else limit  # TOML has no null

    @model_validator(mode="after")
    def _combination_is_possible(self) -> LossSettings:
        if self.mask_above is not None and self.mask_above <= self.mask_below:
            raise ValueError("`mask_above` must be greater than `mask_below`")
        if self.truncate_above is not None and self.truncate_above <= self.truncate_below:
            raise ValueError("`truncate_above` must be greater than `truncate_below`")
        if self.veto_above is not None and self.veto_above <= self.veto_below:
            raise ValueError("`veto_above` must be greater than `veto_below`")
        if self.dual_clip is not None and self.objective != "ppo":
            raise ValueError(f"`dual_clip` bounds the clip of objective 'ppo', and `objective` is {self.objective!r}")
        if self.normalise and self.ratio_level == "geometric":
            raise ValueError("`normalise` has no meaning for geometric ratios: they are no importance weights, whose "
                             "mean would be 1")  # fmt: skip
        if (self.kl is None) != (self.kl_coefficient == 0):
            raise ValueError("`kl` and `kl_coefficient` go together: set both, or neither")
        return self


class OptimizerSettings(Section):
    learning_rate: PositiveFloat = Field(1e-5, description="peak")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="versions of linear warm-up")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW: decay of the mean of gradients")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.99, description="AdamW: decay of the mean of their squares")
    epsilon: PositiveFloat = Field(1e-8, description="AdamW: added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW: decoupled, per unit of learning rate")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradients are scaled down to this norm")
    minibatches: Positive = Field(1, description="optimizer steps of an epoch, each on its share of the batch's groups")
    epochs: Positive = Field(1, description="times that a batch is gone through within its version")
    micro_batch_tokens: Positive = Field(2048, description="tokens of one forward; changes memory and speed only")
    probe_tokens: Annotated[int, Field(ge=0)] = Field(256, description="tokens on which a step's drift is measured")
    recompute_activations: bool = Field(False, description="keep each layer's input alone and compute the rest again "
                                                           "in the backward pass: the same bits, less memory, more "
                                                           "time")  # fmt: skip


class WeightSettings(Section):
    snapshot_every: Positive = Field(50, description="versions from one full snapshot to the next, at most; one "
                                                     "comes earlier where the deltas since are as many "
                                                     "bytes")  # fmt: skip
    max_bytes_per_s: PositiveFloat | None = Field(None, description="of a publication on its way out, and into each "
                                                                    "replica; none: no limit")  # fmt: skip
    codec: Literal["fast", "dense"] = Field("fast", description="of deltas: `dense` is a third smaller, and both ends "
                                                                "count through all weights")  # fmt: skip
    store_url: StoreUrl | None = Field(None, description="fsspec URL of a store (folder, S3 and compatible) that "
                                                         "trainer and workers reach: weights lie there, the log names "
                                                         "them; none: in the log")  # fmt: skip
    requests: Literal["finish", "abort", "keep"] = Field("keep", description="active requests when a version is "
                                                                             "applied")  # fmt: skip
    caches: Literal["clear", "keep"] = Field("keep", description="their keys and values: `clear` preempts and "
                                                                 "computes them anew")  # fmt: skip
    fence_after_s: PositiveFloat = Field(60.0, description="a replica that doesn't serve a version so long after it "
                                                           "heard of it gets no work until it has caught "
                                                           "up")  # fmt: skip

    @model_validator(mode="after")
    def _there_is_a_cache_to_keep(self) -> WeightSettings:
        if self.requests != "keep" and self.caches == "keep":
            raise ValueError(f"weights.requests = '{self.requests}' leaves no active request whose cache could be "
                             "kept, and later ones never meet another version's: set weights.caches = "
                             "'clear'")  # fmt: skip
        return self


class CheckpointSettings(Section):
    every: Positive = Field(10, description="versions between checkpoints; those after one are trained again on resume")
    keep: Positive = Field(2, description="checkpoints kept")
    on_difference: Literal["stop", "rebase", "rollback"] = Field(
        "stop", description="when training again gives other bits than were committed: `rebase` takes what came out as "
        "the newest version, `rollback` goes on from the checkpoint and gives up the versions after it"
    )
    deterministic: bool = Field(True, description="off: kernels may be taken whose bits vary, and the train state is "
                                                  "saved before each commit")  # fmt: skip


class LogSettings(Section):
    partitions: Annotated[int, Field(ge=1, le=256)] = Field(4, description="of trajectories, samples, groups; fixed")
    replication: Positive = Field(1, description="copies of each partition; 3 where there are three brokers")
    commit_ms: Annotated[int, Field(ge=10, le=5000)] = Field(200, description="the assembler's transaction interval")
    keep_trajectories_s: PositiveFloat | None = Field(None, description="events older than this are deleted once they "
                                                      "are settled; none: all are kept, so that they can be counted "
                                                      "again")  # fmt: skip
    span_tokens: Annotated[int, Field(ge=1, le=65536)] = Field(512, description="a span is flushed at so many tokens")
    blob_url: StoreUrl | None = Field(None, description="fsspec URL of a store that every role reaches, for what "
                                                        "is too large for the log; none: payloads are "
                                                        "chunked")  # fmt: skip
    blob_bytes: Positive = Field(8 << 20, description="a group's payload above this size goes to the blob store")


class RunSettings(Section):
    """All of them. `spec()` and `seed` are what most readers want."""

    seed: int = Field(0, description="seeds sampling")
    model: ModelSettings
    tasks: TaskSettings
    rollout: RolloutSettings = RolloutSettings()
    batch: BatchSettings = BatchSettings()
    staleness: StalenessSettings = StalenessSettings()
    reuse: ReuseSettings = ReuseSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    weights: WeightSettings = WeightSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _combination_is_possible(self) -> RunSettings:
        rollout = self.rollout
        if rollout.min_survivors is not None and rollout.min_survivors > rollout.group_size:
            raise ValueError("rollout.min_survivors is greater than rollout.group_size")
        if rollout.group_size == 1 and self.loss.lone is None:
            raise ValueError("rollout.group_size = 1 leaves nothing to compare: GRPO needs at least 2 siblings; or set "
                             "loss.lone to 'batch_mean' or 'none'")  # fmt: skip
        if self.optimizer.minibatches > self.batch.groups:
            raise ValueError("optimizer.minibatches is greater than batch.groups: a group isn't cut")
        if self.optimizer.minibatches * self.optimizer.epochs > 1:
            loss = self.loss
            if self.reuse.enabled:
                raise ValueError("reuse.enabled is for one optimizer step per version: set optimizer.minibatches and "
                                 "optimizer.epochs to 1")  # fmt: skip
            if loss.bypass and (loss.normalise or loss.m2_limit is not None or loss.reject_shrinks):
                raise ValueError("loss.bypass takes ratios anew at each optimizer step, which loss.normalise, "
                                 "loss.m2_limit and loss.reject_shrinks can't follow: they look at the whole batch "
                                 "once")  # fmt: skip
        if rollout.max_new_tokens >= self.model.max_length:
            raise ValueError("rollout.max_new_tokens leaves no room for a prompt in model.max_length")
        if self.staleness.hard_lag < self.batch.max_lag:
            raise ValueError("staleness.hard_lag is smaller than batch.max_lag: what is sampled could never be trained")
        if self.batch.min_last_groups > self.batch.groups:
            raise ValueError("batch.min_last_groups is greater than batch.groups")
        if self.reuse.enabled and self.tasks.source != "jsonl":
            raise ValueError("reuse.enabled needs tasks that recur: tasks.source = 'jsonl', which goes round")
        if self.staleness.ramp_from >= self.staleness.drift_limit:
            raise ValueError("staleness.ramp_from must be smaller than staleness.drift_limit")
        return self

    def spec(self) -> GroupSpec:
        """The rules of every group that this run opens for training."""
        rollout = self.rollout
        return GroupSpec(
            group_size=rollout.group_size,
            reserves=rollout.reserves,
            max_attempts=rollout.max_attempts,
            min_survivors=rollout.min_survivors or math.ceil(rollout.group_size / 2),
            deadline_s=rollout.deadline_s,
            max_age_s=rollout.max_age_s,
            on_deadline=rollout.on_deadline,
            zero_variance=rollout.zero_variance,
            max_tokens=rollout.max_new_tokens,
            max_turns=rollout.max_turns,
            model_time_s=rollout.model_time_s,
            tool_time_s=rollout.tool_time_s,
        )


# What may change in a living run: what only coordinator and trainer go by, and each where a manifest says so. The rest
# is fixed with the run (partitions, model, group contents), or is what workers sampled under.
CHANGEABLE = (
    "batch.",
    "staleness.",
    "loss.",
    "optimizer.learning_rate", "optimizer.warmup", "optimizer.weight_decay", "optimizer.max_grad_norm",
    "rollout.reserves", "rollout.max_attempts", "rollout.min_survivors", "rollout.deadline_s", "rollout.max_age_s",
    "rollout.on_deadline", "rollout.zero_variance", "rollout.lease_timeout_s", "rollout.no_progress_s",
    "checkpoint.on_difference",
)  # fmt: skip


# What a counterfactual may have otherwise: what decides a step, given the batches.
COUNTERFACTUAL = ("loss.", "optimizer.", "staleness.")


def changed(settings: RunSettings, changes: Mapping[str, Any], may: tuple[str, ...] = CHANGEABLE,
            why: str = "in a run: it was settled when the run was created") -> RunSettings:  # fmt: skip
    """Run settings after a change of dotted keys, of those that `may` change. Raises ValueError (also pydantic's) that
    names the key."""
    if not isinstance(changes, Mapping):
        raise ValueError(f"changes are key and value, not {changes!r}")
    plain = settings.model_dump(mode="json")
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if not isinstance(plain.get(section), dict) or name not in plain[section]:
            raise ValueError(f"there is no run setting {key!r}")
        if not any(key == one or one.endswith(".") and key.startswith(one) for one in may):
            raise ValueError(f"{key} can't change {why}")
        plain[section][name] = value
    return RunSettings.model_validate(plain)

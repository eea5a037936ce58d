"""Run settings: everything that decides what is trained. They are the first record of `policy`.

Every role reads them there; nothing here may depend on where a role runs (addresses, paths of caches, devices and
counts are site settings, which are never recorded).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .events import GroupSpec

Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(Section):
    path: str = Field(description="folder of a Hugging Face causal language model: version 0")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="published dtype: served weights are the masters rounded to it"
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the forward in engine and trainer alike"
    )
    max_length: Positive = Field(2048, description="prompt and completion together, tokens")


class TaskSettings(Section):
    source: Literal["reasoning_gym", "jsonl"] = Field(
        "reasoning_gym", description="a reasoning-gym data set, or a file with one JSON task a line"
    )
    dataset: str | None = Field(None, description="name of the reasoning-gym data set")
    config: dict[str, Any] = Field(default_factory=dict, description="its configuration (sizes, ranges)")
    size: Positive | None = Field(None, description="tasks in all; then the run ends (none: no end)")
    path: str | None = Field(None, description="JSON-lines file: each line has `prompt` and what the scorer needs")
    score: str | None = Field(None, description="`module:function`, called as score(task, text) -> float or None")
    seed: int = Field(0, description="draws the tasks")
    system: str | None = Field(None, description="system message")
    examples: tuple[tuple[str, str], ...] = Field((), description="solved examples (question, answer) as earlier turns")
    template: str = Field("{question}", description="the user's message; {question} is the task's prompt")

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> TaskSettings:
        if self.source == "reasoning_gym" and not self.dataset:
            raise ValueError("source 'reasoning_gym' needs `dataset`")
        if self.source == "jsonl" and not (self.path and self.score):
            raise ValueError("source 'jsonl' needs `path` and `score`")
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


class LossSettings(Section):
    truncate_above: PositiveFloat | None = Field(2.0, description="token importance ratios are cut off here (TIS)")
    mask_below: Annotated[float, Field(ge=0)] = Field(0.125, description="a smaller ratio gets no gradient")
    mask_above: PositiveFloat | None = Field(8.0, description="a larger ratio gets no gradient; none: no limit")
    advantage: Literal["grpo", "centered"] = Field("grpo", description="divide by the deviation, or only centre")
    denominator: Literal["token_mean", "sequence_mean"] = Field("token_mean", description="what the loss averages over")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> LossSettings:
        if self.mask_above is not None and self.mask_above <= self.mask_below:
            raise ValueError("`mask_above` must be greater than `mask_below`")
        return self


class OptimizerSettings(Section):
    learning_rate: PositiveFloat = Field(1e-5, description="peak")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="versions of linear warm-up")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW: decay of the mean of gradients")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.99, description="AdamW: decay of the mean of their squares")
    epsilon: PositiveFloat = Field(1e-8, description="AdamW: added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW: decoupled, per unit of learning rate")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradients are scaled down to this norm")
    micro_batch_tokens: Positive = Field(2048, description="tokens of one forward; changes memory and speed only")
    probe_tokens: Annotated[int, Field(ge=0)] = Field(256, description="tokens on which a step's drift is measured")


class WeightSettings(Section):
    snapshot_every: Positive = Field(50, description="versions between full snapshots in `weights`")
    codec: Literal["fast", "dense"] = Field("fast", description="of deltas: `dense` is a third smaller, and both ends "
                                                                "count through all weights")  # fmt: skip


class CheckpointSettings(Section):
    every: Positive = Field(10, description="versions between checkpoints; those after one are trained again on resume")
    keep: Positive = Field(2, description="checkpoints kept")


class LogSettings(Section):
    partitions: Annotated[int, Field(ge=1, le=256)] = Field(4, description="of trajectories, samples, groups; fixed")
    replication: Positive = Field(1, description="copies of each partition; 3 where there are three brokers")
    commit_ms: Annotated[int, Field(ge=10, le=5000)] = Field(200, description="the assembler's transaction interval")
    keep_trajectories_s: PositiveFloat | None = Field(None, description="events older than this are deleted once they "
                                                      "are settled; none: all are kept, so that they can be counted "
                                                      "again")  # fmt: skip
    span_tokens: Annotated[int, Field(ge=1, le=65536)] = Field(512, description="a span is flushed at so many tokens")
    blob_url: str | None = Field(None, description="fsspec URL of a store that every role reaches, for what is too "
                                                   "large for the log; none: payloads are chunked")  # fmt: skip
    blob_bytes: Positive = Field(8 << 20, description="a group's payload above this size goes to the blob store")

    @field_validator("blob_url")
    @classmethod
    def _store_is_named_without_secrets(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if "://" not in url or not (parts.netloc or parts.path.strip("/")):
                raise ValueError("`blob_url` must be a whole URL, such as file:///data/blobs or s3://bucket/folder")
            if "@" in parts.netloc:
                raise ValueError("`blob_url` is recorded in the run: leave user and password out of it")
            if parts.scheme == "memory":
                raise ValueError("`blob_url` memory:// ends with its process: name a store that every role reaches")
        return url


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
        if rollout.group_size == 1:
            raise ValueError("rollout.group_size = 1 leaves nothing to compare: GRPO needs at least 2 siblings")
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

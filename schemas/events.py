"""The facts on the log: one frozen class per record, and one Avro schema file of the same name beside it.

A class is the reader's view; `avro/<Name>.avsc` is the wire (a test holds them together). Identifying fields come first
and token columns last, so that a reader can stop early. Times are milliseconds since the epoch unless the
name says otherwise; token columns are bytes as `columns` packs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from .columns import Float32, Int16, Int32, unpack_float32, unpack_ids
from .errors import InvalidRecord
from .outcomes import Source

_SOURCES = frozenset(Source)
# First bytes (sign and most of the exponent) of floats that are negative and finite, or at least 0 and below 2**-11.
_PLAINLY_LOGPROBS = bytes([*range(0x80, 0xFF), *range(0x3A)])

FORK, COUNTERFACTUAL = "fork", "counterfactual"  # kinds of `Derived`

FINITE = "finite"
Finite = Annotated[float, FINITE]  # neither nan nor infinite: the codec refuses to write such a one

# ---------------------------------------------------------------------------------------------- parts of records


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt or environment instance with its verifier.

    `data` is JSON that the environment named by `source` turns into a prompt and a verdict; with `seed` it is all that
    is needed to make the task again.
    """

    id: str
    source: str
    data: str
    seed: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """One slot of a group, to be run as attempt number `attempt` (from 0)."""

    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The rules by which a group closes; fixed when it opens. Durations in seconds of the fold's clock."""

    group_size: int
    reserves: int
    max_attempts: int
    min_survivors: int
    deadline_s: Finite
    max_age_s: Finite
    on_deadline: str  # survivors | cancel | wait
    zero_variance: str  # refill | keep
    # Budgets of an episode on its own clock; None: as much as it likes.
    max_tokens: int  # of its model
    max_turns: int | None = None
    model_time_s: Finite | None = None  # what its model would take with the engine to itself
    tool_time_s: Finite | None = None
    exclude: tuple[str, ...] = ()  # signs of a suspicious reward (`suspicion.Sign`) whose episodes aren't trained on

    @property
    def slots(self) -> int:
        """Siblings and reserves."""
        return self.group_size + self.reserves


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes beside the log: the address (an fsspec URL) at which `length` bytes with this `digest` lie."""

    address: str
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`count` consecutive model tokens sampled by policy `version`."""

    version: int
    count: int


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that an engine's routers chose for `rows` consecutive tokens, in each of `layers` layers `each` of
    them. data: row after row, in a row layer after layer; uint8, or uint16 where one is above 255.

    On a span of n tokens the last row is that of its last token but one (what comes out of it samples the last token),
    and the others are those before it, context that was computed for the span's first token included."""

    rows: int
    layers: int
    each: int
    data: bytes

    def column(self) -> Int16:
        """int16 [rows, layers, each]. Raises InvalidRecord where the data isn't of that size."""
        size = self.rows * self.layers * self.each
        if min(self.rows, self.layers, self.each) < 1 or len(self.data) not in (size, 2 * size):
            raise InvalidRecord(f"a column of {len(self.data)} bytes is not the routing of {self.rows} tokens through "
                                f"{self.each} experts in each of {self.layers} layers")  # fmt: skip
        flat = np.frombuffer(self.data, np.uint8 if len(self.data) == size else "<u2")
        return flat.astype(np.int16).reshape(self.rows, self.layers, self.each)


def routed_experts(rows: Int16) -> RoutedExperts:
    """Of int [rows, layers, each]."""
    count, layers, each = rows.shape
    wide = int(rows.max(initial=0)) > 255
    return RoutedExperts(count, layers, each, np.ascontiguousarray(rows, "<u2" if wide else np.uint8).tobytes())


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a reward is suspicious: a sign (`suspicion.Sign`), and what shows it."""

    sign: str
    evidence: str


@dataclass(frozen=True, slots=True)
class SlotFate:
    """What became of one slot of a closed group (its last attempt)."""

    slot: int
    attempt: int
    incarnation: str
    outcome: str
    reason: str
    boundary: str
    reward: float | None
    counted: bool  # in the group's baseline
    model_tokens: int
    context_tokens: int
    versions: tuple[VersionRun, ...]
    suspicions: tuple[Suspicion, ...] = ()
    excluded: bool = False  # it would count, but for a suspicion that its group's rules exclude
    answer: bytes | None = None  # 8 bytes that stand for all tokens of its model (`suspicion.Signs`); null: none


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A record of `samples` in the partition of the same number, with the digest of its value."""

    offset: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A closure record in `groups`, and the content that it vouches for."""

    group: str
    partition: int
    offset: int
    content_hash: bytes
    model_tokens: int
    max_lag: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """A recorded success, by reference, beside `group`: a later group of its task whose attempts all failed.

    `source` is the candidate that holds the success, in `slot`; `use` counts the uses of that success, from 1. The
    trainer multiplies with `advantage` as it stands; the siblings of `group` keep an advantage of zero.
    """

    group: str
    source: GroupRef
    slot: int
    advantage: Finite
    use: int
    model_tokens: int


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """The next offset to be read of a partition."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class GroupCount:
    """Tokens of one group in a trained batch, by account."""

    group: str
    trained: int
    masked: int


# ------------------------------------------------------------------------------------- tasks (and trajectories)


@dataclass(frozen=True, slots=True)
class Lease:
    """One worker incarnation runs these slots of a group.

    Written to `tasks` and, in the same transaction, to the group's partition of `trajectories`, where the first one is
    the group's opening record (`opens`). An unmanaged producer writes only the latter, by itself. With `version`, only
    a worker that serves exactly that one may run it; any other hands it back.
    """

    group: str
    number: int  # running number of the author's leases, from 0
    opens: bool
    unmanaged: bool
    worker: str
    incarnation: str
    purpose: str
    min_version: int
    assignments: tuple[Assignment, ...]
    spec: GroupSpec
    task: Task
    cursor: int  # where the task source stands after this task
    request: str | None  # the request on `fleet` that this answers
    version: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The coordinator takes slots of a lease back: nothing the incarnation writes for them counts any more."""

    group: str
    number: int
    incarnation: str
    slots: tuple[int, ...]
    reason: str


# -------------------------------------------------------------------------------------------------- trajectories


@dataclass(frozen=True, slots=True)
class EpisodeStarted:
    """Sequence 0 of an attempt: everything needed to sample it again."""

    group: str
    slot: int
    attempt: int
    incarnation: str
    sequence: int
    worker: str
    engine: str  # JSON: the engine's fingerprint
    temperature: Finite
    top_p: Finite
    top_k: int
    max_new_tokens: int
    seed: int
    started_ms: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive tokens from one source.

    `tokens` int32[count]; `logprobs` float32[count], nats, processed (temperature applied), for model spans and null
    otherwise; `versions` cover exactly the model tokens. `parent` is the sequence of the span that this one continues
    (-1: the one before; 0: none, a context of its own begins), so that branches form a tree.
    """

    group: str
    slot: int
    attempt: int
    incarnation: str
    sequence: int
    source: str
    turn: int
    parent: int
    count: int
    versions: tuple[VersionRun, ...]
    stop_reason: str | None
    engine: str | None
    detail: str | None  # JSON: tool calls with results, references to routed experts or media
    timings_ms: dict[str, float]  # by step (docs/wire.md, section 4); of a turn, in the last span of its part
    tokens: bytes
    logprobs: bytes | None
    mask: bytes | None  # uint8[count]; null: every model token may train
    entropies: bytes | None  # float32[count], nats
    blob: Blob | None = None  # the text of `detail` (UTF-8), which is null then
    # The version whose weights computed the oldest cached keys that these tokens were sampled on; null: each its own.
    cache_version: int | None = None
    experts: RoutedExperts | None = None  # null: not recorded

    def token_ids(self) -> Int32:
        """int32[count]."""
        return unpack_ids(self.tokens, self.count)

    def behaviour_logprobs(self) -> Float32 | None:
        """float32[count], or None for a span that no model sampled."""
        return None if self.logprobs is None else unpack_float32(self.logprobs)

    def version_column(self) -> Int32:
        """int32[count]; -1 where no model sampled the token."""
        if self.source != Source.MODEL:
            return np.full(self.count, -1, np.int32)
        return np.repeat(
            np.array([run.version for run in self.versions], np.int32), [run.count for run in self.versions]
        ).astype(np.int32)

    def check(self) -> None:
        """Raises InvalidRecord where the columns contradict each other or a model token has no logprob."""
        if self.count < 0 or len(self.tokens) not in (2 * self.count, 3 * self.count, 4 * self.count):
            raise InvalidRecord(f"a span of {self.count} tokens has {len(self.tokens)} bytes of ids")
        if self.source not in _SOURCES:
            raise InvalidRecord(f"unknown span source {self.source!r}")
        for name, column, width in (("mask", self.mask, 1), ("entropies", self.entropies, 4)):
            if column is not None and len(column) != width * self.count:
                raise InvalidRecord(f"the column {name} has {len(column)} bytes for {self.count} tokens")
        if self.source != Source.MODEL:
            if self.versions or self.logprobs is not None or self.experts is not None:
                raise InvalidRecord(f"a {self.source} span carries logprobs, policy versions or experts")
            return
        if self.experts is not None:
            self.experts.column()
        if self.logprobs is None or len(self.logprobs) != 4 * self.count:
            raise InvalidRecord("model tokens without a behaviour logprob each are refused")
        # The last quarter of the column holds these bytes: where all are plain, no value needs to be looked at.
        if self.logprobs[3 * self.count :].translate(None, _PLAINLY_LOGPROBS):
            values = unpack_float32(self.logprobs)
            low, high = float(values.min()), float(values.max())  # both are nan if any is
            if not (math.isfinite(low) and math.isfinite(high)):
                raise InvalidRecord("a behaviour logprob is not finite")
            if high > 1e-3:
                raise InvalidRecord(f"a behaviour logprob is positive ({high:.4f})")
        covered = 0
        for run in self.versions:
            if run.count < 1:
                covered = -1
                break
            covered += run.count
        if covered != self.count:
            raise InvalidRecord("the policy versions do not cover the model tokens exactly")


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """The last event of an attempt. A reward of null means that the scorer has no verdict: never 0."""

    group: str
    slot: int
    attempt: int
    incarnation: str
    sequence: int
    outcome: str
    reason: str
    boundary: str
    reward: float | None
    rewards: dict[str, float | None]  # named components
    turn_rewards: tuple[float | None, ...]
    text: str | None  # what the verifier judged
    ended_ms: int
    timings_ms: dict[str, float]
    blob: Blob | None = None  # the text of `text` (UTF-8), which is null then


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The coordinator ends a slot whose last allowed attempt was lost with its worker."""

    group: str
    slot: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: written into a partition that has open groups and saw nothing for a second."""

    writer: str
    number: int


# ------------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """Part `index` of `of` of a candidate's payload (see `payload`), in `data` or in a blob."""

    group: str
    index: int
    of: int
    data: bytes
    blob: Blob | None = None


@dataclass(frozen=True, slots=True)
class PayloadSpan:
    """A span of an episode in a payload: the columns as they lie in its `Span`, without what names the attempt."""

    source: str
    turn: int
    parent: int
    count: int
    versions: tuple[VersionRun, ...]
    tokens: bytes
    logprobs: bytes | None
    mask: bytes | None
    experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class PayloadEpisode:
    """A counted episode of a candidate. `offsets` are its events' places in `trajectories`."""

    slot: int
    attempt: int
    incarnation: str
    outcome: str
    reward: float | None
    temperature: float
    spans: tuple[PayloadSpan, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupPayload:
    """Everything a trainer needs of one group."""

    group: str
    task: Task
    episodes: tuple[PayloadEpisode, ...]


# -------------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True, slots=True)
class Chained:
    """Running number from 0, and the digest of the record before (`hashes.GENESIS` for the first)."""

    number: int
    previous: bytes


@dataclass(frozen=True, slots=True)
class AttemptEnded(Chained):
    """An attempt is over; with `ends_slot` the slot is too. `cause` is the offset in `trajectories` that decided it."""

    cause: int
    group: str
    slot: int
    attempt: int
    incarnation: str
    outcome: str
    reason: str
    boundary: str
    reward: float | None
    model_tokens: int
    ends_slot: bool
    timings_ms: dict[str, float] = field(default_factory=dict)  # by step, as its EpisodeEnded or else its spans have it


@dataclass(frozen=True, slots=True)
class GroupClosed(Chained):
    """A group's closure. `accounts` hold its model tokens so far: `candidate` (decided later), `excluded`, `surplus`
    and `superseded`; tokens of other incarnations and late ones are in `Addendum` records."""

    cause: int
    group: str
    closure: str
    purpose: str
    task: str
    opened: int  # offset of the opening record
    open_ms: int  # from opening to closure, on the fold's clock
    flagged: str | None  # e.g. zero variance that was kept
    slots: tuple[SlotFate, ...]
    accounts: dict[str, int]
    context_tokens: int
    content_hash: bytes | None
    samples: tuple[SampleRef, ...]
    held_up_by: int  # the slot that ended last


@dataclass(frozen=True, slots=True)
class Addendum(Chained):
    """An event that changed no group: `kind` is `late`, `foreign`, `duplicate` or `conflict`."""

    cause: int
    kind: str
    group: str
    slot: int
    attempt: int
    model_tokens: int


@dataclass(frozen=True, slots=True)
class Position(Chained):
    """Closes a commit of the assembler: all input below `offset` is accounted for.

    A restart reads from `low_mark` (the oldest open group's opening record, else `offset`) with the clock as it stood
    there. `gaps` and `crcs` name each input record since the Position before: int64 differences of offsets (the first
    from `start`), and the CRC-32 of each value as int64. So a missing or altered event has a name.
    """

    offset: int
    low_mark: int
    clock_ms: int  # the fold's clock just before the record at `low_mark`
    last_ms: int  # and the newest timestamp that it had seen; -1: none yet
    start: int
    gaps: bytes
    crcs: bytes


# ------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, slots=True)
class Manifest(Chained):
    """Batch `batch` trains version `target` into `target + 1`, under the settings at `settings_offset` of `policy`.

    The segment columns have one row per (group, slot, run of equal version): int32 index into `groups`, int32 slot,
    int32 version, int32 count, float32 drift (nats squared, nan: unknown), float32 weight.
    """

    batch: int
    target: int
    settings_offset: int
    decided_ms: int
    groups: tuple[GroupRef, ...]
    positions: tuple[PartitionPosition, ...]
    closures_since: int  # groups closed since the manifest before, with or without a batch
    segment_group: bytes
    segment_slot: bytes
    segment_version: bytes
    segment_count: bytes
    segment_drift: bytes
    segment_weight: bytes
    reused: tuple[Reuse, ...] = ()
    settings_digest: bytes | None = None  # of the record at `settings_offset`, whose alteration shows so
    segment_extrapolated: bytes | None = None  # int32: versions on its way whose change wasn't published yet


@dataclass(frozen=True, slots=True)
class Disposed(Chained):
    """The final fate of a candidate that no manifest took."""

    group: str
    partition: int
    offset: int
    disposition: str
    reason: str
    target: int


# -------------------------------------------------------------------------------------------------------- policy


@dataclass(frozen=True, slots=True)
class Authored(Chained):
    """In `policy` each writer has a chain of its own. All begin at the run's first record: what the first record of
    another writer calls the one before it is the digest of RunCreated."""

    writer: str


@dataclass(frozen=True, slots=True)
class RunCreated(Authored):
    """The first record of `policy`: the run settings, as JSON."""

    run: str
    settings: str
    software: str
    created_ms: int


@dataclass(frozen=True, slots=True)
class SchemaAdded(Authored):
    """From here on records `name` may be written with `schema`: in Avro's parsing canonical form, so that `fingerprint`
    is the CRC-64-AVRO (little-endian) of its very bytes. Written when a run is created, and again before newer writers
    start. `last` is the number of the last record of the announcement that this one belongs to.

    The schema of this record never changes: a reader learns all others from it.
    """

    name: str
    fingerprint: bytes
    schema: str
    last: int


@dataclass(frozen=True, slots=True)
class SettingsChanged(Authored):
    """Settings that a person changed in the living run; in force from the first manifest that names this record."""

    changes: str  # JSON object of dotted keys
    changed_ms: int


@dataclass(frozen=True, slots=True)
class RealisedDrift:
    """What `version` sampled of a batch, against the served weights of the batch's target: log-ratios over its model
    tokens, in nats (squared), clamped at +-20."""

    version: int
    tokens: int
    episodes: int
    second_moment: Finite  # of |log-ratio| winsorised at 1
    error: Finite | None  # its standard error, clustered by episode; null: one episode
    raw: Finite  # the second moment as it is
    k3: Finite  # mean of ratio - 1 - log-ratio, both of target over behaviour
    max: Finite  # largest |log-ratio|
    beyond: Finite  # share of tokens that are winsorised
    estimated: Finite | None  # mean over the tokens of what the manifest forecast; null: it knew nothing


@dataclass(frozen=True, slots=True)
class Alignment:
    """What an engine's log-probabilities mean, by the trainer's own ones for tokens that the target itself sampled, so
    that no drift is in them. `kind`: `aligned`, `noise`, `meaning` (explained by `what`) or `biased`. Nats
    (squared)."""

    kind: str
    what: str
    tokens: int
    mismatch: Finite  # second moment of engine minus trainer, winsorised at 1
    left: Finite  # what of it `what` leaves
    mean: Finite  # of engine minus trainer
    error: Finite | None  # its standard error, clustered by episode; null: one episode
    bias: Finite  # mean weight minus 1, after the correction: what of the bias is left


@dataclass(frozen=True, slots=True)
class ReplicaAlignment:
    """The trainer's verdict on an `AlignmentProbe`: `prefill` on the first token of each of its continuations, `decode`
    on the others (null: it has none)."""

    worker: str
    incarnation: str
    version: int  # which it sampled, and by whose served weights the trainer judged
    engine: str  # JSON: the engine's fingerprint
    prefill: Alignment | None
    decode: Alignment | None


@dataclass(frozen=True, slots=True)
class Version(Authored):
    """A committed version. Version 0 has neither batch nor parent (-1)."""

    version: int
    parent: int
    batch: int
    batch_offset: int  # the manifest in `batches`
    batch_digest: bytes  # and the digest of its value; empty for version 0
    hash_algorithm: str
    served_hash: bytes
    train_hash: bytes
    rho: Finite  # RMS change of log-probability from the served weights of the version before, nats; noise removed
    rho_tokens: int
    groups: tuple[GroupCount, ...]
    metrics: dict[str, float]
    fingerprint: str  # JSON
    committed_ms: int
    reused: tuple[GroupCount, ...] = ()  # by the group beside which the success was used; in no other account
    rho_noise: Finite = 0.0  # RMS difference of two equivalent forwards on the probe, nats: what was removed
    realised: tuple[RealisedDrift, ...] = ()  # of its batch, by the version that sampled, ascending
    alignment: Alignment | None = None  # null: its batch had no episode of its target version alone
    replicas: tuple[ReplicaAlignment, ...] = ()  # probes that were judged while it was made, of earlier versions


@dataclass(frozen=True, slots=True)
class Reconciled(Authored):
    """Training versions again gave other bits than were committed, and this is what was done about it.

    `rebase`: the weights that came out stand for `version`, the newest one, under these hashes from here on; the hashes
    of those between `checkpoint` and it hold no more. `rollback`: training goes on from the weights of `checkpoint`,
    whose hashes these are; the next version keeps counting and names it as parent, and what was trained between is
    excluded. `replaces`: these hashes are `version`'s from here on (after a rollback only where it was never published,
    so that nobody has sampled from what it was).
    """

    rule: str  # rebase | rollback
    version: int
    checkpoint: int
    differed: int  # the first version that came out differently
    replaces: bool
    hash_algorithm: str
    served_hash: bytes
    train_hash: bytes
    fingerprint: str  # JSON, of who trained again
    decided_ms: int


@dataclass(frozen=True, slots=True)
class Derived(Authored):
    """This run comes from version `version` of run `parent`, on the same cluster. Written with the run's settings.

    `fork`: its version 0 has that version's weights and optimizer (`train_hash`), and its tasks begin at `cursor`.
    `counterfactual`: its versions are the parent's batches trained under its own settings, with rewards of `verifier`
    where that isn't null; it has no batches of its own and publishes nothing.
    """

    kind: str  # fork | counterfactual
    parent: str
    version: int
    hash_algorithm: str
    served_hash: bytes
    train_hash: bytes
    cursor: int
    changes: str  # JSON object of dotted keys, over whichever settings each batch of the parent was trained under
    verifier: str | None
    derived_ms: int


@dataclass(frozen=True, slots=True)
class Publication(Authored):
    """The version exists for receivers. `kind`: `path` (of a model), `snapshot` or `delta` (chunks in `weights`)."""

    version: int
    kind: str
    base: int  # version that a delta applies to, else -1
    base_hash: bytes
    hash_algorithm: str
    served_hash: bytes
    path: str | None
    chunks: tuple[int, ...]  # offsets in `weights`, in order
    size: int  # bytes of all chunks
    changed: int  # elements
    elements: int
    published_ms: int


# ------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """Frames of whole or part tensors; `data` as `delta` packs it, or a blob that holds it. `checksum` covers it and
    its place."""

    version: int
    kind: str
    index: int
    of: int
    checksum: bytes
    data: bytes
    blob: Blob | None = None


# --------------------------------------------------------------------------------------------------------- fleet


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A live incarnation: what it serves and how many slots are free. `managed` ones are given leases unasked."""

    worker: str
    incarnation: str
    version: int
    capacity: int
    free: int
    managed: bool
    engine: str  # JSON: fingerprint
    counters: dict[str, float]  # running totals: sampled_tokens, busy_s, idle_no_requests_s, ...
    fenced: str | None = None  # why it takes no work until its weights have caught up


@dataclass(frozen=True, slots=True)
class HandBack:
    """An incarnation returns slots of a lease that it will not run (or will not finish)."""

    worker: str
    incarnation: str
    group: str
    number: int
    slots: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A producer asks for a group; answered once, in `tasks`.

    With more than one of `attempts`, slots that are lost or fail by infrastructure wait for the next request that says
    so; it may be answered with them.
    """

    request: str
    worker: str
    incarnation: str
    task: str | None  # null: any
    size: int | None
    purpose: str
    version: int | None
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class PublicationClock:
    """How one version travelled to one replica: milliseconds since the epoch, null where it didn't happen."""

    worker: str
    incarnation: str
    version: int
    published_ms: float | None
    fetched_ms: float | None
    decoded_ms: float | None
    paused_ms: float | None
    applied_ms: float | None
    resumed_ms: float | None
    first_token_ms: float | None


@dataclass(frozen=True, slots=True)
class AlignmentProbe:
    """What one replica sampled of `version` beside its work, under no lease and in no group, for the trainer to
    compare. It continues contexts that it served before: continuation i has `contexts[i]` tokens of context and
    `counts[i]` sampled ones, the first by a prefill and the others by decoding.

    tokens: ids, context and sampled, continuation after continuation. logprobs: float32[sum of counts], nats, as the
    engine reports them."""

    worker: str
    incarnation: str
    version: int
    engine: str  # JSON: fingerprint
    temperature: Finite
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    sampled_ms: int
    tokens: bytes
    logprobs: bytes

    def continuations(self) -> list[tuple[Int32, Int32, Float32]]:
        """Of each: context int32[c], sampled tokens int32[n], their logprobs float32[n]. Raises InvalidRecord where the
        columns contradict each other."""
        try:
            ids = unpack_ids(self.tokens, sum(self.contexts) + sum(self.counts))
            logprobs = unpack_float32(self.logprobs)
        except ValueError as error:
            raise InvalidRecord(f"an alignment probe of {self.worker}: {error}") from error
        plain = len(self.contexts) == len(self.counts) and min(*self.contexts, *self.counts, 1, 1) > 0
        if not plain or len(logprobs) != sum(self.counts):
            raise InvalidRecord(f"an alignment probe of {self.worker}: its columns contradict each other")
        out, at, done = [], 0, 0
        for context, count in zip(self.contexts, self.counts, strict=True):
            end = at + context + count
            out.append((ids[at : at + context], ids[at + context : end], logprobs[done : done + count]))
            at, done = end, done + count
        return out


@dataclass(frozen=True, slots=True)
class FleetTick:
    """The coordinator's beat: `fleet` has a clock while no worker is heard."""

    writer: str
    number: int


# ----------------------------------------------------------------------------------------------- evals, deadletter


@dataclass(frozen=True, slots=True)
class Score:
    """An evaluation of one version as it is served."""

    suite: str
    version: int
    served_hash: bytes
    items: int
    scored: int
    mean: float
    standard_error: float
    sampling: str  # JSON
    engine: str  # JSON: fingerprint
    evaluated_ms: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be used, with where it came from and why."""

    topic: str
    partition: int
    offset: int
    kind: str  # the error's class
    reason: str
    key: bytes | None
    value: bytes | None


Event = (
    Lease | LeaseEnded | EpisodeStarted | Span | EpisodeEnded | Exhausted | Tick | SampleChunk | GroupPayload
    | AttemptEnded | GroupClosed | Addendum | Position | Manifest | Disposed | RunCreated | SchemaAdded
    | SettingsChanged | Version | Publication | WeightChunk | Heartbeat | HandBack | LeaseRequest | PublicationClock
    | FleetTick | Score | DeadLetter | Reconciled | Derived | AlignmentProbe
)  # fmt: skip


class Kinds:
    """Which records a topic may hold."""

    BY_TOPIC: ClassVar[dict[str, tuple[type, ...]]] = {
        "tasks": (Lease, LeaseEnded),
        "trajectories": (Lease, EpisodeStarted, Span, EpisodeEnded, Exhausted, Tick),
        "samples": (SampleChunk,),
        "groups": (AttemptEnded, GroupClosed, Addendum, Position),
        "batches": (Manifest, Disposed),
        "policy": (RunCreated, SchemaAdded, SettingsChanged, Version, Publication, Reconciled, Derived),
        "weights": (WeightChunk,),
        "fleet": (Heartbeat, HandBack, LeaseRequest, PublicationClock, FleetTick,
                  AlignmentProbe),
        "evals": (Score,),
        "deadletter": (DeadLetter,),
    }

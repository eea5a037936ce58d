"""The tables of a run: which there are, and what each column means. The one definition: readers, Parquet files and
docs/tables.md follow from it (`markdown`; a test holds the document to it).

A column's dtype is Arrow's name; `category` is a string that is dictionary-encoded. `null` says when there is no value;
without it there always is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, as docs/tables.md and the Parquet file's metadata say it. `dtype` is Arrow's name."""

    name: str
    dtype: str
    meaning: str
    unit: str = ""
    null: str = ""  # when it is null; empty: never


@dataclass(frozen=True, slots=True)
class Spec:
    """A table: what one row is, which topics it is made of, in what order it comes."""

    name: str
    row: str
    topics: tuple[str, ...]
    order: str
    columns: tuple[Column, ...]

    def arrow(self) -> Any:
        """The pyarrow.Schema; unit and meaning are the fields' metadata."""
        import pyarrow as pa

        def field(column: Column) -> Any:
            told = {"meaning": column.meaning} | ({"unit": column.unit} if column.unit else {})
            return pa.field(column.name, _arrow(column.dtype), nullable=bool(column.null), metadata=told)

        return pa.schema([field(column) for column in self.columns], metadata={"table": self.name, "row": self.row})


def _arrow(dtype: str) -> Any:
    import pyarrow as pa

    if dtype == "category":
        return pa.dictionary(pa.int32(), pa.string())
    return getattr(pa, {"bool": "bool_"}.get(dtype, dtype))()


C = Column
_ATTEMPT = (
    C("group", "category", "group id"),
    C("slot", "int32", "slot of the group, from 0"),
    C("attempt", "int32", "attempt at that slot, from 0"),
    C("incarnation", "category", "the worker process that wrote it"),
)
_PLACE = (
    C("partition", "int32", "of the record"),
    C("offset", "int64", "of the record"),
)
_TRIMMED = "`trajectories` are trimmed, or hold no such event"

TOKENS = Spec(
    "tokens", "one token of a span, as it was logged (repeated and foreign events too)", ("trajectories",),
    "partition, offset, position within the span",
    (
        *_ATTEMPT,
        C("sequence", "int32", "of the span within the attempt"),
        C("position", "int32", "of the token within its branch of the episode, context included", "tokens",
          "the span it continues was not seen"),
        C("source", "category", "`prompt`, `model` or `environment`"),
        C("turn", "int32", "turn of the conversation"),
        C("token", "int32", "token id"),
        C("logprob", "float32", "processed log-probability of the sampled token", "nats", "no model sampled it"),
        C("version", "int32", "policy version that sampled it", "", "no model sampled it"),
        C("trainable", "bool", "a model token that no mask excludes"),
        C("entropy", "float32", "of the distribution that it was drawn from", "nats", "not recorded"),
        C("engine", "category", "engine of the span", "", "the span names none"),
        *_PLACE,
    ),
)  # fmt: skip

SPANS = Spec(
    "spans", "one span, as it was logged (repeated and foreign events too)", ("trajectories",), "partition, offset",
    (
        *_ATTEMPT,
        C("sequence", "int32", "of the span within the attempt"),
        C("source", "category", "`prompt`, `model` or `environment`"),
        C("turn", "int32", "turn of the conversation"),
        C("parent", "int32", "sequence of the span that it continues; -1: the one before"),
        C("count", "int32", "its tokens", "tokens"),
        C("version_min", "int32", "oldest policy version in it", "", "no model span"),
        C("version_max", "int32", "newest policy version in it", "", "no model span"),
        C("logprob_mean", "float64", "mean of its log-probabilities", "nats", "no model span, or empty"),
        C("stop_reason", "category", "why it ended", "", "it is not the last of a turn"),
        C("engine", "category", "engine of the span", "", "the span names none"),
        C("detail", "string", "JSON: tool calls with results, references", "", "none, or in a blob"),
        C("blob", "string", "address of the blob that holds `detail`", "", "none"),
        C("logged_ms", "int64", "when the broker took it", "ms since 1970"),
        *_PLACE,
    ),
)  # fmt: skip

EPISODES = Spec(
    "episodes", "one attempt: each that ended, and each that started in a group that is open",
    ("groups", "batches", "policy", "trajectories"), "partition, then the group's closure; open groups last",
    (
        C("id", "string", "GROUP/SLOT: the episode, whatever the attempt"),
        *_ATTEMPT,
        C("task", "category", "task id", "", "the group is open, and its opening record is gone"),
        C("purpose", "category", "`train` or `eval`", "", "as `task`"),
        C("outcome", "category", "`model_success`, `model_failure`, `infra_failure` or `unknown`", "", "it runs"),
        C("reason", "category", "why it ended", "", "it runs"),
        C("boundary", "category", "what failed: `none`, `model`, `engine`, `environment`, `scorer`, `producer`, `log`",
          "", "it runs"),
        C("reward", "float64", "of the scorer", "", "no verdict"),
        C("last", "bool", "the slot ended with this attempt"),
        C("counted", "bool", "in its group's baseline"),
        C("model_tokens", "int64", "sampled by the policy", "tokens"),
        C("context_tokens", "int64", "prompt and environment", "tokens", "not the slot's last attempt"),
        C("version_min", "int32", "oldest policy version in it", "", "no model token, or not the last attempt"),
        C("version_max", "int32", "newest policy version in it", "", "no model token, or not the last attempt"),
        C("closure", "category", "of its group; `open` while it is"),
        C("disposition", "category", "final fate of its group; `open` while undecided"),
        C("batch", "int32", "batch that its group is in", "", "in none"),
        C("max_lag", "int32", "target version minus the group's oldest sampling version", "versions", "in no batch"),
        C("suspicious", "string", "signs that its reward was not earned (docs/suspicious.md), comma-separated", "",
          "none, or not the slot's last attempt of a closed group"),
        C("evidence", "string", "what shows them, `sign: evidence`, separated by `; `", "", "as `suspicious`"),
        C("excluded", "bool", "left out of its group's baseline and of training for it"),
        C("held_up", "bool", "the slot that ended last in its group"),
        C("worker", "category", "worker that started it", "", _TRIMMED),
        C("engine", "category", "JSON: fingerprint of the engine", "", _TRIMMED),
        C("started_ms", "int64", "by the worker's clock", "ms since 1970", _TRIMMED),
        C("ended_ms", "int64", "by the worker's clock", "ms since 1970", "it has no last event, or " + _TRIMMED),
        C("closed_ms", "int64", "when its group closed", "ms since 1970", "the group is open"),
        *_PLACE,
    ),
)  # fmt: skip

GROUPS = Spec(
    "groups", "one group, closed or open", ("groups", "batches", "policy", "trajectories"),
    "partition, then the closure; open groups last",
    (
        C("id", "string", "group id"),
        C("task", "category", "task id"),
        C("purpose", "category", "`train` or `eval`"),
        C("closure", "category", "how it closed; `open` while it is"),
        C("disposition", "category", "its one final fate; `open` while undecided"),
        C("reason", "category", "of the disposition", "", "none given"),
        C("batch", "int32", "batch that it is in", "", "in none"),
        C("version", "int32", "version that was trained from it", "", "none (yet)"),
        C("max_lag", "int32", "target version minus its oldest sampling version", "versions", "in no batch"),
        C("opened_ms", "int64", "when its opening record was logged", "ms since 1970", "`trajectories` are trimmed"),
        C("closed_ms", "int64", "when its closure was logged", "ms since 1970", "it is open"),
        C("open_s", "float64", "from opening to closure, on the log's clock", "s", "it is open"),
        C("slots", "int32", "reserves included"),
        C("counted", "int32", "slots in its baseline"),
        C("attempts", "int32", "that ended"),
        C("infra_failures", "int32", "attempts that the infrastructure lost"),
        C("reward_mean", "float64", "over the counted slots", "", "none has a reward"),
        C("reward_std", "float64", "over the counted slots (population)", "", "none has a reward"),
        C("model_tokens", "int64", "of all attempts", "tokens"),
        C("context_tokens", "int64", "prompt and environment, of all attempts", "tokens"),
        C("candidate_tokens", "int64", "account `candidate`: the coordinator decides about them", "tokens"),
        C("excluded_tokens", "int64", "account `excluded` by closure or outcome", "tokens"),
        C("surplus_tokens", "int64", "account `surplus`: reserves that were not needed", "tokens"),
        C("superseded_tokens", "int64", "account `superseded`: earlier attempts", "tokens"),
        C("held_up_by", "int32", "the slot that ended last", "", "it is open"),
        C("flagged", "category", "why it is noted, e.g. zero variance that was kept", "", "it is not"),
        C("content_hash", "string", "hex: vouches for what is trained of it", "", "no candidate"),
        *_PLACE,
    ),
)  # fmt: skip

BATCHES = Spec(
    "batches", "one manifest", ("batches", "policy"), "batch",
    (
        C("batch", "int32", "its number, from 1"),
        C("target", "int32", "version that it trains"),
        C("version", "int32", "version that it became", "", "not committed yet"),
        C("groups", "int32", "in it"),
        C("model_tokens", "int64", "in it", "tokens"),
        C("weighted_tokens", "int64", "with a staleness weight above 0", "tokens"),
        C("weight_mean", "float64", "staleness weight, over its tokens", "", "no tokens"),
        C("lag_mean", "float64", "target minus sampling version, over its tokens", "versions", "no tokens"),
        C("lag_max", "int32", "of its oldest token", "versions", "no tokens"),
        C("drift_mean", "float64", "estimated, over its tokens where known", "nats squared", "known of none"),
        C("drift_max", "float64", "estimated", "nats squared", "known of none"),
        C("trained_tokens", "int64", "that the trainer trained", "tokens", "not committed yet"),
        C("masked_tokens", "int64", "that the trainer gave no weight", "tokens", "not committed yet"),
        C("reused", "int32", "successes used again by reference"),
        C("closures_since", "int32", "groups closed since the manifest before, with or without a batch"),
        C("settings_offset", "int64", "in `policy`: the settings under which it was decided"),
        C("decided_ms", "int64", "by the coordinator's clock", "ms since 1970"),
        C("committed_ms", "int64", "of its version, by the trainer's clock", "ms since 1970", "not committed yet"),
        C("offset", "int64", "of the record in `batches`"),
    ),
)  # fmt: skip

_METRIC = "the trainer recorded none"
VERSIONS = Spec(
    "versions", "one committed version", ("policy",), "version",
    (
        C("version", "int32", "its number; 0 is the initial weights"),
        C("parent", "int32", "version that it was trained from; -1: none"),
        C("batch", "int32", "batch that it was trained from", "", "version 0"),
        C("committed_ms", "int64", "by the trainer's clock", "ms since 1970"),
        C("published_ms", "int64", "by the trainer's clock", "ms since 1970", "not published yet"),
        C("kind", "category", "of its publication: `path`, `snapshot` or `delta`", "", "not published yet"),
        C("bytes", "int64", "of its publications", "bytes"),
        C("changed_share", "float64", "elements that changed, of all", "", "not published, or not counted"),
        C("rho", "float64", "RMS change of log-probability from the version before", "nats"),
        C("rho_tokens", "int64", "on which that was measured", "tokens"),
        C("trained_tokens", "int64", "in its batch", "tokens"),
        C("masked_tokens", "int64", "in its batch", "tokens"),
        C("loss", "float64", "of its step", "", _METRIC),
        C("grad_norm", "float64", "before clipping", "", _METRIC),
        C("learning_rate", "float64", "of its step", "", _METRIC),
        C("reward", "float64", "mean over its batch (not over all closed groups)", "", _METRIC),
        C("ess", "float64", "effective sample size of its importance weights, as a share", "", _METRIC),
        C("mismatch_mean", "float64", "mean |trainer's minus engine's log-probability|, tokens of the target version",
          "nats", "its batch has no token of its target version"),
        C("mismatch_max", "float64", "largest such difference", "nats", "as `mismatch_mean`"),
        C("waiting_s", "float64", "trainer time: no batch was there", "s", _METRIC),
        C("fetching_s", "float64", "trainer time: reading the batch", "s", _METRIC),
        C("compute_s", "float64", "trainer time: forward, backward, optimizer", "s", _METRIC),
        C("committing_s", "float64", "trainer time: the version's record", "s", "no later version tells"),
        C("publishing_s", "float64", "trainer time: its delta or snapshot", "s", "no later version tells"),
        C("metrics", "string", "JSON: everything that the trainer recorded with it"),
        C("served_hash", "string", "hex: of the published weights"),
        C("offset", "int64", "of the record in `policy`"),
    ),
)  # fmt: skip

REPLICAS = Spec(
    "replicas", "one heartbeat of a replica; counters are running totals since its incarnation began", ("fleet",),
    "offset",
    (
        C("worker", "category", "its name, kept over restarts"),
        C("incarnation", "category", "the process"),
        C("heard_ms", "int64", "when the broker took it", "ms since 1970"),
        C("version", "int32", "policy version that it serves"),
        C("capacity", "int32", "slots"),
        C("free", "int32", "slots"),
        C("managed", "bool", "given leases unasked"),
        C("sampled_tokens", "float64", "running total", "tokens", "not counted"),
        C("busy_s", "float64", "running total: the engine decoded", "s", "not counted"),
        C("idle_s", "float64", "running total over all reasons", "s", "not counted"),
        C("counters", "string", "JSON: all counters, idle time by reason too"),
        C("engine", "category", "JSON: fingerprint of the engine"),
        C("offset", "int64", "of the record in `fleet`"),
    ),
)  # fmt: skip

_CLOCK = "it did not happen"
PUBLICATIONS = Spec(
    "publications", "one version on its way to one replica", ("fleet",), "offset",
    (
        C("version", "int32", "version"),
        C("worker", "category", "replica's name"),
        C("incarnation", "category", "the process"),
        *(C(f"{step}_ms", "float64", meaning, "ms since 1970", _CLOCK) for step, meaning in (
            ("published", "by the trainer's clock"), ("fetched", "its bytes were there"),
            ("decoded", "and checked"), ("paused", "decoding stopped for it"), ("applied", "the weights were in place"),
            ("resumed", "decoding went on"), ("first_token", "the first token that it sampled"))),
        C("offset", "int64", "of the record in `fleet`"),
    ),
)  # fmt: skip

WAITS = Spec(
    "waits", "one step of an ended attempt's time", ("groups",), "partition, offset, step",
    (
        *_ATTEMPT,
        C("task", "category", "task id", "", "the group is open"),
        C("step", "category", "`queue`, `prefill`, `decode`, `environment`, `sandbox_start`, `scorer`, ...; `model` "
          "stands beside the steps: what the decoding takes with the engine to itself"),
        C("wait_ms", "float64", "how long, in all of the attempt", "ms"),
        C("closed_ms", "int64", "when its group closed", "ms since 1970", "the group is open"),
        *_PLACE,
    ),
)  # fmt: skip

TASKS = Spec(
    "tasks", "one task at one version: its counted episodes of closed groups for training whose newest token that "
    "version sampled", ("tasks", "groups"), "task's groups (most first), task, version",
    (
        C("task", "category", "task id"),
        C("version", "int32", "policy version"),
        C("episodes", "int32", "counted episodes"),
        C("successes", "int32", "of these"),
        C("solved", "float64", "share that are successes"),
        C("low", "float64", "Wilson's interval of it, 95 %"),
        C("high", "float64", "Wilson's interval of it, 95 %"),
        C("state", "category", "of the task, over all versions: `flaky`, `saturated` or `never_solved`", "",
          "none of these, or too few episodes"),
        C("repeats", "int32", "of the task, over all versions: answers that had been given before"),
        C("contradicted", "int32", "of these, with another verdict"),
        C("suspicious", "int32", "of the task, over all versions: successes with a sign that they were not earned"),
        C("lost", "int32", "of the task, over all versions: attempts that the infrastructure lost or nobody can judge"),
        C("attempts", "int32", "of the task, over all versions: that ended"),
    ),
)  # fmt: skip

EVALS = Spec(
    "evals", "one evaluation of one version, as it was served", ("evals",), "offset",
    (
        C("suite", "category", "what was asked"),
        C("version", "int32", "policy version"),
        C("items", "int32", "in the suite"),
        C("scored", "int32", "with a verdict"),
        C("mean", "float64", "score over those"),
        C("standard_error", "float64", "of the mean"),
        C("served_hash", "string", "hex: of the weights that answered"),
        C("sampling", "string", "JSON"),
        C("engine", "category", "JSON: fingerprint of the engine"),
        C("evaluated_ms", "int64", "when", "ms since 1970"),
        C("offset", "int64", "of the record in `evals`"),
    ),
)  # fmt: skip

SPECS: Mapping[str, Spec] = {spec.name: spec for spec in (
    TOKENS, SPANS, EPISODES, GROUPS, BATCHES, VERSIONS, REPLICAS, PUBLICATIONS, WAITS, TASKS, EVALS)}  # fmt: skip

_INTRODUCTION = """# Tables

`open_run(RUN).table(NAME)` is a table of a run as of now; `headrace export RUN DIR` writes each to `DIR/NAME.parquet`.
They are streamed: `batches()` gives Arrow record batches in bounded memory, `to_arrow()`, `to_pandas()` and
`to_polars()` the whole. Columns are only ever added. Records that can't be decoded are left out (`headrace ledger`
names them). This page is made from `consumers/frames/schema.py` by `python -m tests.tables_page`.

```sql run
-- DuckDB, after `headrace export first out`: which tasks never give a group that can be trained?
SELECT task, count(*) AS groups, avg(reward_mean) FROM 'out/groups.parquet' GROUP BY task HAVING max(batch) IS NULL;
```
"""


def markdown() -> str:
    """docs/tables.md."""
    out = [_INTRODUCTION]
    for spec in SPECS.values():
        topics = ", ".join(f"`{topic}`" for topic in spec.topics)
        out += [f"## {spec.name}", "", f"One row: {spec.row}. From {topics}; in order of {spec.order}.", ""]
        out += ["| column | dtype | unit | meaning | null |", "|---|---|---|---|---|"]
        out += [f"| {c.name} | {c.dtype} | {c.unit} | {c.meaning.replace('|', chr(92) + '|')} | {c.null} |"
                for c in spec.columns] + [""]  # fmt: skip
    return "\n".join(out)

"""What the numbers mean, in words: for each of the six questions a verdict in a sentence, and figures with their
definitions. Pure; no plotting, no HTML.

A verdict names what was measured and the setting to change where one is worth changing. Where the log can't answer, it
says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.schemas.outcomes import Account

from ..ledger import Ledger
from ..waits import shares
from . import Report
from .questions import Alignment, Reliability
from .words import number, seconds, share, size, spread

# Above these a verdict warns. Alignment: bf16 forwards of two engines differ by some hundredths of a nat per token.
WARN_LOST = 0.05  # share of attempts lost to the infrastructure
WARN_MASKED = 0.05  # share of tokens without weight
WARN_SUSPICIOUS = 0.05  # share of successes that look unearned
WARN_MISMATCH = 0.1  # nats, mean over tokens of the version in training
WARN_PAUSE = 0.05  # pause of decoding, as a share of the batch interval


STATES = {
    "flaky": ("answers given again that got another verdict, of those given again", "mend the verifier, or rest it"),
    "saturated": ("solved, of the newest episodes", "rest it (tasks.rested), or raise tasks.level"),
    "never_solved": ("solved", "rest it, or take in easier ones (tasks.more)"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A figure as it is shown, and what it is."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """One question of the page: verdict, figures, and whether the verdict is good."""

    key: str
    question: str
    verdict: str
    good: bool | None  # None: the log can't say
    rows: tuple[Row, ...]


def sections(report: Report) -> tuple[Section, ...]:
    """In the order of the page: the six questions, then, where the ledger was audited, where tokens and hours went."""
    made = [make(report) for make in (_readiness, _freshness, _alignment, _reliability, _publication, _evaluation)]
    return (*made, *(() if report.ledger is None else (_spent(report, report.ledger),)))


def headline(report: Report) -> tuple[str, str]:
    """(the bottleneck, the next thing to do), in a sentence each."""
    waits = report.figures.waits
    if not report.begun:
        return "Nothing has happened yet.", "Start it: `headrace run CONFIG`."
    what = f"The bottleneck is {waits.bottleneck}." if waits.bottleneck else "Nothing holds this run up by much."
    return what, f"Next: {waits.advice}."


# ------------------------------------------------------------------------------------------------------ questions


def _readiness(report: Report) -> Section:
    found, waits = report.figures, report.figures.waits
    rows = [
        Row("time to trainable batch", seconds(found.time_to_trainable_batch_s), "first request to first manifest"),
        Row("batch interval", spread(found.batch_interval_s), "manifest to manifest, while there was room for one"),
        Row("batch span", spread(found.batch_span_s), "lease of a batch's oldest group to its manifest"),
        Row("trainer wait", spread(found.trainer_wait_s), "no batch was there for the trainer; without the first one"),
        Row("trainer wait, share", share(found.trainer_wait_share), "of the trainer's time since its first batch"),
        Row("trainer's first wait", seconds(waits.first_wait_s), "for the first batch: part of the time to it"),
        Row(
            "tokens per second",
            number(found.tokens_per_s),
            "model tokens of closed groups, first request to last closure",
        ),
    ]
    slowest = sorted(waits.stragglers, key=lambda s: -s.open_s)[:3]
    for one in slowest:
        rows.append(
            Row(
                f"straggler of batch {one.batch}",
                f"{one.group}/{one.slot}, attempt {one.attempt}, task "
                f"{one.task}: {one.state} {seconds(one.state_s)} of {seconds(one.open_s)}",
                "the slot that ended last of the group that closed last, and what it spent most time on",
            )
        )
    kinds = Counter(one.state for one in waits.stragglers).most_common(1)
    if found.batch_interval_s is None and found.time_to_trainable_batch_s is None:
        return Section(
            "readiness", "Is the next batch ready in time?", "No batch has been decided yet.", None, tuple(rows)
        )
    late = f"; what most often held a batch up was {kinds[0][0]}" if kinds else ""
    waited = found.trainer_wait_share
    if waited is None:
        verdict, good = f"The first batch took {seconds(found.time_to_trainable_batch_s)}{late}.", None
    elif waited < 0.15:
        verdict, good = f"Yes: the trainer waits for batches {share(waited)} of its time{late}.", True
    else:
        verdict, good = (
            (
                f"No: the trainer waits for batches {share(waited)} of its time{late}. "
                f"{waits.advice[:1].upper()}{waits.advice[1:]}."
            ),
            False,
        )
    return Section("readiness", "Is the next batch ready in time?", verdict, good, tuple(rows))


def _freshness(report: Report) -> Section:
    fresh, lag = report.freshness, report.figures.lag
    question = "How old is what is trained?"
    tokens = sum(batch.tokens for batch in fresh.batches)
    masked = fresh.masked_tokens / tokens if tokens else None
    rows = [
        Row(
            "lag of trained tokens",
            f"{number(lag.mean)} mean, {lag.p95:.0f} p95, {lag.max:.0f} max" if lag else "-",
            "target version minus sampling version, over tokens with weight in committed batches",
        ),
        Row("drift", spread(fresh.drift, number), "estimated, nats squared, over tokens where it is known"),
        Row(
            "staleness weight",
            f"{number(fresh.weights.mean)} mean" if fresh.weights else "-",
            "recorded by the coordinator, over the tokens of all batches",
        ),
        Row("masked by staleness", share(masked), "tokens of batches that got weight 0"),
        Row(
            "stale groups", number(fresh.stale_groups), "candidates that were dropped because no token was fresh enough"
        ),
    ]
    rows += _calibration(report)
    for upto, (episodes, trained, hidden, dropped) in lengths(report).items():
        rows.append(
            Row(
                f"episodes up to {upto} tokens",
                f"{share(trained)} trained, {share(hidden)} masked, {share(dropped)} dropped",
                f"of the model tokens of {episodes} episodes of that length",
            )
        )
    if lag is None:
        return Section("freshness", question, "Nothing has been trained yet.", None, tuple(rows))
    rule = (
        "the staleness rule is active"
        if fresh.rule_active
        else "the staleness rule is inactive (all weights within 2 % of 1)"
    )
    bias = report.ledger.bias if report.ledger is not None else None
    if bias is not None and bias.significant:
        return Section(
            "freshness", question, f"Lag is {lag.mean:.2f} versions on average, but {bias}.", False, tuple(rows)
        )
    if masked and masked > WARN_MASKED:
        return Section(
            "freshness",
            question,
            f"Too old in part: {share(masked)} of the tokens in batches got no weight; a "
            "smaller batch.max_lag samples less ahead.",
            False,
            tuple(rows),
        )
    return Section(
        "freshness",
        question,
        f"Fresh enough: {lag.mean:.2f} versions of lag on average, {lag.max:.0f} at most; {rule}.",
        True,
        tuple(rows),
    )


def _calibration(report: Report) -> list[Row]:
    found = report.calibration
    if not found.cells:
        return []
    pooled = f"{number(found.correlation)}, of lag {number(found.lag_correlation)}"
    rows = [
        Row("forecast of drift", pooled, f"rank correlation with realised drift over {found.cells} parts of batches"),
        Row("realised over forecast", number(found.factor), "token means, over the floor"),
    ]
    if found.limit is not None:
        rows.append(
            Row(
                "drift limit suggested",
                number(found.limit),
                "staleness.drift_limit at which realised drift is about 0.04 (an RMS of 0.2 nats)",
            )
        )
    return rows


def lengths(report: Report) -> dict[int, tuple[int, float, float, float]]:
    """By upper bound: (episodes, shares of tokens that were trained, masked, dropped). Open ones count in none."""
    out: dict[int, tuple[int, float, float, float]] = {}
    found = report.ledger.lengths if report.ledger is not None else ()
    for upto in sorted({row.upto for row in found if row.upto}):
        rows = [
            r
            for r in found
            if r.upto == upto and r.account in (Account.TRAINED, Account.MASKED, Account.EXCLUDED)
        ]
        total = sum(r.tokens for r in rows)
        if total:
            part = [
                sum(r.tokens for r in rows if r.account == a) / total
                for a in (Account.TRAINED, Account.MASKED, Account.EXCLUDED)
            ]
            out[upto] = sum(r.episodes for r in rows), part[0], part[1], part[2]
    return out


def _alignment(report: Report) -> Section:
    found, question = report.alignment, "Do trainer and engines compute the same numbers?"
    worst = found.worst
    biases = [one.bias for one in found.versions if one.bias is not None]
    ess = [one.ess for one in found.versions if one.ess is not None]
    left = [one.bias_left for one in found.versions if one.bias_left is not None]
    rows = (
        Row(
            "mismatch",
            f"{number(found.mean)} nats mean",
            "|trainer's minus engine's log-probability|, over tokens that "
            "the version in training sampled itself: no policy change is in it",
        ),
        Row(
            "worst token",
            f"{number(worst.max)} nats, version {worst.version}" if worst else "-",
            "largest such difference",
        ),
        Row("tokens compared", number(found.tokens), "of the versions' target versions"),
        Row(
            "remaining bias",
            number(sum(biases) / len(biases)) if biases else "-",
            "mean importance ratio minus 1, mean over versions",
        ),
        Row(
            "bias after correction",
            number(left[-1]) if left else "-",
            "mean weight minus 1 on tokens of the version itself, newest version that had any",
        ),
        Row("meaning", _meaning(found), "what explains the difference best, newest version that had such tokens"),
        *(
            Row(
                f"replicas' probe: {one.engine}, {one.way}",
                f"{number(one.mismatch)} nats RMS, {number(one.bias_left)} bias left",
                f"{one.tokens} tokens of {one.replicas} replicas, scored with the version that sampled them; verdicts: "
                + ", ".join(f"{n} {kind}" for kind, n in one.kinds.items()),
            )
            for one in found.probes
        ),
        Row(
            "effective sample size", share(min(ess)) if ess else "-", "smallest over versions, as a share of the tokens"
        ),
    )
    if (probed := next((one for one in found.probes if one.wrong), None)) is not None:
        said = f"No: {probed.engine}, {probed.way}, replica {probed.wrong}."
        return Section("alignment", question, said, False, rows)
    if found.mean is None and found.probes:
        most = max(one.mismatch for one in found.probes)
        return Section("alignment", question, f"{'Yes' if most < WARN_MISMATCH else 'No'}: {number(most)} nats of "
                       "difference (RMS) in replicas' probes.", most < WARN_MISMATCH, rows)  # fmt: skip
    if found.mean is None:
        return Section(
            "alignment",
            question,
            "The log can't say: no replica was probed, and no trained batch holds tokens of its own target version.",
            None,
            rows,
        )
    if (wrong := found.wrong) is not None:
        what = f"the engine's log-probabilities are {wrong.what}" if wrong.kind == "meaning" else (
            "they differ to one side, which is no rounding")  # fmt: skip
        return Section("alignment", question, f"No: at version {wrong.version} {what}.", False, rows)
    good = found.mean < WARN_MISMATCH
    verdict = (
        f"Yes: {number(found.mean)} nats of difference per token."
        if good
        else f"No: {number(found.mean)} nats of difference per token. Compare dtype and kernels of engine and trainer "
        "(model.compute_dtype)."
    )
    return Section("alignment", question, verdict, good, rows)


def _meaning(found: Alignment) -> str:
    newest = next((one for one in reversed(found.versions) if one.kind is not None), None)
    if newest is None:
        return "-"
    return newest.what or "-" if newest.kind == "meaning" else f"as stated ({newest.kind})"


def _reliability(report: Report) -> Section:
    found, question = report.reliability, "Can the environments be trusted?"
    lost = found.lost / found.attempts if found.attempts else None
    rows = [
        Row("attempts", ", ".join(f"{n} {name}" for name, n in found.outcomes.items()) or "-", "ended, by outcome"),
        Row("lost", share(lost), "attempts that the infrastructure lost, or nobody can judge: never trained on"),
        Row(
            "lost, by boundary",
            ", ".join(f"{n} {name}" for name, n in found.lost_by_boundary.items()) or "none",
            "the part that failed",
        ),
        Row(
            "reasons",
            ", ".join(f"{n} x {name}" for name, n in list(found.failures.items())[:6]) or "none",
            "of attempts that are no success: boundary and reason",
        ),
        Row("retried", number(found.retried), "attempts beyond the first of their slot"),
        Row("without a verdict", number(found.without_verdict), "the scorer broke or was silent: null, never 0"),
        Row(
            "tasks",
            ", ".join([str(len(found.tasks)), *(f"{n} {name}" for name in STATES
                                                if (n := len(found.tasks_that_are(name))))]),
            "tasks with closed groups; what `headrace show RUN tasks` says of each",
        ),
        *_task_rows(found),
        Row("suspicious rewards", _suspicious(found), "successes with a sign that they were not earned, by sign: "
            "`headrace show RUN episodes --where suspicious`"),
        *(Row("alert", str(alert), "one-sided test at 1 %, over all tests") for alert in found.alerts[:5]),
    ]
    for window in report.figures.rewards:
        rows.append(
            Row(
                f"reward, v{window.first} to v{window.last}",
                number(window.mean),
                f"mean over the counted episodes of all {window.groups} groups that closed then, whatever became "
                "of them",
            )
        )
    if lost is None:
        return Section("reliability", question, "No attempt has ended yet.", None, tuple(rows))
    if lost > WARN_LOST:
        worst = next(iter(found.lost_by_boundary), "")
        return Section(
            "reliability",
            question,
            f"Not yet: {share(lost)} of the attempts were lost, most of them at the boundary {worst}.",
            False,
            tuple(rows),
        )
    if found.alerts:
        return Section("reliability", question, f"Not everywhere: {found.alerts[0]}.", False, tuple(rows))
    if (unearned := found.suspicious_share) is not None and unearned > WARN_SUSPICIOUS:
        said = (f"Their verdicts may not: {share(unearned)} of the successes look unearned; `headrace show "
                f"{report.run} episodes --where suspicious` has the evidence, and rollout.exclude_suspicious leaves "
                "them out.")  # fmt: skip
        return Section("reliability", question, said, False, tuple(rows))
    return Section(
        "reliability", question, f"Yes: {share(lost)} of {found.attempts} attempts were lost.", True, tuple(rows)
    )


def _suspicious(found: Reliability) -> str:
    if not found.suspicious:
        return f"none of {found.successes} successes"
    signs = ", ".join(f"{n} {sign}" for sign, n in found.suspicious.items())
    return f"{share(found.suspicious_share)} of {found.successes} successes: {signs}; {found.excluded} left out"


def _task_rows(found: Reliability) -> Iterator[Row]:
    for name, (meaning, what) in STATES.items():
        if tasks := found.tasks_that_are(name):
            rates = [t.repeats if name == "flaky" else t.recent if name == "saturated" else t.solved for t in tasks[:5]]
            said = ", ".join(f"{t.task}: {rate}" for t, rate in zip(tasks, rates, strict=False))
            yield Row(name.replace("_", " "), said + (", ..." if len(tasks) > 5 else ""), f"{meaning}; {what}")


def _publication(report: Report) -> Section:
    found, question = report.transport, "How fast do new weights reach the engines?"
    sizes = [n for version, n in found.sizes.items() if version]
    rows = [
        Row("latency", spread(found.latency_s), "publication to the weights in place, each version at each replica"),
        Row("pause", spread(found.pause_s), "decoding stood still for it"),
        Row("after the commit", spread(found.commit_to_publication_s), "commit of a version to its publication"),
        *(
            Row(f"of which: {name}", spread(value), "part of the latency, in its order")
            for name, value in found.legs.items()
        ),
        Row(
            "size",
            f"{size(sum(sizes) / len(sizes))} mean, {size(sum(sizes))} in all" if sizes else "-",
            "without version 0",
        ),
        Row("active requests", f"{found.requests}; {found.cut_short} attempts ended by it",
            "what a change of weights does to them (weights.requests)"),
        Row("their caches", found.caches, "keys and values of active requests (weights.caches)"),
        Row("across a change", share(found.crossed), "episodes of closed groups that several versions sampled"),
        Row("changed", share(found.changed.mean) if found.changed else "-", "elements that a delta changes, of all"),
    ]
    if found.latency_s is None:
        return Section(
            "publication", question, "The log can't say: no replica has reported its clocks.", None, tuple(rows)
        )
    interval = report.figures.batch_interval_s
    part = found.pause_s.mean / interval.mean if found.pause_s and interval and interval.mean > 0 else None
    good = part is None or part < WARN_PAUSE
    paused = seconds(found.pause_s.p50 if found.pause_s else None)
    verdict = f"In {seconds(found.latency_s.p50)} (median); decoding stands still for {paused}"
    told = f", {share(part)} of the batch interval" if part is not None else ""
    more = "" if good else ": weights.codec = fast, or fewer changed weights, shorten it"
    return Section("publication", question, f"{verdict}{told}{more}.", good, tuple(rows))


def _evaluation(report: Report) -> Section:
    question, rows = "Does it get better at what matters?", []
    for suite in report.evaluation:
        for score in suite.scores:
            rows.append(
                Row(
                    f"{suite.name}, v{score.version}",
                    f"{score.mean:.3f} +- {score.standard_error:.3f}",
                    f"mean over {score.scored} of {score.items} items, as served",
                )
            )
    risen = [suite for suite in report.evaluation if suite.rise is not None]
    if not risen:
        said = "only one version was evaluated" if rows else "no evaluation was made"
        return Section(
            "evaluation",
            question,
            f"The log can't say: {said}; rewards of training are no substitute.",
            None,
            tuple(rows),
        )
    parts, good = [], True
    for suite in risen:
        rise, error = suite.rise or 0.0, suite.rise_error or 0.0
        parts.append(
            f"{suite.name} {suite.scores[0].mean:.3f} to {suite.scores[-1].mean:.3f} "
            f"({rise:+.3f}, standard error {error:.3f})"
        )
        good &= rise > 2 * error
    return Section(
        "evaluation", question, f"{'Yes' if good else 'Not beyond doubt'}: {'; '.join(parts)}.", good, tuple(rows)
    )


def _spent(report: Report, ledger: Ledger) -> Section:
    waits = report.figures.waits
    total = ledger.tokens.total()
    rows = [
        Row(
            f"tokens: {account}",
            f"{ledger.tokens[account]:,} ({share(ledger.tokens[account] / total)})",
            ", ".join(f"{name} {n:,}" for name, n in ledger.reasons.get(account, {}).items()) or _ACCOUNTS[account],
        )
        for account in Account
        if ledger.tokens[account]
    ]
    rows.append(Row("context tokens", f"{ledger.context_tokens:,}", "prompt and environment; in no account"))
    for who, spent in (("engines", waits.engine_s), ("trainer", waits.trainer_s), ("episodes", waits.steps_s)):
        for name, part in shares(spent).items():
            rows.append(Row(f"{who}: {name}", f"{seconds(spent[name])} ({share(part)})", _TIMES[who]))
    if waits.gpu_hours is not None:
        rows.append(Row("GPU-hours", f"{waits.gpu_hours:.2f}", "of workers and trainer"))
    trained = ledger.tokens[Account.TRAINED] / total if total else None
    if not ledger.closes:
        failures = sum(ledger.failed.values())
        verdict = f"The account does not close: {failures} failures; `headrace ledger {report.run}` names them."
        return Section("spent", "Where did tokens and hours go?", verdict, False, tuple(rows))
    busy = shares(waits.engine_s).get("busy")
    verdict = (
        "No token has been logged yet."
        if not total
        else f"{share(trained)} of {total:,} model tokens were trained; every token has its account."
    )
    if busy is not None:
        verdict += f" Engines decoded {share(busy)} of their time."
    return Section("spent", "Where did tokens and hours go?", verdict, True if total else None, tuple(rows))


_TIMES = {
    "engines": "of all engines, by their heartbeats",
    "trainer": "as it measures itself, or from the log; without its wait for the first batch",
    "episodes": "of all ended attempts, one beside the other",
}
_ACCOUNTS: dict[str, str] = {
    Account.TRAINED: "had weight in a committed batch",
    Account.MASKED: "in a committed batch, without weight",
    Account.EXCLUDED: "never trained",
    Account.SURPLUS: "reserves that were not needed",
    Account.SUPERSEDED: "earlier attempts",
    Account.FOREIGN: "of writers without a lease",
    Account.LATE: "after their group's closure",
    Account.OPEN: "not decided yet",
}

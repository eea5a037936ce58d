"""`headrace replay`: train a run's versions again and compare the bits, or see what would have come out otherwise.

A replay writes nothing, to no topic. With `--set` or `--verifier` it is a counterfactual: a run of its own under
another id, shown beside the one that was, which stops where the batches no longer say anything about it.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from headrace.schemas.errors import SettingsError
from headrace.schemas.events import COUNTERFACTUAL
from headrace.schemas.settings import COUNTERFACTUAL as MAY_DIFFER
from headrace.schemas.settings import RunSettings, changed
from headrace.schemas.topics import RunTopics

from .changing import parsed
from .plain import dumps
from .reading import Bootstrap, ConfigOption, Json, RunArgument, opened_run, say
from .settings import kafka_config, load_site, state_dir

if TYPE_CHECKING:
    from headrace.consumers.run import Run
    from headrace.trainer.replay import Again, Beside, Replay

MIN_ESS = 0.5  # below half, most of what a batch says of the other policy rests on few of its tokens
BESIDE = ("reward", "loss", "grad_norm", "tokens")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("replay")(replay_command)


def replay_command(
    run: RunArgument,
    first: Annotated[int, typer.Option("--from-version", "--from", help="begin with the weights of this version")] = 0,
    last: Annotated[int | None, typer.Option("--to-version", "--to", help="the last version; default: newest")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="counterfactual: another setting of loss, "
                                                      "optimizer or staleness; repeat it", metavar="KEY=VALUE")] = None,
    verifier: Annotated[str | None, typer.Option(help="counterfactual: judge the recorded answers anew, with "
                                                 "score(item, text)", metavar="MODULE:FUNCTION")] = None,
    name: Annotated[str | None, typer.Option("--as", help="run id of the counterfactual", metavar="NEW")] = None,
    min_ess: Annotated[float, typer.Option(help="stop where the effective sample size is a smaller share")] = MIN_ESS,
    threads: Annotated[int | None, typer.Option(help="CPU threads (over the file's)")] = None,
    episode: Annotated[str | None, typer.Option(help="repeat this episode's tool calls in a fresh sandbox instead",
                                                metavar="GROUP/SLOT")] = None,
    attempt: Annotated[int | None, typer.Option(help="of the episode; default: the last one")] = None,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:  # fmt: skip
    """Train versions again and compare them bit for bit; with --set or --verifier, see what would have come out.

    With --episode, repeat one episode's tool calls in a fresh sandbox: exit 0 where its outcome is the same.
    """
    if episode is not None:
        docker = load_site(config, bootstrap).docker
        raise typer.Exit(0 if _episode(opened_run(run, bootstrap, config), episode, attempt, docker, as_json) else 1)
    import torch

    from headrace.trainer.replay import Replay

    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    site = load_site(config, bootstrap)
    kafka, topics = kafka_config(site), RunTopics(run, site.prefix)
    if (count := threads or site.trainer_threads) is not None:
        torch.set_num_threads(count)
    torch.use_deterministic_algorithms(True)
    other = bool(changes or verifier)
    if other != (name is not None):
        raise SettingsError("a counterfactual needs both: what is other (--set, --verifier), and --as NEW, the run id "
                            "under which it is recorded")  # fmt: skip
    with Replay(kafka, topics, state_dir(site, run), site.trainer_device) as replay:
        last = replay.newest if last is None else last
        if name is not None:
            fine = _counterfactual(kafka, replay, RunTopics(name, site.prefix), run, first, last, changes or [],
                                   verifier, min_ess, as_json)  # fmt: skip
        else:
            fine = _replay(replay, run, first, last, as_json)
    raise typer.Exit(0 if fine else 1)


# ---------------------------------------------------------------------------------------------------------- replay


def _replay(replay: Replay, run: str, first: int, last: int, as_json: bool) -> bool:
    """Whether all versions whose hashes hold came out as they were committed. Stops at the first that didn't."""
    rows = []
    for again in replay.again(first, last):
        rows.append(again)
        if not as_json:
            say([_line(again)])
        if again.holds and not again.equal:
            break
    fine = all(again.equal or not again.holds for again in rows)
    if as_json:
        say([dumps({"run": run, "from": first, "to": last, "equal": fine, "versions": [_row(one) for one in rows]})])
    elif fine:
        passed = sum(not again.holds for again in rows)
        apart = f", {passed} of them passed over by a rebase" if passed else ""
        say([f"run {run}: versions {first + 1} to {last} came out bit for bit as they were committed{apart}"])
    else:
        say([f"run {run}: version {rows[-1].recorded.version} came out differently; of the fingerprint differs: "
             f"{', '.join(rows[-1].differs) or 'nothing'}"])  # fmt: skip
    return fine


def _line(again: Again) -> str:
    said = "equal" if again.equal else "DIFFERENT" if again.holds else "another (its hashes hold no more)"
    report = again.report
    return (f"v{again.recorded.version:<4} served {again.served_hash.hex()}  train {again.train_hash.hex()}  {said}  "
            f"reward {report.reward_mean:.3f}  loss {report.loss:+.4f}")  # fmt: skip


def _row(again: Again) -> dict[str, Any]:
    return {"version": again.recorded.version, "equal": again.equal, "holds": again.holds,
            "served_hash": again.served_hash.hex(), "train_hash": again.train_hash.hex(),
            "recorded_served_hash": again.recorded.served_hash.hex(),
            "recorded_train_hash": again.recorded.train_hash.hex(), "fingerprint_differs": list(again.differs),
            "reward": again.report.reward_mean, "loss": again.report.loss}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ an episode


def _episode(run: Run, episode: str, attempt: int | None, docker: str | None, as_json: bool) -> bool:
    """Whether its outcome is the same."""
    from .reproducing import reproduce
    from .turns import again_lines

    found = reproduce(run, episode, attempt, docker, lambda one: None if as_json else say(again_lines(one)))
    was = found.recording.ended
    assert was is not None
    first = found.first
    if as_json:
        differs = None if first is None else {"call": first.number, "turn": first.call.turn, "name": first.call.name,
                                              "arguments": first.call.arguments, "differs": first.differs}  # fmt: skip
        say([dumps({"run": run.name, "episode": episode, "attempt": found.recording.attempt, "how": found.how,
                    "calls": found.calls, "of": len(found.recording.calls), "first_difference": differs,
                    "same": found.same, "was": {"outcome": was.outcome, "reason": was.reason, "reward": was.reward},
                    "now": {"outcome": found.outcome, "reason": found.reason, "reward": found.reward,
                            "error": found.error}})])  # fmt: skip
        return found.same
    made = f", {found.calls} of {len(found.recording.calls)} calls made again" if found.recording.calls else ""
    said = [f"{episode}, attempt {found.recording.attempt}: {found.how}{made}"]
    if first is not None:
        said += [f"first difference: call {first.number} in turn {first.call.turn}"]
    elif found.calls:
        said += ["no difference"]
    ends = [f"{outcome} ({reason}), reward {'none' if reward is None else f'{reward:g}'}" for outcome, reason, reward in
            ((was.outcome, was.reason, was.reward), (found.outcome, found.reason, found.reward))]  # fmt: skip
    said += [f"the same outcome: {ends[0]}" if found.same else f"ANOTHER OUTCOME: was {ends[0]}; now {ends[1]}"]
    say([*said, *([f"  {found.error}"] if found.error and not found.same else [])])
    return found.same


# -------------------------------------------------------------------------------------------------- counterfactual


def _counterfactual(kafka: dict[str, Any], replay: Replay, topics: RunTopics, run: str, first: int, last: int,
                    words: list[str], verifier: str | None, min_ess: float, as_json: bool) -> bool:  # fmt: skip
    """Whether it came through to the last version."""
    from headrace.trainer.replay import derived

    from .create import create_run
    from .verifying import ScoreVerifier

    changes = parsed(words)

    def change(settings: RunSettings) -> RunSettings:
        try:
            return changed(settings, changes, MAY_DIFFER, f"here: the batches of {run!r} were made under it; a "
                           f"counterfactual may change {', '.join(one + '*' for one in MAY_DIFFER)}")  # fmt: skip
        except ValidationError as error:
            raise SettingsError("; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
                                ) from error  # fmt: skip
        except ValueError as error:
            raise SettingsError(str(error)) from error

    judge = ScoreVerifier(verifier, replay.settings.rollout.score_timeout_s) if verifier else None
    try:
        create_run(kafka, topics, change(replay.settings), derived(
            COUNTERFACTUAL, run, replay.version(first), changes=json.dumps(changes, sort_keys=True), verifier=verifier,
        ))  # fmt: skip
        rows: list[Beside] = []
        if not as_json:
            say([f"{'version':8}  " + "  ".join(f"{name:>19}" for name in BESIDE) + "   ess",
                 f"{'':8}  " + "  ".join(f"{'was':>9} {'would be':>9}" for _ in BESIDE)])  # fmt: skip
        for beside in replay.counterfactual(topics, first, last, change, judge):
            rows.append(beside)
            if not as_json:
                say([_beside(beside)])
            if beside.ess < min_ess:
                break
    finally:
        if judge is not None:
            judge.close()
    ended = rows[-1].ess >= min_ess
    if as_json:
        versions = [{"version": one.recorded.version, "as": one.version, "ess": one.ess, "was": one.recorded.metrics,
                     "would_be": one.metrics} for one in rows]  # fmt: skip
        say([dumps({"run": run, "as": topics.run, "from": first, "to": last, "stopped": not ended, "min_ess": min_ess,
                    "versions": versions})])  # fmt: skip
    elif ended:
        say([f"recorded as run {topics.run}, versions 0 to {rows[-1].version}: `headrace report {topics.run} --against "
             f"{run}`"])  # fmt: skip
    else:
        say([f"stopped at version {rows[-1].recorded.version}: the effective sample size is {rows[-1].ess:.2f} of its "
             f"batch, below {min_ess:g}: what {run} sampled says too little about these weights from here on "
             "(--min-ess goes on)"])  # fmt: skip
    return ended


def _beside(one: Beside) -> str:
    pairs = [(one.recorded.metrics.get(name), one.metrics.get(name)) for name in BESIDE]
    figures = "  ".join(f"{_figure(was)} {_figure(would_be)}" for was, would_be in pairs)
    return f"v{one.recorded.version:<7}  {figures}  {one.ess:.2f}"


def _figure(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:>9.4g}"

"""`headrace ledger`: the account of a run as people and programs get to see it. It writes nothing, to no topic.

Which numbers there are is `headrace.consumers`' to say; this module decides how they are asked for and laid out.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import typer

from headrace.consumers.asof import OLDEST_MS, AsOf
from headrace.consumers.figures import figures
from headrace.consumers.ledger import Ledger, audit
from headrace.consumers.run import Run
from headrace.consumers.source import LogSource
from headrace.consumers.tables import Row, read_small
from headrace.schemas.errors import SettingsError
from headrace.schemas.outcomes import Account

from .plain import dumps, jsonable, table
from .reading import Bootstrap, ConfigOption, Json, RunArgument, figure_lines, opened_run, say

_UNITS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])(?: ago)?")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(ledger)


def ledger(
    run: RunArgument,
    at: Annotated[
        str | None,
        typer.Option(help="the account as it stood: an offset of `batches` (the last decision that counts), a time "
                     "(2026-01-31T12:00, or ms since the epoch), or how long ago (2h)"),
    ] = None,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:  # fmt: skip
    """Prove that every account closes: groups, tokens, and every record that they rest on. Exit 1 where one doesn't."""
    source: LogSource = opened_run(run, bootstrap, config).snapshot()
    if at is not None:
        source = as_of(source, at, int(time.time() * 1000))
    found = audit(source)
    say([dumps(ledger_row(found, at))] if as_json else ledger_lines(found, at))
    if not found.closes:
        raise typer.Exit(1)


def as_of(source: LogSource, text: str, now_ms: int) -> AsOf:
    """The source as it stood `--at` that moment. Raises SettingsError where the text names none."""
    if text.isdigit():
        number = int(text)
        return AsOf(source, offset=number) if number < OLDEST_MS else AsOf(source, time_ms=number)
    if ago := _AGO.fullmatch(text):
        return AsOf(source, time_ms=now_ms - round(float(ago[1]) * _UNITS[ago[2]]))
    with contextlib.suppress(ValueError):
        return AsOf(source, time_ms=round(datetime.fromisoformat(text).timestamp() * 1000))
    raise SettingsError(f"--at {text!r}: give an offset of `batches`, a time such as 2026-01-31T12:00 or 1769860800000 "
                        "(ms since the epoch), or how long ago, such as 30m, 2h or 1d")  # fmt: skip


def account_lines(run: Run) -> list[str]:
    """The account of a run, as a demo or a report ends with it: ledger and figures."""
    source = run.snapshot()
    return [*ledger_lines(audit(source)), *figure_lines(figures(read_small(source)))]


def ledger_row(found: Ledger, at: str | None = None) -> dict[str, Any]:
    """The account as one JSON object; `at`: the moment that was asked for."""
    bias = None if found.bias is None else {**jsonable(found.bias), "significant": found.bias.significant}
    row: dict[str, Any] = jsonable(found)
    return row | {"closes": found.closes, "at": at, "bias": bias}


def ledger_lines(found: Ledger, at: str | None = None) -> Iterator[str]:
    """The account as a person reads it: groups, tokens, lengths, findings, and whether it closes."""
    groups: list[Row] = [
        {"groups": count, "closure": closure, "disposition": disposition if disposition != closure else None}
        for (closure, disposition), count in sorted(found.groups.items(), key=lambda item: -item[1])
    ]
    tokens: list[Row] = []
    for account in Account:
        if found.tokens[account]:
            reasons = ", ".join(f"{name} {n}" for name, n in found.reasons.get(account, {}).items())
            tokens.append({"tokens": found.tokens[account], "account": str(account), "of which": reasons or None})
    tokens.append({"tokens": found.tokens.total(), "account": "all"})
    yield f"run {found.run}{f' as of {at}' if at else ''}: {found.versions} versions, {found.batches} batches"
    yield from table(groups)
    yield ""
    yield from table(tokens)
    if found.reuses:
        used = ", ".join(f"{n} {account}" for account, n in found.reused_tokens.items() if n)
        yield f"reused by reference, in no account above: {found.reuses} successes, tokens {used or 'none'}"
    if found.lengths:
        yield ""
        yield from table(list(length_rows(found)))
        if found.bias is not None and found.bias.significant:
            yield f"bias: {found.bias}"
    yield ""
    raw = f"{found.logged_tokens} model tokens" if found.retained else "partly deleted; `groups` holds the accounts"
    yield f"trajectories: {raw}; {found.duplicates} repeated events, {found.dead_letters} dead letters"
    yield from found.failures
    yield "closes" if found.closes else f"does not close: {sum(found.failed.values())} failures"


def length_rows(found: Ledger) -> Iterator[Row]:
    """Of each length of episodes, where its tokens went, in percent."""
    for upto in dict.fromkeys(row.upto for row in found.lengths):
        rows = [row for row in found.lengths if row.upto == upto]
        episodes, tokens = sum(row.episodes for row in rows), sum(row.tokens for row in rows)
        shares: Counter[str] = Counter()
        for row in rows:
            split = row.account == Account.EXCLUDED and row.reason
            shares[str(row.reason) if split else row.account] += row.tokens
        length = "unknown" if upto is None else f"<= {upto}" if upto else "none"
        yield {"tokens an episode": length, "episodes": episodes or None, "tokens": tokens,
               **{f"{name} %": round(100 * shares[name] / tokens, 1) if shares[name] else None
                  for name in _columns(found)}}  # fmt: skip


def _columns(found: Ledger) -> Iterator[str]:
    """Accounts in their order; of *excluded*, each reason."""
    for account in Account:
        if account == Account.EXCLUDED:
            yield from sorted(found.reasons.get(account, {}))
        else:
            yield str(account)

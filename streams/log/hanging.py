"""Tells a transaction that hangs from one that is merely open, so that nobody waits for ever in silence.

Kafka acknowledges a commit before its markers are written. A single node that dies in between may never write them:
read-committed readers then stand still at the last stable offset, and no time-out ends that. An open transaction is
aborted by the broker at its time-out, so what lasts longer hangs. A role that has just taken its transactional id over
need not wait so long: what its predecessors wrote is settled then, or never.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from headrace.schemas.errors import HungTransaction, LogError

from .clients import KafkaConfig
from .reader import Position, Reader

SETTLED_WITHIN_S = 30.0  # markers take milliseconds; a broker that is just coming back takes seconds
PAUSE_S = 0.05


def check_settled(config: KafkaConfig, places: Iterable[Position], within_s: float = SETTLED_WITHIN_S) -> None:
    """Call after taking a transactional id over, with the partitions to which nobody else writes transactions: all
    that stands there now can be read when this returns. Raises HungTransaction, LogError."""
    with Reader(config) as stable, Reader(config, isolation="read_uncommitted") as everything:
        written = {place: everything.bounds(*place)[1] for place in places}
        end = time.monotonic() + within_s
        for place, high in written.items():
            while (readable := stable.bounds(*place)[1]) < high:
                if time.monotonic() > end:
                    raise hung(config, place, readable, high, within_s)
                time.sleep(PAUSE_S)


def standing(config: KafkaConfig, place: Position) -> tuple[int, int] | None:
    """(last stable offset, high watermark) as the broker says now; None where it doesn't answer."""
    try:
        with Reader(config) as stable, Reader(config, isolation="read_uncommitted") as everything:
            return stable.bounds(*place, timeout_s=5.0)[1], everything.bounds(*place, timeout_s=5.0)[1]
    except LogError:
        return None


def hung(config: KafkaConfig, place: Position, readable: int, written: int, waited_s: float) -> HungTransaction:
    """The error that says what hangs, and how to end it. `readable` and `written` are offsets."""
    topic, partition = place
    tool = f"kafka-transactions.sh --bootstrap-server {config.get('bootstrap.servers')}"
    return HungTransaction(
        f"{topic}[{partition}]@{readable}: a transaction hangs here: what follows is written up to {written}, and for "
        f"{waited_s:.0f} s nothing of it could be read. Its broker died after acknowledging a commit and before "
        "marking it. Nobody has acted upon its records: stop the run, abort it, and start the run again. "
        f"To see it: `{tool} describe-producers --topic {topic} --partition {partition}`; to abort it: "
        f"`{tool} abort --topic {topic} --partition {partition} --start-offset {readable}`; on the development broker "
        "`headrace broker mend` does both"
    )

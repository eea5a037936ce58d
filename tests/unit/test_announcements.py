"""Announced schemas vouch for themselves, also where no later record of their chain does."""

from __future__ import annotations

import pytest

from headrace.schemas.chain import Chain
from headrace.schemas.codec import own_schemas
from headrace.schemas.events import RunCreated, SchemaAdded, Version
from headrace.schemas.topics import POLICY
from tests.memory_log import MemoryLog
from tests.tampering import check_every_tampering


def announced(log: MemoryLog, chain: Chain, count: int, skip: int = 0) -> None:
    last = chain.number + count - 1
    for name, fingerprint, schema in list(own_schemas())[skip : skip + count]:
        log.append(POLICY, 0, chain.extend(SchemaAdded(**chain.link(), writer="create", name=name, schema=schema,
                                                       fingerprint=fingerprint, last=last)))  # fmt: skip


@pytest.mark.parametrize("resumed", [0, 2])
def test_every_way_to_tamper_with_announced_schemas_is_noticed(resumed: int) -> None:
    log, chain = MemoryLog.empty("r", {}), Chain()
    created = RunCreated(**chain.link(), writer="create", run="r", settings="{}", software="", created_ms=0)
    log.append(POLICY, 0, chain.extend(created))
    trainer = Chain(0, chain.previous)
    announced(log, chain, 3)
    announced(log, chain, resumed, skip=3)  # by a newer version
    version = Version(**trainer.link(), writer="trainer", version=0, parent=-1, batch=0, batch_offset=-1,
                      batch_digest=b"", hash_algorithm="", served_hash=b"", train_hash=b"", rho=0.0, rho_tokens=0,
                      groups=(), metrics={}, fingerprint="{}", committed_ms=0)  # fmt: skip
    log.append(POLICY, 0, trainer.extend(version))
    assert check_every_tampering(log) > 3 * (3 + resumed)

"""What an update of weights does to requests and caches, and when a replica is fenced."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace.producers.updating import Fence, UpdatePolicy
from headrace.schemas.errors import WrongBase
from headrace.schemas.settings import WeightSettings

REFUSED = [(4, WrongBase("another base"))]


def policy(requests: str, caches: str) -> UpdatePolicy:
    return UpdatePolicy.of(WeightSettings.model_validate({"requests": requests, "caches": caches}))


@pytest.mark.parametrize("requests", ["finish", "abort"])
def test_pair_that_leaves_no_cache_to_keep_is_refused_with_the_reason(requests: str) -> None:
    with pytest.raises(ValidationError, match=f"'{requests}' leaves no active request whose cache could be kept"):
        WeightSettings.model_validate({"requests": requests, "caches": "keep"})


def test_finish_lets_nothing_begin_and_applies_when_nothing_is_active() -> None:
    finish = policy("finish", "clear")
    assert finish.begins(ready=False) and not finish.begins(ready=True)
    assert not finish.applies(active=3) and finish.applies(active=0)
    assert not finish.aborts and not finish.recomputes


def test_abort_and_keep_apply_at_once() -> None:
    for one in (policy("abort", "clear"), policy("keep", "clear"), policy("keep", "keep")):
        assert one.applies(active=3) and one.begins(ready=True)
    assert policy("abort", "clear").aborts and not policy("keep", "clear").aborts
    assert policy("keep", "clear").recomputes and not policy("keep", "keep").recomputes
    assert WeightSettings().requests == WeightSettings().caches == "keep"


def test_replica_is_fenced_when_an_update_is_refused_until_it_has_caught_up() -> None:
    fence = Fence(60.0)
    assert fence.observe(3, 3, refusals=[], waits=False, now=0.0) is None
    assert fence.observe(3, 4, refusals=[], waits=False, now=1.0) is None
    assert "version 4 was refused: another base" in str(fence.observe(3, 4, refusals=REFUSED, waits=False, now=1.1))
    assert fence.observe(3, 5, refusals=REFUSED, waits=False, now=2.0) is not None, "a newer one alone mends nothing"
    assert fence.observe(4, 5, refusals=REFUSED, waits=False, now=3.0) is not None, "it is still on its way"
    assert fence.observe(5, 5, refusals=REFUSED, waits=False, now=4.0) is None
    assert fence.observe(5, 6, refusals=REFUSED, waits=False, now=5.0) is None, "that one is forgiven"


def test_replica_that_lags_is_fenced_and_one_that_is_always_one_behind_is_not() -> None:
    fence = Fence(10.0)
    for second in range(100):  # a version a second, served a second later
        assert fence.observe(second, second + 1, [], False, float(second)) is None
    assert fence.observe(99, 110, [], False, 108.0) is None
    assert "published for 11 s" in str(fence.observe(99, 112, [], False, 110.4))
    assert fence.observe(112, 112, [], False, 111.0) is None


def test_replica_that_waits_for_its_requests_or_an_evaluation_is_not_late() -> None:
    fence = Fence(10.0)
    for second in range(0, 100, 5):
        assert fence.observe(3, 9, [], waits=True, now=float(second)) is None
    assert fence.observe(3, 9, [], waits=False, now=104.0) is None, "its time begins now"
    assert fence.observe(3, 9, [], waits=False, now=120.0) is not None

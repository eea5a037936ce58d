"""How many sandboxes are started: pure, so every case is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.producers.sandboxes import Owner
from headrace.producers.sandboxes.sizing import Demand, Size, Standing, quantile, to_start

SIZE = Size(total=10, starting=4, least=1, most=3)


def standing(in_use: int = 0, ready: int = 0, starting: int = 0, ordered: int = 0, spare: int = 0) -> Standing:
    return Standing(in_use, ready, starting, ordered, spare)


@pytest.mark.parametrize(
    ("now", "spare", "expected"),
    [
        (standing(), 2, (0, 2)),
        (standing(ordered=9), 2, (4, 0)),  # no more at once
        (standing(ordered=2), 3, (2, 2)),
        (standing(in_use=9, ordered=5), 2, (1, 0)),  # the last place goes to an order
        (standing(in_use=8), 3, (0, 1)),  # and a spare one leaves a place for one
        (standing(in_use=9), 3, (0, 0)),
        (standing(in_use=10, ordered=5), 0, (0, 0)),
        (standing(ready=2, spare=2), 2, (0, 0)),
        (standing(starting=4, ordered=3), 2, (0, 0)),
        (standing(in_use=12, ordered=3), 3, (0, 0)),  # the size was lowered meanwhile
    ],
)
def test_orders_come_first_and_the_limits_hold(now: Standing, spare: int, expected: tuple[int, int]) -> None:
    assert to_start(SIZE, now, spare) == expected


@given(*(st.integers(0, 20) for _ in range(6)))
def test_no_limit_is_ever_passed_and_no_order_waits_in_front_of_a_free_place(
    in_use: int, ready: int, starting: int, ordered: int, spare: int, wanted: int
) -> None:
    ours, extra = to_start(SIZE, Standing(in_use, ready, starting, ordered, min(spare, ready + starting)), wanted)
    exist = in_use + ready + starting
    assert 0 <= ours <= ordered and extra >= 0
    if ours + extra:
        assert exist + ours + extra <= SIZE.total and starting + ours + extra <= SIZE.starting
    if ours < ordered:
        assert exist + ours >= SIZE.total or starting + ours >= SIZE.starting
        assert not extra


def test_spare_ones_follow_demand_times_set_up_within_bounds() -> None:
    demand, size = Demand(), Size(20, 20, 1, 8)
    assert demand.spare(0.0, size) == 1  # never empty
    for second in range(60):
        demand.took(float(second))
        demand.set_up(3.0)
    assert demand.spare(59.0, size) == 3  # one a second, three seconds each
    for _ in range(10):
        demand.set_up(100.0)
    assert demand.spare(59.0, size) == 8  # a tail counts, up to the bound
    assert demand.spare(500.0, size) == 1  # demand is over


def test_quantile_is_the_value_that_a_share_does_not_exceed() -> None:
    assert [quantile(list(range(100)), q) for q in (0.0, 0.5, 0.95)] == [0, 50, 95]
    assert quantile([], 0.95) == 0.0


@pytest.mark.parametrize("wrong", [(0, 1, 0, 0), (4, 0, 0, 0), (4, 1, 3, 2), (4, 1, 0, 5)])
def test_a_size_that_cannot_be_is_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Size(*wrong)


def test_a_label_names_its_owner_and_nothing_else_does() -> None:
    me = Owner.myself()
    assert me.alive and Owner.of_label(me.label("ab12")) == me
    assert not Owner(me.pid, me.born + 1).alive  # the number came again
    for other in ("", "x", "1.2", "1.2.", "a.2.c", "1.b.c"):
        assert Owner.of_label(other) is None

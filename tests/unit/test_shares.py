"""Fixed shares: every partition belongs to one of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import SettingsError
from headrace.streams.shares import WHOLE, share


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_cover_each_partition_once(of: int, more: int) -> None:
    partitions = of + more - 1
    shares = [share(f"{i}/{of}", partitions) for i in range(of)]
    assert sorted(p for one in shares for p in one) == list(range(partitions))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_default_share_is_the_whole() -> None:
    assert share(WHOLE, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "a/b", "1/2/3", " 0/1"])
def test_what_is_no_share_is_refused_and_named(text: str) -> None:
    with pytest.raises(SettingsError, match="write i/n with 0 <= i < n"):
        share(text, 4)


def test_share_without_a_partition_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most 4 assemblers"):
        share("4/5", 4)

"""The parts of the delta codec: positions, octaves and their ranks, the line of values, columns of bytes."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.schemas.delta.numbers import octave, on_line
from headrace.schemas.delta.positions import put_gaps, take_gaps
from headrace.schemas.delta.ranks import from_ranks, to_ranks
from headrace.schemas.delta.streams import Columns, Writer, varint


def through(positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    out = Writer()
    put_gaps(out, positions)
    data = out.bytes()
    columns = Columns(memoryview(data))
    found = take_gaps(columns, positions.size)
    columns.end()
    return found, len(data)


@given(
    gaps=st.lists(
        st.integers(1, 3) | st.integers(1, 300) | st.integers(1, 1 << 20) | st.integers(1, 1 << 43),
        min_size=1, max_size=300,
    )
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_any_ascending_positions_arrive(gaps: list[int]) -> None:
    positions = np.cumsum(np.array(gaps, np.int64)) - 1
    assert np.array_equal(through(positions)[0], positions)


def test_rows_of_different_density_arrive_together() -> None:
    """Everything changed, every third, one in a hundred, one in a million, and two far apart: each row has its cut."""
    rng = np.random.default_rng(1)
    means = [1, 3, 100, 1_000_000]
    gaps = [rng.geometric(1 / mean, 6000) for mean in means]
    positions = np.cumsum(np.concatenate([*gaps, [1 << 42, 1]]))
    assert np.array_equal(through(positions)[0], positions)


@pytest.mark.parametrize("mean", [2, 10, 95, 1000, 40_000])
def test_positions_at_random_cost_hardly_more_than_their_entropy(mean: int) -> None:
    count, p = 50_000, 1 / mean
    positions = np.cumsum(np.random.default_rng(2).geometric(p, count)) - 1
    found, size = through(positions)
    assert np.array_equal(found, positions)
    entropy = -np.log2(p) - (1 - p) / p * np.log2(1 - p)
    assert 8 * size / count < entropy + 0.12


@given(octaves=st.lists(st.integers(90, 110), min_size=1, max_size=400), share=st.floats(0.01, 1), seed=st.integers(0))
@settings(max_examples=60, deadline=None)
def test_ranks_lead_back_to_positions(octaves: list[int], share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = (np.array(octaves, np.uint16) << 7) | rng.integers(0, 128, len(octaves)).astype(np.uint16)
    positions = np.flatnonzero(rng.random(bits.size) < share)
    if not positions.size:
        positions = np.array([bits.size - 1])
    ranges = np.split(bits, sorted(rng.integers(0, bits.size, 3).tolist()))
    ranks, counts = to_ranks("bfloat16", ranges, positions)
    assert (np.diff(ranks) > 0).all() and counts.sum() == bits.size
    assert np.array_equal(from_ranks("bfloat16", ranges, ranks, counts), positions)


def test_ranks_in_another_base_are_refused() -> None:
    bits = np.random.default_rng(3).normal(size=1000).astype(np.float16).view(np.uint16)
    ranks, counts = to_ranks("float16", [bits], np.arange(0, 1000, 7))
    other = bits.copy()
    other[500] ^= 1 << 12
    with pytest.raises(ValueError, match="other octaves"):
        from_ranks("float16", [other], ranks, counts)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_line_orders_bits_as_values_and_leads_back(dtype: str) -> None:
    values = np.unique(np.random.default_rng(4).normal(size=1000).astype(dtype))
    values = np.concatenate([[-np.inf], values, [np.inf]]).astype(dtype)
    bits = values.view(f"u{values.itemsize}")
    line = on_line(dtype, bits)
    assert (np.diff(line.view(f"i{values.itemsize}").astype(np.int64)) > 0).all()
    assert np.array_equal(on_line(dtype, line), bits)


def test_line_gives_each_pattern_a_place_of_its_own() -> None:
    """-0.0 and the NaNs too."""
    every = np.arange(65536, dtype=np.uint16)
    for dtype in ("bfloat16", "float16", "int16", "unknown"):
        assert np.unique(on_line(dtype, every)).size == 65536
        assert np.array_equal(on_line(dtype, on_line(dtype, every)), every)
    zeros = on_line("bfloat16", np.array([0x0000, 0x8000], np.uint16)).view(np.int16)
    assert zeros.tolist() == [0, -1]


def test_octave_is_the_exponent() -> None:
    ones = {"bfloat16": (0x3F80, "u2", 127), "float16": (0x3C00, "u2", 15), "float32": (0x3F800000, "u4", 127),
            "float8_e4m3fn": (0x38, "u1", 7), "float8_e5m2": (0x3C, "u1", 15)}  # fmt: skip
    for dtype, (one, bits, exponent) in ones.items():
        sign = 1 << (8 * np.dtype(bits).itemsize - 1)
        assert octave(dtype, np.array([one, one | sign], bits)).tolist() == [exponent, exponent]
    assert octave("int8", np.arange(256, dtype=np.uint8)).max() == 0


@given(numbers=st.lists(st.integers(0, 2**63 - 1)), raw=st.binary(max_size=300))
def test_columns_and_numbers_arrive(numbers: list[int], raw: bytes) -> None:
    out = Writer()
    out.numbers(numbers)
    out.put(raw)
    out.number(7)
    columns = Columns(memoryview(out.bytes()))
    assert columns.numbers() == numbers
    assert columns.take(len(raw)).tobytes() == raw
    assert columns.number() == 7
    columns.end()


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80" * 12 + b"\x01", varint(5) + varint(6) + b"123456",
                                  varint(5) + varint(5) + b"1234", varint(1 << 40) + varint(3) + b"abc",
                                  varint(5) + varint(3) + b"abc"])  # fmt: skip
def test_column_that_ends_early_or_asks_for_too_much_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, zstandard.ZstdError)):
        Columns(memoryview(data)).take()

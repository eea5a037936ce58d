"""What the codec knows of number formats: the order of values, and how big one is.

Both are functions of the bits alone, so trainer and receiver agree without a word. A step of an optimizer is a few
places along the line of values; and how likely it is to change a weight at all, and by how many places, depends on the
weight's exponent: its unit in the last place halves with each octave, the step stays the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .state import Bits

# Bits of mantissa of formats with a sign bit on top and an exponent below it. Others (int8, uint8, ...) are integers:
# their own order modulo 2^w, and all of one size.
_MANTISSA = {
    "bfloat16": 7, "float16": 10, "float32": 23, "float8_e4m3fn": 3, "float8_e4m3fnuz": 3, "float8_e4m3b11fnuz": 3,
    "float8_e5m2": 2, "float8_e5m2fnuz": 2,
}  # fmt: skip
OCTAVES = 256  # no format has more exponents


def on_line(dtype: str, bits: Bits) -> Bits:
    """Bits as places along the line of values, modulo 2^w: equal steps up or down are equal differences. -0.0 lies one
    below +0.0, so every pattern has a place of its own. The function is its own inverse."""
    if dtype not in _MANTISSA:
        return bits
    one = bits.dtype.type(1)
    sign = bits >> bits.dtype.type(8 * bits.itemsize - 1)
    line: Bits = bits ^ (np.negative(sign) >> one)
    return line


def mantissa_of(dtype: str) -> int:
    """Its bits; -1 for formats without an exponent."""
    return _MANTISSA.get(dtype, -1)


def octave(dtype: str, bits: Bits) -> NDArray[np.uint8]:
    """The exponent's bits of each ([n]); 0 for formats without one."""
    mantissa = mantissa_of(dtype)
    if mantissa < 0:
        return np.zeros(bits.size, np.uint8)
    exponents = bits >> bits.dtype.type(mantissa)
    exponents &= bits.dtype.type((1 << 8 * bits.itemsize - 1 - mantissa) - 1)
    octaves: NDArray[np.uint8] = exponents.astype(np.uint8)
    return octaves

"""Decides whether the codec's inner loops run compiled (native.c) or in numpy.

Both give the same to the bit. The compiled ones are left out where there was no compiler at the install; then this is
None, and applying takes three times as long.
"""

from __future__ import annotations

from types import ModuleType

compiled: ModuleType | None
try:
    from . import _native as compiled
except ImportError:
    compiled = None

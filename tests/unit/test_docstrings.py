"""The linter of docstrings finds what it says that it finds, and nothing in code that says it."""

from __future__ import annotations

import pytest

from tests.docstrings import missing

RAISES = '''
def read(place: int) -> None:
    """{}"""
    for _ in range(place):
        if place:
            raise InvalidRecord("no")
'''
CAUGHT = '''
def read(place: int) -> None:
    """Reads."""
    try:
        raise InvalidRecord("no")
    except RecordError:
        pass
'''
ARRAY = '''
class Columns:
    """Of a span."""

    def take(self, positions: NDArray[np.int64] | None) -> None:
        """{}"""
'''


@pytest.mark.parametrize(("said", "silent"), [("Reads.", True), ("Raises RecordError.", False),
                                              ("Raises InvalidRecord.", False)])  # fmt: skip
def test_an_error_is_named_itself_or_by_its_base(said: str, silent: bool) -> None:
    lines = list(missing("m.py", RAISES.format(said)))
    assert [line.startswith("m.py:2: `read` raises InvalidRecord") for line in lines] == [True] * silent


def test_what_is_caught_here_is_raised_to_nobody() -> None:
    assert not list(missing("m.py", CAUGHT))


@pytest.mark.parametrize(("module", "said", "silent"), [("", "Takes.", True), ("", "At positions [n].", False),
                                                        ('"""All int64 [n]."""', "Takes.", False)])  # fmt: skip
def test_an_array_has_a_shape_in_its_docstring_or_the_modules(module: str, said: str, silent: bool) -> None:
    lines = list(missing("m.py", module + ARRAY.format(said)))
    assert ["`Columns.take` takes or gives an array" in line for line in lines] == [True] * silent

"""Which processes a supervisor starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.topics import RunTopics
from headrace.settings import SiteSettings
from headrace.supervisor import Supervisor, _Child


class _Enough(Exception):
    """Every child has been asked for."""


@pytest.mark.parametrize(
    ("assemblers", "expected"),
    [(1, [("assembler", None)]), (2, [("assembler-0", "0/2"), ("assembler-1", "1/2")])],
)
def test_each_supervised_assembler_has_a_share_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assemblers: int, expected: list[tuple[str, str | None]]
) -> None:
    started: list[_Child] = []

    def start(_: Supervisor, child: _Child) -> None:
        started.append(child)
        if child.role == "trainer":
            raise _Enough

    monkeypatch.setattr(Supervisor, "_start", start)
    site = SiteSettings(assemblers=assemblers, state_dir=str(tmp_path))
    with pytest.raises(_Enough):
        Supervisor({}, RunTopics("r"), site, tmp_path / "run.toml", print)._run()
    assert [(child.name, child.share) for child in started if child.role == "assembler"] == expected
    assert {child.name for child in started} >= {"coordinator", "worker", "trainer"}

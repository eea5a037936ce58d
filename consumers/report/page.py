"""The page: one HTML file that needs nothing beside itself, for a screen, a phone and paper."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import PurePath
from typing import Any

from headrace.schemas.errors import SettingsError

from . import Report
from .plots import plots
from .sections import headline, sections


def page(report: Report, against: Report | None = None) -> str:
    """HTML. With `against`, the other run's figures and plots stand beside. Raises SettingsError where jinja2 or
    matplotlib is missing."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise SettingsError("the report needs jinja2, which is not installed: pip install 'headrace[report]'; --json "
                            "works without it") from error  # fmt: skip
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files(__package__) / "page.html").read_text())
    runs = [_run(one) for one in (report, against) if one is not None]
    return template.render(runs=runs, sections=_beside(runs), single=against is None)


def _run(report: Report) -> dict[str, Any]:
    bottleneck, advice = headline(report)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.made_ms / 1000))
    return {
        "name": report.run, "model": PurePath(report.model).name, "made": made,
        "version": report.state.version, "running": report.running, "held_up_by": report.state.held_up_by,
        "bottleneck": bottleneck, "advice": advice, "sections": sections(report), "plots": plots(report),
    }  # fmt: skip


def _beside(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Section by section: the verdicts, and each figure with its value in every run."""
    out = []
    for columns in zip(*(run["sections"] for run in runs), strict=True):
        names = list(dict.fromkeys(row.name for section in columns for row in section.rows))
        known = [{row.name: row for row in section.rows} for section in columns]
        rows = []
        for name in names:
            held = [rows_of.get(name) for rows_of in known]
            meaning = next(row.meaning for row in held if row is not None)
            rows.append({"name": name, "values": [row.value if row else "-" for row in held], "meaning": meaning})
        out.append({"key": columns[0].key, "question": columns[0].question,
                    "verdicts": [(section.verdict, section.good) for section in columns], "rows": rows})  # fmt: skip
    return out

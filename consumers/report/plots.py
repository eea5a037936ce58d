"""One plot for each question, as SVG text to be put into a page. matplotlib draws; nothing is fetched from anywhere."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.schemas.errors import SettingsError
from headrace.schemas.outcomes import Account, Outcome

from ..waits import shares
from . import Report
from .sections import lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEWEST = 120  # batches or versions: more would be lines too thin to see
# Okabe and Ito's colours, which most colour-blind people tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 8,
}  # fmt: skip


def plots(report: Report) -> dict[str, str]:
    """SVG by the key of its section; a section whose plot would be empty has none. Raises SettingsError where
    matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError("the report needs matplotlib, which is not installed: pip install 'headrace[report]'; "
                            "--json works without it") from error  # fmt: skip
    out = {}
    for key, (draw, panels) in _DRAW.items():
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"{report.run}/{key}"}):
            figure = Figure(figsize=(7.2, 2.6), layout="constrained")
            axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
            if draw(report, axes):
                text = io.StringIO()
                figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
                svg = text.getvalue()
                out[key] = svg[svg.index("<svg") :]  # without the prologue of a file of its own
    return out


def _readiness(report: Report, axes: Sequence[Axes]) -> bool:
    found = report.figures.waits.stragglers[-NEWEST:]
    states = list(dict.fromkeys(one.state for one in found))
    for number, state in enumerate(states):
        rows = [one for one in found if one.state == state]
        batches = [one.batch for one in rows]
        axes[0].bar(batches, [one.open_s for one in rows], color="#dddddd", width=0.9)
        axes[0].bar(batches, [one.state_s for one in rows], color=_colour(number), width=0.9, label=state)
    _label(
        axes[0],
        "batch",
        "seconds",
        "What held each batch up: its slowest group, and that slot's longest step (coloured)",
    )
    if states:
        axes[0].legend(ncols=4)
    return bool(found)


def _freshness(report: Report, axes: Sequence[Axes]) -> bool:
    found = report.freshness.batches[-NEWEST:]
    axes[0].plot([b.batch for b in found], [b.lag_mean for b in found], color=COLOURS[0], label="mean")
    axes[0].plot([b.batch for b in found], [b.lag_max for b in found], color=COLOURS[1], ls=":", label="oldest token")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    _label(axes[0], "batch", "versions", "Lag")
    rows = lengths(report)
    names = [f"{upto}" for upto in rows]
    parts = {name: [row[i + 1] for row in rows.values()] for i, name in enumerate(("trained", "masked", "dropped"))}
    _stacked(axes[1], names, parts)
    _label(axes[1], "share of tokens", "tokens of an episode, up to", "By length of the episode")
    return bool(found)


def _alignment(report: Report, axes: Sequence[Axes]) -> bool:
    found = [one for one in report.alignment.versions if one.mean is not None][-NEWEST:]
    for name, colour in (("mean", COLOURS[0]), ("max", COLOURS[5])):
        axes[0].plot([one.version for one in found], [getattr(one, name) for one in found], color=colour, marker=".",
                     label="mean" if name == "mean" else "largest")  # fmt: skip
    if any((one.mean or 0) > 0 for one in found):
        axes[0].set_yscale("log")
    axes[0].legend()
    _label(axes[0], "version", "nats", "|trainer's minus engine's log-probability| of a token")
    return bool(found)


def _reliability(report: Report, axes: Sequence[Axes]) -> bool:
    windows = [w for w in report.figures.rewards if w.mean is not None]
    axes[0].plot([(w.first + w.last) / 2 for w in windows], _known(w.mean for w in windows), color=COLOURS[2],
                 marker="o")  # fmt: skip
    _label(axes[0], "version", "reward", "Reward of all closed groups")
    found = report.reliability.outcomes
    order = [str(outcome) for outcome in Outcome if str(outcome) in found]
    axes[1].barh(order, [found[name] for name in order], color=[_colour(i) for i in range(len(order))])
    _label(axes[1], "attempts", "", "Outcomes")
    return bool(found)


def _publication(report: Report, axes: Sequence[Axes]) -> bool:
    found = report.transport.deliveries[-5 * NEWEST :]
    timed = [one for one in found if one.latency_s is not None]
    axes[0].plot([one.version for one in timed], _known(one.latency_s for one in timed), ".", color=COLOURS[0],
                 label="latency")  # fmt: skip
    paused = [one for one in found if one.pause_s is not None]
    axes[0].plot([one.version for one in paused], _known(one.pause_s for one in paused), ".", color=COLOURS[5],
                 label="pause")  # fmt: skip
    axes[0].legend()
    _label(axes[0], "version", "seconds", "Each version at each replica")
    legs = report.transport.legs
    axes[1].barh(list(legs)[::-1], [legs[name].p50 for name in list(legs)[::-1]], color=COLOURS[4])
    _label(axes[1], "seconds (median)", "", "Where that time goes")
    return bool(timed)


def _evaluation(report: Report, axes: Sequence[Axes]) -> bool:
    for number, suite in enumerate(report.evaluation):
        axes[0].errorbar([s.version for s in suite.scores], [s.mean for s in suite.scores],
                         [1.96 * s.standard_error for s in suite.scores], color=_colour(number), marker="o", capsize=3,
                         label=suite.name)  # fmt: skip
    if report.evaluation:
        axes[0].legend()
    _label(axes[0], "version", "score", "Evaluations, with 95 % intervals")
    return bool(report.evaluation)


def _spent(report: Report, axes: Sequence[Axes]) -> bool:
    tokens = report.ledger.tokens if report.ledger is not None else Counter[str]()
    total, waits = tokens.total(), report.figures.waits
    bars: dict[str, Mapping[str, float]] = {
        "episodes": shares(waits.steps_s), "trainer": shares(waits.trainer_s), "engines": shares(waits.engine_s),
        "tokens": {a: tokens[a] / total for a in Account if tokens[a]} if total else {},
    }  # fmt: skip
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for number, (name, part) in enumerate(parts.items()):
            axes[0].barh(row, part, left=left, color=_colour(number), edgecolor="white")
            if part > 0.09:
                axes[0].text(left + part / 2, row, name, ha="center", va="center", fontsize=7.5)
            left += part
    axes[0].set_yticks(range(len(bars)), list(bars))
    axes[0].set_xlim(0, 1)
    _label(axes[0], "share", "", "Where tokens and time went")
    return bool(total)


_DRAW: dict[str, tuple[Callable[[Report, Sequence[Any]], bool], int]] = {
    "readiness": (_readiness, 1), "freshness": (_freshness, 2), "alignment": (_alignment, 1),
    "reliability": (_reliability, 2), "publication": (_publication, 2), "evaluation": (_evaluation, 1),
    "spent": (_spent, 1),
}  # fmt: skip


def _stacked(axis: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    left = np.zeros(len(names))
    for number, (name, values) in enumerate(parts.items()):
        axis.barh(list(names), list(values), left=left, color=_colour(number), label=name)
        left = left + np.asarray(values)
    if names:
        axis.legend(ncols=3)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _label(axis: Axes, x: str, y: str, title: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title, fontsize=9, loc="left")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]

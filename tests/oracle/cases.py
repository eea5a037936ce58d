"""Decides when a value of ours is a peer's: cases as a file holds them, tensors of their inputs, comparison of results.

A file is `{"cases": [{"id", "source": {"function", ...}, "dtype", "parameters", "inputs", "expected"}, ...]}`; numbers
that aren't finite are the strings NaN, Infinity and -Infinity. float64 is compared at 1e-9, float32 at 1e-6, relative.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.schemas.settings import LossSettings
from headrace.trainer.reductions import Tokens
from headrace.trainer.weighing import StepSettings, loss_rules

RTOL = {"float64": 1e-9, "float32": 1e-6}
ATOL = 1e-12  # what rounding leaves of 0
NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
NOTHING = {"truncate_above": None, "mask_below": 0.0, "mask_above": None}  # of the loss settings that act by default


class NotCovered(Exception):
    """A setting of a peer's that has no counterpart here: the case fails."""


@dataclass(frozen=True)
class Case:
    id: str
    function: str
    dtype: str
    parameters: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]


def read(file: Path) -> list[Case]:
    """Raises SystemExit where the file isn't one of cases."""
    try:
        return [Case(one["id"], one["source"]["function"], one["dtype"], one["parameters"], one["inputs"],
                     one["expected"]) for one in json.loads(file.read_text())["cases"]]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{file}: not a file of cases ({type(error).__name__}: {error})") from error


def number(value: Any) -> float:
    return NAMES[value] if isinstance(value, str) else float(value)


def vector(values: list[Any]) -> torch.Tensor:
    return torch.tensor([number(value) for value in values], dtype=torch.float64)


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, ragged or not, laid flat as the trainer has them."""

    lengths: list[int]
    tokens: Tokens

    @staticmethod
    def of(mask: list[list[Any]]) -> Rows:
        lengths = [len(row) for row in mask]
        episode = torch.repeat_interleave(torch.arange(len(mask)), torch.tensor(lengths))
        used = torch.tensor([number(value) > 0 for row in mask for value in row], dtype=torch.bool)
        return Rows(lengths, Tokens(episode, used, len(mask)))

    def flat(self, rows: list[list[Any]]) -> torch.Tensor:
        """float64 [k]; a row of one value stands for each of its tokens."""
        wide = [row * n if len(row) == 1 != n else row for row, n in zip(rows, self.lengths, strict=True)]
        return vector([value for row in wide for value in row])

    def rows(self, values: torch.Tensor) -> list[list[float]]:
        return [row.tolist() for row in torch.split(values.double(), self.lengths)]

    def first(self, values: torch.Tensor) -> list[list[float]]:
        """What is the same at all tokens of a row, once per row."""
        return [row[:1].tolist() for row in torch.split(values.double(), self.lengths)]


def rules(**loss: Any) -> StepSettings:
    """Our settings, refused where they can't be, as the trainer takes them. What acts by default is off."""
    return StepSettings(**loss_rules(LossSettings.model_validate({**NOTHING, **loss})))


def differences(got: Any, expected: Any, rtol: float, where: str = "") -> list[str]:
    """One line for each value that differs or is missing; ours may have more than the peer gives."""
    if isinstance(expected, dict):
        if not isinstance(got, dict):
            return [f"{where or 'result'}: expected {expected!r}, got {got!r}"]
        return [line for key in expected
                for line in (differences(got[key], expected[key], rtol, f"{where}.{key}".lstrip(".")) if key in got
                             else [f"{where}.{key}".lstrip(".") + ": missing"])]  # fmt: skip
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return [f"{where}: expected {expected!r}, got {got!r}"]
        return [line for i, (a, b) in enumerate(zip(got, expected, strict=True))
                for line in differences(a, b, rtol, f"{where}[{i}]")]  # fmt: skip
    if expected is None or got is None:
        return [] if expected is got else [f"{where}: expected {expected!r}, got {got!r}"]
    a, b = number(got), number(expected)
    same = (math.isnan(a) and math.isnan(b)) or a == b or abs(a - b) <= ATOL + rtol * abs(b)
    return [] if same else [f"{where}: expected {b!r}, got {a!r}"]

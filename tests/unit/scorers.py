"""Verifiers that the tests name in their tasks."""

from __future__ import annotations

import os
import time
from typing import Any


def length(item: dict[str, Any], text: str) -> float | None:
    return float(len(text))


def misbehave(item: dict[str, Any], text: str) -> float | None:
    if text == "hang":
        time.sleep(3600)
    if text == "die":
        os._exit(3)
    if text == "raise":
        raise RuntimeError("the scorer broke")
    if text == "none":
        return None
    if text == "nan":
        return float("nan")
    print("a verifier that talks")
    return 1.0


def vowels(item: dict[str, Any], text: str) -> float | None:
    return sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text))

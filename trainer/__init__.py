"""Whoever trains: our own trainer, and the door for another one. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .door import open_trainer

__all__ = ["open_trainer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import door

        return getattr(door, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

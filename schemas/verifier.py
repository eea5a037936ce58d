"""What judges answers anew: handed to the trainer's replay by the command line, which knows the environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .events import Task


class Verifier(Protocol):
    """Gives rewards anew to recorded answers (`headrace replay --verifier`)."""

    def rewards(self, answers: Sequence[tuple[Task, str]]) -> list[float | None]:
        """Of each task and the model's whole answer to it, in order; None where there is no verdict."""
        ...

"""`headrace` as a person calls it, in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.cli import main


@dataclass
class Command:
    address: str
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self.patch.setattr(sys, "argv", ["headrace", *args, "--bootstrap", self.address])
        self.capture.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return (code or 0, *self.capture.readouterr())

    def json(self, *args: str) -> Any:
        code, out, error = self(*args, "--json")
        assert code == 0 and not error, error
        return json.loads(out)

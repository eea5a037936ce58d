"""What the tests of the trainer share; a file that needs another `model` or `run` has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.models import tiny_model
from tests.synthetic_run import SyntheticRun, run_settings


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The same bits each time, here and in what runs in this process."""
    import torch  # tests of other subjects need none

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32)


@pytest.fixture
def run(kafka: Mapping[str, Any], run_name: str, model: Path) -> Iterator[SyntheticRun]:
    """Its batches are written by hand."""
    one = SyntheticRun(kafka, run_name, run_settings(model))
    yield one
    one.close()

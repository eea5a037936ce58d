"""Decides what the processes of a `torchrun` job say to one another: rank 0 has the log, and tells the others, which
have none, what to do next and with what. They do as it does, at the same time, and hold nothing that it couldn't tell
them again.

A word is a safetensors file in memory: its metadata says what is to be done, its tensors are the columns of episodes.
That a commit succeeded is said by the next word; when rank 0 ends without one, the others end with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from headrace.schemas.errors import HeadraceError
from headrace.schemas.settings import ModelSettings

from .alignment import Verdict
from .batches import Episode, Group, Strand
from .ranks import Ranks
from .report import StepReport
from .reused import Reused
from .step import TrainState
from .weighing import StepSettings

COLUMNS = ("prompt", "tokens", "mask", "logprobs", "versions", "weights", "experts")
SETTINGS = TypeAdapter(StepSettings)


class Led:
    """Rank 0's train state, in whose calls the other ranks take part. With one rank it only passes them on."""

    def __init__(self, model: ModelSettings, recompute: bool, ranks: Ranks) -> None:
        """Raises ModelError."""
        self._ranks = ranks
        ranks.say(_word("begin", model=model.model_dump(mode="json"), recompute=recompute))
        self.state = _state(model, recompute, ranks)

    def train_batch(self, groups: Sequence[Group], target: int, settings: StepSettings,
                    reused: Sequence[Reused] = ()) -> StepReport:  # fmt: skip
        if self._ranks.size > 1:
            self._ranks.say(train_word(groups, target, settings, reused))
        return self.state.train_batch(groups, target, settings, reused)

    def keep_served(self) -> None:
        self._ranks.say(_word("keep"))
        self.state.keep_served()

    def align(self, probes: Sequence[Group], settings: StepSettings) -> list[tuple[Verdict | None, Verdict | None]]:
        if self._ranks.size > 1:
            self._ranks.say(train_word(probes, 0, settings, (), "align"))
        return self.state.align(probes, settings)

    def load_state(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self.state.check_state(tensors, metadata)
        self._ranks.say(_word("load", state=dict(metadata)))
        self.state.load_state(tensors, metadata)

    def close(self) -> None:
        """The others end too."""
        self._ranks.say(_word("end"))


def follow(ranks: Ranks) -> None:
    """What a rank that isn't 0 does until rank 0 ends. An error in a batch is rank 0's to tell: it has it too."""
    state: TrainState | None = None
    while True:
        message = ranks.hear()
        heard = _heard(message)
        if heard["do"] == "end":
            return
        if heard["do"] == "begin":
            state = _state(ModelSettings.model_validate(heard["model"]), heard["recompute"], ranks)
            continue
        assert state is not None
        if heard["do"] == "load":
            state.load_state({}, heard["state"])
        elif heard["do"] == "keep":
            state.keep_served()
        elif heard["do"] == "align":
            groups, _, settings, _ = told(message)
            state.align(groups, settings)
        else:
            groups, state.version, settings, reused = told(message)  # the count is rank 0's to keep
            try:
                state.train_batch(groups, state.version, settings, reused)
            except HeadraceError:
                continue


def _state(model: ModelSettings, recompute: bool, ranks: Ranks) -> TrainState:
    return TrainState(model.path, model.dtype, model.compute_dtype, head_dtype=model.head_dtype,
                      quantisation=model.quantisation if model.train_quantised else "none", lora=model.lora,
                      recompute=recompute, replay_routing=model.replay_routing, ranks=ranks)  # fmt: skip


def _word(what: str, tensors: Mapping[str, NDArray[Any]] | None = None, **said: Any) -> bytes:
    return safetensors.numpy.save(dict(tensors or {}), {"word": json.dumps({"do": what, **said})})


def _heard(message: bytes) -> dict[str, Any]:
    length = int.from_bytes(message[:8], "little")
    said: dict[str, Any] = json.loads(json.loads(message[8 : 8 + length])["__metadata__"]["word"])
    return said


@dataclass(slots=True)
class _Columns:
    """Arrays on their way, each under the number of its episode or strand."""

    tensors: dict[str, NDArray[Any]]
    count: int = 0

    def put(self, one: Episode | Strand) -> int:
        number, self.count = self.count, self.count + 1
        self.tensors |= {f"{number}.{name}": np.ascontiguousarray(column) for name in COLUMNS
                         if (column := getattr(one, name)) is not None}  # fmt: skip
        return number

    def of(self, number: int) -> dict[str, Any]:
        return {name: self.tensors.get(f"{number}.{name}") for name in COLUMNS}


def train_word(groups: Sequence[Group], target: int, settings: StepSettings, reused: Sequence[Reused],
               what: str = "train") -> bytes:  # fmt: skip
    """What rank 0 tells the others of a step: settings as JSON, columns as safetensors."""
    columns = _Columns({})

    def plain(one: Episode) -> dict[str, Any]:
        return {"number": columns.put(one), "slot": one.slot, "reward": one.reward, "counted": one.counted,
                "dropped": one.dropped, "temperature": one.temperature,
                "branches": [columns.put(strand) for strand in one.branches]}

    said = [{"group": group.group_id, "episodes": [plain(one) for one in group.episodes]} for group in groups]
    again = [{"group": one.group_id, "episode": plain(one.episode), "advantage": one.advantage} for one in reused]
    return _word(what, columns.tensors, groups=said, reused=again, target=target, settings=asdict(settings))


def told(message: bytes) -> tuple[list[Group], int, StepSettings, list[Reused]]:
    """What `train_word` said."""
    said, columns = _heard(message), _Columns(safetensors.numpy.load(message))

    def episode(plain: dict[str, Any]) -> Episode:
        branches = tuple(Strand(**columns.of(number)) for number in plain["branches"])
        return Episode(slot=plain["slot"], reward=plain["reward"], counted=plain["counted"],
                       temperature=plain["temperature"], branches=branches, dropped=plain["dropped"],
                       **columns.of(plain["number"]))  # fmt: skip

    groups = [Group(one["group"], tuple(map(episode, one["episodes"]))) for one in said["groups"]]
    reused = [Reused(one["group"], episode(one["episode"]), one["advantage"]) for one in said["reused"]]
    return groups, said["target"], SETTINGS.validate_python(said["settings"]), reused

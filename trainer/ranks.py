"""Decides how one train state lies on the processes of a `torchrun` job: each tensor cut along its first dimension, as
FSDP2 cuts it, and put together again on rank 0, which alone talks to Kafka.

What the processes say to one another outside the model's own collectives goes through gloo and CPU memory, in a group
without a time limit: rank 0 may wait for a batch as long as it likes. A process that dies ends the others: its
connections break, and torchrun stops the job; nothing is lost, since everything but the log is a cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

FOREVER = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process, and how many there are. With one, every method is a no-op. Tensors are of any shape and dtype; all
    processes name the same."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    words: Any = None  # the gloo group

    def shard(self, model: Any) -> None:
        """Cut the model's parameters, layer by layer, in place (FSDP2). Gradients are summed over ranks, in float32 at
        least, so that a row's share doesn't depend on how many there are."""
        if self.size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        from .model import layers

        mesh = init_device_mesh(self.device.type, (self.size,))
        half = model.dtype in (torch.bfloat16, torch.float16)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
        for module in (*layers(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def reshard(self, model: Any) -> None:
        """Forget what was gathered of other ranks' parts: they are about to be written. (A forward without a backward
        pass leaves the outermost parameters whole.)"""
        if self.size > 1:
            model.reshard()

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a cut parameter or gradient that lies here."""
        if self.size == 1:
            return tensor
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return part

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What of a whole tensor belongs here; a view."""
        if self.size == 1:
            return whole
        parts = whole.chunk(self.size, 0)
        return parts[self.rank] if self.rank < len(parts) else whole[:0]

    def collect(self, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
        """A tensor of `shape` in whole, on rank 0 (CPU), from everyone's part. None elsewhere."""
        sent = _padded(part.detach().cpu(), shape, self.size)
        parts = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(sent, parts, dst=0, group=self.words)
        return None if parts is None else torch.cat(parts).view(part.dtype).view(-1, *shape[1:])[: shape[0]]

    def everywhere(self, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of `shape` in whole, on every rank (CPU), from everyone's part; with one rank the part itself."""
        if self.size == 1:
            return part
        sent = _padded(part.detach().cpu(), shape, self.size)
        whole = torch.empty(self.size * len(sent), dtype=torch.uint8)
        dist.all_gather_into_tensor(whole, sent, group=self.words)
        return whole.view(part.dtype).view(-1, *shape[1:])[: shape[0]]

    def hand_out(self, whole: torch.Tensor | None, part: torch.Tensor, shape: Sequence[int]) -> None:
        """Fill everyone's `part` from rank 0's `whole`."""
        if self.size == 1:
            assert whole is not None
            part.copy_(whole)
            return
        received = _padded(part.detach().cpu(), shape, self.size)
        parts = None
        if whole is not None:
            parts = [_padded(replace(self, rank=n).part(whole), shape, self.size) for n in range(self.size)]
        dist.scatter(received, parts, src=0, group=self.words)
        part.copy_(received.view(part.dtype).view(-1, *shape[1:])[: len(part)])

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same on each; `values` stays."""
        if self.size == 1:
            return values
        summed = values.detach().cpu().clone()
        dist.all_reduce(summed, group=self.words)
        return summed.to(values.device)

    def say(self, message: bytes) -> None:
        """Rank 0 to all others, who `hear`."""
        if self.size > 1:
            dist.broadcast(torch.tensor([len(message)]), 0, group=self.words)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self.words)

    def hear(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self.words)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, 0, group=self.words)
        return message.numpy().tobytes()


def _padded(part: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
    """uint8 [n]: a part of a tensor of `shape`, of the same length on every rank."""
    padded = torch.zeros((-(-shape[0] // size), *shape[1:]), dtype=part.dtype)
    padded[: len(part)] = part
    return padded.view(-1).view(torch.uint8)


ALONE = Ranks()


def join(device: str) -> Ranks:
    """This process as torchrun's environment says (RANK, WORLD_SIZE, LOCAL_RANK); alone without it. `device` cuda is
    one GPU for each process of a machine."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks(device=torch.device(device))
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("gloo" if place.type == "cpu" else f"cpu:gloo,{place.type}:nccl")
    return Ranks(dist.get_rank(), size, place, dist.new_group(backend="gloo", timeout=FOREVER))


def leave() -> None:
    """The end of the job, said by each process."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()

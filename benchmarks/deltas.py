"""Weights after a step: bytes, and the speed of encoding and of verified applying, beside what others send.

    python -m benchmarks.deltas FILE.npz ...

FILE holds `base` (uint16: bf16 bits), `index` (positions that changed) and `value` (their new bits). Without a file a
step is made by the numbers. The ratio is full bf16 bytes over bytes sent. Encoding begins with both states and ends
with bytes: finding what changed is part of it for all, and for ours the chunks' checksums. Speeds are of full bf16
bytes per CPU second of one thread. Others apply what they are given; ours decodes, proves base and result by the state
hash, and then writes. "Reading and writing the base once" is a copy by numpy into place. Each call works on another
copy of the data, of which there are more than the caches hold, as weights in a real process are.

Then the same for a run of our own: ratio by learning rate, from float32 masters and bf16 served weights, after a few
steps of our trainer on episodes that the model sampled. Masters begin spread within the rounding of what is served, as
they are after many steps.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from headrace.schemas import delta
from headrace.schemas.events import Publication, WeightChunk

from . import harness
from ._own_deltas import Bits, adamw_step, trained
from .deltas_baselines import Baseline
from .deltas_baselines.full_zstd import FullZstd
from .deltas_baselines.gap_xor_zstd import GapXorZstd
from .deltas_baselines.index_value import IndexValue
from .deltas_baselines.xor_zstd import XorZstd
from .harness import CannotMeasure, Result, cost, spread

BASELINES: tuple[Baseline, ...] = (FullZstd(), IndexValue(), XorZstd(), GapXorZstd())
YARDSTICK = "gap + XOR + zstd"  # which encoding must not be slower than
REWRITE = "numpy: read and write the base once"
CODECS = {"fast": 155.0, "dense": 200.0}  # ratio to reach at about one change in a hundred
APART = 256 << 20  # bytes of copies: more than a last-level cache
DTYPE = "bfloat16"
RATES = (1e-6, 3e-6, 1e-5, 3e-5)
STEPS = 4


def measure(options: argparse.Namespace, result: Result) -> None:
    files: list[tuple[str, Bits, Bits]] = [(path.name, *_read(path)) for path in options.files]
    made = ("made: AdamW, rate 3e-6", *adamw_step((1 << 18) if options.quick else (1 << 22), 3e-6))
    for name, base, new in files or [made]:
        _measure(name, base, new, options.quick, result, goals=bool(files))
    model = options.run or ("tiny" if options.quick else "smollm2")
    if model != "none":
        _run(model, RATES[1:3] if options.quick else RATES, 2 if options.quick else STEPS, result)


def _read(path: Path) -> tuple[Bits, Bits]:
    try:
        with np.load(path) as file:
            base, index, value = file["base"], file["index"], file["value"]
    except (OSError, KeyError, ValueError) as error:
        raise CannotMeasure(f"{path}: no .npz file with base, index and value ({error})") from error
    new = base.copy()
    new[index] = value
    return base, new


class Ours:
    """One tensor as a trainer and a receiver have it."""

    def __init__(self, codec: str, base: Bits, new: Bits) -> None:
        self.codec, self.name = codec, f"Headrace {codec}"
        old, changes = self.state(base), delta.diff(self.state(base), self.state(new))
        self.base_hash = delta.state_hash(old)
        self.chunks = self.encode(base, new)
        self.record = Publication(
            0, b"", "trainer", 1, delta.DELTA, 0, self.base_hash, delta.HASH_ALGORITHM,
            delta.updated_hash(self.base_hash, old, changes), None, (), 0, delta.changed(changes), base.size, 0,
        )  # fmt: skip
        self.size = sum(len(chunk.data) for chunk in self.chunks)

    @staticmethod
    def state(bits: Bits) -> dict[str, delta.Tensor]:
        return {"weight": delta.Tensor(DTYPE, bits)}

    def encode(self, base: Bits, new: Bits) -> list[WeightChunk]:
        old = self.state(base)
        return delta.encode_delta(1, old, delta.diff(old, self.state(new)), self.codec)

    def apply(self, base: Bits) -> None:
        state = self.state(base)
        changes, _ = delta.decode_verified(state, 0, self.base_hash, self.record, self.chunks)
        delta.write(state, changes)


def _measure(name: str, base: Bits, new: Bits, quick: bool, result: Result, goals: bool) -> None:
    copies = max(2, (APART // 8 if quick else APART) // (2 * base.nbytes))
    pairs = [(base.copy(), new.copy()) for _ in range(copies)]
    repetitions = 5 if quick else max(15, copies)
    ours = {codec: Ours(codec, base, new) for codec in CODECS}
    data = {baseline.name: baseline.encode(base, new) for baseline in BASELINES}
    ratios = {n: base.nbytes / len(d) for n, d in data.items()} | {o.name: base.nbytes / o.size for o in ours.values()}
    (changed,) = {one.record.changed for one in ours.values()}
    result.row(f"{name}: changed", "", 100 * changed / base.size, "%")
    for subject, ratio in ratios.items():
        result.row(f"{name}: ratio", subject, ratio, "x")

    next_pair = itertools.cycle(pairs)
    encoders: dict[str, Callable[[Bits, Bits], object]] = {b.name: b.encode for b in BASELINES}
    encoders |= {one.name: one.encode for one in ours.values()}
    encoding = _speeds({n: _encoding(encode, next_pair) for n, encode in encoders.items()}, base.nbytes, repetitions)
    for subject, speeds in encoding.items():
        result.row(f"{name}: encode", subject, spread(speeds), "MB/s per thread")
    hashed = _speeds({"": _encoding(_update_hash(ours["fast"]), next_pair)}, base.nbytes, repetitions)[""]
    result.row(f"{name}: find changes, move the state hash along", "Headrace", spread(hashed), "MB/s per thread")

    appliers: dict[str, Callable[[Bits, Bits], object]] = {
        REWRITE: lambda old, then: np.copyto(old, then),
        **{b.name: lambda old, _, b=b: b.apply(old, data[b.name]) for b in BASELINES},  # type: ignore[misc]
        **{f"{one.name}, verified": lambda old, _, one=one: one.apply(old) for one in ours.values()},  # type: ignore[misc]
    }
    applied = {n: _applying(apply, next_pair, base) for n, apply in appliers.items()}
    applying = _speeds(applied, base.nbytes, repetitions)
    for subject, speeds in applying.items():
        result.row(f"{name}: apply", subject, spread(speeds), "MB/s per thread")
    if goals:
        for codec, want in CODECS.items():
            result.at_least(f"{name}: ratio of {codec}", ratios[f"Headrace {codec}"], want)
        fast = spread(encoding["Headrace fast"]).median / spread(encoding[YARDSTICK]).median
        result.at_least(f"{name}: speed of encoding over {YARDSTICK}", fast, 1.0)
        apply = spread(applying["Headrace fast, verified"]).median / spread(applying[REWRITE]).median
        result.at_least(f"{name}: speed of verified apply over a rewrite of the base", apply, 1.0)


def _update_hash(ours: Ours) -> Callable[[Bits, Bits], object]:
    def update(base: Bits, new: Bits) -> bytes:
        old = ours.state(base)
        return delta.updated_hash(ours.base_hash, old, delta.diff(old, ours.state(new)))

    return update


def _encoding(encode: Callable[[Bits, Bits], object], pairs: Iterator[tuple[Bits, Bits]]) -> Callable[[], float]:
    def call() -> float:
        base, new = next(pairs)
        return cost(lambda: encode(base, new)).cpu_s

    return call


def _applying(apply: Callable[[Bits, Bits], object], pairs: Iterator[tuple[Bits, Bits]],
              original: Bits) -> Callable[[], float]:  # fmt: skip
    def call() -> float:
        base, new = next(pairs)
        took = cost(lambda: apply(base, new)).cpu_s
        if not np.array_equal(base, new):
            raise CannotMeasure("what was applied isn't what was encoded")
        np.copyto(base, original)
        return took

    return call


def _speeds(subjects: dict[str, Callable[[], float]], size: int, repetitions: int) -> dict[str, list[float]]:
    """MB of weights per CPU second, of each repetition."""
    seconds = harness.alternate(subjects, repetitions)
    return {name: [size / 1e6 / max(s, 1e-9) for s in found] for name, found in seconds.items()}


def _run(model: str, rates: tuple[float, ...], steps: int, result: Result) -> None:
    for rate, before, after in trained(model, rates, steps):
        changes = delta.diff(before, after)
        size, count = sum(tensor.bits.nbytes for tensor in after.values()), delta.elements(after)
        subject = f"learning rate {rate:g}"
        result.row(f"{model}, step {steps}: changed", subject, 100 * delta.changed(changes) / count, "%")
        for codec in CODECS:
            chunks = delta.encode_delta(1, before, changes, codec)
            sent = sum(len(chunk.data) for chunk in chunks)
            result.row(f"{model}, step {steps}: ratio, {codec}", subject, size / max(1, sent), "x")
        gap = sum(len(GapXorZstd().encode(before[n].bits.reshape(-1), t.bits.reshape(-1))) for n, t in after.items())
        result.row(f"{model}, step {steps}: ratio, {YARDSTICK}", subject, size / gap, "x")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.npz", help="deltas with base, index and value")
    parser.add_argument("--run", choices=["tiny", "smollm2", "none"],
                        help="the model of the run of our own (default: smollm2, with --quick tiny)")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("deltas", __doc__, measure, argv, arguments=_arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The reference fold and the assembler's agree on random worlds: they share no code, so each vouches for the other."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from headrace.schemas.codec import decode
from headrace.schemas.events import Span
from headrace.schemas.payload import content_hash, payload_span
from headrace.streams.assembler import Closed, Fold
from headrace.streams.log.reader import Record
from tests.reference_fold import Closure, reference_closures
from tests.unit.test_assembler import STEPS_MS, world


def folded(records: list[Record]) -> dict[str, Closure]:
    """The assembler's closures, with the content hash that its loop computes."""
    fold, by_offset, closures = Fold(), {record.offset: record.value for record in records}, {}
    for record in records:
        for effect in fold.apply(record):
            if not isinstance(effect, Closed):
                continue
            hashed = None
            if effect.payload is not None:
                episodes = []
                for episode in effect.payload.episodes:
                    events = [decode(by_offset[offset]) for offset in episode.offsets]
                    spans = tuple(payload_span(event) for event in events if isinstance(event, Span))
                    episodes.append(replace(episode, spans=spans))
                hashed = content_hash(replace(effect.payload, episodes=tuple(episodes)))
            closures[effect.record.group] = Closure(effect.record.closure, effect.record.cause, hashed)
    return closures


Move = tuple[str, int, int, int, int, int]  # kind, group, slot, attempt, step in ms, choice

WILD = ["event"] * 8 + ["end"] * 4 + ["lease"] * 2
CALM = ["event"] * 12 + ["end"] * 8 + ["lease"]
RARE = ["repeat", "conflict", "skip", "foreign", "tick", "garbage", "exhausted"]


def moves(seed: int) -> list[Move]:
    """Even seeds: anything goes, and little survives. Odd ones: mostly first attempts that end well."""
    draw, wild = random.Random(seed), seed % 2 == 0
    kinds = WILD + RARE if wild else CALM + RARE[:4]
    attempts, steps = ([0, 1, 2], STEPS_MS) if wild else ([0, 0, 0, 0, 1], STEPS_MS[:2])
    choices = [0, 1, 2, 3, 4] if wild else [0, 1, 0, 1, 0, 1, 2, 3, 4]
    return [
        (draw.choice(kinds), draw.randrange(3), draw.randrange(3), draw.choice(attempts), draw.choice(steps),
         draw.choice(choices))
        for _ in range(draw.randrange(20, 150))
    ]  # fmt: skip


def test_both_folds_close_the_same_groups_at_the_same_record_with_the_same_content() -> None:
    closed: Counter[str] = Counter()
    for seed in range(300):
        records = world(moves(seed))
        expected = reference_closures(records)
        assert expected == folded(records), f"seed {seed}"
        closed.update(closure.closure for closure in expected.values())
    assert all(closed[kind] > 5 for kind in ("candidate", "zero_variance", "too_few_survivors", "expired"))

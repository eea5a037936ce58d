"""Packing: every scored token once, nothing seen that a row of its own wouldn't show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.batches import Episode, Group, MicroBatch, counted, pack


def episode(
    slot: int, prompt: list[int], tokens: list[int], mask: list[bool] | None = None, counted: bool = True
) -> Episode:
    n = len(tokens)
    return Episode(
        slot=slot,
        prompt=np.array(prompt, np.int32),
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask if mask is not None else [True] * n, np.bool_),
        logprobs=np.full(n, -1, np.float32),
        versions=np.zeros(n, np.int32),
        weights=np.ones(n, np.float32),
        reward=float(slot),
        counted=counted,
        temperature=1.0,
    )


def contexts(row: MicroBatch) -> dict[tuple[int, int], tuple[list[int], list[int], int]]:
    """(episode, offset) of each scored token -> the ids and positions its prediction sees, and the token itself."""
    index = np.arange(len(row.ids))
    found = {}
    for keep, target, number, offset in zip(row.keep, row.targets, row.episode, row.offset, strict=True):
        seen = row.visible[row.segment[keep], row.segment] & (index <= keep)
        found[int(number), int(offset)] = (row.ids[seen].tolist(), row.positions[seen].tolist(), int(target))
    return found


token = st.integers(0, 2)  # few distinct ids, so that prompts share beginnings


@st.composite
def batches(draw: st.DrawFn) -> list[Group]:
    groups = []
    for number in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        episodes = []
        for slot in range(draw(st.integers(1, 4))):
            tokens = draw(st.lists(token, min_size=1, max_size=6))
            mask = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
            episodes.append(episode(slot, prompt, tokens, mask, counted=draw(st.booleans())))
        groups.append(Group(str(number), tuple(episodes)))
    return groups


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 60))
def test_every_model_token_is_scored_once_in_exactly_its_own_context(groups: list[Group], budget: int) -> None:
    rows = list(pack(groups, budget))
    found = [item for row in rows for item in contexts(row).items()]
    expected = {
        (number, int(offset)): [*e.prompt.tolist(), *e.tokens[:offset].tolist()]
        for number, (_, e) in enumerate(counted(groups))
        for offset in np.flatnonzero(e.mask)
    }
    assert [key for key, _ in found] == list(expected)  # once, and in the batch's order
    for (number, offset), (ids, positions, target) in found:
        assert ids == expected[number, offset]
        assert positions == list(range(len(ids)))
        assert target == counted(groups)[number][1].tokens[offset]


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 60))
def test_a_row_exceeds_the_budget_only_for_a_single_episode(groups: list[Group], budget: int) -> None:
    for row in pack(groups, budget):
        assert len(row.ids) <= budget or len(set(row.episode.tolist())) == 1


def test_what_prompts_begin_with_comes_once_and_the_last_token_of_an_episode_not_at_all() -> None:
    groups = [
        Group("a", (episode(0, [1, 2, 3, 4], [7, 8]), episode(1, [1, 2, 3, 4], [9, 9, 9]))),
        Group("b", (episode(0, [1, 2, 5], [6]),)),
    ]
    (row,) = pack(groups, 100)
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 7, 9, 9]
    assert row.positions.tolist() == [0, 1, 2, 3, 2, 4, 4, 5]


def test_an_environments_tokens_are_context_and_never_targets() -> None:
    (row,) = pack([Group("a", (episode(0, [1], [5, 6, 7, 8, 9], [True, False, False, True, False]),))], 100)
    assert row.offset.tolist() == [0, 3]
    assert row.targets.tolist() == [5, 8]
    assert row.ids.tolist() == [1, 5, 6, 7]  # what follows the last model token is not computed


@pytest.mark.parametrize("budget", [1, 5, 1000])
def test_groups_of_which_nothing_counts_leave_no_row(budget: int) -> None:
    groups = [Group("a", (episode(0, [1], [2], counted=False), episode(1, [1], [2], mask=[False])))]
    assert list(pack(groups, budget)) == []

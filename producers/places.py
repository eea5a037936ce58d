"""Where the turns of a conversation stand among the spans of its episode: what a next span continues."""

from __future__ import annotations

from .conversation import Prompt


class Places:
    def __init__(self) -> None:
        self._turns = 0
        self._places: dict[int, tuple[int, int]] = {}  # by number in the conversation: spans that end prompt and answer
        self._last: int | None = None  # the turn that ends with the newest span

    @property
    def any(self) -> bool:
        """Whether a turn was written."""
        return self._turns > 0

    def wrote(self, number: int | None, prompt_end: int, answer_end: int) -> None:
        """A turn, with the spans that end its parts; None: one that nothing will go on after."""
        self._turns += 1
        self._last = number
        if number is not None:
            self._places[number] = (prompt_end, answer_end)

    def end(self, prompt: Prompt) -> int:
        """The span that ends what a prompt without anything new continues."""
        return self._places[prompt.after or 0][int(prompt.with_answer)]

    def parent(self, prompt: Prompt) -> int:
        """The span that the first own token of a turn with this prompt continues; -1: the one before."""
        if prompt.after is None:
            return 0 if self._turns else -1
        if prompt.with_answer and prompt.after == self._last:
            return -1
        return self._places[prompt.after][int(prompt.with_answer)]

"""Decides what of a growing text may be shown, and where a stop string ends it.

Text once shown is never taken back: whatever may yet become a stop string or a tool call is held. A stop string isn't
part of the answer, but the tokens that spell it were sampled: they stay in the turn, as an end-of-turn token does.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import toolcalls


class Reading:
    """The text of one turn, token by token."""

    def __init__(self, stops: Sequence[str], tools: bool) -> None:
        self._stops, self._tools = tuple(stops), tools
        self._longest = max(map(len, self._stops), default=0)
        self.text = ""
        self.stopped = False
        self.ended = False

    def add(self, piece: str) -> bool:
        """What one more token said; whether a stop string is complete, so that nothing may follow."""
        if not piece or self.stopped:
            return self.stopped
        self.text += piece
        if not self._stops:
            return False
        before = max(0, len(self.text) - len(piece) - self._longest + 1)
        places = [place for stop in self._stops if (place := self.text.find(stop, before)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
        return self.stopped

    def shown(self) -> int:
        """How many characters may be given out now."""
        if self._tools and not self.ended:
            visible = toolcalls.shown(self.text)
        elif self._tools:
            return len(toolcalls.parsed(self.text).content)
        else:
            visible = len(self.text)
        if self.ended or self.stopped or not self._stops:
            return visible
        held = max((length for stop in self._stops for length in range(1, len(stop))
                    if self.text.endswith(stop[:length])), default=0)  # fmt: skip
        return min(visible, len(self.text) - held)

    def answer(self) -> toolcalls.Answer:
        return toolcalls.parsed(self.text) if self._tools else toolcalls.plain(self.text)

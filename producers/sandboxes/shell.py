"""The persistent shell: how a command goes into a sandbox and its result comes out, whatever carries the bytes.

An outer shell restarts the one that runs the steps when it dies: a command may `exit`, `exec` or kill its shell. (One
that kills every process it can see loses its sandbox.) A step's end comes on the outer shell's stderr, which its
command doesn't have, so output can't forge it by accident; a command that wants to can lie about its own exit status
and output, and about nothing else, since both carry the step's number. Two carriers of one sandbox may race, so the
output has marks of its own at the step's beginning and end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

SETTLE_S = 5.0  # for killed processes to be gone and a new shell to answer; then the sandbox is given up
OUTPUT, STATUS = 1, 2

# In the sandbox. Descriptor 3 is the status: "S code number" a step's exit status, "X code" the shell died with it, "R"
# a shell is ready. Number and command end with a NUL byte each; at the end of all commands the sandbox ends itself.
INNER = r"""
exec 4>&1
printf 'R\n' >&3
while IFS= read -r -d '' __number && IFS= read -r -d '' __command; do
    printf '\0%d\0' "$__number" >&4
    eval "$__command" </dev/null 3>&- 4>&-
    __code=$?
    printf '\0%d\0' "$((__number + 1))" >&4
    printf 'S %d %d\n' "$__code" "$__number" >&3
done
kill -9 "$PPID"
"""
OUTER = r"""
exec 3>&2 2>/dev/null
trap : INT TERM HUP QUIT
while :; do bash --noprofile --norc -c "$0" 2>&1; printf 'X %d\n' "$?" >&3; done
"""
ARGV = ("bash", "--noprofile", "--norc", "-c", OUTER, INNER)


class Channel(Protocol):
    """Bytes to and from the outer shell."""

    def exchange(self, data: bytes, timeout_s: float) -> tuple[int, list[tuple[int, bytes]]]:
        """Wait until something can be done, at most so long: how many bytes of `data` went in, and what came out, as
        (OUTPUT or STATUS, bytes). Raises EOFError where the other side is gone."""

    def close(self) -> None: ...


class Silent(Exception):
    """The shell didn't answer in time."""


@dataclass(frozen=True, slots=True)
class Ended:
    """`code`: the command's exit status, or that of its shell, which `died` with it."""

    code: int
    died: bool


class Shell:
    """Driven by one thread at a time. Every method may raise Silent, and EOFError as the channel does."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._words = b""
        self._said = b""  # on the status stream, not yet a whole line
        self._number = 0
        self._output: Between | None = None

    def wait_ready(self, timeout_s: float) -> None:
        self._await("R", time.monotonic() + timeout_s)

    def run(self, command: str, timeout_s: float, kept: Kept) -> Ended:
        """Its output goes to `kept`. Silent: its time is over."""
        self._number += 4
        self._output = Between(kept, self._number, self._number + 1)
        return self._end(time.monotonic() + timeout_s, self._packed(self._number, command))

    def late(self, timeout_s: float) -> Ended:
        """The end of the newest step after all."""
        return self._end(time.monotonic() + timeout_s)

    def recover(self) -> None:
        """The shell died, or was killed: wait for the next one, and let it say where the last step's output ends."""
        deadline, mark = time.monotonic() + SETTLE_S, self._number + 1
        self._await("R", deadline)
        self._await("S", deadline, self._packed(mark, ":"), mark)
        self._to_the_end()

    @property
    def last_words(self) -> str:
        """Of what should have become the shell."""
        return (self._words + self._said).decode(errors="replace").strip()

    # ------------------------------------------------------------------------------------------------- the streams

    def _end(self, deadline: float, send: bytes = b"") -> Ended:
        kind, value = self._await("SX", deadline, send, self._number)
        if kind == "S":
            self._to_the_end()
        return Ended(int(value), died=kind == "X")

    @staticmethod
    def _packed(number: int, command: str) -> bytes:
        return b"%d\0%b\0" % (number, command.encode(errors="replace"))

    def _await(self, kinds: str, deadline: float, send: bytes = b"", number: int | None = None) -> tuple[str, str]:
        """The next status of one of these kinds (an "S" of this number), while output is read and `send` is written.
        Raises Silent at the deadline."""
        while True:
            while b"\n" in self._said:
                line, _, self._said = self._said.partition(b"\n")
                kind, *values = line.decode(errors="replace").split(" ")
                if kind in kinds and (kind != "S" or values[1:] == [str(number)]) and all(map(str.isdecimal, values)):
                    return kind, values[0] if values else ""
                if len(kind) != 1:  # somebody else's words, before the shell was there
                    self._words = line
            left = deadline - time.monotonic()
            if left <= 0:
                raise Silent
            send = self._exchange(send, left)

    def _to_the_end(self) -> None:
        """Read up to the end's mark: it is on its way. Not for ever, since the command can have meddled."""
        output = self._output
        assert output is not None
        deadline = time.monotonic() + SETTLE_S
        while not output.done and (left := deadline - time.monotonic()) > 0:
            self._exchange(b"", left)
        output.finish()

    def _exchange(self, send: bytes, timeout_s: float) -> bytes:
        taken, came = self._channel.exchange(send, timeout_s)
        for stream, data in came:
            if stream == STATUS:
                self._said += data
            elif self._output is not None:
                self._output.add(data)
        return send[taken:]


class Kept:
    """The beginning and the end of an output, `limit` bytes in all."""

    def __init__(self, limit: int) -> None:
        self._head, self._tail = limit - limit // 2, limit // 2
        self._begin, self._end, self.dropped = b"", b"", 0

    @property
    def output(self) -> bytes:
        return self._begin + self._end

    def add(self, data: bytes) -> None:
        room = self._head - len(self._begin)
        self._begin, rest = self._begin + data[:room], data[room:]
        if rest:
            end = self._end + rest
            self._end = end[len(end) - self._tail :] if len(end) > self._tail else end
            self.dropped += len(end) - len(self._end)


class Between:
    """Passes on to `kept` what stands in a stream between the marks of two numbers, wherever it is cut."""

    def __init__(self, kept: Kept, begin: int, end: int) -> None:
        self._kept, self._begin, self._end = kept, b"\0%d\0" % begin, b"\0%d\0" % end
        self._carry, self._begun, self.done = b"", False, False

    def add(self, data: bytes) -> None:
        if self.done:
            return
        data = self._carry + data
        if not self._begun:
            _, self._begun, data = _cut(data, self._begin)
            if not self._begun:
                self._carry = data
                return
        inside, self.done, self._carry = _cut(data, self._end)
        self._kept.add(inside)

    def finish(self) -> None:
        """There is no more."""
        if self._begun and not self.done:
            self._kept.add(self._carry)
        self.done = True


def _cut(data: bytes, mark: bytes) -> tuple[bytes, bool, bytes]:
    """What stands before the mark, whether it is there, and what follows: what may be its beginning where it isn't."""
    before, found, after = data.partition(mark)
    if found:
        return before, True, after
    at = data.rfind(b"\0", max(0, len(data) - len(mark) + 1))
    if at >= 0 and mark.startswith(data[at:]):
        return data[:at], False, data[at:]
    return data, False, b""

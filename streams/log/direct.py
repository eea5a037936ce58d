"""Decides how weights reach workers without a second way through the broker: as the records that are on the log.

A chunk is written to the log first, as ever. Once the log has it, the trainer also hands the record, with its offset,
to whoever listens: over a socket (`Offering`, `Following`), or in the same process (`HandedOver.put` itself). A
receiver that needs an offset looks there first and reads the log for what it doesn't find: it is the same record. So
nothing depends on this way; a worker that is late, slow or cut off loses time alone, and what arrives is proved as all
weights are.

On the wire, little-endian: the four bytes HRD1, uint16 length and UTF-8 name of the topic; then for each record int64
offset, uint32 length, and the record's value.
"""

from __future__ import annotations

import collections
import logging
import socket
import struct
import threading

from headrace.schemas.errors import SettingsError

log = logging.getLogger("headrace.direct")

MAGIC = b"HRD1"
HELD_BYTES = 256 << 20  # that wait to be fetched, or for a listener to take them
RECORD_BYTES = 4 << 20  # more than any record of the log
RETRY_S = 1.0
_FRAME = struct.Struct("<qI")


class HandedOver:
    """Records that came before anyone asked for them, by offset. One thread puts, another takes."""

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self._most, self._lock = held_bytes, threading.Lock()
        self._records: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self._size = 0
        self.taken = 0  # records that were here when they were asked for

    def put(self, offset: int, value: bytes) -> None:
        """The oldest make room; the log has them all."""
        with self._lock:
            if offset not in self._records:
                self._records[offset] = value
                self._size += len(value)
            while self._size > self._most:
                self._drop()

    def take(self, offset: int) -> bytes | None:
        """The record, once; whatever lies before it will not be asked for any more."""
        with self._lock:
            value = self._records.get(offset)
            while self._records and next(iter(self._records)) <= offset:
                self._drop()
            self.taken += value is not None
            return value

    def _drop(self) -> None:
        self._size -= len(self._records.popitem(last=False)[1])


class Offering:
    """The trainer's end: every record that is offered goes to all who are connected then. A listener that doesn't keep
    up is cut off, and reads the log until it has come back."""

    def __init__(self, address: str, topic: str, held_bytes: int = HELD_BYTES) -> None:
        """`address`: HOST:PORT to listen at. Raises SettingsError."""
        name = topic.encode()
        self._greeting = MAGIC + struct.pack("<H", len(name)) + name
        self._most = held_bytes
        self._listeners: list[_Listener] = []
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_server(_split(address))
        except OSError as error:
            raise SettingsError(f"site.weights_socket {address} can't be listened at: {error}") from error
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="offering", daemon=True)
        self._thread.start()

    def offer(self, offset: int, value: bytes) -> None:
        """Never waits."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one.give(offset, value)]

    @property
    def listeners(self) -> int:
        """How many replicas are connected."""
        with self._lock:
            return sum(one.alive for one in self._listeners)

    def close(self) -> None:
        """Whoever follows reads from the log from now on."""
        _shut(self._socket)
        self._thread.join()
        with self._lock:
            for one in self._listeners:
                one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._socket.accept()
            except OSError:  # closed
                return
            log.info("weights go to %s directly", host)
            with self._lock:
                self._listeners.append(_Listener(connection, self._greeting, self._most))


class _Listener:
    def __init__(self, connection: socket.socket, greeting: bytes, held_bytes: int) -> None:
        self._connection, self._most = connection, held_bytes
        self._waiting: collections.deque[bytes] = collections.deque([greeting])
        self._size = 0
        self._changed = threading.Condition()
        self.alive = True
        threading.Thread(target=self._send, name="offering-to", daemon=True).start()

    def give(self, offset: int, value: bytes) -> bool:
        """Whether it still listens."""
        with self._changed:
            if self.alive and self._size + len(value) > self._most:
                log.warning("a worker takes weights too slowly to get them directly: it reads the log")
                self.close()
            if self.alive:
                self._waiting += [_FRAME.pack(offset, len(value)), value]
                self._size += len(value)
                self._changed.notify()
            return self.alive

    def close(self) -> None:
        self.alive = False
        _shut(self._connection)

    def _send(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._waiting:
                        self._changed.wait()
                    piece = self._waiting.popleft()
                self._connection.sendall(piece)
                with self._changed:
                    self._size -= len(piece) if len(piece) != _FRAME.size else 0
        except OSError:
            self.close()


class Following:
    """A worker's end: what the trainer offers lies in `ahead` until it is fetched. The trainer may come and go."""

    def __init__(self, address: str, topic: str, ahead: HandedOver) -> None:
        self._address, self._topic, self._ahead = _split(address), topic, ahead
        self._closed = threading.Event()
        self._connection: socket.socket | None = None
        self._said = ""
        self._thread = threading.Thread(target=self._follow, name="following", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection, and the thread that keeps it."""
        self._closed.set()
        if self._connection is not None:
            _shut(self._connection)
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                with socket.create_connection(self._address, timeout=5.0) as self._connection:
                    self._connection.settimeout(None)
                    self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    self._listen(self._connection)
            except (OSError, ValueError) as error:
                if str(error) != self._said and not self._closed.is_set():
                    log.warning("weights come by the log, not directly from %s:%d: %s", *self._address, error)
                self._said = str(error)
            self._closed.wait(RETRY_S)

    def _listen(self, connection: socket.socket) -> None:
        """Until the connection ends. Raises OSError, and ValueError where something else is at the other end."""
        (length,) = struct.unpack("<4xH", head := _exactly(connection, 6))
        if not head.startswith(MAGIC) or (found := _exactly(connection, length)) != self._topic.encode():
            raise ValueError(f"{found if head.startswith(MAGIC) else head!r} is offered there, not {self._topic}")
        log.info("weights come directly from %s:%d", *self._address)
        self._said = ""
        while True:
            offset, length = _FRAME.unpack(_exactly(connection, _FRAME.size))
            if length > RECORD_BYTES:
                raise ValueError(f"a record of {length} bytes")
            self._ahead.put(offset, _exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionError("the trainer has closed the connection")
        at += count
    return bytes(data)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"site.weights_socket {address!r}: HOST:PORT is expected")
    return host, int(port)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()

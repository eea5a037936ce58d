"""Decides what of a publication the trainer waits for: that version n is published before version n + 1 is committed.

Encoding, sending and the publication record are work of one thread of the trainer's process, in the order of versions;
meanwhile the trainer fetches and trains the next batch. A snapshot that is due follows its version's delta and is
waited for by nobody, unless the next version's delta stands behind it for longer than a step takes. There is one
transactional id and one owner, this process: the two threads' transactions take turns (`Policy`).

What fails in the thread is raised in the trainer's, at its next call here, and then the process ends: the next start
publishes what the log shows as committed and not published.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from headrace.schemas import delta

from .publish import Publisher


class Background:
    """Publishes one version at a time behind the trainer's back. All calls from the trainer's thread."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._delta: Future[None] | None = None
        self._snapshots: list[Future[None]] = []

    def publish(self, version: int, changes: delta.Changes, served_hash: bytes) -> None:
        """Begin to publish a version that has just been committed. The one before must be `settled`."""
        assert self._delta is None
        self._delta = self._thread.submit(self._publisher.publish_delta, version, changes, served_hash)
        self._snapshots.append(self._thread.submit(self._publisher.publish_snapshot_if_due))

    def check(self) -> None:
        """Raise what has failed since; without waiting."""
        if self._delta is not None and self._delta.done():
            self._delta.result()
        for done in [one for one in self._snapshots if one.done()]:
            done.result()
            self._snapshots.remove(done)

    def settled(self) -> None:
        """Wait until the newest version is published, so that the next one may be compared with it and committed.
        Raises what has failed (Fenced, LogError)."""
        if self._delta is not None:
            self._delta.result()
            self._delta = None
        self.check()

    def finish(self) -> None:
        """Wait for snapshots too."""
        self.settled()
        while self._snapshots:
            self._snapshots.pop(0).result()

    def close(self) -> None:
        """Wait for nothing that can be left to the next start: a transfer is broken off, and a transaction that has
        begun ends by its own time-out at the latest."""
        self._publisher.abandon()
        self._thread.shutdown(wait=True, cancel_futures=True)

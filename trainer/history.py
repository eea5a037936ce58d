"""Decides what the log says of the run's versions: whose hashes hold, which of them led to the newest weights, and
which were given up.

Training is deterministic on one fingerprint (device, libraries, threads, micro-batch budget), so a version that is
trained again must come out as it was committed. Where it doesn't, the run's `checkpoint.on_difference` decides, and the
choice is a record (`Reconciled`) that changes what holds from there on. Pure: no clients, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.schemas.events import Reconciled, Version

STOP, REBASE, ROLLBACK = "stop", "rebase", "rollback"


@dataclass(slots=True)
class History:
    """The trainer's records of `policy`, folded in order by `commit` and `reconcile`.

    versions: by number, with the hashes that hold. tip: the version whose weights the next one is trained from (-1:
    none). loose: versions that a rebase passed over, whose hashes hold no more. replaced: versions that stand under
    other hashes than they were committed with.
    """

    versions: dict[int, Version] = field(default_factory=dict)
    tip: int = -1
    loose: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)

    @property
    def committed(self) -> int:
        return max(self.versions, default=-1)

    def commit(self, version: Version) -> None:
        self.versions[version.version] = version
        self.tip = version.version

    def reconcile(self, event: Reconciled) -> None:
        if event.replaces:
            self.replaced.add(event.version)
            self.versions[event.version] = replace(
                self.versions[event.version], served_hash=event.served_hash, train_hash=event.train_hash,
                fingerprint=event.fingerprint,
            )  # fmt: skip
        if event.rule == REBASE:
            passed = [version.version for version in self.path(event.version, after=event.checkpoint)]
            self.loose |= set(passed) - {event.version}
        else:
            self.tip = event.checkpoint

    def path(self, to: int | None = None, after: int = 0) -> list[Version]:
        """The versions that led to `to` (default: the tip) and came after `after`, in the order in which they were
        trained. Version 0, which nothing trained, is in none."""
        found: list[Version] = []
        at = self.tip if to is None else to
        while at > max(0, after):
            found.append(self.versions[at])
            at = self.versions[at].parent
        return found[::-1]

    def known(self, to: int | None = None) -> dict[int, bytes]:
        """Train hash by version, of what may be gone on from: a checkpoint of a version that was given up is none."""
        first = {0: self.versions[0].train_hash} if 0 in self.versions else {}
        return first | {one.version: one.train_hash for one in self.path(to) if one.version not in self.loose}


def differences(here: str, then: str) -> list[str]:
    """What of two fingerprints (JSON objects) differs, one phrase each; empty where nothing does."""
    now, was = _parsed(here), _parsed(then)
    return [f"{key} {now.get(key)} (then {was.get(key)})"
            for key in sorted(now.keys() | was.keys()) if now.get(key) != was.get(key)]  # fmt: skip


def _parsed(fingerprint: str) -> Mapping[str, object]:
    found = json.loads(fingerprint)
    return found if isinstance(found, dict) else {}

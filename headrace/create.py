"""How a run comes to be: its topics, its settings as the first record of `policy`, and the schemas of its records.

Creating is safe to repeat and to race: whoever owns the transactional id writes only what it has seen to be missing.
All records are one transaction and one chain, that of the writer `create`. Repeating it with a newer version of
Headrace announces what that version writes in another form, before any of its processes writes so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from headrace.schemas.codec import decode, kind_of, own_schemas
from headrace.schemas.errors import Fenced, ModelError, RunConflict, SettingsError
from headrace.schemas.events import Derived, RunCreated, SchemaAdded
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import POLICY, RunTopics
from headrace.streams.log import clients, policy
from headrace.streams.log.transactions import Output, Transactor

from .settings import differences

WRITER = "create"
TRIES = 10  # against others who create the same run at the same moment


def check_model(settings: RunSettings) -> None:
    """Raises ModelError where the path holds no model."""
    from pathlib import Path

    path = Path(settings.model.path)
    if not path.is_dir():
        raise ModelError(f"model.path: {path}: no such folder; give the folder of a Hugging Face model")
    for needed in ("config.json", "tokenizer_config.json"):
        if not (path / needed).is_file():
            raise ModelError(f"model.path: {path}: no {needed} in it; give the folder of a Hugging Face model")


def create_run(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings,
               derived: Callable[..., Derived] | None = None) -> bool:  # fmt: skip
    """True where the run is new. When it returns, every reader can see what it wrote. `derived` makes the record that
    says which run it comes from. Raises RunConflict with the differences where the run exists with other settings, or
    comes from elsewhere."""
    _check_replication(kafka, topics, settings.log.replication)
    clients.create_topics(kafka, topics.specs(settings.log.partitions, settings.log.replication))
    for left in reversed(range(TRIES)):
        try:
            new = _write(kafka, topics, settings, derived)
            policy.settled_end(kafka, topics)  # a commit is acknowledged a moment before readers see it
            return new
        except Fenced:  # by another who creates this run: what it wrote is seen in the next try
            if not left:
                raise
            time.sleep(random.uniform(0.05, 0.5))
    raise AssertionError("unreachable")


def _write(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings,
           derived: Callable[..., Derived] | None) -> bool:  # fmt: skip
    # 1. Take the id over; 2. read what there is; 3. write what is missing, as one transaction.
    transactor = Transactor(kafka, topics.transactional_id("create"))
    try:
        records = policy.settled_records(kafka, topics)
        if records:
            opened = policy.open_settings(kafka, topics)
            # A file may say what `headrace set` changed, or not.
            if settings != policy.in_force(opened.settings, policy.settings_changes(records)):
                _same(opened.settings, settings, topics)
            if derived is not None:
                _same_origin(topics, [decode(r.value) for r in records if kind_of(r.value) is Derived], derived)
        known = {event.fingerprint for event in policy.announced(records)}
        new = [schema for schema in own_schemas() if schema[1] not in known]
        chain = policy.chain_of(WRITER, records)
        values = []
        if not records:
            created = RunCreated(**chain.link(), writer=WRITER, run=topics.run, settings=settings.model_dump_json(),
                                 software=version("headrace"), created_ms=int(time.time() * 1000))  # fmt: skip
            values.append(chain.extend(created))
            if derived is not None:
                values.append(chain.extend(derived(**chain.link(), writer=WRITER)))
        last = chain.number + len(new) - 1
        for name, fingerprint, schema in new:
            added = SchemaAdded(**chain.link(), writer=WRITER, name=name, fingerprint=fingerprint, schema=schema,
                                last=last)  # fmt: skip
            values.append(chain.extend(added))
        if values:
            transactor.send([Output(topics.name(POLICY), 0, value) for value in values])
        return not records
    finally:
        transactor.close()


def _check_replication(kafka: Mapping[str, Any], topics: RunTopics, copies: int) -> None:
    """For a new run, one copy or more than there are brokers is a mistake. Raises SettingsError."""
    cluster = clients.insist(lambda left_s: clients.admin(kafka).list_topics(timeout=left_s), 30.0,
                             "the cluster's brokers are not to be had")  # fmt: skip
    brokers = len(cluster.brokers)
    if topics.name(POLICY) in cluster.topics:
        return
    if copies > brokers:
        raise SettingsError(f"log.replication = {copies}, but this cluster has {brokers} "
                            f"{'broker' if brokers == 1 else 'brokers'}: set it to {min(3, brokers)}")  # fmt: skip
    if copies == 1 and brokers >= 3:
        raise SettingsError(f"log.replication = 1 on a cluster of {brokers} brokers: the run would be lost with any "
                            "one of them. Set log.replication = 3")  # fmt: skip


def _same_origin(topics: RunTopics, recorded: list[Any], derived: Callable[..., Derived]) -> None:
    asked = derived(number=0, previous=b"", writer=WRITER)
    names = ("kind", "parent", "version", "train_hash", "cursor", "changes", "verifier")
    if len(recorded) != 1 or any(getattr(recorded[0], name) != getattr(asked, name) for name in names):
        was = f"a {recorded[0].kind} of {recorded[0].parent}@{recorded[0].version}" if recorded else "a run of its own"
        raise RunConflict(f"run {topics.run!r} exists as {was}, asked for was a {asked.kind} of "
                          f"{asked.parent}@{asked.version}: use another run id")  # fmt: skip


def _same(recorded: RunSettings, given: RunSettings, topics: RunTopics) -> None:
    if lines := differences(recorded, given):
        raise RunConflict(
            f"run {topics.run!r} exists with other settings:\n" + "\n".join(lines)
            + "\nUse another run id, or give it the settings that it has; `headrace set` changes what may change."
        )

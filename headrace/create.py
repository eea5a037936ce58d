"""How a run comes to be: its topics, and its settings as the first record of `policy`.

Creating is safe to repeat and to race: whoever owns the transactional id writes the first record only after having seen
that there is none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from headrace.schemas.chain import Chain
from headrace.schemas.errors import ModelError, RunConflict, SettingsError
from headrace.schemas.events import RunCreated
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import POLICY, RunTopics
from headrace.streams.log import clients, policy
from headrace.streams.log.transactions import Output, Transactor

from .settings import differences


def check_model(settings: RunSettings) -> None:
    """Raises ModelError where the path holds no model."""
    from pathlib import Path

    path = Path(settings.model.path)
    if not path.is_dir():
        raise ModelError(f"model.path: {path}: no such folder; give the folder of a Hugging Face model")
    for needed in ("config.json", "tokenizer_config.json"):
        if not (path / needed).is_file():
            raise ModelError(f"model.path: {path}: no {needed} in it; give the folder of a Hugging Face model")


def create_run(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings) -> bool:
    """True where the run is new. Raises RunConflict with the differences where it exists with other settings."""
    _check_replication(kafka, topics, settings.log.replication)
    clients.create_topics(kafka, topics.specs(settings.log.partitions, settings.log.replication))
    transactor = Transactor(kafka, topics.transactional_id("create"))
    try:
        if policy.first_record(kafka, topics) is not None:
            _same(policy.open_settings(kafka, topics).settings, settings, topics)
            return False
        chain = Chain()
        created = RunCreated(**chain.link(), writer="create", run=topics.run, settings=settings.model_dump_json(),
                             software=version("headrace"), created_ms=int(time.time() * 1000))  # fmt: skip
        transactor.send([Output(topics.name(POLICY), 0, chain.extend(created))])
        return True
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


def _same(recorded: RunSettings, given: RunSettings, topics: RunTopics) -> None:
    if lines := differences(recorded, given):
        raise RunConflict(
            f"run {topics.run!r} exists with other settings:\n" + "\n".join(lines)
            + "\nUse another run id, or give it the settings that it has."
        )

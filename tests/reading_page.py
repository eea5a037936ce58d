"""docs/reading.md and its pictures: what each command that reads a run says of one.

`make demo`, then `python -m tests.reading_page RUN` (with the address of the broker in HEADRACE_BOOTSTRAP_SERVERS).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.pages import main as picture

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = """from headrace.consumers import open_run

for group in open_run("{run}").groups():
    if group.disposition == "batched":
        print(group.id, group.task, "reward", group.reward, "lag", group.max_lag, "slowest slot", group.held_up_by)
"""
PAGE = """# A run, read

What `make demo` leaves behind, read in four ways. Each works while a run goes on, and none disturbs it: readers are
read-committed and join no consumer group. Made by `python -m tests.reading_page RUN` from a real run.

## Where does it stand, and what holds it up?

```text skip: what is made of the run of make demo, by tests/reading_page.py
$ headrace status {run}
{status}```

`headrace status {run} --follow` is the same, live, with the report's verdicts, until Ctrl-C or the run's end.

## Six questions, one page

```text skip: what is made of the run of make demo, by tests/reading_page.py
$ headrace report {run}
{report}```

One file that needs no network, for a screen, a phone and paper; `--against OTHER` puts a second run beside it, `--json`
gives the same numbers.

![the report](report.png)

![the report on a phone](report-phone.png)

## Tables

```text skip: what is made of the run of make demo, by tests/reading_page.py
$ headrace export {run} out
{export}```

What their columns mean: [tables.md](tables.md).

## Five lines

```python skip: of the run of make demo; docs/analytics.md runs more like it
{script}```

```text skip: what it printed
{said}...
```
"""


def main(run: str) -> None:
    def say(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        script = SCRIPT.format(run=run)
        (Path(folder) / "five.py").write_text(script)
        address = ("--bootstrap", os.environ["HEADRACE_BOOTSTRAP_SERVERS"])
        text = PAGE.format(
            run=run, status=say("-m", "headrace", "status", run, *address),
            report=say("-m", "headrace", "report", run, *address),
            export=say("-m", "headrace", "export", run, "out", *address), script=script,
            said="".join(say("five.py").splitlines(keepends=True)[:5]),
        )  # fmt: skip
        page = str(Path(folder) / f"{run}.html")
        picture([page, str(DOCS / "report.png")])
        picture([page, str(DOCS / "report-phone.png"), "--phone"])
    (DOCS / "reading.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])

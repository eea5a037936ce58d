import json
from pathlib import Path

CLEAN = """id,date,customer,cents
3,2024-03-15,cleo,10000
7,2024-03-02,ada,1350
8,2023-12-31,dan,2000
9,2024-02-29,eve,99
13,2024-03-07,cleo,100
14,2024-03-07,cleo,250
15,2023-12-31,ada,9545
"""
SUMMARY = {"orders": 7, "invalid": 7, "cents": 23344, "best": "ada"}


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


lines = read("/app/clean.csv").replace("\r\n", "\n").splitlines()
wanted = CLEAN.splitlines()
rows = sum(line in lines for line in wanted[1:]) / len(wanted[1:]) if len(lines) <= len(wanted) else 0.0
try:
    summary = json.loads(read("/app/summary.json"))
except ValueError:
    summary = {}
facts = sum(isinstance(summary, dict) and summary.get(key) == value for key, value in SUMMARY.items()) / len(SUMMARY)
parts = {"rows": rows, "exact": float(lines == wanted), "summary": facts}
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": sum(parts.values()) / len(parts), **parts}))

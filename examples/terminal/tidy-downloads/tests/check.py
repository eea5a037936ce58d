"""Named parts, so that half of the work is worth something."""

import hashlib
import json
from pathlib import Path

CONTENTS = {
    "csv/bills.csv": "id,amount\n1,5\n",
    "jpg/forest.jpg": "forest\n",
    "jpg/holiday photo.JPG": "sunset\n",
    "other/README": "hello\n",
    "py/script.py": "print(1)\n",
    "txt/notes from monday.txt": "a b c\n",
}
GONE = ("jpg/sunset.jpg", "txt/copy.txt")
root = Path("/app/sorted")
lines = [f"{hashlib.sha256(CONTENTS[path].encode()).hexdigest()}  {path}\n" for path in sorted(CONTENTS)]


def holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


there = sum(holds(root / path, text) for path, text in CONTENTS.items())
left = [path for path in Path("/app/downloads").rglob("*") if path.is_file()]
extra = [path for path in root.rglob("*") if path.is_file()
         and path.relative_to(root).as_posix() not in {*CONTENTS, "index.txt"}]  # fmt: skip
parts = {
    "moved": there / len(CONTENTS),
    "duplicates": float(there > 0 and not any((root / path).exists() for path in GONE) and not extra),
    "emptied": float(there > 0 and not left),
    "index": float(holds(root / "index.txt", "".join(lines))),
}
total = sum(parts.values()) / len(parts)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": total, **parts}))

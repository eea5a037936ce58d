"""The schemas that were published: what may never change again. `python -m tests.published` appends what is new.

`data/wire/published.json` lists name, version and fingerprint of every schema file. A version is superseded, never
changed: its file becomes `<Name>.v<k>.avsc`, and the new one gets the next number.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.schemas.codec import schema_header

TABLE = Path(__file__).parent / "data" / "wire" / "published.json"


def schema_files() -> dict[str, list[Any]]:
    """The versions of each record, oldest first; the last one is what is written today."""
    folder = resources.files("headrace.schemas") / "avro"
    files = {file.name: json.loads(file.read_text()) for file in folder.iterdir() if file.name.endswith(".avsc")}
    out = {}
    for name in sorted(name.removesuffix(".avsc") for name in files if name.count(".") == 1):
        older = sum(file.startswith(f"{name}.v") for file in files)
        out[name] = [files[f"{name}.v{k}.avsc"] for k in range(1, older + 1)] + [files[f"{name}.avsc"]]
    return out


def fingerprint(schema: Any) -> str:
    return schema_header(schema)[2:].hex()


def now() -> list[dict[str, Any]]:
    """A row for every file."""
    return [{"name": name, "version": k, "fingerprint": fingerprint(schema)}
            for name, versions in schema_files().items() for k, schema in enumerate(versions, 1)]  # fmt: skip


def published() -> list[dict[str, Any]]:
    return list(json.loads(TABLE.read_text()))


def main() -> None:
    rows = published() if TABLE.exists() else []
    known = {(row["name"], row["version"]) for row in rows}
    rows += [row for row in now() if (row["name"], row["version"]) not in known]
    rows.sort(key=lambda row: (row["name"], row["version"]))
    TABLE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()

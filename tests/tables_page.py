"""Writes docs/tables.md from the definition of the tables: `.venv/bin/python -m tests.tables_page`."""

from __future__ import annotations

from pathlib import Path

from headrace.consumers.frames.schema import markdown

PAGE = Path(__file__).parents[1] / "docs" / "tables.md"

if __name__ == "__main__":
    PAGE.write_text(markdown())
    print(f"wrote {PAGE}")

"""What the site changes of a page, so that the same file reads well on a code host: two rules, no content.

- A fence's info string may say more than its language (`sh run`, `toml file=run.toml`); the site's Markdown knows only
  the language.
- A link to a file of the repository outside docs/ works on a code host. The site has no such file: it shows the path,
  and a path that doesn't exist is a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^(\s*```\w+) .*$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)\)")
# Logged below MkDocs' own name: a strict build counts its warnings.
_log = logging.getLogger("mkdocs.hooks.docs")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def shown(match: re.Match[str]) -> str:
        text, path = match.groups()
        target = (Path(page.file.abs_src_path).parent / match[0].split("](")[1].rstrip(")")).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        return text if path in text else f"{text} (`{path}`)"

    return _OUTSIDE.sub(shown, _FENCE.sub(r"\1", markdown))

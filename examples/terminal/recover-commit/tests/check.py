import subprocess
from pathlib import Path


def git(*words: str) -> str:
    return subprocess.run(["git", "-c", "safe.directory=*", "-C", "/app/site", *words], check=True, capture_output=True,
                          text=True).stdout  # fmt: skip


assert git("log", "--format=%s", "main").splitlines() == ["About page and dark theme", "A better title", "First pages"]
assert git("symbolic-ref", "HEAD").strip() == "refs/heads/main"
assert git("status", "--porcelain") == ""
assert sorted(git("show", "main:config.yml").split("\n")) == ["", "theme: dark", "title: Our site"]
assert git("show", "main:pages/about.md") == "# About\n\nWe are three.\n"
assert git("show", "main:pages/home.md") == "# Home\n\nWelcome.\n"
assert git("show", "main~1:config.yml").startswith("title: Our site\ntheme: light")
assert Path("/app/site/pages/about.md").is_file()

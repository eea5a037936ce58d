import subprocess
import tempfile
from pathlib import Path


def rotate(*words: str) -> int:
    return subprocess.run(["bash", "/app/rotate.sh", *words], capture_output=True, timeout=20).returncode


def state(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


with tempfile.TemporaryDirectory() as name:
    folder = Path(name, "my logs")
    folder.mkdir()
    assert rotate(str(folder), "2") == 0 and state(folder) == {}
    (folder / "a.log").write_text("one")
    (folder / "web server.log").write_text("x")
    (folder / "quiet.log").write_text("")
    (folder / "notes.txt").write_text("stays")
    assert rotate(str(folder), "2") == 0
    assert state(folder) == {"a.log": "", "a.log.1": "one", "web server.log": "", "web server.log.1": "x",
                             "quiet.log": "", "notes.txt": "stays"}  # fmt: skip
    for text in ("two", "three"):
        (folder / "a.log").write_text(text)
        assert rotate(str(folder), "2") == 0
    assert state(folder) == {"a.log": "", "a.log.1": "three", "a.log.2": "two", "web server.log": "",
                             "web server.log.1": "x", "quiet.log": "", "notes.txt": "stays"}  # fmt: skip
    before = state(folder)
    for words in (("2",), (str(folder), "0"), (str(folder), "many"), (str(folder / "none"), "2"), (str(folder),)):
        assert rotate(*words) == 2, words
        assert state(folder) == before
    (folder / "a.log").write_text("four")
    assert rotate(str(folder), "1") == 0
    assert state(folder)["a.log.1"] == "four" and "a.log.2" not in state(folder)

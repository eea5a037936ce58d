"""Draws the pictures of docs/concepts.md into docs/img/: `python -m docs.pictures`. Plain SVG, so that a page needs
neither a script nor a network to show them, here and on a code host. A test compares the files with it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "img"
INK, SOFT, PAPER = "#1b2733", "#5b6b7a", "#ffffff"
ROLE, LOG, GOOD, BAD = "#dbe9f9", "#f5ecd7", "#dff0df", "#f6dedd"


class Picture:
    """Boxes, arrows and words at given places, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, *lines: str, fill: str = ROLE) -> None:
        """The first line is the name, the others are said of it."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" '
                           f'stroke="{INK}"/>')  # fmt: skip
        top = y + h / 2 - 8 * (len(lines) - 1) + 5
        for index, line in enumerate(lines):
            self.text(x + w / 2, top + 16 * index, line, size=14 if index == 0 else 12, bold=index == 0, middle=True,
                      colour=INK if index == 0 else SOFT)  # fmt: skip

    def text(self, x: float, y: float, words: str, size: int = 12, bold: bool = False, middle: bool = False,
             colour: str = INK) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        anchor = ' text-anchor="middle"' if middle else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight}{anchor} fill="{colour}">'
                           f"{escape(words)}</text>")  # fmt: skip

    def arrow(self, *points: tuple[float, float], words: str = "", dashed: bool = False) -> None:
        """Through these points; `words` stand above the middle of the first stretch."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)"{dash}/>')
        if words:
            (x0, y0), (x1, y1) = points[0], points[1]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 6, words, middle=True, colour=SOFT)

    def line(self, *points: tuple[float, float], colour: str = INK, wide: float = 1) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{wide:g}"/>')

    def svg(self) -> str:
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="system-ui, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>', *self._parts, "</svg>", "",
        ])  # fmt: skip


def token() -> Picture:
    """From the engine that samples it to the weights that it moves, and back."""
    p = Picture(880, 320, "The path of a token")
    roles = ((10, "worker", "its engine samples:", "id, logprob, version"),
             (260, "assembler", "closes the group;", "an account each"),
             (510, "coordinator", "lag, drift, weight;", "which batch"),
             (750, "trainer", "proves the hash,", "trains"))  # fmt: skip
    topics = ((120, "trajectories", "Span"), (370, "samples, groups", "payload, closure"), (615, "batches", "Manifest"))
    for x, *said in roles:
        p.box(x, 20, 120 if x == 750 else 140, 70, *said)
    for index, (x, *said) in enumerate(topics):
        p.box(x, 130, 140, 50, *said, fill=LOG)
        left, right = roles[index][0], roles[index + 1][0]
        p.arrow((left + 120, 90), (left + 120, 110), (x + 45, 110), (x + 45, 130))
        p.arrow((x + 115, 130), (x + 115, 110), (right + 20, 110), (right + 20, 90))
    p.box(615, 230, 140, 50, "policy", "Version, Publication", fill=LOG)
    p.box(120, 230, 140, 50, "weights", "chunks of a delta", fill=LOG)
    p.arrow((830, 90), (830, 255), (755, 255))
    p.arrow((615, 255), (260, 255), words="a Publication names its chunks")
    p.arrow((120, 255), (40, 255), (40, 90))
    p.text(48, 215, "proved,", colour=SOFT)
    p.text(48, 230, "applied", colour=SOFT)
    p.text(10, 308, "Blue: processes. Sand: topics. Processes say nothing to each other but through topics, so a "
           "trained token's path can be walked back.", colour=SOFT)  # fmt: skip
    return p


def group() -> Picture:
    """From the lease that opens it to its one fate."""
    p = Picture(880, 360, "The life of a group")
    p.box(10, 130, 120, 70, "opened", "by its first lease:", "slots, rules, task")
    p.box(180, 130, 140, 70, "slots run", "attempt n of a slot,", "by one incarnation")
    p.arrow((130, 165), (180, 165))
    p.arrow((230, 130), (230, 80), (290, 80), (290, 130))
    p.text(260, 42, "infra_failure, unknown or a lost worker:", middle=True, colour=SOFT)
    p.text(260, 60, "the next lease, attempt n + 1", middle=True, colour=SOFT)
    p.box(390, 130, 110, 70, "closed", "slots ended,", "or deadline")
    p.arrow((320, 165), (390, 165))
    rows = ((20, "zero_variance", "all rewards equal"), (75, "too_few_survivors", "below min_survivors"),
            (185, "expired", "on_deadline = cancel"), (240, "evaluated", "purpose eval"),
            (295, "unmanaged", "written beside the run"))  # fmt: skip
    for y, name, why in rows:
        p.box(560, y, 150, 45, name, why, fill=BAD if y < 200 else LOG)
        p.arrow((500, 165), (530, 165), (530, y + 22), (560, y + 22))
    p.box(560, 130, 150, 45, "candidate", "may be trained", fill=GOOD)
    p.arrow((500, 165), (530, 165), (530, 152), (560, 152))
    for y, name, why in ((80, "batched", "in a manifest"), (130, "stale", "all beyond limits"),
                         (180, "leftover", "the tasks ended")):  # fmt: skip
        p.box(750, y, 120, 42, name, why, fill=GOOD if name == "batched" else BAD)
        p.arrow((710, 152), (730, 152), (730, y + 21), (750, y + 21))
    p.text(560, 355, "closure: the assembler's word", colour=SOFT)
    p.text(750, 245, "disposition:", colour=SOFT)
    p.text(750, 261, "the coordinator's", colour=SOFT)
    return p


def version() -> Picture:
    """One committed batch, and how it comes to exist for others."""
    p = Picture(880, 300, "What a version is")
    p.box(10, 30, 150, 70, "manifest n", "groups by offset", "and hash", fill=LOG)
    p.box(205, 30, 150, 70, "forward", "on the served weights", "of version n - 1")
    p.box(400, 30, 150, 70, "optimizer", "minibatches x epochs", "steps, float32 masters")
    p.box(595, 30, 150, 70, "served weights n", "masters rounded to", "the published dtype", fill=GOOD)
    for x in (160, 355, 550):
        p.arrow((x, 65), (x + 45, 65))
    p.box(595, 150, 150, 60, "Version record", "batch, hashes, rho", fill=LOG)
    p.arrow((670, 100), (670, 150), words="")
    p.text(680, 130, "commit", colour=SOFT)
    p.box(400, 150, 150, 60, "chunks", "a delta, or a snapshot", fill=LOG)
    p.arrow((595, 180), (550, 180))
    p.box(205, 150, 150, 60, "Publication", "names the chunks", fill=LOG)
    p.arrow((400, 180), (355, 180))
    p.box(10, 150, 150, 60, "replicas", "fetch, prove, apply")
    p.arrow((205, 180), (160, 180))
    p.text(10, 245, "From the commit on, the batch is trained: a crash before it trains it again, to the same bits.",
           colour=SOFT)  # fmt: skip
    p.text(10, 265, "From the publication on, the version exists for others. At most one version is committed and not "
           "yet published;", colour=SOFT)  # fmt: skip
    p.text(10, 285, "the trainer trains the next batch meanwhile.", colour=SOFT)
    return p


def staleness() -> Picture:
    """Lag is counted, drift is measured, the weight follows."""
    p = Picture(880, 340, "Staleness: lag, drift, weight")
    p.line((30, 110), (480, 110))
    for index in range(5):
        x = 60 + 100 * index
        p.line((x, 104), (x, 116))
        p.text(x, 134, f"v{index + 3}", middle=True, bold=True)
        if index:
            p.text(x - 50, 100, f"rho {index + 3}", middle=True, colour=SOFT)
    p.box(10, 30, 110, 45, "sampled here", "version 3", fill=ROLE)
    p.box(405, 30, 110, 45, "trained here", "target 7", fill=GOOD)
    p.line((60, 75), (60, 104), colour=SOFT)
    p.line((460, 75), (460, 104), colour=SOFT)
    p.arrow((60, 165), (460, 165), words="")
    p.text(260, 185, "lag = 7 - 3 = 4 versions", middle=True, bold=True)
    p.text(10, 225, "drift = floor + (rho 4 + rho 5 + rho 6 + rho 7)^2, in nats squared", bold=True)
    p.text(10, 248, "rho v: root mean square change of a token's log-probability from version v - 1 to v, on a probe,",
           colour=SOFT)  # fmt: skip
    p.text(10, 266, "published with version v. Not published yet: the latest one stands in. None yet: lag alone "
           "decides.", colour=SOFT)  # fmt: skip
    p.text(10, 300, "Beyond staleness.hard_lag the weight is 0 whatever the drift. A token of weight 0 trains nothing,",
           colour=SOFT)  # fmt: skip
    p.text(10, 318, "and its episode stays in the group's baseline.", colour=SOFT)
    p.line((600, 50), (600, 190), (860, 190))
    p.line((600, 70), (680, 70), (800, 190), (850, 190), colour="#2266bb", wide=2)
    p.text(592, 74, "1", bold=True, size=12)
    p.text(600, 42, "staleness weight", bold=True)
    p.text(680, 206, "ramp_from", middle=True, colour=SOFT)
    p.text(800, 206, "drift_limit", middle=True, colour=SOFT)
    p.text(730, 226, "drift over the floor", middle=True)
    return p


PICTURES = {"token": token, "group": group, "version": version, "staleness": staleness}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()

"""The parts of sandboxes that need none: marks in a stream, bounded output, files of control groups, packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.producers.sandboxes import SandboxSpec
from headrace.producers.sandboxes.cgroups import CONTROLLERS, Counters, Group, Groups, _limit
from headrace.producers.sandboxes.image import closure
from headrace.producers.sandboxes.shell import Between, Kept

STREAM = b"earlier\0\x004\0one\0two\x005\0\x00later\x005\0"  # with NUL bytes of its own


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_marks_are_found_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    kept = Kept(1000)
    between = Between(kept, 4, 5)
    at = [0, *sorted(cuts), len(STREAM)]
    for begin, end in zip(at, at[1:], strict=False):
        between.add(STREAM[begin:end])
    # "\0" "5" "\0" ends it at the first place where it stands.
    assert between.done and kept.output == b"one\0two"


def test_output_without_its_end_is_kept_up_to_where_it_came() -> None:
    kept = Kept(1000)
    between = Between(kept, 4, 5)
    between.add(b"\x004\0begun\x005")
    assert (kept.output, between.done) == (b"begun", False)
    between.finish()
    assert kept.output == b"begun\x005"


@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(0, 40))
def test_kept_output_is_the_beginning_and_the_end(parts: list[bytes], limit: int) -> None:
    kept, whole = Kept(limit), b"".join(parts)
    for part in parts:
        kept.add(part)
    assert len(kept.output) + kept.dropped == len(whole)
    if not kept.dropped:
        assert kept.output == whole
    else:
        head = limit - limit // 2
        assert kept.output == whole[:head] + whole[len(whole) - limit // 2 :]


@pytest.mark.parametrize("unified", [False, True])
def test_limits_are_written_in_the_words_of_either_version(tmp_path: Path, unified: bool) -> None:
    (tmp_path / ("memory.swap.max" if unified else "memory.memsw.limit_in_bytes")).write_text("max")
    spec = SandboxSpec(memory_bytes=1 << 20, processes=7, cpus=0.5)
    for controller in CONTROLLERS:
        _limit(tmp_path, controller, unified, spec)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"pids.max": "7"} | (
        {"memory.max": "1048576", "memory.swap.max": "0", "cpu.max": "50000 100000"} if unified else
        {"memory.limit_in_bytes": "1048576", "memory.memsw.limit_in_bytes": "1048576", "cpu.cfs_quota_us": "50000",
         "cpu.cfs_period_us": "100000"})  # fmt: skip


def test_counters_are_read_in_the_words_of_either_version(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (new / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (old / "memory.max_usage_in_bytes").write_text("67108864\n")
    (old / "memory.limit_in_bytes").write_text("67108864\n")
    for folder in (old, new):
        (folder / "pids.events").write_text("max 3\n")
        group = Group({"memory": folder, "pids": folder})
        assert group.counters() == Counters(kills=1, full=True, refused=3)
        group.close()
    # Killed although the group had room: the machine ran out of memory.
    (old / "memory.max_usage_in_bytes").write_text("1000000\n")
    assert not Group({"memory": old}).counters().full
    assert Group({}).counters() == Counters()


def test_machine_without_control_groups_is_said_to_lack_each_limit(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    groups = Groups(tmp_path)
    assert [one.partition(" (")[0] for one in groups.missing] == list(CONTROLLERS.values())
    assert groups.create("1.2.3.x", SandboxSpec()).doors == []


def test_plain_image_takes_what_its_packages_depend_on() -> None:
    names = {one.partition("=")[0] for one in closure(["bash"])}
    assert {"bash", "libc6"} <= names and "python3" not in names

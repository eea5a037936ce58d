"""A wrong file is refused with its name, the key and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.errors import SettingsError
from headrace.settings import describe, differences, load_config, load_site

GOOD = """
run = "demo"
seed = 3
[model]
path = "model"
[tasks]
dataset = "chain_sum"
config = {min_terms = 2, max_terms = 2}
[batch]
groups = 4
[site]
workers = 2
[site.kafka]
"bootstrap.servers" = "127.0.0.1:9092"
"sasl.mechanism" = "SCRAM-SHA-512"
"socket.keepalive.enable" = true
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_file_gives_run_settings_and_site_settings_apart(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config.run == "demo" and config.settings.batch.groups == 4 and config.site.workers == 2
    assert config.settings.model.path == str(tmp_path / "model")
    assert "site" not in config.settings.model_dump()
    assert config.site.kafka["sasl.mechanism"] == "SCRAM-SHA-512"
    assert load_site(config.file) == config.site


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("groups = 4", "groups = 0", "batch.groups: Input should be greater than or equal to 1, got 0"),
        ("groups = 4", 'groups = "many"', "batch.groups: Input should be a valid integer"),
        ("groups = 4", "grops = 4", "batch.grops: unknown key; did you mean 'groups'?"),
        ("workers = 2", "wrokers = 2", "site.wrokers: unknown key; did you mean 'workers'?"),
        ('dataset = "chain_sum"', "", "tasks: source 'reasoning_gym' needs `dataset`"),
        ('path = "model"', "", "model.path: Field required"),
        ('run = "demo"', 'run = "My Run"', "run id 'My Run'"),
        ("groups = 4", "groups = 4\nmax_lag = 20", "staleness.hard_lag is smaller than batch.max_lag"),
        ("seed = 3", "seed = 3\n[rollout]\ngroup_size = 1", "rollout.group_size = 1 leaves nothing to compare"),
        ("seed = 3", "seed = ", "not valid TOML"),
        ("workers = 2", "workers = 2\nstop_at = 0", "site.stop_at: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_file_is_refused_with_file_key_and_expectation(tmp_path: Path, old: str, new: str, expected: str) -> None:
    file = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(SettingsError) as caught:
        load_config(file)
    assert expected in str(caught.value)
    if "run id" not in expected:
        assert str(file) in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere.toml: no such file"):
        load_config(tmp_path / "nowhere.toml")


def test_every_setting_has_a_meaning(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert not {key for key, _, meaning in [*describe(config.settings), *describe(config.site)] if not meaning}


def test_differences_name_key_and_both_values(tmp_path: Path) -> None:
    one = load_config(write(tmp_path, GOOD)).settings
    other = load_config(write(tmp_path, GOOD.replace("groups = 4", "groups = 6"))).settings
    assert differences(one, other) == ["  batch.groups: the run has 4, given 6"]
    assert differences(one, one) == []

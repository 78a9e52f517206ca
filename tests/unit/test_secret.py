"""Secrets come from the environment, or from files that it names."""

import pytest

from stream.errors import SettingsError
from workers.runs.find import open_run
from workers.settings.secrets import REDIS, read_secret, without_secrets


def test_a_variable_comes_before_its_file(tmp_path, monkeypatch):
    assert read_secret(REDIS) == ""
    file = tmp_path / "url"
    file.write_text("redis://:geheim@host\n")
    monkeypatch.setenv(f"{REDIS}_FILE", str(file))
    assert read_secret(REDIS) == "redis://:geheim@host"
    monkeypatch.setenv(REDIS, "redis://other")
    assert read_secret(REDIS) == "redis://other"
    for name, value in without_secrets().items():
        monkeypatch.setenv(name, value)
    assert read_secret(REDIS) == ""


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff"])
def test_a_file_without_a_secret_is_refused_by_name(content, tmp_path, monkeypatch):
    file = tmp_path / "url"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(f"{REDIS}_FILE", str(file))
    with pytest.raises(SettingsError, match=f"{REDIS}_FILE={file}"):
        read_secret(REDIS)


def test_a_run_is_found_at_the_server_that_the_environment_names_unless_it_has_its_own(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "a"\nfolder = "{tmp_path}"\n[model]\npath = "m"\n'
        '[data]\npath = "p"\n[[rewards]]\nref = "math"\n'
    )
    monkeypatch.setenv(REDIS, "redis://there")
    assert open_run(str(tmp_path)).url == "redis://there"
    (tmp_path / "redis").mkdir()
    assert open_run(str(tmp_path)).url == ""

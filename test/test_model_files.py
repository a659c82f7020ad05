"""What a user names as a model is found, or refused with what to pass instead."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from srt.default_model import ModelUnavailable
from srt.model_files import resolve_model


def test_no_name_is_the_default_model(tmp_path, monkeypatch):
    asked = []

    def fetch(cache_dir):
        asked.append(cache_dir)
        return tmp_path / "default.gguf"

    monkeypatch.setattr("srt.model_files.fetch_default_model", fetch)
    assert resolve_model(None, cache_dir=tmp_path) == tmp_path / "default.gguf"
    assert asked == [tmp_path]


def test_a_folder_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "extra.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_or_a_folder_with_just_one_is_a_model(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == path
    assert resolve_model(str(tmp_path)) == path


def test_a_home_folder_may_be_written_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("make", "name", "problem"),
    [
        ([], "", "neither a config.json nor a .gguf file"),
        (["a.gguf", "b.gguf"], "", "several models; pass one of: a.gguf, b.gguf"),
        (["m.bin"], "m.bin", "must be a folder or a .gguf file"),
        ([], "missing.gguf", "does not exist"),
        ([], "no/such/folder", "does not exist"),
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path, make, name, problem):
    for file in make:
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(ValueError, match=problem) as error:
        resolve_model(str(tmp_path / name))
    assert str(tmp_path) in str(error.value)


def test_a_revision_without_a_hub_name_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="revision 'main' needs a model_path on the hub, not"):
        resolve_model(str(tmp_path), revision="main")
    with pytest.raises(ValueError, match="revision 'main' needs a model_path on the hub"):
        resolve_model(None, revision="main")


def test_a_hub_name_is_downloaded_without_pickled_weights(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    calls = []

    def download(name, **options):
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/model", "v1", tmp_path / "cache") == tmp_path
    ((name, options),) = calls
    assert (name, options["revision"]) == ("org/model", "v1")
    assert options["cache_dir"] == tmp_path / "cache" / "hub"
    assert not any("bin" in pattern or "pt" in pattern for pattern in options["allow_patterns"])


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_what_to_pass(monkeypatch):
    def offline(name, **options):
        raise LocalEntryNotFoundError("no connection to the hub.\nDetails below.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelUnavailable, match="no connection to the hub") as error:
        resolve_model("org/model")
    assert "'org/model'" in str(error.value)
    assert "--model-path FILE.gguf" in str(error.value)
    assert "Details" not in str(error.value)

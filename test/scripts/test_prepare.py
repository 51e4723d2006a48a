"""Getting releases of SGLang: from a wheel that is there, and all that can go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "upstream"))

import prepare
from prepare import PrepareError, environment, release


def quiet(line: str) -> None:
    pass


def write_wheel(
    root: Path, version: str = "0.5.14", name: str = "sglang/__init__.py", text: str = ""
) -> Path:
    folder = root / "dl"
    folder.mkdir(exist_ok=True)
    wheel = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, text)
        archive.writestr("sglang/srt/a.py", "x = 1")
    return wheel


def test_a_release_is_unpacked_once(tmp_path: Path) -> None:
    write_wheel(tmp_path)
    said: list[str] = []
    tree = release("0.5.14", tmp_path, said.append)
    assert (tree / "sglang" / "srt" / "a.py").read_text() == "x = 1"
    assert release("0.5.14", tmp_path, said.append) == tree
    assert said == ["SGLang 0.5.14 is unpacked", "SGLang 0.5.14 is there"]
    # Nothing is left beside it.
    assert {p.name for p in tmp_path.iterdir()} == {"dl", "0.5.14", "checksums.json"}


def test_a_wheel_has_to_stay_what_it_was(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    tree = release("0.5.14", tmp_path, quiet)
    book = json.loads((tmp_path / "checksums.json").read_text())
    assert len(book[wheel.name]) == 64
    (tree / "sglang" / "__init__.py").unlink()
    write_wheel(tmp_path, text="# another one")
    with pytest.raises(PrepareError, match="when it first came"):
        release("0.5.14", tmp_path, quiet)


@pytest.mark.parametrize("text", [b"", b"not a zip"])
def test_a_broken_wheel(text: bytes, tmp_path: Path) -> None:
    write_wheel(tmp_path).write_bytes(text)
    with pytest.raises(PrepareError, match="is no wheel"):
        release("0.5.14", tmp_path, quiet)
    assert not (tmp_path / "0.5.14").exists()
    # It is not booked either: a whole one may follow.
    write_wheel(tmp_path)
    release("0.5.14", tmp_path, quiet)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_book(text: str, tmp_path: Path) -> None:
    write_wheel(tmp_path)
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(PrepareError, match="is damaged"):
        release("0.5.14", tmp_path, quiet)


def test_a_wheel_of_something_else(tmp_path: Path) -> None:
    write_wheel(tmp_path, name="other/__init__.py")
    with pytest.raises(PrepareError, match="has no sglang in it"):
        release("0.5.14", tmp_path, quiet)


@pytest.mark.parametrize("version", ["", "..", "0.5/14", "latest", "0.5.14 ", "-0"])
def test_what_is_no_version(version: str, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="is no version of SGLang"):
        release(version, tmp_path, quiet)


def test_what_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="no network")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(PrepareError, match=r"0\.5\.99 is neither in .*\n.*no network"):
        release("0.5.99", tmp_path, quiet)


def test_an_environment_is_made_anew_when_its_requirements_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        prepare.venv,
        "create",
        lambda folder, **kw: (made.append("venv"), Path(folder).mkdir(exist_ok=True)),
    )
    done = SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kw: (made.append(Path(command[-1]).name), done)[1]
    )
    python = environment(tmp_path, quiet)
    assert python == tmp_path / prepare.ENVIRONMENT / "bin" / "python"
    assert made == ["venv", *prepare.REQUIREMENTS]
    environment(tmp_path, quiet)
    assert len(made) == 3
    (tmp_path / prepare.ENVIRONMENT / ".stamp").write_text("others")
    environment(tmp_path, quiet)
    assert len(made) == 6


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "UPSTREAM", tmp_path)
    monkeypatch.setattr(prepare.release, "__defaults__", (tmp_path, print))
    write_wheel(tmp_path)
    assert prepare.main(["--no-env", "0.5.14"]) == 0
    assert capsys.readouterr().out == "[1/1] SGLang 0.5.14 is unpacked\n"
    assert prepare.main(["--no-env", "nonsense"]) == 1
    assert "prepare: error: 'nonsense' is no version" in capsys.readouterr().err
    assert prepare.main(["--remove"]) == 0
    assert not tmp_path.exists()

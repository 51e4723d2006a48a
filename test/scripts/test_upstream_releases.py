"""Getting releases of SGLang: from a wheel that is there, and all that can go wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from upstream import cli, releases
from upstream.checkouts import git
from upstream.releases import ReleaseError, environment, environment_name, release


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
    assert (tree / "python" / "sglang" / "srt" / "a.py").read_text() == "x = 1"
    assert git(tree, "tag") == "v0.5.14" and git(tree, "status", "--porcelain") == ""
    assert release("0.5.14", tmp_path, said.append) == tree
    assert said == ["SGLang 0.5.14 is unpacked", "SGLang 0.5.14 is there"]
    # Nothing is left beside it.
    assert {p.name for p in tmp_path.iterdir()} == {"dl", "0.5.14", "checksums.json"}


def test_a_wheel_has_to_stay_what_it_was(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    tree = release("0.5.14", tmp_path, quiet)
    book = json.loads((tmp_path / "checksums.json").read_text())
    assert len(book[wheel.name]) == 64
    (tree / "python" / "sglang" / "__init__.py").unlink()
    write_wheel(tmp_path, text="# another one")
    with pytest.raises(ReleaseError, match="when it first came"):
        release("0.5.14", tmp_path, quiet)


@pytest.mark.parametrize("text", [b"", b"not a zip"])
def test_a_broken_wheel(text: bytes, tmp_path: Path) -> None:
    write_wheel(tmp_path).write_bytes(text)
    with pytest.raises(ReleaseError, match="is no wheel"):
        release("0.5.14", tmp_path, quiet)
    assert not (tmp_path / "0.5.14").exists()
    # It is not booked either: a whole one may follow.
    write_wheel(tmp_path)
    release("0.5.14", tmp_path, quiet)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_book(text: str, tmp_path: Path) -> None:
    write_wheel(tmp_path)
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(ReleaseError, match="is damaged"):
        release("0.5.14", tmp_path, quiet)


def test_a_wheel_of_something_else(tmp_path: Path) -> None:
    write_wheel(tmp_path, name="other/__init__.py")
    with pytest.raises(ReleaseError, match="has no sglang in it"):
        release("0.5.14", tmp_path, quiet)


@pytest.mark.parametrize("version", ["", "..", "0.5/14", "latest", "0.5.14 ", "-0"])
def test_what_is_no_version(version: str, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="is no version of SGLang"):
        release(version, tmp_path, quiet)


def test_the_same_wheel_makes_the_same_commit(tmp_path: Path) -> None:
    commits = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_wheel(tmp_path / name)
        commits.append(git(release("0.5.14", tmp_path / name, quiet), "rev-parse", "HEAD"))
    assert commits[0] == commits[1]


def test_a_wheel_that_the_repository_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path)
    pinned = tmp_path / "pinned.json"
    pinned.write_text(json.dumps({wheel.name: "0" * 64}))
    monkeypatch.setattr(releases, "PINNED", pinned)
    with pytest.raises(ReleaseError, match=r"and not 0000.* as pinned\.json says: remove it"):
        release("0.5.14", tmp_path, quiet)
    pinned.write_text(json.dumps({wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest()}))
    release("0.5.14", tmp_path, quiet)


def test_what_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="no network")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ReleaseError, match=r"0\.5\.99 is missing: .*\n.*no network"):
        release("0.5.99", tmp_path, quiet)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.5.3.post3", "venv-transformers4"),
        ("0.5.10rc0", "venv-transformers5"),
        ("0.5.10", "venv-transformers4"),
        ("0.5.12.post1", "venv-transformers4"),
        ("0.5.13", "venv-transformers5"),
        ("0.6", "venv-transformers5"),
        ("unknown", "venv-transformers5"),
    ],
)
def test_the_environment_of_a_release(version: str, name: str) -> None:
    assert environment_name(version) == name
    assert all(path.is_file() for path in releases.requirements(name))


def test_an_environment_is_made_anew_when_its_requirements_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        releases.venv,
        "create",
        lambda folder, **kw: (made.append("venv"), Path(folder).mkdir(exist_ok=True)),
    )
    monkeypatch.setattr(
        releases, "_install", lambda python, requirements, say: made.append(requirements.name)
    )
    assert releases.interpreter("0.5.14", tmp_path) is None
    python = environment("0.5.14", tmp_path, quiet)
    assert python == releases.interpreter("0.5.14", tmp_path)
    assert python == tmp_path / "venv-transformers5" / "bin" / "python"
    assert made == ["venv", "torch.txt", "upstream-transformers5.txt"]
    environment("0.5.14", tmp_path, quiet)
    assert len(made) == 3
    (tmp_path / "venv-transformers5" / ".stamp").write_text("others")
    assert releases.interpreter("0.5.14", tmp_path) is None
    environment("0.5.14", tmp_path, quiet)
    assert len(made) == 6


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(releases, "UPSTREAM", tmp_path)
    write_wheel(tmp_path)
    assert cli.main(["fetch", "--json", "0.5.14"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"0.5.14": {"tree": str(tmp_path / "0.5.14")}}
    assert said.err == "[1/1] SGLang 0.5.14 is unpacked\n"
    assert cli.main(["fetch", "nonsense"]) == 1
    assert "error: 'nonsense' is no version" in capsys.readouterr().err
    # What can be had comes, and what cannot is told at the end.
    assert cli.main(["fetch", "--json", "no", "0.5.14", "neither"]) == 1
    said = capsys.readouterr()
    assert "not to be had: no, neither" in said.err
    assert [list(one) for one in json.loads(said.out).values()] == [["error"], ["tree"], ["error"]]
    assert cli.main(["fetch"]) == 2
    assert cli.main(["fetch", "--remove"]) == 0
    assert not tmp_path.exists()

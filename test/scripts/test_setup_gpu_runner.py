"""``scripts/setup_gpu_runner.sh``: what it refuses, and what it would write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_gpu_runner.sh"
TOKEN = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234"
GIVEN = {
    "--url": "https://github.com/somebody/some-fork",
    "--name": "gpu-h200",
    "--tarball": "runner.tar.gz",
    "--sha256": "0123456789abcdef" * 4,
    "--token-file": "-",
}


def call(arguments: Sequence[str], **options: object) -> tuple[int, str]:
    # Its text, since another user may not read the file.
    done = subprocess.run(
        ["bash", "-c", SCRIPT.read_text(), str(SCRIPT), *arguments],
        input=f"{TOKEN}\n",
        capture_output=True,
        text=True,
        timeout=30,
        **options,  # type: ignore[call-overload]
    )
    return done.returncode, done.stdout + done.stderr


def arguments(**changes: str | None) -> list[str]:
    options = GIVEN | {f"--{key.replace('_', '-')}": value for key, value in changes.items()}
    return [part for key, value in options.items() if value is not None for part in (key, value)]


def dry_run(**changes: str | None) -> str:
    status, text = call(["--dry-run", *arguments(**changes)])
    assert status == 0, text
    return text


def written(text: str, name: str) -> str:
    match = re.search(
        rf"^\+ write \S*/{re.escape(name)} \(mode (\d+)\)\n((?:    .*\n)+)", text, re.M
    )
    assert match, text
    return re.sub(r"(?m)^    ", "", match[2])


def test_a_dry_run_does_nothing(tmp_path: Path) -> None:
    text = dry_run(clocks="1500", model="/opt/model")
    assert text.rstrip().endswith("nothing was done")
    assert not Path("/etc/gpu-runner").exists()
    for step in (
        "useradd --system",
        "check that",
        "tar -xzf",
        "systemctl enable gpu-runner.service",
    ):
        assert step in text


def test_each_job_gets_a_runner_of_its_own_which_it_cannot_keep() -> None:
    prepare = written(dry_run(), "prepare")
    register = prepare.replace("\\\n", "").splitlines()[-1]
    for option in ("--ephemeral", "--disableupdate", "--replace", "--unattended"):
        assert option in register
    assert f"--url {GIVEN['--url']} --name gpu-h200" in register
    assert "--labels gpu-benchmark,ephemeral" in register
    assert "setpriv --reuid gpu-runner" in register and "--clear-groups" in register


def test_a_job_writes_its_three_folders_alone_and_nothing_of_them_stays() -> None:
    text = dry_run()
    prepare, unit = written(text, "prepare"), written(text, "gpu-runner.service")
    folders = " ".join(f"/var/lib/gpu-runner/{name}" for name in ("runner", "work", "home"))
    roots = "install -d -o root -g root -m 755 /var/lib/gpu-runner"
    emptied = "find /var/lib/gpu-runner -xdev -mindepth 1 -delete"
    lines = [
        roots,
        emptied,
        f"install -d -o gpu-runner -g gpu-runner -m 700 {folders}",
    ]
    assert [
        line for line in prepare.splitlines() if "install -d" in line or "find" in line
    ] == lines
    # The unit's working directory, which is there before anything runs.
    assert f"\n+ {roots}\n" in text
    assert f"ReadWritePaths={folders}\n" in unit
    assert f"ExecStopPost=+/usr/bin/env {emptied}\n" in unit
    # It would make the folder above the job's.
    assert "StateDirectory" not in unit


def test_the_token_is_on_no_command_line() -> None:
    text = dry_run()
    assert TOKEN not in text and "--token " not in written(text, "prepare")
    assert "ACTIONS_RUNNER_INPUT_TOKEN=$token" in written(text, "prepare")
    assert "/token (mode 600)" in text
    status, said = call([*arguments(), "--token", TOKEN])
    assert status == 2 and "others could read it" in said and TOKEN not in said


@pytest.mark.parametrize(
    ("given", "put", "gone"),
    [
        ({}, "put what - has into /etc/gpu-runner/token ", "/etc/gpu-runner/token-helper"),
        (
            {"token_file": None, "token_helper": "helper"},
            "install -D -o root -g root -m 700 helper /etc/gpu-runner/token-helper",
            "/etc/gpu-runner/token",
        ),
    ],
)
def test_of_token_and_helper_the_one_that_is_given_is_left(
    given: dict[str, str | None], put: str, gone: str
) -> None:
    """An earlier call may have brought the other one."""
    text = dry_run(**given)
    assert f"+ {put}" in text
    removed = [line for line in text.splitlines() if line.startswith("+ rm -f ")]
    assert removed == [f"+ rm -f {gone}"]


def test_the_unit_is_locked_down() -> None:
    unit = written(dry_run(), "gpu-runner.service")
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    expected = {
        "User": "gpu-runner",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "InaccessiblePaths": "/etc/gpu-runner",
        "DevicePolicy": "closed",
        "CapabilityBoundingSet": "",
        "SupplementaryGroups": "",
        "RestrictSUIDSGID": "yes",
        "RestrictNamespaces": "yes",
        "KillMode": "control-group",
    }
    assert expected.items() <= settings.items()
    closed = {"169.254.0.0/16", "fe80::/10", "fd00:ec2::254", "168.63.129.16", "100.100.100.200"}
    assert set(settings["IPAddressDeny"].split()) == closed
    # Triton, numba and the runner compile at run time.
    assert "MemoryDenyWriteExecute" not in settings
    # Without a token there is nothing to start, and that is no failure.
    assert unit.count("ConditionPathExists=|") == 2
    assert "docker" not in unit


def test_clocks_are_roots() -> None:
    unit = written(dry_run(clocks="1500"), "gpu-clocks.service")
    assert "nvidia-smi -pm 1" in unit and "nvidia-smi -lgc 1500,1500" in unit
    assert "-lgc" not in written(dry_run(), "gpu-clocks.service")


def test_the_machine_is_called_the_same_in_every_job() -> None:
    settings = written(dry_run(model="/opt/model"), "job.env")
    assert "ASV_MACHINE=gpu-h200\n" in settings and "LAB_MODEL=/opt/model\n" in settings
    assert "PYTHON=/opt/gpu-benchmark/bin/python\n" in settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "http://github.com/a/b"}, "--url"),
        ({"url": "https://github.com/a/b$(id)"}, "--url"),
        ({"name": "H200"}, "--name"),
        ({"name": "gpu-h200;id"}, "--name"),
        ({"sha256": "abc"}, "--sha256"),
        ({"clocks": "fast"}, "--clocks"),
        ({"model": "models/a"}, "absolute"),
        ({"model": "/opt/a\nb"}, "absolute"),
        ({"tarball": None}, "--tarball"),
        ({"token_file": None}, "a token is missing"),
        ({"token_helper": "helper"}, "either"),
        ({"colour": "red"}, "unknown option --colour"),
        ({"url": ""}, "--url needs a value"),
    ],
)
def test_what_is_refused(changes: dict[str, str | None], said: str) -> None:
    status, text = call(["--dry-run", *arguments(**changes)])
    assert status == 2 and said in text
    assert "+ write" not in text


def test_only_root_sets_up() -> None:
    options = {"user": 65534} if os.geteuid() == 0 else {}
    status, text = call(arguments(), cwd="/", **options)
    assert status == 2 and "must be run by root, not by" in text


# --- Who owns what root runs --------------------------------------------------------------------


def functions(call: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run something with the script's functions that look at the machine, and without what it does."""
    head, rest = SCRIPT.read_text().split("user=gpu-runner\n")
    looks = re.search(r"^fail\(\) \{.*?^\}\n", rest, re.M | re.S)
    given = rest.partition("# --- What is given")[2].partition("# --- What is done")[0]
    assert looks and "set -euo pipefail" in head and "check_machine" in given
    text = f"set -euo pipefail\nuser=nobody-of-this-machine dry=0\n{looks[0]}#{given}\n{call}\n"
    return subprocess.run(
        ["bash", "-c", text], env=os.environ | env, capture_output=True, text=True, timeout=60
    )


def test_what_is_roots_alone() -> None:
    assert Path("/bin/sh").resolve().stat().st_uid == 0
    assert functions("is_roots /bin/sh").returncode == 0


def test_what_others_may_change_or_replace_is_not_roots_alone(tmp_path: Path) -> None:
    file = tmp_path / "python"
    shutil.copy("/bin/true", file)
    tmp_path.chmod(0o777)
    done = functions(f"is_roots {file}")
    assert done.returncode != 0 and done.stdout == str(tmp_path)
    # Nor is a link in somebody else's folder, wherever it leads.
    link = tmp_path / "link"
    link.symlink_to("/bin/sh")
    assert functions(f"is_roots {link}").returncode != 0
    folder = tmp_path / "bin"
    folder.symlink_to("/bin")
    assert functions(f"is_roots {folder}/sh").returncode != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["file", "folder", "target", "package"])
def test_root_does_not_run_what_is_somebody_elses(what: str) -> None:
    # Below a folder that is root's, as the temporary ones are not.
    place = Path("/opt") if Path("/opt").stat().st_mode & 0o022 == 0 else Path("/root")
    root = Path(tempfile.mkdtemp(prefix="gpu-runner-test-", dir=place))
    try:
        (root / "venv" / "bin").mkdir(parents=True)
        (root / "fakes").mkdir()
        (root / "other").mkdir()
        (root / "venv" / "pyvenv.cfg").touch()
        package = root / "venv" / "package.py"
        package.touch()
        # Whoever runs it leaves a trace; it stands in for systemctl and nvidia-smi as well.
        real, python = root / "other" / "python3", root / "venv" / "bin" / "python"
        real.write_text(f"#!/bin/sh\ntouch {root}/ran\n")
        for name in ("systemctl", "nvidia-smi"):
            (root / "fakes" / name).write_text("#!/bin/sh\n")
        for path in root.rglob("*"):
            path.chmod(0o755)
        root.chmod(0o755)
        python.symlink_to("../../other/python3")
        call = {"python": str(python), "PATH": f"{root}/fakes:{os.environ['PATH']}"}
        done = functions("check_machine", **call)
        assert done.returncode == 0, done.stderr
        assert (root / "ran").exists()
        (root / "ran").unlink()
        stranger = {
            "file": real,
            "folder": root / "venv" / "bin",
            "target": root / "other",
            "package": package,
        }[what]
        os.chown(stranger, 65534, 65534)
        done = functions("check_machine", **call)
        assert done.returncode == 2
        assert f"{stranger} must be root's, and nobody else's to write" in done.stderr
        assert not (root / "ran").exists()
    finally:
        shutil.rmtree(root)


def test_help_is_the_head_of_the_file() -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "--help"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Make a machine") and "--dry-run" in done.stdout
    assert "pipefail" not in done.stdout


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout

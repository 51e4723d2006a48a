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
    # One that is active already has to do it again, and to undo what it did.
    assert "nvidia-smi -rgc" in unit and "+ systemctl restart gpu-clocks.service" in dry_run()


def remembering(tmp_path: Path, *calls: dict[str, str | None]) -> str:
    """The last of several calls, of which the others have been done as far as a file goes."""
    etc, lib = tmp_path / "etc", tmp_path / "lib"
    script = SCRIPT.read_text().replace("/etc/gpu-runner", str(etc))
    script = script.replace("/usr/local/lib/gpu-runner", str(lib))
    text = ""
    for given in calls:
        options = [part for key, value in given.items() for part in (key, value) if part]
        done = subprocess.run(
            ["bash", "-c", script, str(SCRIPT), "--dry-run", *options],
            input=f"{TOKEN}\n",
            capture_output=True,
            text=True,
            timeout=30,
        )
        text = done.stdout + done.stderr
        if done.returncode == 0:
            etc.mkdir(exist_ok=True)
            lib.mkdir(exist_ok=True)
            (etc / "setup.conf").write_text(written(text, "setup.conf"))
            (lib / "sha256").write_text(GIVEN["--sha256"])
    return text


def test_what_was_told_before_still_holds(tmp_path: Path) -> None:
    first = GIVEN | {"--model": "/opt/model", "--clocks": "1500", "--python": "/opt/other/python"}
    token = {"--token-file": "-"}
    text = remembering(tmp_path, first, token)
    settings = written(text, "job.env")
    assert "ASV_MACHINE=gpu-h200\nPYTHON=/opt/other/python\n" in settings
    assert "LAB_MODEL=/opt/model\n" in settings
    assert "-lgc 1500,1500" in written(text, "gpu-clocks.service")
    assert f"--url {GIVEN['--url']} " in written(text, "prepare").replace("\\\n", "")
    assert "this release is unpacked" in text
    # Until it is told otherwise.
    text = remembering(tmp_path, first, token | {"--model": "none", "--clocks": "none"})
    assert "LAB_MODEL" not in written(text, "job.env")
    assert "-lgc" not in written(text, "gpu-clocks.service")
    text = remembering(tmp_path, first, token | {"--sha256": "f" * 64})
    assert "--tarball is missing" in text
    # What stands there is checked like what is given.
    (tmp_path / "etc" / "setup.conf").write_text("name=gpu-h200;id\nurl=https://x.org/y\n")
    assert "--name must be like gpu-h200" in remembering(tmp_path, token)


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
    options = "user=nobody-of-this-machine dry=0 force=0 model=${model:-}"
    text = f"set -euo pipefail\n{options}\n{looks[0]}#{given}\n{call}\n"
    return subprocess.run(
        ["bash", "-c", text], env=os.environ | env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("path", "seen"), [("/bin/sh", True), ("/root/x", False), ("/home/y/z", False), ("/", True)]
)
def test_what_a_job_cannot_see_is_refused(path: str, seen: bool, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    for given in (path, str(link)):
        done = functions(f"check_seen --python {given}")
        assert (done.returncode == 0) is seen
        assert seen or "--python: a job cannot see" in done.stderr


def test_a_model_is_one_that_everybody_may_read(tmp_path: Path) -> None:
    refused = f"there is no {tmp_path}/model.safetensors that everybody may read"
    assert refused in functions("check_model", model=str(tmp_path)).stderr
    weights = tmp_path / "model.safetensors"
    weights.touch(mode=0o600)
    weights.chmod(0o600)
    assert refused in functions("check_model", model=str(tmp_path)).stderr
    weights.chmod(0o644)
    for model in (str(tmp_path), ""):
        assert functions("check_model", model=model).returncode == 0


def test_a_job_that_runs_is_not_ended_unless_it_is_meant(tmp_path: Path) -> None:
    """By the name that the runner gives to what runs it."""
    (tmp_path / "bin").mkdir()
    worker = tmp_path / "bin" / "Runner.Worker"
    worker.write_text("#!/bin/sh\nsleep 60\n")
    worker.chmod(0o755)
    me = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    call = f"user={me}; check_idle"
    assert functions(f"force=0; {call}").returncode == 0
    with subprocess.Popen([str(worker)], start_new_session=True) as job:
        try:
            done = functions(f"force=0; {call}")
            assert done.returncode == 2 and "a job is running" in done.stderr
            assert functions(f"force=1; {call}").returncode == 0
        finally:
            os.killpg(job.pid, 9)


def test_the_library_that_the_runner_wants_is_looked_for(tmp_path: Path) -> None:
    """Among more lines than a pipe holds, of which it is the first."""
    ldconfig = tmp_path / "ldconfig"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for first, status in (("libicuuc.so.72 (libc6,x86-64)", 0), ("libc.so.6", 2)):
        ldconfig.write_text(f"#!/bin/sh\necho '{first}'\nseq -f 'a library %.0f' 50000\n")
        ldconfig.chmod(0o755)
        done = functions("check_libraries", **env)
        assert done.returncode == status, done.stderr
    assert "the runner needs libicu" in done.stderr


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
    place = Path("/opt") if Path("/opt").stat().st_mode & 0o022 == 0 else Path("/srv")
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

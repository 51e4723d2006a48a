"""``scripts/asv_machine.py``: what asv is told of a machine, with and without a GPU."""

from __future__ import annotations

import errno
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from asv.machine import Machine

import asv_machine
from asv_machine import FIELDS, NONE, describe, gpu_fields, known_as, main, make_known, save
from lab import devices


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither tool nor kernel tells of a driver."""
    monkeypatch.setattr(asv_machine, "_PROC", tmp_path / "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(devices.DEVICE_VARIABLE, raising=False)


def put_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])


def known(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert found.pop("version") == 1
    return found


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(monkeypatch)
    found = gpu_fields()
    assert tuple(found) == FIELDS
    assert found["gpu"] == found["driver"] == found["cuda"] == NONE
    assert found["torch"] == torch.__version__


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_fields() | {"triton": NONE} == dict.fromkeys(FIELDS, NONE)


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        (["NVIDIA H200"], "NVIDIA H200"),
        (["NVIDIA H200", "NVIDIA H200"], "2 x NVIDIA H200"),
        (["NVIDIA H200", "NVIDIA L4"], "NVIDIA H200, NVIDIA L4"),
    ],
)
def test_with_gpus(monkeypatch: pytest.MonkeyPatch, names: list[str], gpu: str) -> None:
    put_gpus(monkeypatch, *names)
    found = gpu_fields()
    assert (found["gpu"], found["cuda"], found["driver"]) == (gpu, "13.0", NONE)


def test_the_driver_is_asked_of_its_tool_then_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_gpus(monkeypatch, "NVIDIA H200")
    kernel = tmp_path / "version"
    kernel.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n")
    monkeypatch.setattr(asv_machine, "_PROC", kernel)
    assert gpu_fields()["driver"] == "580.95.05"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 590.10\n")
    tool.chmod(0o755)
    assert gpu_fields()["driver"] == "590.10"
    tool.write_text("#!/bin/sh\necho it is broken; exit 9\n")
    assert gpu_fields()["driver"] == "580.95.05"


def test_the_entry_has_all_that_asv_asks_for() -> None:
    entry = describe("gpu-h200")
    assert entry["machine"] == "gpu-h200"
    assert set(entry) == {name for name, _ in Machine.fields} | set(FIELDS)
    assert all(isinstance(value, str) and value for value in entry.values())


def test_without_asv_the_entry_has_the_same_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asv.machine", None)
    assert describe("gpu-h200").keys() == {name for name, _ in Machine.fields} | set(FIELDS)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-x", "x" * 80])
def test_a_name_is_a_folders_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--name", name, "--save", "--file", str(tmp_path / "machines.json")])
    assert not (tmp_path / "machines.json").exists()


def test_asv_reads_what_is_saved_and_keeps_it_with_the_results(tmp_path: Path) -> None:
    path = tmp_path / "machines.json"
    entry = describe("gpu-h200") | {"gpu": "NVIDIA H200", "driver": "580.95.05"}
    save(describe("other"), path)
    save(entry, path)
    assert set(known(path)) == {"gpu-h200", "other"}
    machine = Machine.load(machine_name="gpu-h200", _path=str(path))
    assert (machine.gpu, machine.driver, machine.machine) == (
        "NVIDIA H200",
        "580.95.05",
        "gpu-h200",
    )
    machine.save(str(tmp_path / "results"))
    kept = json.loads((tmp_path / "results" / "gpu-h200" / "machine.json").read_text())
    assert kept == entry | {"version": 1}


def test_what_asv_does_not_know_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "machines.json"
    assert make_known(path=path) == platform.node()
    assert set(known(path)) == {platform.node()}
    before = path.read_text()
    assert make_known(path=path) == platform.node()
    assert path.read_text() == before


def test_the_only_machine_is_this_one_whatever_the_host_is_called(tmp_path: Path) -> None:
    """As asv has it; results are then kept under that name."""
    path = tmp_path / "machines.json"
    save(describe("gpu-h200"), path)
    assert make_known(path=path) == "gpu-h200"
    assert make_known("gpu-other", path=path) == "gpu-other"
    assert set(known(path)) == {"gpu-h200", "gpu-other"}
    assert make_known(path=path) == platform.node()


def test_fields_of_ours_are_brought_up_to_date_and_others_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "machines.json"
    save(describe("gpu-h200") | {"cpu": "told by hand", "driver": "1.0"}, path)
    put_gpus(monkeypatch, "NVIDIA H200")
    make_known("gpu-h200", path)
    entry = known(path)["gpu-h200"]
    assert (entry["cpu"], entry["driver"], entry["gpu"]) == ("told by hand", NONE, "NVIDIA H200")


def test_an_entry_from_before_gets_no_parameters_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each would part old results from new ones in asv's graphs."""
    path = tmp_path / "machines.json"
    old = {"machine": "box", "os": "Linux"}
    save(old, path)
    put_gpus(monkeypatch)
    make_known("box", path)
    assert known(path) == {"box": old}
    put_gpus(monkeypatch, "NVIDIA H200")
    make_known("box", path)
    assert known(path)["box"].keys() == old.keys() | set(FIELDS)


def test_without_its_gpu_a_machine_is_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert asv_machine.DEVICE_VARIABLE == devices.DEVICE_VARIABLE
    path = tmp_path / "machines.json"
    put_gpus(monkeypatch, "NVIDIA H200")
    assert make_known("gpu-h200", path) == "gpu-h200"
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "cpu")
    for name in ("gpu-h200", "gpu-h200-cpu", None):
        assert known_as(name, path) == make_known(name, path) == "gpu-h200-cpu"
    without = known(path)["gpu-h200-cpu"]
    assert [without[key] for key in ("machine", "gpu", "driver", "cuda")] == [
        "gpu-h200-cpu",
        *[NONE] * 3,
    ]
    # What is known of the machine with its GPU stays, and it is still the only one.
    monkeypatch.delenv(devices.DEVICE_VARIABLE)
    assert known(path)["gpu-h200"]["gpu"] == "NVIDIA H200"
    assert known_as(path=path) == make_known(path=path) == "gpu-h200"


def test_a_machine_that_has_no_gpu_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "machines.json"
    put_gpus(monkeypatch)
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "cpu")
    assert make_known("lab-cpu", path) == "lab-cpu"
    assert known_as(path=path) == make_known(path=path) == "lab-cpu"


def test_who_asks_for_a_name_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "machines.json"
    assert known_as(path=path) == platform.node() and not path.exists()
    save(describe("gpu-h200"), path)
    before = path.read_text()
    assert known_as(path=path) == "gpu-h200"
    assert known_as("other", path) == "other"
    assert path.read_text() == before


@pytest.mark.parametrize("ask", [known_as, make_known])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[]", r"is no JSON object, but '\[\]'"),
        ('{"vm": 5}', "'vm' is '5', not a machine of that name"),
        ('{"vm": {"machine": "other"}}', "'vm' is .*, not a machine of that name"),
        ('{"vm": {"machine": "vm", "ram": 8}}', "'ram' of 'vm' is '8', not text"),
        ('{"version": 2}', "version is '2', not 1"),
    ],
)
def test_a_file_of_machines_that_is_none_is_named(
    tmp_path: Path, ask: Any, content: str, said: str
) -> None:
    path = tmp_path / "machines.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"machines.json.* {said}"):
        ask("vm", path)
    assert main(["--name", "vm", "--save", "--file", str(path)]) == 1
    assert path.read_text() == content


@pytest.mark.parametrize("ask", [known_as, make_known])
def test_a_name_that_is_none_is_known_to_nobody(tmp_path: Path, ask: Any) -> None:
    with pytest.raises(ValueError, match="got 'a/b'"):
        ask("a/b", tmp_path / "machines.json")
    assert not (tmp_path / "machines.json").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machines.json"
    assert main(["--name", "gpu-h200", "--file", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["machine"] == "gpu-h200"
    assert not path.exists()
    assert main(["--name", "gpu-h200", "--file", str(path), "--save"]) == 0
    assert set(known(path)) == {"gpu-h200"}


def test_a_gpu_may_be_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_gpus(monkeypatch)
    path = tmp_path / "machines.json"
    assert main(["--name", "gpu-h200", "--file", str(path), "--save", "--require-gpu"]) == 1
    assert "no CUDA device: torch sees none" in capsys.readouterr().err and not path.exists()
    put_gpus(monkeypatch, "NVIDIA H200")
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "cpu")
    assert main(["--name", "gpu-h200", "--file", str(path), "--save", "--require-gpu"]) == 1
    assert "LAB_DEVICE=cpu keeps off it" in capsys.readouterr().err and not path.exists()


def test_without_a_name_it_is_the_machine_that_is_known(tmp_path: Path) -> None:
    """But all that is said of it is new."""
    path = tmp_path / "machines.json"
    save(describe("gpu-h200") | {"cpu": "another one"}, path)
    assert main(["--file", str(path), "--save"]) == 0
    assert known(path) == {"gpu-h200": describe("gpu-h200")}


def test_where_nothing_can_be_written_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replace(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    assert main(["--file", str(tmp_path / "machines.json"), "--save"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_needs_nothing_that_is_installed_to_say_what_it_does() -> None:
    done = subprocess.run(
        [sys.executable, "-I", asv_machine.__file__, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

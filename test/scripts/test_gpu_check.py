"""``scripts/gpu_check.sh`` and ``gpu_summary.py``: the steps, the table and the file behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gpu_summary
from gpu_summary import READERS, main, summarise, table, verdict
from processes import end_by, is_alive

SCRIPT = Path(gpu_summary.__file__).with_name("gpu_check.sh")


def check(
    *arguments: str, timeout: float = 60, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    # To make, PYTHON is what an environment is made with: it need not have torch.
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHON": sys.executable} | env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# --- Arguments ----------------------------------------------------------------------------------


def test_help_tells_the_steps() -> None:
    done = check("--help")
    assert done.returncode == 0
    for name in (*READERS, "--dry-run", "--out DIR", "--only"):
        assert name in done.stdout
    assert "pipefail" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out"], "--out needs a folder"),
        (["--only"], "--only needs a step"),
        (["--only", "tests,nothing"], "no step 'nothing', there are tests sync-debug"),
        (["--fast"], "unknown option --fast"),
    ],
)
def test_what_is_refused(arguments: Sequence[str], said: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2 and said in done.stderr


def test_folder_and_interpreter_are_the_callers(tmp_path: Path) -> None:
    """And not below the repository; a variable of whoever calls leads nowhere else."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    done = check(
        *("--dry-run", "--only", "kernels", "--out", "found"),
        cwd=tmp_path,
        PYTHON="bin/python",
        CDPATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found" / "kernels.json").read_text())["status"] == 0


def test_a_check_of_a_gpu_needs_one(tmp_path: Path) -> None:
    done = check("--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "--dry-run runs the steps on the CPU" in done.stderr


@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_an_interpreter_without_torch_is_refused(tmp_path: Path, mode: Sequence[str]) -> None:
    done = check(*mode, "--out", str(tmp_path), PYTHON="false")
    assert done.returncode == 2 and "'false' (PYTHON) cannot import torch" in done.stderr


def test_the_limits_come_to_eight_minutes() -> None:
    text = SCRIPT.read_text()
    limits = re.search(r"^tests=.*$", text, re.MULTILINE)
    assert limits
    seconds = [int(part.partition("=")[2]) for part in limits[0].split()]
    assert len(seconds) == len(READERS)
    others = re.search(r"^grace=(\d+) probe=(\d+) table=(\d+)$", text, re.MULTILINE)
    assert others
    grace, probe, last = map(int, others.groups())
    # Whatever runs is ended in time, and killed if it does not end.
    assert re.findall(r"^ *timeout (.*)$", text, re.MULTILINE) == [
        '--signal=INT --kill-after="$grace" "$limit" "$@" &'
    ]
    assert re.findall(r'^ *bounded (\S+ \S+) "\$(?:PYTHON|@)"', text, re.MULTILINE) == [
        '"$probe" 2',
        '"$limit" "$grace"',
        '"$table" 2',
    ]
    assert sum(seconds) + len(seconds) * grace + probe + 2 + last + 2 <= 480
    # A step of several parts ends by itself, and tells what it has, before it is ended.
    named = dict(part.split("=") for part in limits[0].split())
    for array, name in (("sides", "occupancy"), ("marks", "asv")):
        own = re.search(rf"^{array}=\(--seconds (\d+)", text, re.MULTILINE)
        assert own and int(own[1]) < int(named[name])


def test_what_an_interpreter_lacks_is_named_and_the_steps_go_on(tmp_path: Path) -> None:
    """Those that want it fail by themselves; this one wants nothing that is hidden."""
    hiding = "import importlib.util as u; f = u.find_spec"
    hiding += "; u.find_spec = lambda n, *a: None if n in ('hypothesis', 'numba') else f(n, *a)"
    (tmp_path / "sitecustomize.py").write_text(hiding + "\n")
    options = ("--dry-run", "--only", "tests", "--out", str(tmp_path / "out"))
    python = tmp_path / "python"
    steps = f'case "$*" in *pytest_timeout*) exec {sys.executable} "$@" ;; *"-m pytest"*) exit 7 ;; esac'
    python.write_text(f"#!/bin/sh\n{steps}\n")
    python.chmod(0o755)
    done = check(*options, PYTHONPATH=str(tmp_path), PYTHON=str(python))
    assert "(PYTHON) lacks numba, hypothesis" in done.stderr
    assert json.loads((tmp_path / "out" / "tests.json").read_text())["status"] == 7


def test_asv_is_told_elsewhere_of_a_machine_without_a_name(tmp_path: Path) -> None:
    """And nothing is compiled twice for that."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "HOME $HOME CACHE $TRITON_CACHE_DIR AS $ASV_MACHINE"\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    env = {"PYTHON": str(python), "HOME": "/here", "TRITON_CACHE_DIR": "", "ASV_MACHINE": ""}
    check("--dry-run", "--only", "asv", "--out", str(out), **env)
    told = (out / "asv.log").read_text()
    assert told == f"HOME {out}/home CACHE /here/.triton/cache AS dry-run\n"


@pytest.mark.parametrize(
    ("number", "status", "to_all"),
    [(signal.SIGTERM, 143, False), (signal.SIGHUP, 129, False), (signal.SIGINT, 130, True)],
)
def test_whoever_ends_it_ends_the_step_and_has_what_that_said(
    tmp_path: Path, number: int, status: int, to_all: bool
) -> None:
    """An interrupt comes from a terminal, to all of its group."""
    told, out = tmp_path / "told", tmp_path / "out"
    (tmp_path / "step.py").write_text(
        "import os, time\n"
        "try:\n"
        f"    open({str(told)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"    os.rename({str(told)!r} + '.new', {str(told)!r})\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('what there is', flush=True)\n"
    )
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pytest*hypothesis*) ;; *) exec {sys.executable} '
        f"{tmp_path}/step.py ;; esac\n"
    )
    python.chmod(0o755)
    code = f"import os; os.environ['PYTHON'] = {str(python)!r}"
    code += f"; os.execvp('bash', ['bash', {str(SCRIPT)!r}, '--dry-run', '--out', {str(out)!r}])"
    found = end_by(number, ["-c", code], told, tmp_path, to_all=to_all)
    assert found.status == status
    assert "gpu_check: interrupted" in found.said
    assert not is_alive(int(told.read_text()))
    assert (out / "tests.log").read_text() == "what there is\n"


def test_a_step_that_fails_fails_the_check(tmp_path: Path) -> None:
    """All steps run all the same, and the table is printed last. The interpreter runs nothing."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *gpu_summary*) exec "$REAL" "$@" ;; *sync*) exit 3 ;; esac\n'
    )
    python.chmod(0o755)
    out = tmp_path / "out"
    env = {"PYTHON": str(python), "REAL": sys.executable}
    done = check("--dry-run", "--out", str(out), **env)
    assert done.returncode == 1, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    verdicts = {step["step"]: step["verdict"] for step in summary["steps"]}
    assert verdicts == dict.fromkeys(READERS, "passed") | {"sync-debug": "FAILED"}
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.split()[:2] == ["asv", "passed"]


def test_only_some_steps(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "asv.json").write_text('{"step": "asv", "device": "cuda", "status": 0, "seconds": 1}')
    done = check("--dry-run", "--out", str(out), "--only", "tests,kernels", PYTHON="true")
    assert done.returncode == 0
    assert re.findall(r"^== (\S+)", done.stdout, re.MULTILINE) == ["tests", "kernels"]
    # What an earlier call left is not this one's.
    assert not (out / "asv.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_walks_through_every_step(tmp_path: Path) -> None:
    done = check("--dry-run", "--out", str(tmp_path), timeout=580)
    assert done.returncode == 0, done.stdout[-4000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    steps = {step["step"]: step for step in summary["steps"]}
    assert set(steps) == set(READERS)
    for name, step in steps.items():
        assert step["verdict"] == "passed", name
        assert step["found"] is not None, name
        assert step["device"] == "cpu"
    assert steps["tests"]["found"]["skipped"] > 0
    assert steps["sync-debug"]["found"]["blocking"] == 0
    assert steps["sync-debug"]["found"]["raised"] == 0
    for result in steps["occupancy"]["found"]["results"]:
        assert 0 < result["before"] <= 1 and 0 < result["after"] <= 1
    assert steps["asv"]["found"]["commits"][0]["values"] > 0


# --- The summary --------------------------------------------------------------------------------


def write(folder: Path, name: str, document: Any) -> None:
    (folder / name).write_text(json.dumps(document))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seconds, (name, status) in enumerate(
        {"tests": 1, "sync-debug": 0, "kernels": 124, "occupancy": 0, "asv": 0}.items()
    ):
        write(
            tmp_path,
            f"{name}.json",
            {"step": name, "device": "cuda", "status": status, "seconds": seconds, "limit": 9},
        )
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/></testsuites>'
    )
    run = {"speculative": "none", "steps": 32, "raised": None, "blocking": 2, "sites": ["x"]}
    write(tmp_path, "sync-debug-found.json", [run, run | {"raised": "RuntimeError", "blocking": 0}])
    cells = [
        {"cell": name, "device_us": measured, "predicted_us": predicted}
        for name, measured, predicted in (
            ("plain-b8", 12.0, {"sparse": 8.0, "upstream": 1.0}),
            ("tree-b8", 30.0, {"sparse": 10.0}),
            ("join-b8", None, {}),
        )
    ]
    document = {"device": "NVIDIA H200", "cells": cells, "notes": ["interrupted"]}
    write(tmp_path, "kernels-found.json", document)
    results = [
        {"what": "chain-b8-t5ms, delayed forwards", "before": 0.8, "after": 0.99, "detail": {}},
        {"what": "model shape", "before": None, "after": 0.9, "detail": {}},
    ]
    write(tmp_path, "occupancy-found.json", {"before": "b", "after": "a", "results": results})
    commits = [
        {"outcome": "done", "values": 20, "without": 3},
        {"outcome": "not reached", "values": 0, "without": 0},
    ]
    write(tmp_path, "asv-found.json", {"skipped": "asv is not installed", "commits": commits})
    return tmp_path


def test_the_table_has_verdicts_times_and_key_figures(folder: Path) -> None:
    lines = table(summarise(folder))
    assert lines[0].startswith("== gpu_check: gpu ")
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "tests FAILED 0 s 4 passed, 2 failed, 3 skipped",
        "sync-debug passed 1 s 2 blocking calls, 1 of 2 runs raised, 64 steps",
        "kernels timed out 2 s worst measured/predicted 3.0 (tree-b8), 2 cells",
        "occupancy passed 3 s 0.800 -> 0.990 (chain-b8-t5ms, delayed forwards)",
        "? -> 0.900 (model shape)",
        "asv passed 4 s 1 of 2 commits, 20 values, 3 without a number",
        "asv skipped: asv is not installed; measured without it",
    ]


def test_a_step_that_was_killed_in_time_was_not_late() -> None:
    """By who needed its memory, say."""
    verdicts = {
        (124, 9): "timed out",
        (124, 10): "timed out",
        (137, 9): "timed out",
        (137, 8): "KILLED",
        (139, 3): "FAILED",
        (0, 3): "passed",
    }
    for (status, seconds), word in verdicts.items():
        assert verdict({"status": status, "seconds": seconds, "limit": 9}) == word


def test_cells_that_were_wrong_or_late_are_said_to_be(folder: Path) -> None:
    document = json.loads((folder / "kernels-found.json").read_text())
    document["cells"][0]["late"] = True
    document["cells"].append(
        {"cell": "chain-b8", "device_us": None, "error": "row 3 is off by 0.5"}
    )
    write(folder, "kernels-found.json", document)
    _, said = gpu_summary.read_kernels(folder)
    assert said.endswith("2 cells; in 1 the device may have waited\nchain-b8: row 3 is off by 0.5")


def test_the_file_has_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.startswith("== gpu_check")
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["machine"]) == {"gpu", "driver", "cuda", "torch", "triton"}
    kernels = summary["steps"][2]["found"]
    assert [cell["ratio"] for cell in kernels["cells"]] == [3.0, 1.5]
    assert kernels["notes"] == ["interrupted"]
    assert summary["steps"][1]["found"]["runs"][0]["sites"] == ["x"]


def test_what_was_not_measured_leaves_the_rest(folder: Path) -> None:
    results = [{"what": "x"}, {"what": "y", "before": 0.5, "after": 0.75}]
    write(folder, "occupancy-found.json", {"results": results})
    write(folder, "kernels-found.json", {"device": "cuda", "cells": [{"cell": "x"}], "notes": []})
    text = "\n".join(table(summarise(folder)))
    assert "? -> ? (x)" in text and "0.500 -> 0.750 (y)" in text
    assert "nothing to compare with the model" in text


@pytest.mark.parametrize("left", ["", "{", "[]", '{"cells": [[]]}'])
def test_a_step_that_told_nothing_has_its_verdict(folder: Path, left: str) -> None:
    (folder / "kernels-found.json").write_text(left)
    (folder / "tests.xml").unlink()
    (folder / "asv.json").unlink()
    lines = table(summarise(folder))
    assert "FAILED" in lines[1] and "says nothing" in lines[1]
    assert "timed out" in lines[3] and "says nothing" in lines[3]
    assert not any(line.split()[0] == "asv" for line in lines[1:])


def test_a_folder_is_needed(tmp_path: Path) -> None:
    assert main([]) == main([str(tmp_path / "nowhere")]) == 2

"""The workflows hold what docs/gpu-runner.md promises of them."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO_ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPO_ROOT / ".github" / "workflows").glob("*.yml"))
GPU = REPO_ROOT / ".github" / "workflows" / "gpu-benchmark.yml"
TESTS = REPO_ROOT / ".github" / "workflows" / "pr-test.yml"
TOOLS = REPO_ROOT / ".venv" / "bin"


def load(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text())
    # YAML 1.1 takes the key `on` for a truth value.
    document["on"] = document.pop(True)
    return document


def jobs() -> list[Any]:
    return [
        pytest.param(job, id=f"{path.stem}-{name}")
        for path in WORKFLOWS
        for name, job in load(path)["jobs"].items()
    ]


def test_both_are_there() -> None:
    assert {GPU, TESTS} <= set(WORKFLOWS)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_who_changes_nothing_may_read_alone(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in document["on"]
    assert "workflow_run" not in document["on"]
    assert document["concurrency"]["group"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_release(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if re.search(r"\buses:", line)]
    assert lines
    for line in lines:
        pin = r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$"
        assert re.search(pin, line), line


def test_an_action_has_one_commit_everywhere() -> None:
    pins = {
        pin
        for path in WORKFLOWS
        for pin in re.findall(r"uses: (\S+@[0-9a-f]{40}) # (v\S+)", path.read_text())
    }
    names = [action.partition("@")[0] for action, _ in pins]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("job", jobs())
def test_a_job_ends_and_leaves_no_token_behind(job: dict[str, Any]) -> None:
    assert 0 < job["timeout-minutes"] <= 90
    for step in job["steps"]:
        if "actions/checkout@" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("job", jobs())
def test_nothing_is_pasted_into_a_shell(job: dict[str, Any]) -> None:
    """What somebody types, or names a branch, reaches a script as a variable."""
    for step in job["steps"]:
        assert "${{" not in step.get("run", "")
        assert "${{" not in step.get("shell", "")


def test_hosted_jobs_stand_in_for_ci_run() -> None:
    document = load(TESTS)
    assert set(document["on"]) == {"pull_request", "push"}
    assert set(document["jobs"]) == {"lint", "test", "prove-fixes", "kernels"}
    runs = {
        name: " ".join(step.get("run", "") for step in job["steps"])
        for name, job in document["jobs"].items()
    }
    targets = re.findall(r"^([a-z-]+):", (REPO_ROOT / "Makefile").read_text(), re.MULTILINE)
    for name, text in runs.items():
        assert f"make {name}" in text
        assert set(re.findall(r"make ([a-z-]+)", text)) <= set(targets)
    for name, job in document["jobs"].items():
        assert job["runs-on"].startswith("ubuntu-"), name
        assert "permissions" not in job
    # The fixes are found in the history.
    assert document["jobs"]["prove-fixes"]["steps"][0]["with"]["fetch-depth"] == 0


def test_a_change_of_whatever_it_runs_starts_it() -> None:
    """Scripts that it names, what these import and call, and what is measured."""
    scripts = REPO_ROOT / "scripts"
    # What only builds the page, and what makes the environment, changes no number.
    pending = set(re.findall(r"scripts/(\w+\.(?:py|sh))", GPU.read_text())) | {"report.py"}
    found: set[str] = set()
    while pending:
        name = pending.pop()
        found.add(name)
        text = (scripts / name).read_text()
        named = re.findall(r"(?:scripts|\$here)/(\w+\.(?:py|sh))", text)
        imported = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
        known = {*named, *(f"{module}.py" for module in imported)} - {"setup_gpu_runner.sh"}
        pending |= {name for name in known if (scripts / name).is_file()} - found
    assert {"gpu_landmarks.py", "keep_gpu_results.sh", "process_sessions.py", "bench.py"} <= found
    patterns = load(GPU)["on"]["push"]["paths"]
    # What asv is told, and the head that real cases draft with.
    others = ["asv.conf.json", "assets/eagle-smollm2-135m/config.json", "python/pyproject.toml"]
    for name in (*(f"scripts/{name}" for name in found), *others):
        assert (REPO_ROOT / name).is_file()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_no_push_takes_the_place_of_mondays_landmarks_or_of_what_somebody_asked_for() -> None:
    document = load(GPU)
    group = document["concurrency"]["group"]
    assert "github.event_name == 'push' && 'commits' || github.run_id" in group
    assert document["concurrency"]["cancel-in-progress"] is False
    # The page has one place.
    assert "github" not in document["jobs"]["publish"]["concurrency"]


def test_no_pull_request_comes_near_the_gpu() -> None:
    document = load(GPU)
    assert set(document["on"]) == {"schedule", "push", "workflow_dispatch"}
    assert document["on"]["push"]["branches"] == ["main"]
    for path in WORKFLOWS:
        for job in load(path)["jobs"].values():
            if path != GPU:
                assert "self-hosted" not in job["runs-on"]


def test_every_job_is_guarded_before_a_machine_is_taken() -> None:
    for name, job in load(GPU)["jobs"].items():
        guard = " ".join(job["if"].split())
        # What is not set is empty, and so may be compared with nothing else.
        for part in (
            "vars.GPU_BENCHMARK_REPOSITORY != ''",
            "github.repository == vars.GPU_BENCHMARK_REPOSITORY",
            "github.ref == 'refs/heads/main'",
            """contains(fromJSON('["schedule", "push", "workflow_dispatch"]'), github.event_name)""",
        ):
            assert part in guard, name
        assert "||" not in guard and "always()" not in guard


def test_one_job_runs_on_the_gpu_and_may_write_nothing() -> None:
    found = load(GPU)["jobs"]
    (measure,) = [job for job in found.values() if "self-hosted" in job["runs-on"]]
    assert measure["runs-on"] == ["self-hosted", "linux", "gpu-benchmark", "ephemeral"]
    assert measure["permissions"] == {"contents": "read"}
    assert "environment" not in measure and "secrets" not in str(measure)


def test_each_right_is_one_jobs_and_of_hosted_ones() -> None:
    found = load(GPU)["jobs"]
    rights = {
        name: {right for right, value in job.get("permissions", {}).items() if value == "write"}
        for name, job in found.items()
    }
    assert {name: held for name, held in rights.items() if held} == {
        "keep": {"contents"},
        "publish": {"pages", "id-token"},
    }
    for name in ("keep", "publish"):
        assert found[name]["runs-on"].startswith("ubuntu-")
    # The one that may push runs no code of the results, and builds nothing.
    runs = [step["run"] for step in found["keep"]["steps"] if "run" in step]
    assert len(runs) == 1 and "keep_gpu_results.sh" in runs[0]
    assert not any("run" in step for step in found["publish"]["steps"])


def test_labels_are_known_to_whoever_registers_and_whoever_lints() -> None:
    labels = load(GPU)["jobs"]["measure"]["runs-on"][2:]
    known = yaml.safe_load((REPO_ROOT / ".github" / "actionlint.yaml").read_text())
    assert known["self-hosted-runner"]["labels"] == labels
    setup = (REPO_ROOT / "scripts" / "setup_gpu_runner.sh").read_text()
    assert f"labels={','.join(labels)}\n" in setup


@pytest.mark.parametrize(
    "command", [["actionlint"], ["zizmor", "--offline", "--no-progress", ".github"]]
)
def test_the_linters_run_clean(command: list[str]) -> None:
    tool = shutil.which(command[0], path=str(TOOLS)) or shutil.which(command[0])
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        [tool, *command[1:]], cwd=REPO_ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_are_linted_wherever_lint_is_called() -> None:
    makefile = (REPO_ROOT / "Makefile").read_text()
    assert re.search(r"^lint: .*lint-workflows", makefile, re.MULTILINE)
    hooks = yaml.safe_load((REPO_ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = " ".join(hook["entry"] for repo in hooks for hook in repo["hooks"])
    pins = (REPO_ROOT / "requirements" / "workflows.txt").read_text()
    for tool in ("actionlint", "zizmor"):
        assert f"$(VENV)/bin/{tool}" in makefile
        assert f".venv/bin/{tool}" in commands
        assert re.search(
            rf"^{tool}\S*==\S+ \\\n    --hash=sha256:[0-9a-f]{{64}}", pins, re.MULTILINE
        )

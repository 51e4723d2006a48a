"""What asv is told: the suite, its metrics, and an environment that is the project's own."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lab import history
from lab.cases import QUESTIONS
from lab.metrics import with_ratios
from lab.workloads import make_session

REPO_ROOT = Path(__file__).resolve().parents[2]
SUITE = REPO_ROOT / "benchmark" / "asv"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"asv_suite_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = sorted(path for path in SUITE.glob("*.py") if path.stem != "__init__")


def classes(module: ModuleType) -> list[type]:
    """The classes that a module of the suite defines."""
    values = vars(module).values()
    return [v for v in values if inspect.isclass(v) and v.__module__ == module.__name__]


def configuration() -> dict:
    text = (REPO_ROOT / "asv.conf.json").read_text()
    return json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))


def test_one_file_per_question() -> None:
    assert [path.stem for path in FILES] == sorted(QUESTIONS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_the_suite(path: Path) -> None:
    benchmark, *more = classes(load(path))
    assert benchmark.__name__ == path.stem.capitalize()
    assert [cls.__name__ for cls in more] in ([], [f"{benchmark.__name__}More"])
    # Together they have each case once, and a quick set there is.
    assert benchmark.params == history.cases(path.stem) != []
    assert [cls.params for cls in more] == [history.cases(path.stem, quick=False)] * len(more)
    assert sum(len(cls.params) for cls in (benchmark, *more)) == len(QUESTIONS[path.stem])
    for cls in (benchmark, *more):
        assert isinstance(cls.version, str)
        # asv tells caches apart by where setup_cache stands: each class has one of its own.
        assert "setup_cache" in vars(cls)
        assert cls.setup_cache.timeout >= 600
    tracks = [name for name in dir(benchmark) if name.startswith("track_")]
    times = [name for name in tracks if re.search(r"_(ms|us|us_per_(?!\w*ratio)\w+)$", name)]
    if path.stem in ("decode", "mixed"):
        assert "track_us_per_token" in times
    # Modelled times are no machine's, and have no anchor.
    for name in (n for n in times if not n.startswith("track_model_")):
        assert f"{name}_ratio" in tracks
    for name in tracks:
        assert isinstance(getattr(benchmark, name).unit, str)
        # asv takes smaller as better.
        assert not re.search("per_s$|occupancy|accepted", name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_tracked_is_measured(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of the question's smallest case has each metric that the file tracks."""
    benchmark, *_ = classes(load(path))
    monkeypatch.setattr(history, "PROCESSES", 1)
    cases = [c for c in QUESTIONS[path.stem] if c.setup.model != "real"]
    case = min(cases, key=lambda case: case.batch_size)
    session = make_session(case.setup, tmp_path)
    found = session.run_round(case.shortened() if case.varies else case)
    session.close()
    if case.varies:
        anchors = [dict.fromkeys(case.anchors, 1.0)] * 2
        (found,) = with_ratios([found], anchors)
    results = {case.name: {"outcome": "done", "processes": 1, "rounds": [found]}}
    for name in (name for name in dir(benchmark) if name.startswith("track_")):
        value = getattr(benchmark(), name)(results, case.name)
        assert math.isfinite(value) or name == "track_model_stalls_per_step", name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_importing_the_suite_imports_no_torch(path: Path) -> None:
    import subprocess

    code = f"import sys, runpy; runpy.run_path({str(path)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_environment_is_pinned_as_requirements_are() -> None:
    pins = {}
    for name in ("torch.txt", "dev.txt"):
        for line in (REPO_ROOT / "requirements" / name).read_text().splitlines():
            if match := re.match(r"([\w-]+)==([\w.]+)", line):
                pins[match[1].lower()] = match[2]
    for name, versions in configuration()["matrix"]["req"].items():
        assert versions == [pins[name]], name


def test_the_environment_has_what_the_package_asks_for() -> None:
    import tomllib

    project = tomllib.loads((REPO_ROOT / "python" / "pyproject.toml").read_text())
    needed = {re.match(r"[\w-]+", text)[0] for text in project["project"]["dependencies"]}
    needed |= {re.match(r"[\w-]+", text)[0] for text in project["build-system"]["requires"]}
    conf = configuration()
    assert needed <= conf["matrix"]["req"].keys()
    assert conf["project"] == project["project"]["name"]


def test_thresholds_of_regressions_do_not_overlap() -> None:
    """asv takes the largest threshold of those that match."""
    thresholds = configuration()["regressions_thresholds"]
    for name, threshold in {
        "decode.Decode.track_us_per_token": 0.3,
        "decode.DecodeMore.track_us_per_token_ratio('a')": 0.08,
        "mixed.Mixed.track_stalled('a')": 0.3,
        "transfers.Transfers.track_blocking_per_step('a')": 0.001,
        "memory.MemoryMore.track_peak_step_bytes": 0.001,
    }.items():
        assert [v for pattern, v in thresholds.items() if re.match(pattern, name)] == [threshold]

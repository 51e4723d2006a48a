"""``lab/asv_files.py``: what asv writes is read, and whatever else is said by file, field and value."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_results as made
from asv.benchmarks import Benchmarks
from asv.machine import Machine
from asv.results import Results
from asv.runner import BenchmarkResult

from lab import asv_files
from lab.asv_files import FormError, read_benchmarks, read_machine, read_result

NAME = "decode.Decode.track_us_per_token"
SHA = "0123456789abcdef0123456789abcdef01234567"


def result() -> dict[str, Any]:
    row = [
        *([1.5, None, math.nan], [["'a'", "'b'", "'c'"]], "3", 1796041603221, 0.9),
        *([-math.inf, None, None], [math.inf, None, None], [1, None, None], [2.0, None, None]),
        *([1, None, None], [2, None, None], [[1.5, math.nan], None, None], "eJw="),
    ]
    return {
        "commit_hash": SHA,
        "env_name": "existing-py3.11",
        "date": 1796040637000,
        "params": {"machine": "m", "cpu": "Intel(R) é", "ram": "8"},
        "python": "3.11",
        "requirements": {"torch": "2.13.0"},
        "env_vars": {},
        "result_columns": list(asv_files.COLUMNS),
        "results": {NAME: row, "module.track_one": [[2.0], [], "1", None, None]},
        "durations": {"<build>": 6.4, "<setup_cache decode:21>": 50},
        "version": 2,
    }


def machine() -> dict[str, Any]:
    return {"machine": "m", "cpu": "a CPU", "num_cpu": "2", "gpu": "none", "version": 1}


def benchmarks() -> dict[str, Any]:
    about = {
        "name": NAME,
        "code": "def track():\n",
        "params": [["'a'", "'b'", "'c'"]],
        "param_names": ["case"],
        "timeout": 120,
        "type": "track",
        "unit": "us/token",
        "version": "3",
    }
    plain = about | {"name": "module.track_one", "params": [], "param_names": []}
    return {NAME: about, "module.track_one": plain, "version": 2}


FORMS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Path], dict[str, Any]]]] = {
    "result": (result, read_result),
    "machine": (machine, read_machine),
    "benchmarks": (benchmarks, read_benchmarks),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that messages call m/f."""
    (tmp_path / "m").mkdir()
    return tmp_path / "m" / "f"


# --- What asv writes ----------------------------------------------------------------------------


def test_versions_are_asvs() -> None:
    assert Results.api_version == asv_files.RESULT_VERSION
    assert Machine.api_version == asv_files.MACHINE_VERSION
    assert Benchmarks.api_version == asv_files.BENCHMARKS_VERSION


def test_what_asv_has_written_is_read_as_it_is(tmp_path: Path) -> None:
    folder = made.write_results(tmp_path / "results", [f"{i:040x}" for i in range(2)])
    for path in folder.glob("*/*.json"):
        read = asv_files.read_machine if path.name == "machine.json" else asv_files.read_result
        document = read(path)
        # NaN is like nothing else, as it is written like itself.
        assert json.dumps(document) == json.dumps(json.loads(path.read_text()))
        if path.name != "machine.json":
            assert document["result_columns"] == list(asv_files.COLUMNS)
    assert asv_files.read_benchmarks(folder / "benchmarks.json").keys() > {NAME}


def test_a_single_sample_is_read_and_what_failed_too(tmp_path: Path) -> None:
    results = Results({"machine": "m"}, {}, SHA, 1796040637000, "3.11", "env", {})
    one = {"name": NAME, "version": "1", "params": [["'a'", "'b'"]]}
    samples = BenchmarkResult([1.0, math.nan], [[1.0], None], [1, None], 0, "", None)
    results.add_result(one, samples, record_samples=True, duration=0.1)
    failed = BenchmarkResult([None, None], [None, None], [None, None], 1, "", None)
    results.add_result(one | {"name": "m.failed"}, failed, record_samples=True)
    results.save(str(tmp_path))
    (path,) = tmp_path.glob("m/*.json")
    assert "Infinity" in path.read_text()
    assert asv_files.read_result(path)["results"]["m.failed"][0] is None


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_accepted(form: str, file: Path) -> None:
    write, read = FORMS[form]
    file.write_text(json.dumps(write()))
    assert json.dumps(read(file)) == file.read_text()


# --- What is no file of asv's -------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe{}", "m/f is not UTF-8: .* at byte 0"),
        (b"", "m/f is no JSON"),
        (b"{", "m/f is no JSON"),
        (b"1" * 5000, "m/f is no JSON"),
        (b"[" * 100_000, "m/f is no JSON of asv's: it is nested too deep"),
        (b"null", "m/f is no JSON object, but None"),
        (b"[]", r"m/f is no JSON object, but \[\]"),
        (b"{}", "m/f: version is None, not [12], which is asv's"),
    ],
    ids=["bytes", "empty", "truncated", "digits", "bottomless", "null", "list", "no version"],
)
def test_what_is_no_json_of_asvs(form: str, content: bytes, said: str, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(FormError, match=f"^{said}"):
        FORMS[form][1](file)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", [0, 3, 99, "2", None, True, 2.0])
def test_another_version(form: str, version: object, file: Path) -> None:
    write, read = FORMS[form]
    file.write_text(json.dumps(write() | {"version": version}))
    with pytest.raises(FormError, match=f"^m/f: version is {version!r}, not "):
        read(file)


def test_a_file_that_is_cut_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "m" / "0123.json"
    path.parent.mkdir()
    path.write_text(json.dumps(result())[:-9])
    with pytest.raises(FormError, match=r"^m/0123.json is no JSON: "):
        asv_files.read_result(path)
    path.unlink()
    with pytest.raises(FormError, match=r"^m/0123.json cannot be read: No such file"):
        asv_files.read_result(path)


# --- Fields -------------------------------------------------------------------------------------

HUGE = 10**400


def set_field(field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def alter(document: dict[str, Any]) -> None:
        *path, last = field.split("|")
        for key in path:
            document = document[key]
        document[last] = value

    return alter


def set_column(column: str, value: object) -> Callable[[dict[str, Any]], None]:
    def alter(document: dict[str, Any]) -> None:
        document["results"][NAME][asv_files.COLUMNS.index(column)] = value

    return alter


RESULT: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    *((set_field("commit_hash", v), "commit_hash") for v in (None, 5, "main", "01234567" * 9)),
    *((set_field(f, v), f) for f in ("env_name", "python") for v in (None, 3.11, "\ud800")),
    *((set_field("date", v), "date") for v in (None, "yesterday", 1e300, 1.5, -1, HUGE, True)),
    *((set_field(f, v), f) for f in ("params", "requirements", "env_vars") for v in (None, [])),
    (set_field("params|ram", 8), "params[ram]"),
    (set_field("params", {"cpu": "x"}), "params[machine]"),
    *((set_field("params|machine", v), "params[machine]") for v in (None, "", "..", "a/b")),
    (set_field("durations", None), "durations"),
    *((set_field("durations|<build>", v), "durations[<build>]") for v in ("1", math.nan, HUGE)),
    *((set_field("result_columns", v), "result_columns") for v in (None, "result", [])),
    (set_field("result_columns", ["result", "params", "version", "html"]), "result_columns"),
    (set_field("result_columns", [["result"]]), "result_columns"),
    (set_field("result_columns", ["result", "params", "version", "result"]), "result_columns"),
    *((set_field("results", v), "results") for v in (None, [])),
    *(
        (set_field(f"results|{key}", [[1.0], [], "1"]), "results")
        for key in ("a", "a b.c", "a.<i>")
    ),
    *((set_field(f"results|{NAME}", v), f"results[{NAME}]") for v in (None, {}, [None] * 14)),
    (set_field(f"results|{NAME}", []), f"results[{NAME}].params"),
    *(
        (set_column("params", v), f"results[{NAME}].params")
        for v in (None, "a", [1], [[1, 2, 3]], [["a"] * 1000, ["b"] * 1000])
    ),
    *(
        (set_column("result", v), f"results[{NAME}].result")
        for v in (1.5, "abc", [], [1.0] * 2, ["abc"] * 3, [True] * 3, [[1.0]] * 3)
    ),
    *(
        (set_column("result", [v, None, None]), f"results[{NAME}].result")
        for v in (math.inf, -math.inf, 1e301, HUGE)
    ),
    *((set_column(c, 5), f"results[{NAME}].{c}") for c in ("version", "profile")),
    *((set_column("started_at", v), f"results[{NAME}].started_at") for v in ("x", 1e300, math.nan)),
    *((set_column("duration", v), f"results[{NAME}].duration") for v in ("x", [1.0], math.inf)),
    *(
        (set_column(c, v), f"results[{NAME}].{c}")
        for c in asv_files.COLUMNS[5:11]
        for v in (1, [1.0], ["x"] * 3)
    ),
    (set_column("stats_q_25", [math.inf, None, None]), f"results[{NAME}].stats_q_25"),
    *(
        (set_column("samples", v), f"results[{NAME}].samples")
        for v in (1.0, [[1.0]], [1.0] * 3, [["x"], None, None], [[math.inf], None, None])
    ),
]
MACHINES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    *((set_field("machine", v), "machine") for v in (None, 5, "", ".", "a/b")),
    *((set_field("num_cpu", v), "num_cpu") for v in (None, 2, [1], "\udfff")),
]
BENCHMARKS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    *((set_field(key, {}), "a key") for key in ("a", 'x"><script>.M.track', "../../x.y")),
    *((set_field(NAME, v), NAME) for v in (None, [])),
    (set_field(f"{NAME}|name", "other.Name.track"), f"{NAME}.name"),
    *((set_field(f"{NAME}|params", v), f"{NAME}.params") for v in (None, ["a"], [[1]])),
    (set_field(f"{NAME}|params", [["'a'"] * 1000] * 9), f"{NAME}.params"),
    *((set_field(f"{NAME}|param_names", v), f"{NAME}.param_names") for v in (None, [], [1])),
    *((set_field(f"{NAME}|{f}", None), f"{NAME}.{f}") for f in ("unit", "type", "version", "code")),
    *((set_field(f"{NAME}|timeout", v), f"{NAME}.timeout") for v in (math.inf, math.nan, HUGE)),
    (set_field(f"{NAME}|more", {"x": [math.inf]}), f"{NAME}.more[x]"),
]


@pytest.mark.parametrize(
    ("form", "alter", "field"),
    [
        *(("result", *odd) for odd in RESULT),
        *(("machine", *odd) for odd in MACHINES),
        *(("benchmarks", *odd) for odd in BENCHMARKS),
    ],
)
def test_an_odd_field_is_named(
    form: str, alter: Callable[[dict[str, Any]], None], field: str, file: Path
) -> None:
    write, read = FORMS[form]
    document = write()
    alter(document)
    file.write_text(json.dumps(document))
    with pytest.raises(FormError) as refused:
        read(file)
    assert str(refused.value).startswith(f"m/f: {field} is ")
    assert len(str(refused.value)) < 400


def test_the_value_is_named(file: Path) -> None:
    document = result()
    set_column("result", [1.0, "abc", None])(document)
    file.write_text(json.dumps(document))
    with pytest.raises(
        FormError, match=rf"^m/f: results\[{NAME}\].result is 'abc', not a number or NaN"
    ):
        read_result(file)


def test_a_message_is_one_line(file: Path) -> None:
    document = result()
    document["durations"] = {"<build>\n::error::": "x"}
    file.write_text(json.dumps(document))
    with pytest.raises(
        FormError, match=r"^m/f: durations\[<build>\?::error::\] is 'x', not [^\n]*$"
    ):
        read_result(file)


def test_it_needs_nothing_that_is_installed() -> None:
    folder = Path(asv_files.__file__).parents[1]
    code = f"import sys; sys.path.append({str(folder)!r}); import lab.asv_files"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)

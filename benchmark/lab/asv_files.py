"""Whether a file is JSON of the form that asv writes.

asv believes the files that it reads. One infinite value keeps ``asv publish`` busy for ever, one list
that is too short ends it with a traceback, and a file that it cannot read it leaves out. Whoever reads
its files asks here first, and can say which file is wrong, and in what.

Needs Python alone: files from elsewhere are checked where nothing is installed.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

RESULT_VERSION: Final = 2
MACHINE_VERSION: Final = 1
BENCHMARKS_VERSION: Final = 2

COLUMNS: Final = (
    *("result", "params", "version", "started_at", "duration"),
    *("stats_ci_99_a", "stats_ci_99_b", "stats_q_25", "stats_q_75", "stats_number", "stats_repeat"),
    *("samples", "profile"),
)
# Of a single sample no interval is known: asv writes an infinite one.
INTERVAL: Final = frozenset(("stats_ci_99_a", "stats_ci_99_b"))
BENCHMARK: Final = re.compile(r"\w+(\.\w+)+")
COMMIT: Final = re.compile(r"[0-9a-f]{8,64}")

# The year 2200, in milliseconds as JavaScript counts them.
MOST_TIME: Final = 7_258_118_400_000
# Squares and factors of what is shown should still be numbers.
MOST: Final = 1e300
# Combinations of parameters: asv visits each.
MOST_CASES: Final = 100_000
_MOST_SHOWN: Final = 80


class FormError(ValueError):
    """A file is not of asv's form; the message names file, field and value."""


def read_result(path: Path) -> dict[str, Any]:
    """The results of a commit, ``COMMIT-ENVIRONMENT.json``.

    Raises
    ------
    FormError
        If the file cannot be read, or is not of asv's form.
    """
    return _parse(path, RESULT_VERSION, _check_result)


def read_machine(path: Path) -> dict[str, Any]:
    """What describes a machine, ``machine.json``.

    Raises
    ------
    FormError
        If the file cannot be read, or is not of asv's form.
    """
    return _parse(path, MACHINE_VERSION, _check_machine)


def read_benchmarks(path: Path) -> dict[str, Any]:
    """What describes the benchmarks, ``benchmarks.json``, by their names; beside them is ``version``.

    Raises
    ------
    FormError
        If the file cannot be read, or is not of asv's form.
    """
    return _parse(path, BENCHMARKS_VERSION, _check_benchmarks)


def _called(path: Path) -> str:
    return "/".join(path.parts[-2:])


def _parse(
    path: Path, version: int, check: Callable[[Mapping[str, Any], str], None]
) -> dict[str, Any]:
    name = _called(path)
    try:
        document = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise FormError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FormError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise FormError(f"{name} is no JSON: {error}") from error
    except RecursionError as error:
        raise FormError(_too_deep(name)) from error
    if not isinstance(document, dict):
        raise FormError(f"{name} is no JSON object, but {_shown(document)}")
    found = document.get("version")
    if type(found) is not int or found != version:
        _refuse(name, "version", found, f"{version}, which is asv's")
    try:
        check(document, name)
    except RecursionError as error:
        raise FormError(_too_deep(name)) from error
    return document


def _too_deep(name: str) -> str:
    return f"{name} is no JSON of asv's: it is nested too deep"


def _shown(value: object) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _refuse(name: str, field: str, value: object, wanted: str) -> NoReturn:
    # A name in it may hold anything, line ends too.
    place = "".join(letter if letter.isprintable() else "?" for letter in field[:200])
    raise FormError(f"{name}: {place} is {_shown(value)}, not {wanted}")


# --- The three forms ----------------------------------------------------------------------------


def _check_result(document: Mapping[str, Any], name: str) -> None:
    sha = document.get("commit_hash")
    if not (isinstance(sha, str) and COMMIT.fullmatch(sha)):
        _refuse(name, "commit_hash", sha, "a commit's hash")
    for field in ("env_name", "python"):
        _check_text(document.get(field), name, field)
    _check_time(document.get("date"), name, "date", (int,))
    for field in ("params", "requirements"):
        _check_texts(document.get(field), name, field)
    # asv does without these two.
    _check_texts(document.get("env_vars", {}), name, "env_vars")
    durations = document.get("durations", {})
    _check_object(durations, name, "durations")
    for phase, seconds in durations.items():
        _check_text(phase, name, "durations")
        _check_number(seconds, name, f"durations[{phase}]")
    _check_machine_name(document["params"].get("machine"), name, "params[machine]")
    columns = document.get("result_columns")
    _check_columns(columns, name)
    _check_object(document.get("results"), name, "results")
    for benchmark, row in document["results"].items():
        _check_benchmark_name(benchmark, name, "results")
        field = f"results[{benchmark}]"
        if not isinstance(row, list) or len(row) > len(columns):
            _refuse(name, field, row, f"a list of {len(columns)} columns at most")
        _check_row(dict(zip(columns, row, strict=False)), name, field)


def _check_columns(columns: object, name: str) -> None:
    field = "result_columns"
    if not isinstance(columns, list):
        _refuse(name, field, columns, "a list of columns")
    for column in columns:
        if column not in COLUMNS:
            _refuse(name, field, column, "a column of asv's")
    if len(set(columns)) < len(columns) or not {"result", "params", "version"} <= set(columns):
        _refuse(name, field, columns, "asv's columns, each once")


def _check_row(row: Mapping[str, Any], name: str, field: str) -> None:
    """See that each column of a benchmark has what asv writes there."""
    cases = _check_params(row.get("params"), name, f"{field}.params")
    for column, value in row.items():
        place = f"{field}.{column}"
        # asv leaves out what it does not have, or writes null for it.
        if column == "params" or value is None:
            continue
        if column in ("version", "profile"):
            _check_text(value, name, place)
        elif column == "started_at":
            _check_time(value, name, place, (int, float))
        elif column == "duration":
            _check_number(value, name, place)
        else:
            if not isinstance(value, list) or len(value) != cases:
                _refuse(
                    name, place, value, f"a list of {cases}, one for each combination of params"
                )
            for item in value:
                if column == "samples" and isinstance(item, list):
                    for sample in item:
                        _check_number(sample, name, place, nan=True)
                elif column == "samples" and item is not None:
                    _refuse(name, place, item, "a list of samples")
                elif item is not None:
                    _check_number(item, name, place, nan=True, infinite=column in INTERVAL)


def _check_machine(document: Mapping[str, Any], name: str) -> None:
    _check_machine_name(document.get("machine"), name, "machine")
    _check_texts({key: v for key, v in document.items() if key != "version"}, name, "")


def _check_benchmarks(document: Mapping[str, Any], name: str) -> None:
    for benchmark, about in document.items():
        if benchmark == "version":
            continue
        _check_benchmark_name(benchmark, name, "a key")
        _check_object(about, name, benchmark)
        if about.get("name") != benchmark:
            _refuse(name, f"{benchmark}.name", about.get("name"), f"{benchmark!r}")
        _check_params(about.get("params"), name, f"{benchmark}.params")
        names = about.get("param_names")
        if not isinstance(names, list) or len(names) != len(about["params"]):
            _refuse(name, f"{benchmark}.param_names", names, "a list of a name for each of params")
        for one in names:
            _check_text(one, name, f"{benchmark}.param_names")
        for field in {"unit", "type", "version", "code", "pretty_name"} & about.keys():
            _check_text(about[field], name, f"{benchmark}.{field}")
        # The rest goes into the site's own JSON, where a browser takes neither NaN nor Infinity.
        for field, value in about.items():
            _check_finite(value, name, f"{benchmark}.{field}")


# --- What they are made of ----------------------------------------------------------------------


def _check_params(params: object, name: str, field: str) -> int:
    """See that these are lists of parameters; return how many combinations they have."""
    if not isinstance(params, list) or not all(isinstance(one, list) for one in params):
        _refuse(name, field, params, "a list of lists of parameters")
    for one in params:
        for text in one:
            _check_text(text, name, field)
    cases = math.prod(len(one) for one in params)
    if cases > MOST_CASES:
        _refuse(name, field, params, f"of {MOST_CASES} combinations at most, but of {cases}")
    return cases


def _check_benchmark_name(benchmark: str, name: str, field: str) -> None:
    if not BENCHMARK.fullmatch(benchmark):
        _refuse(name, field, benchmark, "a benchmark's name, words with dots between")


def _check_machine_name(value: object, name: str, field: str) -> None:
    _check_text(value, name, field)
    # Its results are in a folder of this name.
    if value in ("", ".", "..") or "/" in str(value):
        _refuse(name, field, value, "a machine's name")


def _check_object(value: object, name: str, field: str) -> None:
    if not isinstance(value, dict):
        _refuse(name, field, value, "a JSON object")


def _check_text(value: object, name: str, field: str) -> None:
    if not isinstance(value, str):
        _refuse(name, field, value, "text")
    # JSON has escapes of half characters, which no file can be written with.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        _refuse(name, field, value, "text that can be written")


def _check_texts(value: object, name: str, field: str) -> None:
    if not isinstance(value, dict):
        _refuse(name, field, value, "a JSON object")
    for key, text in value.items():
        place = f"{field}[{key}]" if field else key
        _check_text(key, name, field or "a key")
        _check_text(text, name, place)


def _check_time(value: Any, name: str, field: str, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds or not 0 <= value <= MOST_TIME:
        _refuse(name, field, value, "a time in milliseconds since 1970, before the year 2200")


def _check_number(
    value: object, name: str, field: str, *, nan: bool = False, infinite: bool = False
) -> None:
    # A whole number may be beyond all floats, and then is compared as what it is.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value != value:
            if nan:
                return
        elif abs(value) <= MOST or (infinite and value in (math.inf, -math.inf)):
            return
    _refuse(name, field, value, f"a number{' or NaN' if nan else ''} between {-MOST} and {MOST}")


def _check_finite(value: object, name: str, field: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, name, f"{field}[{key}]")
    elif isinstance(value, list):
        for item in value:
            _check_finite(item, name, field)
    elif isinstance(value, (int, float)):
        _check_number(float(value) if isinstance(value, bool) else value, name, field)

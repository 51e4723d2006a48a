#!/usr/bin/env python3
"""Tell asv of this machine: its name, and what asv does not find out by itself.

asv keeps what it knows of machines in ``~/.asv-machine.json``, copies the entry next to the results, as
``machine.json``, and each field of it into each result. It asks for no graphics processor, but keeps the
fields that it does not know, so these stand beside its own:

======  ===============================================================================================
gpu     name of the GPU, as CUDA tells it; with how many there are, where there are several
driver  version of its driver
cuda    version of CUDA that torch was built for
torch   version of torch
triton  version of Triton
======  ===============================================================================================

What is not there is ``none``. All of them are parameters for asv, as its own fields are: a result behind
a new driver begins a line of its own in asv's graphs, under the same machine.

Where ``LAB_DEVICE=cpu`` keeps the laboratory off a GPU that is there, this is another machine: without a
GPU, and with ``-cpu`` behind its name. Results of the two would take each other's place.

A machine that results are kept of needs a name of its own that stays, whatever the host is called:
``docs/gpu-runner.md`` says why.

Examples
--------
::

    python scripts/asv_machine.py                           # print what would be saved
    python scripts/asv_machine.py --name gpu-h200 --save
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmark"))

from lab.devices import DEVICE_VARIABLE, OFF_GPU

NONE: Final = "none"
FIELDS: Final = ("gpu", "driver", "cuda", "torch", "triton")
MACHINE_FILE: Final = "~/.asv-machine.json"
# Of asv's machine file.
API_VERSION: Final = 1
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PROC: Final = Path("/proc/driver/nvidia/version")

Entry = dict[str, str]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NONE


def _driver() -> str:
    """Version of the driver, from its tool, else from the kernel."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        if lines := done.stdout.split():
            return lines[0]
    with contextlib.suppress(OSError):
        if match := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _PROC.read_text()):
            return match[1]
    return NONE


def _gpus() -> list[str]:
    """Names of the GPUs that torch sees."""
    try:
        import torch
    except ImportError:
        return []
    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _is_off_gpu() -> bool:
    """Whether there is a GPU that the laboratory is kept off."""
    return os.environ.get(DEVICE_VARIABLE) == "cpu" and bool(_gpus())


def gpu_fields() -> Entry:
    """The fields that asv does not have, by name; ``none`` for what is not there or not used."""
    fields = dict.fromkeys(FIELDS, NONE) | {"triton": _version("triton")}
    try:
        import torch
    except ImportError:
        return fields
    fields["torch"] = torch.__version__
    names = _gpus()
    if not names or _is_off_gpu():
        return fields
    counts = {name: names.count(name) for name in names}
    gpu = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())
    return fields | {"gpu": gpu, "driver": _driver(), "cuda": str(torch.version.cuda)}


def _asv_fields(name: str) -> Entry:
    """What asv would write of this machine, by its own means where it is installed."""
    try:
        from asv.machine import Machine
    except ImportError:
        about = platform.uname()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found = {
            "os": f"{about.system} {about.release}",
            "num_cpu": str(os.cpu_count()),
            "arch": about.machine,
            "cpu": about.processor or about.machine,
            "ram": str(memory),
        }
    else:
        found = Machine.get_defaults()
    return found | {"machine": name}


def describe(name: str | None = None) -> Entry:
    """All fields of this machine, as it is now.

    Parameters
    ----------
    name : str, optional
        What asv is to call it; by default the host's name.

    Raises
    ------
    ValueError
        If it is no name for a machine, which is a folder's name too.
    """
    _check_name(name)
    return _asv_fields(_off_gpu(name or platform.node())) | gpu_fields()


def _check_name(name: str | None) -> None:
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(f"a machine's name is of letters, digits and '._-', got {name!r}")


def _off_gpu(name: str) -> str:
    """What a machine is called as long as its GPU, if any, is not used."""
    return f"{name}{OFF_GPU}" if _is_off_gpu() and not name.endswith(OFF_GPU) else name


def _load(path: Path) -> dict[str, Any]:
    """asv's file of machines; empty if there is none.

    Raises
    ------
    ValueError
        If it is not as asv writes it.
    """
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, asv's file of machines, is no JSON: {error}") from error
    if not isinstance(known, dict):
        raise ValueError(
            f"{path}, asv's file of machines, is no JSON object, but {str(known)[:80]!r}"
        )
    if known.get("version", API_VERSION) != API_VERSION:
        found = str(known["version"])[:80]
        raise ValueError(f"{path}: version is {found!r}, not {API_VERSION}, which is asv's")
    for name, entry in known.items():
        if name == "version":
            continue
        if not isinstance(entry, dict) or entry.get("machine") != name:
            raise ValueError(f"{path}: {name!r} is {str(entry)[:80]!r}, not a machine of that name")
        for key, value in entry.items():
            if not isinstance(value, str):
                raise ValueError(f"{path}: {key!r} of {name!r} is {str(value)[:80]!r}, not text")
    return known


def save(entry: Mapping[str, str], path: Path | None = None) -> Path:
    """Put an entry into asv's file of machines, beside the others; return the file."""
    path = path or Path(MACHINE_FILE).expanduser()
    known = _load(path)
    # asv takes a single entry for whatever host asks, and its version stands among the entries.
    known |= {entry["machine"]: dict(entry), "version": API_VERSION}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(known, indent=4) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _find(known: Mapping[str, Entry], name: str | None) -> tuple[str, Entry | None]:
    """What a machine is called, and its entry if it has one (see `make_known`)."""
    _check_name(name)
    # This machine without its GPU is no second one.
    others = [other for other in known if not (other.endswith(OFF_GPU) and _gpus())]
    wanted = name or platform.node()
    if name is None and wanted not in known and len(others) == 1:
        (wanted,) = others
    wanted = _off_gpu(wanted)
    return wanted, known.get(wanted)


def _entries(path: Path) -> dict[str, Entry]:
    return {key: value for key, value in _load(path).items() if key != "version"}


def known_as(name: str | None = None, path: Path | None = None) -> str:
    """The name that results of this machine are kept under, as `make_known` has it; nothing is written.

    Raises
    ------
    ValueError
        If it is no name for a machine, or asv's file of machines is not as asv writes it.
    """
    return _find(_entries(path or Path(MACHINE_FILE).expanduser()), name)[0]


def make_known(name: str | None = None, path: Path | None = None) -> str:
    """Tell asv of this machine unless it knows it; return the name that results are kept under.

    Parameters
    ----------
    name : str, optional
        What asv is to call the machine. By default it is the host's name, or, as for asv itself, the
        name of the only machine that asv knows.
    path : Path, optional
        asv's file of machines, if it is another one.

    Raises
    ------
    ValueError
        If it is no name for a machine, or asv's file of machines is not as asv writes it.

    Notes
    -----
    What somebody told asv of the machine stays. Of the fields of this module, those that an entry has
    are brought up to date. An entry from before them gets them only with a GPU: each new field is one
    more parameter, and would part old results from new ones.
    """
    path = path or Path(MACHINE_FILE).expanduser()
    known = _entries(path)
    wanted, entry = _find(known, name)
    if entry is None:
        entry = _asv_fields(wanted) | gpu_fields()
    else:
        found = gpu_fields()
        has_gpu = found["gpu"] != NONE
        entry = entry | {key: v for key, v in found.items() if has_gpu or key in entry}
    if known.get(entry["machine"]) != entry:
        save(entry, path)
    return entry["machine"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print or save; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="asv_machine.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--name", help="what asv is to call it (default: what it is known as, else the host's name)"
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write it into asv's file of machines, instead of what is there of it",
    )
    parser.add_argument("--file", type=Path, help=f"that file, instead of {MACHINE_FILE}")
    parser.add_argument("--require-gpu", action="store_true", help="fail where there is no GPU")
    args = parser.parse_args(argv)
    try:
        _check_name(args.name)
    except ValueError as error:
        parser.error(str(error))
    try:
        entry = describe(known_as(args.name, args.file))
        if args.require_gpu and entry["gpu"] == NONE:
            why = f"{DEVICE_VARIABLE}=cpu keeps off it" if _is_off_gpu() else "torch sees none"
            raise ValueError(f"no CUDA device: {why}")
        if args.save:
            print(f"saved in {save(entry, args.file)}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"asv_machine: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(entry, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

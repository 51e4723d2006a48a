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


def gpu_fields() -> Entry:
    """The fields that asv does not have, by name; ``none`` where there is no such thing."""
    fields = dict.fromkeys(FIELDS, NONE) | {"triton": _version("triton")}
    try:
        import torch
    except ImportError:
        return fields
    fields["torch"] = torch.__version__
    if torch.version.cuda is None or not torch.cuda.is_available():
        return fields
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    counts = {name: names.count(name) for name in names}
    gpu = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())
    return fields | {"gpu": gpu, "driver": _driver(), "cuda": torch.version.cuda}


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
    """All fields of this machine.

    Parameters
    ----------
    name : str, optional
        What asv is to call it; by default the host's name.

    Raises
    ------
    ValueError
        If it is no name for a machine, which is a folder's name too.
    """
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(f"a machine's name is of letters, digits and '._-', got {name!r}")
    return _asv_fields(name or platform.node()) | gpu_fields()


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def save(entry: Mapping[str, str], path: Path | None = None) -> Path:
    """Put an entry into asv's file of machines, beside the others; return the file."""
    path = path or Path(MACHINE_FILE).expanduser()
    known = _load(path)
    # asv takes a single entry for whatever host asks, and its version stands among the entries.
    known |= {entry["machine"]: dict(entry), "version": API_VERSION}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(known, indent=4) + "\n")
    partial.replace(path)
    return path


def make_known(name: str | None = None, path: Path | None = None) -> str:
    """Tell asv of this machine unless it knows it; return the name that results are kept under.

    Parameters
    ----------
    name : str, optional
        What asv is to call the machine. By default it is the host's name, or, as for asv itself, the
        name of the only machine that asv knows.
    path : Path, optional
        asv's file of machines, if it is another one.

    Notes
    -----
    What somebody told asv of the machine stays. Of the fields of this module, those that an entry has
    are brought up to date. An entry from before them gets them only with a GPU: each new field is one
    more parameter, and would part old results from new ones.
    """
    path = path or Path(MACHINE_FILE).expanduser()
    known = {key: value for key, value in _load(path).items() if key != "version"}
    wanted = name or platform.node()
    entry = known.get(wanted)
    if entry is None and name is None and len(known) == 1:
        (entry,) = known.values()
    if entry is None:
        entry = describe(name)
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
    parser.add_argument("--name", help="what asv is to call it (default: the host's name)")
    parser.add_argument("--save", action="store_true", help="write it into asv's file of machines")
    parser.add_argument("--file", type=Path, help=f"that file, instead of {MACHINE_FILE}")
    parser.add_argument("--require-gpu", action="store_true", help="fail where there is no GPU")
    args = parser.parse_args(argv)
    try:
        entry = describe(args.name)
    except ValueError as error:
        parser.error(str(error))
    if args.require_gpu and entry["gpu"] == NONE:
        print("asv_machine: error: torch sees no CUDA device", file=sys.stderr)
        return 1
    if args.save:
        print(f"saved in {save(entry, args.file)}", file=sys.stderr)
    print(json.dumps(entry, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

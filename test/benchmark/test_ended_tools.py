"""Tools of the laboratory that run an engine in their own process, and are ended from outside."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from processes import end_by

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"
# It says that requests are under way, and does not come to an end with them.
TOOL = """
import runpy, sys, time, sglang

def generate(*args, **kwargs):
    open({told!r}, "w").close()
    time.sleep(60)

sglang.Engine.generate = generate
module, *sys.argv[1:] = {arguments!r}
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["lab.audit_transfers"],
        ["lab.sync_debug", "--device", "cpu"],
        ["lab.device_occupancy", "--device", "cpu", "--model", "tiny"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_whoever_ends_it_is_left_no_traceback_and_no_folder(
    tmp_path: Path, arguments: list[str]
) -> None:
    told, scratch = tmp_path / "told", tmp_path / "scratch"
    scratch.mkdir()
    code = TOOL.format(told=str(told), arguments=arguments)
    found = end_by(signal.SIGTERM, ["-c", code], told, scratch, BENCHMARK)
    assert found.status == 128 + signal.SIGTERM and "Traceback" not in found.said
    # torch's cache is for the next time.
    left = [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")]
    assert left == []

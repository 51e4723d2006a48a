"""The tests of the sparse penalties once more, on the Triton kernels in Triton's interpreter.

Whether kernels are interpreted is settled when Triton is imported, for a whole process. So these run in
one of their own, and this one keeps kernels that can be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.sampling.penaltylib.triton_ops import is_triton_available

HERE = Path(__file__).parent
FILES = ("test_sparse_penalties.py", "test_sparse_penalties_mutations.py")


@pytest.mark.slow
@pytest.mark.skipif(not is_triton_available(), reason="needs Triton")
@pytest.mark.parametrize("file", FILES)
def test_the_kernels_pass_in_the_interpreter(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout.strip().splitlines()[-1])

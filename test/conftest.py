"""What holds for every test: the environment, and the skip where a device is absent."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]

# Makes the laboratory importable, as PYTHONPATH=benchmark does for people. At the end: `import asv` has
# to find the tool, not the folder of that name.
sys.path.append(str(REPO_ROOT / "benchmark"))
# What tests of several folders have in common.
sys.path.append(str(REPO_ROOT / "test"))

# Before anything imports torch or the package, so that child processes inherit it too.
THREADS = 2
os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def why_no_gpu() -> str | None:
    """Say why tests marked `gpu` cannot run here; None where they can."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"needs a GPU: this torch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        return "needs a GPU: torch sees no CUDA device"
    return None


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that use the real model, and skip those that need an absent GPU."""
    on_gpu = []
    for item in items:
        if "model_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
        if item.get_closest_marker("gpu"):
            on_gpu.append(item)
    if on_gpu and (reason := why_no_gpu()) is not None:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))

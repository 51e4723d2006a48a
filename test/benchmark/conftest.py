"""Makes the laboratory importable, as PYTHONPATH=benchmark does for people."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]

# At the end: `import asv` has to find the tool, not the folder of that name.
for folder in (REPO_ROOT / "benchmark", REPO_ROOT / "scripts", Path(__file__).parent):
    sys.path.append(str(folder))


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Directories of a tiny model and of a tiny EAGLE head for it, for ``load_format="dummy"``."""
    from lab.models import write_tiny_model

    root = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(root / "model"), write_tiny_model(root / "draft", draft=True)

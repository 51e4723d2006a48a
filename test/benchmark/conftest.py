"""What tests of the laboratory and of its scripts have in common."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]

for folder in (REPO_ROOT / "scripts", Path(__file__).parent):
    sys.path.append(str(folder))


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Directories of a tiny model and of a tiny EAGLE head for it, for ``load_format="dummy"``."""
    from lab.models import write_tiny_model

    root = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(root / "model"), write_tiny_model(root / "draft", draft=True)

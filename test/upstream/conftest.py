"""Makes the scripts importable that get releases of SGLang."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "upstream"))

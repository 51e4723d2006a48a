"""Lets the tests of this directory import `sampling_reference`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""``python scripts/upstream``, and ``python -m upstream`` with ``scripts`` on the path."""

import sys
from pathlib import Path

if not __package__:
    # Run as a directory: the folder above is not on the path, and the modules of this one are.
    here = Path(__file__).resolve().parent
    sys.path[:] = [
        str(here.parent),
        *(entry for entry in sys.path if Path(entry).resolve() != here),
    ]

try:
    from upstream.cli import main
except ModuleNotFoundError as error:
    if error.name not in ("libcst", "rich"):
        raise
    hint = "pip install libcst rich, or take the .venv that `make env` makes"
    sys.exit(f"upstream: error: there is no module {error.name}: {hint}")

sys.exit(main())

"""The two fixes on SGLang as it is released and forked: ``python scripts/upstream --help``."""

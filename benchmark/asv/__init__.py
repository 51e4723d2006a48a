"""Questions asked of history, one file each. What measures is in ``benchmark/lab``."""

"""Where psutil finds the processes: below the procfs that was configured.

psutil is imported when processes are looked at: it costs 0.6 MiB, and a node without GPUs has no need of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def procfs(root: Path) -> Iterator[None]:
    """psutil reads below ``root``. Its root is a variable of its module, so put back what was there."""
    import psutil

    before = psutil.PROCFS_PATH
    if before == str(root):
        yield
        return
    psutil.PROCFS_PATH = str(root)
    psutil.process_iter.cache_clear()  # the same number is another process there
    try:
        yield
    finally:
        psutil.PROCFS_PATH = before
        psutil.process_iter.cache_clear()

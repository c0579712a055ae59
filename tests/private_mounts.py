"""Commands that run with mounts of their own, in a mount namespace of their own.

An ordinary user, a container without privileges and a process in a chroot may not have such a namespace: in a
chroot, unshare(1) cannot change the propagation of ``/``, which is not a mount point.
"""

import shutil
import subprocess
from pathlib import Path

import pytest


def within_mounts(script: str, *words: str | Path) -> list[str]:
    """Return a command that mounts, and then executes its arguments in the same mount namespace.

    Tries the mounts once, and skips the test with mount's reason if they fail.

    Args:
        script: Lines of sh(1) that mount; the first failure ends them.
        words: ``$1``, ``$2``... of the script.
    """
    if shutil.which("unshare") is None:
        pytest.skip("no mounts of the test's own: unshare(1) is not installed")
    script = f'{script}\nshift {len(words)}\nexec "$@"'
    command = ["unshare", "-m", "sh", "-euc", script, "sh", *map(str, words)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = tried.stderr.strip().partition("\n")[0]
        for path in (word for word in words if isinstance(word, Path)):
            reason = reason.replace(str(path), "<path>")  # one reason for all directories
        pytest.skip(f"no mounts of the test's own: {reason}")
    return command

"""Another user in a test: owner of a file, or effective user that may not do what root may."""

import os
from pathlib import Path
from typing import Final

import pytest

OTHER_USER: Final = 65_534 if os.geteuid() != 65_534 else 65_533
CHANGES_USER: Final = 1 << 6 | 1 << 7
"""Capabilities CAP_SETGID and CAP_SETUID."""


def become_other_user() -> None:
    """Change the effective user of root's process, and skip the test where root has no capability to."""
    try:
        os.seteuid(OTHER_USER)
    except PermissionError as error:
        pytest.skip(f"root may not change its user here: {error.strerror}")


def give_to_other_user(path: Path) -> None:
    """Make another user the owner of a file or link, and skip the test where this process may not."""
    try:
        os.chown(path, OTHER_USER, -1, follow_symlinks=False)
    except PermissionError as error:
        pytest.skip(f"only root with CAP_CHOWN can change an owner: {error.strerror}")


def skip_unless_user_can_change() -> None:
    """Skip a test whose child process changes its user and groups, unless this process may do so."""
    status = Path("/proc/self/status").read_text("ascii", "replace")
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if os.geteuid() != 0 or capabilities & CHANGES_USER != CHANGES_USER:
        pytest.skip("only root with CAP_SETUID and CAP_SETGID can change its user")

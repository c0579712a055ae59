"""Where ``drahealth explain`` looks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Places(NamedTuple):
    """Where to look; None: it is not asked for."""

    runtime_dir: Path | None = None
    kubelet_dir: Path | None = None
    state_dir: Path | None = None
    pods: Path | None = None
    claims: Path | None = None
    cgroupfs_root: Path | None = None
    kubelet_cgroup_root: str = "/"

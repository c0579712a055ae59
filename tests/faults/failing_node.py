"""Node of plain files, and a process on it of which one call of the C library fails."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
from agents import PlainSysfs

SOURCE: Final = Path(__file__).with_name("failing_calls.c")
POOL: Final = "hugepages-2mi-node0"
EXPECTED_PAGES: Final = 16
"""Twice as many as the machine has, so that the pool is Unhealthy."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("failing") / "failing_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class FailingNode:
    """Node of plain files whose n-th call of a kind fails."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.root = directory / "node"
        self.mark = directory / "failed"
        self._library = library
        PlainSysfs(self.root / "sys")
        for name in ("proc", "cgroup", "run"):
            (self.root / name).mkdir()
        self.config = self.root / "config.toml"
        self.config.write_text(f"[expect.hugepages]\n{POOL} = {EXPECTED_PAGES}\n")
        self.flags = [
            *("--config", str(self.config), "--sysfs-root", str(self.root / "sys")),
            *("--procfs-root", str(self.root / "proc"), "--cgroupfs-root", str(self.root / "cgroup")),
            *("--nvml-library", "/nonexistent", "--kmsg", str(self.root / "kmsg"), "--node-name", "node"),
        ]

    def environ(self, call: str, number: int, error: int) -> dict[str, str]:
        """Return the environment of a program whose call fails."""
        return os.environ | {
            "LD_PRELOAD": str(self._library),
            "FAIL_CALL": f"{call}:{number}:{error}",
            "FAIL_BELOW": f"{self.root}/",
            "FAIL_MARK": str(self.mark),
        }

    def failed_call(self) -> str:
        """Return the file of the call that failed and forget it; empty: there are fewer calls."""
        failed = self.mark.read_text() if self.mark.exists() else ""
        self.mark.unlink(missing_ok=True)
        return failed.strip()


@pytest.fixture
def node(tmp_path: Path, library: Path) -> FailingNode:
    return FailingNode(tmp_path, library)

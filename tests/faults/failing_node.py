"""Node of plain files, and a process on it of which one call of the C library fails."""

import mmap
import os
import shutil
import struct
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


class CallOrder:
    """Order to running programs to fail one of their next calls: ``struct order`` of failing_calls.c.

    All programs with the same file share the count of calls, so that one of them fails once.
    """

    _LAYOUT: Final = struct.Struct("iii20s48s")

    def __init__(self, path: Path) -> None:
        """Create the file of the order, or open the one that the parent process has created."""
        self._path = path
        if not path.exists():
            path.write_bytes(bytes(self._LAYOUT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._LAYOUT.size)

    def environ(self, library: Path, directory: Path) -> dict[str, str]:
        """Return the environment of a program that obeys.

        Its calls on files count if the files are in the directory.
        """
        return {
            "LD_PRELOAD": str(library),
            "FAIL_ORDER": str(self._path),
            "FAIL_BELOW": f"{str(directory).rstrip('/')}/",
        }

    @property
    def tcp_thread(self) -> int:
        """Thread that accepted the last TCP connection; 0: none was accepted."""
        return int(self._LAYOUT.unpack(self._memory)[2])

    @property
    def counted(self) -> int:
        """Number of calls since the order; the call with the number of the order has failed."""
        return int(self._LAYOUT.unpack(self._memory)[0])

    def give(self, call: str, number: int, error: int, *, thread: int = 0, program: str = "") -> None:
        """Fail a call from now on.

        Args:
            call: Kind of the call.
            number: Number of the call that fails, from 1.
            error: Errno of the call.
            thread: Thread whose calls count; negative: all threads but this one; 0: all.
            program: Program whose calls count; empty: all.
        """
        order = f"{call}:{number}:{error}".encode()
        self._memory[:] = self._LAYOUT.pack(0, thread, self.tcp_thread, program.encode(), b"")
        self._memory[-48:] = order.ljust(48, b"\0")  # last: programs obey from here on

    def withdraw(self) -> int:
        """Let no further call fail; return the number of calls since the order."""
        counted = self.counted
        self.give("", 0, 0)
        return counted


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

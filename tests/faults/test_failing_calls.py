"""Every call of the C library that fails once: no crash, and no device that is Healthy without being read."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from agents import DRIVER, PlainSysfs
from patience import PATIENCE_S
from wire.serving import eventually

SOURCE: Final = Path(__file__).with_name("failing_calls.c")
POOL: Final = "hugepages-2mi-node0"
EXPECTED_PAGES: Final = 16
"""Twice as many as the machine has, so that the pool is Unhealthy."""
CALLS: Final = {
    "open": (errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.EINTR),
    "read": (errno.EIO, errno.ENODEV, errno.ENOMEM, errno.EINTR),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.EACCES, errno.ENOSPC),
    "socket": (errno.EMFILE, errno.ENOBUFS, errno.EACCES),
    "mmap": (errno.ENOMEM,),
}
CASES: Final = [
    pytest.param(call, error, id=f"{call} {errno.errorcode[error]}")
    for call in CALLS
    for error in CALLS[call]
]
RUN_CASES: Final = [case for case in CASES if case.values[0] not in {"open", "read"}]
CODES: Final = {0, 1, 2, 3, 69, 70, 74, 75, 77, 78}
"""Exit codes of docs/configuration.md that a failed call may cause; a signal is a negative one."""


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


def numbers() -> Iterator[int]:
    """Yield 1, 2, 3... for the calls of a kind; a loop ends it after the last call."""
    yield from range(1, 2000)
    raise AssertionError("2000 calls, and no end")


def check_devices(document: dict[str, Any], where: str) -> None:
    """Assert that the pool with too few pages is not Healthy, and no device is missing without a reason."""
    healths = {device["name"]: device["health"] for device in document["devices"]}
    assert healths.get(POOL) != "Healthy", where
    assert POOL in healths or any(one["state"] != "ok" for one in document["sources"]), where


@pytest.mark.parametrize(("call", "error"), CASES)
def test_scan_with_a_failed_call_neither_crashes_nor_lies(node: FailingNode, call: str, error: int) -> None:
    for number in numbers():
        done = subprocess.run(
            [sys.executable, "-m", "agent", "scan", "-o", "json", *node.flags],
            env=node.environ(call, number, error),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        failed = node.failed_call()
        where = f"{call} {number} ({failed}): exit code {done.returncode}: {done.stderr}"
        assert done.returncode in CODES - {0, 1}, where
        if done.stdout:
            check_devices(json.loads(done.stdout), where)
        else:
            assert done.stderr.count("drahealth: ") == 1, where
        if not failed:
            assert done.returncode == 2, where
            return


@pytest.mark.parametrize(("call", "error"), RUN_CASES)
def test_run_with_a_failed_call_neither_crashes_nor_lies(node: FailingNode, call: str, error: int) -> None:
    flags = ["--runtime-dir", str(node.root / "run"), "--driver", DRIVER, "--table", "never"]
    log_file = node.mark.with_name("log")
    for number in numbers():
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "agent", "run", *flags, *node.flags],
                env=node.environ(call, number, error), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            document = first_report(process, node.root / "run/agent.sock")
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        failed = node.failed_call()
        where = f"{call} {number} ({failed}): exit code {code}: {log_file.read_text()}"
        assert code in CODES, where
        if document is not None:
            check_devices(document, where)
        else:
            assert "drahealth: " in log_file.read_text(), where
        if not failed:
            assert document is not None, where
            return


def first_report(process: "subprocess.Popen[bytes]", socket: Path) -> dict[str, Any] | None:
    """Wait for the first report of an agent; None: the agent has ended."""
    found: dict[str, Any] = {}

    def is_served_or_over() -> bool:
        if process.poll() is not None:
            return True
        command = [sys.executable, "-m", "agent", "watch", "--once", "-o", "json", str(socket)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.stdout:
            found.update(json.loads(done.stdout))
        return bool(done.stdout)

    eventually(is_served_or_over, "the first report or the end of the agent")
    return found or None

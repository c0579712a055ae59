"""Every call of the C library that fails once: no crash, and no device that is Healthy without being read."""

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from agents import DRIVER, run_command
from patience import PATIENCE_S
from wire.serving import eventually

from faults.failing_node import POOL, FailingNode, library, node

__all__ = ["library", "node"]
pytestmark = pytest.mark.timeout(3600)  # hundreds of processes one after the other

CALLS: Final = {
    "open": (errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.EINTR),
    "read": (errno.EIO, errno.ENODEV, errno.ENOMEM, errno.EINTR),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.EACCES, errno.ENOSPC),
    "socket": (errno.EMFILE, errno.ENOBUFS, errno.EACCES),
    "bind": (errno.EADDRINUSE, errno.EACCES),
    "listen": (errno.EADDRINUSE,),
    "setsockopt": (errno.ENOBUFS, errno.EPERM),
    "getsockopt": (errno.ENOBUFS,),
    "connect": (errno.ECONNREFUSED, errno.EAGAIN),
    "accept": (errno.ECONNABORTED, errno.EMFILE, errno.ENOMEM),
    "send": (errno.EPIPE, errno.ENOBUFS, errno.EAGAIN),
    "recv": (errno.ECONNRESET, errno.ENOBUFS, errno.ENOMEM),
    "epoll": (errno.ENOMEM, errno.ENOSPC),
    "mmap": (errno.ENOMEM,),
    "thread": (errno.EAGAIN,),
}
CASES: Final = [
    pytest.param(call, error, id=f"{call} {errno.errorcode[error]}")
    for call in CALLS
    for error in CALLS[call]
]
RUN_CALLS: Final = {
    **CALLS,
    "open": (errno.EMFILE,),
    "read": (errno.EIO,),
    "epoll": (errno.ENOSPC,),
}
"""Failed calls of an agent. The errors of frequent calls are few, because each is a start of an agent."""
RUN_CASES: Final = [
    pytest.param(call, error, id=f"{call} {errno.errorcode[error]}")
    for call in RUN_CALLS
    for error in RUN_CALLS[call]
]
RUN_CALLS_MAX: Final = 40
"""Number of calls of a kind that fail in an agent, which maps memory as long as it runs."""
RUN_FREQUENT: Final = {"open", "read", "send", "recv", "epoll"}
"""Kinds of calls that an agent makes as long as it runs."""
RUN_FREQUENT_MAX: Final = 20
"""Number of calls of a frequent kind that fail in an agent."""
CODES: Final = {0, 1, 2, 3, 69, 70, 74, 75, 77, 78}
"""Exit codes of docs/configuration.md that a failed call may cause; a signal is a negative one."""


def numbers() -> Iterator[int]:
    """Yield 1, 2, 3... for the calls of a kind; a loop ends it after the last call."""
    yield from range(1, 2000)
    raise AssertionError("2000 calls, and no end")


def healths_of(document: dict[str, Any]) -> dict[str, str]:
    """Return the health of each device in a report."""
    return {device["name"]: device["health"] for device in document["devices"]}


def check_devices(document: dict[str, Any], where: str) -> None:
    """Assert that the pool with too few pages is not Healthy, and no device is missing without a reason."""
    healths = healths_of(document)
    assert healths.get(POOL) != "Healthy", where
    assert POOL in healths or any(source["state"] != "ok" for source in document["sources"]), where


@pytest.mark.parametrize(("call", "error"), CASES)
def test_scan_with_a_failed_call_neither_crashes_nor_lies(node: FailingNode, call: str, error: int) -> None:
    for number in numbers():
        done = run_command("scan", "-o", "json", *node.flags, env=node.environ(call, number, error))
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
def test_run_with_a_failed_call_neither_crashes_nor_lies_and_recovers(
    node: FailingNode, call: str, error: int
) -> None:
    flags = ["--runtime-dir", str(node.root / "run"), "--driver", DRIVER, "--table", "never"]
    log_file = node.mark.with_name("log")
    for number in numbers():
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "agent", "run", *flags, *node.flags],
                env=node.environ(call, number, error), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            documents = reports_until_unhealthy(process, node.root / "run/agent.sock", f"{call} {number}")
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        failed = node.failed_call()
        where = f"{call} {number} ({failed}): exit code {code}: {log_file.read_text()}"
        assert code in CODES, where
        for document in documents:
            check_devices(document, where)
        if not documents or healths_of(documents[-1]).get(POOL) != "Unhealthy":
            assert failed, where
            assert "drahealth: " in log_file.read_text(), where
        if not failed or number == (RUN_FREQUENT_MAX if call in RUN_FREQUENT else RUN_CALLS_MAX):
            return


def reports_until_unhealthy(
    process: "subprocess.Popen[bytes]", socket: Path, where: str
) -> list[dict[str, Any]]:
    """Return the reports of an agent until the pool is Unhealthy again, or the agent has ended."""
    documents: list[dict[str, Any]] = []

    def is_unhealthy_or_over() -> bool:
        if process.poll() is not None:
            return True
        command = [sys.executable, "-m", "agent", "watch", "--once", "-o", "json", str(socket)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.stdout:
            documents.append(json.loads(done.stdout))
        return bool(documents) and healths_of(documents[-1]).get(POOL) == "Unhealthy"

    eventually(is_unhealthy_or_over, lambda: f"{where}: an Unhealthy pool; last report: {documents[-1:]}")
    return documents

"""Threads that the kernel refuses, or that have no memory: an error or a retry, and never a hang."""

import errno
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import pytest
from faults.failing_node import FailingNode, library, node
from patience import PATIENCE_S

from agent.system.threads.thread_start import DaemonThread

__all__ = ["library", "node"]
AGENT: Final = Path(__file__).parent.parent / "agent"
THREADS: Final = {
    "a thread": """
        thread = DaemonThread(lambda: print("ran"), "dh-test")
        try:
            thread.start()
        except ThreadStartError as error:
            print(error, threading.enumerate() == [threading.main_thread()])
            thread = DaemonThread(lambda: print("ran"), "dh-test")
            thread.start()
        thread.join()
        """,
    "a call of a Trio task": """
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        print(trio.run(call_in_thread_when_possible, lambda: "ran", "dh-test"))
        """,
    "a call in a pool with a thread": """
        async def main():
            pool, release = WorkerPool("dh-test", threads=2), threading.Event()
            first = asyncio.ensure_future(pool.call(release.wait))
            await asyncio.sleep(0)
            open(sys.argv[1]).close()
            second = asyncio.ensure_future(pool.call(lambda: "ran"))
            await asyncio.sleep(0)
            release.set()
            print(await second)
        asyncio.run(main())
        """,
    "the last write of faults": """
        path = Path(sys.argv[1]).parent / "gpu-faults.json"
        writer = GpuFaultWriter(path, PersistentState())
        writer.set_newest(PersistentState(runs=7))
        assert writer.close(0)
        print("ran", load_gpu_faults(path)[0].runs)
        """,
}
"""Programs that start a thread; each prints ``ran`` also if the kernel refuses the first thread."""
IMPORTS: Final = """
import asyncio, logging, sys, threading, trio
from pathlib import Path
from agent.model.persistent_faults import PersistentState
from agent.store.gpu_fault_file import GpuFaultWriter, load_gpu_faults
from agent.system.threads.thread_start import DaemonThread, ThreadStartError
from agent.system.threads.trio_calls import call_in_thread_when_possible
from agent.system.threads.worker_threads import WorkerPool
if "WorkerPool(" not in PROGRAM:
    open(sys.argv[1]).close()
"""


@pytest.mark.parametrize(("call", "error"), [("thread", errno.EAGAIN), ("mmap", errno.ENOMEM)])
@pytest.mark.parametrize("what", THREADS)
def test_thread_that_cannot_start_neither_hangs_nor_loses_work(
    node: FailingNode, what: str, call: str, error: int
) -> None:
    """The kernel refuses memory to the new thread; its first mapping is the interpreter's stack."""
    begin = node.root / "begin"
    begin.touch()
    program = textwrap.dedent(THREADS[what])
    done = subprocess.run(
        [sys.executable, "-c", f"PROGRAM = {program!r}{IMPORTS}{program}", begin],
        env=node.environ(call, 1, error), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "ran" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    assert node.failed_call() == call
    if what == "a thread":
        assert done.stdout.startswith("can't start new thread"), done.stdout
        assert "True" in done.stdout, "no trace of the failed thread"


def test_agent_starts_no_other_python_thread() -> None:
    """``threading.Thread`` and ``trio.to_thread`` wait without end for a thread without memory."""
    others = re.compile(r"threading\.Thread\(|trio\.to_thread")
    sources = (path for path in AGENT.rglob("*.py") if path.relative_to(AGENT).parts[0] != "bench")
    found = {
        f"{path.relative_to(AGENT)}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if others.search(line) and not line.lstrip().startswith(("#", '"', "`"))
    }
    assert found == set()


def test_kernel_knows_a_thread_by_its_name() -> None:
    names: list[str] = []
    comm = Path("/proc/thread-self/comm")
    thread = DaemonThread(lambda: names.append(comm.read_text()), "dh-a-very-long-name")
    thread.start()
    thread.join()
    assert names == ["dh-a-very-long-\n"]


def test_process_of_a_pool_ends_with_a_parent_that_is_killed() -> None:
    """The output ends only when no process has it any more."""
    program = """
        import os, signal
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context
        from agent.system.threads.thread_start import end_with_parent
        pool = ProcessPoolExecutor(1, get_context("spawn"), end_with_parent)
        print(pool.submit(os.getpid).result() != os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    pipe = subprocess.PIPE
    done = subprocess.run(command, cwd=AGENT.parent, stdout=pipe, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"True\n")

"""Facts from the real kernel log and from floods of records: the reader and the latch behind it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from log_lines import CASES
from machine import kubepods_tree, machine_lock, skip_unless_kernel_log
from own_process import resident, run_in_own_process
from patience import PATIENCE_S

from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.kernel_log.facts import HOST_PATTERNS, KernelLogCode, KernelLogState
from agent.health.kernel_log.latch import MAX_FACTS, next_log_state
from agent.model.machine_samples import LogSample
from agent.model.reading import SourceState
from agent.model.time import Instant
from agent.native.kernel_events import KernelLogReader

DEVICE: Final = Path("/dev/kmsg")
MIB: Final = 1 << 20


class Listener:
    """Reader with all patterns of the agent, and the latch of its facts."""

    def __init__(self, path: Path, *, any_facility: bool = False) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.kmsg = KernelLogReader(path, (*GPU_LOG_PATTERNS, *HOST_PATTERNS), self.fd, any_facility)
        self.kmsg.start()
        self.past = KernelLogState()

    def read_once(self) -> LogSample:
        sample = self.kmsg.read()
        assert sample is not None
        self.past = next_log_state(self.past, sample, Instant(time.monotonic_ns(), time.time()))
        return sample

    def until(self, code: KernelLogCode, place: str, times: int = 1) -> None:
        """Read after each wake, until a fact has the given count."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.read_once()
            fact = self.past.facts.get((code, place))
            if fact is not None and fact.times >= times:
                return
            assert time.monotonic() < deadline, self.past.facts
            if select.select([self.fd], [], [], deadline - time.monotonic())[0]:
                os.eventfd_read(self.fd)


@contextmanager
def listener(path: Path, *, any_facility: bool = False) -> Iterator[Listener]:
    """Yield a reader, and stop it afterwards."""
    log_listener = Listener(path, any_facility=any_facility)
    try:
        yield log_listener
    finally:
        assert log_listener.kmsg.stop(PATIENCE_S)
        os.close(log_listener.fd)


# --- the real log -------------------------------------------------------------------------------------------


@pytest.fixture
def nonce() -> Iterator[str]:
    """Yield a cgroup of this test alone, whose lines no other test overwrites meanwhile."""
    skip_unless_kernel_log(os.O_RDWR)
    with machine_lock():
        yield f"/drahealth-{os.getpid()}-{time.monotonic_ns()}"


def write(text: str) -> None:
    """Write a record below the console's level, through a new descriptor: writes are rate-limited."""
    fd = os.open(DEVICE, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, f"<15>{text}\n".encode())
    finally:
        os.close(fd)


def oom(cgroup: str, task: str = "sh") -> str:
    head = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0"
    return f"{head},oom_memcg={cgroup},task_memcg={cgroup},task={task},pid=7,uid=0"


def test_lines_of_the_real_log_become_facts(nonce: str) -> None:
    write(oom(nonce))
    with listener(DEVICE, any_facility=True) as log_listener:
        log_listener.until(KernelLogCode.OOM_KILL, nonce)
        before = log_listener.past.facts[KernelLogCode.OOM_KILL, nonce]
        for task in ("a", "b"):
            write(oom(nonce, task))
        log_listener.until(KernelLogCode.OOM_KILL, nonce, 3)
        fact = log_listener.past.facts[KernelLogCode.OOM_KILL, nonce]
        assert (fact.times, fact.values) == (3, ("memcg", "b", nonce))
        assert fact.first == before.first <= fact.last


def test_user_space_line_is_no_fact(nonce: str) -> None:
    with listener(DEVICE) as kernel, listener(DEVICE, any_facility=True) as anyone:
        while kernel.read_once().source.state is SourceState.STARTING:
            select.select([kernel.fd], [], [], PATIENCE_S)
        write(oom(nonce))
        anyone.until(KernelLogCode.OOM_KILL, nonce)
        passes = kernel.read_once().source.passes
        deadline = time.monotonic() + PATIENCE_S
        while kernel.read_once().source.passes < passes + 2:  # each record causes a pass
            assert time.monotonic() < deadline
            write(oom(nonce))
            time.sleep(0.01)  # a flood would drop lines that other tests wait for
        assert (KernelLogCode.OOM_KILL, nonce) not in kernel.past.facts


# Joins the cgroup, then touches more memory than its limit.
_EAT: Final = """
import os, sys
with open(sys.argv[1], "w") as f:
    f.write(str(os.getpid()))
eaten = [b"x" * (1 << 20) for _ in range(256)]
"""


def test_real_oom_kill_is_a_fact_about_its_cgroup(nonce: str) -> None:
    """The kernel itself writes the lines, after an OOM kill in a cgroup v1 with 16 MiB."""
    with machine_lock(), kubepods_tree("memory", unified=False) as tree:
        cgroup = tree.make("", "0f3c")
        (cgroup / "memory.limit_in_bytes").write_text(f"{16 * MIB}\n")
        place = "/" + str(tree.directory("", "0f3c"))
        with listener(DEVICE) as log_listener:
            log_listener.read_once()
            eat = [sys.executable, "-c", _EAT, str(cgroup / "cgroup.procs")]
            assert subprocess.run(eat, check=False, timeout=PATIENCE_S).returncode == -signal.SIGKILL
            log_listener.until(KernelLogCode.OOM_KILL, place)
        fact = log_listener.past.facts[KernelLogCode.OOM_KILL, place]
        assert fact.values[0] == "memcg"
        assert fact.values[2] == place
        assert fact.times == 1


# --- floods of records --------------------------------------------------------------------------------------

FLOOD: Final = 100_000
CHUNK: Final = 1_000


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def record(seq: int, text: str) -> str:
    return f"4,{seq},{seq * 10},-;{text}\n"


def edac(seq: int) -> str:
    return f"EDAC MC0: 1 CE memory read error on DIMM_A1 (channel:1 slot:0 page:{seq:#x} offset:0x0 grain:32)"


def machine_check_line(cpu: int) -> str:
    return f"mce: [Hardware Error]: CPU {cpu}: Machine Check: 0 Bank 5: be00000000800400"


def test_flood_of_one_fault_is_one_fact_and_hides_no_other(fifo: Path) -> None:
    run_in_own_process(flood_of_one_fault, fifo)


def flood_of_one_fault(path: str) -> None:
    """Write a flood of lines of which every 10,000th is a machine check of another CPU."""
    with listener(Path(path)) as log_listener:
        with Path(path).open("w") as f:
            for start in range(0, FLOOD, CHUNK):
                lines = [
                    edac(seq) if seq % 10_000 else machine_check_line(seq // 10_000)
                    for seq in range(start, start + CHUNK)
                ]
                f.write("".join(record(start + i, text) for i, text in enumerate(lines)))
                log_listener.read_once()
                if start == 10 * CHUNK:
                    before = resident()
        log_listener.until(KernelLogCode.EDAC_CORRECTED, "mc0 DIMM_A1", FLOOD - 10)
        assert resident() - before < 4 * MIB  # 90,000 facts take over 20 MiB
    assert {key: fact.times for key, fact in log_listener.past.facts.items()} == {
        (KernelLogCode.EDAC_CORRECTED, "mc0 DIMM_A1"): FLOOD - 10,
        **{(KernelLogCode.MACHINE_CHECK, f"cpu{cpu}"): 1 for cpu in range(10)},
    }


def test_flood_of_faults_keeps_the_newest_and_the_known(fifo: Path) -> None:
    run_in_own_process(flood_of_faults, fifo)


def flood_of_faults(path: str) -> None:
    """Write lines of 100,000 cgroups without memory: far more than fit into the reader and the facts."""
    with listener(Path(path)) as log_listener:
        with Path(path).open("w") as f:
            f.write("".join(record(cpu, machine_check_line(cpu)) for cpu in range(10)))
            f.flush()
            log_listener.until(KernelLogCode.MACHINE_CHECK, "cpu9")
            for start in range(10, FLOOD, CHUNK):
                f.write("".join(record(seq, oom(f"/pod{seq}")) for seq in range(start, start + CHUNK)))
                log_listener.read_once()
                if start == 10 + 10 * CHUNK:  # reader and facts are full
                    log_listener.until(KernelLogCode.OOM_KILL, f"/pod{start + CHUNK - 1}")
                    before = resident()
        last = start + CHUNK
        log_listener.until(KernelLogCode.OOM_KILL, f"/pod{last - 1}")
        assert resident() - before < 4 * MIB  # 90,000 facts take over 20 MiB
    assert {fact.location for fact in log_listener.past.select(KernelLogCode.OOM_KILL)} == {
        f"/pod{n}" for n in range(last - MAX_FACTS, last)
    }
    assert len(log_listener.past.select(KernelLogCode.MACHINE_CHECK)) == 10


def test_every_known_line_becomes_a_fact(fifo: Path) -> None:
    with listener(fifo) as log_listener, fifo.open("w") as f:
        for seq, (text, line) in enumerate(CASES):
            if line.code is KernelLogCode.OOM_VICTIM:
                continue  # it joins the line about the limit
            before = log_listener.past.facts.get((line.code, line.location))
            f.write(record(seq, text))
            f.flush()
            log_listener.until(line.code, line.location, before.times + 1 if before else 1)

"""The process that calls NVML: what ends it does not end the agent, and its GPUs are unreadable meanwhile."""

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import psutil
import pytest
from core_threads import eventfd_descriptors
from gpu_samples import gpu_sample, gpu_set
from own_process import run_in_own_process
from patience import PATIENCE_S
from wire.serving import eventually

from agent.errors import ConfigError, ProbeError
from agent.model.gpu import GpuAttributes, GpuField, NvmlReturnCode, NvmlSample
from agent.model.reading import Absence, Missing, SourceState
from agent.model.time import NS
from agent.native.gpu_watch import GpuWatchOptions, confine
from agent.node import nvml_process
from agent.node.nvml_process import NvmlProcess
from agent.node.nvml_process_main import (
    INVENTORY,
    decode_inventory,
    decode_options,
    encode_inventory,
    encode_options,
)
from agent.sources.gpu_os_facts import NvidiaPciDevices
from tests.fake_nvml import FakeNvml, fake_nvml

MS: Final = NS // 1000
QUICK: Final = GpuWatchOptions(period_ns=20 * MS, slow_ns=60 * MS, retry_ns=100 * MS)


class Watched:
    """An NVML process under test, with the eventfd that it writes to."""

    def __init__(self, options: GpuWatchOptions, procfs_root: Path = Path("/proc")) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.nvml = NvmlProcess(options, procfs_root, self.wake_fd)
        self.nvml.start()

    def until(self, condition: Callable[[NvmlSample], bool]) -> NvmlSample:
        """Return the first sample that meets a condition."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition(sample := self.nvml.read()):
            assert time.monotonic() < end_s, sample
            select.select([self.wake_fd], [], [], 0.02)
        return sample

    def until_read(self, gpus: int) -> NvmlSample:
        """Return the first sample in which so many GPUs were read completely."""
        return self.until(
            lambda s: len(s.gpus) == gpus and all(g.slow_passes and not g.status for g in s.gpus)
        )

    @property
    def child(self) -> psutil.Process:
        """Child process that runs now."""
        assert self.nvml._child is not None
        return psutil.Process(self.nvml._child.pid)

    def stop(self) -> bool:
        """End the process. Returns False if it hangs."""
        return self.nvml.stop(PATIENCE_S)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = fake_nvml(tmp_path, "profile h100 gpus=2")
    monkeypatch.setenv("FAKE_NVML", str(made.scenario))
    monkeypatch.setattr(nvml_process, "BACKOFF_S", (0.05,))
    monkeypatch.setattr(nvml_process, "FIRST_PASS_S", PATIENCE_S)
    monkeypatch.setattr(nvml_process, "INVENTORY_S", PATIENCE_S)
    return made


@pytest.fixture
def may_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event without which no child process starts: a test that clears it sees the time without a child."""
    event, spawn = threading.Event(), nvml_process._spawn

    def wait_and_spawn(sources: tuple[int, int, int]) -> int:
        assert event.wait(PATIENCE_S)
        return spawn(sources)

    monkeypatch.setattr(nvml_process, "_spawn", wait_and_spawn)
    event.set()
    yield event
    event.set()


@pytest.fixture
def start() -> Iterator[Callable[..., Watched]]:
    """Start NVML processes, which end with the test."""
    started: list[Watched] = []

    def start_one(options: GpuWatchOptions, procfs_root: Path = Path("/proc")) -> Watched:
        started.append(Watched(options, procfs_root))
        return started[-1]

    yield start_one
    ends = [process.stop() for process in started]
    assert all(ends)


@pytest.fixture
def watched(fake: FakeNvml, start: Callable[..., Watched], may_start: threading.Event) -> Watched:
    return start(replace(QUICK, library=str(fake.library)))


def end_process(fake: FakeNvml, command: str) -> None:
    """Send a command that ends the process, which may come before the answer or after it."""
    with contextlib.suppress(ValueError, OSError):
        fake.send(command)


ENDS: Final = {
    "crash segv": "was killed by SIGSEGV",
    "crash bus": "was killed by SIGBUS",
    "crash abort": "was killed by SIGABRT",
    "crash exit 3": "ended with exit code 3",
    "crash exit 0": "ended with exit code 0",
}


@pytest.mark.parametrize(("command", "end"), ENDS.items(), ids=list(ENDS))
def test_gpus_are_unreadable_from_the_end_of_nvml_process_to_the_next_read(
    watched: Watched, fake: FakeNvml, may_start: threading.Event, command: str, end: str
) -> None:
    before = watched.until_read(2)
    may_start.clear()
    fake.scenario.write_text(fake.scenario.read_text() + "gpu 0 set temperature=77\n")
    end_process(fake, command)
    away = watched.until(lambda s: bool(s.process))
    assert away.process == away.nvml.detail == f"the NVML process {end}"
    assert away.nvml.state is SourceState.FAILING
    assert [gpu.uuid for gpu in away.gpus] == [gpu.uuid for gpu in before.gpus]
    assert {gpu.status for gpu in away.gpus} == {NvmlReturnCode.UNINITIALIZED}
    assert all(isinstance(reading, Missing) for gpu in away.gpus for reading in gpu.readings.values())
    may_start.set()
    after = watched.until(lambda s: not s.process)
    assert all(gpu.passes for gpu in after.gpus)  # never a sample in which a known GPU was not read yet
    assert watched.until_read(2).gpus[0][GpuField.TEMP] == 77
    # the start of a process is neither a reload of the driver nor the return of a GPU
    assert (after.generation, [gpu.handles for gpu in after.gpus]) == (1, [1, 1])
    # rules count passes: they never go back
    assert all(now.passes > then.passes for now, then in zip(after.gpus, away.gpus, strict=True))
    assert after.nvml.passes > before.nvml.passes


def store_unread_event(watched: Watched, fake: FakeNvml, may_start: threading.Event) -> None:
    """Let the child process store an event that is not read yet; no other child process starts."""
    watched.until(lambda s: len(s.gpus) == 2 and all(gpu.event_mask for gpu in s.gpus))
    may_start.clear()
    fake.send("gpu 1 xid 48")
    child = watched.nvml._child
    assert child is not None
    eventually(lambda: [xid.code for xid in child.watch.read().gpus[1].xids] == [48], "the event is stored")


def test_event_that_the_process_stored_just_before_its_end_is_kept(
    watched: Watched, fake: FakeNvml, may_start: threading.Event
) -> None:
    """NVML does not repeat it, and the engine reads up to a tenth of a second after the event."""
    store_unread_event(watched, fake, may_start)
    watched.child.send_signal(signal.SIGKILL)
    eventually(lambda: watched.nvml._child is None, "the process has ended")
    last, away = watched.nvml.read(), watched.nvml.read()
    assert [(xid.code, xid.times) for xid in last.gpus[1].xids] == [(48, 1)]
    assert (last.process, away.process) == ("", "the NVML process was killed by SIGKILL")


def test_event_is_kept_if_the_next_process_ends_before_it_is_read(
    watched: Watched, fake: FakeNvml, may_start: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_unread_event(watched, fake, may_start)
    monkeypatch.setattr(nvml_process, "_START", "raise SystemExit(3)")
    watched.child.send_signal(signal.SIGKILL)
    may_start.set()
    eventually(lambda: watched.nvml._ends >= 3, "two more processes have ended")
    last, away = watched.nvml.read(), watched.nvml.read()
    assert [(xid.code, xid.times) for xid in last.gpus[1].xids] == [(48, 1)]
    assert away.process.startswith("the NVML process ended with exit code 3, ")


def test_invalid_shared_memory_ends_the_process_and_keeps_its_gpus(
    watched: Watched, may_start: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = watched.until_read(2)
    may_start.clear()
    child = watched.nvml._child
    assert child is not None

    def refuse() -> NvmlSample:
        raise ValueError("more GPUs than it has room for")

    monkeypatch.setattr(child.watch, "read", refuse)
    invalid = watched.nvml.read()
    assert [gpu.uuid for gpu in invalid.gpus] == [gpu.uuid for gpu in before.gpus]
    reason = "the NVML process has invalid shared memory: more GPUs than it has room for"
    assert (invalid.nvml.state, invalid.nvml.detail, invalid.process) == (SourceState.FAILING, reason, reason)
    away = watched.until(lambda s: s.process != reason)
    assert away.process == "the NVML process was killed by SIGKILL"


def test_slow_start_of_the_nvml_process_is_no_reload_of_the_driver(
    watched: Watched, fake: FakeNvml, may_start: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process hangs in nvmlInit past its limit, and ends before it has listed a GPU."""
    monkeypatch.setattr(nvml_process, "FIRST_PASS_S", 0.0)
    watched.until_read(2)
    fake.send("reload")
    before = watched.until(lambda s: s.generation == 2 and [gpu.handles for gpu in s.gpus] == [2, 2])
    scenario = fake.scenario.read_text()
    fake.scenario.write_text(scenario + f"init hang {PATIENCE_S:g}s\n")
    may_start.clear()
    end_process(fake, "crash segv")
    watched.until(lambda s: bool(s.process))
    may_start.set()
    hung = watched.until(lambda s: bool(s.call_ns))
    assert (hung.nvml.state, hung.generation) == (SourceState.STARTING, 2)
    assert [(gpu.uuid, gpu.status) for gpu in hung.gpus] == [
        (gpu.uuid, NvmlReturnCode.UNINITIALIZED) for gpu in before.gpus
    ]
    monkeypatch.setattr(nvml_process, "FIRST_PASS_S", PATIENCE_S)
    fake.scenario.write_text(scenario)
    may_start.clear()
    watched.child.send_signal(signal.SIGKILL)
    away = watched.until(lambda s: bool(s.process))
    may_start.set()
    assert [gpu.uuid for gpu in away.gpus] == [gpu.uuid for gpu in before.gpus]
    after = watched.until(lambda s: not s.process and s.nvml.state is SourceState.OK)
    assert (after.generation, [gpu.handles for gpu in after.gpus]) == (2, [2, 2])
    assert all(now.passes >= then.passes for now, then in zip(after.gpus, before.gpus, strict=True))


def test_gpus_stay_unreadable_while_the_next_process_cannot_use_nvml(
    watched: Watched, fake: FakeNvml, may_start: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = watched.until_read(2)
    scenario = fake.scenario.read_text()
    fake.scenario.write_text(scenario + "init 999\n")
    may_start.clear()
    end_process(fake, "crash segv")
    watched.until(lambda s: bool(s.process))
    monkeypatch.setattr(nvml_process, "FIRST_PASS_S", 0.0)
    may_start.set()
    away = watched.until(lambda s: not s.process)
    assert (away.nvml.state, away.err) == (SourceState.FAILING, NvmlReturnCode.UNKNOWN)
    assert [gpu.uuid for gpu in away.gpus] == [gpu.uuid for gpu in before.gpus]
    assert {gpu.status for gpu in away.gpus} == {NvmlReturnCode.UNINITIALIZED}
    fake.scenario.write_text(scenario)
    watched.child.send_signal(signal.SIGKILL)
    assert watched.until_read(2).err == NvmlReturnCode.OK


@pytest.mark.parametrize(("is_loaded_again", "generation"), [(False, 1), (True, 2)])
def test_driver_reloaded_between_two_processes_is_counted(
    fake: FakeNvml,
    tmp_path: Path,
    start: Callable[..., Watched],
    may_start: threading.Event,
    is_loaded_again: bool,
    generation: int,
) -> None:
    module = tmp_path / "module/nvidia"
    module.mkdir(parents=True)
    watched = start(replace(QUICK, library=str(fake.library), sysfs_root=tmp_path))
    watched.until_read(2)
    may_start.clear()
    watched.child.send_signal(signal.SIGKILL)
    watched.until(lambda s: bool(s.process))
    if is_loaded_again:
        module.rename(module.with_name("unloaded"))
        module.mkdir()
    may_start.set()
    assert watched.until_read(2).generation == generation


@pytest.mark.parametrize("is_loaded_again", [False, True])
def test_nvml_opened_again_is_a_reload_only_of_another_module(
    fake: FakeNvml, tmp_path: Path, start: Callable[..., Watched], is_loaded_again: bool
) -> None:
    module = tmp_path / "module/nvidia"
    module.mkdir(parents=True)
    watched = start(replace(QUICK, library=str(fake.library), sysfs_root=tmp_path))
    assert watched.until_read(2).module == module.stat().st_ino
    if is_loaded_again:
        module.rename(module.with_name("unloaded"))
        module.mkdir()
    fake.send("reload")
    reopened = watched.until(lambda s: [gpu.handles for gpu in s.gpus] == [2, 2])
    # a GPU's thread may publish its new handle before the opener publishes the result of its pass
    after = watched.until(lambda s: s.nvml.passes > reopened.nvml.passes)
    assert (after.generation, after.module) == (1 + is_loaded_again, module.stat().st_ino)


def test_nvml_opened_again_while_the_module_is_unreadable_is_no_reload(
    fake: FakeNvml, tmp_path: Path, start: Callable[..., Watched]
) -> None:
    module, readable, unreadable = (tmp_path / name for name in ("module", "readable", "unreadable"))
    (readable / "nvidia").mkdir(parents=True)
    unreadable.mkdir()
    (unreadable / "nvidia").symlink_to("nvidia")  # ELOOP
    module.symlink_to(readable)
    watched = start(replace(QUICK, library=str(fake.library), sysfs_root=tmp_path))
    inode = watched.until_read(2).module
    for handles, directory in ((2, unreadable), (3, readable)):
        (tmp_path / "link").symlink_to(directory)
        (tmp_path / "link").replace(module)  # at once: a module that is absent for a moment is a reload
        fake.send("reload")
        opened = watched.until(lambda s: [gpu.handles for gpu in s.gpus] == [handles] * 2)  # noqa: B023
        after = watched.until(lambda s: s.nvml.passes > opened.nvml.passes)  # noqa: B023
        assert (after.generation, after.module) == (1, inode)


def test_driver_of_another_version_after_a_process_is_a_reload() -> None:
    wake_fd = os.eventfd(0)
    nvml = NvmlProcess(replace(QUICK, sysfs_root=Path("/nonexistent")), Path("/proc"), wake_fd)
    nvml._before = gpu_set(gpu_sample(), driver="570.86.15")
    assert nvml._is_reloaded(gpu_set(gpu_sample(), driver="575.57.08"))
    assert not nvml._is_reloaded(gpu_set(gpu_sample(), driver="570.86.15"))
    assert not nvml._is_reloaded(gpu_set(gpu_sample(), driver=""))
    assert nvml.stop(0)
    os.close(wake_fd)


def test_nvml_process_that_leaks_memory_is_ended_by_its_own_limit(
    fake: FakeNvml,
    start: Callable[..., Watched],
    may_start: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml_process, "MEMORY_MAX", 128 << 20)
    watched = start(replace(QUICK, library=str(fake.library)))
    watched.until_read(2)
    may_start.clear()
    end_process(fake, "leak 200")
    assert watched.until(lambda s: bool(s.process)).process == "the NVML process was killed by SIGSEGV"


def test_nvml_process_that_ends_again_and_again_is_counted(
    watched: Watched, may_start: threading.Event
) -> None:
    failures = []
    for times in (1, 2, 3):
        failures.append(watched.until_read(2).nvml.failures)
        may_start.clear()
        watched.child.send_signal(signal.SIGKILL)
        away = watched.until(lambda s: bool(s.process))
        may_start.set()
        assert away.process.endswith(f"{times} times since the agent started") or times == 1
        failures.append(away.nvml.failures)
    failures.append(watched.until_read(2).nvml.failures)
    assert failures == [0, 1, 1, 2, 2, 3, 3]  # the metric of failures is a counter


def test_failures_of_an_nvml_process_that_lists_no_gpu_are_kept(
    watched: Watched, fake: FakeNvml, may_start: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_process, "FIRST_PASS_S", 0)
    watched.until_read(2)
    fake.scenario.write_text(fake.scenario.read_text() + "init 18\n")  # another version of the driver
    watched.child.send_signal(signal.SIGKILL)
    failing = watched.until(lambda s: s.nvml.failures >= 3)
    may_start.clear()
    watched.child.send_signal(signal.SIGKILL)
    away = watched.until(lambda s: bool(s.process))
    assert away.nvml.failures > failing.nvml.failures
    may_start.set()


def test_counts_of_nvml_are_kept_while_the_driver_is_unloaded(
    fake: FakeNvml, tmp_path: Path, start: Callable[..., Watched], may_start: threading.Event
) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    library.symlink_to(fake.library)
    watched = start(replace(QUICK, library=str(library), sysfs_root=tmp_path), tmp_path)
    passes = watched.until_read(2).nvml.passes
    may_start.clear()
    library.unlink()
    watched.child.send_signal(signal.SIGKILL)
    absent = watched.until(lambda s: s.nvml.state is SourceState.ABSENT)
    assert absent.nvml.passes >= passes
    assert absent.nvml.failures == 1
    may_start.set()


def test_nvml_process_inherits_three_descriptors_and_standard_error_only(
    watched: Watched, may_start: threading.Event
) -> None:
    with open(os.devnull) as unrelated:  # open while the next child starts
        watched.until_read(2)
        may_start.clear()
        watched.child.send_signal(signal.SIGKILL)
        watched.until(lambda s: bool(s.process))
        may_start.set()
        watched.until_read(2)
        mine = os.fstat(unrelated.fileno())
        fds = Path(f"/proc/{watched.child.pid}/fd")
        links = {}
        for entry in fds.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a file of a GPU that was just closed
                links[entry.name] = os.readlink(entry)
        inherited = [name for name in links if int(name) <= 5]
        assert sorted(inherited) == ["0", "1", "2", "3", "4", "5"]
        assert links["0"] == os.devnull
        assert links["1"] == links["2"]
        assert "drahealth-gpus" in links["4"]
        assert mine.st_rdev == os.stat(os.devnull).st_rdev


def test_nvml_process_ignores_terminal_signals_and_has_no_capabilities(watched: Watched) -> None:
    watched.until_read(2)
    child = watched.child
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        child.send_signal(number)
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) & ~(1 << 21) == 0  # at most CAP_SYS_ADMIN
    assert status["NoNewPrivs"] == "1"
    assert child.is_running()
    assert int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) == 500


def test_nvml_process_ends_with_its_parent(fake: FakeNvml) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from agent.native.gpu_watch import GpuWatchOptions;"
        "from agent.node.nvml_process import NvmlProcess;"
        "n = NvmlProcess(GpuWatchOptions(library=sys.argv[1]), Path('/proc'), os.eventfd(0)); n.start();\n"
        "while not n.read().gpus: time.sleep(0.01)\n"
        "print(n._child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    import subprocess
    import sys

    ran = subprocess.run(
        [sys.executable, "-c", script, str(fake.library)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == -9, ran.stderr
    end_s = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(int(ran.stdout)):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_passes_of_the_nvml_process_are_timed(watched: Watched) -> None:
    gpus = watched.until_read(2).gpus
    durations = watched.nvml.pass_durations()
    assert durations is not None
    assert sum(durations.counts) >= sum(gpu.passes for gpu in gpus) > 0
    watched.stop()
    assert watched.nvml.pass_durations() is None


def test_inventory_is_read_by_the_nvml_process(watched: Watched) -> None:
    watched.until_read(2)
    assert [gpu.product for gpu in watched.nvml.read_inventory()] == ["NVIDIA H100 80GB HBM3"] * 2


def test_late_inventory_answer_is_not_that_of_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is sent before the answer to the last one."""
    monkeypatch.setattr(nvml_process, "INVENTORY_S", 0.01)
    wake_fd = os.eventfd(0)
    nvml = NvmlProcess(QUICK, Path("/proc"), wake_fd)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nvml._child = nvml_process._Child(os.getpid(), ours, None)  # type: ignore[arg-type]
    with ours, theirs:
        for reason in ("did not answer: timed out", "has not answered an earlier request"):
            with pytest.raises(ProbeError, match=reason):
                nvml.read_inventory()
        assert theirs.recv(100) == INVENTORY
        theirs.send(encode_inventory((GpuAttributes("GPU-late", ""),)))
        with pytest.raises(ProbeError, match="did not answer: timed out"):
            nvml.read_inventory()
        assert theirs.recv(100) == INVENTORY
        theirs.send(encode_inventory((GpuAttributes("GPU-late", ""),)))
        monkeypatch.setattr(nvml_process, "INVENTORY_S", PATIENCE_S)

        def answer() -> None:
            theirs.recv(100)
            theirs.send(encode_inventory((GpuAttributes("GPU-new", ""),)))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert [gpu.uuid for gpu in nvml.read_inventory()] == ["GPU-new"]
        thread.join(PATIENCE_S)
    nvml._child = None
    assert nvml.stop(0)
    os.close(wake_fd)


def test_inventory_without_nvml_process_is_an_error(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.until_read(2)
    monkeypatch.setattr(nvml_process, "BACKOFF_S", (PATIENCE_S,))
    watched.child.send_signal(signal.SIGKILL)
    watched.until(lambda s: bool(s.process))
    with pytest.raises(ProbeError, match="there is no NVML process: it was killed by SIGKILL"):
        watched.nvml.read_inventory()


def test_node_without_gpu_driver_and_library_starts_no_process(
    tmp_path: Path, start: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[object] = []
    monkeypatch.setattr(nvml_process, "_spawn", spawned.append)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    options = replace(QUICK, library=str(tmp_path / "libnvidia-ml.so.1"), sysfs_root=tmp_path)
    watched = start(options, procfs_root=tmp_path)
    sample = watched.until(lambda s: s.nvml.state is SourceState.ABSENT)
    assert (sample.gpus, sample.err) == ((), 0)
    assert spawned == []


class CountedProcfs:
    """Mount point of a procfs without a GPU driver that counts the checks for the driver."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checks = 0

    def __truediv__(self, name: str) -> Path:
        self.checks += 1
        return self.path / name


def start_without_driver(
    tmp_path: Path, start: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, failures: int = 0
) -> tuple[Watched, CountedProcfs, list[Path]]:
    """Start an NVML process without GPU and driver; return the roots whose bus was listed, too.

    Args:
        failures: Number of first listings that lack a descriptor.
    """
    listed: list[Path] = []

    def list_bus(root: Path) -> NvidiaPciDevices | Missing:
        listed.append(root)
        lacks = len(listed) <= failures
        return Missing(Absence.UNREADABLE, errno.EMFILE) if lacks else NvidiaPciDevices((), (), 0)

    monkeypatch.setattr(nvml_process, "read_nvidia_devices", list_bus)
    monkeypatch.setattr(nvml_process, "DRIVER_CHECK_S", 0.01)
    procfs = CountedProcfs(tmp_path)
    return start(replace(QUICK, library=str(tmp_path / "none.so")), procfs_root=procfs), procfs, listed


def test_node_without_gpu_lists_the_pci_bus_at_start_and_after_events_only(
    tmp_path: Path, start: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, procfs, listed = start_without_driver(tmp_path, start, monkeypatch)
    watched.until(lambda s: procfs.checks > 3)
    assert len(listed) == 1
    watched.nvml.request_count()  # the PCI bus changed
    watched.until(lambda s: len(listed) == 2)


class RequestAfterTimeout(threading.Event):
    """Event of which a wait times out, and which is set before the thread that waited goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        if self.waits > 1:
            return super().wait(timeout)
        self.set()
        return False


def test_request_right_after_a_wait_lists_the_pci_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []

    def list_bus(root: Path) -> NvidiaPciDevices:
        listed.append(root)
        return NvidiaPciDevices((), (), 0)

    monkeypatch.setattr(nvml_process, "read_nvidia_devices", list_bus)
    monkeypatch.setattr(nvml_process, "DRIVER_CHECK_S", 2 * PATIENCE_S)
    wake_fd = os.eventfd(0)
    nvml = NvmlProcess(replace(QUICK, library=str(tmp_path / "none.so")), tmp_path, wake_fd)
    nvml._check_driver = RequestAfterTimeout()
    nvml.start()
    try:
        eventually(lambda: len(listed) == 2, "the PCI bus is listed again")
    finally:
        assert nvml.stop(PATIENCE_S)
        os.close(wake_fd)


def test_process_that_starts_while_the_agent_stops_is_ended(
    fake: FakeNvml, start: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """stop() finds no child process when it is called between the start and the note of the child."""
    start_child = NvmlProcess._start_child

    def start_child_during_stop(nvml: NvmlProcess) -> nvml_process._Child:
        nvml._stop.set()
        return start_child(nvml)

    monkeypatch.setattr(NvmlProcess, "_start_child", start_child_during_stop)
    thread = start(replace(QUICK, library=str(fake.library))).nvml._thread
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class UnreadableProcfs:
    """Mount point of a procfs in which no file can be looked up."""

    def __truediv__(self, name: str) -> "UnreadableProcfs":
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    exists = stat  # as Path.exists() of Python before 3.14


def test_driver_whose_files_have_an_error_is_no_absence(
    fake: FakeNvml, tmp_path: Path, start: Callable[..., Watched]
) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    options = replace(QUICK, library=str(fake.library), sysfs_root=tmp_path)
    start(options, procfs_root=UnreadableProcfs()).until_read(2)


def test_bus_that_could_not_be_read_is_listed_again_without_an_event(
    tmp_path: Path, start: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, procfs, listed = start_without_driver(tmp_path, start, monkeypatch, failures=2)
    watched.until(lambda s: procfs.checks > 5)
    assert len(listed) == 3


def test_start_that_lacks_a_descriptor_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def copy_once(fd: int, command: int, number: int) -> int:
        if copies:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        copies.append(fcntl.fcntl(fd, command, number))
        return copies[0]

    calls = SimpleNamespace(fcntl=copy_once, F_DUPFD_CLOEXEC=fcntl.F_DUPFD_CLOEXEC)
    monkeypatch.setattr(nvml_process, "fcntl", calls)
    mine = os.memfd_create("of the test")
    with pytest.raises(OSError, match="Too many open files"):
        nvml_process._spawn((mine, mine, mine))
    with contextlib.suppress(OSError):  # another thread may have the number of the closed copy
        assert not os.path.sameopenfile(copies[0], mine)
    os.close(mine)


def confine_below(limit: str) -> None:
    """Part of the test below, in its own process."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    confine(os.getppid(), nvml_process.MEMORY_MAX)
    assert resource.getrlimit(resource.RLIMIT_DATA) == (int(limit), int(limit))
    os.kill(os.getpid(), signal.SIGTERM)
    assert "NoNewPrivs:\t1\n" in Path("/proc/self/status").read_text()


def test_process_is_confined_below_a_lower_limit_of_memory() -> None:
    run_in_own_process(confine_below, nvml_process.MEMORY_MAX // 2)


def test_driver_that_is_loaded_later_starts_the_process(
    fake: FakeNvml, tmp_path: Path, start: Callable[..., Watched]
) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    here = tmp_path / "libnvidia-ml.so.1"
    watched = start(replace(QUICK, library=str(here), sysfs_root=tmp_path), procfs_root=tmp_path)
    watched.until(lambda s: s.nvml.state is SourceState.ABSENT)
    here.symlink_to(fake.library)
    watched.nvml.request_count()  # the PCI bus changed
    watched.until_read(2)


def test_driver_that_is_loaded_late_is_starting_since_then(
    fake: FakeNvml, tmp_path: Path, start: Callable[..., Watched], may_start: threading.Event
) -> None:
    """A source that is starting for longer than three periods is stalled."""
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    here = tmp_path / "libnvidia-ml.so.1"
    watched = start(replace(QUICK, library=str(here), sysfs_root=tmp_path), procfs_root=tmp_path)
    watched.until(lambda s: s.nvml.state is SourceState.ABSENT)
    may_start.clear()
    loaded_ns = time.monotonic_ns()
    here.symlink_to(fake.library)
    watched.nvml.request_count()
    assert watched.until(lambda s: s.nvml.state is SourceState.STARTING).nvml.beat_ns >= loaded_ns


@pytest.mark.parametrize("is_started", [True, False])
def test_stopped_nvml_process_keeps_no_descriptor(tmp_path: Path, *, is_started: bool) -> None:
    wake_fd = os.eventfd(0)
    nvml = NvmlProcess(replace(QUICK, library=str(tmp_path / "none.so")), tmp_path, wake_fd)
    if is_started:
        nvml.start()
    assert nvml.stop(PATIENCE_S)
    assert eventfd_descriptors(wake_fd) == 1
    os.close(wake_fd)


def test_option_out_of_range_is_refused_before_the_process_starts() -> None:
    with pytest.raises(ConfigError, match="not in 10 ms to 1 h"):
        NvmlProcess(replace(QUICK, period_ns=1), Path("/proc"), os.eventfd(0))


def test_options_pass_to_the_process_unchanged() -> None:
    from agent.health.gpu.rule_state import gpu_wakes
    from agent.model.settings import GpuLimits

    options = replace(QUICK, library="/a b/lib.so", wakes=gpu_wakes(GpuLimits()))
    decoded = decode_options(encode_options(options))
    assert decoded == replace(options, wakes=list(options.wakes))


@pytest.mark.parametrize(
    "answer", [b"{", b"[{}]", b'["x"]', b'"NVML is gone"', b"[3]", b'[{"uuid":1,"bus":2}]']
)
def test_invalid_inventory_answer_is_an_error(answer: bytes) -> None:
    with pytest.raises(OSError, match=r"answer|NVML is gone"):
        decode_inventory(answer)


def test_empty_inventory_answer_is_that_of_an_ended_process() -> None:
    with pytest.raises(OSError, match="it ended"):
        decode_inventory(b"")

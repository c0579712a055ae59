"""The listener to device events, on events of the real kernel in a network namespace of the test's own.

Events of the real machine arrive too: the tests count PCI devices, whose events are rare.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core_threads import ThreadReader
from machine import hotplug
from netns import Injector, netns, run_in_user_namespace
from patience import PATIENCE_S

from agent.errors import ProbeError
from agent.model.machine_samples import Subsystem, UeventCounts
from agent.model.reading import SourceState
from agent.native.kernel_events import UeventListener, watch_directory


class Listener(ThreadReader[UeventCounts]):
    """Started listener with eventfds."""

    def __init__(self) -> None:
        super().__init__()
        self.poke_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.thread = UeventListener(self.fd, [self.poke_fd])
        self.thread.start()

    def was_poked(self) -> bool:
        return bool(select.select([self.poke_fd], [], [], PATIENCE_S)[0])


@contextmanager
def listener() -> Iterator[Listener]:
    """Yield a listener with an open socket, and stop it afterwards."""
    uevent_listener = Listener()
    try:
        uevent_listener.until(lambda s: s.source.state is not SourceState.STARTING)
        yield uevent_listener
    finally:
        assert uevent_listener.thread.stop(PATIENCE_S)
        os.close(uevent_listener.fd)
        os.close(uevent_listener.poke_fd)


@pytest.fixture
def injector() -> Iterator[Injector]:
    """Yield an injector of events for the test's network namespace."""
    with netns(), Injector() as injector:
        yield injector


def has_changed(subsystem: Subsystem, times: int = 1) -> Callable[[UeventCounts], bool]:
    """Return a condition: at least so many events of a subsystem were counted."""
    return lambda sample: sample.changes[subsystem] >= times


# --- events -------------------------------------------------------------------------------------------------


def test_gpu_added_changed_and_removed_is_counted(injector: Injector) -> None:
    with listener() as uevent_listener:
        assert uevent_listener.read().source.state is SourceState.OK
        for times, action in enumerate(("add", "bind", "change", "unbind", "remove"), 1):
            injector.inject(action)
            sample = uevent_listener.until(has_changed(Subsystem.PCI, times))
            assert sample.changes[Subsystem.PCI] == times
        assert sample.source.detail == ""


@pytest.mark.parametrize("subsystem", Subsystem)
def test_subsystem_names_are_the_kernels(injector: Injector, subsystem: Subsystem) -> None:
    with listener() as uevent_listener:
        injector.inject("change", "/devices/x", SUBSYSTEM=subsystem.value)
        uevent_listener.until(has_changed(subsystem))


def test_real_machine_events_arrive_and_request_rescans(injector: Injector) -> None:
    trigger = Path("/sys/devices/system/cpu/cpu1/uevent")
    if not os.access(trigger, os.W_OK):
        pytest.skip(f"may not write {trigger}")
    with listener() as uevent_listener:
        trigger.write_text("change\n")
        uevent_listener.until(has_changed(Subsystem.CPU))
        assert uevent_listener.was_poked()


def test_cpu_going_offline_is_counted(injector: Injector) -> None:
    with hotplug(1) as cpu, listener() as uevent_listener:
        cpu.set_online(False)
        counted = uevent_listener.until(has_changed(Subsystem.CPU)).changes[Subsystem.CPU]
        cpu.set_online(True)
        uevent_listener.until(has_changed(Subsystem.CPU, counted + 1))
        assert uevent_listener.was_poked()


# --- ignored events -----------------------------------------------------------------------------------------


def test_messages_of_other_senders_are_ignored(injector: Injector) -> None:
    with listener() as uevent_listener:
        injector.spoof("remove")
        injector.inject("add")  # wakes the reader, unlike the other
        sample = uevent_listener.until(has_changed(Subsystem.PCI))
        assert sample.changes[Subsystem.PCI] == 1
        assert (
            sample.source.detail == "1 messages on the uevent socket came from other senders than the kernel"
        )


def test_many_network_device_events_wake_no_reader(injector: Injector) -> None:
    with listener() as uevent_listener:
        for _ in range(1000):
            injector.inject("add", "/devices/virtual/net/veth1", SUBSYSTEM="net")
        injector.inject("add")
        sample = uevent_listener.until(has_changed(Subsystem.PCI))
        assert (sample.changes[Subsystem.PCI], sample.source.detail) == (1, "")


def test_flood_is_counted_completely_or_as_a_loss(injector: Injector) -> None:
    flood = 5000  # they fit if the receive buffer may be enlarged
    with listener() as uevent_listener:
        for number in range(flood):
            injector.inject("change", f"/devices/flood{number}", SUBSYSTEM="pci")
        sample = uevent_listener.until(
            lambda s: s.changes[Subsystem.PCI] == flood or s.changes[Subsystem.EDAC] > 0
        )
        is_complete = sample.changes[Subsystem.EDAC] == 0  # a loss counts for all subsystems
        assert is_complete is (sample.source.detail == "")
        assert not is_complete or sample.changes[Subsystem.PCI] == flood


def test_events_dropped_by_the_kernel_are_reported(injector: Injector) -> None:
    flood = 30_000  # of 830 bytes each in the kernel: the buffer holds at most 16 MiB
    child = [sys.executable, "-c", STOPPED_READER]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdin is not None
        assert held.stdout is not None
        try:
            assert held.stdout.readline() == "listening\n"
            held.send_signal(signal.SIGSTOP)
            os.waitpid(held.pid, os.WUNTRACED)
            for _ in range(flood):
                injector.inject("change")
            held.send_signal(signal.SIGCONT)
            detail, changes, losses, poked = json.loads(held.stdout.readline())
            assert detail == f"{losses} times the kernel dropped device events"
            assert flood > changes > losses > 0  # a loss also counts for subsystems without events
            assert poked
            injector.inject("remove")
            assert held.stdout.readline() == f"{changes + 1}\n"
            held.stdin.close()
            assert held.wait(PATIENCE_S) == 0
        finally:
            held.kill()


STOPPED_READER = """
import json, os, select, sys
from agent.model.reading import SourceState
from agent.model.machine_samples import Subsystem
from agent.native.kernel_events import UeventListener
fd, poke = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
uevents = UeventListener(fd, [poke])
def until(what):
    while not what(sample := uevents.read()):
        if not select.select([fd], [], [], 60)[0]:
            sys.exit(f"nothing more than {sample}")
        os.eventfd_read(fd)
    return sample
uevents.start()
until(lambda s: s.source.state is not SourceState.STARTING)
print("listening", flush=True)
sample = until(lambda s: s.changes[Subsystem.EDAC])
changes, losses = sample.changes[Subsystem.PCI], sample.changes[Subsystem.EDAC]
poked = bool(select.select([poke], [], [], 60)[0])
print(json.dumps([sample.source.detail, changes, losses, poked]), flush=True)
print(until(lambda s: s.changes[Subsystem.PCI] > changes).changes[Subsystem.PCI], flush=True)
sys.stdin.read()
assert uevents.stop(60)
"""


def test_user_namespace_network_is_silent_and_reported() -> None:
    printed = run_in_user_namespace(sys.executable, "-c", SILENT)
    assert printed == (
        "absent 0 the kernel sends no device events to this network namespace (of a user namespace); "
        "devices are polled instead\n"
    )


SILENT = """
import os, select
from agent.native.kernel_events import UeventListener
fd = os.eventfd(0)
uevents = UeventListener(fd)
uevents.start()
select.select([fd], [], [], 60)
source = uevents.read().source
print(source.state, source.failures, source.detail)
assert uevents.stop(60)
"""


# --- start and end ------------------------------------------------------------------------------------------


def test_listener_before_start_reads_none_and_stops() -> None:
    fd = os.eventfd(0)
    uevents = UeventListener(fd)
    os.close(fd)
    assert uevents.read() is None
    assert uevents.stop(0)
    assert uevents.stop(0)


def test_listener_starts_once() -> None:
    with (
        listener() as uevent_listener,
        pytest.raises(ProbeError, match="uevent thread cannot be started: Device or resource busy"),
    ):
        uevent_listener.thread.start()


def test_invalid_descriptor_is_refused() -> None:
    with pytest.raises(ProbeError, match="uevent listener: cannot be opened: Bad file descriptor"):
        UeventListener(-1)


# --- a directory --------------------------------------------------------------------------------------------


def change_file(path: Path) -> None:
    (path / "old").write_text("new")


def make_file(path: Path) -> None:
    (path / "new").write_text("new")


def replace_file(path: Path) -> None:
    (path.parent / "elsewhere").rename(path / "old")


def remove_file(path: Path) -> None:
    (path / "old").unlink()


def move_file_out(path: Path) -> None:
    (path / "old").rename(path.parent / "gone")


def forbid_reading(path: Path) -> None:
    (path / "old").chmod(0)


def remove_all(path: Path) -> None:
    (path / "old").unlink()
    path.rmdir()


def move_all(path: Path) -> None:
    path.rename(path.parent / "gone")


CHANGES = [
    change_file, make_file, replace_file, remove_file, move_file_out, forbid_reading, remove_all, move_all,
]  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "devices.d"
    path.mkdir()
    (path / "old").write_text("old")
    (tmp_path / "elsewhere").write_text("elsewhere")
    return path


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_directory_change_is_notified(directory: Path, change: Callable[[Path], None]) -> None:
    fd = watch_directory(directory)
    try:
        assert not select.select([fd], [], [], 0)[0]
        change(directory)
        assert select.select([fd], [], [], 0)[0]
        while select.select([fd], [], [], 0)[0]:
            os.read(fd, 4096)
        with pytest.raises(BlockingIOError):
            os.read(fd, 4096)
    finally:
        os.close(fd)


def test_file_being_written_or_read_is_not_notified(directory: Path) -> None:
    fd = watch_directory(directory)
    try:
        (directory / "old").read_text()
        with (directory / "new").open("w") as half:
            half.write("half")
            half.flush()
            assert not select.select([fd], [], [], 0)[0]
        assert select.select([fd], [], [], 0)[0]
    finally:
        os.close(fd)


def test_watch_without_writes_notices_moved_and_removed_entries(directory: Path) -> None:
    fd = watch_directory(directory, includes_writes=False)
    try:
        (directory / "old").write_text("written again")
        (directory / "old").chmod(0o600)
        assert not select.select([fd], [], [], 0)[0]
        (directory / "old").unlink()
        assert select.select([fd], [], [], 0)[0]
    finally:
        os.close(fd)


def test_path_that_is_no_directory_is_refused(directory: Path) -> None:
    with pytest.raises(ProbeError, match="old: cannot be watched: Not a directory"):
        watch_directory(directory / "old")
    with pytest.raises(ProbeError, match="none: cannot be watched: No such file or directory"):
        watch_directory(directory / "none")

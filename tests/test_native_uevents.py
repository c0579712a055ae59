"""The listener to device events, on events of the real kernel in a network namespace of the test's own.

What the machine does meanwhile is heard as well: tests count what has a name of their own.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import hotplug
from netns import GPU, Injector, netns, run_in_user_namespace

from agent.errors import ProbeError
from agent.model.source import SourceState
from agent.model.uevent import Action, Subsystem, Uevent, UeventSample
from agent.native.uevents import Uevents, watch_directory

DEADLINE_S = 20


class Listener:
    """A started :class:`Uevents` with eventfds of its own."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poke_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.uevents = Uevents(self.fd, [self.poke_fd])
        self.uevents.start()

    def read(self) -> UeventSample:
        sample = self.uevents.read()
        assert sample is not None
        return sample

    def until(self, what: Callable[[UeventSample], bool]) -> UeventSample:
        """The first sample that is ``what``. Woken by the eventfd alone."""
        deadline = time.monotonic() + DEADLINE_S
        while not what(sample := self.read()):
            assert time.monotonic() < deadline, sample
            if select.select([self.fd], [], [], deadline - time.monotonic())[0]:
                os.eventfd_read(self.fd)
        return sample

    def poked(self) -> bool:
        return bool(select.select([self.poke_fd], [], [], DEADLINE_S)[0])


@contextmanager
def listener() -> Iterator[Listener]:
    """A listener that listens, ended afterwards."""
    one = Listener()
    try:
        one.until(lambda s: s.source.state is not SourceState.STARTING)
        yield one
    finally:
        assert one.uevents.stop(5)
        os.close(one.fd)
        os.close(one.poke_fd)


@pytest.fixture
def injector() -> Iterator[Injector]:
    """Events for the network namespace that the test is in until its end."""
    with netns(), Injector() as injector:
        yield injector


def event_of(sample: UeventSample, name: str) -> Uevent | None:
    return next((event for event in sample.events if event.name == name), None)


def last_action(name: str, action: Action) -> Callable[[UeventSample], bool]:
    """Whether the newest event of a device is that."""

    def is_it(sample: UeventSample) -> bool:
        event = event_of(sample, name)
        return event is not None and event.action is action

    return is_it


# --- what is heard ------------------------------------------------------------------------------------------


def test_a_gpu_that_comes_changes_and_goes_is_told(injector: Injector) -> None:
    began_ns = time.monotonic_ns()
    with listener() as one:
        assert one.read().source.state is SourceState.OK
        for times, action in enumerate((Action.ADD, Action.CHANGE, Action.UNBIND, Action.REMOVE), 1):
            injector.inject(action)
            sample = one.until(last_action("0000:3b:00.0", action))
            event = event_of(sample, "0000:3b:00.0")
            assert event is not None
            assert (event.subsystem, event.path) == (Subsystem.PCI, GPU.removeprefix("/"))
            assert (event.driver, event.times) == ("nvidia", times)
            assert began_ns < event.last_ns < time.monotonic_ns()
            assert sample.changes[Subsystem.PCI] == times
        assert (sample.lost, sample.foreign, sample.source.detail) == (0, 0, "")


def test_the_models_words_are_the_kernels(injector: Injector) -> None:
    words = {f"{subsystem}-{action}": (subsystem, action) for subsystem in Subsystem for action in Action}
    with listener() as one:
        for name, (subsystem, action) in words.items():
            injector.inject(action.value, f"/devices/{name}", SUBSYSTEM=subsystem.value)
        sample = one.until(lambda s: words.keys() <= {event.name for event in s.events})
        heard = {event.name: (event.subsystem, event.action) for event in sample.events}
        assert {name: heard[name] for name in words} == words


def test_events_are_in_the_order_of_their_last(injector: Injector) -> None:
    with listener() as one:
        for name in ("first", "second", "first"):
            injector.inject("change", f"/devices/{name}", SUBSYSTEM="pci")
        sample = one.until(lambda s: s.changes[Subsystem.PCI] == 3)
        assert [e.name for e in sample.events if e.subsystem is Subsystem.PCI] == ["second", "first"]


def test_an_event_that_is_known_is_not_decoded_again(injector: Injector) -> None:
    with listener() as one:
        injector.inject("add")
        before = event_of(one.until(lambda s: s.changes[Subsystem.PCI] == 1), "0000:3b:00.0")
        injector.inject("add", "/devices/another", SUBSYSTEM="pci")
        after = event_of(one.until(lambda s: s.changes[Subsystem.PCI] == 2), "0000:3b:00.0")
        assert before is not None
        assert after is before


def test_what_the_machine_itself_tells_is_heard_and_makes_others_look(injector: Injector) -> None:
    trigger = Path("/sys/devices/system/cpu/cpu1/uevent")
    if not os.access(trigger, os.W_OK):
        pytest.skip(f"may not write {trigger}")
    with listener() as one:
        trigger.write_text("change\n")
        event = event_of(one.until(last_action("cpu1", Action.CHANGE)), "cpu1")
        assert event is not None
        assert (event.subsystem, event.path) == (Subsystem.CPU, "devices/system/cpu/cpu1")
        assert one.poked()


def test_a_cpu_that_goes_offline_is_told(injector: Injector) -> None:
    with hotplug(1) as cpu, listener() as one:
        cpu.set_online(False)
        one.until(last_action("cpu1", Action.OFFLINE))
        cpu.set_online(True)
        one.until(last_action("cpu1", Action.ONLINE))
        assert one.poked()


# --- what is not --------------------------------------------------------------------------------------------


def test_who_is_not_the_kernel_is_not_believed(injector: Injector) -> None:
    with listener() as one:
        injector.spoof("remove")
        injector.inject("add")  # wakes, the other does not
        sample = one.until(lambda s: s.changes[Subsystem.PCI] > 0)
        assert sample.foreign == 1
        assert sample.changes[Subsystem.PCI] == 1
        event = event_of(sample, "0000:3b:00.0")
        assert event is not None
        assert event.action is Action.ADD


def test_network_devices_in_masses_are_no_news(injector: Injector) -> None:
    with listener() as one:
        for _ in range(1000):
            injector.inject("add", "/devices/virtual/net/veth1", SUBSYSTEM="net")
        injector.inject("add")
        sample = one.until(lambda s: s.changes[Subsystem.PCI] > 0)
        assert event_of(sample, "veth1") is None


def test_a_flood_is_heard_to_its_last_event_or_a_loss_is_told(injector: Injector) -> None:
    flood = 5000  # there is room for them where the receive buffer may be made as large as it should be
    with listener() as one:
        for number in range(flood):
            injector.inject("change", f"/devices/flood{number}", SUBSYSTEM="pci")
        sample = one.until(lambda s: s.changes[Subsystem.PCI] == flood or s.changes[Subsystem.EDAC] > 0)
        assert (sample.changes[Subsystem.PCI] == flood) is (sample.lost == 0)
        assert len(sample.events) == 256


def test_what_the_kernel_had_to_throw_away_is_told_and_it_goes_on(injector: Injector) -> None:
    flood = 30_000  # of 830 bytes each in the kernel: the room for them is 16 MiB at most
    child = [sys.executable, "-c", HELD_UP]
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
            lost, changes, memory, poked = json.loads(held.stdout.readline())
            assert lost > 0
            assert flood > changes >= lost
            assert memory == lost  # where nothing happened, somebody has to look all the same
            assert poked
            injector.inject("remove")
            assert held.stdout.readline() == "remove\n"
            held.stdin.close()
            assert held.wait(10) == 0
        finally:
            held.kill()


HELD_UP = """
import json, os, select, sys
from agent.model.source import SourceState
from agent.model.uevent import Action, Subsystem
from agent.native.uevents import Uevents
fd, poke = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
uevents = Uevents(fd, [poke])
def until(what):
    while not what(sample := uevents.read()):
        if not select.select([fd], [], [], 20)[0]:
            sys.exit(f"nothing more than {sample}")
        os.eventfd_read(fd)
    return sample
uevents.start()
until(lambda s: s.source.state is not SourceState.STARTING)
print("listening", flush=True)
sample = until(lambda s: s.changes[Subsystem.MEMORY])
memory = sample.changes[Subsystem.MEMORY]
poked = bool(select.select([poke], [], [], 20)[0])
print(json.dumps([sample.lost, sample.changes[Subsystem.PCI], memory, poked]), flush=True)
until(lambda s: s.events[-1].action is Action.REMOVE)
print("remove", flush=True)
sys.stdin.read()
assert uevents.stop(5)
"""


def test_a_user_namespaces_network_is_deaf_and_says_so() -> None:
    said = run_in_user_namespace(sys.executable, "-c", DEAF)
    assert said == (
        "absent 0 the kernel sends no device events into this network namespace (a user namespace's); "
        "looked at by time instead\n"
    )


DEAF = """
import os, select
from agent.native.uevents import Uevents
fd = os.eventfd(0)
uevents = Uevents(fd)
uevents.start()
select.select([fd], [], [], 20)
source = uevents.read().source
print(source.state, source.failures, source.detail)
assert uevents.stop(5)
"""


# --- its life -----------------------------------------------------------------------------------------------


def test_before_the_start_there_is_nothing_to_read_and_it_can_be_stopped() -> None:
    fd = os.eventfd(0)
    uevents = Uevents(fd)
    os.close(fd)
    assert uevents.read() is None
    assert uevents.stop(0)
    assert uevents.stop(0)


def test_it_starts_once() -> None:
    with listener() as one, pytest.raises(ProbeError, match="device events' thread: Device or resource busy"):
        one.uevents.start()


def test_what_is_no_descriptor_is_refused() -> None:
    with pytest.raises(ProbeError, match="device events: Bad file descriptor"):
        Uevents(-1)


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


def let_nobody_read(path: Path) -> None:
    (path / "old").chmod(0)


def remove_all(path: Path) -> None:
    (path / "old").unlink()
    path.rmdir()


def move_all(path: Path) -> None:
    path.rename(path.parent / "gone")


CHANGES = [
    change_file, make_file, replace_file, remove_file, move_file_out, let_nobody_read, remove_all, move_all,
]  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "devices.d"
    path.mkdir()
    (path / "old").write_text("old")
    (tmp_path / "elsewhere").write_text("elsewhere")
    return path


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_in_a_directory_is_told(directory: Path, change: Callable[[Path], None]) -> None:
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


def test_a_file_that_is_being_written_or_read_is_not(directory: Path) -> None:
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


def test_what_is_no_directory_is_not_watched(directory: Path) -> None:
    with pytest.raises(ProbeError, match="old: Not a directory"):
        watch_directory(directory / "old")
    with pytest.raises(ProbeError, match="none: No such file or directory"):
        watch_directory(directory / "none")

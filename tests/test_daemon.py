"""The agent as a process on a sysfs of plain files: start, failures and shutdown."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from agents import (
    DRIVER,
    HEALTHY,
    UNHEALTHY,
    UNKNOWN,
    Agent,
    PlainSysfs,
    assert_silent,
    entry,
    play_in_time,
    read_thread_files,
    run_command,
    short_tmp,
    strace,
    stream_end,
    thread_names,
    wait_for_health,
    wait_for_message,
    without_stalls,
)
from machine import machine_lock
from patience import PATIENCE_S
from wire.google import Watcher, names
from wire.serving import device, eventually, report, unhealthy

from agent.app.daemon import status_line
from agent.cli.main import main
from agent.model.health import DeviceHealth, Health
from agent.model.reading import SourceSample, SourceState

CPU, MEMORY, POOL = "cpu-node0", "memory-node0", "hugepages-2mi-node0"
STALLED = 4  # drahealth.v1.SourceState
LATE_IO = "the I/O thread did not stop within"
GOODBYE = (grpc.StatusCode.UNAVAILABLE, "agent shutting down")
BUSY = 75  # exit code: a later try can help
STREAM = '[stream]\nheartbeat = "300ms"\n'
SELDOM = '[stream]\nlease = "3m"\nheartbeat = "1m"\n'
RESYNC = '[cgroups]\nsweep = "100ms"\nresync = "100ms"\n'
__all__ = ["short_tmp"]


@pytest.fixture
def sysfs(short_tmp: Path) -> PlainSysfs:
    return PlainSysfs(short_tmp / "sys")


@pytest.fixture
def flags(short_tmp: Path, sysfs: PlainSysfs) -> list[str]:
    (short_tmp / "cgroup").mkdir()
    roots = ["--sysfs-root", str(sysfs.root), "--cgroupfs-root", str(short_tmp / "cgroup")]
    return [*roots, "--node-name", "paper", "--period", "20ms"]


@pytest.fixture
def start(short_tmp: Path, flags: list[str]) -> Callable[[], Agent]:
    """Return a function that starts an agent, which speaks every 300 ms and reads everything again every
    100 ms."""
    return lambda: Agent(short_tmp, *flags, config=STREAM + RESYNC)


@pytest.fixture
def agent(start: Callable[[], Agent]) -> Iterator[Agent]:
    with start() as started:
        yield started


def are_ended_with_reason(agent: Agent, *streams: Watcher) -> bool:
    """Return whether streams ended with the shutdown's reason, or the agent had no time to end them."""
    return {stream_end(stream) for stream in streams} == {GOODBYE} or LATE_IO in agent.log


# --- sockets and reports ------------------------------------------------------------------------------------


def test_both_api_versions_send_the_full_list_first(agent: Agent) -> None:
    for version in ("v1", "v1alpha1"):
        with agent.kubelet(version) as kubelet:
            first = kubelet.next()
            assert names(first) == [CPU, MEMORY, POOL]
            assert {device.device.pool_name for device in first.devices} == {"paper"}
            assert {(device.health, device.message) for device in without_stalls(first)} <= {(HEALTHY, "")}
            (timeout_s,) = {device.health_check_timeout_seconds for device in first.devices}
            assert timeout_s in {30, 32}, "a new stream's first list differs from the last one's"


def test_heartbeats_repeat_the_list_with_a_new_verified_time(agent: Agent) -> None:
    with agent.kubelet() as kubelet:
        first = kubelet.next()
        later = wait_for_message(
            kubelet,
            lambda m: (
                entry(m, POOL) and entry(m, POOL).last_updated_time > entry(first, POOL).last_updated_time
            ),
            "a heartbeat in a later second",
        )
    for message in (first, later):
        for found_device in message.devices:
            found_device.last_updated_time = 0
    verified = {device.device.device_name for device in later.devices}
    # memory is read every ten seconds, and a heartbeat repeats only devices that were verified again
    assert {POOL, CPU} <= verified
    assert [
        found_device for found_device in first.devices if found_device.device.device_name in verified
    ] == list(later.devices)


def test_change_and_recovery_are_both_sent(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet:
        sysfs.resize(7)
        unhealthy = wait_for_health(kubelet, POOL, UNHEALTHY)
        assert unhealthy.message.startswith("mem.hugepages.pool_shrunk: 7 pages of 2mi, 8 at start. Advice: ")
        sysfs.resize(8)
        assert wait_for_health(kubelet, POOL, HEALTHY).message == ""
    agent.wait_for_log("hugepages-2mi-node0 Unhealthy")


def test_degraded_device_is_healthy_with_a_message(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet:
        assert entry(kubelet.next(), CPU).message == ""
        for counter in sysfs.counters():
            sysfs.write(counter, "500")
        words = (
            "cpu.throttled.core: at least 10 core thermal-throttle events in 60 s; cpu.throttled.package: "
        )
        slow = wait_for_message(kubelet, lambda m: entry(m, CPU) and words in entry(m, CPU).message, words)
    assert entry(slow, CPU).health == HEALTHY
    assert entry(slow, POOL) is None or entry(slow, POOL).message == ""


def test_hundred_unchanged_passes_do_not_wake_python(short_tmp: Path, flags: list[str]) -> None:
    def sleeps(which: str) -> int:
        """Return how often these threads have gone to sleep, and so how often they were woken."""
        status = read_thread_files(agent.pid, "status")
        lines = [line for tid in agent.threads(which) if tid in status for line in status[tid].splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    quiet = ["--period", "10ms", "--procfs-root", str(short_tmp)]  # the machine's own has pressure events
    with machine_lock(), Agent(short_tmp, *flags, *quiet, config=SELDOM) as agent, agent.kubelet() as kubelet:
        kubelet.next()
        begin = sleeps("sampler")
        eventually(lambda: sleeps("sampler") > begin + 250, "2.5 s of passes, for all the rest to settle")

        def is_quiet() -> bool:
            """Return whether a hundred passes wake no other thread."""
            before, passes = sleeps("main") + sleeps("others"), sleeps("sampler")
            eventually(lambda: sleeps("sampler") >= passes + 100, "a hundred passes")
            return sleeps("main") + sleeps("others") == before

        def loud_rounds() -> int:
            """Return how many of ten rounds were not quiet; a heartbeat once a minute is no such round."""
            began_s = time.monotonic()
            loud = sum(not is_quiet() for _ in range(10))
            # on a busy machine the passes take longer
            return loud - int((time.monotonic() - began_s) // 20)

        # other programs of the machine may cause events for ten seconds, but not always
        assert any(loud_rounds() <= 2 for _ in range(6))


# --- failures ----------------------------------------------------------------------------------------------


def test_sigstopped_agent_keeps_its_clients_and_continues(start: Callable[[], Agent]) -> None:
    def play() -> str:
        with start() as agent, agent.kubelet() as kubelet:
            wait_for_health(kubelet, POOL, HEALTHY)
            agent.process.send_signal(signal.SIGSTOP)
            stat = Path(f"/proc/{agent.pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped")
            assert_silent(kubelet, 2.5)  # eight heartbeats
            agent.process.send_signal(signal.SIGCONT)
            for _ in range(5):
                assert {device.health for device in without_stalls(kubelet.next())} <= {HEALTHY}
            assert agent.end() == 0
        return agent.log

    play_in_time(play, "stalled")


def test_hung_source_makes_its_devices_unknown_until_it_returns(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet, agent.watch_reports() as onlooker:
        hanging = sysfs.hang(sysfs.cpulist)
        for name in (CPU, POOL):
            assert "source.stalled" in wait_for_health(kubelet, name, UNKNOWN).message
        sources = {"cpus", "throttle", "hugepages"}
        picture = wait_for_message(
            onlooker,
            lambda m: {source.name for source in m.sources if source.state == STALLED} == sources,
            "three stalled sources",
        )
        stalled = {device.name for device in picture.devices if device.causes}
        assert stalled == {CPU, POOL}, "memory has a source of its own"
        sysfs.write(sysfs.cpulist, "0-1")
        hanging.write_text("0-1\n")
        for name in (CPU, POOL):
            assert wait_for_health(kubelet, name, HEALTHY).message == ""


def test_agent_ends_with_a_hung_source_and_open_streams(
    start: Callable[[], Agent], sysfs: PlainSysfs
) -> None:
    def play() -> str:
        with ExitStack() as stack:
            sysfs.write(sysfs.cpulist, "0-1")
            agent = stack.enter_context(start())
            kubelets = [stack.enter_context(agent.kubelet(v)) for v in ("v1", "v1alpha1") for _ in range(8)]
            for kubelet in kubelets:
                kubelet.next()
            sysfs.hang(sysfs.cpulist).unlink()
            wait_for_health(kubelets[0], CPU, UNKNOWN)
            assert agent.end() == 0
            assert are_ended_with_reason(agent, *kubelets)
        assert "sampler thread did not stop in time" in agent.log
        assert LATE_IO in agent.log or not agent.health_socket.exists()
        return agent.log

    play_in_time(play, LATE_IO)


def test_hung_first_pass_is_reported_and_the_next_is_the_baseline(
    short_tmp: Path, flags: list[str], sysfs: PlainSysfs
) -> None:
    hanging = sysfs.hang(sysfs.cpulist)
    config = STREAM + RESYNC + '[expect]\ncpus = "0-1"\n'
    expect = "source cpus stalled no pass for more than 2 s"
    with Agent(short_tmp, *flags, config=config, expect=expect) as agent, agent.kubelet() as kubelet:
        first = kubelet.next()
        assert names(first) == [CPU]
        assert entry(first, CPU).health == UNKNOWN
        assert entry(first, CPU).message.startswith("source.stalled: ")
        sysfs.write(sysfs.cpulist, "0-1")
        hanging.write_text("0-1\n")
        for name in (CPU, POOL):
            assert wait_for_health(kubelet, name, HEALTHY).message == ""


def test_watchdog_is_not_notified_while_a_source_hangs(
    short_tmp: Path, flags: list[str], sysfs: PlainSysfs
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_tmp / "notify"))
        manager.settimeout(PATIENCE_S)
        environ = {"NOTIFY_SOCKET": str(short_tmp / "notify"), "WATCHDOG_USEC": "600000"}
        with Agent(short_tmp, *flags, config=STREAM + RESYNC, environ=environ) as agent:
            while manager.recv(4096) != b"WATCHDOG=1":
                pass
            sysfs.hang(sysfs.cpulist)
            while b"2 unknown; stalled: cpus" not in (message := manager.recv(4096)):
                assert message.startswith((b"WATCHDOG=1", b"STATUS="))
            agent.process.send_signal(signal.SIGTERM)
            while (message := manager.recv(4096)) != b"STOPPING=1":
                assert message.startswith(b"STATUS="), (
                    "the agent itself lives, but must not notify the watchdog"
                )
            assert agent.wait_ended() == 0


def wait_for_unknown(kubelet: Watcher, device: str, reason: str) -> None:
    """Wait until a device is Unknown with a reason; a busy machine also causes stalls of its source."""

    def is_unknown(message: Any) -> bool:
        found = entry(message, device)
        return found is not None and found.health == UNKNOWN and reason in found.message

    wait_for_message(kubelet, is_unknown, reason)


def test_file_with_eio_is_unknown_with_reason_and_recovers(agent: Agent, sysfs: PlainSysfs) -> None:
    counter = sysfs.counters()[0]
    with agent.kubelet() as kubelet:
        wait_for_health(kubelet, CPU, HEALTHY)
        sysfs.link(counter, "/proc/self/mem")  # reading it at 0 is EIO
        words = "cpu.throttled.core.unreadable: core_throttle_count: Input/output error. Advice: "
        wait_for_unknown(kubelet, CPU, words)
        sysfs.write(counter, "0")
        assert wait_for_health(kubelet, CPU, HEALTHY).message == ""
    of_pool = [line for line in agent.log.splitlines() if "hugepages-2mi-node0 Unknown" in line]
    assert [line for line in of_pool if "source.stalled" not in line] == []


def test_open_file_with_eio_is_unknown_with_reason_and_recovers(agent: Agent, sysfs: PlainSysfs) -> None:
    pool = sysfs.root / "devices/system/node/node0" / sysfs.POOL / "nr_hugepages"
    with agent.kubelet() as kubelet:
        wait_for_health(kubelet, POOL, HEALTHY)
        with strace(agent.threads("sampler"), "-P", str(pool), "-e", "inject=pread64:error=EIO"):
            words = "mem.hugepages.pool_shrunk.unreadable: nr_hugepages: Input/output error. Advice: "
            wait_for_unknown(kubelet, POOL, words)
        assert wait_for_health(kubelet, POOL, HEALTHY).message == ""


def test_malformed_text_is_unknown_with_reason(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet:
        sysfs.write(sysfs.counters()[1], "lots")
        wait_for_unknown(kubelet, CPU, "package_throttle_count: text cannot be parsed")


def test_killed_client_leaves_the_agent_unharmed(agent: Agent) -> None:
    reader = (
        "import sys; from pathlib import Path; from wire.google import watch_health\n"
        "with watch_health(Path(sys.argv[1])) as w:\n"
        "    w.next(); print('reads', flush=True); w.next(600)\n"
    )
    command = [sys.executable, "-c", reader, str(agent.health_socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "reads\n"
        client.kill()
    with agent.kubelet() as kubelet:
        wait_for_health(kubelet, POOL, HEALTHY)
    assert agent.process.poll() is None


# --- shutdown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_ends_the_streams_and_removes_the_sockets(
    start: Callable[[], Agent], number: signal.Signals
) -> None:
    def play() -> str:
        with start() as agent, agent.kubelet() as kubelet, agent.watch_reports() as onlooker:
            kubelet.next()
            onlooker.next()
            assert agent.end(number) == 0
            assert are_ended_with_reason(agent, kubelet, onlooker)
        assert f"agent: {number.name} received; shutting down" in agent.log
        assert "Traceback" not in agent.log
        assert LATE_IO in agent.log or not (agent.health_socket.exists() or agent.agent_socket.exists())
        return agent.log

    play_in_time(play, LATE_IO)


def test_sighup_reloads_the_configuration_and_keeps_streams(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet, agent.watch_reports() as onlooker:
        sysfs.resize(7)
        assert wait_for_health(kubelet, POOL, UNHEALTHY)
        onlooker.next()
        (agent.directory / "config.toml").write_text(
            STREAM + 'lease = "77s"\n[expect]\ncpus = "0-5"\n' + RESYNC
        )
        agent.process.send_signal(signal.SIGHUP)
        # each list until then has the fault of the pool, and no device is Unknown
        while True:
            message = kubelet.next()
            assert entry(message, POOL).health != HEALTHY
            assert UNKNOWN not in {device.health for device in without_stalls(message)}
            if entry(message, CPU).health == UNHEALTHY:
                break
        assert entry(message, CPU).health_check_timeout_seconds >= 77
        wait_for_message(onlooker, lambda report: report.devices, "a report on the open stream")
    agent.wait_for_log("configuration: reloaded: ")
    assert 'stream.lease: "30s" to "77s"; expect.cpus: unset to "0-5"' in agent.log
    reload = agent.status()["configReload"]
    assert (reload["error"], len(reload["changes"])) == ("", 2)
    assert agent.end() == 0


def test_sighup_during_the_start_reloads_the_configuration_after_it(
    short_tmp: Path, flags: list[str]
) -> None:
    """The wrapper sends it before the program starts, which keeps the signal and its mask."""
    wrapper = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
os.kill(os.getpid(), signal.SIGHUP)
os.execv(sys.argv[1], sys.argv[1:])
"""
    with Agent(short_tmp, *flags, wrapper=(sys.executable, "-c", wrapper)) as agent:
        agent.wait_for_log("configuration: reloaded: no setting has changed")
        assert agent.end() == 0
    assert agent.log.count("configuration: reloaded") == 1


CHANGE_AT_MOMENT = """
import os, runpy, signal, sys
moment, text = sys.argv[1:3]
config = sys.argv[sys.argv.index("--config") + 1]

def change(frame, event, argument):
    if f"{event} {frame.f_code.co_qualname}" == moment:
        sys.setprofile(None)
        with open(config, "w") as file:
            file.write(text)
        os.kill(os.getpid(), signal.SIGHUP)

sys.argv = ["drahealth", *sys.argv[sys.argv.index("run"):]]
sys.setprofile(change)
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "moment",
    [
        "return read_config_files",
        "call Daemon.__init__",
        "return Daemon.__init__",
        "call Daemon.serve",
        "return NodeSource.start",
        "call Daemon._run_core",
        "call open_signal_receiver",
        "call _unblock_signal",
        "call SystemdNotifier.ready",
        "return SystemdNotifier.ready",
        "call ConfigReloader.run",
    ],
)
def test_sighup_at_each_moment_of_the_start_applies_a_changed_file(
    short_tmp: Path, flags: list[str], moment: str
) -> None:
    """The process changes the file at the call or the return of a function, and sends itself the signal."""
    wrapper = (sys.executable, "-c", CHANGE_AT_MOMENT, moment, STREAM + 'lease = "77s"\n')
    with Agent(short_tmp, *flags, config=STREAM, wrapper=wrapper) as agent:
        agent.wait_for_log('configuration: reloaded: stream.lease: "30s" to "77s"')
        assert agent.end() == 0
    assert agent.log.count("configuration: reloaded") == 1


def test_refused_reload_keeps_the_configuration_and_is_in_the_status(agent: Agent) -> None:
    assert agent.status()["configReload"] is None
    with agent.kubelet() as kubelet:
        kubelet.next()
        file = agent.directory / "config.toml"
        for text, words in (
            ("[throttle]\nevents = 0", f"{file}: throttle.events: 0 is below the limit of 1"),
            (
                STREAM + RESYNC + '[roots]\nkmsg = "/x"',
                f'{file}: roots.kmsg: "/dev/kmsg" to "/x": only a restart',
            ),
        ):
            file.write_text(text)
            agent.process.send_signal(signal.SIGHUP)
            agent.wait_for_log(f"configuration: not reloaded: {words}")
        eventually(lambda: agent.status()["configReload"]["error"].startswith(words), "the last reload")
        wait_for_health(kubelet, POOL, HEALTHY)
    assert agent.end() == 0


def test_systemd_gets_reloading_and_ready_of_a_reload(short_tmp: Path, flags: list[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_tmp / "notify"))
        manager.settimeout(PATIENCE_S)
        environ = {"NOTIFY_SOCKET": str(short_tmp / "notify")}
        with Agent(short_tmp, *flags, environ=environ) as agent:
            while manager.recv(4096) != b"READY=1":
                pass
            sent_us = time.monotonic_ns() // 1000
            agent.process.send_signal(signal.SIGHUP)
            while not (message := manager.recv(4096)).startswith(b"RELOADING=1\nMONOTONIC_USEC="):
                pass
            assert sent_us <= int(message.rpartition(b"=")[2]) <= time.monotonic_ns() // 1000
            while manager.recv(4096) != b"READY=1":
                pass


@pytest.mark.parametrize("thread", ["main", "others"])
def test_exception_in_either_thread_ends_the_agent_with_traceback(agent: Agent, thread: str) -> None:
    with agent.kubelet() as kubelet:
        kubelet.next()
        # the loop of that thread cannot wait any more, and raises the injected error
        with strace(agent.threads(thread), "-e", "inject=epoll_wait:error=EBADF"):
            assert agent.wait_ended() == 70
        # as the interpreter ends, the stream's coroutine may send a last status before its socket closes
        assert stream_end(kubelet)[0] in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN}
    assert "Traceback (most recent call last)" in agent.log
    assert "Bad file descriptor" in agent.log
    assert "this is a bug in drahealth" in agent.log


def test_second_agent_in_the_same_directory_is_rejected(agent: Agent) -> None:
    second = subprocess.run(agent.command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert second.returncode == 75
    text = f"another agent (pid {agent.pid} on the host or in its container) serves it; stop that agent"
    assert text in second.stderr
    with agent.kubelet() as kubelet:
        assert names(kubelet.next()) == [CPU, MEMORY, POOL]


def test_next_agent_replaces_stale_sockets_after_a_kill(agent: Agent, flags: list[str]) -> None:
    agent.process.kill()
    agent.process.wait()
    assert agent.health_socket.exists()
    with Agent(agent.directory, *flags) as second, second.kubelet() as kubelet:
        assert names(kubelet.next()) == [CPU, MEMORY, POOL]
        assert second.end() == 0


def test_shrunk_pool_stays_unhealthy_after_a_restart_until_it_is_accepted(
    agent: Agent, flags: list[str], sysfs: PlainSysfs
) -> None:
    stored = agent.directory / "run/state/gpu-faults.json"
    eventually(lambda: stored.exists() and POOL in stored.read_text(), "values at start are stored")
    with agent.kubelet() as kubelet:
        sysfs.resize(5)
        before = wait_for_health(kubelet, POOL, UNHEALTHY)
    agent.process.kill()
    agent.process.wait()
    with Agent(agent.directory, *flags, expect="Unhealthy") as second, second.kubelet() as kubelet:
        again = entry(kubelet.next(), POOL)
        assert (again.health, again.message) == (UNHEALTHY, before.message)
        assert again.message.startswith("mem.hugepages.pool_shrunk: 5 pages of 2mi, 8 at start. ")
        done = run_command("clear", POOL, "--runtime-dir", str(agent.directory / "run"))
        assert done.stdout == f"{POOL}: fault mem.hugepages.pool_shrunk cleared\n", done.stderr
        wait_for_health(kubelet, POOL, HEALTHY)
        # an agent that ends waits less than two seconds for the disk
        eventually(lambda: '"cleared"' in stored.read_text(), "the clear is stored")
        assert second.end() == 0
    with Agent(agent.directory, *flags) as third, third.kubelet() as kubelet:
        assert entry(kubelet.next(), POOL).health == HEALTHY


def test_directory_in_place_of_a_socket_is_named(short_tmp: Path, flags: list[str]) -> None:
    (short_tmp / "run" / "drivers" / f"{DRIVER}.sock").mkdir(parents=True)
    with Agent(short_tmp, *flags, expect="is not a socket") as agent:
        assert agent.wait_ended() == 78


@pytest.mark.parametrize(
    ("devices", "stalled", "line"),
    [
        ([], [], "0 devices: none"),
        ([device()], [], "1 device: 1 healthy"),
        ([device("a"), unhealthy("b"), device("c")], [], "3 devices: 2 healthy, 1 unhealthy"),
        (
            [device(health=Health.UNKNOWN)],
            ["cpus", "cgroups"],
            "1 device: 1 unknown; stalled: cpus, cgroups",
        ),
    ],
)
def test_status_line_summarizes_the_devices(
    devices: list[DeviceHealth], stalled: list[str], line: str
) -> None:
    sources = tuple(SourceSample(name, SourceState.STALLED, 1, 1, 0, "") for name in stalled)
    assert status_line(replace(report(devices), sources=sources)) == line


def test_startup_objects_are_frozen_for_the_garbage_collector(tmp_path: Path) -> None:
    code = f"""
import gc, os, signal
from pathlib import Path
from agent.app import daemon
from agent.config.config import Config

def stop(report, *, is_repeat):
    print(gc.get_freeze_count(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

daemon.run(Config(node_name="n", runtime_dir=Path({str(tmp_path / "run")!r}), gpu_watch=False), stop)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout.split()[0]) > 10_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_second_signal_does_not_end_the_agent_while_it_stops(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import os
from pathlib import Path
from agent.app import daemon
from agent.config.config import Config

def stop(report, *, is_repeat):
    os.kill(os.getpid(), {signal.SIGTERM:d})

stop_parts = daemon.Daemon._stop
def interrupted_stop(self):
    os.kill(os.getpid(), {number:d})
    stop_parts(self)

daemon.Daemon._stop = interrupted_stop
daemon.run(Config(node_name="n", runtime_dir=Path({str(tmp_path / "run")!r}), gpu_watch=False), stop)
os.kill(os.getpid(), {number:d})
print("stopped", flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_signal_just_before_the_receiver_stops_the_agent(tmp_path: Path) -> None:
    code = f"""
import os, trio
from pathlib import Path
from agent.app import daemon
from agent.config.config import Config

open_receiver = trio.open_signal_receiver
def open_after_signal(*numbers):
    os.kill(os.getpid(), {signal.SIGTERM:d})
    return open_receiver(*numbers)

trio.open_signal_receiver = open_after_signal
daemon.run(Config(node_name="n", runtime_dir=Path({str(tmp_path / "run")!r}), gpu_watch=False))
print("stopped", flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_history_has_the_changes_of_killed_and_restarted_agents(
    short_tmp: Path, sysfs: PlainSysfs, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def changes() -> list[tuple[str, str]]:
        state = ["--state-dir", str(short_tmp / "run/state"), "--config", os.devnull]
        while (code := main(["history", "--changes", *state, "-o", "json"])) == BUSY:
            capsys.readouterr()  # the agent writes, and its disk is slow
        assert code == 0
        listed = json.loads(capsys.readouterr().out)["changes"]
        return [(name["from"], name["to"]) for name in reversed(listed) if name["device"]["name"] == POOL]

    with Agent(short_tmp, *flags, config=STREAM) as agent:
        eventually(lambda: (short_tmp / "run/state/history.sqlite").exists(), "the first report is written")
        sysfs.resize(7)
        eventually(lambda: changes() == [("healthy", "unhealthy")], "the change is written")
        agent.end(signal.SIGKILL)
    sysfs.resize(8)
    with Agent(short_tmp, *flags, config=STREAM) as agent:
        eventually(lambda: len(changes()) == 2, "the end of the fault is written")
        assert agent.end() == 0
    assert changes() == [("healthy", "unhealthy"), ("unhealthy", "healthy")]


def test_agent_has_one_thread_for_each_job(agent: Agent) -> None:
    jobs = [
        *("dh-history", "dh-kmsg", "dh-machine", "dh-nvml", "dh-pods", "dh-sampler", "dh-uevents"),
    ]

    def started_threads() -> list[
        str
    ]:  # Python 3.14 gives the threads of Trio and of the log their names, too
        return sorted(name for name in thread_names(agent.pid).values() if name in jobs)

    eventually(lambda: started_threads() == jobs, lambda: str(thread_names(agent.pid)))
    # main, I/O, the log, and two of Trio's for what is slow; others run for a moment
    eventually(lambda: len(thread_names(agent.pid)) - len(jobs) <= 5, lambda: str(thread_names(agent.pid)))


def test_agent_without_tls_loads_no_openssl(agent: Agent) -> None:
    unwanted = {"_hashlib", "_ssl", "_bz2", "_lzma"}
    if built_in := unwanted.intersection(sys.builtin_module_names):
        pytest.skip(f"{', '.join(sorted(built_in))}: part of this Python's program, not a file")
    with agent.kubelet() as kubelet:
        assert names(kubelet.next()) == [CPU, MEMORY, POOL]
        loaded = Path(f"/proc/{agent.pid}/maps").read_text()
    assert "/_cffi_backend" in loaded, "loaded compiled modules are in the list"
    assert not re.findall(rf"\S*(?:libcrypto|libssl|{'|'.join(unwanted)})\S*", loaded)

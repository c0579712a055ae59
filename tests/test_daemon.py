"""The agent as a process: how it starts, what it survives, and how it ends. On a sysfs of plain files."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from agents import (
    DRIVER,
    HEALTHY,
    UNHEALTHY,
    UNKNOWN,
    Agent,
    PlainSysfs,
    entry,
    farewell,
    hear,
    hear_health,
    said_of_threads,
    short_tmp,
    silent,
    strace,
    thread_names,
)
from machine import machine_lock
from patience import PATIENCE_S
from wire.google import names
from wire.serving import device, eventually, report, sick

from agent.app.daemon import status_line
from agent.model.health import DeviceHealth, Health
from agent.model.source import SourceSample, SourceState

CPU, MEMORY, POOL = "cpu-node0", "memory-node0", "hugepages-2mi-node0"
STALLED = 4  # drahealth.v1.SourceState
GOODBYE = (grpc.StatusCode.UNAVAILABLE, "agent shutting down")
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
def agent(short_tmp: Path, flags: list[str]) -> Iterator[Agent]:
    """An agent that speaks every 300 ms and reads everything again every 100 ms."""
    with Agent(short_tmp, *flags, config=STREAM + RESYNC) as started:
        yield started


# --- what it serves -----------------------------------------------------------------------------------------


def test_both_versions_read_the_full_list_first(agent: Agent) -> None:
    for version in ("v1", "v1alpha1"):
        with agent.kubelet(version) as kubelet:
            first = kubelet.next()
            assert names(first) == [CPU, MEMORY, POOL]
            assert {one.device.pool_name for one in first.devices} == {"paper"}
            assert {(one.health, one.message) for one in first.devices} == {(HEALTHY, "")}
            (timeout_s,) = {one.health_check_timeout_seconds for one in first.devices}
            assert timeout_s in {30, 32}, "a new stream's first list differs from the last one's"


def test_heartbeats_say_the_same_and_are_verified_anew(agent: Agent) -> None:
    with agent.kubelet() as kubelet:
        first = kubelet.next()
        later = hear(
            kubelet,
            lambda m: (
                entry(m, POOL) and entry(m, POOL).last_updated_time > entry(first, POOL).last_updated_time
            ),
            "a heartbeat in a later second",
        )
    for message in (first, later):
        for one in message.devices:
            one.last_updated_time = 0
    told = {one.device.device_name for one in later.devices}
    # memory is read every ten seconds, and only what was verified anew is told anew
    assert {POOL, CPU} <= told
    assert [one for one in first.devices if one.device.device_name in told] == list(later.devices)


def test_a_change_is_told_and_so_is_the_recovery(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet:
        sysfs.resize(7)
        sick = hear_health(kubelet, POOL, UNHEALTHY)
        assert sick.message.startswith("mem.hugepages.pool_shrunk: 7 pages of 2mi, 8 at start. Advice: ")
        sysfs.resize(8)
        assert hear_health(kubelet, POOL, HEALTHY).message == ""
    agent.logs("hugepages-2mi-node0 Unhealthy")


def test_degraded_is_healthy_with_a_message(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet:
        assert entry(kubelet.next(), CPU).message == ""
        for counter in sysfs.counters():
            sysfs.write(counter, "500")
        words = (
            "cpu.throttled.core: at least 10 core thermal-throttle events in 60 s; cpu.throttled.package: "
        )
        slow = hear(kubelet, lambda m: entry(m, CPU) and words in entry(m, CPU).message, words)
    assert entry(slow, CPU).health == HEALTHY
    assert entry(slow, POOL) is None or entry(slow, POOL).message == ""


def test_a_hundred_quiet_passes_wake_no_python(short_tmp: Path, flags: list[str]) -> None:
    def naps(which: str) -> int:
        """How often these threads have gone to sleep, and so how often they were woken."""
        told = said_of_threads(agent.pid, "status")
        lines = [line for tid in agent.threads(which) if tid in told for line in told[tid].splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    quiet = ["--period", "10ms", "--procfs-root", str(short_tmp)]  # the machine's own tells of its pressure
    with machine_lock(), Agent(short_tmp, *flags, *quiet, config=SELDOM) as agent, agent.kubelet() as kubelet:
        kubelet.next()
        begin = naps("sampler")
        eventually(lambda: naps("sampler") > begin + 250, "2.5 s of passes, for all the rest to settle")

        def is_quiet() -> bool:
            """Whether a hundred passes wake nobody."""
            before, passes = naps("main") + naps("others"), naps("sampler")
            eventually(lambda: naps("sampler") >= passes + 100, "a hundred passes")
            return naps("main") + naps("others") == before

        assert sum(is_quiet() for _ in range(10)) >= 8, "but for a heartbeat once a minute"


# --- what it survives ---------------------------------------------------------------------------------------


def test_an_agent_that_is_stopped_says_nothing_keeps_its_clients_and_goes_on(agent: Agent) -> None:
    with agent.kubelet() as kubelet:
        hear_health(kubelet, POOL, HEALTHY)
        agent.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{agent.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped")
        silent(kubelet, 2.5)  # eight heartbeats
        agent.process.send_signal(signal.SIGCONT)
        hear_health(kubelet, POOL, HEALTHY)
        assert agent.end() == 0


def test_a_source_that_does_not_return_makes_its_devices_unknown_until_it_does(
    agent: Agent, sysfs: PlainSysfs
) -> None:
    with agent.kubelet() as kubelet, agent.onlooker() as onlooker:
        hanging = sysfs.hang(sysfs.cpulist)
        for name in (CPU, POOL):
            assert "source.stalled" in hear_health(kubelet, name, UNKNOWN).message
        sources = {"cpus", "throttle", "hugepages"}
        picture = hear(
            onlooker,
            lambda m: {source.name for source in m.sources if source.state == STALLED} == sources,
            "three sources that stand still",
        )
        stalled = {device.name for device in picture.devices if device.causes}
        assert stalled == {CPU, POOL}, "memory has a source of its own"
        sysfs.write(sysfs.cpulist, "0-1")
        hanging.write_text("0-1\n")
        for name in (CPU, POOL):
            assert hear_health(kubelet, name, HEALTHY).message == ""


def test_it_ends_with_a_source_that_does_not_return_and_open_streams(agent: Agent, sysfs: PlainSysfs) -> None:
    with ExitStack() as stack:
        kubelets = [stack.enter_context(agent.kubelet(v)) for v in ("v1", "v1alpha1") for _ in range(8)]
        for kubelet in kubelets:
            kubelet.next()
        sysfs.hang(sysfs.cpulist)
        hear_health(kubelets[0], CPU, UNKNOWN)
        assert agent.end() == 0
        assert {farewell(kubelet) for kubelet in kubelets} == {GOODBYE}
    assert "the sampler hangs and is left behind" in agent.log
    assert not agent.health_socket.exists()


def test_a_first_pass_that_does_not_return_is_told_and_the_first_that_does_is_the_baseline(
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
            assert hear_health(kubelet, name, HEALTHY).message == ""


def test_no_life_is_signed_for_a_source_that_does_not_return(
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
            while b"2 unknown; stalled: cpus" not in (said := manager.recv(4096)):
                assert said.startswith((b"WATCHDOG=1", b"STATUS="))
            agent.process.send_signal(signal.SIGTERM)
            while (said := manager.recv(4096)) != b"STOPPING=1":
                assert said.startswith(b"STATUS="), "the agent itself lives, but must not say so"
            assert agent.ended() == 0


def test_a_file_that_gives_eio_is_unknown_with_the_reason_and_healthy_again(
    agent: Agent, sysfs: PlainSysfs
) -> None:
    counter = sysfs.counters()[0]
    with agent.kubelet() as kubelet:
        hear_health(kubelet, CPU, HEALTHY)
        sysfs.link(counter, "/proc/self/mem")  # reading it at 0 is EIO
        sick = hear_health(kubelet, CPU, UNKNOWN)
        words = "cpu.throttled.core.unreadable: core_throttle_count: Input/output error. Advice: "
        assert sick.message.startswith(words)
        sysfs.write(counter, "0")
        assert hear_health(kubelet, CPU, HEALTHY).message == ""
    assert "hugepages-2mi-node0 Unknown" not in agent.log


def test_a_held_file_that_gives_eio_is_unknown_with_the_reason_and_healthy_again(
    agent: Agent, sysfs: PlainSysfs
) -> None:
    pool = sysfs.root / "devices/system/node/node0" / sysfs.POOL / "nr_hugepages"
    with agent.kubelet() as kubelet:
        hear_health(kubelet, POOL, HEALTHY)
        with strace(agent.threads("sampler"), "-P", str(pool), "-e", "inject=pread64:error=EIO"):
            sick = hear_health(kubelet, POOL, UNKNOWN)
        words = "mem.hugepages.pool_shrunk.unreadable: nr_hugepages: Input/output error. Advice: "
        assert sick.message.startswith(words)
        assert hear_health(kubelet, POOL, HEALTHY).message == ""


def test_text_that_makes_no_sense_is_unknown_with_the_reason(agent: Agent, sysfs: PlainSysfs) -> None:
    with agent.kubelet() as kubelet:
        sysfs.write(sysfs.counters()[1], "lots")
        assert "package_throttle_count: unintelligible text" in hear_health(kubelet, CPU, UNKNOWN).message


def test_a_client_that_is_killed_takes_nothing_along(agent: Agent) -> None:
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
        hear_health(kubelet, POOL, HEALTHY)
    assert agent.process.poll() is None


# --- how it ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end_it_tells_its_clients_and_leaves_no_socket(agent: Agent, number: signal.Signals) -> None:
    with agent.kubelet() as kubelet, agent.onlooker() as onlooker:
        kubelet.next()
        onlooker.next()
        assert agent.end(number) == 0
        assert [farewell(kubelet), farewell(onlooker)] == [GOODBYE, GOODBYE]
    assert f"{number.name}: shutting down" in agent.log
    assert "Traceback" not in agent.log
    assert not agent.health_socket.exists()
    assert not agent.agent_socket.exists()


@pytest.mark.parametrize("thread", ["main", "others"])
def test_an_exception_in_either_thread_ends_it_with_its_traceback(agent: Agent, thread: str) -> None:
    with agent.kubelet() as kubelet:
        kubelet.next()
        # the loop of that thread cannot wait any more, and raises what it is told
        with strace(agent.threads(thread), "-e", "inject=epoll_wait:error=EBADF"):
            assert agent.ended() == 70
        # as the interpreter ends, the stream's coroutine may get to say a last word before its socket closes
        assert farewell(kubelet)[0] in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN}
    assert "Traceback (most recent call last)" in agent.log
    assert "Bad file descriptor" in agent.log
    assert "this is a mistake in drahealth" in agent.log


def test_a_second_agent_on_the_same_directory_is_refused_and_harms_nothing(agent: Agent) -> None:
    second = subprocess.run(agent.command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert second.returncode == 75
    assert f"another agent (pid {agent.pid}) serves this directory" in second.stderr
    with agent.kubelet() as kubelet:
        assert names(kubelet.next()) == [CPU, MEMORY, POOL]


def test_after_a_kill_the_next_agent_replaces_the_stale_sockets(agent: Agent, flags: list[str]) -> None:
    agent.process.kill()
    agent.process.wait()
    assert agent.health_socket.exists()
    with Agent(agent.directory, *flags) as second, second.kubelet() as kubelet:
        assert names(kubelet.next()) == [CPU, MEMORY, POOL]
        assert second.end() == 0


def test_a_directory_in_the_way_is_named_and_no_thread_is_left(short_tmp: Path, flags: list[str]) -> None:
    (short_tmp / "run" / "drivers" / f"{DRIVER}.sock").mkdir(parents=True)
    with Agent(short_tmp, *flags, expect="is in the way") as agent:
        assert agent.ended() == 78


@pytest.mark.parametrize(
    ("devices", "stalled", "line"),
    [
        ([], [], "0 devices: none"),
        ([device()], [], "1 device: 1 healthy"),
        ([device("a"), sick("b"), device("c")], [], "3 devices: 2 healthy, 1 unhealthy"),
        (
            [device(health=Health.UNKNOWN)],
            ["cpus", "cgroups"],
            "1 device: 1 unknown; stalled: cpus, cgroups",
        ),
    ],
)
def test_the_service_manager_reads_one_line(
    devices: list[DeviceHealth], stalled: list[str], line: str
) -> None:
    sources = tuple(SourceSample(name, SourceState.STALLED, 1, 1, 0, "") for name in stalled)
    assert status_line(replace(report(devices), sources=sources)) == line


def test_what_was_made_at_the_start_is_not_walked_by_the_collector(tmp_path: Path) -> None:
    code = f"""
import gc, os, signal
from pathlib import Path
from agent.app import daemon
from agent.config.config import Config

def look(report):
    print(gc.get_freeze_count(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

daemon.run(Config(node_name="n", runtime_dir=Path({str(tmp_path / "run")!r}), gpu_watch=False), look)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout.split()[0]) > 10_000


def test_it_has_one_thread_for_each_of_its_jobs(agent: Agent) -> None:
    jobs = [
        *("dh-gpu-events", "dh-gpu-open", "dh-gpu-watch"),
        *("dh-kmsg", "dh-machine", "dh-pods", "dh-sampler", "dh-uevents"),
    ]

    def native() -> list[str]:
        return sorted(name for name in thread_names(agent.pid).values() if name.startswith("dh-"))

    eventually(lambda: native() == jobs, "all have begun")
    # main, I/O, the log, and two of Trio's for what is slow
    assert len(thread_names(agent.pid)) - len(jobs) <= 5

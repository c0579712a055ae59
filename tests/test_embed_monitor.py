"""The monitor inside a driver: what it says, that nothing in it ends the driver, and how it ends."""

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from agents import PlainSysfs, short_tmp, thread_names
from embedded.process_state import event_loop_policy
from embedding import DRIVER, NODE, broken_log_handler, codes, health_of, patient, ref, until
from patience import PATIENCE_S
from wire.serving import descriptors, eventually

from agent.config.config import KUBELET_DIR, Config
from agent.embed.checks import degraded, unhealthy, unknown
from agent.embed.devices import Device, Hugepages
from agent.embed.monitor import Monitor, default_state_dir
from agent.errors import ConfigError, ProbeError
from agent.model.claim import ClaimDevice, ClaimRef, DeviceRef
from agent.model.health import Blame, Effect, Finding, Health, Taints
from agent.model.prepare import DriverFault
from agent.model.time import Instant
from agent.native.machine_watch import MachineWatch
from agent.prepare.errors import FailedDeviceError
from agent.system.threads import loop_thread

__all__ = ["patient", "short_tmp"]
pytestmark = pytest.mark.usefixtures("patient")

CoreThreads = Callable[[], list[threading.Thread]]
CONFIG: Final = Config(node_name=NODE, heartbeat_s=0.5, coalesce_ns=0)
BAD: Final = unhealthy("demo.bad", "1 of 2", "replace it")


def monitor_of(**changes: Any) -> Monitor:
    """Return a monitor without hardware and without stored state, unless the changes add them."""
    given = {"config": CONFIG, "hardware": False, "state_dir": None}
    return Monitor(DRIVER, **(given | changes))


@pytest.fixture
def core_threads() -> CoreThreads:
    """Return a function that lists the core threads of the test, without those of earlier tests."""
    before = threading.enumerate()
    return lambda: [
        thread for thread in threading.enumerate() if thread.name == "dh-core" and thread not in before
    ]


def fault(name: str) -> DriverFault:
    claim = ClaimRef("default", "c", "u-1")
    return DriverFault(1, ref(name), "demo.dead", "it does not answer", "reseat it", time.time(), claim)


# --- health of devices -------------------------------------------------------------------------------------


def test_driver_without_devices_has_an_empty_report() -> None:
    with monitor_of() as monitor:
        assert monitor.wait_ready(PATIENCE_S)
        assert monitor.is_up
        report = monitor.report
    assert report is not None
    assert (report.devices, report.declaring, report.node) == ((), (DRIVER,), NODE)


def test_checks_determine_the_health_of_a_device() -> None:
    answer: list[Finding | None] = [None]
    monitor = monitor_of()
    monitor.add(Device("d-0"))

    @monitor.check(every_s=0.1, timeout_s=PATIENCE_S, raise_after=1, clear_after=1)
    def link(_: Device) -> Finding | None:
        return answer[0]

    with monitor:
        until(monitor, "d-0", Health.HEALTHY)
        answer[0] = BAD
        bad = until(monitor, "d-0", Health.UNHEALTHY, "demo.bad")
        assert bad.message == "demo.bad: 1 of 2. Advice: replace it"
        answer[0] = degraded("demo.slow", "1 of 4 lanes")
        until(monitor, "d-0", Health.HEALTHY, "demo.slow")
        answer[0] = unknown("demo.dark", "no light")
        until(monitor, "d-0", Health.UNKNOWN, "demo.dark")
        answer[0] = None
        until(monitor, "d-0", Health.HEALTHY)


def test_fault_is_reported_after_raise_after_results_in_a_row() -> None:
    answers: list[Finding | None] = [BAD, BAD, None, BAD, BAD, BAD]
    healthy, sixth, release = threading.Event(), threading.Event(), threading.Event()
    monitor = monitor_of()
    monitor.add(Device("d-0"))

    @monitor.check(every_s=0.1, timeout_s=60, raise_after=3, clear_after=3)
    def link(_: Device) -> Finding | None:
        if not healthy.is_set():
            return None
        if len(answers) == 1:
            sixth.set()
            release.wait(PATIENCE_S)
            return answers[0]
        return answers.pop(0)

    with monitor:
        until(monitor, "d-0", Health.HEALTHY)
        healthy.set()
        assert sixth.wait(PATIENCE_S)
        assert health_of(monitor, "d-0").health is Health.HEALTHY, "two of three"
        release.set()
        until(monitor, "d-0", Health.UNHEALTHY, "demo.bad")


def test_hung_check_makes_only_its_device_unknown(gate: threading.Event) -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0"), Device("d-1"))

    @monitor.check(every_s=0.1, timeout_s=2, raise_after=1, clear_after=1)
    def link(device: Device) -> bool:
        return device.name == "d-1" or gate.wait()

    with monitor:
        found = until(monitor, "d-0", Health.UNKNOWN, "check.link.unreadable")
        assert found.causes[0].evidence == "no answer within 2 s"
        until(monitor, "d-1", Health.HEALTHY)
        gate.set()
        until(monitor, "d-0", Health.HEALTHY)


def test_raising_check_ends_no_thread() -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0"), Device("d-1"), Device("d-2"))

    class Ending(BaseException):
        def __str__(self) -> str:
            raise SystemExit

    @monitor.check(every_s=0.1, timeout_s=PATIENCE_S, devices="d-0", raise_after=1)
    def plain(_: Device) -> None:
        raise SystemExit(1)

    @monitor.check(every_s=0.1, timeout_s=PATIENCE_S, devices="d-2", raise_after=1)
    async def raise_ending(_: Device) -> None:
        raise Ending

    @monitor.check(every_s=0.1, timeout_s=PATIENCE_S, devices="d-1", raise_after=1)
    async def in_loop(_: Device) -> None:
        raise KeyboardInterrupt

    with monitor:
        plain_one = until(monitor, "d-0", Health.UNKNOWN, "check.plain.unreadable")
        async_one = until(monitor, "d-1", Health.UNKNOWN, "check.in-loop.unreadable")
        silent_one = until(monitor, "d-2", Health.UNKNOWN, "check.raise-ending.unreadable")
        assert monitor.is_up
        assert monitor.failure is None
    assert silent_one.causes[0].evidence == "Ending"
    assert plain_one.causes[0].evidence == "SystemExit: 1"
    assert async_one.causes[0].evidence == "KeyboardInterrupt"


def test_device_without_checks_is_unknown() -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0"))
    with monitor:
        until(monitor, "d-0", Health.UNKNOWN, "declared.unchecked")


def test_devices_can_be_added_and_removed_at_run_time() -> None:
    with monitor_of() as monitor:
        assert monitor.wait_ready(PATIENCE_S)
        monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="well")(lambda _: None)
        monitor.add(Device("d-0"), Device("d-1", pool="rack-1"))
        until(monitor, "d-0", Health.HEALTHY)
        monitor.remove("d-0")
        until(monitor, "d-0", Health.UNKNOWN, "declared.gone")
        eventually(
            lambda: monitor.health_of(ref("d-1")._replace(pool="rack-1")) is not None, "a pool of its own"
        )


def test_check_decorator_returns_the_function() -> None:
    monitor = monitor_of()

    @monitor.check(every_s=1, timeout_s=1)
    def link(_: Device) -> bool:
        """Return that the link is up."""
        return True

    assert link(Device("d-0")) is True
    assert link.__doc__ == "Return that the link is up."


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Monitor("Not A Driver"), "driver name 'Not A Driver' is not a DNS subdomain"),
        (lambda: monitor_of().check(every_s=0.01, timeout_s=1)(lambda _: None), "not a DNS label"),
        (
            lambda: monitor_of().check(every_s=0.01, timeout_s=1, name="x")(print),
            "check 'x': every_s: 10ms is below",
        ),
        (lambda: Monitor(os.environ.get("NO_SUCH_DRIVER")), "argument driver: None is not a string"),
        (
            lambda: monitor_of(config=Config(node_name=os.environ.get("NO_SUCH_NODE"))),
            "argument config.node_name: None is not a string",
        ),
        (lambda: monitor_of(version=3), "argument version: 3 is not a string"),
        (
            lambda: monitor_of(patterns=["bank"]),
            "patterns: \\['bank'\\] has another object than an ErrorPattern",
        ),
        (lambda: monitor_of(on_error=3), "argument on_error: 3 is not a function"),
        (lambda: monitor_of(on_error=""), "argument on_error: '' is not a function"),
        (lambda: monitor_of().on_taints(None), "argument callback: None is not a function"),
        (lambda: monitor_of().recheck("x"), "health check 'x' does not exist"),
        (lambda: monitor_of().recheck(print), "health check <built-in function print> does not exist"),
        (lambda: monitor_of().remove("x"), "device 'x' does not exist"),
    ],
)
def test_invalid_arguments_are_rejected_at_once(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


# --- methods for prepare handlers --------------------------------------------------------------------------


def test_require_healthy_raises_only_for_unhealthy_devices() -> None:
    monitor = monitor_of()
    monitor.add(Device("bad"), Device("well"), Device("unseen"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, devices="bad", raise_after=1, name="bad")(lambda _: BAD)
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, devices="well", name="well")(lambda _: None)
    monitor.require_healthy("bad")  # not evaluated yet
    with monitor:
        until(monitor, "bad", Health.UNHEALTHY)
        until(monitor, "well", Health.HEALTHY)
        for device in ("bad", ref("bad"), ClaimDevice("req-0", *ref("bad")), Device("bad")):
            with pytest.raises(FailedDeviceError, match="1 of 2") as raised:
                monitor.require_healthy(device)
            assert (raised.value.device, raised.value.code) == (ref("bad"), "demo.bad")
        examined = (ClaimDevice("r", *ref("bad"), admin=True), ClaimDevice("r", *ref("bad"), tolerates=True))
        for other in ("well", "unseen", ref("well"), ref("no-such-device"), Device("well"), *examined):
            monitor.require_healthy(other)
        with pytest.raises(ConfigError, match="device 'wel' does not exist; did you mean 'well'"):
            monitor.require_healthy("wel")
        with pytest.raises(TypeError, match="None is not a device; pass a claim's device or a name"):
            monitor.require_healthy(None)  # type: ignore[arg-type]


def test_health_of_takes_every_way_to_name_a_device() -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0", pool="pool-1"))
    device = DeviceRef(DRIVER, "pool-1", "d-0")
    with monitor:
        eventually(lambda: monitor.health_of(device) is not None, "d-0 is reported")
        found = {
            monitor.health_of(name) for name in (device, "d-0", Device("d-0"), ClaimDevice("r", *device))
        }
        assert None not in found
        assert monitor.health_of("d-1") is None
        with pytest.raises(TypeError, match="3 is not a device; pass a claim's device or a name"):
            monitor.health_of(3)  # type: ignore[arg-type]


def test_device_of_a_failed_prepare_is_unhealthy_after_the_wait() -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="well")(lambda _: None)
    with monitor:
        until(monitor, "d-0", Health.HEALTHY)
        monitor.report_faults([fault("d-0")])
        assert monitor.wait_delivered([fault("d-0")], PATIENCE_S)
        reported = health_of(monitor, "d-0")
        assert (reported.health, codes(reported)) == (Health.UNHEALTHY, ["demo.dead"])
        assert reported.causes[0].blame is Blame.DRIVER
        [taint] = monitor.taints.devices[ref("d-0")]
        assert (taint.key, taint.effect) == (f"{DRIVER}/demo.dead", Effect.NO_SCHEDULE)


def test_require_healthy_ignores_driver_reported_faults() -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="well")(lambda _: None)
    with monitor:
        monitor.report_faults([fault("d-0")])
        until(monitor, "d-0", Health.UNHEALTHY, "demo.dead")
        monitor.require_healthy("d-0")


def test_wait_delivered_ignores_undeclared_devices(gate: threading.Event) -> None:
    with monitor_of() as monitor:
        assert monitor.wait_ready(PATIENCE_S)
        assert monitor.wait_delivered([fault("elsewhere")], PATIENCE_S), "the device is undeclared"
        monitor.add(Device("d-0"))
        assert not monitor.wait_delivered([fault("d-0")], 0.0), "the fault was not reported"
    assert not monitor.wait_delivered([fault("d-0")], PATIENCE_S), "the core has ended"


def test_taints_are_passed_to_the_callback() -> None:
    published: list[Taints] = []
    monitor = monitor_of()
    monitor.add(Device("d-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, raise_after=1, name="bad")(lambda _: BAD)
    assert monitor.taints == Taints()
    monitor.on_taints(published.append)
    with monitor:
        eventually(lambda: bool(published and published[-1].devices.get(ref("d-0"))), "a taint of d-0")
        with pytest.raises(RuntimeError, match="after start"):
            monitor.on_taints(published.append)


def test_second_taint_callback_is_refused() -> None:
    monitor = monitor_of()
    monitor.on_taints(print)
    with pytest.raises(RuntimeError, match="was called before, with <built-in function print>; call it once"):
        monitor.on_taints(repr)


# --- the host's own sources --------------------------------------------------------------------------------


@pytest.fixture
def sysfs(short_tmp: Path) -> PlainSysfs:
    return PlainSysfs(short_tmp / "sys")


@pytest.fixture
def hardware(short_tmp: Path, sysfs: PlainSysfs) -> dict[str, Any]:
    """Return the configuration for a machine of plain files."""
    (short_tmp / "cgroup").mkdir()
    (short_tmp / "kmsg").touch()
    config = Config(
        node_name=NODE,
        heartbeat_s=0.5,
        period_ns=20_000_000,
        gpu_watch=False,
        sysfs_root=sysfs.root,
        cgroupfs_root=short_tmp / "cgroup",
        kmsg=short_tmp / "kmsg",
    )
    return {"config": config, "hardware": True, "state_dir": short_tmp / "state"}


def test_hardware_of_a_device_is_evaluated_by_host_rules(
    sysfs: PlainSysfs, hardware: Any, core_threads: CoreThreads
) -> None:
    monitor = monitor_of(**hardware)
    monitor.add(Device("pages", Hugepages("2Mi", pages=8)))
    with monitor:
        until(monitor, "pages", Health.HEALTHY)
        sysfs.resize(4)
        bad = until(monitor, "pages", Health.UNHEALTHY)
        assert codes(bad)[0].startswith("mem.hugepages")
        sysfs.resize(8)
        until(monitor, "pages", Health.HEALTHY)
        report = monitor.report
    assert report is not None
    assert {device.driver for device in report.devices} == {"", DRIVER}
    assert core_threads() == []


def test_without_hardware_the_host_is_unknown() -> None:
    monitor = monitor_of()
    monitor.add(Device("pages", Hugepages("2Mi", pages=8)))
    before = thread_names(os.getpid())
    with monitor:
        until(monitor, "pages", Health.UNKNOWN, "declared.unseen")
        new = {name for tid, name in thread_names(os.getpid()).items() if tid not in before}
    assert not {name for name in new if name.startswith("dh-") and name != "dh-core"}


# --- failure of the core thread ----------------------------------------------------------------------------


class BrokenClock:
    """A clock that can break."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def __call__(self) -> Instant:
        if self.broken:
            raise OSError(5, "the clock has failed")
        return Instant(time.monotonic_ns(), time.time())


def wait_until_failed(monitor: Monitor) -> None:
    eventually(lambda: monitor.failure is not None, "the core fails")


def test_failed_core_makes_every_device_unknown() -> None:
    errors: list[tuple[BaseException, str]] = []
    clock = BrokenClock()
    monitor = monitor_of(
        clock=clock, on_error=lambda error: errors.append((error, threading.current_thread().name))
    )
    monitor.add(Device("d-0"), Device("d-1"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, devices="d-0", name="well")(lambda _: None)
    with monitor:
        until(monitor, "d-0", Health.HEALTHY)
        clock.broken = True
        wait_until_failed(monitor)
        for name in ("d-0", "d-1"):
            found = until(monitor, name, Health.UNKNOWN, "agent.failed")
            assert found.message.startswith("agent.failed: OSError. Advice: ")
            assert found.causes[0].blame is Blame.AGENT
        monitor.require_healthy("d-0")
        monitor.add(Device("d-2"))
        until(monitor, "d-2", Health.UNKNOWN, "agent.failed")
        assert not monitor.is_up
        assert not monitor.wait_ready(0)
        eventually(lambda: bool(errors), "on_error is called")
    assert isinstance(monitor.failure, OSError)
    assert errors == [(monitor.failure, "dh-core")]


def test_logging_handler_that_raises_ends_no_check() -> None:
    fails = threading.Event()
    monitor = monitor_of()
    monitor.add(Device("d-0"))

    @monitor.check(every_s=0.1, timeout_s=PATIENCE_S)
    def link(_: Device) -> None:
        if fails.is_set():
            raise ValueError("no link")

    with broken_log_handler(), monitor:
        until(monitor, "d-0", Health.HEALTHY)
        fails.set()
        until(monitor, "d-0", Health.UNKNOWN, "check.link.unreadable")
        fails.clear()
        until(monitor, "d-0", Health.HEALTHY)
        assert monitor.failure is None


def test_logging_handler_that_raises_hides_no_failure() -> None:
    errors: list[BaseException] = []
    monitor = monitor_of(clock=BrokenClock(broken=True), on_error=errors.append)
    monitor.add(Device("d-0"))
    with broken_log_handler(), monitor:
        eventually(lambda: bool(errors), "on_error is called")
        assert errors == [monitor.failure]
        until(monitor, "d-0", Health.UNKNOWN, "agent.failed")


def test_core_that_fails_before_the_first_report_is_reported() -> None:
    monitor = monitor_of(clock=BrokenClock(broken=True))
    monitor.add(Device("d-0"))
    with monitor:
        assert not monitor.wait_ready(PATIENCE_S)
        assert until(monitor, "d-0", Health.UNKNOWN, "agent.failed").timeout_s == 30
        assert not monitor.wait_delivered([fault("d-0")], PATIENCE_S)


def test_monitor_without_a_free_descriptor_begins_later(
    hardware: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_thread, "START_RETRY_S", 0.01)
    monitor = monitor_of(**hardware)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        monitor.start()
        cause = "cannot begin: sampler: cannot be opened: Too many open files; 1 attempts failed"
        eventually(lambda: cause in caplog.text, "the cause is logged")
        assert monitor.report is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert monitor.wait_ready(PATIENCE_S)
    assert monitor.failure is None
    assert monitor.stop(PATIENCE_S)


def test_monitor_whose_threads_start_late_opens_its_sources_once(
    hardware: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_thread, "START_RETRY_S", 0.01)
    start, refused = MachineWatch.start, iter([True] * 5)

    def refuse(watch: MachineWatch) -> None:
        if next(refused, False):
            raise ProbeError("machine thread: cannot be started: Resource temporarily unavailable")
        start(watch)

    monkeypatch.setattr(MachineWatch, "start", refuse)
    before, others = len(descriptors()), thread_names(os.getpid())
    monitor = monitor_of(**hardware)
    monitor.start()
    assert monitor.wait_ready(PATIENCE_S)
    new = [name for tid, name in thread_names(os.getpid()).items() if tid not in others]
    assert new.count("dh-sampler") == 1
    assert monitor.stop(PATIENCE_S)
    eventually(lambda: len(descriptors()) <= before, "no descriptor is left")


def test_stop_of_a_monitor_that_cannot_begin_returns_at_once(
    hardware: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_thread, "START_RETRY_S", 10 * PATIENCE_S)

    def refuse(_: MachineWatch) -> None:
        raise ProbeError("machine thread: cannot be started: Resource temporarily unavailable")

    monkeypatch.setattr(MachineWatch, "start", refuse)
    monitor = monitor_of(**hardware)
    monitor.start()
    eventually(lambda: "dh-core: cannot begin: machine thread" in caplog.text, "the cause is logged")
    assert monitor.stop(PATIENCE_S)


def test_exception_of_on_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def raises(error: BaseException) -> None:
        raise SystemExit(1)

    with monitor_of(clock=BrokenClock(broken=True), on_error=raises) as monitor:
        wait_until_failed(monitor)
        eventually(
            lambda: any("on_error raised" in record.getMessage() for record in caplog.records), "it is logged"
        )


# --- embedding programs ------------------------------------------------------------------------------------


def process_state() -> dict[str, object]:
    """Return process state that a monitor must not change."""
    root = logging.getLogger()
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": wakeup_fd(),
        "logging": (root.level, list(root.handlers), logging.getLogger("agent").level),
        "policy": event_loop_policy(),
        "switch interval": sys.getswitchinterval(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "asyncgen hooks": sys.get_asyncgen_hooks(),
        "umask, directory": (umask(), os.getcwd()),
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }


def umask() -> str:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "Umask" in line)
    return line


def wakeup_fd() -> int:
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def test_process_state_is_unchanged(hardware: Any) -> None:
    before = process_state()
    with monitor_of(**hardware) as monitor:
        assert monitor.wait_ready(PATIENCE_S)
        within = process_state()
    assert within == before
    assert process_state() == before


def test_two_monitors_are_independent(hardware: Any) -> None:
    first, other = (
        monitor_of(**hardware),
        Monitor("other.example.com", config=CONFIG, hardware=False, state_dir=None),
    )
    for monitor in (first, other):
        monitor.add(Device("d-0"))
        monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="well")(lambda _: None)
    with first, other:
        until(first, "d-0", Health.HEALTHY)
        eventually(lambda: other.report is not None and len(other.report.devices) == 1, "one device")
        assert first.health_of(ref("d-0")._replace(driver="other.example.com")) is None
        assert other.health_of(ref("d-0")) is None
        first.stop()
        assert other.is_up


def test_blocked_asyncio_loop_does_not_delay_verdicts() -> None:
    async def program() -> bool:
        monitor = monitor_of()
        monitor.add(Device("d-0"))
        monitor.check(every_s=0.1, timeout_s=PATIENCE_S, raise_after=2, name="bad")(lambda _: BAD)
        async with monitor:
            until(monitor, "d-0", Health.UNHEALTHY)  # blocks the loop
        return monitor.is_up

    assert asyncio.run(program()) is False


async def test_blocked_trio_loop_does_not_delay_verdicts() -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, raise_after=2, name="bad")(lambda _: BAD)
    async with monitor:
        until(monitor, "d-0", Health.UNHEALTHY)  # blocks the loop
    assert not monitor.is_up


async def test_cancelled_program_still_stops_the_monitor(core_threads: CoreThreads) -> None:
    monitor = monitor_of()
    with trio.CancelScope() as scope:
        async with monitor:
            scope.cancel()
            await trio.sleep_forever()
    assert not core_threads()


# --- the end -----------------------------------------------------------------------------------------------


def test_stopped_monitor_cannot_be_started_again(core_threads: CoreThreads) -> None:
    monitor = monitor_of()
    monitor.start()
    assert monitor.wait_ready(PATIENCE_S)
    assert monitor.stop(PATIENCE_S)
    assert monitor.stop(PATIENCE_S)
    assert not core_threads()
    with pytest.raises(RuntimeError, match="started only once"):
        monitor.start()
    monitor.add(Device("d-0"))
    monitor.recheck()
    monitor.report_faults([fault("d-0")])


def test_stop_before_start_is_final() -> None:
    monitor = monitor_of()
    assert monitor.stop(PATIENCE_S)
    with pytest.raises(RuntimeError, match="started only once"):
        monitor.start()


def test_hung_check_is_abandoned_and_logged(
    gate: threading.Event, caplog: pytest.LogCaptureFixture, core_threads: CoreThreads
) -> None:
    monitor = monitor_of()
    monitor.add(Device("d-0"))
    monitor.check(every_s=0.1, timeout_s=0.1, raise_after=1, name="hangs")(lambda _: gate.wait())
    with monitor:
        until(monitor, "d-0", Health.UNKNOWN, "check.hangs.unreadable")
        assert not monitor.stop()
    assert not core_threads()
    assert (
        "shutdown: health check hangs of device d-0 did not stop in time; abandoning its thread"
        in caplog.text
    )


def test_hung_core_is_not_up_and_is_abandoned(
    gate: threading.Event, caplog: pytest.LogCaptureFixture, core_threads: CoreThreads
) -> None:
    monitor = monitor_of(config=Config(node_name=NODE, heartbeat_s=0.5, lease_s=3))
    monitor.add(Device("d-0"))
    blocks, hangs = threading.Event(), threading.Event()

    @monitor.check(every_s=0.1, timeout_s=PATIENCE_S)
    async def check(_: Device) -> None:
        if blocks.is_set():
            hangs.set()
            gate.wait()  # what no async function may do

    monitor.start()
    until(monitor, "d-0", Health.HEALTHY)
    eventually(lambda: monitor.is_up, "the report is younger than a lease")
    blocks.set()
    assert hangs.wait(PATIENCE_S)
    eventually(lambda: not monitor.is_up, "the report is older than a lease")
    assert not monitor.stop(0.1)
    assert "shutdown: core thread did not stop in time; abandoning its thread" in caplog.text
    gate.set()
    eventually(lambda: not core_threads(), "it ends when it can")


def test_subscriber_starts_with_the_newest_report() -> None:
    with monitor_of(config=Config(node_name=NODE, lease_s=180, heartbeat_s=60)) as monitor:
        assert monitor.wait_ready(PATIENCE_S)
        latest = monitor.subscribe()
        assert latest.peek() == (1, monitor.report)
        monitor.add(Device("d-0"))
        eventually(lambda: latest.peek()[0] > 1, "the next")
        monitor.unsubscribe(latest)
        monitor.unsubscribe(latest)
    assert monitor.subscribe().peek() == (1, monitor.report)


def test_stop_in_the_core_thread_is_rejected() -> None:
    raised: list[BaseException] = []
    monitor = monitor_of()
    monitor.add(Device("d-0"))

    @monitor.check(every_s=0.1, timeout_s=PATIENCE_S)
    async def ends(_: Device) -> None:
        try:
            monitor.stop()
        except RuntimeError as error:
            raised.append(error)

    with monitor:
        until(monitor, "d-0", Health.HEALTHY)
    assert str(raised[0]).endswith("stop() was called in its core thread; use another thread")


def test_stop_closes_all_descriptors(hardware: Any) -> None:
    before = descriptors()
    for _ in range(2):
        with monitor_of(**hardware) as monitor:
            assert monitor.wait_ready(PATIENCE_S)
    eventually(lambda: descriptors() <= before, lambda: f"open: {descriptors() - before}")


def test_state_is_saved_in_the_drivers_directory() -> None:
    assert default_state_dir(KUBELET_DIR, DRIVER) == Path(
        "/var/lib/kubelet/plugins/demo.example.com/drahealth"
    )

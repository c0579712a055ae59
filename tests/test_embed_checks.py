"""A driver's own checks: valid answers, scheduling, and hung calls that delay no other."""

import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
import trio
from no_threads import no_threads
from patience import PATIENCE_S

from agent.driver.check_results import ADVICE_BYTES, EVIDENCE_BYTES
from agent.driver.merged_snapshot_source import HostAndDriverSource, UnmonitoredHostSource
from agent.embed.checks import (
    MAX_THREADS,
    DriverCheckScheduler,
    HealthCheck,
    HealthCheckFunction,
    default_check_name,
    degraded,
    result_from_answer,
    result_from_error,
    unhealthy,
    unknown,
)
from agent.embed.devices import Device
from agent.engine.step import initial_state, step
from agent.errors import ConfigError
from agent.model.declared_devices import DriverCheckSample
from agent.model.health import Finding, Health, Repair, Severity
from agent.model.settings import EngineSettings
from agent.system.threads.trio_calls import call_in_thread
from agent.system.timing import read_clocks

DRIVER: Final = "demo.example.com"
BAD: Final = unhealthy("demo.bad", "1 of 2")


def check_of(function: HealthCheckFunction = lambda _: None, **changes: Any) -> HealthCheck:
    """Return a check that is fast, unless the changes make it slow."""
    given: dict[str, Any] = {
        "name": "link",
        "function": function,
        "every_s": 0.1,
        "timeout_s": PATIENCE_S,
        "devices": ("*",),
        "raise_after": 1,
        "clear_after": 1,
    }
    return HealthCheck(**(given | changes))


# --- results of checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, True])
def test_none_and_true_mean_no_fault(answer: object) -> None:
    assert result_from_answer(answer) == (None, "", None)


@pytest.mark.parametrize(
    ("make", "severity"),
    [
        (unhealthy, Severity.UNHEALTHY),
        (degraded, Severity.DEGRADED),
        (unknown, Severity.UNKNOWN),
    ],
)
def test_finding_is_returned_unchanged(make: Callable[..., Finding], severity: Severity) -> None:
    finding = make("demo.link_down", "0 of 4 lanes", "reseat the card")
    assert finding == Finding("demo.link_down", severity, "0 of 4 lanes", "reseat the card")
    assert result_from_answer(finding) == (finding, "", None)
    assert make("demo.link_down", "0 of 4 lanes", repair=Repair.RESET_DEVICE).repair is Repair.RESET_DEVICE


def test_finding_with_a_text_as_repair_is_rejected() -> None:
    with pytest.raises(TypeError, match="repair is 'reboot', not one of none, restart-workload, "):
        unhealthy("demo.link_down", "0 of 4 lanes", repair="reboot")  # type: ignore[arg-type]


class Silent:
    """Object whose repr raises."""

    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (False, "answered False, not None, True or a result of unhealthy(), degraded() or unknown()"),
        ("ok", "answered a str, not None, True or a result of unhealthy(), degraded() or unknown()"),
        (0, "answered a int, not None, True or a result of unhealthy(), degraded() or unknown()"),
        (Silent(), "answered a Silent, not None, True or a result of unhealthy(), degraded() or unknown()"),
        (
            Finding("demo.bad", Severity.OK, "x"),
            "answered a Finding, not None, True or a result of unhealthy(), degraded() or unknown()",
        ),
        (
            Finding("demo", Severity.UNHEALTHY, "x"),
            "ValueError: finding code 'demo' is not a dotted code, such as fpga.bank_locked",
        ),
    ],
)
def test_any_other_answer_is_no_result(answer: object, text: str) -> None:
    seen = result_from_answer(answer)
    assert (seen.finding, seen.unread) == (None, text)


def test_unawaited_coroutine_is_no_result() -> None:
    async def late(_: Device) -> None:
        return None

    assert result_from_answer(late(Device("d-0"))).unread.startswith("answered a coroutine")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyError("two\nlines"), r"KeyError: 'two\nlines'"),
        (
            RuntimeError("<Bank object at 0x7f3a5c001d90> after 1.25s"),
            "RuntimeError: <Bank object> after <duration>",
        ),
    ],
)
def test_exception_gives_a_stable_text(error: BaseException, text: str) -> None:
    assert result_from_error(error) == (None, text, error)


def test_exception_without_text_is_named_by_its_type() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert result_from_error(Broken()).unread == "Broken"
    assert len(result_from_error(ValueError("x" * 10_000)).unread) <= 200


@pytest.mark.parametrize(
    ("code", "evidence", "text"),
    [
        ("Demo.Bad", "x", "finding code 'Demo.Bad' is not a dotted code, such as fpga.bank_locked"),
        ("demo", "x", "finding code 'demo' is not a dotted code"),
        ("demo." + "x" * 100, "x", "code is 105 bytes, limit 100"),
    ],
)
def test_invalid_finding_is_rejected(code: str, evidence: str, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        unhealthy(code, evidence)


@pytest.mark.parametrize("make", [unhealthy, degraded, unknown])
@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ("0 of 4 lanes\n  link\tdown\x00", "0 of 4 lanes link down"),
        ("x" * EVIDENCE_BYTES, "x" * EVIDENCE_BYTES),
        ("ä" * EVIDENCE_BYTES, "ä" * ((EVIDENCE_BYTES - 3) // 2) + "..."),
        ("\u2028\udcff\n", "?"),
        ("\n", "the check gave no evidence"),
        ("x" * 1_000_000, "x" * (EVIDENCE_BYTES - 3) + "..."),
    ],
)
def test_unfit_evidence_is_cut_and_keeps_the_severity(
    make: Callable[..., Finding], evidence: str, expected: str
) -> None:
    finding = make("demo.bad", evidence, evidence)
    assert (finding.evidence, len(finding.advice.encode()) <= ADVICE_BYTES) == (expected, True)
    raw = Finding("demo.bad", finding.severity, evidence, evidence)
    assert result_from_answer(raw) == (finding, "", None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "Link"}, "check 'Link': the name is not a DNS label of at most 63 bytes"),
        ({"name": "<lambda>"}, "check '<lambda>': the name is not a DNS label"),
        ({"every_s": 0.05}, "check 'link': every_s: 50ms is below the limit of 100ms"),
        ({"every_s": 3601}, "check 'link': every_s: 3601s is over the limit of 1h"),
        ({"every_s": float("nan")}, "check 'link': every_s: "),
        ({"every_s": "1s"}, "check 'link': every_s: '1s' is not a number of seconds"),
        ({"timeout_s": 0}, "check 'link': timeout_s: 0s is below the limit of 10ms"),
        ({"timeout_s": 4000}, "check 'link': timeout_s: 4000s is over the limit of 1h"),
        ({"raise_after": 0}, "check 'link': raise_after: 0 is below the limit of 1"),
        ({"clear_after": 1001}, "check 'link': clear_after: 1001 is over the limit of 1000"),
        ({"clear_after": True}, "check 'link': clear_after: True is not a whole number"),
        ({"devices": ()}, r"check 'link': devices: \(\) is not a pattern of device names"),
        ({"function": 3}, "check 'link': 3 is not callable"),
    ],
)
def test_invalid_check_is_rejected_with_the_limit(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_of(**changes)


def test_check_is_named_after_its_function() -> None:
    def _link_up(_: Device) -> None: ...

    assert default_check_name(_link_up) == "link-up"
    assert default_check_name(functools.partial(functools.partial(_link_up))) == "link-up"


def test_async_functions_are_detected() -> None:
    async def plain_async(_: Device) -> None: ...

    class Object:
        async def __call__(self, _: Device) -> None: ...

    for function in (plain_async, functools.partial(plain_async), Object()):
        assert check_of(function).is_async
    for other in (lambda _: None, functools.partial(print)):
        assert not check_of(other).is_async


# --- the rounds --------------------------------------------------------------------------------------------


class RunningChecks:
    """Health checks that run on some devices, and the samples that the core reads."""

    def __init__(self, source: HostAndDriverSource, rounds: DriverCheckScheduler) -> None:
        self.source = source
        self.rounds = rounds

    def checks(self) -> dict[str, DriverCheckSample]:
        """Return the samples of one check, by device name."""
        snapshot = self.source.read()
        assert snapshot is not None
        return {check.subject.rpartition("/")[2]: check for check in snapshot.checks}

    async def until(
        self, condition: Callable[[dict[str, DriverCheckSample]], object]
    ) -> dict[str, DriverCheckSample]:
        """Wait until the samples satisfy a condition; they are read once per wake of the core."""
        with trio.fail_after(PATIENCE_S):
            while not condition(found := self.checks()):
                await trio.lowlevel.wait_readable(self.source.fileno())
                self.source.clear()
        return found


@asynccontextmanager
async def run_checks(
    *checks: HealthCheck, devices: Sequence[str] = ("d-0",), jitter: float = 1.0
) -> AsyncIterator[RunningChecks]:
    host, source = UnmonitoredHostSource(), HostAndDriverSource(DRIVER)
    source.open(host)
    rounds = DriverCheckScheduler(DRIVER, "node-a", source, jitter=lambda: jitter)
    rounds.add_devices(*map(Device, devices))
    for check in checks:
        rounds.add_check(check)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.run)
        yield RunningChecks(source, rounds)
        nursery.cancel_scope.cancel()
    source.close()
    host.close()


async def test_check_has_no_passes_before_its_first_result(gate: threading.Event) -> None:
    async with run_checks(check_of(lambda _: gate.wait(), timeout_s=5)) as found:
        sample = found.checks()["d-0"]
        assert (sample.check, sample.subject) == ("link", f"{DRIVER}/node-a/d-0")
        assert (sample.passes, sample.finding, sample.no_result_reason) == (0, None, "")
        assert (sample.raise_after, sample.clear_after) == (1, 1)
        assert sample.period_ns == 5_000_000_000, "its deadline, which is longer than its period"
        gate.set()


async def test_plain_checks_run_in_threads_and_async_checks_in_the_loop() -> None:
    seen: dict[str, tuple[Device, threading.Thread]] = {}

    def plain(device: Device) -> None:
        seen["plain"] = device, threading.current_thread()

    async def in_loop(device: Device) -> None:
        await trio.lowlevel.checkpoint()
        seen["async"] = device, threading.current_thread()

    async with run_checks(check_of(plain), check_of(in_loop, name="other")) as found:
        await found.until(lambda _: len(seen) == 2)
    assert {device for device, _ in seen.values()} == {Device("d-0")}
    assert seen["async"][1] is threading.current_thread()
    assert seen["plain"][1] is not threading.current_thread()


async def test_finding_appears_and_disappears() -> None:
    answers: list[object] = [None, BAD, True]

    def check(_: Device) -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async with run_checks(check_of(check)) as found:
        await found.until(lambda checks: checks["d-0"].finding == BAD)
        good = await found.until(lambda checks: checks["d-0"].finding is None)
    assert good["d-0"].passes >= 3
    assert good["d-0"].no_result_reason == ""


def raise_error(_: Device) -> None:
    raise OSError(5, "Input/output error")


def exit_all(_: Device) -> None:
    raise SystemExit(1)


async def raise_in_loop(_: Device) -> None:
    raise OSError(5, "Input/output error")


async def exit_in_loop(_: Device) -> None:
    raise SystemExit(1)


async def raise_in_nursery(_: Device) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        raise SystemExit(1)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (raise_error, "OSError: [Errno 5] Input/output error"),
        (exit_all, "SystemExit: 1"),
        (raise_in_loop, "OSError: [Errno 5] Input/output error"),
        (exit_in_loop, "SystemExit: 1"),
        (raise_in_nursery, "SystemExit: 1"),
    ],
)
async def test_raising_check_has_no_result_and_harms_no_other(check: HealthCheckFunction, text: str) -> None:
    async with run_checks(check_of(check)) as found:
        seen = await found.until(lambda checks: checks["d-0"].passes >= 1)
        found.rounds.run_now()
        again = await found.until(lambda checks: checks["d-0"].passes >= 2)
    assert seen["d-0"].finding is None
    assert seen["d-0"].no_result_reason.startswith(text)
    assert again["d-0"].no_result_reason == seen["d-0"].no_result_reason


async def test_hung_check_is_not_called_again_but_its_periods_count(gate: threading.Event) -> None:
    calls: list[Device] = []
    called = threading.Event()

    def hang(device: Device) -> None:
        calls.append(device)
        called.set()
        gate.wait()

    async with run_checks(check_of(hang, timeout_s=0.05, raise_after=3)) as found:
        silent = await found.until(lambda checks: checks["d-0"].passes >= 3)
        assert silent["d-0"].no_result_reason == "no answer within 0.05 s"
        assert called.wait(PATIENCE_S), "the thread may begin late"
        assert calls == [Device("d-0")]
        gate.set()
        await found.until(lambda checks: not checks["d-0"].no_result_reason)
        assert len(calls) > 1


async def test_check_whose_thread_begins_late_is_not_called_again(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Device] = []

    async def call_late(function: Callable[[], object], name: str) -> object:
        return await call_in_thread(lambda: gate.wait() and function(), name)

    monkeypatch.setattr("agent.embed.checks.call_in_thread", call_late)
    async with run_checks(check_of(calls.append, timeout_s=0.05, raise_after=3)) as found:
        silent = await found.until(lambda checks: checks["d-0"].passes >= 3)
        assert silent["d-0"].no_result_reason == "no answer within 0.05 s"
        assert found.rounds.hung_calls(0) == ["health check link of device d-0"]
    gate.set()
    assert found.rounds.hung_calls(PATIENCE_S) == []
    assert calls == [Device("d-0")]


async def test_hung_device_delays_no_other(gate: threading.Event) -> None:
    hung = [f"hung-{number}" for number in range(MAX_THREADS + 4)]
    hangs = check_of(lambda _: gate.wait(), every_s=3600, timeout_s=0.2, devices=("hung-*",))
    other = check_of(name="other", every_s=3600, devices=("d-0",))
    async with run_checks(hangs, other, devices=[*hung, "d-0"]) as found:
        seen = await found.until(lambda checks: all(check.passes for check in checks.values()))
    assert seen.pop("d-0").no_result_reason == ""
    assert {sample.no_result_reason for sample in seen.values()} == {"no answer within 0.2 s"}


async def test_plain_checks_run_up_to_the_thread_limit() -> None:
    lock, running, most = threading.Lock(), 0, 0
    full = threading.Event()

    def check(_: Device) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == MAX_THREADS:
                full.set()
        full.wait(PATIENCE_S)
        with lock:
            running -= 1

    devices = [f"d-{number}" for number in range(3 * MAX_THREADS)]
    async with run_checks(check_of(check, every_s=3600, timeout_s=60), devices=devices) as found:
        await found.until(lambda checks: all(check.passes for check in checks.values()))
    assert most == MAX_THREADS


async def test_check_without_a_thread_for_a_period_has_no_result(gate: threading.Event) -> None:
    devices = [f"d-{number}" for number in range(MAX_THREADS + 1)]
    async with run_checks(check_of(lambda _: gate.wait(), timeout_s=60), devices=devices) as found:
        seen = await found.until(lambda checks: any(check.no_result_reason for check in checks.values()))
        gate.set()
    assert {sample.no_result_reason for sample in seen.values()} == {
        "",
        "no free thread within 0.1 s: 16 health checks are running",
    }


async def test_check_whose_thread_is_refused_has_no_result_until_the_next_run() -> None:
    async with run_checks(check_of(lambda _: None)) as found:
        await found.until(lambda checks: checks["d-0"].passes >= 1)
        with no_threads():
            seen = await found.until(lambda checks: bool(checks["d-0"].no_result_reason))
        assert seen["d-0"].no_result_reason == "can't start new thread: dh-driver-check"
        await found.until(lambda checks: not checks["d-0"].no_result_reason)


async def test_hung_async_check_is_cancelled_at_its_deadline() -> None:
    cancelled = trio.Event()

    async def hang(_: Device) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with run_checks(check_of(hang, timeout_s=0.05)) as found:
        seen = await found.until(lambda checks: checks["d-0"].passes >= 1)
        with trio.fail_after(PATIENCE_S):
            await cancelled.wait()
    assert seen["d-0"].no_result_reason == "no answer within 0.05 s"


async def test_uncancellable_async_check_delays_no_other() -> None:
    release = trio.Event()
    calls = 0

    async def hang(_: Device) -> None:
        nonlocal calls
        calls += 1
        with trio.CancelScope(shield=True):
            await release.wait()

    async def answer(_: Device) -> None:
        await trio.lowlevel.checkpoint()

    hangs = check_of(hang, timeout_s=0.05, raise_after=3, devices=("d-0",))
    other = check_of(answer, name="other", devices=("d-1",))
    async with run_checks(hangs, other, devices=["d-0", "d-1"]) as found:
        seen = await found.until(lambda checks: checks["d-0"].passes >= 3 and checks["d-1"].passes)
        assert calls == 1
        release.set()
    assert seen["d-0"].no_result_reason == "no answer within 0.05 s"
    assert seen["d-1"].no_result_reason == ""


async def test_only_counted_results_wake_the_core() -> None:
    calls, begun = 0, trio.Event()

    async def check(_: Device) -> Finding:
        nonlocal calls
        calls += 1
        if calls == 6:
            begun.set()
        await trio.lowlevel.checkpoint()
        return BAD

    async with run_checks(check_of(check, raise_after=3, clear_after=2)) as found:
        for passes in (1, 2, 3):
            woken = await found.until(lambda checks, last=passes - 1: checks["d-0"].passes > last)
            assert woken["d-0"].passes == passes
        found.source.clear()
        with trio.fail_after(PATIENCE_S):
            await begun.wait()
        assert found.checks()["d-0"].passes == 5
        with trio.move_on_after(0) as nothing:
            await trio.lowlevel.wait_readable(found.source.fileno())
        assert nothing.cancelled_caught


async def test_runs_between_two_evaluations_are_counted_by_their_results() -> None:
    """The engine reads the samples of the first and the third run only."""
    calls, is_read = 0, trio.Event()

    async def check(_: Device) -> Finding | None:
        nonlocal calls
        calls += 1
        if calls == 2:
            await is_read.wait()
        if calls > 3:
            await trio.sleep_forever()
        return None if calls == 2 else BAD

    state = initial_state(EngineSettings("node-a"))
    async with run_checks(check_of(check, raise_after=2)) as found:
        for passes in (1, 3):
            await found.until(lambda checks, last=passes: checks["d-0"].passes == last)
            assert found.source.newest is not None
            state, report = step(state, found.source.newest, read_clocks())
            assert [device.health for device in report.devices] == [Health.HEALTHY]
            is_read.set()


async def test_equal_runs_leave_out_runs_without_result() -> None:
    answers = [BAD, BAD, ValueError("no answer"), BAD, None, unhealthy("demo.other", "2 of 2"), None]
    samples: list[DriverCheckSample] = []

    def check(_: Device) -> Finding | None:
        answer = answers[min(len(samples), len(answers) - 1)]
        if isinstance(answer, ValueError):
            raise answer
        return answer

    async with run_checks(check_of(check)) as found:
        store = found.source.update_check_sample

        def record(sample: DriverCheckSample, *, wake: bool) -> None:
            samples.append(sample)
            store(sample, wake=True)

        found.source.update_check_sample = record  # type: ignore[method-assign]
        await found.until(lambda checks: checks["d-0"].passes >= len(answers))
    assert [sample.equal_passes for sample in samples][: len(answers)] == [1, 2, 1, 3, 1, 1, 1]


async def test_requested_check_runs_now_and_wakes_the_core() -> None:
    calls: list[str] = []

    def check(device: Device) -> None:
        calls.append(device.name)

    other = check_of(lambda _: None, name="other", every_s=3600, devices=("x-*",))
    async with run_checks(check_of(check, every_s=3600), other, devices=["d-0", "d-1"]) as found:
        await found.until(lambda checks: all(check.passes == 1 for check in checks.values()))
        found.rounds.run_now("link")
        await found.until(lambda checks: all(check.passes == 2 for check in checks.values()))
        with pytest.raises(ConfigError, match="check 'lnik' does not exist; did you mean 'link'"):
            found.rounds.run_now("lnik")
    assert sorted(calls) == ["d-0", "d-0", "d-1", "d-1"]


async def test_patterns_also_match_devices_added_later() -> None:
    async with run_checks(check_of(devices=("gpu-*", "nic-0")), devices=["gpu-0", "disk-0"]) as found:
        assert set(found.checks()) == {"gpu-0"}
        found.rounds.add_devices(Device("gpu-1"), Device("nic-0"), Device("nic-1"))
        assert set(found.checks()) == {"gpu-0", "gpu-1", "nic-0"}
        await found.until(lambda checks: all(check.passes for check in checks.values()))


async def test_removed_device_is_not_checked_any_more() -> None:
    async with run_checks(check_of(lambda _: BAD), devices=["d-0", "d-1"]) as found:
        await found.until(lambda checks: all(check.passes for check in checks.values()))
        found.rounds.remove_devices("d-0")
        assert set(found.checks()) == {"d-1"}
        found.rounds.add_devices(Device("d-0"))
        assert found.checks()["d-0"].passes == 0  # nothing is known of it
        await found.until(lambda checks: checks["d-0"].passes)


async def test_readded_device_is_not_called_twice_while_its_call_hangs(
    gate: threading.Event,
) -> None:
    calls: list[Device] = []
    called = threading.Event()

    def hang(device: Device) -> None:
        calls.append(device)
        called.set()
        gate.wait()

    async with run_checks(check_of(hang, timeout_s=0.05)) as found:
        await found.until(lambda checks: checks["d-0"].no_result_reason)
        found.rounds.remove_devices("d-0")
        found.rounds.add_devices(Device("d-0"))
        await found.until(lambda checks: checks["d-0"].no_result_reason)
        assert called.wait(PATIENCE_S), "the thread may begin late"
        assert len(calls) == 1


async def test_calls_of_removed_devices_are_forgotten_after_their_end(gate: threading.Event) -> None:
    def hang(device: Device) -> None:
        gate.wait()

    async with run_checks(check_of(hang, timeout_s=0.05)) as found:
        for number in range(3):
            await found.until(lambda checks: any(check.no_result_reason for check in checks.values()))
            found.rounds.remove_devices(f"d-{number}")
            found.rounds.add_devices(Device(f"d-{number + 1}"))
        await found.until(lambda checks: checks["d-3"].no_result_reason)
        assert len(found.rounds._calls) == 4
        gate.set()
        await found.until(lambda checks: not checks["d-3"].no_result_reason)
        with trio.fail_after(PATIENCE_S):
            while found.rounds.hung_calls(0):  # noqa: ASYNC110  # a call that has not begun needs the loop
                await trio.sleep(0.01)
        found.rounds.remove_devices("d-3")
        found.rounds.add_devices(Device("d-4"))
        await found.until(lambda checks: checks["d-4"].passes)
        assert {device.name for _, device in found.rounds._calls} <= {"d-4"}


async def test_duplicate_devices_and_checks_are_rejected() -> None:
    async with run_checks(check_of()) as found:
        with pytest.raises(ConfigError, match="device 'd-0' exists already \\(in any pool\\)"):
            found.rounds.add_devices(Device("d-1"), Device("d-0"))
        with pytest.raises(ConfigError, match="device 'd-1' exists already"):
            found.rounds.add_devices(Device("d-1"), Device("d-1"))
        assert set(found.rounds.declared_devices) == {"d-0"}
        with pytest.raises(ConfigError, match="device 'd-2' does not exist"):
            found.rounds.remove_devices("d-0", "d-2")
        assert set(found.rounds.declared_devices) == {"d-0"}
        with pytest.raises(ConfigError, match="check 'link': the name is taken"):
            found.rounds.add_check(check_of())


async def test_missing_result_is_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def check(_: Device) -> None:
        if broken:
            raise OSError(5, "Input/output error")

    with caplog.at_level(logging.DEBUG, logger="agent.embed.checks"):
        async with run_checks(check_of(check, raise_after=3)) as found:
            await found.until(lambda checks: checks["d-0"].passes >= 3)
            broken = False
            await found.until(lambda checks: not checks["d-0"].no_result_reason)
    text = "health check link of device d-0"
    records = [record for record in caplog.records if record.name == "agent.embed.checks"]
    assert [(record.levelname, record.getMessage()) for record in records] == [
        (
            "WARNING",
            f"{text}: no result: OSError: [Errno 5] Input/output error; it runs again after its period",
        ),
        ("DEBUG", f"{text}: no result; the exception follows"),
        ("INFO", f"{text}: has a result again, after runs without one"),
    ]
    assert records[1].exc_info is not None


async def test_hung_calls_are_named_at_shutdown(gate: threading.Event) -> None:
    async with run_checks(check_of(lambda _: gate.wait(), timeout_s=0.05)) as found:
        await found.until(lambda checks: checks["d-0"].no_result_reason)
    assert found.rounds.hung_calls(0) == ["health check link of device d-0"]
    gate.set()
    assert found.rounds.hung_calls(PATIENCE_S) == []

"""Steps of a row: actions, and expected results.

Devices are named in one string, ``"gpu-0 gpu-1"``; texts are the beginning of a message, which is a code.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Final

from agents import suspend_process

from scenarios.row import BLIND, BUSES, DEGRADED, INFO, OK, SICK, Step
from scenarios.stage import Stage

SOURCE_OK: Final = 1
SOURCE_FAILING: Final = 3
FAULTS: Final = "run/state/gpu-faults.json"


# --- actions ------------------------------------------------------------------------------------------------


def nvml(*commands: str) -> Step:
    """Send commands to the fake NVML."""
    return Step(f"nvml: {'; '.join(commands)}", lambda stage: stage.machine.fake.send(*commands))


def nvml_and_kernel(commands: Sequence[str], *lines: str) -> Step:
    """Let NVML and the kernel log report a fault of the same moment.

    The agent, but not NVML, is stopped meanwhile: a line that comes after an evaluation counts as later.
    """

    def play(stage: Stage) -> None:
        with suspend_process(stage.agent.pid):
            at_ns = time.monotonic_ns()
            stage.machine.fake.send(*commands)
            stage.machine.kernel(*lines, at_ns=at_ns)

    return Step(f"nvml: {'; '.join(commands)}; kernel: {'; '.join(lines)}", play)


def repeat_until(command: str, name: str, text: str) -> Step:
    """Send a command to the fake NVML until a device has this cause: its full set of events drops more."""

    def play(stage: Stage) -> None:
        def is_known() -> bool:
            stage.machine.fake.send(command)
            return stage.clients.has_cause(name, SICK, text)

        stage.clients.until(is_known, f"{name}: {text}", pause_s=0.5)

    return Step(f"nvml: {command}, until it is known", play)


def crash_process(command: str) -> Step:
    """End the process that calls NVML, as a broken library does. Its answer may be lost."""

    def play(stage: Stage) -> None:
        with contextlib.suppress(ValueError, OSError):
            stage.machine.fake.send(command)

    return Step(f"nvml: {command}", play)


def kernel(*lines: str, times: int = 1, priority: int = 4) -> Step:
    """Write lines to the kernel log; from priority 8 on, as a process."""
    text = "; ".join(lines) if len(lines) * times < 10 else f"{len(lines) * times} lines"
    return Step(f"kernel: {text}", lambda stage: stage.machine.kernel(*lines, times=times, priority=priority))


def xid_line(
    code: int, detail: str = "pid=1234, name=python3, Ch 00000008", gpu: int = 0, gi: str = ""
) -> str:
    """Return the kernel log line of an XID; ``gi`` is `` GPU-I:01`` for an instance."""
    return f"NVRM: Xid (PCI:{BUSES[gpu].removesuffix('.0')}{gi}): {code}, {detail}"


def bind_gpu(number: int, driver: str) -> Step:
    """Bind a GPU to another driver."""
    return Step(f"{driver} takes GPU {number}", lambda stage: stage.machine.bind(BUSES[number], driver))


def sysfs(path: str, text: str) -> Step:
    """Write a file of sysfs."""
    return Step(f"sysfs: {path} is {text!r}", lambda stage: stage.machine.sysfs.write(path, text))


def aer(kind: str, total: str, value: int) -> Step:
    """Set the kernel's count of PCIe errors of one kind on gpu-0."""
    return sysfs(f"bus/pci/devices/{BUSES[0]}/aer_dev_{kind}", f"TOTAL_ERR_{total} {value}")


def end_process(pid: int) -> Step:
    """Remove a process."""
    return Step(f"process {pid} ends", lambda stage: stage.machine.end_process(pid))


def install_library() -> Step:
    """Install the NVML library."""
    return Step("the library is installed", lambda stage: stage.machine.install())


def restart_agent(*setup: str, kill: bool = False, file: str | None = None) -> Step:
    """Restart the agent.

    Args:
        setup: Initial commands of the fake after the restart.
        kill: Kill the agent instead of stopping it.
        file: Content of the fault checkpoint after the restart.
    """

    def play(stage: Stage) -> None:
        stage.stop(kill=kill)
        stage.machine.scenario(*setup)
        if file is not None:
            (stage.directory / FAULTS).write_text(file)
        stage.start()

    return Step(f"the agent is {'killed' if kill else 'ended'} and started again", play)


def reboot_machine(*setup: str) -> Step:
    """Restart the agent with a reboot of the machine."""

    def play(stage: Stage) -> None:
        stage.stop()
        stage.machine.scenario(*setup)
        stage.machine.boot()
        stage.start()

    return Step("the machine is rebooted", play)


def stop_agent() -> Step:
    """Stop the agent with SIGTERM, expecting exit code 0, and print how long it took."""
    return Step("SIGTERM", lambda stage: stage.figure(f"ended {stage.stop():.2f} s after SIGTERM"))


# --- expected results ---------------------------------------------------------------------------------------


def _expect_first_cause(names: str, severity: int, word: str, text: str) -> Step:
    return Step(
        f"{names} {word}: {text}", lambda stage: stage.clients.see(names.split(), severity, text), True
    )


def unhealthy(names: str, text: str) -> Step:
    """Expect Unhealthy for the kubelet, with this first cause."""
    return _expect_first_cause(names, SICK, "unhealthy", text)


def unknown(names: str, text: str) -> Step:
    """Expect Unknown for the kubelet, with this first cause."""
    return _expect_first_cause(names, BLIND, "unknown", text)


def degraded(names: str, text: str) -> Step:
    """Expect Healthy for the kubelet, with this message."""
    return _expect_first_cause(names, DEGRADED, "degraded", text)


def info(names: str, text: str) -> Step:
    """Expect Healthy for the kubelet without a message, and this cause on ``agent.sock``."""
    return _expect_first_cause(names, INFO, "info", text)


def healthy(names: str) -> Step:
    """Expect no cause on either socket."""
    return _expect_first_cause(names, OK, "healthy", "")


def _expect_cause(names: str, severity: int, text: str, *, briefly: bool = False) -> Step:
    return Step(
        f"{names}, among others: {text}",
        lambda stage: stage.clients.know(names.split(), severity, text, briefly=briefly),
        True,
    )


def also_info(names: str, text: str) -> Step:
    """Expect an INFO cause on ``agent.sock``, among any others."""
    return _expect_cause(names, INFO, text)


def also_degraded(names: str, text: str) -> Step:
    """Expect a DEGRADED cause on ``agent.sock``, among any others."""
    return _expect_cause(names, DEGRADED, text)


def also_unknown(names: str, text: str) -> Step:
    """Expect an UNKNOWN cause on ``agent.sock`` since the last action, among any others; it may be over."""
    return _expect_cause(names, BLIND, text, briefly=True)


def also_unhealthy(names: str, text: str) -> Step:
    """Expect an UNHEALTHY cause on ``agent.sock``, among any others."""
    return _expect_cause(names, SICK, text)


def never(text: str) -> Step:
    """Expect that no device ever had a cause that begins with this text."""
    return Step(f"never: {text}", lambda stage: stage.clients.never(text), True)


def wait_for_passes(passes: int = 10, source: str = "gpu-0") -> Step:
    """Wait for further passes of a source, after which the effect of the last action is visible."""

    def play(stage: Stage) -> None:
        stage.clients.until(lambda: stage.clients.source(source) is not None, f"source {source}")
        begun = stage.clients.source(source).passes
        stage.clients.until(
            lambda: stage.clients.source(source).passes >= begun + passes, f"{passes} passes of {source}"
        )

    return Step(f"{passes} more passes of {source}", play, True)


def wait_for_rule(name: str, code: str) -> Step:
    """Wait until a rule has what it needs for a verdict on a device."""

    def play(stage: Stage) -> None:
        def is_evaluated() -> bool:
            skipped = (*stage.clients.report.not_applicable, *stage.clients.report.not_evaluated)
            return all((entry.device, entry.code) != (name, code) for entry in skipped)

        stage.clients.until(is_evaluated, f"rule {code} of {name}")

    return Step(f"{name} is evaluated by {code}", play, True)


def source(name: str, state: int) -> Step:
    """Expect a source in this state."""

    def play(stage: Stage) -> None:
        stage.clients.until(
            lambda: (found := stage.clients.source(name)) is not None and found.state == state,
            f"source {name} in state {state}",
        )

    return Step(f"source {name} in state {state}", play, True)


def expect_in_checkpoint(code: str, **facts: object) -> Step:
    """Expect a fault with these fields in the checkpoint file."""

    def has_it(stage: Stage) -> bool:
        path = stage.directory / FAULTS
        faults = json.loads(path.read_text())["faults"] if path.exists() else []
        return any(fault["code"] == code and facts.items() <= fault.items() for fault in faults)

    return Step(
        f"checkpoint: {code} {facts or ''}",
        lambda stage: stage.clients.until(lambda: has_it(stage), f"the checkpoint file has {code} {facts}"),
        True,
    )


def expect_log(text: str) -> Step:
    """Expect a text in the agent's log."""

    def play(stage: Stage) -> None:
        stage.agent.wait_for_log(text)

    return Step(f"logged: {text}", play, True)


def memory_grows_less_than(mib: float, *steps: Step) -> Step:
    """Play steps, and expect that the agent's memory grows by less than ``mib``."""

    def play(stage: Stage) -> None:
        before = stage.memory_mib()
        for step in steps:
            stage.perform(step)
        after = stage.memory_mib()
        stage.figure(f"resident memory {before:.1f} MiB, then {after:.1f} MiB")
        assert after - before < mib, f"memory grew from {before:.1f} to {after:.1f} MiB, limit {mib} more"

    return Step(f"memory grows by less than {mib:g} MiB", play)

"""What a row can say: things that are done, and things that must be seen.

Devices are named in one string, ``"gpu-0 gpu-1"``; texts are what a message begins with, code first.
"""

import json
from typing import Final

from scenarios.row import BLIND, BUSES, DEGRADED, INFO, OK, SICK, Step
from scenarios.stage import Stage

SOURCE_OK: Final = 1
SOURCE_FAILING: Final = 3
FAULTS: Final = "run/state/gpu-faults.json"


# --- done ---------------------------------------------------------------------------------------------------


def nvml(*commands: str) -> Step:
    """The fake is told."""
    return Step(f"nvml: {'; '.join(commands)}", lambda stage: stage.machine.fake.tell(*commands))


def kernel(*lines: str, times: int = 1, priority: int = 4) -> Step:
    """The kernel logs these lines, so many times; from priority 8 on a process wrote them."""
    text = "; ".join(lines) if len(lines) * times < 10 else f"{len(lines) * times} lines"
    return Step(f"kernel: {text}", lambda stage: stage.machine.kernel(*lines, times=times, priority=priority))


def xid_line(
    code: int, detail: str = "pid=1234, name=python3, Ch 00000008", gpu: int = 0, gi: str = ""
) -> str:
    """A line of the kernel log about an XID; ``gi`` is `` GPU-I:01`` where it names an instance."""
    return f"NVRM: Xid (PCI:{BUSES[gpu].removesuffix('.0')}{gi}): {code}, {detail}"


def bound(number: int, driver: str) -> Step:
    """Another driver takes a GPU."""
    return Step(f"{driver} takes GPU {number}", lambda stage: stage.machine.bind(BUSES[number], driver))


def sysfs(path: str, text: str) -> Step:
    """A file of sysfs has another text."""
    return Step(f"sysfs: {path} is {text!r}", lambda stage: stage.machine.sysfs.write(path, text))


def aer(kind: str, total: str, value: int) -> Step:
    """The kernel has counted so many PCIe errors of that kind on gpu-0."""
    return sysfs(f"bus/pci/devices/{BUSES[0]}/aer_dev_{kind}", f"TOTAL_ERR_{total} {value}")


def gone(pid: int) -> Step:
    """A process has ended."""
    return Step(f"process {pid} ends", lambda stage: stage.machine.end_process(pid))


def installed() -> Step:
    """The library appears."""
    return Step("the library is installed", lambda stage: stage.machine.install())


def restarted(*setup: str, kill: bool = False, file: str | None = None) -> Step:
    """The agent ends and another starts.

    Args:
        setup: What the fake begins with then.
        kill: It does not end by itself.
        file: What its file of faults holds then.
    """

    def play(stage: Stage) -> None:
        stage.stop(kill=kill)
        stage.machine.scenario(*setup)
        if file is not None:
            (stage.directory / FAULTS).write_text(file)
        stage.start()

    return Step(f"the agent is {'killed' if kill else 'ended'} and started again", play)


def rebooted(*setup: str) -> Step:
    """The same, and the machine was booted anew."""

    def play(stage: Stage) -> None:
        stage.stop()
        stage.machine.scenario(*setup)
        stage.machine.boot()
        stage.start()

    return Step("the machine is rebooted", play)


def ended() -> Step:
    """SIGTERM: it ends by itself, with exit code 0. How fast is told."""
    return Step("SIGTERM", lambda stage: stage.figure(f"ended {stage.stop():.2f} s after SIGTERM"))


# --- seen ---------------------------------------------------------------------------------------------------


def _seen(names: str, severity: int, word: str, text: str) -> Step:
    return Step(f"{names} {word}: {text}", lambda stage: stage.ears.see(names.split(), severity, text), True)


def unhealthy(names: str, text: str) -> Step:
    """Unhealthy for the kubelet, for this reason first."""
    return _seen(names, SICK, "unhealthy", text)


def unknown(names: str, text: str) -> Step:
    """Unknown for the kubelet, for this reason first."""
    return _seen(names, BLIND, "unknown", text)


def degraded(names: str, text: str) -> Step:
    """Healthy for the kubelet, with this message."""
    return _seen(names, DEGRADED, "degraded", text)


def info(names: str, text: str) -> Step:
    """Healthy for the kubelet, without a word; on ``agent.sock`` this is known."""
    return _seen(names, INFO, "info", text)


def healthy(names: str) -> Step:
    """Nothing is wrong, on either socket."""
    return _seen(names, OK, "healthy", "")


def _known(names: str, severity: int, text: str) -> Step:
    return Step(
        f"{names}, among others: {text}", lambda stage: stage.ears.know(names.split(), severity, text), True
    )


def also_info(names: str, text: str) -> Step:
    """Known on ``agent.sock``, beside whatever else there is."""
    return _known(names, INFO, text)


def also_degraded(names: str, text: str) -> Step:
    """The same, of something that is worse."""
    return _known(names, DEGRADED, text)


def also_unknown(names: str, text: str) -> Step:
    """The same, of what nobody can look at for several reasons."""
    return _known(names, BLIND, text)


def also_unhealthy(names: str, text: str) -> Step:
    """The same, of what is one of several reasons."""
    return _known(names, SICK, text)


def never(text: str) -> Step:
    """No device has ever had a cause that begins so."""
    return Step(f"never: {text}", lambda stage: stage.ears.never(text), True)


def looked(passes: int = 10, source: str = "gpu-0") -> Step:
    """So many more passes over a source: what had to come of the step before has come by then."""

    def play(stage: Stage) -> None:
        begun = stage.ears.source(source).passes
        stage.ears.until(
            lambda: stage.ears.source(source).passes >= begun + passes, f"{passes} passes of {source}"
        )

    return Step(f"{passes} more passes of {source}", play, True)


def source(name: str, state: int) -> Step:
    """A source says this of itself."""

    def play(stage: Stage) -> None:
        stage.ears.until(
            lambda: (found := stage.ears.source(name)) is not None and found.state == state,
            f"source {name} in state {state}",
        )

    return Step(f"source {name} in state {state}", play, True)


def kept(code: str, **facts: object) -> Step:
    """The file of faults has this fault, with these facts."""

    def has_it(stage: Stage) -> bool:
        path = stage.directory / FAULTS
        faults = json.loads(path.read_text())["faults"] if path.exists() else []
        return any(one["code"] == code and facts.items() <= one.items() for one in faults)

    return Step(
        f"kept: {code} {facts or ''}",
        lambda stage: stage.ears.until(lambda: has_it(stage), f"the file of faults has {code} {facts}"),
        True,
    )


def logged(text: str) -> Step:
    """The agent's own log has these words."""

    def play(stage: Stage) -> None:
        stage.agent.logs(text)

    return Step(f"logged: {text}", play, True)


def grown_less_than(mib: float, *steps: Step) -> Step:
    """These steps, through which the agent's memory grows by less than that."""

    def play(stage: Stage) -> None:
        before = stage.memory_mib()
        for step in steps:
            stage.perform(step)
        after = stage.memory_mib()
        stage.figure(f"resident memory {before:.1f} MiB, then {after:.1f} MiB")
        assert after - before < mib, f"memory grew from {before:.1f} to {after:.1f} MiB, limit {mib} more"

    return Step(f"memory grows by less than {mib:g} MiB", play)

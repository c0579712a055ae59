"""From tracks to verdicts: what the device of a GPU, or of an instance, is held to be, and what it is."""

from functools import lru_cache
from typing import Final

from agent.devices.inventory import Device, Kind
from agent.health.catalog import Row
from agent.health.gpu.common import is_opening
from agent.health.gpu.view import GpuView
from agent.health.gpu.views import GpuRuleState
from agent.model.faults import KnownGpu
from agent.model.gpu import GpuAttributes, GpuHost, GpuSet, MigSample, Status
from agent.model.health import Blame, Cause, Finding, Severity
from agent.model.time import NS, Instant

UNSEEN: Final = Row(
    code="gpu.unseen",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="gpu",
    threshold="no pass over the GPU has ended since the agent started",
    why="nobody has looked",
    advice="wait for the first pass; if it does not come, see the sources in drahealth status",
)
GONE: Final = Row(
    code="gpu.mig.gone",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="gpu",
    threshold="the instance was there, and was taken away less than 10 min ago",
    why="a pod that still claims it has lost its device",
    advice="delete pods that claim it; publish the GPU's new instances",
)


def answers(view: GpuView) -> bool:
    """Whether there are readings of now to be judged."""
    gpu = view.gpu
    if gpu is None or not gpu.passes or gpu.status != Status.OK:
        return False
    return not gpu.call or view.now_ns - gpu.call_ns < view.limits.deadline_s * NS


def unseen_of(view: GpuView, since: Instant) -> tuple[Cause, ...]:
    """A GPU that nobody has looked at: no finding, since none was made.

    One that NVML does not count is missing, and one that NVML does not tell of has no NVML: that is judged.
    """
    gpu = view.gpu
    if gpu.passes if gpu is not None else not is_opening(view.gpus):
        return ()
    evidence = "no pass over it has ended yet"
    return (Cause(UNSEEN.code, UNSEEN.severity, UNSEEN.blame, evidence, UNSEEN.advice, since),)


def gone_of(memory: GpuRuleState, device: Device) -> Finding | None:
    """An instance that is no longer there."""
    for mig, gone in memory.past[device.gpu].instances:
        if (mig.gi, mig.ci) == (device.gi, device.ci):
            return Finding(GONE.code, GONE.severity, "the MIG instance no longer exists") if gone else None
    return None


def attributes_of(
    memory: GpuRuleState, gpus: GpuSet | None, host: GpuHost, device: Device
) -> tuple[tuple[str, str], ...]:
    """What a device is, by name; what nobody knows is left out."""
    known = next(gpu for gpu in memory.roll if gpu.number == device.gpu)
    sample = memory.samples.get(device.gpu)
    found = next((one for one in host.inventory if known.uuid and one.uuid == known.uuid), None)
    found = found or GpuAttributes(known.uuid, known.bus)
    mig = None
    if device.kind is Kind.MIG:
        instances = (one.mig for one in memory.past[device.gpu].instances)
        mig = next(one for one in instances if (one.gi, one.ci) == (device.gi, device.ci))
    return _attributes(known, found, mig, sample.serial if sample else "", gpus.driver if gpus else "")


@lru_cache(1024)
def _attributes(
    known: KnownGpu, found: GpuAttributes, mig: MigSample | None, serial: str, driver: str
) -> tuple[tuple[str, str], ...]:
    own = {"uuid": known.uuid}
    if mig is not None:
        profile = dict(found.profiles).get(mig.uuid, "")
        own = {"uuid": mig.uuid, "profile": profile, "parentUUID": known.uuid}
    named = {
        **own,
        "pciBusId": known.bus,
        "product": found.product or known.name,
        "serial": found.serial or serial,
        "driver": found.driver or driver,
        "vbios": found.vbios,
        "architecture": found.architecture,
        "numaNode": "" if found.numa_node is None else str(found.numa_node),
    }
    return tuple((name, value) for name, value in named.items() if value)

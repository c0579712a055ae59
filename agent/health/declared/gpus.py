"""Which GPU a driver means, and what is wrong if there is none.

Once it is found, what is wrong with the GPU is wrong with the declared device; nothing is judged twice.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.devices.inventory import Device, gpu_device, mig_device
from agent.health.catalog import Rule
from agent.health.gpu.common import is_opening, library_error, nvml_name
from agent.health.rules import OK, RuleNotEvaluated, RuleResult
from agent.model.declared import DeclaredGpu
from agent.model.faults import KnownGpu
from agent.model.gpu import GpuSet
from agent.model.health import Blame, Finding, Severity

NO_LIBRARY: Final = (
    "see whether nvidia-smi answers; load NVIDIA's driver, or say with --nvml-library where its library is"
)


class DeclaredGpuView(NamedTuple):
    """A GPU that a driver declares, and those that there are."""

    what: DeclaredGpu
    found: KnownGpu | None
    instance: Device | None
    """The instance, if one is declared and is there."""
    gpus: GpuSet


def find_gpu(what: DeclaredGpu, roll: Iterable[KnownGpu]) -> KnownGpu | None:
    """The GPU that is meant: by UUID, an instance's too, else by address."""
    known = list(roll)
    if what.uuid:
        for gpu in known:
            if what.uuid == gpu.uuid or any(mig.uuid == what.uuid for mig in gpu.migs):
                return gpu
    return next((gpu for gpu in known if what.pci and gpu.bus == what.pci), None)


def is_instance(what: DeclaredGpu) -> bool:
    """Whether a part of a GPU is meant."""
    return what.gi >= 0 or what.uuid.startswith("MIG-")


def find_device(what: DeclaredGpu, gpu: KnownGpu | None) -> Device | None:
    """The host's device that is meant; None if there is none such."""
    if gpu is None or not is_instance(what):
        return gpu and gpu_device(gpu.number)
    for mig in gpu.migs:
        if mig.uuid == what.uuid or (mig.gi, mig.ci) == (what.gi, what.ci):
            return mig_device(gpu.number, mig.gi, mig.ci)
    return None


def missing(view: DeclaredGpuView) -> RuleResult:
    """The GPU, or the instance, that a driver declares is not there.

    Source: NVML's UUIDs and PCI addresses, and those that this node had before.
    """
    what, gpus = view.what, view.gpus
    if view.instance is not None:
        return OK
    if view.found is not None:
        name = what.uuid or f"{what.gi}/{what.ci}"
        evidence = f"{view.found.uuid or view.found.bus} has no instance {name}"
        return Finding("gpu.not_found", Severity.UNHEALTHY, evidence)
    if is_opening(gpus):
        return RuleNotEvaluated("NVML is being asked for its GPUs")
    name = " at ".join(filter(None, (what.uuid, what.pci)))
    if error := library_error(gpus):
        evidence = f"{name} cannot be looked for: NVML says {nvml_name(error)}"
        return Finding("gpu.not_found", Severity.UNKNOWN, evidence, NO_LIBRARY, Blame.DRIVER)
    return Finding("gpu.not_found", Severity.UNHEALTHY, f"no {name} among the {gpus.count} GPUs of NVML")


def mismatch(view: DeclaredGpuView) -> RuleResult:
    """UUID and PCI address of a declaration are those of two GPUs: one was moved, or replaced.

    Source: as above.
    """
    what, found = view.what, view.found
    if found is None or not (what.pci and what.uuid):
        return OK
    whole = found.uuid == what.uuid or any(mig.uuid == what.uuid for mig in found.migs)
    if whole and found.bus in ("", what.pci):
        return OK
    if whole:
        evidence = f"{what.uuid} is at {found.bus}, declared at {what.pci}"
    elif is_instance(what):
        return OK  # that its GPU has no such instance is said above
    else:
        evidence = f"{what.pci} is {found.uuid or 'a GPU without a UUID'}, declared as {what.uuid}"
    return Finding("gpu.mismatch", Severity.UNHEALTHY, evidence)


DECLARED_GPU_RULES: Final = (
    Rule(
        code="gpu.not_found",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="nvml",
        threshold="no GPU or instance with the declared UUID, or at the declared address",
        why="the driver publishes a device that this node does not have",
        advice="compare the declaration with nvidia-smi -L; let the driver declare anew",
        judge=missing,
        try_it="in devices.d, declare a GPU with a UUID that no GPU has",
    ),
    Rule(
        code="gpu.mismatch",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="nvml",
        threshold="declared UUID and declared address belong to different GPUs",
        why="a claim would be prepared with another GPU than the one that was allocated",
        advice="let the driver declare anew: a GPU was moved or replaced",
        judge=mismatch,
        try_it="in devices.d, declare a GPU with the PCI address of another",
    ),
)

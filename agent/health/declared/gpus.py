"""GPUs that drivers declare: the host GPU of a declaration, and the rules for the declaration itself.

A declared GPU has the causes of its host GPU; the rules of the host GPU do not run twice.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.devices.inventory import Device, gpu_device, mig_device
from agent.health.gpu.view import is_opening, library_error, nvml_name
from agent.health.rules import OK, Rule, RuleNotEvaluated, RuleResult
from agent.model.declared import DeclaredGpu
from agent.model.faults import KnownGpu
from agent.model.gpu import GpuSet
from agent.model.health import Blame, Finding, Severity

NO_LIBRARY_ADVICE: Final = (
    "run nvidia-smi; load the NVIDIA driver, or set the library's path with --nvml-library"
)


class DeclaredGpuView(NamedTuple):
    """Input of the rules for one GPU that a driver declares."""

    part: DeclaredGpu
    found: KnownGpu | None
    instance: Device | None
    """Host GPU or MIG instance that is declared; None: it does not exist."""
    gpus: GpuSet


def find_gpu(part: DeclaredGpu, registry: Iterable[KnownGpu]) -> KnownGpu | None:
    """Find the host GPU of a declaration by the UUID of GPU or MIG instance, else by PCI address.

    None: the host has no such GPU.
    """
    known = list(registry)
    if part.uuid:
        for gpu in known:
            if part.uuid == gpu.uuid or any(mig.uuid == part.uuid for mig in gpu.migs):
                return gpu
    return next((gpu for gpu in known if part.pci and gpu.bus == part.pci), None)


def is_instance(part: DeclaredGpu) -> bool:
    """Return whether the driver declares a MIG instance and not a whole GPU."""
    return part.gi >= 0 or part.uuid.startswith("MIG-")


def find_device(part: DeclaredGpu, gpu: KnownGpu | None) -> Device | None:
    """Return the host GPU or MIG instance of a declaration; None: it does not exist."""
    if gpu is None or not is_instance(part):
        return gpu and gpu_device(gpu.number)
    for mig in gpu.migs:
        if mig.uuid == part.uuid or (mig.gi, mig.ci) == (part.gi, part.ci):
            return mig_device(gpu.number, mig.gi, mig.ci)
    return None


def gpu_not_found(view: DeclaredGpuView) -> RuleResult:
    """The declared GPU or instance does not exist.

    Source: UUIDs and PCI addresses from NVML, and of GPUs that this node had before.
    """
    part, gpus = view.part, view.gpus
    if view.instance is not None:
        return OK
    if view.found is not None:
        name = part.uuid or f"{part.gi}/{part.ci}"
        evidence = f"{view.found.uuid or view.found.bus} has no instance {name}"
        return Finding("gpu.not_found", Severity.UNHEALTHY, evidence)
    if is_opening(gpus):
        return RuleNotEvaluated("NVML is being opened")
    name = " at ".join(filter(None, (part.uuid, part.pci)))
    if error := library_error(gpus):
        evidence = f"{name} cannot be checked: NVML returned {nvml_name(error)}"
        return Finding("gpu.not_found", Severity.UNKNOWN, evidence, NO_LIBRARY_ADVICE, Blame.DRIVER)
    return Finding("gpu.not_found", Severity.UNHEALTHY, f"{name} is not among the {gpus.count} GPUs of NVML")


def gpu_mismatch(view: DeclaredGpuView) -> RuleResult:
    """UUID and PCI address of a declaration belong to different GPUs.

    Source: UUIDs and PCI addresses from NVML.
    """
    part, found = view.part, view.found
    if found is None or not (part.pci and part.uuid):
        return OK
    whole = found.uuid == part.uuid or any(mig.uuid == part.uuid for mig in found.migs)
    if whole and found.bus in ("", part.pci):
        return OK
    if whole:
        evidence = f"{part.uuid} is at {found.bus}, declared at {part.pci}"
    elif is_instance(part):
        return OK  # gpu.not_found reports a missing instance
    else:
        evidence = f"{part.pci} is {found.uuid or 'a GPU without a UUID'}, declared as {part.uuid}"
    return Finding("gpu.mismatch", Severity.UNHEALTHY, evidence)


DECLARED_GPU_RULES: Final = (
    Rule(
        code="gpu.not_found",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="nvml",
        threshold="no GPU or instance with the declared UUID, or at the declared address",
        why="the driver publishes a device that this node does not have",
        advice="compare the declaration with nvidia-smi -L; let the driver declare the device again",
        evaluate=gpu_not_found,
        try_it="in devices.d, declare a GPU with a UUID that no GPU has",
    ),
    Rule(
        code="gpu.mismatch",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="nvml",
        threshold="declared UUID and declared address belong to different GPUs",
        why="a claim would be prepared with another GPU than the allocated one",
        advice="a GPU was moved or replaced; let the driver declare its devices again",
        evaluate=gpu_mismatch,
        try_it="in devices.d, declare a GPU with the PCI address of another",
    ),
)

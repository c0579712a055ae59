"""GPUs that drivers declare: search for the declared GPU among the host's, and rules for wrong declarations.

The rules for GPU readings are not run again: a declared GPU gets the causes of the host's GPU.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.devices.inventory import InventoryDevice, gpu_device, mig_device
from agent.health.gpu.rule_input import is_listing_gpus, nvml_code_text, nvml_library_error
from agent.health.rules import OK, Rule, RuleInconclusive, RuleResult
from agent.model.declared_devices import DeclaredGpuDevice
from agent.model.gpu import NvmlSample
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.persistent_faults import KnownGpu

NO_LIBRARY_ADVICE: Final = (
    "run nvidia-smi; load the NVIDIA driver, or set the library's path with --nvml-library"
)


class DeclaredGpuRuleInput(NamedTuple):
    """Input of the rules for one GPU that a driver declares."""

    declared: DeclaredGpuDevice
    host_gpu: KnownGpu | None
    """GPU of the host that is declared, or whose MIG instance is; None: not found."""
    host_device: InventoryDevice | None
    """Device of the host's GPU or MIG instance that is declared; None: not found."""
    gpu_set: NvmlSample


def find_host_gpu(declared: DeclaredGpuDevice, registry: Iterable[KnownGpu]) -> KnownGpu | None:
    """Return the host's GPU with the declared UUID (its own or a MIG instance's) or PCI address; or None."""
    known = list(registry)
    if declared.uuid:
        for gpu in known:
            if declared.uuid == gpu.uuid or any(mig.uuid == declared.uuid for mig in gpu.migs):
                return gpu
    return next((gpu for gpu in known if declared.pci and gpu.bus == declared.pci), None)


def is_mig_declaration(declared: DeclaredGpuDevice) -> bool:
    """Return whether the driver declares a MIG instance and not a whole GPU."""
    return declared.gi >= 0 or declared.uuid.startswith("MIG-")


def find_host_device(declared: DeclaredGpuDevice, gpu: KnownGpu | None) -> InventoryDevice | None:
    """Return the host's device that is declared, ``gpu`` or its MIG instance; None: not found."""
    if gpu is None or not is_mig_declaration(declared):
        return gpu and gpu_device(gpu.number)
    for mig in gpu.migs:
        if mig.uuid == declared.uuid or (mig.gi, mig.ci) == (declared.gi, declared.ci):
            return mig_device(gpu.number, mig.gi, mig.ci)
    return None


def evaluate_gpu_not_found(view: DeclaredGpuRuleInput) -> RuleResult:
    """The declared GPU or MIG instance does not exist.

    Source: UUIDs and PCI addresses from NVML, now and earlier.
    """
    declared, gpus = view.declared, view.gpu_set
    if view.host_device is not None:
        return OK
    if view.host_gpu is not None:
        name = declared.uuid or f"{declared.gi}/{declared.ci}"
        evidence = f"{view.host_gpu.uuid or view.host_gpu.bus} has no instance {name}"
        return Finding("gpu.not_found", Severity.UNHEALTHY, evidence)
    if is_listing_gpus(gpus):
        return RuleInconclusive("NVML is being opened")
    name = " at ".join(filter(None, (declared.uuid, declared.pci)))
    if error := nvml_library_error(gpus):
        evidence = f"{name} cannot be checked: NVML returned {nvml_code_text(error)}"
        return Finding(
            "gpu.not_found",
            Severity.UNKNOWN,
            evidence,
            NO_LIBRARY_ADVICE,
            Blame.DRIVER,
            repair=Repair.RELOAD_DRIVER,
        )
    return Finding("gpu.not_found", Severity.UNHEALTHY, f"{name} is not among the {gpus.count} GPUs of NVML")


def evaluate_gpu_mismatch(view: DeclaredGpuRuleInput) -> RuleResult:
    """UUID and PCI address of a declaration belong to different GPUs.

    Source: UUIDs and PCI addresses from NVML.
    """
    declared, found = view.declared, view.host_gpu
    if found is None or not (declared.pci and declared.uuid):
        return OK
    whole = found.uuid == declared.uuid or any(mig.uuid == declared.uuid for mig in found.migs)
    if whole and found.bus in ("", declared.pci):
        return OK
    if whole:
        evidence = f"{declared.uuid} is at {found.bus}, declared at {declared.pci}"
    elif is_mig_declaration(declared):
        return OK  # gpu.not_found reports a missing instance
    else:
        evidence = f"{declared.pci} is {found.uuid or 'a GPU without a UUID'}, declared as {declared.uuid}"
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
        repair=Repair.NONE,
        evaluate=evaluate_gpu_not_found,
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
        repair=Repair.NONE,
        evaluate=evaluate_gpu_mismatch,
        try_it="in devices.d, declare a GPU with the PCI address of another",
    ),
)

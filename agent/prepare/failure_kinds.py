"""Catalog of the kinds of prepare failures: class, scope, consequences and advice by code, ``gpu.xid.79``.

A code may occur in two classes: as a failure that may pass, and as one that has lasted. A code that ends in
``.*`` stands for all codes with this prefix. A code that is not listed uses the default of its class,
:data:`DEFAULT_KINDS`.

A kind of failure changes a device's health or adds a taint only if no claim can cause the failure: otherwise
one user's claim would take working devices from all users. A cgroup controller or a permission can be missing
for one claim alone, because of its parameters or its namespace, so these kinds leave the devices as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Final

from agent.health.gpu.xid.xid_table import xid_row
from agent.health.rules import XID_PREFIX
from agent.model.health import Effect, Health, Repair
from agent.model.prepare import ErrorClass, FaultTaint, Scope

FAMILY: Final = ".*"
CODE_BYTES: Final = 100
_CODE: Final = re.compile(r"[a-z0-9][a-z0-9_-]*(?:\.[a-z0-9][a-z0-9_-]*)*")


class RetryCondition(StrEnum):
    """Condition under which a retry of the prepare can help. The error text for the kubelet contains it."""

    LATER = "later"
    """A retry can help after some time."""
    AFTER_RELEASE = "after-release"
    """A retry can help after the current holder has released the resource."""
    AFTER_RESET = "after-reset"
    """A retry can help after the device was reset."""
    AFTER_REPAIR = "after-repair"
    """A retry can help after the device was repaired."""
    AFTER_FIX = "after-fix"
    """A retry can help after the node or the driver was fixed."""
    NEVER = "never"
    """No retry can help: this claim can never be prepared."""


NEGATIVE_CACHE_S: Final[Mapping[ErrorClass, int]] = {
    ErrorClass.UNKNOWN: 0,
    ErrorClass.TRANSIENT: 0,
    ErrorClass.BAD_CONFIG: 600,  # a driver that was updated meanwhile tries again
    ErrorClass.FAILED_DEVICE: 86_400,  # until the device's state changes, which ends the entry
    ErrorClass.PERMANENT: 60,  # the operator who fixes the node waits; the kubelet retries after 60 to 90 s
}
"""Time for which a failure is answered from the cache [s], by error class; 0: not cached."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Kind of prepare failure: its code, class, consequences and advice."""

    code: str
    """Dotted code of the failure; ``gpu.xid.*`` stands for all codes with this prefix."""
    error_class: ErrorClass
    scope: Scope
    retry: RetryCondition
    explanation: str
    advice: str
    health: Health | None = None
    """Health that the claim's devices get from the failure; None: unchanged."""
    taint: FaultTaint | None = None
    """Taint that the claim's devices get from the failure; None: no taint."""
    repair: Repair = Repair.NONE
    """Repair of the claim's devices; NONE: they need none, or it is not known."""
    cacheable: bool = True
    """False: each prepare calls the driver again, because only a new try shows that the cause is repaired."""

    @property
    def cached_s(self) -> int:
        """Time for which repeated prepares of the claim get this failure from the cache [s]; 0: the failure
        is not cached."""
        return NEGATIVE_CACHE_S[self.error_class] if self.cacheable else 0


def is_dotted_code(text: str) -> bool:
    """Return True if a text is a valid dotted code, such as ``fpga.bank_locked``."""
    return len(text) <= CODE_BYTES and _CODE.fullmatch(text) is not None


_C, _S, _R = ErrorClass, Scope, RetryCondition
_KEEP_AWAY: Final = FaultTaint(Effect.NO_SCHEDULE)


def _unknown(code: str, why: str, advice: str, scope: Scope = Scope.DRIVER) -> FailureKind:
    return FailureKind(code, _C.UNKNOWN, scope, _R.LATER, why, advice)


def _transient(
    code: str,
    scope: Scope,
    why: str,
    advice: str,
    retry: RetryCondition = RetryCondition.LATER,
    repair: Repair = Repair.NONE,
) -> FailureKind:
    return FailureKind(code, _C.TRANSIENT, scope, retry, why, advice, repair=repair)


def _bad_config(code: str, why: str, advice: str) -> FailureKind:
    return FailureKind(code, _C.BAD_CONFIG, _S.CLAIM, _R.NEVER, why, advice)


def _failed_device(
    code: str,
    why: str,
    advice: str,
    retry: RetryCondition = RetryCondition.AFTER_REPAIR,
    repair: Repair = Repair.INSPECT_HARDWARE,
) -> FailureKind:
    repair = Repair.RESET_DEVICE if retry is RetryCondition.AFTER_RESET else repair
    consequences = (Health.UNHEALTHY, _KEEP_AWAY, repair)
    return FailureKind(code, _C.FAILED_DEVICE, _S.DEVICE, retry, why, advice, *consequences)


def _permanent(
    code: str,
    scope: Scope,
    why: str,
    advice: str,
    health: Health | None = None,
    taint: FaultTaint | None = None,
    repair: Repair = Repair.NONE,
) -> FailureKind:
    return FailureKind(code, _C.PERMANENT, scope, _R.AFTER_FIX, why, advice, health, taint, repair)


_WAIT: Final = "wait: the kubelet retries"
_APP: Final = "check the program that ran on the GPU before; no fault of the GPU is known"
_RELOAD: Final = "drain the node and load the matching kernel module, or reboot"
_ONE_OF: Final = "wait: the health engine names the GPU after its next evaluation"
_INSTALL: Final = "mount the directory writable into the driver's container; the driver must run as root"


def _not_writable(code: str, scope: Scope, why: str) -> FailureKind:
    return FailureKind(code, _C.PERMANENT, scope, _R.AFTER_FIX, why, _INSTALL, cacheable=False)


_GPU: Final = (
    _failed_device("gpu.xid.*", "the NVIDIA driver reported a fault that makes the GPU unusable",
                   "see drahealth checks CODE for the repair"),
    *(_transient(f"gpu.xid.{code}", _S.CLAIM, "a program caused this fault, not the GPU", _APP,
                 repair=xid_row(code).repair)
      for code in (13, 31, 43, 45, 68)),
    _failed_device("gpu.lost", "the GPU does not answer on the PCI bus",
                   "reboot the node; if the GPU stays lost, replace it",
                   repair=Repair.REBOOT_NODE),
    _transient("gpu.lost", _S.NODE, "one of the claim's GPUs is lost; it is not known which", _ONE_OF),
    _failed_device("gpu.missing", "a GPU has disappeared from the node",
                   "reboot the node; if the GPU stays missing, replace it",
                   repair=Repair.REBOOT_NODE),
    _failed_device("gpu.ecc.uncorrectable", "GPU memory lost data",
                   "reset the GPU; if it recurs, replace the GPU", _R.AFTER_RESET),
    _failed_device("gpu.remap.pending", "a bad memory row is remapped at the next reset",
                   "drain and reset the GPU", _R.AFTER_RESET),
    _failed_device("gpu.remap.failure", "a bad memory row could not be remapped", "replace the GPU",
                   repair=Repair.REPLACE_HARDWARE),
    _failed_device("gpu.reset_required", "the GPU accepts no work until it is reset",
                   "drain and reset the GPU", _R.AFTER_RESET),
    _transient("gpu.reset_required", _S.NODE,
               "one of the claim's GPUs must be reset; it is not known which", _ONE_OF),
    _transient("gpu.not_found", _S.DEVICE,
               "NVML does not find the GPU: it is appearing, disappearing, or bound to another driver",
               "check whether nvidia-smi lists the GPU"),
    FailureKind("gpu.driver.mismatch", _C.TRANSIENT, _S.NODE, _R.AFTER_FIX,
        "NVIDIA's library and kernel module have different versions: no new process can use a GPU", _RELOAD,
        Health.UNKNOWN, _KEEP_AWAY, Repair.RELOAD_DRIVER),
    _permanent("gpu.driver.mismatch", _S.NODE,
               "NVIDIA's library and kernel module still differ after a reload", _RELOAD, Health.UNKNOWN,
               _KEEP_AWAY, Repair.RELOAD_DRIVER),
    FailureKind("gpu.driver.init", _C.TRANSIENT, _S.NODE, _R.AFTER_FIX,
        "NVML cannot be initialized: no GPU can be used",
        "check that nvidia-smi answers; search the kernel log for NVRM", Health.UNKNOWN, _KEEP_AWAY,
               Repair.RELOAD_DRIVER),
    _permanent("gpu.driver.init", _S.NODE, "NVML still cannot be initialized after the driver was reloaded",
               "check that nvidia-smi answers; search the kernel log for NVRM", Health.UNKNOWN, _KEEP_AWAY,
               Repair.RELOAD_DRIVER),
    _transient("gpu.busy", _S.DEVICE, "a process uses the GPU",
               "find the process with nvidia-smi and stop it", _R.AFTER_RELEASE),
    _transient("gpu.mig.reconfiguring", _S.DEVICE, "the GPU's MIG partitions are being changed", _WAIT),
    _transient("gpu.vfio.rebinding", _S.DEVICE, "the GPU is changing between its driver and vfio-pci", _WAIT),
    _bad_config("gpu.mig.profile_invalid", "the GPU has no such MIG profile",
                "request a profile that nvidia-smi mig -lgip lists"),
    _bad_config("gpu.sharing.out_of_range", "a GPU sharing parameter is out of range",
                "correct it in the claim"),
    _bad_config("gpu.partitions.too_many", "more partitions than the GPU supports",
                "request fewer partitions"),
    _unknown("gpu.nvml.*", "NVML returned an error that does not determine the cause",
             "try nvidia-smi; search the kernel log for NVRM", _S.DEVICE),
    _transient("gpu.nvml.*", _S.DEVICE, "NVML is temporarily unable to answer", _WAIT),
)  # fmt: skip

_DEVICE: Final = (
    _failed_device("pci.missing", "the PCI function is not on the bus",
                   "reboot the node; if it stays missing, reseat or replace the device",
                   repair=Repair.REBOOT_NODE),
    _failed_device("pci.config_ff", "the PCI function reads as all ones: it fell off the bus",
                   "reboot the node; if it recurs, replace the device",
                   repair=Repair.REBOOT_NODE),
    _transient("device.busy", _S.DEVICE, "a process holds the device",
               "find the process with fuser on the device node", _R.AFTER_RELEASE),
    _transient("device.gone", _S.DEVICE, "the device node is missing, or no device is behind it",
               "check whether the device is bound to its kernel driver"),
    _transient("device.io", _S.DEVICE, "reading or writing the device failed",
               "check the kernel log; for a broken device the driver should report a failed device"),
    _transient("device.timeout", _S.DEVICE, "the device did not answer in time", "check the kernel log"),
    _unknown("device.denied", "the kernel denies the driver access to the device",
             "check the device node's owner and the container's device permissions", _S.NODE),
    _failed_device("device.unhealthy", "the health engine reports the device Unhealthy",
                   "see drahealth watch for the cause"),
    _transient("device.unknown", _S.CLAIM, "the driver does not have the device yet, or no longer has it",
               "check whether the ResourceSlice lists the device"),
    _permanent("device.unknown", _S.CLAIM, "the claim's device is no longer in any ResourceSlice",
               "delete the pod and its claim, so that the scheduler allocates another device"),
)  # fmt: skip

_HOST: Final = (
    _failed_device("cpu.offline", "a CPU of the device is offline", "write 1 to its online file in sysfs",
                   repair=Repair.NONE),
    _failed_device("cpu.missing", "a CPU of the device does not exist", "declare CPUs that exist",
                   repair=Repair.NONE),
    _failed_device("cpu.machine_check", "the CPU reported an uncorrected error", "replace the CPU",
                   repair=Repair.REPLACE_HARDWARE),
    _failed_device("cpu.throttled.*", "the CPU is throttled because of its temperature", "check the cooling"),
    _transient("cpu.overlap", _S.NODE, "another claim still holds the CPUs",
               "wait for the other pod to end", _R.AFTER_RELEASE),
    _permanent("cpu.overlap", _S.NODE, "a deleted claim still holds the CPUs",
               "drain the node and clear the driver's state"),
    _transient("cgroup.rejected", _S.NODE,
               "the kernel rejected a cgroup value, such as CPUs that the parent lacks",
               "compare the value with the parent cgroup's", _R.AFTER_RELEASE),
    _transient("cgroup.gone", _S.CLAIM, "the cgroup is gone: its pod has ended", _WAIT),
    _unknown("cgroup.denied", "the driver has no permission to write cgroups",
             "mount them writable into its container", _S.NODE),
    _bad_config("cpu.opaque_cpuset.invalid", "the requested CPUs are empty, reserved, too many or missing",
                "request CPUs that the device has"),
    _transient("mem.hugepages.insufficient", _S.NODE, "too few free hugepages",
               "free hugepages of the NUMA node", _R.AFTER_RELEASE),
    _failed_device("mem.hugepages.pool_shrunk", "the hugepage pool is smaller than published",
                   "write the number back to nr_hugepages and read it",
                   repair=Repair.NONE),
    _bad_config("mem.hugepages.size_unsupported", "the node has no hugepages of the requested size",
                "request the page size of the device, or none"),
    _permanent("cgroup.controller_missing", _S.NODE,
               "a cgroup controller is disabled in the kernel or its command line", "enable the controller"),
    _permanent("cgroup.version_unsupported", _S.NODE, "the node has the wrong cgroup version",
               "use another node"),
    _failed_device("mem.numa.offline", "the NUMA node's memory is offline",
                   "find out what took it offline; bring it online",
                   repair=Repair.NONE),
    _failed_device("mem.ecc.uncorrectable", "memory lost data", "replace the memory module",
                   repair=Repair.REPLACE_HARDWARE),
    _failed_device("mem.poisoned", "the kernel offlined bad memory pages",
                   "reboot; if it recurs, replace the memory module",
                   repair=Repair.REPLACE_HARDWARE),
)  # fmt: skip

_CDI: Final = (
    _transient("cdi.write", _S.NODE, "the CDI file could not be written", "free space in the CDI directory"),
    _not_writable("cdi.write", _S.NODE, "the CDI directory is not writable"),
    _transient("cdi.dir_missing", _S.NODE, "the CDI directory does not exist",
               "create it, or mount it into the driver's container"),
    _transient("cdi.malformed", _S.DRIVER, "an existing CDI file cannot be parsed", "remove the file"),
)  # fmt: skip

_CLAIM: Final = (
    _bad_config("config.decode", "the parameters cannot be decoded", "correct what the message names"),
    _bad_config("config.conflict", "parameters contradict each other", "leave one of them out"),
    _bad_config("config.source_not_allowed",
                "these parameters are not allowed in claims, or not in classes",
                "move them to where the driver reads them"),
    _transient("claim.unallocated", _S.CLAIM, "the claim has no allocation", _WAIT),
    _transient("claim.uid_mismatch", _S.CLAIM, "another claim has this name now", _WAIT),
    _transient("claim.not_reserved", _S.CLAIM, "the claim is not reserved or was not made for the pod",
               "check the claim's status.reservedFor, and whether the scheduler placed the pod"),
    _transient("claim.no_result_for_driver", _S.CLAIM, "the claim has no device of this driver", _WAIT),
    _transient("claim.not_found", _S.CLAIM, "the claim is gone", _WAIT),
    _transient("claim.malformed", _S.DRIVER, "the claim cannot be parsed, in a part that Kubernetes wrote",
               "update the driver"),
)  # fmt: skip

_API: Final = (
    _transient("api.timeout", _S.DRIVER, "the API server did not answer in time", _WAIT),
    _transient("api.unreachable", _S.DRIVER, "the API server is unreachable", "check the node's network"),
    _transient("api.conflict", _S.DRIVER, "the object was changed meanwhile", _WAIT),
    _transient("api.429", _S.DRIVER, "the API server limits the request rate", _WAIT),
    _transient("api.5xx", _S.DRIVER, "the API server has an internal error", "check the control plane"),
    _transient("api.unauthorized", _S.DRIVER,
               "the API server rejects the driver's token: it is expired or not valid yet",
               "check the driver's service account"),
    _permanent("api.forbidden", _S.DRIVER, "the API server denies the driver this request",
               "grant the role to the driver's service account"),
    _permanent("api.invalid", _S.DRIVER, "the API server rejected an object of the driver",
               "update the driver"),
    _unknown("api.refused", "the API server returned an error that does not determine the cause",
             "update the driver"),
    _transient("http.unavailable", _S.DRIVER, "a server that the driver called is temporarily unavailable",
               _WAIT),
    _unknown("http.refused", "a server that the driver called refused the request", "see the driver's log"),
    _transient("grpc.unavailable", _S.DRIVER, "a service that the driver called is temporarily unavailable",
               _WAIT),
    _unknown("grpc.failed", "a service that the driver called failed", "see that service's log"),
)  # fmt: skip

_DRIVER: Final = (
    _unknown("request.*", "the request names a claim incorrectly: a field is empty, too long or wrong",
             "find which process other than the kubelet calls the driver's socket"),
    _transient("kubelet.not_registered", _S.DRIVER, "the kubelet has not registered the driver yet",
               "check whether the driver's pod runs on the node"),
    _transient("kubelet.gate_off", _S.NODE, "the claim skips calls of the driver, which the kubelet refuses",
               "turn on the kubelet's feature gate that the error names", _R.AFTER_FIX),
    _transient("deadline", _S.CLAIM, "the prepare did not finish in time", _WAIT),
    _transient("lock.timeout", _S.DRIVER, "a lock was held for too long", _WAIT, _R.AFTER_RELEASE),
    _transient("driver.shutting_down", _S.DRIVER, "the driver is shutting down", "wait for its restart"),
    _transient("driver.cancelled", _S.CLAIM, "the driver cancelled the prepare", _WAIT),
    _transient("state.write", _S.DRIVER, "the driver's state could not be saved",
               "free space in its directory"),
    _not_writable("state.write", _S.DRIVER, "the driver's state directory is not writable"),
    _permanent("state.checkpoint_corrupt", _S.DRIVER, "the driver's saved state is corrupt",
               "drain the node, move the file away and restart the driver", Health.UNKNOWN),
    _permanent("state.version_newer", _S.DRIVER, "a newer version of the driver wrote its state",
               "run that version, or drain the node and move the file away", Health.UNKNOWN),
    FailureKind("backend.unreachable", _C.UNKNOWN, _S.DRIVER, _R.LATER, "the health backend does not answer",
        "check whether drahealth runs", Health.UNKNOWN),
    _transient("os.*", _S.NODE, "a system call failed temporarily", "check the node for exhausted resources"),
    _unknown("os.*", "a system call failed during an unknown operation", "see the driver's log"),
    _transient("text.*", _S.CLAIM, "the error text indicates a temporary failure", _WAIT),
    _unknown("driver.bug.*", "a bug in the driver: it raised a programming error",
             "report it to the driver's maintainers, with the log"),
    _unknown("driver.decode", "input of unknown origin could not be decoded",
             "report it to the driver's maintainers, with the log"),
    _unknown("driver.exception.*", "an unclassified exception", "see the driver's log"),
)  # fmt: skip

DEFAULT_KINDS: Final[Mapping[ErrorClass, FailureKind]] = {
    row.error_class: row
    for row in (
        _unknown("driver.error", "the driver reported an error without a class", "see the driver's log",
                 _S.CLAIM),
        _transient("driver.transient", _S.CLAIM, "the driver reported a temporary failure", _WAIT),
        _bad_config("config.invalid", "the request can never be satisfied", "correct what the message names"),
        _failed_device("driver.failed_device", "the driver reported a broken device", "check the device"),
        _permanent("driver.permanent", _S.NODE, "the driver reported a permanent failure",
                   "see the driver's log"),
    )
}  # fmt: skip
"""Kind of failure by error class, for codes that the catalog does not list."""

FAILURE_KINDS: Final = (*_GPU, *_DEVICE, *_HOST, *_CDI, *_CLAIM, *_API, *_DRIVER, *DEFAULT_KINDS.values())
"""All kinds of failures; each code occurs at most once per class."""

_ROWS: Final = {(row.code, row.error_class): row for row in FAILURE_KINDS}
USER_CODES: Final = frozenset(row.code for row in FAILURE_KINDS if row.error_class is ErrorClass.BAD_CONFIG)
"""Codes of failures that follow from what the user wrote: never the fault of a device or of the node."""


@cache
def failure_kind(code: str, error_class: ErrorClass) -> FailureKind:
    """Return the catalog's kind of failure for a code and an error class.

    If the code is not listed, the result is the kind of the longest listed prefix, else the default of the
    class.
    """
    parts = code.split(".")
    names = [code, *(".".join(parts[:count]) + FAMILY for count in range(len(parts) - 1, 0, -1))]
    found = (_ROWS.get((name, error_class)) for name in names)
    kind = next((row for row in found if row is not None), DEFAULT_KINDS[error_class])
    number = code.removeprefix(XID_PREFIX)
    if kind.code == f"{XID_PREFIX}*" and number.isascii() and number.isdecimal():
        return replace(kind, repair=xid_row(int(number)).repair)
    return kind

"""Every kind of failure, as one table: its class, how far it reaches, what follows, whether trying helps.

Owns the rows and how one is found. What evidence leads to which row stands in agent.prepare.codes; what is
said of a claim is put together by agent.prepare.classify.

A code may have a row for each of several classes: the same thing that passes by itself, and that is shown to
stay. A code that ends in ``.*`` stands for its family. What a driver or the health engine names and no row
has is handled like its class's last row, :data:`DEFAULTS`.

Not here, because they are no failures: a CDI file that a reboot took away (every prepare writes its own
anew), and what leaves a device Healthy with a message.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

from agent.model.health import Health
from agent.model.prepare import ErrorClass, Remediation, Scope
from agent.model.taint import Effect

FAMILY: Final = ".*"
CODE_BYTES: Final = 100
_CODE: Final = re.compile(r"[a-z0-9][a-z0-9_-]*(?:\.[a-z0-9][a-z0-9_-]*)*")


class Retry(StrEnum):
    """When trying again can help, in one word for the kubelet's text."""

    LATER = "later"
    """By itself, in a while."""
    AFTER_RELEASE = "after-release"
    """When whoever holds it lets go of it."""
    AFTER_RESET = "after-reset"
    """When the device was reset."""
    AFTER_REPAIR = "after-repair"
    """When the device was mended."""
    AFTER_FIX = "after-fix"
    """When the node or the driver was mended."""
    NEVER = "never"
    """Not with this claim."""


NEGATIVE_CACHE_S: Final[Mapping[ErrorClass, int]] = {
    ErrorClass.UNKNOWN: 0,
    ErrorClass.TRANSIENT: 0,
    ErrorClass.BAD_CONFIG: 600,  # a driver that was changed meanwhile gets its chance
    ErrorClass.FAILED_DEVICE: 86_400,  # until what is known of the device changes, which is noticed
    ErrorClass.PERMANENT: 60,  # somebody mends the node, and waits; the kubelet comes again after 60 to 90 s
}
"""For how long the same question may get the same answer without trying [s]."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of failure."""

    code: str
    """Dotted; ``gpu.xid.*`` is a family."""
    error_class: ErrorClass
    scope: Scope
    retry: Retry
    why: str
    advice: str
    health: Health | None = None
    """What follows for the devices; None: nothing."""
    taint: Remediation | None = None

    @property
    def sticky_s(self) -> int:
        """For how long the same question may get the same answer without trying [s]."""
        return NEGATIVE_CACHE_S[self.error_class]


def is_code(text: str) -> bool:
    """It is a stable dotted code, such as ``fpga.bank_locked``."""
    return len(text) <= CODE_BYTES and _CODE.fullmatch(text) is not None


_C, _S, _R = ErrorClass, Scope, Retry
_KEEP_AWAY: Final = Remediation(Effect.NO_SCHEDULE)


def _unknown(code: str, why: str, advice: str, scope: Scope = Scope.DRIVER) -> Row:
    return Row(code, _C.UNKNOWN, scope, _R.LATER, why, advice)


def _passes(code: str, scope: Scope, why: str, advice: str, retry: Retry = Retry.LATER) -> Row:
    return Row(code, _C.TRANSIENT, scope, retry, why, advice)


def _users(code: str, why: str, advice: str) -> Row:
    return Row(code, _C.BAD_CONFIG, _S.CLAIM, _R.NEVER, why, advice)


def _broken(code: str, why: str, advice: str, retry: Retry = Retry.AFTER_REPAIR) -> Row:
    return Row(code, _C.FAILED_DEVICE, _S.DEVICE, retry, why, advice, Health.UNHEALTHY, _KEEP_AWAY)


def _stays(
    code: str,
    scope: Scope,
    why: str,
    advice: str,
    health: Health | None = None,
    taint: Remediation | None = None,
) -> Row:
    return Row(code, _C.PERMANENT, scope, _R.AFTER_FIX, why, advice, health, taint)


_WAIT: Final = "wait: the kubelet tries again"
_APP: Final = "look at the program that ran on the GPU before; nothing is known to be wrong with the GPU"
_RELOAD: Final = "drain the node and load the driver's kernel module that fits, or reboot"
_ONE_OF: Final = "wait a moment: the health engine names the GPU when it has looked"
_INSTALL: Final = (
    "mount the directory writable into the driver's container; the driver's own user must be root"
)

_GPU: Final = (
    _broken("gpu.xid.*", "the GPU's driver reported a fault that leaves it unusable",
            "drahealth checks with the code says what mends it"),
    *(_passes(f"gpu.xid.{code}", _S.CLAIM, "a fault of a program, not of the GPU", _APP)
      for code in (13, 31, 43, 45, 68)),
    _broken("gpu.lost", "the GPU does not answer on its bus any more",
            "reboot the node; if it stays lost, replace the GPU"),
    _passes("gpu.lost", _S.NODE, "a GPU is lost, and nothing says which of the claim's", _ONE_OF),
    _broken("gpu.missing", "a GPU that was there is gone",
            "reboot the node; if it stays away, replace the GPU"),
    _broken("gpu.ecc.uncorrectable", "memory of the GPU lost data", "reset the GPU; if it recurs, replace it",
            _R.AFTER_RESET),
    _broken("gpu.remap.pending", "a bad row of memory is replaced at the next reset",
            "drain and reset the GPU", _R.AFTER_RESET),
    _broken("gpu.remap.failure", "a bad row of memory could not be replaced", "replace the GPU"),
    _broken("gpu.reset_required", "the GPU refuses work until it is reset", "drain and reset the GPU",
            _R.AFTER_RESET),
    _passes("gpu.reset_required", _S.NODE, "a GPU must be reset, and nothing says which of the claim's",
            _ONE_OF),
    _passes("gpu.not_found", _S.DEVICE,
            "NVML does not find the GPU: it comes, goes, or is somebody else's now",
            "see whether nvidia-smi lists the GPU"),
    Row("gpu.driver.mismatch", _C.TRANSIENT, _S.NODE, _R.AFTER_FIX,
        "NVIDIA's library and kernel module are of different releases: nothing new can use a GPU", _RELOAD,
        Health.UNKNOWN, _KEEP_AWAY),
    _stays("gpu.driver.mismatch", _S.NODE,
           "library and kernel module still differ after the driver was reloaded", _RELOAD, Health.UNKNOWN,
           _KEEP_AWAY),
    Row("gpu.driver.init", _C.TRANSIENT, _S.NODE, _R.AFTER_FIX, "NVML cannot be used: no GPU can",
        "see whether nvidia-smi answers, and what the kernel log says of NVRM", Health.UNKNOWN, _KEEP_AWAY),
    _stays("gpu.driver.init", _S.NODE, "NVML still cannot be used after the driver was reloaded",
           "see whether nvidia-smi answers, and what the kernel log says of NVRM", Health.UNKNOWN,
           _KEEP_AWAY),
    _passes("gpu.busy", _S.DEVICE, "somebody uses the GPU", "see with nvidia-smi who does, and end it",
            _R.AFTER_RELEASE),
    _passes("gpu.mig.reconfiguring", _S.DEVICE, "the GPU is being partitioned anew", _WAIT),
    _passes("gpu.vfio.rebinding", _S.DEVICE, "the GPU is changing between its driver and vfio-pci", _WAIT),
    _users("gpu.mig.profile_invalid", "the GPU has no such MIG profile",
           "ask for one that nvidia-smi mig -lgip lists"),
    _users("gpu.sharing.out_of_range", "a parameter of sharing is out of its range",
           "correct it in the claim"),
    _users("gpu.partitions.too_many", "more partitions than the GPU can have", "ask for fewer"),
    _unknown("gpu.nvml.*", "NVML refused, with a code that shows nothing of the kind",
             "ask nvidia-smi the same; see what the kernel log says of NVRM", _S.DEVICE),
    _passes("gpu.nvml.*", _S.DEVICE, "NVML could not just now", _WAIT),
)  # fmt: skip

_DEVICE: Final = (
    _broken("pci.missing", "the function is not on the bus any more", "reseat or replace the device"),
    _broken("pci.config_ff", "the function answers with ones only: it fell off the bus",
            "reboot the node; if it stays so, replace the device"),
    _passes("device.busy", _S.DEVICE, "somebody holds the device", "find who does, with fuser on its node",
            _R.AFTER_RELEASE),
    _passes("device.gone", _S.DEVICE, "the device's node is not there, or nothing is behind it",
            "see whether the device is bound to its driver"),
    _passes("device.io", _S.DEVICE, "the kernel could not read or write the device",
            "look at the kernel log; if it is the device, the driver should raise FailedDevice"),
    _passes("device.timeout", _S.DEVICE, "the device did not answer in time", "look at the kernel log"),
    _unknown("device.denied", "the kernel does not let the driver use the device",
             "see the node's owner, and whether the driver's container may use it", _S.NODE),
    _broken("device.unhealthy", "the health engine holds the device Unhealthy", "drahealth watch says why"),
    _passes("device.unknown", _S.CLAIM, "the driver does not have the device yet, or not any more",
            "see whether the ResourceSlice still lists it"),
    _stays("device.unknown", _S.CLAIM, "the claim was given a device that no ResourceSlice has any more",
           "delete the pod and its claim, so that it is given another device"),
)  # fmt: skip

_HOST: Final = (
    _broken("cpu.offline", "a CPU of the device was taken offline", "write 1 to its online file in sysfs"),
    _broken("cpu.missing", "a CPU of the device is not in the machine", "declare the CPUs that are there"),
    _broken("cpu.machine_check", "the CPU reported an error that it could not correct", "replace the CPU"),
    _broken("cpu.throttled.*", "the CPU is too hot to run as it should", "see to the cooling"),
    _passes("cpu.overlap", _S.NODE, "another claim has the CPUs, and was not unprepared yet",
            "wait for the other pod to end", _R.AFTER_RELEASE),
    _stays("cpu.overlap", _S.NODE, "another claim that nobody has any more holds the CPUs",
           "drain the node and clear the driver's state"),
    _passes("cgroup.rejected", _S.NODE,
            "the kernel refused a cgroup's value, such as CPUs that its parent lacks",
            "compare the value with the parent cgroup's", _R.AFTER_RELEASE),
    _passes("cgroup.gone", _S.CLAIM, "the cgroup vanished: its pod has ended", _WAIT),
    _unknown("cgroup.denied", "the driver may not write cgroups", "mount them writable into its container",
             _S.NODE),
    _users("cpu.opaque_cpuset.invalid",
           "the CPUs that were asked for are empty, reserved, too many or not there",
           "ask for CPUs that the device has"),
    _passes("mem.hugepages.insufficient", _S.NODE, "somebody else holds the pages",
            "free hugepages of the NUMA node", _R.AFTER_RELEASE),
    _broken("mem.hugepages.pool_shrunk", "the pool is smaller than what was published",
            "write the number back to nr_hugepages and read it"),
    _stays("mem.hugepages.size_unsupported", _S.NODE, "the kernel has no pages of that size",
           "use another node, or boot with hugepagesz=", Health.UNKNOWN, _KEEP_AWAY),
    _stays("cgroup.controller_missing", _S.NODE, "the kernel or its boot line leaves a cgroup controller out",
           "enable the controller", Health.UNKNOWN, _KEEP_AWAY),
    _stays("cgroup.version_unsupported", _S.NODE, "it takes the other version of cgroups", "use another node",
           Health.UNKNOWN, _KEEP_AWAY),
    _broken("mem.numa.offline", "the NUMA node's memory is offline",
            "see what took it offline, and bring it back"),
    _broken("mem.ecc.uncorrectable", "memory lost data", "replace the memory module"),
    _broken("mem.poisoned", "the kernel took bad pages out of use",
            "reboot; if it recurs, replace the module"),
)  # fmt: skip

_CDI: Final = (
    _passes("cdi.write", _S.NODE, "the CDI file could not be written just now",
            "free space where CDI files are"),
    _stays("cdi.write", _S.NODE, "CDI files cannot be written here", _INSTALL),
    _passes("cdi.dir_missing", _S.NODE, "the directory of CDI files is not there",
            "make it, or mount it into the driver's container"),
    _passes("cdi.malformed", _S.DRIVER, "a CDI file that is there cannot be understood", "remove the file"),
)  # fmt: skip

_CLAIM: Final = (
    _users("config.decode", "the parameters cannot be understood", "correct what the message names"),
    _users("config.conflict", "parameters contradict each other", "leave one of them out"),
    _users("config.source_not_allowed", "such parameters are not for claims, or not for classes",
           "put them where the driver takes them from"),
    _passes("claim.unallocated", _S.CLAIM, "the claim has no device yet, or not any more", _WAIT),
    _passes("claim.uid_mismatch", _S.CLAIM, "another claim has the name now", _WAIT),
    _passes("claim.no_result_for_driver", _S.CLAIM, "none of the claim's devices is this driver's", _WAIT),
    _passes("claim.not_found", _S.CLAIM, "the claim is gone", _WAIT),
    _passes("claim.malformed", _S.DRIVER,
            "the claim cannot be understood, though no user wrote that part of it", "update the driver"),
)  # fmt: skip

_API: Final = (
    _passes("api.timeout", _S.DRIVER, "the API server did not answer in time", _WAIT),
    _passes("api.unreachable", _S.DRIVER, "there is no connection to the API server",
            "see the node's network"),
    _passes("api.conflict", _S.DRIVER, "somebody changed the object meanwhile", _WAIT),
    _passes("api.429", _S.DRIVER, "the API server is asked too much", _WAIT),
    _passes("api.5xx", _S.DRIVER, "the API server is in trouble", "see the control plane"),
    _passes("api.unauthorized", _S.DRIVER,
            "the API server does not know the driver: its token is not valid yet, or not any more",
            "see the driver's service account"),
    _stays("api.forbidden", _S.DRIVER, "the API server does not let the driver do that",
           "give its service account the role", Health.UNKNOWN),
    _stays("api.invalid", _S.DRIVER, "the API server refused an object that the driver made",
           "update the driver", Health.UNKNOWN),
    _unknown("api.refused", "the API server refused, with a code that shows nothing of the kind",
             "update the driver"),
    _passes("http.unavailable", _S.DRIVER, "a server that the driver asked could not just now", _WAIT),
    _unknown("http.refused", "a server that the driver asked refused", "see the driver's log"),
    _passes("grpc.unavailable", _S.DRIVER, "a service that the driver called could not just now", _WAIT),
    _unknown("grpc.failed", "a service that the driver called failed", "see that service's log"),
)  # fmt: skip

_DRIVER: Final = (
    _unknown("request.*", "the call names a claim as a kubelet does not: a field is empty, too long or wrong",
             "see who calls the driver's socket, beside the kubelet or in between"),
    _passes("kubelet.not_registered", _S.DRIVER, "the kubelet does not know the driver yet", _WAIT),
    _passes("deadline", _S.CLAIM, "it took longer than there was time", _WAIT),
    _passes("lock.timeout", _S.DRIVER, "somebody held a lock for too long", _WAIT, _R.AFTER_RELEASE),
    _passes("driver.shutting_down", _S.DRIVER, "the driver is ending", "wait for its next start"),
    _passes("driver.cancelled", _S.CLAIM, "the driver gave it up before its end", _WAIT),
    _passes("state.write", _S.DRIVER, "the driver's state could not be kept just now",
            "free space in its directory"),
    _stays("state.write", _S.DRIVER, "the driver's state cannot be kept here", _INSTALL),
    _stays("state.checkpoint_corrupt", _S.DRIVER, "the driver cannot read its own state",
           "drain the node, move the file away and restart the driver", Health.UNKNOWN),
    _stays("state.version_newer", _S.DRIVER, "a newer release of the driver wrote its state",
           "run that release, or drain the node and move the file away", Health.UNKNOWN),
    Row("backend.unreachable", _C.UNKNOWN, _S.DRIVER, _R.LATER, "the health backend does not answer",
        "see whether drahealth runs", Health.UNKNOWN),
    _passes("os.*", _S.NODE, "the kernel could not just now", "see what the node is short of"),
    _unknown("os.*", "the kernel refused, and nothing shows what the driver was doing",
             "see the driver's log"),
    _passes("text.*", _S.CLAIM, "the message of the error says that it passes", _WAIT),
    _unknown("driver.bug.*", "a mistake in the driver: it broke off with an error of the language's own",
             "report it to the driver's authors, with its log"),
    _unknown("driver.decode", "something could not be decoded, and nothing shows that the user wrote it",
             "report it to the driver's authors, with its log"),
    _unknown("driver.exception.*", "an error that nobody has named", "see the driver's log"),
)  # fmt: skip

DEFAULTS: Final[Mapping[ErrorClass, Row]] = {
    row.error_class: row
    for row in (
        _unknown("driver.error", "the driver does not say of what kind it is", "see the driver's log",
                 _S.CLAIM),
        _passes("driver.transient", _S.CLAIM, "the driver says that it passes", _WAIT),
        _users("config.invalid", "what was asked for can never be had", "correct what the message names"),
        _broken("driver.failed_device", "the driver found the device broken", "see to the device"),
        _stays("driver.permanent", _S.NODE, "the driver says that trying cannot help",
               "see the driver's log"),
    )
}  # fmt: skip
"""By class: for codes that no row has."""

TAXONOMY: Final = (*_GPU, *_DEVICE, *_HOST, *_CDI, *_CLAIM, *_API, *_DRIVER, *DEFAULTS.values())
"""All rows, by theme; each code once per class."""

_ROWS: Final = {(row.code, row.error_class): row for row in TAXONOMY}


@cache
def row_of(code: str, error_class: ErrorClass) -> Row:
    """The row of a code in a class, else of its nearest family, else the class's last."""
    parts = code.split(".")
    names = [code, *(".".join(parts[:count]) + FAMILY for count in range(len(parts) - 1, 0, -1))]
    found = (_ROWS.get((name, error_class)) for name in names)
    return next((row for row in found if row is not None), DEFAULTS[error_class])

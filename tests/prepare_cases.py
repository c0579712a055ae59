"""Sample exceptions of drivers during a prepare: real errors of real operations, with the expected code."""

import asyncio
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
import pynvml
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from patience import PATIENCE_S

from agent.errors import AgentUnreachable
from agent.model.claim import Claim, ClaimConfig, ClaimDevice, DeviceRef
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.prepare import ErrorClass, Operation, Scope
from agent.model.time import Instant
from agent.prepare.classify import PrepareContext
from agent.prepare.errors import (
    BadConfigError,
    DriverError,
    FailedDeviceError,
    PermanentError,
    TransientError,
    doing,
)

DRIVER = "gpu.example.com"
U, T, B, F, P = ErrorClass
ZERO = Instant(0, 0.0)


def ref(name: str) -> DeviceRef:
    return DeviceRef(DRIVER, "node1", name)


def claim_of(*names: str, configs: tuple[ClaimConfig, ...] = (), name: str = "claim-a") -> Claim:
    devices = tuple(ClaimDevice(f"r-{name}", DRIVER, "node1", name) for name in names)
    return Claim("ns", name, f"uid-{name}", devices=devices, configs=configs)


ONE = claim_of("gpu-0")
TWO = claim_of("gpu-0", "gpu-1")
WITH_PARAMETERS = claim_of("gpu-0", configs=(ClaimConfig("FromClaim", (), {"pages": "many"}),))


def health_of(
    name: str, code: str = "", evidence: str = "facts", severity: Severity = Severity.UNHEALTHY
) -> DeviceHealth:
    """Return the health of a device with one cause, or none."""
    severity = severity if code else Severity.OK
    wire = {Severity.UNHEALTHY: Health.UNHEALTHY, Severity.UNKNOWN: Health.UNKNOWN}.get(
        severity, Health.HEALTHY
    )
    causes = (Cause(code, severity, Blame.HARDWARE, evidence, "fix it", ZERO),) if code else ()
    message = f"{code}: {evidence}. Advice: fix it" if code else ""
    return DeviceHealth("node1", name, "gpu", wire, severity, message, ZERO, ZERO, 30, causes, driver=DRIVER)


def prepare_context(claim: Claim, *devices: DeviceHealth, **more: Any) -> PrepareContext:
    """Return a prepare context with the health of some devices."""
    return PrepareContext(claim, {ref(device.device): device for device in devices}, **more)


class Case(NamedTuple):
    code: str
    error_class: ErrorClass
    act: Callable[[Path], object]
    """Does what a driver does, and raises what a driver would."""
    claim: Claim = ONE


def raised_error(act: Callable[[Path], object], path: Path) -> BaseException:
    """Return the exception that a case raises."""
    try:
        act(path)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def error_raiser(error: BaseException) -> Callable[[Path], object]:
    def act(_: Path) -> None:
        raise error

    return act


def os_error_raiser(number: int, operation: Operation | None, path: str = "") -> Callable[[Path], object]:
    """Return a function that raises an OSError like a failed system call."""

    def act(_: Path) -> None:
        error = OSError(number, os.strerror(number), path) if path else OSError(number, os.strerror(number))
        if operation is None:
            raise error
        with doing(operation):
            raise error

    return act


def resolve_invalid_address(_: Path) -> None:
    """Raise the resolver's error for an invalid address, without a query."""
    socket.getaddrinfo("no address", 443, flags=socket.AI_NUMERICHOST)


def full_disk(_: Path) -> None:
    with doing(Operation.CDI, "/var/run/cdi/gpu.json"), open("/dev/full", "w", buffering=1) as file:
        file.write("{}\n")


def no_directory(path: Path) -> None:
    with doing(Operation.CDI):
        (path / "cdi" / "gpu.json").write_text("{}")


def held_lock(path: Path) -> None:
    with doing(Operation.LOCK), open(path / "lock", "w") as ours, open(path / "lock", "w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unknown_value(_: Path) -> None:
    class Parameters(msgspec.Struct):
        pages: int

    msgspec.convert({"pages": "many"}, Parameters)


def during_operation(operation: Operation, act: Callable[[Path], object]) -> Callable[[Path], object]:
    def run_in_operation(path: Path) -> None:
        with doing(operation):
            act(path)

    return run_in_operation


def bad_json(_: Path) -> None:
    json.loads('{"devices": [')


def bad_toml(_: Path) -> None:
    tomllib.loads("pages = ")


def bad_msgspec(_: Path) -> None:
    msgspec.json.decode(b'{"pages": ')


def trio_timeout(_: Path) -> None:
    async def main() -> None:
        with trio.fail_after(0):
            await trio.sleep_forever()

    trio.run(main)


def asyncio_timeout(_: Path) -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 0)

    asyncio.run(main())


def asyncio_cancelled(_: Path) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    asyncio.run(main())


def slow_program(_: Path) -> None:
    with doing(Operation.DEVICE):
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=True, timeout=0.01)


def no_server(path: Path) -> None:
    """Raise grpcio's error of a call to a socket without a server."""
    with grpc.insecure_channel(f"unix:{path}/none.sock") as channel:
        channel.unary_unary("/a.B/C")(b"", timeout=PATIENCE_S)


def nvml(code: int) -> Callable[[Path], object]:
    return error_raiser(pynvml.NVMLError(code))


class ApiException(Exception):
    """Shaped like the one of the package kubernetes."""

    def __init__(self, status: int, reason: str, body: object = None) -> None:
        super().__init__(f"({status})\nReason: {reason}\nHTTP response headers: {{'Date': '...'}}\n")
        self.status, self.reason, self.body = status, reason, body


ApiException.__module__ = "kubernetes.client.exceptions"


class Response(NamedTuple):
    status_code: int
    text: str = ""
    reason_phrase: str = ""


class HTTPStatusError(Exception):
    """Shaped like the one of httpx."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"Client error '{response.status_code}' for url 'https://10.0.0.1'")
        self.response = response


HTTPStatusError.__module__ = "httpx"


def api(status: int, reason: str = "") -> Callable[[Path], object]:
    body = json.dumps({"kind": "Status", "reason": reason, "message": "the words", "code": status})
    return error_raiser(ApiException(status, "phrase", body if reason else None))


def device_error_raiser(code: str, name: str = "gpu-0") -> Callable[[Path], object]:
    return error_raiser(FailedDeviceError(name, "broken", code=code))


def passes(code: str) -> Callable[[Path], object]:
    return error_raiser(TransientError("1 of 2", code=code))


def users(code: str) -> Callable[[Path], object]:
    return error_raiser(BadConfigError("3 pages, limit 2", code=code))


def stays(code: str, scope: Scope = Scope.NODE) -> Callable[[Path], object]:
    return error_raiser(PermanentError("no such thing here", code=code, scope=scope))


def bug(_: Path) -> None:
    int("three")


CASES = [
    # GPUs
    Case("gpu.xid.79", F, device_error_raiser("gpu.xid.79")),
    Case("gpu.xid.109", F, device_error_raiser("gpu.xid.109")),
    *(Case(f"gpu.xid.{code}", T, device_error_raiser(f"gpu.xid.{code}")) for code in (13, 31, 43, 45, 68)),
    Case("gpu.lost", F, nvml(15)),
    Case("gpu.lost", T, nvml(15), claim=TWO),
    Case("gpu.missing", F, device_error_raiser("gpu.missing")),
    Case("gpu.ecc.uncorrectable", F, device_error_raiser("gpu.ecc.uncorrectable")),
    Case("gpu.remap.pending", F, device_error_raiser("gpu.remap.pending")),
    Case("gpu.remap.failure", F, device_error_raiser("gpu.remap.failure")),
    Case("gpu.reset_required", F, nvml(16)),
    Case("gpu.reset_required", T, nvml(16), claim=TWO),
    Case("gpu.not_found", T, nvml(28)),
    Case("gpu.driver.mismatch", T, nvml(18)),
    Case("gpu.driver.mismatch", P, stays("gpu.driver.mismatch")),
    Case("gpu.driver.init", T, nvml(9)),
    Case("gpu.driver.init", P, stays("gpu.driver.init")),
    Case("gpu.busy", T, nvml(19)),
    Case("gpu.mig.reconfiguring", T, passes("gpu.mig.reconfiguring")),
    Case("gpu.vfio.rebinding", T, passes("gpu.vfio.rebinding")),
    Case("gpu.mig.profile_invalid", B, users("gpu.mig.profile_invalid")),
    Case("gpu.sharing.out_of_range", B, users("gpu.sharing.out_of_range")),
    Case("gpu.partitions.too_many", B, users("gpu.partitions.too_many")),
    Case("gpu.nvml.no_permission", U, nvml(4)),
    Case("gpu.nvml.timeout", T, nvml(10)),
    Case("driver.bug.nvml", U, nvml(2)),
    # Any device
    Case("pci.missing", F, device_error_raiser("pci.missing")),
    Case("pci.config_ff", F, device_error_raiser("pci.config_ff")),
    Case("device.busy", T, os_error_raiser(errno.EBUSY, Operation.DEVICE)),
    Case("device.gone", T, lambda _: Path("/dev/drahealth-no-such-device").read_bytes()),
    Case("device.io", T, os_error_raiser(errno.EIO, None, "/dev/nvidia0")),
    Case("device.timeout", T, slow_program),
    Case("device.denied", U, os_error_raiser(errno.EACCES, None, "/dev/nvidia0")),
    Case("device.unknown", T, passes("device.unknown")),
    Case("device.unknown", P, stays("device.unknown", Scope.CLAIM)),
    # CPUs, memory, cgroups
    *(Case(code, F, device_error_raiser(code)) for code in ("cpu.offline", "cpu.missing", "cpu.machine_check",
                                               "cpu.throttled.core", "mem.hugepages.pool_shrunk",
                                               "mem.numa.offline", "mem.ecc.uncorrectable", "mem.poisoned")),
    Case("cpu.overlap", T, passes("cpu.overlap")),
    Case("cpu.overlap", P, stays("cpu.overlap")),
    Case("cpu.opaque_cpuset.invalid", B, users("cpu.opaque_cpuset.invalid")),
    Case("cgroup.rejected", T, os_error_raiser(errno.EINVAL, None, "/sys/fs/cgroup/a/cpuset.cpus")),
    Case("cgroup.gone", T, lambda _: Path("/sys/fs/cgroup/no-such/cpu.max").read_bytes()),
    Case("cgroup.denied", U, os_error_raiser(errno.EROFS, Operation.CGROUP)),
    Case("cgroup.controller_missing", P, stays("cgroup.controller_missing")),
    Case("cgroup.version_unsupported", P, stays("cgroup.version_unsupported")),
    Case("mem.hugepages.insufficient", T, passes("mem.hugepages.insufficient")),
    Case("mem.hugepages.size_unsupported", B, users("mem.hugepages.size_unsupported")),
    # CDI files
    Case("cdi.write", T, full_disk),
    Case("cdi.write", P, os_error_raiser(errno.EROFS, None, "/var/run/cdi/gpu.json")),
    Case("cdi.dir_missing", T, no_directory),
    Case("cdi.malformed", T, during_operation(Operation.CDI, bad_json)),
    # Parameters and claims
    Case("config.decode", B, during_operation(Operation.CONFIG, bad_json)),
    Case("config.decode", B, during_operation(Operation.CONFIG, bad_toml)),
    Case("config.decode", B, during_operation(Operation.CONFIG, bad_msgspec)),
    Case("config.decode", B, unknown_value, claim=WITH_PARAMETERS),
    Case("config.conflict", B, users("config.conflict")),
    Case("config.source_not_allowed", B, users("config.source_not_allowed")),
    Case("config.invalid", B, during_operation(Operation.CONFIG, bug)),
    Case("config.invalid", B, users("")),
    *(Case(code, T, passes(code)) for code in ("claim.unallocated", "claim.uid_mismatch", "claim.malformed",
                                               "claim.not_reserved", "claim.no_result_for_driver")),
    Case("claim.not_found", T, api(404)),
    # The API server, other servers
    Case("api.timeout", T, api(504, "Timeout")),
    Case("api.timeout", T, during_operation(Operation.API, asyncio_timeout)),
    Case("api.unreachable", T, os_error_raiser(errno.ECONNREFUSED, Operation.API)),
    Case("api.unreachable", T, during_operation(Operation.API, resolve_invalid_address)),
    Case("os.unconnected", T, resolve_invalid_address),
    Case("api.conflict", T, api(409, "Conflict")),
    Case("api.429", T, api(429)),
    Case("api.5xx", T, api(503)),
    Case("api.unauthorized", T, api(401)),
    Case("api.forbidden", P, api(403, "Forbidden")),
    Case("api.invalid", P, api(422, "Invalid")),
    Case("api.refused", U, api(400, "BadRequest")),
    Case("http.unavailable", T, error_raiser(HTTPStatusError(Response(503)))),
    Case("http.refused", U, error_raiser(HTTPStatusError(Response(403)))),
    Case("grpc.unavailable", T, no_server),
    Case("grpc.failed", U, error_raiser(GRPCError(Status.INTERNAL, "no luck"))),
    # The driver
    *(Case(f"request.{field}", U, error_raiser(DriverError(f"{field}: is empty", code=f"request.{field}")))
      for field in ("uid", "name", "namespace", "claims")),
    Case("kubelet.not_registered", T, passes("kubelet.not_registered")),
    Case("kubelet.gate_off", T, error_raiser(RuntimeError("the feature gate is disabled on kubelet"))),
    Case("deadline", T, trio_timeout),
    Case("deadline", T, asyncio_timeout),
    Case("deadline", T, error_raiser(GRPCError(Status.DEADLINE_EXCEEDED))),
    Case("lock.timeout", T, held_lock),
    Case("driver.shutting_down", T, error_raiser(SystemExit(0))),
    Case("driver.cancelled", T, asyncio_cancelled),
    Case("state.write", T, os_error_raiser(errno.ENOSPC, Operation.STATE)),
    Case("state.write", P, os_error_raiser(errno.EROFS, Operation.STATE)),
    Case("state.checkpoint_corrupt", P, during_operation(Operation.STATE, bad_json)),
    Case("state.version_newer", P, stays("state.version_newer", Scope.DRIVER)),
    Case("backend.unreachable", U, error_raiser(AgentUnreachable("no server at /run/drahealth/agent.sock"))),
    Case("os.enospc", T, os_error_raiser(errno.ENOSPC, None)),
    Case("os.enoent", U, os_error_raiser(errno.ENOENT, None)),
    Case("text.too_many_files", T, error_raiser(RuntimeError("accept4: too many open files"))),
    Case("driver.bug.value_error", U, bug),
    Case("driver.decode", U, bad_json),
    Case("driver.exception.runtime_error", U, error_raiser(RuntimeError("no luck"))),
    Case("driver.error", U, error_raiser(DriverError("no idea"))),
    Case("driver.transient", T, passes("")),
    Case("driver.failed_device", F, device_error_raiser("")),
    Case("driver.permanent", P, stays("")),
]  # fmt: skip

SLOW = (no_server, slow_program, no_directory, held_lock)
"""Cases that are slow or need a directory of their own."""

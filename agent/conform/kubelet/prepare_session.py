"""Session that prepares and unprepares claims as a kubelet, and records the driver's answers and CDI files.

Everything that was prepared is unprepared at the end, also after an error or an interruption.
"""

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from agent.conform.answer_decoders import decode_answers
from agent.conform.cdi_schema import cdi_ids
from agent.conform.kubelet.api_claims import choose_devices, create_claim, delete_claim
from agent.conform.kubelet.grpc_clients import SessionClock, call_unary
from agent.conform.outcomes import CheckOutcome, not_run, shorten, skipped
from agent.conform.prepare_checks import DEADLINE_S
from agent.conform.session_record import (
    CdiFile,
    CdiSnapshot,
    ClaimSessionRecord,
    ConformClaim,
    PrepareCall,
    PrepareStage,
    UnaryCallResult,
)
from agent.errors import UsageError
from agent.model.claim import ClaimRef
from agent.model.json_values import JsonObject, get_mapping, get_required_text
from agent.prepare.claim_parser import parse_claim
from agent.prepare.errors import DriverError
from agent.serve.grpc.wire import message_field, string_field
from agent.serve.kube_api.api_server import ApiServer
from agent.sources.yaml_text import parse_yaml
from agent.system.files import ReadError, read_bounded
from agent.system.threads.worker_threads import call_in_thread

SERVICES: Final = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
}
"""Full name of the gRPC service for each name that a driver can advertise.

The kubelet calls the first advertised one that it knows.
"""
PREPARE: Final = "NodePrepareResources"
UNPREPARE: Final = "NodeUnprepareResources"
COMMAND_S: Final = 300.0
"""Timeout of a command that the user gives, such as ``--restart-command`` [s]."""
READY_S: Final = 60.0
"""Longest wait for a restarted driver, or for the prepare of a restored device [s]."""
RETRY_S: Final = 1.0
CDI_BYTES: Final = 4 << 20
"""Largest size of a CDI file that is read [bytes]."""
CDI_FILES: Final = 4096
"""Largest number of CDI files that are read."""
CDI_SUFFIXES: Final = (".json", ".yaml")
"""Suffixes of the CDI files that container runtimes read."""
REQUEST: Final = "device"
"""Name of the request in each claim that the session makes."""


class PrepareOptions(NamedTuple):
    """Options of the part of a session that prepares claims; an empty command is not run."""

    claims: tuple[JsonObject, ...]
    """Allocated ResourceClaims that the session prepares."""
    bad_claims: tuple[JsonObject, ...]
    """Allocated ResourceClaims whose prepare must fail; empty: claims that do not exist."""
    devices: tuple[tuple[str, str], ...]
    """(pool, name) of each device for which a claim is made."""
    slices: tuple[JsonObject, ...]
    """ResourceSlices; some of the driver's devices in them are chosen for claims. Empty: none are chosen."""
    other_claims: tuple[JsonObject, ...]
    """ResourceClaims that hold devices; the session does not choose these devices."""
    node: str
    """Name of the Kubernetes node whose devices are chosen, if the slices belong to several nodes."""
    api: ApiServer | None
    """API server in which made claims are created and deleted; None: ``claim_command`` is run."""
    claim_command: str
    """Command that gets ``create`` or ``delete``, and the ResourceClaim on its standard input."""
    device_command: str
    """Command of the user that removes or restores the devices; gets ``remove`` or ``restore``."""
    restart_command: str
    cdi_dirs: tuple[str, ...]
    remove_cdi: bool
    """True: the session removes the CDI files of the prepared claims to simulate a reboot."""


def parse_conform_claims(objects: Iterable[JsonObject], driver: str, flag: str) -> tuple[ConformClaim, ...]:
    """Return the given claims, each with its allocated devices of one driver. Errors name `flag`.

    Raises UsageError: a claim is invalid, has no device of the driver, or is reserved and so may be in use.
    """
    claims = []
    for obj in objects:
        try:
            claim = parse_claim(obj, driver)
            reserved = get_mapping(obj, "status").get("reservedFor")
        except (DriverError, ValueError) as error:
            metadata = obj.get("metadata")
            name = metadata.get("name") if isinstance(metadata, Mapping) else None
            raise UsageError(f"{flag}: claim {shorten(str(name))}: {error}") from None
        if reserved:
            raise UsageError(
                f"{flag}: claim {claim.ref} is reserved for a pod, from which unprepare would take the "
                "devices; use an allocated claim without reservedFor"
            )
        devices = tuple((device.request, device.pool, device.device) for device in claim.devices)
        claims.append(ConformClaim(claim.ref, devices))
    return tuple(claims)


def parse_ref(obj: JsonObject) -> ClaimRef:
    """Return the name and UID in the object of a claim whose prepare must fail.
    Raises UsageError: one is missing."""
    try:
        metadata = get_mapping(obj, "metadata")
        return ClaimRef(*(get_required_text(metadata, key, "metadata") for key in ClaimRef._fields))
    except ValueError as error:
        raise UsageError(f"--bad-claims: {error}") from None


def make_claim(driver: str, pool: str, device: str, number: int) -> JsonObject:
    """Return a ResourceClaim with one request, to which a device is allocated."""
    result = {"request": REQUEST, "driver": driver, "pool": pool, "device": device}
    request = {"name": REQUEST, "exactly": {"deviceClassName": driver}}
    name = f"drahealth-conform-{number}-{uuid.uuid4().hex[:8]}"
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "default", "name": name, "uid": str(uuid.uuid4())},
        "spec": {"devices": {"requests": [request]}},
        "status": {"allocation": {"devices": {"results": [result], "config": []}}},
    }


def _invented_claim(name: str) -> ClaimRef:
    """Return the name and UID of a claim that does not exist."""
    return ClaimRef("default", f"drahealth-conform-{name}", str(uuid.uuid4()))


def omit_all(outcome: CheckOutcome) -> ClaimSessionRecord:
    """Return the record of a session that prepared no claim: every :class:`PrepareStage` has `outcome`."""
    return ClaimSessionRecord("", (), (), {}, dict.fromkeys(PrepareStage, outcome))


class PrepareSession:
    """Session that prepares claims.
    Use it as a context manager: its end unprepares and deletes the remaining claims.

    Args:
        options: Claims and commands.
        driver: Name of the driver.
        versions: Services that the driver advertises.
        clock: Clock of the session.
        locate: Waits for the driver after its restart, and returns the path of its service socket; empty: the
            driver did not come back.
        warn: Called with a text on each claim that stays prepared or undeleted.
    """

    def __init__(
        self,
        options: PrepareOptions,
        driver: str,
        versions: Sequence[str],
        clock: SessionClock,
        locate: Callable[[], Awaitable[str]],
        warn: Callable[[str], None],
    ) -> None:
        self._options = options
        self._driver = driver
        self._version = next((version for version in versions if version in SERVICES), "")
        self._clock = clock
        self._locate = locate
        self._warn = warn
        self._socket = ""
        self._objects: list[JsonObject] = []
        """Objects of the claims that this session created."""
        self._claims = parse_conform_claims(options.claims, driver, "--claims")
        self._bad = tuple(map(parse_ref, options.bad_claims)) or (
            _invented_claim("missing-1"),
            _invented_claim("missing-2"),
        )
        self._calls: dict[PrepareStage, list[PrepareCall]] = {}
        self._omitted: dict[PrepareStage, CheckOutcome] = {}
        self._cdi: dict[str, CdiSnapshot] = {}
        self._held: dict[str, ClaimRef] = {}
        """Identities of the claims that may be prepared, by UID."""
        self._running = set[asyncio.Future[tuple[UnaryCallResult, bytes]]]()
        """Calls to the driver without an answer; they outlive an interruption."""
        self._is_device_removed = False

    async def __aenter__(self) -> Self:
        """Create a claim for each device that the options name, or that is chosen from ResourceSlices.

        Raises:
            UsageError: No device is free, or the command failed.
            ApiError, ApiUnreachableError: The API server did not create a claim.
        """
        try:
            for number, (pool, name) in enumerate((*self._options.devices, *self._chosen_devices())):
                obj = make_claim(self._driver, pool, name, number)
                self._objects.append(obj)
                created = await self._create(obj)
                flag = "--kubeconfig" if self._options.api else "--claim-command"
                self._claims += parse_conform_claims([created], self._driver, flag)
                self._objects[-1] = created
        except BaseException:
            await self.clean_up()
            raise
        return self

    def _chosen_devices(self) -> tuple[tuple[str, str], ...]:
        options = self._options
        if not options.slices:
            return ()
        made = (make_claim(self._driver, *device, 0) for device in options.devices)
        claims = (*options.other_claims, *options.claims, *made)
        try:
            return choose_devices(options.slices, claims, self._driver, options.node)
        except ValueError as error:
            flag = "--slices" if options.api is None else "--kubeconfig"
            raise UsageError(f"{flag}: {error}") from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.clean_up()

    async def run(self, socket: str) -> ClaimSessionRecord:
        """Prepare and unprepare the claims through a service socket of the driver; return the record.

        `socket` is empty if no service socket accepts a connection.

        Raises PermissionDeniedError: the socket may not be opened.
        """
        self._socket = socket
        if not self._version:
            self._omit_remaining(not_run("no DRAPlugin service is advertised: see registration.versions"))
        elif not socket:
            self._omit_remaining(not_run("the service socket takes no connection"))
        else:
            await self._run_stages()
            await self.clean_up()
        return ClaimSessionRecord(
            version=self._version,
            claims=self._claims,
            bad_claims=self._bad,
            calls={stage: tuple(calls) for stage, calls in self._calls.items()},
            omitted=self._omitted,
            **{f"cdi_{name}": snapshot for name, snapshot in self._cdi.items()},
        )

    async def clean_up(self) -> None:
        """Restore a removed device, unprepare all claims that may be prepared, delete this session's claims.

        Never raises an error of the driver or of a command: a text on each remaining claim goes to `warn`.
        """
        if self._running:  # the driver may still prepare, which an unprepare before its end would not undo
            self._warn(f"waiting up to {DEADLINE_S:g} s for the driver, to unprepare; Ctrl-C ends at once")
            await asyncio.wait(self._running)
        if self._is_device_removed:
            await self._restore_device()
        if self._held:
            call = await self._unprepare(PrepareStage.CLEANUP, list(self._held.values()))
            for ref in tuple(self._held.values()):
                self._warn(f"claim {ref}: unprepare failed: {call.error_of(ref)}; it may stay prepared")
            self._held.clear()
        for failure in await self._delete_claims():
            self._warn(failure)

    # --- stages ---------------------------------------------------------------------------------------------

    async def _run_stages(self) -> None:
        refs = [claim.ref for claim in self._claims]
        await self._unprepare(PrepareStage.UNKNOWN, [_invented_claim("unknown")])
        await self._take_cdi("before")
        first = await self._prepare(PrepareStage.FIRST, refs)
        await self._take_cdi("prepared")
        if any(first.error_of(ref) for ref in refs):
            self._omit_remaining(not_run("not every claim was prepared: see prepare.first"))
            return
        await self._prepare(PrepareStage.AGAIN, refs)
        for ref in refs:
            await self._prepare(PrepareStage.ALONE, [ref])
        await asyncio.gather(*(self._prepare(PrepareStage.AT_ONCE, refs) for _ in range(2)))
        await self._run_bad_stages(refs)
        await self._run_restart_stages(refs)
        await self._unprepare(PrepareStage.UNPREPARED, refs)
        await self._take_cdi("unprepared")
        await self._unprepare(PrepareStage.UNPREPARED_AGAIN, refs)
        await self._prepare(PrepareStage.RELEASED, refs)
        await self._take_cdi("released")
        await self._run_lost_device_stage(refs)
        await self._run_deleted_claim_stage(refs)

    async def _run_bad_stages(self, refs: Sequence[ClaimRef]) -> None:
        """Prepare claims that do not exist or must fail, and unprepare them as the kubelet does."""
        missing, renewed = _invented_claim("missing"), refs[0]._replace(uid=str(uuid.uuid4()))
        await asyncio.gather(  # at once, since drivers repeat their attempts for up to half a minute
            self._prepare(PrepareStage.MISSING, [missing]),
            self._prepare(PrepareStage.OTHER_UID, [renewed]),
        )
        await self._unprepare(PrepareStage.CLEANUP, [missing, renewed])
        await self._take_cdi("before_bad")
        for _ in range(2):
            await self._prepare(PrepareStage.BAD, [*self._bad, *refs])
        await self._take_cdi("after_bad")
        await self._unprepare(PrepareStage.CLEANUP, self._bad)

    async def _run_restart_stages(self, refs: Sequence[ClaimRef]) -> None:
        if not self._options.restart_command:
            self._omitted[PrepareStage.RESTARTED] = skipped("only with --restart-command")
            self._omitted[PrepareStage.REBOOTED] = skipped("only with --remove-cdi and --restart-command")
            return
        if failure := await self._restart():
            self._omitted[PrepareStage.RESTARTED] = self._omitted[PrepareStage.REBOOTED] = not_run(failure)
            return
        await self._prepare(PrepareStage.RESTARTED, refs)
        if not self._options.remove_cdi:
            self._omitted[PrepareStage.REBOOTED] = skipped("only with --remove-cdi")
            return
        if not (paths := self._own_cdi_files()):
            reason = not_run("prepare wrote no CDI file that did not exist before")
            self._omitted[PrepareStage.REBOOTED] = reason
            return
        for path in paths:
            with suppress(FileNotFoundError):
                os.unlink(path)
        if failure := await self._restart():
            self._omitted[PrepareStage.REBOOTED] = not_run(failure)
            return
        await self._prepare(PrepareStage.REBOOTED, refs)
        await self._take_cdi("rebooted")

    async def _restart(self) -> str:
        """Restart the driver with the user's command; return why it is not available, or an empty text."""
        if failure := await self._run_command(self._options.restart_command, "--restart-command"):
            return failure
        socket = await self._locate()
        if not socket:
            return f"the driver was not available {READY_S:g} s after its restart"
        self._socket = socket
        return ""

    def _own_cdi_files(self) -> list[str]:
        """Return the paths of the CDI files that the first prepare created and that define its CDI ids."""
        [first] = self._calls[PrepareStage.FIRST]
        ids = {cdi_id for answer in first.answers for device in answer.devices for cdi_id in device.cdi_ids}
        known = {file.path for file in self._cdi["before"].files}
        files = self._cdi["prepared"].files
        return [file.path for file in files if file.path not in known and ids & cdi_ids(file.document)]

    async def _run_lost_device_stage(self, refs: Sequence[ClaimRef]) -> None:
        if not self._options.device_command:
            self._omitted[PrepareStage.LOST_DEVICE] = skipped("only with --device-command")
            return
        self._is_device_removed = True
        failure = await self._run_command(f"{self._options.device_command} remove", "--device-command")
        if failure:
            self._omitted[PrepareStage.LOST_DEVICE] = not_run(failure)
        else:
            await self._unprepare(PrepareStage.LOST_DEVICE, refs)
        await self._restore_device()

    async def _restore_device(self) -> None:
        self._is_device_removed = False
        if failure := await self._run_command(f"{self._options.device_command} restore", "--device-command"):
            self._warn(f"{failure}; the device may be missing")

    async def _run_deleted_claim_stage(self, refs: Sequence[ClaimRef]) -> None:
        made = {str(get_mapping(obj, "metadata").get("uid")) for obj in self._objects}
        own = [ref for ref in refs if ref.uid in made]
        if not own:
            made_by = "only with claims that are made with --kubeconfig or --claim-command"
            self._omitted[PrepareStage.DELETED_CLAIM] = skipped(made_by)
        elif not await self._prepare_missing(own):
            reason = not_run("the claims were not prepared again after the device was restored")
            self._omitted[PrepareStage.DELETED_CLAIM] = reason
        elif failures := await self._delete_claims():
            self._omitted[PrepareStage.DELETED_CLAIM] = not_run(failures[0])
        else:
            await self._unprepare(PrepareStage.DELETED_CLAIM, own)

    async def _prepare_missing(self, refs: Sequence[ClaimRef]) -> bool:
        """Prepare those claims of ``refs`` that are not prepared, repeatedly for READY_S.
        Returns whether all are prepared then."""
        until_s = self._clock.now_s() + READY_S
        while missing := [ref for ref in refs if ref.uid not in self._held]:
            call = await self._prepare(PrepareStage.CLEANUP, missing)
            if not any(map(call.error_of, missing)):
                break
            if self._clock.now_s() >= until_s:
                return False
            for ref in missing:
                self._held.pop(ref.uid)
            await asyncio.sleep(RETRY_S)
        return True

    def _omit_remaining(self, outcome: CheckOutcome) -> None:
        for stage in PrepareStage:
            if stage not in self._calls:
                self._omitted[stage] = outcome

    # --- calls and files ------------------------------------------------------------------------------------

    async def _prepare(self, stage: PrepareStage, refs: Sequence[ClaimRef]) -> PrepareCall:
        self._held |= {ref.uid: ref for ref in refs}
        return await self._call(stage, PREPARE, refs)

    async def _unprepare(self, stage: PrepareStage, refs: Sequence[ClaimRef]) -> PrepareCall:
        call = await self._call(stage, UNPREPARE, refs)
        for ref in refs:
            if not call.error_of(ref):
                self._held.pop(ref.uid, None)
        return call

    async def _call(self, stage: PrepareStage, method: str, refs: Sequence[ClaimRef]) -> PrepareCall:
        path = f"/{SERVICES[self._version]}/{method}"
        running = asyncio.ensure_future(
            call_unary(self._socket, self._clock, path, encode_claims(refs), DEADLINE_S)
        )
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        result, data = await asyncio.shield(running)
        call = PrepareCall(tuple(refs), result)
        if result.is_ok:
            try:
                call = call._replace(answers=decode_answers(data, is_prepare=method == PREPARE))
            except ValueError as error:
                call = call._replace(decode_error=str(error))
        self._calls.setdefault(stage, []).append(call)
        return call

    async def _take_cdi(self, name: str) -> None:
        self._cdi[name] = await call_in_thread(partial(read_cdi_files, self._options.cdi_dirs), "dh-cdi")

    # --- commands -------------------------------------------------------------------------------------------

    async def _create(self, obj: JsonObject) -> JsonObject:
        """Create a claim at the API server or with ``claim_command``; return the created object.

        Raises:
            UsageError: The command failed.
            ApiError, ApiUnreachableError: The API server did not create the claim.
        """
        if (api := self._options.api) is not None:
            creating = asyncio.ensure_future(asyncio.to_thread(create_claim, api, obj))
            try:
                return await asyncio.shield(creating)
            except asyncio.CancelledError:
                await asyncio.wait([creating])  # what is created is deleted
                raise
        if not self._options.claim_command:
            return obj
        output = bytearray()
        failure = await self._run_command(
            f"{self._options.claim_command} create", "--claim-command", msgspec.json.encode(obj), output
        )
        if failure:
            raise UsageError(failure)
        if not output.strip():
            return obj
        try:
            return msgspec.json.decode(bytes(output), type=dict[str, object])
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--claim-command: the output of create is not a claim: {error}") from None

    async def _delete_claims(self) -> list[str]:
        """Delete the claims of this session; return the error texts."""
        failures = []
        while self._objects:
            obj = self._objects.pop()
            failure = ""
            if (api := self._options.api) is not None:
                failure = await asyncio.to_thread(delete_claim, api, obj)
            elif self._options.claim_command:
                failure = await self._run_command(
                    f"{self._options.claim_command} delete", "--claim-command", msgspec.json.encode(obj)
                )
            failures += [failure] if failure else []
        return failures

    async def _run_command(
        self, command: str, flag: str, stdin: bytes = b"", output: bytearray | None = None
    ) -> str:
        """Run a command in a shell and append its output to `output`; return why it failed, or nothing."""
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if output is not None else asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                data, _ = await process.communicate(stdin or None)
        except TimeoutError:
            return f"{flag}: '{command}' did not end within {COMMAND_S:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if output is not None:
            output += data
        return f"{flag}: '{command}' exited with {process.returncode}" if process.returncode else ""


def encode_claims(refs: Iterable[ClaimRef]) -> bytes:
    """Encode a request of NodePrepareResources or NodeUnprepareResources with these claims."""
    return b"".join(
        message_field(
            1, string_field(1, ref.namespace) + string_field(2, ref.uid) + string_field(3, ref.name)
        )
        for ref in refs
    )


def read_cdi_files(directories: Iterable[str]) -> CdiSnapshot:
    """Read the CDI files of the directories. Blocks on the disk."""
    files: list[CdiFile] = []
    errors = []
    is_listed = False
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError as error:
            errors.append(f"directory {directory}: {error.strerror}")
            continue
        is_listed = True
        names = [name for name in names if name.endswith(CDI_SUFFIXES)][:CDI_FILES]
        files += [_read_cdi_file(Path(directory, name)) for name in names]
    return CdiSnapshot(tuple(files), "" if is_listed else "; ".join(errors))


def _read_cdi_file(path: Path) -> CdiFile:
    try:
        data = read_bounded(path, CDI_BYTES).data
        if path.suffix == ".json":
            return CdiFile(str(path), msgspec.json.decode(data))
        documents = parse_yaml(data)
    except ReadError as error:
        return CdiFile(str(path), None, error.reason)
    except (ValueError, RecursionError) as error:
        return CdiFile(str(path), None, f"is not valid {path.suffix[1:].upper()}: {error}")
    if len(documents) != 1:
        return CdiFile(str(path), None, f"has {len(documents)} YAML documents, must have 1")
    return CdiFile(str(path), documents[0])

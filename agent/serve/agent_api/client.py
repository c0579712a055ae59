"""Client of the command line: reads what an agent, or any DRA driver, serves on a unix socket.

asyncio, for a process that does nothing else. A server is not trusted: whatever it sends, the result is a
Report, an AgentStatus, or an error that names the problem.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import betterproto
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.errors import AgentUnreachable, PermissionDenied
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import AgentStatus, Report
from agent.model.time import NS, Instant
from agent.serve.agent_api.decode import report_of, status_of
from agent.serve.grpc.channel import Channel
from agent.serve.grpc.gen.agent.drahealth import v1 as agent_v1
from agent.serve.grpc.gen.health_v1 import v1
from agent.serve.sockets import NO_SERVER, NO_SOCKET, why_no_connection
from agent.system.timing import read_clocks

DEFAULT_LEASE_S: Final = 30
"""Lease that the kubelet gives a device whose timeout is not positive [s]."""

LONGEST_LEASE_S: Final = 86_400
"""Limit of a lease; longer ones are cut [s]."""

HEALTHS: Final[dict[int, Health]] = {int(health): health for health in Health}

# A health stream has no severity; HEALTHY with a message means degraded.
SEVERITIES: Final = {
    Health.UNKNOWN: Severity.UNKNOWN,
    Health.HEALTHY: Severity.OK,
    Health.UNHEALTHY: Severity.UNHEALTHY,
}


class MergedHealth:
    """Health lists of a stream, merged as the kubelet merges them.

    A device that a list omits keeps its last verdict. Once its lease has run out it is Unknown until it is
    reported again. It is never removed.
    """

    def __init__(self) -> None:
        self._devices: dict[tuple[str, str], DeviceHealth] = {}

    def update(self, response: v1.NodeWatchResourcesResponse, now: Instant) -> None:
        """Merge a list that was received ``now``. Of several entries for one device, the last entry
        counts."""
        for entry in response.devices:
            key = (entry.device.pool_name, entry.device.device_name)
            self._devices[key] = _merged(entry, self._devices.get(key), now)

    def expire(self, now: Instant) -> None:
        """Set every device whose lease has ended to Unknown."""
        for key, device in self._devices.items():
            if device.health is not Health.UNKNOWN and _expiry_ns(device) <= now.mono_ns:
                self._devices[key] = device._replace(
                    health=Health.UNKNOWN,
                    severity=Severity.UNKNOWN,
                    message=f"not confirmed within its lease of {device.timeout_s} s",
                    since=now,
                )

    def expires_in_s(self, now: Instant) -> float | None:
        """Return the time until the next lease of a device ends [s]; None: no lease runs."""
        leases = [
            _expiry_ns(device) for device in self._devices.values() if device.health is not Health.UNKNOWN
        ]
        return max(0, min(leases) - now.mono_ns) / NS if leases else None

    def report(self, now: Instant) -> Report:
        """Return all merged devices as a Report without causes and other contents."""
        devices = sorted(self._devices.values(), key=lambda device: (device.pool, device.device))
        return Report(node="", at=now, devices=tuple(devices))


def _expiry_ns(device: DeviceHealth) -> int:
    return device.verified.mono_ns + device.timeout_s * NS


def _merged(entry: v1.DeviceHealth, before: DeviceHealth | None, now: Instant) -> DeviceHealth:
    health, message = HEALTHS.get(int(entry.health)), entry.message
    if health is None:  # the kubelet also treats it as Unknown
        health = Health.UNKNOWN
        message = f"peer reports health {int(entry.health)}, not 0, 1 or 2; {message}".removesuffix("; ")
    lease_s = entry.health_check_timeout_seconds
    device = DeviceHealth(
        pool=entry.device.pool_name,
        device=entry.device.device_name,
        kind="",
        health=health,
        severity=Severity.DEGRADED if health is Health.HEALTHY and message else SEVERITIES[health],
        message=message,
        since=now,
        verified=Instant(now.mono_ns, float(entry.last_updated_time)),
        timeout_s=min(lease_s, LONGEST_LEASE_S) if lease_s > 0 else DEFAULT_LEASE_S,
    )
    if before and (before.health, before.message) == (health, message):
        return device._replace(since=before.since)
    return device


M = TypeVar("M", bound=betterproto.Message)

STATUS_TIMEOUT_S: Final = 5.0
"""Timeout of a request for the agent's status [s]."""

# The messages of v1 and v1alpha1 are the same bytes, so one pair of types reads both.
HEALTH_METHODS: Final = (
    "/v1.DRAResourceHealth/NodeWatchResources",
    "/v1alpha1.DRAResourceHealth/NodeWatchResources",
)


async def watch_reports(socket: Path) -> AsyncGenerator[Report]:
    """Yield the newest report of a socket at each change, the first as soon as the server has a report.

    An agent's own socket sends complete reports. A driver's health socket, v1 or v1alpha1, sends devices
    only, without causes, which are merged over its partial lists; a device whose lease runs out becomes
    Unknown. The generator does not end by itself.

    Raises:
        AgentUnreachable: No process serves the socket, or its server stopped, serves none of these APIs, or
            sent an invalid message; names the problem.
        PermissionDenied: The socket may not be opened.
    """
    with _naming_socket(socket):
        channel = Channel(os.fspath(socket))
        try:
            for reports in (
                _agent_reports(channel),
                *(_health_reports(channel, method) for method in HEALTH_METHODS),
            ):
                async with contextlib.aclosing(reports):
                    try:
                        async for report in reports:
                            yield report
                    except GRPCError as error:
                        if error.status is Status.UNIMPLEMENTED:
                            continue
                        raise
                raise AgentUnreachable(f"{socket}: ended the stream")
            raise AgentUnreachable(f"{socket}: serves neither drahealth.v1.Agent nor a DRA health API")
        finally:
            channel.close()


async def fetch_status(socket: Path) -> AgentStatus:
    """Return the status of the agent behind a socket.

    Raises:
        AgentUnreachable: The agent cannot be reached, as in :func:`watch_reports`, or sends no answer within
        :data:`STATUS_TIMEOUT_S`. PermissionDenied: The socket may not be opened.
    """
    with _naming_socket(socket):
        channel = Channel(os.fspath(socket))
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                stub = agent_v1.AgentStub(channel)
                return status_of(await stub.status(agent_v1.StatusRequest()))
        finally:
            channel.close()


async def _agent_reports(channel: Channel) -> AsyncGenerator[Report]:
    call = channel.request(
        "/drahealth.v1.Agent/Watch", Cardinality.UNARY_STREAM, agent_v1.WatchRequest, agent_v1.Report
    )
    async with call as stream:
        await stream.send_message(agent_v1.WatchRequest(), end=True)
        async for message in stream:
            yield report_of(message)


async def _health_reports(channel: Channel, method: str) -> AsyncGenerator[Report]:
    call = channel.request(
        method, Cardinality.UNARY_STREAM, v1.NodeWatchResourcesRequest, v1.NodeWatchResourcesResponse
    )
    merged = MergedHealth()
    async with call as stream:
        await stream.send_message(v1.NodeWatchResourcesRequest(), end=True)
        async for response in _messages_or_expiry(stream, merged):
            if response is not None:
                merged.update(response, read_clocks())
            merged.expire(read_clocks())
            yield merged.report(read_clocks())


async def _messages_or_expiry(
    stream: Any, merged: MergedHealth
) -> AsyncIterator[v1.NodeWatchResourcesResponse | None]:
    """Yield each message of the stream, and None when the lease of a device runs out before the next
    message."""
    reading = asyncio.ensure_future(stream.recv_message())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=merged.expires_in_s(read_clocks()))
            if not done:
                yield None
            elif (response := reading.result()) is None:
                return
            else:
                yield response
                reading = asyncio.ensure_future(stream.recv_message())
    finally:
        reading.cancel()
        await asyncio.wait({reading})


@contextlib.contextmanager
def _naming_socket(socket: Path) -> Iterator[None]:
    """Convert the errors of a connection to errors that name its socket."""
    try:
        yield
    except PermissionError as error:
        raise PermissionDenied(f"{socket}: may not open this socket ({error.strerror})") from None
    except TimeoutError:
        raise AgentUnreachable(f"{socket}: no answer within {STATUS_TIMEOUT_S:g} s") from None
    except OSError as error:
        why = why_no_connection(socket, error)
        hint = "; is the agent running?" if why in {NO_SOCKET, NO_SERVER} else ""
        raise AgentUnreachable(f"{socket}: {why}{hint}") from None
    except GRPCError as error:
        raise AgentUnreachable(f"{socket}: {error.status.name}: {error.message}") from None
    except (StreamTerminatedError, ProtocolError):
        raise AgentUnreachable(f"{socket}: closed the connection") from None
    except ValueError as error:
        raise AgentUnreachable(f"{socket}: {error}") from None

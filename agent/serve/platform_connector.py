"""Client of NVSentinel's platform connector: health of devices as its health events.

NVSentinel keeps the state of each check and entity; an event about a healthy entity ends the faults that
earlier events of the same check reported about it. There is one event per device, with the codes of all its
faults.
"""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.errors import AgentUnreachable
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Repair, Severity
from agent.serve.grpc.channel import UnixChannel
from agent.serve.grpc.gen.nvsentinel import datamodels as v1

AGENT: Final = "drahealth"
CHECK: Final = "DRADeviceHealth"
"""Name of the check; NVSentinel has its Node condition of this type where it executes remediation."""
SEND_S: Final = 10.0
"""Longest time for a call [s]."""
MESSAGE_CHARS: Final = 1024
"""Longest message of an event [characters]."""
COMPONENTS: Final = {
    "gpu": "GPU",
    "mig": "GPU",
    "cpu": "CPU",
    "memory": "Memory",
    "hugepages": "Memory",
    "nic": "NIC",
    "pci": "PCI",
}
"""Class of the component by the kind of the device; others are of class ``Device``."""
ACTIONS: Final = {
    Repair.NONE: v1.RecommendedAction.NONE,
    Repair.RESTART_WORKLOAD: v1.RecommendedAction.RESTART_APP,
    Repair.RESET_DEVICE: v1.RecommendedAction.COMPONENT_RESET,
    Repair.RELOAD_DRIVER: v1.RecommendedAction.RESTART_BM,  # the mildest that loads a driver
    Repair.REBOOT_NODE: v1.RecommendedAction.RESTART_BM,
    Repair.INSPECT_HARDWARE: v1.RecommendedAction.RUN_FIELDDIAG,
    Repair.CONTACT_VENDOR: v1.RecommendedAction.CONTACT_SUPPORT,
    Repair.REPLACE_HARDWARE: v1.RecommendedAction.CONTACT_SUPPORT,
}
"""NVSentinel's action for each repair."""


def health_event(
    device: DeviceHealth, node: str, entities: Iterable[tuple[str, str]], wall_s: float, *, remediate: bool
) -> v1.HealthEvent:
    """Return the NVSentinel health event about a device.

    Args:
        device: Health of the device.
        node: Name of the Node.
        entities: Those of :func:`entities_of` that the event is about.
        wall_s: Current time [s since 1970].
        remediate: True: NVSentinel may act on the event. False: it stores the event only.
    """
    severity, strategy = device.severity, v1.ProcessingStrategy
    codes = [cause.code for cause in device.causes if cause.severity > Severity.INFO]
    repair = device.repair
    action = v1.RecommendedAction.UNKNOWN if repair is None else ACTIONS[repair]
    return v1.HealthEvent(
        version=1,
        agent=AGENT,
        component_class=COMPONENTS.get(device.kind, "Device"),
        check_name=CHECK,
        is_fatal=severity is Severity.UNHEALTHY,
        is_healthy=severity <= Severity.INFO,
        message=device.message[:MESSAGE_CHARS] or "no fault is known",
        recommended_action=v1.RecommendedAction(0 if severity <= Severity.INFO else action),
        error_code=codes,
        entities_impacted=[v1.Entity(kind, value) for kind, value in entities],
        metadata={"severity": severity.name.lower(), "kind": device.kind},
        generated_timestamp=v1.Timestamp(int(wall_s), int(wall_s % 1 * 1e9)),
        node_name=node,
        processing_strategy=strategy(strategy.EXECUTE_REMEDIATION if remediate else strategy.STORE_ONLY),
    )


def entities_of(device: DeviceHealth) -> Iterable[tuple[str, str]]:
    """Yield the entities (hardware identifiers) of a device, named as in NVSentinel's own GPU monitor."""
    attributes = dict(device.attributes)
    if device.kind == "gpu":
        for kind, attribute in (("GPU_UUID", "uuid"), ("PCI", "pciBusId")):
            if value := attributes.get(attribute):
                yield kind, value
    yield "DRA_DEVICE", str(DeviceRef(*device.key)).lstrip("/")


async def send_health_events(socket: Path, events: list[v1.HealthEvent]) -> None:
    """Send events in one call. Used only in the event loop.

    Raises:
        AgentUnreachable: No platform connector serves the socket, or it refused the events or gave no answer
            within SEND_S.
    """
    channel = UnixChannel(os.fspath(socket))
    try:
        async with asyncio.timeout(SEND_S):
            stub = v1.PlatformConnectorStub(channel)
            await stub.health_event_occurred_v1(v1.HealthEvents(version=1, events=events))
    except TimeoutError:
        raise AgentUnreachable(
            f"socket {socket}: the platform connector did not answer within {SEND_S:g} s"
        ) from None
    except GRPCError as error:
        raise AgentUnreachable(
            f"socket {socket}: the platform connector refused the events: {error.status.name} "
            f"{error.message or ''}".rstrip()
        ) from None
    except (OSError, ProtocolError, StreamTerminatedError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise AgentUnreachable(f"socket {socket}: no platform connector answers: {reason}") from None
    finally:
        channel.close()

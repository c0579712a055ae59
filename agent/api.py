"""Public API for DRA drivers written in Python; docs/embedding.md is its guide.

Drivers use the names as ``drahealth.Monitor`` and so on; all other modules of :mod:`agent` may change at any
time. Nothing here has state of its own, configures logging or changes an event loop's policy, and only
:meth:`PluginServer.run` handles signals.

The first use of a name imports its module: a driver that only writes CDI files loads no gRPC library.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agent.config.api_access import ApiAccess
    from agent.config.config import Config, read_config
    from agent.devices.taints import TaintPolicy
    from agent.driver.taint_callback_publisher import taint_objects
    from agent.embed.checks import degraded, unhealthy, unknown
    from agent.embed.devices import Cpus, Device, Gpu, Hugepages, Memory, Nic, Pci, SliceDevice
    from agent.embed.monitor import Monitor
    from agent.embed.plugin import Driver, PluginServer
    from agent.embed.slice_publisher import SlicePublisher
    from agent.errors import (
        ApiError,
        ApiForbiddenError,
        ApiUnreachableError,
        ConfigError,
        DrahealthError,
        PermissionDeniedError,
        ResourceBusyError,
    )
    from agent.model.claim import Claim, ClaimConfig, ClaimDevice, ClaimRef, DeviceRef
    from agent.model.health import DeviceHealth, Effect, Finding, Health, Repair, Severity, Taint, Taints
    from agent.model.prepare import ErrorClass, Operation, PrepareVerdict, Scope
    from agent.model.report import Report
    from agent.prepare.claim_parser import (
        ParameterCheck,
        Parameters,
        check_parameters,
        configs_for,
        decode_parameters,
        parse_claim,
    )
    from agent.prepare.error_tables import ErrorPattern
    from agent.prepare.errors import (
        BadConfigError,
        DriverError,
        FailedDeviceError,
        PermanentError,
        PrepareError,
        TransientError,
        doing,
    )
    from agent.prepare.step_runners import classified
    from agent.serve.dra_plugin.prepared_devices import PreparedDevice, WireMode
    from agent.serve.kube_api.api_server import ApiServer, ClaimReader, path_of
    from agent.serve.kube_api.object_watch import ObjectList, ObjectWatch, WatchEvent, WatchEventKind
    from agent.sources.kubectl_files import find_api_access
    from agent.store.cdi_files import CdiDevice, CdiMount, CdiNode, remove_cdi_spec, write_cdi_spec

__all__ = [
    "ApiAccess",
    "ApiError",
    "ApiForbiddenError",
    "ApiServer",
    "ApiUnreachableError",
    "BadConfigError",
    "CdiDevice",
    "CdiMount",
    "CdiNode",
    "Claim",
    "ClaimConfig",
    "ClaimDevice",
    "ClaimReader",
    "ClaimRef",
    "Config",
    "ConfigError",
    "Cpus",
    "Device",
    "DeviceHealth",
    "DeviceRef",
    "DrahealthError",
    "Driver",
    "DriverError",
    "Effect",
    "ErrorClass",
    "ErrorPattern",
    "FailedDeviceError",
    "Finding",
    "Gpu",
    "Health",
    "Hugepages",
    "Memory",
    "Monitor",
    "Nic",
    "ObjectList",
    "ObjectWatch",
    "Operation",
    "ParameterCheck",
    "Parameters",
    "Pci",
    "PermanentError",
    "PermissionDeniedError",
    "PluginServer",
    "PrepareError",
    "PrepareVerdict",
    "PreparedDevice",
    "Repair",
    "Report",
    "ResourceBusyError",
    "Scope",
    "Severity",
    "SliceDevice",
    "SlicePublisher",
    "Taint",
    "TaintPolicy",
    "Taints",
    "TransientError",
    "WatchEvent",
    "WatchEventKind",
    "WireMode",
    "check_parameters",
    "classified",
    "configs_for",
    "decode_parameters",
    "degraded",
    "doing",
    "find_api_access",
    "parse_claim",
    "path_of",
    "read_config",
    "remove_cdi_spec",
    "taint_objects",
    "unhealthy",
    "unknown",
    "write_cdi_spec",
]

MODULE_OF: Final[Mapping[str, str]] = {
    name: module
    for module, names in {
        "agent.config.api_access": "ApiAccess",
        "agent.config.config": "Config read_config",
        "agent.devices.taints": "TaintPolicy",
        "agent.driver.taint_callback_publisher": "taint_objects",
        "agent.embed.checks": "degraded unhealthy unknown",
        "agent.embed.devices": "Cpus Device Gpu Hugepages Memory Nic Pci SliceDevice",
        "agent.embed.monitor": "Monitor",
        "agent.embed.plugin": "Driver PluginServer",
        "agent.embed.slice_publisher": "SlicePublisher",
        "agent.errors": "ApiError ApiForbiddenError ApiUnreachableError ConfigError DrahealthError "
        "PermissionDeniedError ResourceBusyError",
        "agent.model.claim": "Claim ClaimConfig ClaimDevice ClaimRef DeviceRef",
        "agent.model.health": "DeviceHealth Effect Finding Health Repair Severity Taint Taints",
        "agent.model.prepare": "ErrorClass Operation PrepareVerdict Scope",
        "agent.model.report": "Report",
        "agent.prepare.claim_parser": "ParameterCheck Parameters check_parameters configs_for "
        "decode_parameters parse_claim",
        "agent.prepare.error_tables": "ErrorPattern",
        "agent.prepare.errors": "BadConfigError DriverError FailedDeviceError PermanentError PrepareError "
        "TransientError doing",
        "agent.prepare.step_runners": "classified",
        "agent.serve.dra_plugin.prepared_devices": "PreparedDevice WireMode",
        "agent.serve.kube_api.api_server": "ApiServer ClaimReader path_of",
        "agent.serve.kube_api.object_watch": "ObjectList ObjectWatch WatchEvent WatchEventKind",
        "agent.sources.kubectl_files": "find_api_access",
        "agent.store.cdi_files": "CdiDevice CdiMount CdiNode remove_cdi_spec write_cdi_spec",
    }.items()
    for name in names.split()
}
"""Module that defines each name of the public API, by name."""

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Return a name of the public API, and import the module that defines it. Raises AttributeError for
        any other name."""
        if name not in MODULE_OF:
            raise AttributeError(f"module 'drahealth' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(MODULE_OF[name]), name)
        return value

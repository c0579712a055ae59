"""Public API for DRA drivers written in Python; docs/embedding.md is its guide.

Drivers use the names as ``drahealth.Monitor`` and so on; all other modules of :mod:`agent` may change at any
time. Nothing here has state of its own, configures logging or changes an event loop's policy, and only
:meth:`PluginServer.run` handles signals.
"""

from agent.config.api_access import ApiAccess
from agent.config.config import Config, read_config
from agent.devices.taints import TaintPolicy
from agent.driver.taint_publisher import taint_objects
from agent.embed.checks import degraded, unhealthy, unknown
from agent.embed.devices import Cpus, Device, Gpu, Hugepages, Memory, Nic, Pci
from agent.embed.monitor import Monitor
from agent.embed.plugin import Driver, PluginServer
from agent.embed.slice_publisher import SlicePublisher
from agent.embed.slices import SliceDevice
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
from agent.model.health import DeviceHealth, Finding, Health, Repair, Severity
from agent.model.prepare import ErrorClass, Operation, PrepareVerdict, Scope
from agent.model.report import Report
from agent.model.taint import Effect, Taint, Taints
from agent.prepare.claim_parser import (
    ParameterCheck,
    Parameters,
    check_parameters,
    configs_for,
    decode_parameters,
    parse_claim,
)
from agent.prepare.error_patterns import ErrorPattern
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
from agent.serve.kube_api.api_server import ApiServer, path_of
from agent.serve.kube_api.claim_reader import ClaimReader
from agent.serve.kube_api.object_watch import ObjectList, ObjectWatch, WatchEvent, WatchEventKind
from agent.sources.kubeconfig import find_api_access
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

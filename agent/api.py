"""Public API for DRA drivers written in Python; docs/embedding.md is its guide.

All other modules of :mod:`agent` may change at any time. The names are available as ``agent.Monitor`` and so
on. Nothing here has state of its own, handles signals, configures logging or changes an event loop's policy.
"""

from agent.config.config import Config, read_config
from agent.devices.taints import TaintPolicy
from agent.driver.taint_publisher import as_objects
from agent.embed.checks import degraded, unhealthy, unknown
from agent.embed.devices import Cpus, Device, Gpu, Hugepages, Memory, Nic, Pci
from agent.embed.monitor import Monitor
from agent.embed.plugin import Driver, PluginServer
from agent.errors import ConfigError, DrahealthError
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
from agent.prepare.error_patterns import Pattern
from agent.prepare.errors import (
    BadConfig,
    DriverError,
    FailedDevice,
    PermanentError,
    PrepareError,
    TransientError,
    doing,
)
from agent.prepare.step_runners import classified
from agent.serve.dra_plugin.prepared_devices import PreparedDevice, WireMode
from agent.store.cdi_files import CdiDevice, CdiMount, CdiNode, remove_spec, write_spec

__all__ = [
    "BadConfig",
    "CdiDevice",
    "CdiMount",
    "CdiNode",
    "Claim",
    "ClaimConfig",
    "ClaimDevice",
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
    "FailedDevice",
    "Finding",
    "Gpu",
    "Health",
    "Hugepages",
    "Memory",
    "Monitor",
    "Nic",
    "Operation",
    "ParameterCheck",
    "Parameters",
    "Pattern",
    "Pci",
    "PermanentError",
    "PluginServer",
    "PrepareError",
    "PrepareVerdict",
    "PreparedDevice",
    "Repair",
    "Report",
    "Scope",
    "Severity",
    "Taint",
    "TaintPolicy",
    "Taints",
    "TransientError",
    "WireMode",
    "as_objects",
    "check_parameters",
    "classified",
    "configs_for",
    "decode_parameters",
    "degraded",
    "doing",
    "parse_claim",
    "read_config",
    "remove_spec",
    "unhealthy",
    "unknown",
    "write_spec",
]

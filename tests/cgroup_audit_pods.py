"""Pod objects for tests of agent.cgroup_audit, as kubectl shows them, and look-ups of expected values."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent.cgroup_audit.cgroup_paths import CgroupLevel
from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind
from agent.cgroup_audit.expected_cgroups import ExpectedCgroup
from agent.cgroup_audit.expected_values import ExpectedSetting
from agent.cgroup_audit.kubelet_config import CgroupDriver, NodeFacts
from agent.cgroup_audit.pod_model import Pod
from agent.cgroup_audit.pod_parser import parse_pod

UID: Final = "0f3c7a52-4a4e-4a52-9f0e-5d3a6f1b2c3d"
KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
SIZES: Final = (2 << 10, 1 << 20)
"""Hugepage sizes [KiB]: 2 MiB and 1 GiB."""
V1: Final = NodeFacts(cgroup_version=1, cgroup_driver=CgroupDriver.CGROUPFS, hugepages_kib=SIZES)
V2: Final = NodeFacts(cgroup_version=2, cgroup_driver=CgroupDriver.CGROUPFS, hugepages_kib=SIZES)
SYSTEMD: Final = NodeFacts(cgroup_version=2, cgroup_driver=CgroupDriver.SYSTEMD, hugepages_kib=SIZES)

Object = dict[str, Any]


def amounts(text: str) -> dict[str, str]:
    """Parse ``cpu=2 memory=1Gi hugepages-2Mi=64Mi`` into amounts by resource."""
    return dict(part.split("=") for part in text.split())


def resources(requests: str = "", limits: str = "") -> Object:
    """Return a resources object without empty parts."""
    both = {"requests": amounts(requests), "limits": amounts(limits)}
    return {key: value for key, value in both.items() if value}


def container(name: str, requests: str = "", limits: str = "", **more: Any) -> Object:
    """Return a container of a pod spec."""
    return {"name": name, "resources": resources(requests, limits), **more}


def sidecar(name: str, requests: str = "", limits: str = "") -> Object:
    """Return an init container that keeps running (a sidecar)."""
    return container(name, requests, limits, restartPolicy="Always")


def claim(
    name: str, containers: str, mapping: str = "", per_pod: str = "", per_container: str = ""
) -> Object:
    """Return the allocatable resources of a claim, as the pod status of Kubernetes 1.37 lists them."""
    overhead: dict[str, Object] = {}
    for key, text in (("perPod", per_pod), ("perContainer", per_container)):
        for resource, amount in amounts(text).items():
            overhead.setdefault(resource, {"name": resource})[key] = amount
    mapped = [{"name": resource, "quantity": amount} for resource, amount in amounts(mapping).items()]
    parts = {"mapping": mapped, "overhead": list(overhead.values())}
    return {
        "resourceClaimName": name,
        "containers": containers.split(),
        **{key: value for key, value in parts.items() if value},
    }


def pod_object(
    *containers: Object,
    init: Sequence[Object] = (),
    level: Mapping[str, Any] | None = None,
    overhead: str = "",
    claims: Sequence[Object] = (),
    **status: Any,
) -> Object:
    """Return a v1.Pod object. ``level``: its pod-level resources."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "default", "uid": UID},
        "spec": {
            "containers": list(containers),
            "initContainers": list(init),
            "overhead": amounts(overhead),
            **({} if level is None else {"resources": level}),
        },
        "status": {"nodeAllocatableResourceClaimStatuses": list(claims), **status},
    }


def pod(*containers: Object, **more: Any) -> Pod:
    """Return the parsed :func:`pod_object`."""
    return parse_pod(pod_object(*containers, **more))


def knob(
    groups: Sequence[ExpectedCgroup], kind: SettingKind, container: str = "", size_kib: int = 0
) -> ExpectedSetting:
    """Return the expected value of one knob of the pod, or of one container of the pod."""
    level = CgroupLevel.CONTAINER if container else CgroupLevel.POD
    (found,) = [
        setting
        for group in groups
        if group.cgroup.level is level and group.cgroup.container == container
        for setting in group.settings
        if setting.setting == CgroupSettingId(kind, size_kib)
    ]
    return found


def exact_value(
    groups: Sequence[ExpectedCgroup], kind: SettingKind, container: str = "", size_kib: int = 0
) -> int:
    """Return the value that the kubelet's code writes to a knob."""
    return knob(groups, kind, container, size_kib).accepted[0].value


def values(expected: ExpectedSetting) -> list[int]:
    """Return all accepted values."""
    return [option.value for option in expected.accepted]

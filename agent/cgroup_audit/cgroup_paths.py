"""Conversion between pods and the paths of their cgroups, without file access.

Paths begin with a slash and are relative to the cgroup mount (v2: ``/sys/fs/cgroup``; v1: a controller's
directory). ``root`` is the kubelet's ``--cgroup-root``, the agent's ``--kubelet-cgroup-root``.

Source: kubelet v1.37.1, pkg/kubelet/cm; containerd and CRI-O for names of container cgroups.
"""

import re
from enum import StrEnum
from typing import Final, NamedTuple

from agent.cgroup_audit.kubelet_config import CgroupDriver
from agent.cgroup_audit.pod_model import QosClass


class CgroupLevel(StrEnum):
    """Level of a cgroup in the tree of the cgroup kubepods, which holds all pods."""

    NODE = "node"
    """Cgroup of the Kubernetes node: kubepods, or a cgroup for which the kubelet reserves resources."""
    QOS = "qos"
    """Cgroup that holds the pods of a QoS class. Guaranteed pods are directly in kubepods."""
    POD = "pod"
    CONTAINER = "container"


class CgroupOwner(NamedTuple):
    """Owner of a cgroup: a QoS class, a pod or a container."""

    level: CgroupLevel
    qos: QosClass
    pod_uid: str = ""
    """UID in the name of the pod's cgroup; empty: the cgroup of a QoS class."""
    container_id: str = ""
    """Id of the container that owns the cgroup; empty: the cgroup of a pod or QoS class."""


_SCOPES: Final = {"containerd": "cri-containerd", "cri-o": "crio", "docker": "docker"}
"""Prefix of the container id in the cgroup's name, by the runtime's name in ``containerID``."""
_POD: Final = re.compile(r"pod([0-9A-Za-z.-]+)")
_CONTAINER: Final = re.compile(r"(?:(?P<by>[a-z-]+)-)?(?P<id>[0-9A-Za-z]{4,64})")
_NOT_CONTAINERS: Final = ("crio-conmon-", "libpod-conmon-")
"""Prefixes of cgroups of CRI-O's own processes inside a pod's cgroup."""


def qos_path(qos: QosClass, driver: CgroupDriver, root: str = "/") -> str:
    """Return the path of the cgroup of a QoS class, which is the parent of its pods' cgroups."""
    return _join_path([*_split_path(root), *_class_parts(qos)], driver)


def pod_path(uid: str, qos: QosClass, driver: CgroupDriver, root: str = "/") -> str:
    """Return the path of a pod's cgroup. ``uid``: the pod's UID, or the hash of a static pod's manifest."""
    return _join_path([*_split_path(root), *_class_parts(qos), f"pod{uid}"], driver)


def container_path(pod: str, container_id: str, runtime: str, driver: CgroupDriver) -> str:
    """Return the path of the cgroup with a container's limits; crun may run processes one level below.

    Args:
        pod: Path of the pod's cgroup.
        container_id: Id from the pod's status, the part after ``://``.
        runtime: Runtime from the pod's status, the part before ``://``: ``containerd``, ``cri-o``.
    """
    scope = _SCOPES.get(runtime, runtime)
    if driver is CgroupDriver.SYSTEMD:
        return f"{pod}/{scope}-{container_id}.scope"
    return f"{pod}/{scope}-{container_id}" if runtime == "cri-o" else f"{pod}/{container_id}"


def parse_path(path: str, root: str = "/") -> CgroupOwner | None:
    """Return the QoS class, pod or container that a cgroup path belongs to; None: the path is not one of
    these.

    A cgroup below a container's cgroup belongs to the container. A pod's sandbox is returned as a container,
    because only the pod's object shows which ids are those of containers.
    """
    for driver in CgroupDriver:
        for qos in (QosClass.BURSTABLE, QosClass.BEST_EFFORT, QosClass.GUARANTEED):
            top = qos_path(qos, driver, root)
            if path == top:
                return CgroupOwner(CgroupLevel.QOS, qos)
            if path.startswith(f"{top}/"):
                return _owner_below(path[len(top) + 1 :].split("/"), top.rpartition("/")[2], qos, driver)
    return None


def reserved_path(name: str, driver: CgroupDriver) -> str:
    """Return the path of a cgroup for whose processes the kubelet reserves resources.

    Args:
        name: ``kubeReservedCgroup`` or ``systemReservedCgroup``, such as ``/system.slice``.
    """
    if driver is CgroupDriver.CGROUPFS:
        return "/" + "/".join(_split_path(name))
    return _join_path(name.rpartition("/")[2].removesuffix(".slice").split("-"), driver)


def _owner_below(parts: list[str], top: str, qos: QosClass, driver: CgroupDriver) -> CgroupOwner | None:
    uid = _pod_uid(parts[0], top, driver)
    if uid is None:
        return None
    if len(parts) == 1:
        return CgroupOwner(CgroupLevel.POD, qos, uid)
    ident = _container_id(parts[1], driver)
    return None if ident is None else CgroupOwner(CgroupLevel.CONTAINER, qos, uid, ident)


def _pod_uid(name: str, top: str, driver: CgroupDriver) -> str | None:
    if driver is CgroupDriver.SYSTEMD:
        prefix = f"{top.removesuffix('.slice')}-"
        if not name.startswith(prefix) or not name.endswith(".slice"):
            return None
        name = name[len(prefix) : -len(".slice")].replace("_", "-")
    match = _POD.fullmatch(name)
    return match[1] if match and "pod" not in match[1] else None  # the kubelet reserves the prefix "pod"


def _container_id(name: str, driver: CgroupDriver) -> str | None:
    if name.startswith(_NOT_CONTAINERS) or name.endswith(".scope") != (driver is CgroupDriver.SYSTEMD):
        return None
    match = _CONTAINER.fullmatch(name.removesuffix(".scope"))
    return match["id"] if match else None


def _split_path(root: str) -> list[str]:
    return [part for part in root.split("/") if part]


def _class_parts(qos: QosClass) -> list[str]:
    return ["kubepods"] if qos is QosClass.GUARANTEED else ["kubepods", qos.lower()]


def _join_path(parts: list[str], driver: CgroupDriver) -> str:
    """Join cgroup names to a path; with the systemd driver each name repeats its parents' names."""
    if driver is CgroupDriver.CGROUPFS:
        return "/" + "/".join(parts)
    escaped = [part.replace("-", "_") for part in parts]
    return "".join("/" + "-".join(escaped[: count + 1]) + ".slice" for count in range(len(escaped)))

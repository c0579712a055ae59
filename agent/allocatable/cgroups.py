"""Where the cgroups of a pod are, and whose a cgroup is: path arithmetic, no file is looked at.

Paths begin with a slash, which is where cgroups are mounted: ``/sys/fs/cgroup`` in v2, the directory of a
controller in v1. The kubelet's own prefix (its ``--cgroup-root``, our ``--kubelet-cgroup-root``) is ``root``.

Source: kubelet v1.37.1, pkg/kubelet/cm; containerd and CRI-O for what a container's is called.
"""

import re
from enum import StrEnum
from typing import Final, NamedTuple

from agent.allocatable.facts import CgroupDriver
from agent.allocatable.pod import Qos


class Level(StrEnum):
    """What a cgroup stands for."""

    QOS = "qos"
    """All pods of a class. Those of Guaranteed are in kubepods itself, with the other two classes."""
    POD = "pod"
    CONTAINER = "container"


class Place(NamedTuple):
    """Whose a cgroup is."""

    level: Level
    qos: Qos
    pod_uid: str = ""
    """As the kubelet knows it: :attr:`agent.allocatable.pod.Pod.cgroup_uid`."""
    container_id: str = ""


_SCOPES: Final = {"containerd": "cri-containerd", "cri-o": "crio", "docker": "docker"}
"""What a runtime puts before the id, by its name in ``containerID``."""
_POD: Final = re.compile(r"pod([0-9A-Za-z.-]+)")
_CONTAINER: Final = re.compile(r"(?:(?P<by>[a-z-]+)-)?(?P<id>[0-9A-Za-z]{4,64})")
_NOT_CONTAINERS: Final = ("crio-conmon-", "libpod-conmon-")
"""Beside a pod's containers CRI-O has processes of its own."""


def qos_path(qos: Qos, driver: CgroupDriver, root: str = "/") -> str:
    """The cgroup below which a class's pods are."""
    return _path([*_parts(root), *_class_parts(qos)], driver)


def pod_path(uid: str, qos: Qos, driver: CgroupDriver, root: str = "/") -> str:
    """A pod's cgroup. ``uid`` is the kubelet's; of a static pod that is a hash, see :mod:`pod_object`."""
    return _path([*_parts(root), *_class_parts(qos), f"pod{uid}"], driver)


def container_path(pod: str, container_id: str, runtime: str, driver: CgroupDriver) -> str:
    """A container's cgroup, where its limits are; with crun its processes may be in one below.

    Args:
        pod: Path of its pod's.
        container_id: As the pod's status has it, after ``://``.
        runtime: What the status has before it: ``containerd``, ``cri-o``.
    """
    scope = _SCOPES.get(runtime, runtime)
    if driver is CgroupDriver.SYSTEMD:
        return f"{pod}/{scope}-{container_id}.scope"
    return f"{pod}/{scope}-{container_id}" if runtime == "cri-o" else f"{pod}/{container_id}"


def parse_path(path: str, root: str = "/") -> Place | None:
    """Whose a cgroup is; None: nobody's below kubepods.

    What is below a container's cgroup is the container's. A pod's sandbox looks like a container, too: only
    the pod's object knows which ids are.
    """
    for driver in CgroupDriver:
        for qos in (Qos.BURSTABLE, Qos.BEST_EFFORT, Qos.GUARANTEED):
            top = qos_path(qos, driver, root)
            if path == top:
                return Place(Level.QOS, qos)
            if path.startswith(f"{top}/"):
                return _below(path[len(top) + 1 :].split("/"), top.rpartition("/")[2], qos, driver)
    return None


def _below(parts: list[str], top: str, qos: Qos, driver: CgroupDriver) -> Place | None:
    uid = _pod_uid(parts[0], top, driver)
    if uid is None:
        return None
    if len(parts) == 1:
        return Place(Level.POD, qos, uid)
    ident = _container_id(parts[1], driver)
    return None if ident is None else Place(Level.CONTAINER, qos, uid, ident)


def _pod_uid(name: str, top: str, driver: CgroupDriver) -> str | None:
    if driver is CgroupDriver.SYSTEMD:
        prefix = f"{top.removesuffix('.slice')}-"
        if not name.startswith(prefix) or not name.endswith(".slice"):
            return None
        name = name[len(prefix) : -len(".slice")].replace("_", "-")
    match = _POD.fullmatch(name)
    return match[1] if match and "pod" not in match[1] else None  # the kubelet takes the word for reserved


def _container_id(name: str, driver: CgroupDriver) -> str | None:
    if name.startswith(_NOT_CONTAINERS) or name.endswith(".scope") != (driver is CgroupDriver.SYSTEMD):
        return None
    match = _CONTAINER.fullmatch(name.removesuffix(".scope"))
    return match["id"] if match else None


# --- names -------------------------------------------------------------------------------------------------


def _parts(root: str) -> list[str]:
    return [part for part in root.split("/") if part]


def _class_parts(qos: Qos) -> list[str]:
    return ["kubepods"] if qos is Qos.GUARANTEED else ["kubepods", qos.lower()]


def _path(parts: list[str], driver: CgroupDriver) -> str:
    """The parts as directories. systemd repeats all those above in each name, with dashes between them."""
    if driver is CgroupDriver.CGROUPFS:
        return "/" + "/".join(parts)
    escaped = [part.replace("-", "_") for part in parts]
    return "".join("/" + "-".join(escaped[: count + 1]) + ".slice" for count in range(len(escaped)))

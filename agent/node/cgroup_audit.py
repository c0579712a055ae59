"""One audit of this node: pods and what is known of it come in, cgroups are read, and verdicts go out.

Where the pods come from is the caller's business.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from agent.allocatable.cgroups import qos_path
from agent.allocatable.evaluate import JudgedPod, Node, judge_classes, judge_pod
from agent.allocatable.facts import Exclusive, NodeFacts
from agent.allocatable.pod import Pod, Qos
from agent.allocatable.risks import Risk, shared_mappings
from agent.allocatable.verdicts import Compared
from agent.config.config import KUBELET_DIR
from agent.errors import ProbeError
from agent.model.cpuset import CpuSet
from agent.native.cgroup_knobs import KnobReader
from agent.sources import cpu_manager
from agent.sources.node_facts import pods_there, read_facts, read_sizes

_NAMED_MAX: Final = 4
Given = Mapping[str, Mapping[str, CpuSet]]
"""CPUs that containers have for themselves: by the pod's UID, as the kubelet has it, and their name."""
_NOTHING: Final[Given] = {}


class Places(NamedTuple):
    """Where things are on this node, and what nobody can look up there."""

    sysfs_root: Path = Path("/sys")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    cgroup_root: str = "/"
    """The kubelet's ``--cgroup-root``."""
    kubelet_dir: Path = KUBELET_DIR
    kubelet_version: str = ""
    """Empty: not known."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found."""

    facts: NodeFacts | None
    """None: no kubelet has made cgroups here, so nothing was read."""
    pods: tuple[JudgedPod, ...] = ()
    classes: tuple[Compared, ...] = ()
    """Of the QoS classes; empty if they were not asked for, or not all pods are known."""
    unread: tuple[str, ...] = ()
    """Pods that could not be judged at all, with the reason."""
    gaps: tuple[str, ...] = ()
    """What could not be known, and what was not judged for that."""


def audit(
    places: Places,
    pods: Sequence[Pod],
    chosen: Sequence[Pod],
    now_wall_s: float,
    *,
    classes: bool,
    complete: bool = True,
    by_drivers: Given = _NOTHING,
) -> Audit:
    """Reads the cgroups of the chosen pods, and judges them.

    Args:
        places: Where to look.
        pods: All that are known of the node.
        chosen: Those to judge.
        now_wall_s: When that is [s since 1970].
        classes: Judge the QoS classes, too, if all pods are known: their weight is the sum over all.
        complete: No pod is known to be lacking among them.
        by_drivers: CPUs that drivers gave; see :mod:`agent.devices.consumers.exclusive_cpus`.

    Raises:
        ValueError: ``kubelet_version`` is none.
        ProbeError: Cgroups, or sizes of hugepages, cannot be read.
        PermissionDenied: This user may not.
    """
    sizes_kib = read_sizes(places.sysfs_root)
    with KnobReader(places.cgroupfs_root, sizes_kib) as reader:
        facts = read_facts(reader, sizes_kib, places.cgroup_root, pods, places.kubelet_version)
        if facts is None:
            top = f"{places.cgroupfs_root} below {places.cgroup_root}"
            return Audit(None, gaps=(f"no kubelet has made cgroups in {top}",))
        node = Node(facts, places.cgroup_root, _has_hugetlb(reader, facts, places.cgroup_root))
        unlisted = pods_there(places.cgroupfs_root, facts.driver, places.cgroup_root)
        unlisted -= {pod.cgroup_uid for pod in pods}
        by_kubelet, why = _by_kubelet(places.kubelet_dir / cpu_manager.NAME)

        def judge(pod: Pod) -> JudgedPod:
            own = [*_own(pod, by_kubelet or {}, by_kubelet=True), *_own(pod, by_drivers, by_kubelet=False)]
            return judge_pod(pod, node, reader.read, now_wall_s, own, all_known=by_kubelet is not None)

        judged, unread = _judged(chosen, judge)
        complete = complete and not unlisted
        compared = judge_classes(pods, node, reader.read, now_wall_s) if classes and complete else ()
    gaps = [
        "hugepages: pods have no hugetlb controller, so nobody is kept from any"
        if sizes_kib and not node.has_hugetlb
        else "",
        f"CPUs that the kubelet gave to single containers: {why}" if why else "",
        f"{len(unlisted)} pods have cgroups and are not listed: {_names(unlisted)}" if unlisted else "",
        "QoS classes: not judged, their weight is the sum over all pods" if classes and not complete else "",
    ]
    shared = shared_mappings(pods)
    return Audit(
        facts,
        tuple(_sharing(one, shared) for one in judged),
        compared,
        unread,
        tuple(filter(None, gaps)),
    )


def _judged(
    chosen: Iterable[Pod], judge: Callable[[Pod], JudgedPod]
) -> tuple[list[JudgedPod], tuple[str, ...]]:
    judged, unread = [], []
    for pod in chosen:
        try:
            judged.append(judge(pod))
        except ProbeError as error:
            unread.append(str(error))
    return judged, tuple(unread)


def _own(pod: Pod, given: Given, *, by_kubelet: bool) -> Iterable[Exclusive]:
    return (Exclusive(name, cpus, by_kubelet) for name, cpus in given.get(pod.cgroup_uid, {}).items())


def _sharing(judged: JudgedPod, shared: Sequence[Risk]) -> JudgedPod:
    """With what its claims risk because other pods have them, too."""
    also = tuple(risk for risk in shared if risk.pod == str(judged.pod))
    return replace(judged, risks=(*judged.risks, *also)) if judged.compared and also else judged


def _names(uids: Iterable[str]) -> str:
    names = sorted(uids)
    return ", ".join(names[:_NAMED_MAX]) + (", ..." if len(names) > _NAMED_MAX else "")


def _has_hugetlb(reader: KnobReader, facts: NodeFacts, root: str) -> bool:
    """Whether kubepods has it. What nobody can look up is taken to be there, so that it is missed."""
    top = reader.read(qos_path(Qos.GUARANTEED, facts.driver, root))
    return top is None or top.controllers is None or "hugetlb" in top.controllers


def _by_kubelet(path: Path) -> tuple[Given | None, str]:
    """CPUs that the kubelet gave away; or none, and why nobody knows."""
    try:
        return cpu_manager.read_exclusive(path), ""
    except ProbeError as error:
        return None, str(error)

"""Audit of cgroups: compares the cgroup settings of given pods with the settings their specs and claims
require."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from agent.allocatable.cgroups import qos_path
from agent.allocatable.evaluate import AuditNode, PodAudit, evaluate_classes, evaluate_pod
from agent.allocatable.facts import ExclusiveCpus, NodeFacts
from agent.allocatable.pod import Pod, Qos
from agent.allocatable.risks import Risk, shared_mappings
from agent.allocatable.verdicts import SettingComparison
from agent.config.config import KUBELET_DIR
from agent.errors import ProbeError
from agent.model.cpuset import CpuSet
from agent.native.cgroup_settings import CgroupSettingReader
from agent.sources import kubelet_state
from agent.sources.node_facts import pod_uids_with_cgroups, read_facts, read_sizes

_NAMED_MAX: Final = 4
ExclusiveByPod = Mapping[str, Mapping[str, CpuSet]]
"""Exclusive CPUs by pod UID (the kubelet's: a static pod has that of its configuration) and container
name."""
_NO_CPUS: Final[ExclusiveByPod] = {}


class NodePaths(NamedTuple):
    """Cgroup paths and kubelet version of the machine, as inputs of an audit."""

    sysfs_root: Path = Path("/sys")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    cgroup_root: str = "/"
    """The kubelet's ``--cgroup-root``."""
    kubelet_dir: Path = KUBELET_DIR
    kubelet_version: str = ""
    """Version such as ``1.37.1``; empty: unknown."""


@dataclass(frozen=True, slots=True)
class CgroupComparisonResult:
    """Result of one audit."""

    facts: NodeFacts | None
    """Facts of the node; None: no kubelet has created cgroups, so nothing was read."""
    pods: tuple[PodAudit, ...] = ()
    classes: tuple[SettingComparison, ...] = ()
    """Results of comparing the QoS class cgroups; empty if not requested, or if not all pods are known."""
    unreadable: tuple[str, ...] = ()
    """Pods that could not be audited, each with the reason."""
    gaps: tuple[str, ...] = ()
    """Facts that could not be read, each with the comparisons that were skipped."""


def audit(
    paths: NodePaths,
    pods: Sequence[Pod],
    chosen: Sequence[Pod],
    now_wall_s: float,
    *,
    classes: bool,
    complete: bool = True,
    by_drivers: ExclusiveByPod = _NO_CPUS,
) -> CgroupComparisonResult:
    """Audit the cgroups of the chosen pods. Blocks on the kernel.

    Args:
        paths: Paths of the node.
        pods: All known pods of the node.
        chosen: Pods to audit.
        now_wall_s: Current time [s since 1970].
        classes: Whether to audit the QoS classes if all pods are known: their weight is the sum over all.
        complete: Whether `pods` is complete as far as the caller knows.
        by_drivers: CPUs allocated by drivers; see :mod:`agent.devices.consumers.exclusive_cpus`.

    Raises:
        ValueError: ``kubelet_version`` is not a version.
        ProbeError: Cgroups or hugepage sizes cannot be read.
        PermissionDenied: This user may not read them.
    """
    sizes_kib = read_sizes(paths.sysfs_root)
    with CgroupSettingReader(paths.cgroupfs_root, sizes_kib) as reader:
        facts = read_facts(reader, sizes_kib, paths.cgroup_root, pods, paths.kubelet_version)
        if facts is None:
            top = f"{paths.cgroupfs_root} below {paths.cgroup_root}"
            return CgroupComparisonResult(None, gaps=(f"no kubelet has created cgroups in {top}",))
        node = AuditNode(facts, paths.cgroup_root, _has_hugetlb(reader, facts, paths.cgroup_root))
        unlisted = pod_uids_with_cgroups(paths.cgroupfs_root, facts.driver, paths.cgroup_root)
        unlisted -= {pod.cgroup_uid for pod in pods}
        by_kubelet, reason = _read_kubelet_exclusive(paths.kubelet_dir / kubelet_state.CPU_MANAGER_FILE)

        def judge(pod: Pod) -> PodAudit:
            own = [
                *_exclusive_cpus(pod, by_kubelet or {}, by_kubelet=True),
                *_exclusive_cpus(pod, by_drivers, by_kubelet=False),
            ]
            return evaluate_pod(pod, node, reader.read, now_wall_s, own, all_known=by_kubelet is not None)

        judged, unreadable = _evaluate_pods(chosen, judge)
        complete = complete and not unlisted
        compared = evaluate_classes(pods, node, reader.read, now_wall_s) if classes and complete else ()
    gaps = [
        "hugepages: pods have no hugetlb controller, so no limit applies"
        if sizes_kib and not node.has_hugetlb
        else "",
        f"exclusive CPUs of the kubelet: {reason}" if reason else "",
        f"{len(unlisted)} pods have cgroups but are not listed: {_join_uids(unlisted)}" if unlisted else "",
        "QoS classes: not audited, their weight is the sum over all pods" if classes and not complete else "",
    ]
    shared = shared_mappings(pods)
    return CgroupComparisonResult(
        facts,
        tuple(_with_shared_risks(pod, shared) for pod in judged),
        compared,
        unreadable,
        tuple(filter(None, gaps)),
    )


def _evaluate_pods(
    chosen: Iterable[Pod], judge: Callable[[Pod], PodAudit]
) -> tuple[list[PodAudit], tuple[str, ...]]:
    judged, unreadable = [], []
    for pod in chosen:
        try:
            judged.append(judge(pod))
        except ProbeError as error:
            unreadable.append(str(error))
    return judged, tuple(unreadable)


def _exclusive_cpus(pod: Pod, exclusive: ExclusiveByPod, *, by_kubelet: bool) -> Iterable[ExclusiveCpus]:
    return (ExclusiveCpus(name, cpus, by_kubelet) for name, cpus in exclusive.get(pod.cgroup_uid, {}).items())


def _with_shared_risks(judged: PodAudit, shared: Sequence[Risk]) -> PodAudit:
    """Return the pod's audit with the risks added that come from claims shared with other pods."""
    added = tuple(risk for risk in shared if risk.pod == str(judged.pod))
    return replace(judged, risks=(*judged.risks, *added)) if judged.compared and added else judged


def _join_uids(uids: Iterable[str]) -> str:
    names = sorted(uids)
    return ", ".join(names[:_NAMED_MAX]) + (", ..." if len(names) > _NAMED_MAX else "")


def _has_hugetlb(reader: CgroupSettingReader, facts: NodeFacts, root: str) -> bool:
    """Return whether the kubepods cgroup has the hugetlb controller; True if unreadable, so that its absence
    in a pod shows."""
    top = reader.read(qos_path(Qos.GUARANTEED, facts.driver, root))
    return top is None or top.controllers is None or "hugetlb" in top.controllers


def _read_kubelet_exclusive(path: Path) -> tuple[ExclusiveByPod | None, str]:
    """Return the exclusive CPUs of the kubelet's CPU manager, or None and the reason."""
    try:
        return kubelet_state.read_exclusive(path), ""
    except ProbeError as error:
        return None, str(error)

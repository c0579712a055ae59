"""Audit of cgroups: compares the cgroup settings of pods with those that their specs and claims require."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from agent.cgroup_audit.audit import (
    AuditedNode,
    PodAudit,
    PodRisk,
    QosDifferences,
    audit_node_cgroups,
    audit_pod_cgroups,
    audit_qos_cgroups,
    confirmed_qos_comparisons,
    qos_differences,
    shared_claim_risks,
    with_inherited_page_limits,
)
from agent.cgroup_audit.audit_verdicts import SettingComparison
from agent.cgroup_audit.cgroup_paths import CgroupLevel, parse_path, qos_path
from agent.cgroup_audit.expected_memory import TIE_BREAK_GATE
from agent.cgroup_audit.kubelet_config import ExclusiveCpus, NodeFacts
from agent.cgroup_audit.pod_model import Pod, QosClass
from agent.config.config import KUBELET_DIR
from agent.errors import ProbeError
from agent.model.cpuset import CpuSet
from agent.model.pod_findings import CgroupSettings
from agent.native.cgroup_settings import CgroupSettingReader
from agent.sources import kubelet_files
from agent.sources.cgroup_facts import (
    CgroupMemoryReader,
    pod_uids_with_cgroups,
    read_cgroup_facts,
    read_hugepage_sizes,
    read_machine_size,
)
from agent.sources.kubelet_files import COMMAND, KubeletConfigResult, read_config_file, read_running_config

_NAMED_MAX: Final = 4
_NO_CONTAINER_PAGE_LIMITS: Final = (
    "hugepages: the container runtime sets no limits on containers (containerd: disable_hugetlb_controller, "
    "true by default); the limits of the pods are compared"
)
_HIDDEN_PROCESSES: Final = (
    "OOM scores: not compared, the processes of containers are in another pid namespace (pods: hostPID)"
)
ExclusiveCpusByPod = Mapping[str, Mapping[str, CpuSet]]
"""Exclusive CPUs by pod UID (of a static pod: the UID of its configuration) and container name."""
_NO_CPUS: Final[ExclusiveCpusByPod] = {}


class AuditPaths(NamedTuple):
    """Inputs of an audit of cgroups: root directories, and the kubelet's configuration and version."""

    sysfs_root: Path = Path("/sys")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    cgroup_root: str = "/"
    """Value of the kubelet's flag ``--cgroup-root``."""
    kubelet_dir: Path = KUBELET_DIR
    kubelet_version: str = ""
    """Version of the kubelet such as ``1.37.1``; empty: unknown."""
    procfs_root: Path = Path("/proc")
    kubelet_config: Path | None = None
    """File with the kubelet's configuration in effect; None: read from the kubelet's process."""


@dataclass(frozen=True, slots=True)
class CgroupAuditReport:
    """Result of one audit of cgroups."""

    facts: NodeFacts | None
    """Cgroup version, cgroup driver and page sizes; None: no kubelet has created cgroups."""
    pods: tuple[PodAudit, ...] = ()
    qos_classes: tuple[SettingComparison, ...] = ()
    """Comparisons of the QoS classes' cgroups; empty: not requested, or not all pods are known."""
    node_cgroups: tuple[SettingComparison, ...] = ()
    """Comparisons of kubepods and of cgroups of reserved resources; empty: not requested, or the kubelet's
    configuration is unknown."""
    qos_differences: QosDifferences | None = None
    """Differences of the QoS classes, to be confirmed by an audit a minute later; None: there are none."""
    unreadable: tuple[str, ...] = ()
    """Pods that could not be audited, each with the reason."""
    gaps: tuple[str, ...] = ()
    """Texts on facts that could not be read, and on comparisons that were skipped for that reason."""
    notes: tuple[str, ...] = ()
    """Texts on settings of the Kubernetes node because of which settings are compared differently."""


def audit_cgroups(
    paths: AuditPaths,
    pods: Sequence[Pod],
    audited: Sequence[Pod],
    now_wall_s: float,
    *,
    with_qos_classes: bool,
    all_listed: bool = True,
    driver_cpus: ExclusiveCpusByPod = _NO_CPUS,
    earlier_qos: QosDifferences | None = None,
) -> CgroupAuditReport:
    """Compare the cgroup settings of the `audited` pods with their specs and claims. Blocks on the kernel.

    Args:
        paths: Root directories and kubelet version.
        pods: All known pods of the Kubernetes node.
        audited: Pods to audit.
        now_wall_s: Current time [s since 1970].
        with_qos_classes: Whether to audit the QoS classes and the node's cgroups, too; the weight of QoS
            classes is the sum over all pods.
        all_listed: False if the caller knows that pods are missing in `pods`.
        driver_cpus: CPUs that DRA drivers gave to single containers.
        earlier_qos: Differences of the QoS classes in an earlier audit; None: this is the first audit.

    Raises:
        ValueError: ``kubelet_version`` is not a version.
        UsageError: The file ``kubelet_config`` cannot be used.
        ProbeError: Cgroups or hugepage sizes cannot be read.
        PermissionDeniedError: This user may not read them.
    """
    sizes_kib = read_hugepage_sizes(paths.sysfs_root)
    kubelet = _read_kubelet_config(paths)
    with CgroupSettingReader(paths.cgroupfs_root, sizes_kib) as reader:
        facts = read_cgroup_facts(
            reader,
            sizes_kib,
            paths.cgroup_root,
            pods,
            paths.kubelet_version,
            kubelet.config,
            read_machine_size(paths.procfs_root, paths.sysfs_root),
        )
        if facts is None:
            top = f"{paths.cgroupfs_root} below {paths.cgroup_root}"
            return CgroupAuditReport(None, gaps=(f"no kubelet has created cgroups in {top}",))
        node = AuditedNode(facts, paths.cgroup_root, _has_hugetlb(reader, facts, paths.cgroup_root))
        existing = pod_uids_with_cgroups(paths.cgroupfs_root, facts.cgroup_driver, paths.cgroup_root)
        unlisted = existing - {pod.cgroup_uid for pod in pods}
        removed = {pod.cgroup_uid for pod in pods if _is_in_qos_sum(pod)} - existing
        by_kubelet, reason = _read_kubelet_exclusive(paths.kubelet_dir / kubelet_files.CPU_MANAGER_FILE)

        memory = CgroupMemoryReader(paths.cgroupfs_root, paths.procfs_root, facts.cgroup_version)

        def read(path: str, exclusive_cpus: bool) -> CgroupSettings | None:
            settings = reader.read(path, exclusive_cpus)
            if settings is None:
                return None
            owner = parse_path(path, paths.cgroup_root)
            is_container = owner is not None and owner.level is CgroupLevel.CONTAINER
            return memory.add_memory(settings, path, with_oom_score=is_container)

        audits: list[PodAudit] = []
        unreadable: list[str] = []
        for pod in audited:
            own = [
                *_exclusive_cpus(pod, by_kubelet or {}, by_kubelet=True),
                *_exclusive_cpus(pod, driver_cpus, by_kubelet=False),
            ]
            is_known = by_kubelet is not None
            try:
                audits.append(
                    audit_pod_cgroups(pod, node, read, now_wall_s, own, exclusive_cpus_complete=is_known)
                )
            except ProbeError as error:
                unreadable.append(str(error))
        all_listed = all_listed and not unlisted and not removed
        compared = audit_qos_cgroups(pods, node, read, now_wall_s) if with_qos_classes and all_listed else ()
        of_node = audit_node_cgroups(pods if all_listed else None, node, read) if with_qos_classes else ()
    gaps = [
        "hugepages: pods have no hugetlb controller, so no limit applies"
        if sizes_kib and not node.has_hugetlb
        else "",
        f"exclusive CPUs of the kubelet: {reason}" if reason else "",
        f"unlisted pods with cgroups ({len(unlisted)}): {_join_uids(unlisted)}" if unlisted else "",
        f"listed pods without a cgroup ({len(removed)}): {_join_uids(removed)}"
        if removed and with_qos_classes
        else "",
        "QoS classes: not audited, their weight is the sum over all pods"
        if with_qos_classes and not all_listed
        else "",
        *_kubelet_gaps(kubelet),
        _HIDDEN_PROCESSES if memory.has_hidden_processes else "",
    ]
    shared = shared_claim_risks(pods)
    results, is_inherited = with_inherited_page_limits(audits)
    return CgroupAuditReport(
        facts,
        tuple(_add_shared_risks(pod, shared) for pod in results),
        confirmed_qos_comparisons(compared, now_wall_s, earlier_qos),
        confirmed_qos_comparisons(of_node, now_wall_s, earlier_qos),
        qos_differences((*compared, *of_node), now_wall_s),
        tuple(unreadable),
        tuple(filter(None, gaps)),
        (_NO_CONTAINER_PAGE_LIMITS,) if is_inherited else (),
    )


def _read_kubelet_config(paths: AuditPaths) -> KubeletConfigResult:
    if paths.kubelet_config is not None:
        return KubeletConfigResult(read_config_file(paths.kubelet_config))
    return read_running_config(paths.procfs_root)


def _kubelet_gaps(kubelet: KubeletConfigResult) -> Iterable[str]:
    """Yield a text for each kind of settings that the audit skips because of the kubelet's configuration."""
    if kubelet.config is None:
        yield (
            f"configuration of the kubelet: {kubelet.reason}; memory QoS, swap limits, CPU quota periods, "
            "missing CPU quotas and node cgroups are not compared (--kubelet-config FILE takes the output of "
            f"{COMMAND})"
        )
        return
    if kubelet.config.reserves_qos_memory:
        yield "memory limits of QoS classes: not compared, qosReserved sets them by the use of memory"
    if any(kubelet.config.possible_gate(TIE_BREAK_GATE, default=False)):
        yield f"OOM scores of Burstable pods: not compared, the gate {TIE_BREAK_GATE} may be on"


def _is_in_qos_sum(pod: Pod) -> bool:
    """Return whether the CPU weight of the cgroup of Burstable pods includes a pod's requests.

    True for an active Burstable pod with a started container.
    """
    has_started = any(container.started_wall_s is not None for container in pod.containers)
    return pod.is_active and has_started and pod.qos is QosClass.BURSTABLE


def _exclusive_cpus(pod: Pod, exclusive: ExclusiveCpusByPod, *, by_kubelet: bool) -> Iterable[ExclusiveCpus]:
    return (ExclusiveCpus(name, cpus, by_kubelet) for name, cpus in exclusive.get(pod.cgroup_uid, {}).items())


def _add_shared_risks(audit: PodAudit, shared: Sequence[PodRisk]) -> PodAudit:
    """Return the audit of a pod, extended by the pod's risks from claims that other pods share."""
    added = tuple(risk for risk in shared if risk.pod == str(audit.pod))
    return replace(audit, risks=(*audit.risks, *added)) if audit.comparisons and added else audit


def _join_uids(uids: Iterable[str]) -> str:
    names = sorted(uids)
    return ", ".join(names[:_NAMED_MAX]) + (", ..." if len(names) > _NAMED_MAX else "")


def _has_hugetlb(reader: CgroupSettingReader, facts: NodeFacts, root: str) -> bool:
    """Return whether the kubepods cgroup has the hugetlb controller; True if that cannot be read."""
    top = reader.read(qos_path(QosClass.GUARANTEED, facts.cgroup_driver, root))
    return top is None or top.controllers is None or "hugetlb" in top.controllers


def _read_kubelet_exclusive(path: Path) -> tuple[ExclusiveCpusByPod | None, str]:
    """Read the exclusive CPUs that the kubelet's CPU manager has given to containers.

    Returns them with an empty text, or None with the error of the read.
    """
    try:
        return kubelet_files.read_exclusive_cpus(path), ""
    except ProbeError as error:
        return None, str(error)

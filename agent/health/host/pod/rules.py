"""Catalog rows for findings of pod audits, which compare the cgroup files and requests of pods with the
allocation that their claims and requests give them."""

from dataclasses import dataclass
from typing import Final

from agent.health.rules import CatalogRow
from agent.model.health import Blame, Repair, Severity

MAX_GROUPS: Final = 512
"""Largest number of finding groups (findings of one pod or container with one code) that are reported, worst
first: more findings than that have one common cause."""
_AT_AUDIT: Final = "any cgroup file at an audit (pods.audit), 30 s or more after a start or a resize"
_AT_ANY_AUDIT: Final = "at any audit (pods.audit)"
_FIND_WRITER: Final = (
    "see drahealth audit for the arithmetic, and find out what wrote the value: the kubelet (its feature "
    "gates), the runtime, an NRI plugin, systemd, or an operator"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFindingRow(CatalogRow):
    """Catalog row for one finding code of pod audits; default: ``info`` for a cgroup file that deviates."""

    description: str
    """Meaning of the finding, as a sentence for the list of checks."""
    severity: Severity = Severity.INFO
    blame: Blame = Blame.CONFIGURATION
    source: str = "pods"
    threshold: str = _AT_AUDIT
    advice: str = _FIND_WRITER
    repair: Repair = Repair.NONE


_ROWS: Final = (
    PodFindingRow(
        code="cgroup.lower",
        severity=Severity.DEGRADED,
        description="A pod or a container that uses claims has less in its cgroup than expected.",
        why="it is throttled, killed or refused pages before it has used its allocation",
        try_it="write half of its value to memory.max of a container that uses a claim",
    ),
    PodFindingRow(
        code="cgroup.limited",
        severity=Severity.DEGRADED,
        description="A pod or a container that uses claims has a limit in its cgroup but none is expected.",
        why="it is throttled, killed or refused pages although no limit was requested",
        try_it="write 50000 100000 to cpu.max of a container that uses a claim and has no CPU limit",
    ),
    PodFindingRow(
        code="cgroup.parent_tighter",
        severity=Severity.DEGRADED,
        description="A pod that uses claims has less in its cgroup than its containers have in theirs.",
        why="the containers cannot use their allocation because of the pod's limit",
        try_it="write less to memory.max of a pod that uses a claim than its containers have",
    ),
    PodFindingRow(
        code="cgroup.higher",
        description="A pod or a container that uses claims has more in its cgroup than expected.",
        why="it can use resources that are allocated to others",
        try_it="write twice its value to memory.max of a container that uses a claim",
    ),
    PodFindingRow(
        code="cgroup.unlimited",
        description="A pod or a container that uses claims has no limit in its cgroup but one is expected.",
        why="it can use resources that are allocated to others",
        try_it="write max to memory.max of a container that uses a claim and has a memory limit",
    ),
    PodFindingRow(
        code="cgroup.missing",
        description="The controller or file for an expected value does not exist or cannot be read.",
        why="nothing guarantees the pod its allocation or limits it to that",
        advice="enable the controller: check cgroup.subtree_control of each cgroup above",
        try_it="write -memory to cgroup.subtree_control of a pod that uses a claim",
    ),
    PodFindingRow(
        code="claim.best_effort",
        blame=Blame.WORKLOAD,
        description="A pod is BestEffort though its claims give it CPU or memory.",
        threshold=_AT_ANY_AUDIT,
        why="on a busy node it gets the least CPU time, and its processes are killed first",
        advice="give one of its containers a small request, so that the pod is Burstable",
        try_it="claim CPU for a pod without requests and limits",
    ),
    PodFindingRow(
        code="claim.not_counted",
        description="The kubelet does not add the resources of claims to the cgroups of their pods.",
        threshold=_AT_ANY_AUDIT,
        why="the scheduler accounts for them, but the pod does not get them",
        advice="enable the gate DRANodeAllocatableResources of kubelets from 1.37 on",
        try_it="claim CPU on a node with kubelet 1.36",
    ),
    PodFindingRow(
        code="claim.over_pod_level",
        blame=Blame.WORKLOAD,
        description="The claims of a pod give more than its pod-level resources.",
        threshold=_AT_ANY_AUDIT,
        why="the pod-level resources count, and the pod does not get what the claims give beyond them",
        advice="raise spec.resources by the resources of the claims, which it includes",
        try_it="claim 4 CPUs for a pod with 2 in spec.resources",
    ),
    PodFindingRow(
        code="claim.shared_mapping",
        blame=Blame.WORKLOAD,
        description="Several pods share a claim that counts as CPU, memory or hugepages.",
        threshold=_AT_ANY_AUDIT,
        why="each pod gets all of it in its cgroup, but it exists once",
        advice="give each pod its own claim; if the pods share it on purpose, list it in the annotation "
        "drahealth/shared-claims of each",
        try_it="name one claim that gives CPU in two pods",
    ),
    PodFindingRow(
        code="claim.starved",
        blame=Blame.WORKLOAD,
        description="A container has no CPU request although its claims give it CPU.",
        threshold=_AT_ANY_AUDIT,
        why="within its pod it has the lowest CPU weight, whatever its claims give",
        advice="give the container a CPU request: within a pod, claims do not count for the weight",
        try_it="claim CPU for a container without a CPU request",
    ),
    PodFindingRow(
        code="cpus.exclusive_quota",
        blame=Blame.WORKLOAD,
        description="A container has exclusive CPUs from a driver and a quota below their number.",
        threshold="any quota of less than 1000m for each of its CPUs",
        why="the CPUs idle while the container waits for its quota",
        advice="remove the container's CPU limit, or raise it to the number of its CPUs",
        try_it="give a container 4 exclusive CPUs by a driver, and a CPU limit of 2",
    ),
    PodFindingRow(
        code="cpus.exclusive_throttled",
        severity=Severity.DEGRADED,
        blame=Blame.WORKLOAD,
        description="A container was throttled although it has exclusive CPUs from a driver.",
        threshold="any throttled period since the container started",
        why="the CPUs idled while the container waited for its quota",
        advice="remove the container's CPU limit: its cpuset limits it already",
        try_it="give a container 4 exclusive CPUs by a driver, and a CPU limit of 2, and load them",
    ),
)
POD_AUDIT_ROWS: Final = {row.code: row for row in _ROWS}
"""Catalog rows for findings of pod audits, by code."""
UNLISTED_FINDINGS_ROW: Final = PodFindingRow(
    code="node.pods.unlisted",
    blame=Blame.AGENT,
    description="An audit has more findings than the agent lists for pods and their devices.",
    threshold=f"more than {MAX_GROUPS}, those of a pod or container under one code counted once",
    why="so many findings most likely have one common cause",
    advice="run drahealth audit for all findings and check what the first have in common",
    try_it="audit a node of 600 pods with claims whose kubelet does not count them",
)
PODS_UNREADABLE_ROW: Final = PodFindingRow(
    code="node.pods.unread",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    description="Pods and their claims can no longer be read.",
    threshold="three periods (pods.period) and some time without a successful pass",
    why="findings of audits are no longer reported, and the pods that a fault affects are unknown",
    advice="see the source pods in drahealth scan: the kubelet's files and sockets, and their permissions",
    try_it="chmod 0 /var/lib/kubelet/dra_manager_state, with an agent that is not root",
)

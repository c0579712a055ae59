"""The catalogue's rows for what an audit finds in pods. What comes of each is agent.health.host.pod.rules'.

What a cgroup says, whoever set up the node can mend; how a pod asks, its author.
"""

from dataclasses import dataclass
from typing import Final

from agent.health.catalog import Row
from agent.model.health import Blame, Severity

MOST: Final = 512
"""Are judged, the worst. A node has a few hundred pods, and what is wrong with all of them has one reason."""
_READ: Final = "any knob at an audit (pods.audit), 30 s or more after a start or a resize"
_ASKED: Final = "at any audit (pods.audit)"
_WRITTEN: Final = (
    "see drahealth audit for the arithmetic, and find out who wrote the value: kubelet (its gates), runtime, "
    "an NRI plugin, systemd, or somebody by hand"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseRow(Row):
    """A row that an audit judges."""

    what: str
    """What is found, in a sentence."""
    source: str = "pods"


_ROWS: Final = (
    PromiseRow(
        code="cgroup.lower",
        severity=Severity.DEGRADED,
        blame=Blame.CONFIGURATION,
        what="A pod or a container that uses claims has less in its cgroup than it was promised.",
        threshold=_READ,
        why="it is throttled, killed or refused pages before it has used what it was given",
        advice=_WRITTEN,
        try_it="write half of its value to memory.max of a container that uses a claim",
    ),
    PromiseRow(
        code="cgroup.limited",
        severity=Severity.DEGRADED,
        blame=Blame.CONFIGURATION,
        what="A pod or a container that uses claims has a limit in its cgroup where there should be none.",
        threshold=_READ,
        why="it is throttled, killed or refused pages though nobody asked for that",
        advice=_WRITTEN,
        try_it="write 50000 100000 to cpu.max of a container that uses a claim and has no CPU limit",
    ),
    PromiseRow(
        code="cgroup.parent_tighter",
        severity=Severity.DEGRADED,
        blame=Blame.CONFIGURATION,
        what="A pod that uses claims has less in its cgroup than its containers have in theirs.",
        threshold=_READ,
        why="what the containers were given, the pod keeps from them",
        advice=_WRITTEN,
        try_it="write less to memory.max of a pod that uses a claim than its containers have",
    ),
    PromiseRow(
        code="cgroup.higher",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        what="A pod or a container that uses claims has more in its cgroup than it was promised.",
        threshold=_READ,
        why="it can take what was given to others",
        advice=_WRITTEN,
        try_it="write twice its value to memory.max of a container that uses a claim",
    ),
    PromiseRow(
        code="cgroup.unlimited",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        what="A pod or a container that uses claims has no limit in its cgroup where there should be one.",
        threshold=_READ,
        why="it can take what was given to others",
        advice=_WRITTEN,
        try_it="write max to memory.max of a container that uses a claim and has a memory limit",
    ),
    PromiseRow(
        code="cgroup.missing",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        what="The controller or the file that should keep a promise is not there, or cannot be read.",
        threshold=_READ,
        why="nothing gives a pod what it was promised, or keeps it to that",
        advice="enable the controller: cgroup.subtree_control of each cgroup above tells where it ends",
        try_it="write -memory to cgroup.subtree_control of a pod that uses a claim",
    ),
    PromiseRow(
        code="claim.best_effort",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        what="A pod is BestEffort though its claims give it CPU or memory.",
        threshold=_ASKED,
        why="when the node is busy it gets the least CPU time, and its processes are killed first",
        advice="give one of its containers a small request, so that the pod is Burstable",
        try_it="claim CPU for a pod without requests and limits",
    ),
    PromiseRow(
        code="claim.not_counted",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        what="The kubelet does not add what claims give to the cgroups of their pods.",
        threshold=_ASKED,
        why="the scheduler counts on it, and the pod does not have it",
        advice="enable the gate DRANodeAllocatableResources of kubelets from 1.37 on",
        try_it="claim CPU on a node whose kubelet is of 1.36",
    ),
    PromiseRow(
        code="claim.over_pod_level",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        what="The claims of a pod give more than is asked for the pod as a whole.",
        threshold=_ASKED,
        why="what is asked for the pod counts, and what the claims give beyond is not had",
        advice="raise spec.resources by what the claims give, which is part of it",
        try_it="claim 4 CPUs for a pod with 2 in spec.resources",
    ),
    PromiseRow(
        code="claim.shared_mapping",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        what="A claim that counts as CPU, memory or hugepages is that of several pods.",
        threshold=_ASKED,
        why="each of them is given all of it, and it is there once",
        advice="give each pod a claim of its own; the scheduler should have refused the second",
        try_it="name one claim that gives CPU in two pods",
    ),
    PromiseRow(
        code="claim.starved",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        what="A container has no request of CPU, and its claims give it CPU.",
        threshold=_ASKED,
        why="within its pod it has the least weight, whatever its claims give",
        advice="give the container a request of CPU: within its pod, claims do not count",
        try_it="claim CPU for a container without a request of CPU",
    ),
    PromiseRow(
        code="cpus.exclusive_quota",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        what="A driver gave a container CPUs of its own, and its quota is less than these.",
        threshold="any quota of less than 1000m for each of its CPUs",
        why="they stand idle while it has to wait for them",
        advice="leave the container's CPU limit out, or raise it to the CPUs that it has",
        try_it="give a container 4 CPUs of its own by a driver, and a CPU limit of 2",
    ),
    PromiseRow(
        code="cpus.exclusive_throttled",
        severity=Severity.DEGRADED,
        blame=Blame.WORKLOAD,
        what="A container was throttled though a driver gave it CPUs of its own.",
        threshold="any throttled period since the container started",
        why="they stood idle while it had to wait for them",
        advice="leave the container's CPU limit out: its CPUs bound it well enough",
        try_it="give a container 4 CPUs of its own by a driver, and a CPU limit of 2, and load them",
    ),
)
PROMISES: Final = {row.code: row for row in _ROWS}
"""All that an audit can find."""
UNLISTED: Final = PromiseRow(
    code="node.pods.unlisted",
    severity=Severity.INFO,
    blame=Blame.AGENT,
    what="An audit found more than is told of pods one by one, and of their devices.",
    threshold=f"more than {MOST}, those of a pod or container under one code counted once",
    why="what is wrong with so many has one reason, most likely",
    advice="drahealth audit shows all; look at what the first have in common",
    try_it="audit a node of 600 pods with claims whose kubelet does not count them",
)
UNREAD: Final = PromiseRow(
    code="node.pods.unread",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    what="What was known of pods and their claims can no longer be read.",
    threshold="three periods (pods.period) and a while without a pass that went well",
    why="what an audit found is no longer told, and nobody knows whom a sick device hurts",
    advice="see the source pods of drahealth scan: the kubelet's files and sockets, and who may read them",
    try_it="chmod 0 /var/lib/kubelet/dra_manager_state, with an agent that is not root",
)

"""Pods and classes, each as a whole: where its cgroups are, and what is said of them once they were read.

Pure: ``read`` is the caller's, and gives what a cgroup says. What is wrong at the first look is looked at
again, because a container may be on its way out, and one hierarchy of v1 is removed after the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent.allocatable.actual import actual_of
from agent.allocatable.cgroups import Level, Place, container_path, parse_path, pod_path, qos_path
from agent.allocatable.compare import changed_s, compare
from agent.allocatable.expected import ExpectedGroup, GroupRef, expect_pod, expect_qos
from agent.allocatable.facts import Exclusive, NodeFacts
from agent.allocatable.knobs import Knob
from agent.allocatable.pod import CPU, Container, Pod, Qos
from agent.allocatable.risks import Risk, risks_of
from agent.allocatable.verdicts import CONCERNS, Actual, Compared, Verdict
from agent.errors import ProbeError
from agent.model.cgroup import CgroupKnobs
from agent.model.reading import Missing

Read = Callable[[str, bool], CgroupKnobs | None]
"""By the path of a cgroup below the mounts, and whether it has CPUs of its own; None: it is not there."""

UNJUDGED: Final = frozenset({Verdict.UNKNOWN, Verdict.VANISHED, Verdict.QUIET})
"""Verdicts by which nothing is said of the promise."""
_PAGES: Final = frozenset({Knob.PAGES, Knob.RESERVED})


class Node(NamedTuple):
    """Where to look, and what is known of it."""

    facts: NodeFacts
    root: str = "/"
    """The kubelet's ``--cgroup-root``."""
    has_hugetlb: bool = True
    """Whether pods can have limits of hugepages at all: the controller is there for kubepods."""


@dataclass(frozen=True, slots=True)
class JudgedPod:
    """One pod."""

    pod: Pod
    compared: tuple[Compared, ...]
    """Of the pod's cgroup and those of containers that run; empty if none does."""
    risks: tuple[Risk, ...]
    idle: tuple[str, ...]
    """Containers that do not run, so that there is nothing of theirs to compare."""


def judge_pod(
    pod: Pod,
    node: Node,
    read: Read,
    now_wall_s: float,
    exclusive: Sequence[Exclusive] = (),
    *,
    all_known: bool = True,
) -> JudgedPod:
    """All of one pod.

    Args:
        pod: An active one.
        node: Where it runs.
        read: Reads a cgroup.
        now_wall_s: When that is [s since 1970].
        exclusive: CPUs that its containers have for themselves.
        all_known: All that the kubelet gave are among them.

    Raises:
        ProbeError: The pod's UID, or a container's id, is no name of a cgroup.
    """
    idle = tuple(one.name for one in pod.containers if not _runs(one))
    if len(idle) == len(pod.containers):
        return JudgedPod(pod, (), (), idle)
    groups = [
        _limited(one, node)
        for one in expect_pod(pod, node.facts, exclusive)
        if one.group.container not in idle
    ]
    at = {one.group: _path(one.group, pod, node) for one in groups}
    owners = {one.container for one in exclusive}
    throttled: dict[str, int] = {}

    def look(group: GroupRef) -> Actual:
        knobs = read(at[group], group.container in owners)
        if knobs and group.container and not isinstance(knobs.throttled, Missing):
            throttled[group.container] = knobs.throttled
        return actual_of(knobs, changed_s(pod, now_wall_s, group.container))

    compared = _compared(groups, look, node)
    if not all_known:
        compared = tuple(_unless_exclusive(one, pod) for one in compared)
    return JudgedPod(pod, compared, risks_of(pod, node.facts, exclusive, throttled), idle)


def judge_classes(pods: Sequence[Pod], node: Node, read: Read, now_wall_s: float) -> tuple[Compared, ...]:
    """The cgroups of the classes Burstable and BestEffort.

    Args:
        pods: All of the node.
        node: Theirs.
        read: Reads a cgroup.
        now_wall_s: When that is.
    """
    ages = [changed_s(pod, now_wall_s) for pod in pods if pod.qos is Qos.BURSTABLE]
    since = min((age for age in ages if age is not None), default=None)

    def look(group: GroupRef) -> Actual:
        return actual_of(read(qos_path(group.qos, node.facts.driver, node.root), False), since)

    groups = [_limited(one, node) for one in expect_qos(pods, node.facts)]
    return _compared(groups, look, node)


def _compared(
    groups: Sequence[ExpectedGroup], look: Callable[[GroupRef], Actual], node: Node
) -> tuple[Compared, ...]:
    actual = {one.group: look(one.group) for one in groups}
    compared = compare(groups, actual, node.facts.version)
    if not any(one.verdict in CONCERNS for one in compared):
        return compared
    wrong: Iterable[GroupRef] = {one.group for one in compared if one.verdict in CONCERNS}
    again: Mapping[GroupRef, Actual] = {group: look(group) for group in wrong}
    return compare(groups, {**actual, **again}, node.facts.version)


# --- where it is -------------------------------------------------------------------------------------------


def _runs(container: Container) -> bool:
    return bool(container.id) and container.started_wall_s is not None


def _path(group: GroupRef, pod: Pod, node: Node) -> str:
    path = pod_path(pod.cgroup_uid, pod.qos, node.facts.driver, node.root)
    ident = ""
    if group.level is Level.CONTAINER:
        container = next(one for one in pod.containers if one.name == group.container)
        path, ident = container_path(path, container.id, container.runtime, node.facts.driver), container.id
    if parse_path(path, node.root) != Place(group.level, pod.qos, pod.cgroup_uid, ident):
        raise ProbeError(f"pod {pod}: {path[:256]!a} is no path of a cgroup")
    return path


# --- what the node has not, or nobody knows ----------------------------------------------------------------


def _limited(group: ExpectedGroup, node: Node) -> ExpectedGroup:
    """Without the limits that keep a pod from hugepages: where nobody can be limited, they are not missed."""
    if node.has_hugetlb:
        return group
    knobs = tuple(one for one in group.knobs if one.knob.knob not in _PAGES or not _is_nothing(one.accepted))
    return replace(group, knobs=knobs)


def _is_nothing(accepted: Sequence[tuple[int, str, bool]]) -> bool:
    return bool(accepted) and accepted[0][0] == 0


def _unless_exclusive(compared: Compared, pod: Pod) -> Compared:
    """Where it is not known who has CPUs of its own from the kubelet, a lifted quota may be right."""
    is_lifted = compared.verdict is Verdict.UNLIMITED and compared.knob.knob is Knob.QUOTA
    if not is_lifted or pod.qos is not Qos.GUARANTEED or not _could_be_exclusive(pod):
        return compared
    why = f"{compared.why}; or the kubelet gave it CPUs of its own, which could not be looked up"
    return compared._replace(verdict=Verdict.UNKNOWN, why=why, risk="")


def _could_be_exclusive(pod: Pod) -> bool:
    limits = [pod.level_limits.get(CPU), *(one.limits.get(CPU) for one in pod.containers)]
    return any(limit and limit.milli % 1000 == 0 for limit in limits)

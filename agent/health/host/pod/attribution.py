"""What is wrong with pods: the notes on them, and what their devices are told of it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from agent.devices.inventory import Device
from agent.health.evaluation import Evaluation, Subject, row_among
from agent.health.host.cgroup.rules import EXCLUSIVE_THROTTLED, GROUP_RULES, LACKED
from agent.health.host.cgroup.view import GroupView
from agent.health.host.pod.pod_devices import PodDevices, Used
from agent.health.host.pod.pod_findings import AffectedDevice, PodIssue, with_troubles
from agent.health.host.pod.rules import promise_notes, promise_troubles
from agent.health.host.pod.state import PodsPast
from agent.health.verdict import PreviousVerdicts
from agent.model.health import Cause, DeviceHealth, Note


def judge_pods(
    look: Evaluation,
    before: PreviousVerdicts,
    past: PodsPast,
    views: Sequence[GroupView],
    devices: Mapping[Subject, Device],
    verdicts: Mapping[Subject, DeviceHealth],
    declaring: Collection[str],
) -> tuple[Sequence[Note], Mapping[Subject, DeviceHealth]]:
    """All of one look.

    Args:
        past: What is known of pods, after this look.
        views: Cgroups that have something to tell.
        devices: All that are judged.
        verdicts: On them, without what is wrong with pods.
        declaring: Drivers that declare their devices.

    Returns:
        The notes, and the verdicts that are others for it.
    """
    if past.until_ns is not None:
        look.due_ns.append(past.until_ns)
    if not views and not past.found and not past.lost:
        return (), {}
    pods = PodDevices(past.known, devices, declaring, look.settings)
    suffered = list(group_troubles(look, views, pods))
    audited = list(promise_troubles(past.found if past.known else (), pods))
    notes = [*(trouble.note for trouble in suffered), *promise_notes(audited, past, look.sources)]
    return notes, dict(with_troubles(look, before, [*suffered, *audited], devices, verdicts))


def group_troubles(look: Evaluation, views: Iterable[GroupView], pods: PodDevices) -> Iterator[PodIssue]:
    """What is wrong with pods and containers, by their cgroups."""
    for view in views:
        subject = f"group:{view.group.id}"
        look.judge_all(subject, GROUP_RULES, view)
        causes = look.causes(subject, partial(row_among, GROUP_RULES))
        if not causes:
            continue
        whose = (view.group.pod_uid, view.group.container)
        used = pods.used(view.group.pod_uid)
        devices = tuple(dict.fromkeys([*view.exclusive, *(one.subject for one in used)]))
        for cause in causes:
            evidence = f"{pods.who(*whose)}: {cause.evidence}"
            concerns = [
                AffectedDevice(one, cause, cause.severity, evidence) for one in _lacking(cause, view, used)
            ]
            yield PodIssue(Note(pods.subject(*whose), cause, devices), tuple(concerns))


def _lacking(cause: Cause, view: GroupView, used: Iterable[Used]) -> Iterable[str]:
    """The devices that should give what a pod has not enough of."""
    if cause.code == EXCLUSIVE_THROTTLED.code:
        return view.exclusive
    kind = LACKED.get(cause.code)
    return [one.subject for one in used if one.device and one.device.kind is kind]

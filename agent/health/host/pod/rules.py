"""What an audit finds in pods: cgroups that do not say what Kubernetes promised, and risks in how pods ask.

A note for each pod or container and code, however many knobs it is about. Devices of the pod are told, too:

* those that give the resource, of hugepages that size, as bad as the row says: what they give is not had;
* all where none does, and as a word: nobody knows which of them should have given it.

Nothing of it makes a device Unhealthy or Unknown: it works, and it is not the device that is to be mended.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from agent.devices.inventory import Device, Kind
from agent.health.catalog import cause_of
from agent.health.host.pod.pod_devices import PodDevices, Used
from agent.health.host.pod.pod_findings import AffectedDevice, PodIssue, listed
from agent.health.host.pod.rule_rows import PROMISES, UNLISTED, UNREAD
from agent.health.host.pod.state import Found, PodsPast
from agent.health.host.verdicts import NODE
from agent.model.health import Cause, Note, Severity
from agent.model.pods import PodFinding, Resource
from agent.model.source import SourceSample

KINDS: Final[Mapping[Resource, Kind]] = {
    Resource.CPU: Kind.CPU,
    Resource.MEMORY: Kind.MEMORY,
    Resource.HUGEPAGES: Kind.HUGEPAGES,
}
"""What kind of device gives it."""


def promise_troubles(found: Iterable[Found], pods: PodDevices) -> Iterator[PodIssue]:
    """What was found, in its order."""
    for one in found:
        row = PROMISES[one.code]
        used = pods.used(one.pod_uid)
        advice = next((part.advice for part in one.parts if part.advice), row.advice)
        cause = Cause(row.code, row.severity, row.blame, _evidence(one.parts), advice, one.since)
        who = pods.who(one.pod_uid, one.container)
        note = Note(pods.subject(one.pod_uid, one.container), cause, tuple(each.subject for each in used))
        yield PodIssue(note, tuple(_concerns(one.parts, cause, used, who)))


def promise_notes(
    troubles: Sequence[PodIssue], past: PodsPast, sources: Mapping[str, SourceSample]
) -> Iterator[Note]:
    """What was found, how much more there is, and that nobody sees it any more.

    Args:
        troubles: What was found.
        past: After this look.
        sources: As they are to be shown.
    """
    for trouble in troubles:
        yield trouble.note
    if troubles and past.more:
        since = min((trouble.note.cause.since for trouble in troubles), key=lambda since: since.mono_ns)
        yield Note(NODE, cause_of(UNLISTED, f"{past.more} more than are told of one by one", since))
    if past.lost and past.was_read and past.sample:
        source = sources.get(past.sample.source.name, past.sample.source)
        yield Note(NODE, cause_of(UNREAD, f"{source.name}: {source.detail}", past.lost))


def _concerns(
    parts: Sequence[PodFinding], cause: Cause, used: Iterable[Used], who: str
) -> Iterator[AffectedDevice]:
    """What of it is told of which device that is judged here."""
    devices = [one.device for one in used if one.device]
    homeless = [part for part in parts if not any(_gives(device, part) for device in devices)]
    for device in devices:
        own = [part for part in parts if _gives(device, part)]
        for of, severity in ((own, cause.severity), (homeless, Severity.INFO)):
            if of:
                yield AffectedDevice(device.subject, cause, severity, f"{who}: {_evidence(of)}")


def _gives(device: Device, part: PodFinding) -> bool:
    is_kind = part.resource is not None and device.kind is KINDS[part.resource]
    return is_kind and part.size_kib in {0, device.size_kib}


def _evidence(parts: Iterable[PodFinding]) -> str:
    return listed(part.evidence for part in parts)

"""The verdicts on the host's own devices, and the notes on the node."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from agent.devices.inventory import Device, device_pools
from agent.health.catalog import STALLED, STALLED_ADVICE, Rule
from agent.health.evaluation import Evaluation, row_among
from agent.health.host.catalog import MAIN_SOURCES, RULES
from agent.health.host.node.rules import NODE_RULES
from agent.health.host.node.state import view_node
from agent.health.host.state import HostRuleState, view_device
from agent.health.stalls import stall_cause
from agent.health.verdict import PreviousVerdicts, lease_of, verdict, verified_by
from agent.model.health import Blame, Cause, DeviceHealth, Note, Severity
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState

NODE: Final = "node"
"""What notes are about that are about no pod."""
UNREAD: Final = "its first pass is not over"


def judge_host(look: Evaluation, memory: HostRuleState, snapshot: Snapshot) -> None:
    """Moves the tracks of every device of the host."""
    pools = device_pools(snapshot)
    for device in memory.devices:
        view = view_device(memory, snapshot, pools, look.settings, device, look.now)
        look.judge_view(device.subject, RULES[device.kind], view)


def host_verdicts(
    look: Evaluation, before: PreviousVerdicts, memory: HostRuleState
) -> Iterator[tuple[Device, DeviceHealth]]:
    """What is said of each: nothing good of one that nobody has looked at yet."""
    for device in memory.devices:
        more = [
            Cause(STALLED, Severity.UNKNOWN, Blame.AGENT, f"{name}: {UNREAD}", STALLED_ADVICE, before.began)
            for name in unread(look, device)
        ]
        yield device, judged_verdict(look, before, device, RULES[device.kind], more)


def judged_verdict(
    look: Evaluation,
    before: PreviousVerdicts,
    device: Device,
    rules: Sequence[Rule],
    more: Iterable[Cause] = (),
    beside: Iterable[SourceSample] = (),
) -> DeviceHealth:
    """A device whose main source stands still is Unknown whatever was known of it: nobody has looked.

    What was known stays among the causes. What it is judged by besides, the kernel log say, may stand still
    without that: it is told of as a source.

    Args:
        more: Causes that are not of the device's own rules.
        beside: Sources that it is verified by besides its main ones.
    """
    causes = [*look.causes(device.subject, partial(row_among, rules)), *more]
    causes.sort(key=lambda cause: -cause.severity)
    sources = [*sources_of(look, device), *beside]
    standing = [source for source in sources if source.name in before.stalled]
    causes[:0] = [stall_cause(source, before.stalled, look.now) for source in standing]
    severity = Severity.UNKNOWN if standing else causes[0].severity if causes else Severity.OK
    return verdict(
        look, before, device, severity, causes, verified_by(sources, look.now), lease_of(look, sources)
    )


def sources_of(look: Evaluation, device: Device) -> list[SourceSample]:
    """The sources that a device is verified by: those that the machine has, if it has one."""
    found = [look.sources[name] for name in MAIN_SOURCES[device.kind] if name in look.sources]
    return [source for source in found if source.state is not SourceState.ABSENT] or found


def unread(look: Evaluation, device: Device) -> Sequence[str]:
    """The sources, of those that a device is verified by, whose first pass is not over; all, if none runs."""
    sources = sources_of(look, device)
    if not sources:
        return MAIN_SOURCES[device.kind]
    return [source.name for source in sources if source.state is SourceState.STARTING]


def node_notes(look: Evaluation, memory: HostRuleState, snapshot: Snapshot) -> Iterator[Note]:
    """What is to be told of the node, and is about no device."""
    view = view_node(memory.node, memory.log, snapshot, look.settings, look.now)
    look.judge_view(NODE, NODE_RULES, view)
    for cause in look.causes(NODE, partial(row_among, NODE_RULES)):
        yield Note(NODE, cause)

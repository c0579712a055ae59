"""Verdicts on the host's own devices, and notes on the machine."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from agent.devices.inventory import Device, device_pools
from agent.health.evaluation import Evaluation, row_with_code
from agent.health.host.catalog import MAIN_SOURCES, RULES
from agent.health.host.node.rules import NODE_RULES
from agent.health.host.node.state import view_node
from agent.health.host.state import HostRuleState, view_device
from agent.health.rules import STALLED, STALLED_ADVICE, Rule
from agent.health.stalls import stall_cause
from agent.health.verdict import PreviousVerdicts, lease_seconds, verdict, verified_at
from agent.model.health import Blame, Cause, DeviceHealth, Note, Severity
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState

NODE: Final = "node"
"""Subject of notes that concern the machine instead of a pod."""
STARTING_DETAIL: Final = "first pass not finished"


def evaluate_host(evaluation: Evaluation, host: HostRuleState, snapshot: Snapshot) -> None:
    """Evaluate the rules of every device of the host."""
    pools = device_pools(snapshot)
    for device in host.devices:
        view = view_device(host, snapshot, pools, evaluation.settings, device, evaluation.now)
        evaluation.run_cached_rules(device.subject, RULES[device.kind], view)


def host_verdicts(
    evaluation: Evaluation, previous: PreviousVerdicts, host: HostRuleState
) -> Iterator[tuple[Device, DeviceHealth]]:
    """Yield the verdict on each device of the host; Unknown until its sources have finished a pass."""
    for device in host.devices:
        more = [
            Cause(
                STALLED,
                Severity.UNKNOWN,
                Blame.AGENT,
                f"{name}: {STARTING_DETAIL}",
                STALLED_ADVICE,
                previous.started,
            )
            for name in sources_starting(evaluation, device)
        ]
        yield device, verdict_of_causes(evaluation, previous, device, RULES[device.kind], more)


def verdict_of_causes(
    evaluation: Evaluation,
    previous: PreviousVerdicts,
    device: Device,
    rules: Sequence[Rule],
    more: Iterable[Cause] = (),
    more_sources: Iterable[SourceSample] = (),
) -> DeviceHealth:
    """Return the verdict on a device from its causes; Unknown if a source that verifies the device is
    stalled.

    The other causes stay listed. Other sources that its rules read, for example the kernel log, may be
    stalled without effect on the verdict; the report lists them.

    Args:
        more: Causes from outside the device's own rules.
        more_sources: Sources that verify the device in addition to its main ones.
    """
    causes = [*evaluation.causes(device.subject, partial(row_with_code, rules)), *more]
    causes.sort(key=lambda cause: -cause.severity)
    sources = [*verifying_sources(evaluation, device), *more_sources]
    stalled = [source for source in sources if source.name in previous.stalled]
    causes[:0] = [stall_cause(source, previous.stalled, evaluation.now) for source in stalled]
    severity = Severity.UNKNOWN if stalled else causes[0].severity if causes else Severity.OK
    return verdict(
        evaluation,
        previous,
        device,
        severity,
        causes,
        verified_at(sources, evaluation.now),
        lease_seconds(evaluation, sources),
    )


def verifying_sources(evaluation: Evaluation, device: Device) -> list[SourceSample]:
    """Return the sources that verify a device; absent sources only if all are absent."""
    found = [evaluation.sources[name] for name in MAIN_SOURCES[device.kind] if name in evaluation.sources]
    return [source for source in found if source.state is not SourceState.ABSENT] or found


def sources_starting(evaluation: Evaluation, device: Device) -> Sequence[str]:
    """Return the names of the sources that verify a device and have not finished their first pass; all names
    if none of them runs.
    """
    sources = verifying_sources(evaluation, device)
    if not sources:
        return MAIN_SOURCES[device.kind]
    return [source.name for source in sources if source.state is SourceState.STARTING]


def node_notes(evaluation: Evaluation, host: HostRuleState, snapshot: Snapshot) -> Iterator[Note]:
    """Yield the notes on the machine as a whole."""
    view = view_node(host.node, host.log, snapshot, evaluation.settings, evaluation.now)
    evaluation.run_cached_rules(NODE, NODE_RULES, view)
    for cause in evaluation.causes(NODE, partial(row_with_code, NODE_RULES)):
        yield Note(NODE, cause)

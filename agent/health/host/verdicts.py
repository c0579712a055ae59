"""Verdicts on the devices that the agent itself publishes, and faults that concern the whole machine."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from agent.devices.inventory import InventoryDevice, pools_by_device
from agent.health.evaluation import Evaluation, row_with_code
from agent.health.host.catalog import HOST_RULES, MAIN_SOURCES, NODE_RULES
from agent.health.host.machine.state import machine_rule_input
from agent.health.host.state import HostRuleState, device_rule_input
from agent.health.rules import STALLED, STALLED_ADVICE, Rule
from agent.health.stalls import stall_cause
from agent.health.verdict import VerdictContext, lease_seconds, make_verdict, oldest_pass_time
from agent.model.health import Blame, Cause, DeviceHealth, NonDeviceCause, Severity
from agent.model.snapshot import Snapshot
from agent.model.source_state import SourceSample, SourceState

MACHINE_SUBJECT: Final = "node"
"""Subject of causes that concern the whole machine instead of a device or pod."""
STARTING_DETAIL: Final = "first pass not finished"


def evaluate_host(evaluation: Evaluation, host: HostRuleState, snapshot: Snapshot) -> None:
    """Evaluate the rules of every device that the agent itself publishes."""
    pools = pools_by_device(snapshot)
    for device in host.devices:
        view = device_rule_input(host, snapshot, pools, evaluation.settings, device, evaluation.now)
        evaluation.run_cached_rules(device.subject, HOST_RULES[device.kind], view)


def host_verdicts(
    evaluation: Evaluation, previous: VerdictContext, host: HostRuleState
) -> Iterator[tuple[InventoryDevice, DeviceHealth]]:
    """Yield each device that the agent publishes with its verdict; Unknown until its sources have finished a
    pass.
    """
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
            for name in starting_sources(evaluation, device)
        ]
        yield device, verdict_from_causes(evaluation, previous, device, HOST_RULES[device.kind], more)


def verdict_from_causes(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    rules: Sequence[Rule],
    more: Iterable[Cause] = (),
    more_sources: Iterable[SourceSample] = (),
) -> DeviceHealth:
    """Return the verdict on a device from the causes of its rules. If one of its main sources is stalled, the
    device is Unknown for that cause, and the other causes stay listed.

    Args:
        more: Causes from outside the device's own rules.
        more_sources: Additional sources that must not be stalled, like those in ``MAIN_SOURCES``.
    """
    causes = [*evaluation.causes(device.subject, partial(row_with_code, rules)), *more]
    causes.sort(key=lambda cause: -cause.severity)
    sources = [*main_sources(evaluation, device), *more_sources]
    stalled = [source for source in sources if source.name in previous.stalls]
    causes[:0] = [stall_cause(source, previous.stalls, evaluation.now) for source in stalled]
    severity = Severity.UNKNOWN if stalled else causes[0].severity if causes else Severity.OK
    return make_verdict(
        evaluation,
        previous,
        device,
        severity,
        causes,
        oldest_pass_time(sources, evaluation.now),
        lease_seconds(evaluation, sources),
    )


def main_sources(evaluation: Evaluation, device: InventoryDevice) -> list[SourceSample]:
    """Return the sources in ``MAIN_SOURCES`` that verify a device; absent ones only if all are absent."""
    found = [evaluation.sources[name] for name in MAIN_SOURCES[device.kind] if name in evaluation.sources]
    return [source for source in found if source.state is not SourceState.ABSENT] or found


def starting_sources(evaluation: Evaluation, device: InventoryDevice) -> Sequence[str]:
    """Return the names of a device's main sources that have not finished their first pass.

    If the snapshot has none of its main sources, all their names.
    """
    sources = main_sources(evaluation, device)
    if not sources:
        return MAIN_SOURCES[device.kind]
    return [source.name for source in sources if source.state is SourceState.STARTING]


def machine_causes(
    evaluation: Evaluation, host: HostRuleState, snapshot: Snapshot
) -> Iterator[NonDeviceCause]:
    """Evaluate the rules for the whole machine; yield its causes, which are faults found often enough."""
    view = machine_rule_input(host.machine, host.kernel_log, snapshot, evaluation.settings, evaluation.now)
    evaluation.run_cached_rules(MACHINE_SUBJECT, NODE_RULES, view)
    for cause in evaluation.causes(MACHINE_SUBJECT, partial(row_with_code, NODE_RULES)):
        yield NonDeviceCause(MACHINE_SUBJECT, cause)

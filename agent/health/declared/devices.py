"""Verdicts on devices that drivers declare, each from the rules for the host part that the device is."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from agent.devices.inventory import Device, DeviceKind, device_pools
from agent.health.declared.checks import UNCHECKED, CheckSamples, check_source, evaluate_checks, samples_of
from agent.health.declared.gpus import (
    DECLARED_GPU_RULES,
    DeclaredGpuView,
    find_device,
    find_gpu,
)
from agent.health.declared.state import DeclaredState
from agent.health.declared.verdict_cache import CachedEvaluation, VerdictCache, with_lease
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.gpu.state import GpuEvaluation
from agent.health.gpu.verdicts import START_NS
from agent.health.host.catalog import DECLARED_RULES
from agent.health.host.state import HostRuleState, view_declared
from agent.health.host.verdicts import sources_starting, verdict_of_causes
from agent.health.rules import CatalogRow, cause_from_row
from agent.health.verdict import PreviousVerdicts, lease_seconds, verdict, verified_at, with_causes
from agent.model.declared import DeclaredGpu
from agent.model.health import Blame, Cause, DeviceHealth, Note, Severity
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample

REMOVED: Final = CatalogRow(
    code="declared.gone",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="devices.d",
    threshold="the driver removed the device from its declaration less than 10 min ago",
    why="without a declaration the device cannot be evaluated",
    advice="delete pods that use the device, or let the driver declare it again",
    try_it="take a device out of a file in devices.d",
)
INVALID_FILE: Final = CatalogRow(
    code="declared.file",
    severity=Severity.DEGRADED,
    blame=Blame.DRIVER,
    source="devices.d",
    threshold="a file in devices.d does not follow the format",
    why="the last valid declaration of the driver stays in effect",
    advice="fix the file, or the driver that writes it",
    try_it="write a key that does not exist into a file in devices.d",
)
NOT_EVALUATED_YET: Final = CatalogRow(
    code="declared.unseen",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    threshold="2 s after it was declared",
    why="no source has read the device",
    advice="wait for the first pass; if none finishes, see the sources in drahealth status",
    try_it="declare a PCI function, with a sysfs in which bus/pci/devices hangs",
)
UNWATCHED: Final = CatalogRow(
    code="gpu.unwatched",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="nvml",
    threshold="a driver declares a GPU while gpu.watch, or hardware in a driver's monitor, is false",
    why="GPU monitoring is off",
    advice="set gpu.watch in the configuration, or hardware in a driver's monitor",
    try_it="declare a GPU in devices.d, and start the agent with watch = false in [gpu]",
)


def declared_verdicts(
    evaluation: Evaluation,
    before: PreviousVerdicts,
    state: DeclaredState,
    host_state: HostRuleState,
    gpus: GpuEvaluation,
    snapshot: Snapshot,
    host: Mapping[Device, DeviceHealth],
    cache: VerdictCache,
) -> tuple[dict[Subject, DeviceHealth], VerdictCache]:
    """Return the verdicts on all declared devices, except devices whose first evaluation is not due yet.

    Args:
        host: Verdicts on the devices that the agent found itself.
        cache: Cache from the last evaluation.

    Returns:
        Verdicts in report order, and the cache for the next evaluation.
    """
    pools = device_pools(snapshot)
    checks = samples_of(snapshot.checks)
    cached = CachedEvaluation(evaluation, before, cache, state, host_state, snapshot, pools, checks)
    verdicts: dict[Subject, DeviceHealth] = {}
    for subject, device, found in cached.verdicts():
        if found is not None:
            verdicts[subject] = found
            continue
        declared = state.devices.get(subject)
        if declared is None:
            cause = cause_from_row(REMOVED, "no longer declared by its driver", state.removed[subject].since)
            found = verdict(
                evaluation,
                before,
                device,
                cause.severity,
                [cause],
                evaluation.now,
                evaluation.settings.lease_s,
            )
            verdicts[subject] = found
            continue
        if isinstance(declared.part, DeclaredGpu):
            found = _gpu_verdict(evaluation, before, device, declared.part, gpus, snapshot, host)
            found = found and _with_checks(evaluation, before, device, found, checks)
        elif not _is_not_evaluated(evaluation, before, state, device, checks):
            rules, begin = DECLARED_RULES[device.kind], evaluation.mark()
            if rules:
                view = view_declared(
                    host_state, snapshot, pools, evaluation.settings, declared, evaluation.now
                )
                evaluation.run_rules(subject, rules, view)
            more = _check_causes(evaluation, state, device, checks)
            found = verdict_of_causes(
                evaluation, before, device, rules, more, _check_sources(checks, subject)
            )
            cached.store(subject, device.kind, found, begin)
        if found is None:
            late_ns = state.since[subject].mono_ns + START_NS
            if evaluation.now.mono_ns < late_ns and subject not in before.devices:
                evaluation.due_ns.append(late_ns)
                continue
            cause = cause_from_row(
                NOT_EVALUATED_YET, "no source has finished a pass since it was declared", state.since[subject]
            )
            found = verdict(
                evaluation,
                before,
                device,
                cause.severity,
                [cause],
                evaluation.now,
                evaluation.settings.lease_s,
            )
        verdicts[subject] = found._replace(timeout_s=with_lease(found.timeout_s, declared, before))
    return verdicts, cached.cache()


def _check_causes(
    evaluation: Evaluation, state: DeclaredState, device: Device, checks: CheckSamples
) -> list[Cause]:
    """Return the causes that health checks report for a device.

    UNCHECKED is the cause of a device that is no part of the host and has no health check.
    """
    samples = checks.get(device.subject, ())
    if device.kind is DeviceKind.OTHER and not samples:
        evidence = "not a part of the host, and without a check of its driver"
        return [cause_from_row(UNCHECKED, evidence, state.since[device.subject])]
    return evaluate_checks(evaluation, device.subject, samples)


def _check_sources(checks: CheckSamples, subject: str) -> list[SourceSample]:
    return [check_source(sample) for sample in checks.get(subject, ()) if sample.passes]


def _with_checks(
    evaluation: Evaluation,
    before: PreviousVerdicts,
    device: Device,
    found: DeviceHealth,
    checks: CheckSamples,
) -> DeviceHealth:
    """Return the verdict on a device with the causes from the driver's health checks added."""
    sources = _check_sources(checks, device.subject)
    more = evaluate_checks(evaluation, device.subject, checks.get(device.subject, ()))
    if not sources:
        return found
    checked = with_causes(evaluation, before, device, found, [*found.causes, *more])
    verified = min(found.verified, verified_at(sources, evaluation.now))
    return checked._replace(
        verified=verified,
        timeout_s=max(checked.timeout_s, lease_seconds(evaluation, sources) + before.lease_salt_s),
    )


def declared_notes(state: DeclaredState) -> Iterator[Note]:
    """Yield a note for each invalid declaration file."""
    for driver, wrong in state.invalid.items():
        yield Note(f"driver {driver}", cause_from_row(INVALID_FILE, wrong.error, wrong.since))


def _gpu_verdict(
    evaluation: Evaluation,
    before: PreviousVerdicts,
    device: Device,
    what: DeclaredGpu,
    gpus: GpuEvaluation,
    snapshot: Snapshot,
    host: Mapping[Device, DeviceHealth],
) -> DeviceHealth | None:
    """Return the verdict on the host GPU of a declaration, with the causes of the declaration added.

    None: the host GPU is not evaluated yet.
    """
    if snapshot.gpus is None:
        cause = cause_from_row(UNWATCHED, "GPU monitoring is off", before.started)
        return verdict(
            evaluation, before, device, cause.severity, [cause], evaluation.now, evaluation.settings.lease_s
        )
    gpu = find_gpu(what, gpus.state.rule_state.registry)
    host_device = find_device(what, gpu)
    evaluation.run_rules(
        device.subject, DECLARED_GPU_RULES, DeclaredGpuView(what, gpu, host_device, snapshot.gpus)
    )
    found = host.get(host_device) if host_device else None
    own = evaluation.causes(device.subject, partial(row_with_code, DECLARED_GPU_RULES))
    if found is None:
        return verdict_of_causes(evaluation, before, device, DECLARED_GPU_RULES) if own else None
    return with_causes(evaluation, before, device, found, [*own, *found.causes])


def _is_not_evaluated(
    evaluation: Evaluation,
    before: PreviousVerdicts,
    state: DeclaredState,
    device: Device,
    checks: CheckSamples,
) -> bool:
    """Return whether no source has read the device since its last declaration."""
    samples = checks.get(device.subject, ())
    if device.kind is DeviceKind.OTHER and samples and not any(sample.passes for sample in samples):
        return True  # only checks read the device, and all of them restart
    previous = before.devices.get(device.subject)
    is_new = (
        previous is None
        or state.since[device.subject] == evaluation.now
        or any(cause.code == NOT_EVALUATED_YET.code for cause in previous.causes)
    )
    unchecked = any(not sample.passes for sample in samples)
    return is_new and (unchecked or bool(sources_starting(evaluation, device)))

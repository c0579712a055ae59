"""Verdicts on devices that drivers declare, from the rules for the hardware that a device consists of.

The module also finds each declared GPU among the host's GPUs, and has rules for wrong declarations.

The rules for GPU readings are not run again: a declared GPU gets the causes (confirmed faults) of the host's
GPU.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice, gpu_device, mig_device, pools_by_device
from agent.health.declared.driver_reports import (
    UNCHECKED,
    CheckSamplesByDevice,
    device_check_source,
    evaluate_driver_checks,
    expiry_reason,
    is_custom,
    keep_restored_faults,
    samples_by_device,
)
from agent.health.declared.state import CachingEvaluation, DeclaredState, VerdictCache, with_lease
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.gpu.rule_input import (
    is_identifying_gpus,
    is_listing_gpus,
    nvml_code_text,
    nvml_library_error,
)
from agent.health.gpu.state import GpuEvaluationResult
from agent.health.gpu.verdicts import FIRST_PASS_WAIT_NS
from agent.health.host.nic.rules import NIC_RULES
from agent.health.host.nic.state import NicRuleInput
from agent.health.host.pci.rules import PCI_RULES
from agent.health.host.verdicts import (
    DECLARED_RULES,
    HostRuleState,
    declared_rule_input,
    main_sources,
    verdict_from_causes,
)
from agent.health.rules import OK, CatalogRow, Rule, RuleInconclusive, RuleResult, cause_from_row
from agent.health.verdict import VerdictContext, lease_seconds, make_verdict, oldest_pass_time, replace_causes
from agent.model.declared_devices import DeclaredGpuDevice, DriverCheckSample
from agent.model.gpu import NvmlSample
from agent.model.health import Blame, Cause, DeviceHealth, Finding, Health, NonDeviceCause, Repair, Severity
from agent.model.persistent_faults import KnownGpu
from agent.model.reading import SourceSample
from agent.model.snapshot import Snapshot

NO_LIBRARY_ADVICE: Final = (
    "run nvidia-smi; load the NVIDIA driver, or set the library's path with --nvml-library"
)


class DeclaredGpuRuleInput(NamedTuple):
    """Input of the rules for one GPU that a driver declares."""

    declared: DeclaredGpuDevice
    host_gpu: KnownGpu | None
    """GPU of the host that is declared, or whose MIG instance is; None: not found."""
    host_device: InventoryDevice | None
    """Device of the host's GPU or MIG instance that is declared; None: not found."""
    gpu_set: NvmlSample
    is_identifying: bool = False
    """Whether UUIDs or PCI addresses of the host's GPUs are still being read."""


def find_host_gpu(declared: DeclaredGpuDevice, registry: Iterable[KnownGpu]) -> KnownGpu | None:
    """Return the host's GPU that a driver declares; None: the host has no such GPU. The GPU is found by its
    UUID, by the UUID of one of its MIG instances, or by its PCI address."""
    known = list(registry)
    if declared.uuid:
        for gpu in known:
            if declared.uuid == gpu.uuid or any(mig.uuid == declared.uuid for mig in gpu.migs):
                return gpu
    return next((gpu for gpu in known if declared.pci and gpu.bus == declared.pci), None)


def is_mig_declaration(declared: DeclaredGpuDevice) -> bool:
    """Return whether the driver declares a MIG instance and not a whole GPU."""
    return declared.gi >= 0 or declared.uuid.startswith("MIG-")


def find_host_device(declared: DeclaredGpuDevice, gpu: KnownGpu | None) -> InventoryDevice | None:
    """Return the host's device that a driver declares: ``gpu`` or its MIG instance; None: not found. The UUID
    of a MIG instance outranks its numbers, which another instance may have after a repartition."""
    if gpu is None or not is_mig_declaration(declared):
        return gpu and gpu_device(gpu.number)
    for mig in gpu.migs:
        has_numbers = (mig.gi, mig.ci) == (declared.gi, declared.ci)
        if mig.uuid == declared.uuid if declared.uuid.startswith("MIG-") else has_numbers:
            return mig_device(gpu.number, mig.gi, mig.ci)
    return None


def evaluate_gpu_not_found(view: DeclaredGpuRuleInput) -> RuleResult:
    """The declared GPU or MIG instance does not exist.

    Source: UUIDs and PCI addresses from NVML, now and earlier.
    """
    declared, gpus = view.declared, view.gpu_set
    if view.host_device is not None:
        return OK
    if view.host_gpu is not None:
        name = declared.uuid or f"{declared.gi}/{declared.ci}"
        evidence = f"{view.host_gpu.uuid or view.host_gpu.bus} has no instance {name}"
        return Finding("gpu.not_found", Severity.UNHEALTHY, evidence)
    if is_listing_gpus(gpus):
        return RuleInconclusive("NVML is being opened")
    if view.is_identifying:
        return RuleInconclusive("NVML is still identifying its GPUs")
    name = " at ".join(filter(None, (declared.uuid, declared.pci)))
    if error := nvml_library_error(gpus):
        evidence = f"{name} cannot be checked: NVML returned {nvml_code_text(error)}"
        return Finding(
            "gpu.not_found",
            Severity.UNKNOWN,
            evidence,
            NO_LIBRARY_ADVICE,
            Blame.DRIVER,
            repair=Repair.RELOAD_DRIVER,
        )
    return Finding("gpu.not_found", Severity.UNHEALTHY, f"{name} is not among the {gpus.count} GPUs of NVML")


def evaluate_gpu_mismatch(view: DeclaredGpuRuleInput) -> RuleResult:
    """UUID and PCI address of a declaration belong to different GPUs.

    Source: UUIDs and PCI addresses from NVML.
    """
    declared, found = view.declared, view.host_gpu
    if found is None or not (declared.pci and declared.uuid):
        return OK
    whole = found.uuid == declared.uuid or any(mig.uuid == declared.uuid for mig in found.migs)
    if whole and found.bus in ("", declared.pci):
        return OK
    if whole:
        evidence = f"{declared.uuid} is at {found.bus}, declared at {declared.pci}"
    elif is_mig_declaration(declared):
        return OK  # gpu.not_found reports a missing instance
    else:
        evidence = f"{declared.pci} is {found.uuid or 'a GPU without a UUID'}, declared as {declared.uuid}"
    return Finding("gpu.mismatch", Severity.UNHEALTHY, evidence)


DECLARED_GPU_RULES: Final = (
    Rule(
        code="gpu.not_found",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="nvml",
        threshold="no GPU or instance with the declared UUID, or at the declared address",
        why="the driver publishes a device that this node does not have; a prepare that "
        "does not find a GPU fails with the same code",
        advice="compare the declaration with nvidia-smi -L; let the driver declare the device again",
        repair=Repair.NONE,
        evaluate=evaluate_gpu_not_found,
        try_it="in devices.d, declare a GPU with a UUID that no GPU has",
    ),
    Rule(
        code="gpu.mismatch",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="nvml",
        threshold="declared UUID and declared address belong to different GPUs",
        why="a claim would be prepared with another GPU than the allocated one",
        advice="a GPU was moved or replaced; let the driver declare its devices again",
        repair=Repair.NONE,
        evaluate=evaluate_gpu_mismatch,
        try_it="in devices.d, declare a GPU with the PCI address of another",
    ),
)


# --- verdicts ----------------------------------------------------------------------------------------------

REMOVED_DEVICE: Final = CatalogRow(
    code="declared.gone",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="devices.d",
    threshold="the driver removed the device from its declaration less than 10 min ago",
    why="without a declaration the device cannot be evaluated",
    advice="delete pods that use the device, or let the driver declare it again",
    repair=Repair.NONE,
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
    repair=Repair.NONE,
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
    repair=Repair.NONE,
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
    repair=Repair.NONE,
    try_it="declare a GPU in devices.d, and start the agent with watch = false in [gpu]",
)


def declared_verdicts(
    evaluation: Evaluation,
    before: VerdictContext,
    state: DeclaredState,
    host_state: HostRuleState,
    gpus: GpuEvaluationResult,
    snapshot: Snapshot,
    host: Mapping[InventoryDevice, DeviceHealth],
    cache: VerdictCache,
    unchanged: Set[str],
) -> tuple[dict[Subject, DeviceHealth], VerdictCache]:
    """Return the verdicts on all declared devices. New devices that no source has read yet are left out.

    Args:
        host: Verdicts on the devices that the agent found itself, without declarations.
        cache: Cached verdicts of the last evaluation.
        unchanged: Parts of the host with the same input as in the last evaluation.

    Returns:
        Verdicts in report order, and the cached verdicts for the next evaluation.
    """
    pools = pools_by_device(snapshot)
    checks = samples_by_device(snapshot.checks)
    cached = CachingEvaluation(
        evaluation, before, cache, state, host_state, snapshot, pools, checks, unchanged
    )
    verdicts: dict[Subject, DeviceHealth] = {}
    for subject, device in cached.add_cached(verdicts):
        found: DeviceHealth | None = None
        declared = state.devices.get(subject)
        if declared is None:
            cause = cause_from_row(
                REMOVED_DEVICE, "no longer declared by its driver", state.removed[subject].since
            )
            verdicts[subject] = _verdict_without_readings(evaluation, before, device, [cause])
            continue
        restored: list[Cause] = []
        if isinstance(declared.part, DeclaredGpuDevice):
            is_known = not _was_unevaluated(before, subject) and subject not in state.redeclared
            found = _gpu_verdict(evaluation, before, device, declared.part, gpus, snapshot, host)
            awaits = not is_known and _awaits_first_result(evaluation, checks.get(subject, ()))
            if awaits and found is not None and found.health is not Health.UNHEALTHY:
                found = None
            if found is not None:
                found = _with_check_causes(evaluation, before, device, found, checks)
            else:
                restored = keep_restored_faults(evaluation, subject)
        elif not _is_not_evaluated(evaluation, before, state, device, checks):
            rules, begin = DECLARED_RULES[device.kind], evaluation.list_lengths()
            if rules:
                view = declared_rule_input(
                    host_state, snapshot, pools, evaluation.settings, declared, evaluation.now
                )
                _run_declared_rules(evaluation, subject, rules, view)
            more = _causes_of_checks(evaluation, state, device, checks)
            found = verdict_from_causes(
                evaluation, before, device, rules, more, _health_check_sources(checks, device)
            )
            cached.store(subject, device.kind, found, begin)
        else:
            restored = keep_restored_faults(evaluation, subject)
        if found is None:
            late_ns = state.since[subject].mono_ns + FIRST_PASS_WAIT_NS
            is_known = subject in before.devices or any(
                cause.severity > Severity.UNKNOWN for cause in restored
            )
            if evaluation.now.mono_ns < late_ns and not is_known:
                evaluation.due_ns.append(late_ns)
                continue
            cause = cause_from_row(
                NOT_EVALUATED_YET, "no source has finished a pass since it was declared", state.since[subject]
            )
            found = _verdict_without_readings(evaluation, before, device, [*restored, cause])
        verdicts[subject] = found._replace(timeout_s=with_lease(found.timeout_s, declared, before))
    return verdicts, cached.next_cache()


def _run_declared_rules(
    evaluation: Evaluation, subject: Subject, rules: Iterable[Rule], view: object
) -> None:
    """Evaluate the rules for a declared device.

    For a NIC, the rules for its PCI function are evaluated too.
    """
    if not isinstance(view, NicRuleInput):
        evaluation.run_rules(subject, rules, view)
        return
    evaluation.run_rules(subject, NIC_RULES, view)
    if view.function is not None:
        evaluation.run_rules(subject, PCI_RULES, view.function)


def _verdict_without_readings(
    evaluation: Evaluation, before: VerdictContext, device: InventoryDevice, causes: list[Cause]
) -> DeviceHealth:
    causes = sorted(causes, key=lambda cause: -cause.severity)
    now, lease_s = evaluation.now, evaluation.settings.lease_s
    return make_verdict(evaluation, before, device, causes[0].severity, causes, now, lease_s)


def _causes_of_checks(
    evaluation: Evaluation, state: DeclaredState, device: InventoryDevice, checks: CheckSamplesByDevice
) -> list[Cause]:
    """Return the causes (confirmed faults) that health checks found on a declared device. If neither a rule
    nor a check evaluates the device, the cause is UNCHECKED."""
    samples = checks.get(device.subject, ())
    if device.kind is DeviceKind.OTHER and not samples:
        evidence = "not a part of the host, and without a check of its driver"
        return [cause_from_row(UNCHECKED, evidence, state.since[device.subject])]
    return evaluate_driver_checks(evaluation, device.subject, samples)


def _health_check_sources(checks: CheckSamplesByDevice, device: InventoryDevice) -> list[SourceSample]:
    return [device_check_source(sample) for sample in _decisive_samples(checks, device) if sample.passes]


def _decisive_samples(checks: CheckSamplesByDevice, device: InventoryDevice) -> Sequence[DriverCheckSample]:
    """Return the check results whose runs confirm that a device was checked. A check of an operator counts
    only if the device has neither rules nor checks of its driver."""
    samples = checks.get(device.subject, ())
    of_driver = [sample for sample in samples if not is_custom(sample.check)]
    return samples if device.kind is DeviceKind.OTHER and not of_driver else of_driver


def _with_check_causes(
    evaluation: Evaluation,
    before: VerdictContext,
    device: InventoryDevice,
    found: DeviceHealth,
    checks: CheckSamplesByDevice,
) -> DeviceHealth:
    """Return the verdict on a device, with the causes (confirmed faults) from its driver's checks added."""
    sources = _health_check_sources(checks, device)
    known = {cause.code for cause in found.causes if is_custom(cause.code)}  # those of the host's GPU
    more = [
        cause
        for cause in evaluate_driver_checks(evaluation, device.subject, checks.get(device.subject, ()))
        if cause.code not in known
    ]
    if not (sources or more):
        return found
    checked = replace_causes(evaluation, before, device, found, [*found.causes, *more])
    verified = min(found.verified, oldest_pass_time(sources, evaluation.now))
    return checked._replace(
        verified=verified,
        timeout_s=max(checked.timeout_s, lease_seconds(evaluation, sources) + before.lease_salt_s),
    )


def invalid_file_notes(state: DeclaredState) -> Iterator[NonDeviceCause]:
    """Yield a cause, for the report, for each declaration file that cannot be used."""
    for driver, wrong in state.invalid.items():
        yield NonDeviceCause(f"driver {driver}", cause_from_row(INVALID_FILE, wrong.error, wrong.since))


def _gpu_verdict(
    evaluation: Evaluation,
    before: VerdictContext,
    device: InventoryDevice,
    declared: DeclaredGpuDevice,
    gpus: GpuEvaluationResult,
    snapshot: Snapshot,
    host: Mapping[InventoryDevice, DeviceHealth],
) -> DeviceHealth | None:
    """Return the verdict on a declared GPU; None: the host's GPU has no verdict yet. The verdict has the
    causes of the host's GPU, and the faults of the declaration itself."""
    if snapshot.gpus is None:
        cause = cause_from_row(UNWATCHED, "GPU monitoring is off", before.started)
        return _verdict_without_readings(evaluation, before, device, [cause])
    gpu = find_host_gpu(declared, gpus.state.rule_state.registry)
    host_device = find_host_device(declared, gpu)
    limits = evaluation.settings.gpu
    is_identifying = is_identifying_gpus(snapshot.gpus, limits.dead_s, evaluation.now.mono_ns)
    evaluation.run_rules(
        device.subject,
        DECLARED_GPU_RULES,
        DeclaredGpuRuleInput(declared, gpu, host_device, snapshot.gpus, is_identifying),
    )
    found = host.get(host_device) if host_device else None
    own = evaluation.causes(device.subject, partial(row_with_code, DECLARED_GPU_RULES))
    if found is None:
        return verdict_from_causes(evaluation, before, device, DECLARED_GPU_RULES) if own else None
    return replace_causes(evaluation, before, device, found, [*own, *found.causes])


def _is_not_evaluated(
    evaluation: Evaluation,
    before: VerdictContext,
    state: DeclaredState,
    device: InventoryDevice,
    checks: CheckSamplesByDevice,
) -> bool:
    """Return whether a declared device has no verdict yet: a source has not read it since its declaration."""
    samples = _decisive_samples(checks, device)
    unchecked = [sample for sample in samples if not (sample.passes or expiry_reason(sample, evaluation.now))]
    if device.kind is DeviceKind.OTHER and samples and len(unchecked) == len(samples):
        return True  # only health checks read the device, and none has a result yet
    is_new = state.since[device.subject] == evaluation.now or _was_unevaluated(before, device.subject)
    return is_new and bool(unchecked or main_sources(evaluation, device.kind).starting)


def _was_unevaluated(before: VerdictContext, subject: Subject) -> bool:
    """Return whether the last report did not have a declared device, or no source had read it until then."""
    previous = before.devices.get(subject)
    return previous is None or any(cause.code == NOT_EVALUATED_YET.code for cause in previous.causes)


def _awaits_first_result(evaluation: Evaluation, samples: Iterable[DriverCheckSample]) -> bool:
    """Return whether the time for the first result of one of a driver's checks is not over."""
    awaited = [
        sample
        for sample in samples
        if not (is_custom(sample.check) or sample.passes or expiry_reason(sample, evaluation.now))
    ]
    evaluation.due_ns += [sample.beat_ns + sample.lease_ns + 1 for sample in awaited if sample.lease_ns]
    return bool(awaited)

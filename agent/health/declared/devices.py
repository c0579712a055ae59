"""The verdicts on devices that drivers declare: each is a part of the host, judged by the host's rules."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from agent.devices.inventory import Device, Kind, device_pools
from agent.health.catalog import Row, cause_of
from agent.health.declared.checks import UNCHECKED, Samples, as_source, judge_checks, samples_of
from agent.health.declared.gpus import (
    DECLARED_GPU_RULES,
    DeclaredGpuView,
    find_device,
    find_gpu,
)
from agent.health.declared.state import DeclaredPast
from agent.health.declared.verdict_cache import Settled, Settling, with_lease
from agent.health.evaluation import Evaluation, Subject, row_among
from agent.health.gpu.devices import START_NS
from agent.health.gpu.state import GpuLook
from agent.health.host.catalog import DECLARED_RULES
from agent.health.host.state import HostRuleState, view_declared
from agent.health.host.verdicts import judged_verdict, unread
from agent.health.verdict import PreviousVerdicts, lease_of, verdict, verified_by, with_causes
from agent.model.declared import DeclaredGpu
from agent.model.health import Blame, Cause, DeviceHealth, Note, Severity
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample

GONE: Final = Row(
    code="declared.gone",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="devices.d",
    threshold="its driver declared it, and stopped to less than 10 min ago",
    why="nobody says any more what the device is, so nobody can judge it",
    advice="delete pods that claim it, or let the driver declare it again",
    try_it="take a device out of a file in devices.d",
)
WRONG: Final = Row(
    code="declared.file",
    severity=Severity.DEGRADED,
    blame=Blame.DRIVER,
    source="devices.d",
    threshold="a file in devices.d that breaks a rule of its format",
    why="what the driver declared when its file was last right is judged on",
    advice="mend the file, or the driver that writes it",
    try_it="write a key that does not exist into a file in devices.d",
)
UNSEEN: Final = Row(
    code="declared.unseen",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    threshold="2 s after it was declared",
    why="nobody has looked",
    advice="wait for the first look; if it does not come, see the sources in drahealth status",
    try_it="declare a PCI function, with a sysfs in which bus/pci/devices hangs",
)
UNWATCHED: Final = Row(
    code="gpu.unwatched",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="nvml",
    threshold="a driver declares a GPU, and gpu.watch is false, or hardware in a driver's own monitor",
    why="nobody looks",
    advice="set gpu.watch in the configuration; in a driver's own monitor, hardware",
    try_it="declare a GPU in devices.d, and start the agent with watch = false in [gpu]",
)


def declared_verdicts(
    look: Evaluation,
    before: PreviousVerdicts,
    past: DeclaredPast,
    memory: HostRuleState,
    gpus: GpuLook,
    snapshot: Snapshot,
    host: Mapping[Device, DeviceHealth],
    settled: Settled,
) -> tuple[dict[Subject, DeviceHealth], Settled]:
    """What is said of each that somebody has looked at, or should have by now.

    Args:
        host: The verdicts on the host's own devices.
        settled: By the last look.

    Returns:
        The verdicts in the order of a report, and what this look has settled.
    """
    pools = device_pools(snapshot)
    checks = samples_of(snapshot.checks)
    settling = Settling(look, before, settled, past, memory, snapshot, pools, checks)
    verdicts: dict[Subject, DeviceHealth] = {}
    for subject, device, found in settling.again():
        if found is not None:
            verdicts[subject] = found
            continue
        declared = past.devices.get(subject)
        if declared is None:
            cause = cause_of(GONE, "no longer declared by its driver", past.gone[subject].since)
            found = verdict(look, before, device, cause.severity, [cause], look.now, look.settings.lease_s)
            verdicts[subject] = found
            continue
        if isinstance(declared.what, DeclaredGpu):
            found = _gpu_verdict(look, before, device, declared.what, gpus, snapshot, host)
            found = found and _with_checks(look, before, device, found, checks)
        elif not _is_unseen(look, before, past, device, checks):
            rules, begin = DECLARED_RULES[device.kind], look.extent()
            if rules:
                view = view_declared(memory, snapshot, pools, look.settings, declared, look.now)
                look.judge_all(subject, rules, view)
            more = _checked(look, past, device, checks)
            found = judged_verdict(look, before, device, rules, more, _verifying(checks, subject))
            settling.judged(subject, device.kind, found, begin)
        if found is None:
            late_ns = past.since[subject].mono_ns + START_NS
            if look.now.mono_ns < late_ns and subject not in before.devices:
                look.due_ns.append(late_ns)
                continue
            cause = cause_of(UNSEEN, "no look at it has ended since it was declared", past.since[subject])
            found = verdict(look, before, device, cause.severity, [cause], look.now, look.settings.lease_s)
        verdicts[subject] = found._replace(timeout_s=with_lease(found.timeout_s, declared, before))
    return verdicts, settling.settled()


def _checked(look: Evaluation, past: DeclaredPast, device: Device, checks: Samples) -> list[Cause]:
    """What its driver's checks say of a device; that nobody looks at it, if there are none."""
    samples = checks.get(device.subject, ())
    if device.kind is Kind.OTHER and not samples:
        evidence = "no part of the host, and none of its driver's checks is for it"
        return [cause_of(UNCHECKED, evidence, past.since[device.subject])]
    return judge_checks(look, device.subject, samples)


def _verifying(checks: Samples, subject: str) -> list[SourceSample]:
    return [as_source(sample) for sample in checks.get(subject, ()) if sample.passes]


def _with_checks(
    look: Evaluation, before: PreviousVerdicts, device: Device, found: DeviceHealth, checks: Samples
) -> DeviceHealth:
    """A verdict, and what the driver's own checks add to it."""
    sources = _verifying(checks, device.subject)
    more = judge_checks(look, device.subject, checks.get(device.subject, ()))
    if not sources:
        return found
    checked = with_causes(look, before, device, found, [*found.causes, *more])
    verified = min(found.verified, verified_by(sources, look.now))
    return checked._replace(
        verified=verified,
        timeout_s=max(checked.timeout_s, lease_of(look, sources) + before.nudge_s),
    )


def declared_notes(past: DeclaredPast) -> Iterator[Note]:
    """The files that cannot be believed."""
    for driver, wrong in past.wrong.items():
        yield Note(f"driver {driver}", cause_of(WRONG, wrong.error, wrong.since))


def _gpu_verdict(
    look: Evaluation,
    before: PreviousVerdicts,
    device: Device,
    what: DeclaredGpu,
    gpus: GpuLook,
    snapshot: Snapshot,
    host: Mapping[Device, DeviceHealth],
) -> DeviceHealth | None:
    """What is said of the host's GPU, and of whether it is the one that is meant; None: nobody knows yet."""
    if snapshot.gpus is None:
        cause = cause_of(UNWATCHED, "GPUs are not watched", before.began)
        return verdict(look, before, device, cause.severity, [cause], look.now, look.settings.lease_s)
    gpu = find_gpu(what, gpus.state.memory.roll)
    meant = find_device(what, gpu)
    look.judge_all(device.subject, DECLARED_GPU_RULES, DeclaredGpuView(what, gpu, meant, snapshot.gpus))
    found = host.get(meant) if meant else None
    own = look.causes(device.subject, partial(row_among, DECLARED_GPU_RULES))
    if found is None:
        return judged_verdict(look, before, device, DECLARED_GPU_RULES) if own else None
    return with_causes(look, before, device, found, [*own, *found.causes])


def _is_unseen(
    look: Evaluation, before: PreviousVerdicts, past: DeclaredPast, device: Device, checks: Samples
) -> bool:
    """Whether nobody has looked at it since it was declared to be what it is."""
    samples = checks.get(device.subject, ())
    if device.kind is Kind.OTHER and samples and not any(sample.passes for sample in samples):
        return True  # nothing but its checks looks at it, and all of them begin anew
    said = before.devices.get(device.subject)
    is_new = (
        said is None
        or past.since[device.subject] == look.now
        or any(cause.code == UNSEEN.code for cause in said.causes)
    )
    unchecked = any(not sample.passes for sample in samples)
    return is_new and (unchecked or bool(unread(look, device)))

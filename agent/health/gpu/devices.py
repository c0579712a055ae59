"""The verdicts on GPUs and their MIG instances."""

from collections.abc import Iterator
from functools import partial
from typing import Final

from agent.devices.inventory import Device, Kind, gpu_device
from agent.health.evaluation import Evaluation
from agent.health.gpu.answers import NOT_ANSWERING
from agent.health.gpu.catalog import gpu_rules
from agent.health.gpu.judging import gpu_row, judge_gpu, judge_instance
from agent.health.gpu.state import GpuLook
from agent.health.gpu.verdicts import answers, attributes_of, unseen_of
from agent.health.gpu.views import gpu_devices, gpu_views
from agent.health.stalls import stall_cause
from agent.health.verdict import PreviousVerdicts, lease_of, verdict, verified_by
from agent.model.health import Cause, DeviceHealth, Severity
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS

NVML: Final = "nvml"
START_NS: Final = 2 * NS
"""How long one waits for the first pass of what the agent can do without [ns]."""


def gpu_verdicts(
    look: Evaluation, before: PreviousVerdicts, gpus: GpuLook, snapshot: Snapshot
) -> Iterator[tuple[Device, DeviceHealth]]:
    """Each GPU is judged, then each of its instances: what is wrong with a GPU is wrong with all of them."""
    if snapshot.gpus is None:
        return
    memory, limits = gpus.state.memory, look.settings.gpu
    rules = gpu_rules(limits)
    views = gpu_views(memory, snapshot, limits, look.now)
    source, verified, lease_s = None, look.now, look.settings.lease_s
    above: tuple[Cause, ...] = ()
    for device in gpu_devices(memory):
        if device.kind is Kind.GPU:
            view = views[device.gpu]
            source = look.sources.get(device.name) or look.sources[NVML]
            if _appears(look, before, device, source) and not memory.past[device.gpu].instances:
                look.due_ns.append(source.beat_ns + START_NS)
                continue
            answering = answers(view)
            judge_gpu(look, device, view, rules, gpus, source)
            # of one that does not answer it is verified, just now, that it does not
            verified = verified_by([source], look.now) if answering else look.now
            above = unseen_of(view, before.began)
            if answering and source.state is SourceState.STALLED:
                above = (stall_cause(source, before.stalled, look.now),)
            lease_s = lease_of(look, [source])
            parent = ""
        else:
            assert source is not None, "a GPU comes before its instances"
            judge_instance(look, device, gpus, source)
            parent = gpu_device(device.gpu).name
        causes = look.causes(device.name, partial(gpu_row, rules, limits), parent)
        if above and not any(cause.code == NOT_ANSWERING for cause in causes):  # which says why
            causes = sorted([*above, *causes], key=lambda cause: -cause.severity)
        severity = causes[0].severity if causes else Severity.OK
        attributes = attributes_of(memory, snapshot.gpus, snapshot.host, device)
        yield device, verdict(look, before, device, severity, causes, verified, lease_s, attributes)


def _appears(look: Evaluation, before: PreviousVerdicts, device: Device, source: SourceSample) -> bool:
    """Whether a GPU was found a moment ago: it is told of when somebody has looked at it, or is late to."""
    if source.name != device.name or source.state is not SourceState.STARTING:
        return False
    known = device.name in before.devices or look.codes_of(device.name)
    return not known and look.now.mono_ns < source.beat_ns + START_NS

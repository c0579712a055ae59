"""Cache of verdicts on GPUs: GPUs without faults that have not changed are not evaluated again.

The native core counts the passes over a GPU that wake the engine loop. An evaluation that another source
wakes reuses the results of the GPUs without such passes. Readings that wake nothing, such as a temperature
below its limit, count at the next full evaluation, which is at most one heartbeat later.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent.devices.inventory import InventoryDevice
from agent.health.evaluation import Conditions, Evaluation
from agent.health.gpu.rule_input import is_answering
from agent.health.gpu.rule_state import GpuRuleState
from agent.model.gpu import GpuSample
from agent.model.health import NotApplicable
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


class CachedGpu(NamedTuple):
    """Cached results of the last evaluation of one GPU and its MIG instances, which had no fault."""

    readings: tuple[object, ...]
    """Values that show each change that rules evaluate; see :func:`_visible_readings`."""
    devices: tuple[tuple[InventoryDevice, tuple[tuple[str, str], ...]], ...]
    """The GPU and its MIG instances, each with its attributes."""
    not_applicable: tuple[NotApplicable, ...]
    not_evaluated: tuple[NotApplicable, ...]
    due_ns: tuple[int, ...]
    """Monotonic times at which the GPU must be evaluated again [ns]."""


class GpuVerdictCache(NamedTuple):
    """Cached results of GPUs, and the inputs that the rules of all GPUs share."""

    inputs: tuple[object, ...] = ()
    gpus: Mapping[int, CachedGpu] = {}
    """Cached results of GPUs without faults, by GPU number."""


def shared_inputs(snapshot: Snapshot, settings: EngineSettings) -> tuple[object, ...]:
    """Return the inputs that the rules of all GPUs share; empty if GPUs are not monitored."""
    gpus, log = snapshot.gpus, snapshot.log
    if gpus is None:
        return ()
    return (
        *(gpus.nvml.state, gpus.nvml.detail, gpus.events.state, gpus.err, gpus.generation, gpus.count),
        *(gpus.driver, gpus.library, gpus.call, gpus.process, len(gpus.gpus)),
        *((log.source.state, log.lines) if log else ()),
        *(snapshot.host, snapshot.pci, settings),
    )


def unchanged_gpus(
    cache: GpuVerdictCache,
    previous: GpuRuleState,
    conditions: Conditions,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> frozenset[int]:
    """Return the numbers of the GPUs whose cached results are still valid.

    Args:
        previous: State after the last evaluation.
        conditions: Conditions after the last evaluation. GPUs with conditions are evaluated again.
    """
    if snapshot.gpus is None or not cache.gpus or cache.inputs != shared_inputs(snapshot, settings):
        return frozenset()
    subjects = {subject for subject, _ in conditions}
    numbers = {sample.index: number for number, sample in previous.samples.items()}
    found = set()
    for sample in snapshot.gpus.gpus:
        number = numbers.get(sample.index, -1)
        entry = cache.gpus.get(number)
        if (
            entry is not None
            and entry.readings == _visible_readings(sample)
            and is_answering(sample, settings.gpu, now.mono_ns)
            and not any(device.name in subjects for device, _ in entry.devices)
            and now.mono_ns < min(entry.due_ns, default=now.mono_ns + 1)
        ):
            found.add(number)
    return frozenset(found)


def cached_gpu(
    evaluation: Evaluation,
    sample: GpuSample,
    devices: Sequence[tuple[InventoryDevice, tuple[tuple[str, str], ...]]],
    begin: tuple[int, int, int],
) -> CachedGpu | None:
    """Return the results of a GPU that the next evaluation can reuse; None: the GPU has raised or pending
    faults.

    Args:
        devices: The GPU and its MIG instances, each with its attributes.
        begin: Lengths of the evaluation's lists (not applicable, not evaluated, due times) before the GPU was
            evaluated: what was appended since belongs to the GPU.
    """
    if any(evaluation.stable_codes(device.name) != () for device, _ in devices):
        return None
    not_applicable, not_evaluated, due = begin
    return CachedGpu(
        _visible_readings(sample),
        tuple(devices),
        tuple(evaluation.not_applicable[not_applicable:]),
        tuple(evaluation.not_evaluated[not_evaluated:]),
        tuple(evaluation.due_ns[due:]),
    )


def _visible_readings(sample: GpuSample) -> tuple[object, ...]:
    """Return a GPU's UUID and the native core's counts of its changes, events and XIDs.

    If none of them has changed, no reading that rules evaluate has changed.
    """
    return (sample.uuid, sample.changes, sample.event_mask, sample.events, sample.xids)

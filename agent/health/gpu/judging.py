"""One GPU in one look: its rules, its latched faults, and those of its instances, as tracks."""

from collections.abc import Mapping, Sequence
from typing import Final

from agent.devices.inventory import Device
from agent.health.catalog import Row, Rule
from agent.health.evaluation import Evaluation, row_among
from agent.health.gpu.answers import next_step_ns
from agent.health.gpu.faults.evaluate import Latched, fault_row, findings_of, instance_findings, is_latched
from agent.health.gpu.state import GpuLook
from agent.health.gpu.verdicts import GONE, answers, gone_of
from agent.health.gpu.view import GpuView
from agent.health.rules import OK, RuleNotEvaluated
from agent.model.health import Finding
from agent.model.settings import GpuLimits
from agent.model.source import SourceSample
from agent.model.time import Instant

SILENT: Final = RuleNotEvaluated("the GPU does not answer")
NO_FAULT: Final[tuple[Finding | None, Instant | None]] = (None, None)


def judge_gpu(
    look: Evaluation,
    device: Device,
    view: GpuView,
    rules: Sequence[Rule],
    gpus: GpuLook,
    source: SourceSample,
) -> None:
    answering, quiet = answers(view), not look.codes_of(device.name)
    for rule in rules:
        answer = rule.judge(view) if answering or rule.blind else SILENT
        if answer is OK and quiet and not rule.counter:
            continue  # the most frequent case, and nothing changes
        of = source if rule.source == "gpu" else look.sources.get(rule.source, source)
        look.judge(device.name, rule, answer, of)
    found = findings_of(gpus.decisions, gpus.faults, gpus.state.memory, device.gpu)
    _track_faults(look, device, found, source)
    if not answering and (step_ns := next_step_ns(view)) is not None:
        look.due_ns.append(step_ns)


def judge_instance(look: Evaluation, device: Device, gpus: GpuLook, source: SourceSample) -> None:
    look.track(device.name, GONE, gone_of(gpus.state.memory, device), source, blind=True)
    found = instance_findings(gpus.decisions, gpus.faults, device.gpu, device.gi, device.ci)
    _track_faults(look, device, found, source)


def _track_faults(
    look: Evaluation, device: Device, found: Mapping[str, Latched], source: SourceSample
) -> None:
    """Latched faults are known whether or not the GPU answers."""
    before = [code for code in look.codes_of(device.name) if is_latched(code) and code not in found]
    for code in sorted([*found, *before]):
        finding, since = found.get(code, NO_FAULT)
        row = fault_row(code, look.settings.gpu)
        look.track(device.name, row, finding, source, blind=True, since=since)


def gpu_row(rules: Sequence[Rule], limits: GpuLimits, code: str) -> Row:
    if code == GONE.code:
        return GONE
    return fault_row(code, limits) if is_latched(code) else row_among(rules, code)

"""Two readings of the same GPUs, field by field: do they agree? Pure.

The native core reads before and after pynvml does. What pynvml read is right if it lies between the two; what
lies outside may have moved, if it is of a kind that moves, and is a difference if it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.cli.output.text import Entry, clean, format_count, format_entries
from agent.model.gpu import GpuField, GpuSample, GpuSet
from agent.model.reading import Missing, Reading
from agent.model.source import SourceState

if TYPE_CHECKING:
    from agent.cli.output.terminal import Style
    from agent.sources.nvml_reference import Answer, TwinGpu

MOVING: Final = frozenset(
    {
        GpuField.TEMP,
        GpuField.MEM_TEMP,
        GpuField.MARGIN,
        GpuField.CLOCK_REASONS,
        GpuField.UTILIZATION,
        GpuField.PSTATE,
        GpuField.PCIE_GEN,
        GpuField.SLOWED_SW_POWER,
        GpuField.SLOWED_SW_THERMAL,
        GpuField.SLOWED_HW_THERMAL,
        GpuField.SLOWED_HW_BRAKE,
    }
)
"""What changes between two looks at a healthy GPU. A PCIe link slows down when the GPU is idle."""


class Standing(StrEnum):
    """How two readings of one field compare."""

    AGREES = "agrees"
    UNREAD = "unread"
    """Neither could read it."""
    MOVED = "moved"
    DIFFERS = "differs"


class Comparison(NamedTuple):
    """One field of one GPU."""

    gpu: str
    """UUID; of one that does not say, its place in the list."""
    field: GpuField
    before: Reading
    pynvml: Answer
    after: Reading
    standing: Standing

    @property
    def words(self) -> str:
        """What each of them read."""
        native = str(self.before) if self.before == self.after else f"{self.before}, then {self.after}"
        return f"native {native}, pynvml {self.pynvml}"


class CrossCheck(NamedTuple):
    """All of it."""

    comparisons: tuple[Comparison, ...] = ()
    problems: tuple[str, ...] = ()
    """What the two do not agree on beside the fields: whether there is NVML, and which GPUs there are."""
    note: str = ""
    """Why there is nothing to compare, where both say so."""

    @property
    def differs(self) -> bool:
        """One of the two is wrong."""
        return bool(self.problems) or any(one.standing is Standing.DIFFERS for one in self.comparisons)


def compare(before: GpuSet, twin: Sequence[TwinGpu] | str, after: GpuSet) -> CrossCheck:
    """The native core's readings against pynvml's, or against the reason why it has none."""
    if isinstance(twin, str):
        if after.nvml.state is SourceState.OK:
            return CrossCheck(problems=(f"only the native core can use NVML; pynvml: {twin}",))
        return CrossCheck(note=f"neither can use NVML: {twin}")
    if after.nvml.state is not SourceState.OK:
        why = after.nvml.detail or after.nvml.state
        return CrossCheck(problems=(f"only pynvml can use NVML; native core: {why}",))
    unmatched = {sample.index: sample for sample in after.gpus}
    earlier = {sample.index: sample for sample in before.gpus}
    comparisons: list[Comparison] = []
    problems: list[str] = []
    for place, gpu in enumerate(twin):
        name = gpu.uuid or f"GPU {place}"
        sample = _same(gpu, place, unmatched.values())
        if sample is None:
            problems.append(f"{name}: the native core does not see it")
            continue
        del unmatched[sample.index]
        comparisons += _compare_gpu(name, earlier.get(sample.index, sample), gpu, sample)
    problems += [f"{one.uuid or f'GPU {one.index}'}: pynvml does not see it" for one in unmatched.values()]
    return CrossCheck(tuple(comparisons), tuple(problems))


def _same(gpu: TwinGpu, place: int, samples: Iterable[GpuSample]) -> GpuSample | None:
    """The native core's record of a GPU; of one that does not say who it is, that in the same place."""
    return next((one for one in samples if (one.uuid == gpu.uuid if gpu.uuid else one.index == place)), None)


def _compare_gpu(name: str, before: GpuSample, twin: TwinGpu, after: GpuSample) -> Iterator[Comparison]:
    for field in GpuField:
        first, other, last = before[field], twin.readings[field], after[field]
        yield Comparison(name, field, first, other, last, stand(field, first, other, last))


def stand(field: GpuField, before: Reading, other: Answer, after: Reading) -> Standing:
    """How a field's three readings compare."""
    native = [value for value in (before, after) if not isinstance(value, Missing)]
    if not isinstance(other, int):
        # It came or went in between: that is the GPU's doing, not a reader's.
        return (Standing.UNREAD, Standing.MOVED, Standing.DIFFERS)[len(native)]
    if not native:
        return Standing.DIFFERS
    if min(native) <= other <= max(native):
        return Standing.AGREES
    return Standing.MOVED if field in MOVING else Standing.DIFFERS


# --- as text and as a document -----------------------------------------------------------------------------


def render_check(check: CrossCheck, style: Style) -> str:
    """How many agree, and each that does not."""
    counts = Counter(one.standing for one in check.comparisons)
    entries = [
        Entry(
            "backends",
            check.note
            or f"{format_count(counts[Standing.AGREES], 'reading')} of native core and pynvml agree, "
            f"{counts[Standing.DIFFERS]} differ, {counts[Standing.MOVED]} moved meanwhile, "
            f"{counts[Standing.UNREAD]} neither can read",
        )
    ]
    entries += [Entry("differs", clean(problem), ("red",)) for problem in check.problems]
    for standing, paint in ((Standing.DIFFERS, ("red",)), (Standing.MOVED, ("dim",))):
        entries += [
            Entry(standing, f"{clean(one.gpu)} {one.field}: {clean(one.words)}", paint)
            for one in check.comparisons
            if one.standing is standing
        ]
    return "\n".join(format_entries(entries, style)) + "\n"


def check_document(check: CrossCheck) -> dict[str, Any]:
    """What ``scan -o json`` adds to the report."""
    counts = Counter(one.standing for one in check.comparisons)
    return {
        **{standing.value: counts[standing] for standing in Standing},
        "problems": list(check.problems),
        "note": check.note,
        "fields": [
            {
                "gpu": one.gpu,
                "field": one.field,
                "standing": one.standing,
                "native": [_value(one.before), _value(one.after)],
                "pynvml": _value(one.pynvml),
            }
            for one in check.comparisons
            if one.standing in {Standing.DIFFERS, Standing.MOVED}
        ],
    }


def render_twin(gpus: Sequence[TwinGpu], style: Style) -> str:
    """What pynvml read: a line for each field, a column for each GPU."""
    heads = [
        style.paint(f"  {place}  {clean(gpu.uuid or '?')}  {clean(gpu.bus)}", "dim")
        for place, gpu in enumerate(gpus)
    ]
    rows = [[field, *(_cell(gpu.readings[field]) for gpu in gpus)] for field in GpuField]
    rows.insert(0, ["FIELD", *map(str, range(len(gpus)))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*heads, *(line.rstrip() for line in lines)]) + "\n"


def twin_document(gpus: Iterable[TwinGpu]) -> list[dict[str, Any]]:
    """The same for programs; what NVML refused is its text."""
    return [
        {
            "uuid": gpu.uuid,
            "bus": gpu.bus,
            "readings": {field.value: _value(answer) for field, answer in gpu.readings.items()},
        }
        for gpu in gpus
    ]


def _value(value: Reading | Answer) -> int | str:
    return value if isinstance(value, int) else str(value)


def _cell(answer: Answer) -> str:
    return str(answer) if isinstance(answer, int) else clean(answer.name)

"""Evaluations that what-if does not repeat: verdicts and engine state are those of all evaluations."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from paper_gpus import GpuNode
from record_nodes import MixedNode, gpu_day, host_day, mixed_day
from record_size import quiet_snapshots, quiet_steps
from test_gpu_rules import RULES, views
from test_record import write_segment

from agent.engine.step import EngineState, step
from agent.health.gpu.rule_input import GpuRuleInput
from agent.health.gpu.state import evaluate_gpus
from agent.health.rules import RuleResult
from agent.model.gpu import GpuField
from agent.model.health import Finding, Severity
from agent.model.reading import Reading, SourceSample, SourceState
from agent.model.settings import EngineSettings, GpuLimits, RuleOverride
from agent.model.time import NS
from agent.record import replay
from agent.record.events import CLASSES, recordable_state, recorded_verdicts
from agent.record.replay import CgroupsMatter, ChangeSettings, Replay
from agent.record.segment_file import SegmentReader, segment_path, segment_paths
from agent.record.steady_state import _LastPass, _reading_checks, _SteadyGpu, find_steady_state
from agent.record.value_codec import ValueDecoder, ValueEncoder, add_difference

RECORDS: Final = sorted((Path(__file__).parent / "records").glob("*/*.drahrec"))


def _with_rules(settings: EngineSettings, *rules: RuleOverride) -> EngineSettings:
    return replace(settings, rules=(*settings.rules, *rules))


CHANGES: Final[dict[str, ChangeSettings]] = {
    "same": lambda recorded: recorded,
    "off": lambda recorded: _with_rules(recorded, RuleOverride("gpu.thermal.over_limit", off=True)),
    "limits": lambda recorded: _with_rules(
        recorded, RuleOverride("gpu.pcie.replay", limit=1), RuleOverride("mem.ecc.correctable_rate", limit=3)
    ),
    "severities": lambda recorded: _with_rules(
        recorded, RuleOverride("gpu.*", severity=Severity.UNHEALTHY, probation_s=300)
    ),
    "windows": lambda recorded: replace(
        recorded,
        throttle_window_s=20,
        gpu=replace(recorded.gpu, probation_s=5, deadline_s=1, correctable_window_s=30),
    ),
    "long": lambda recorded: replace(recorded, gpu=replace(recorded.gpu, probation_s=3600)),
}
"""Changes of settings by name."""

SOURCE: Final = SourceSample("gpu-0", SourceState.OK, 0, NS, 0, "")
Observed = tuple[Any, ...]


def all_verdicts(paths: Sequence[Path], change: ChangeSettings) -> tuple[list[Observed], EngineState]:
    """Return the verdicts of all evaluations, each of which is repeated, and the state after them."""
    replayed = Replay(change)
    found = [
        (
            *(
                found_step.recorded.now,
                found_step.recorded.use,
                found_step.recorded.verdicts,
                recorded_verdicts(found_step.report),
            ),
            found_step.report.starting,
            (pods := found_step.recorded.snapshot.pods) and (pods.uses, pods.names),
        )
        for path in paths
        for found_step in replayed.segment(SegmentReader(path))
    ]
    assert replayed._state is not None
    return found, replayed._state


def few_verdicts(
    paths: Sequence[Path], change: ChangeSettings, *, with_cgroups: bool
) -> tuple[list[Observed], EngineState]:
    """Return the verdicts of all evaluations, of which few are repeated, and the state after them."""
    replayed = Replay(change)
    found = [
        (
            *(verdict.recorded.now, verdict.recorded.use, verdict.recorded.verdicts, verdict.verdicts),
            *(verdict.starting, verdict.pods and (verdict.pods.uses, verdict.pods.names)),
        )
        for path in paths
        for verdict in replayed.verdicts(SegmentReader(path), with_cgroups=with_cgroups)
    ]
    assert replayed._state is not None
    return found, replayed._state


def verdict_state(state: EngineState, *, with_cgroups: bool) -> EngineState:
    """Return the part of the engine's state that later verdicts on devices depend on."""
    apart = ("node", "group:")[: 1 if with_cgroups else 2]
    state = replace(
        recordable_state(state),
        conditions={
            key: condition for key, condition in state.conditions.items() if not key[0].startswith(apart)
        },
        devices={name: (device.health, device.severity) for name, device in state.devices.items()},
    )
    host = state.host._replace(machine=None, groups=state.host.groups if with_cgroups else None)
    return replace(state, host=host, due_ns=None, lease_salt_s=0)


def compare(paths: Sequence[Path], change: ChangeSettings) -> bool:
    """Compare both; return whether cgroups matter."""
    with_cgroups = False
    try:
        few, state = few_verdicts(paths, change, with_cgroups=False)
    except CgroupsMatter:
        with_cgroups = True
        few, state = few_verdicts(paths, change, with_cgroups=True)
    expected, expected_state = all_verdicts(paths, change)
    assert few == expected
    assert verdict_state(state, with_cgroups=with_cgroups) == verdict_state(
        expected_state, with_cgroups=with_cgroups
    )
    return with_cgroups


def write_record(directory: Path, steps: Sequence[Any]) -> list[Path]:
    """Write the record of a day in two segments that follow each other."""
    half = len(steps) // 2
    write_segment(segment_path(directory, 1), steps[:half])
    write_segment(segment_path(directory, 2), steps[half:])
    return segment_paths(directory)


@pytest.fixture
def repeated_evaluations() -> Iterator[list[None]]:
    """List with an item for each evaluation that a replay repeats."""
    found: list[None] = []

    def count_and_step(*args: Any, **options: Any) -> Any:
        found.append(None)
        return step(*args, **options)

    with patch.object(replay, "step", count_and_step):
        yield found


# --- all that what-if prints --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_verdicts_of_a_random_day_are_those_of_all_evaluations(seed: int, tmp_path: Path) -> None:
    paths = write_record(tmp_path, mixed_day(seed))
    names = list(CHANGES)
    for at in (seed, seed + 3):
        compare(paths, CHANGES[names[at % len(names)]])


def _pause(node: MixedNode) -> None:
    node.wait(90)


def _replays(node: MixedNode) -> None:
    count(node, GpuField.PCIE_REPLAY, 20)


def _interrupt_pass(node: MixedNode) -> None:
    """Change a counter of a GPU whose pass has not finished."""
    node.frozen.add(0)
    count(node, GpuField.ECC_CORRECTABLE, 50)
    node.heartbeat(10.0)
    node.frozen.clear()


def count(node: MixedNode, field: GpuField, more: int) -> None:
    """Add to a counter of the first GPU."""
    first, *others = node.gpus
    reading = first.readings[field]
    assert isinstance(reading, int)
    node.gpus = [replace(first, readings={**first.readings, field: reading + more}), *others]


@pytest.mark.parametrize("happens", [_pause, _replays, _interrupt_pass])
def test_event_in_a_steady_state_leaves_the_state_of_all_evaluations(
    happens: Callable[[MixedNode], None], tmp_path: Path
) -> None:
    node = MixedNode(random.Random(1), 2, with_cgroups=False)
    node.read()
    for _ in range(3):
        for _ in range(40):
            node.heartbeat(10.0)
        happens(node)
    for _ in range(40):
        node.heartbeat(10.0)
    compare(write_record(tmp_path, node.steps), CHANGES["same"])


@pytest.mark.parametrize("day", [gpu_day, host_day])
def test_verdicts_of_a_day_with_many_faults_are_those_of_all_evaluations(day: Any, tmp_path: Path) -> None:
    paths = write_record(tmp_path, day(5, 16))
    for name in ("limits", "windows"):
        compare(paths, CHANGES[name])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_verdicts_of_a_committed_record_are_those_of_all_evaluations(path: Path) -> None:
    for change in CHANGES.values():
        compare([path], change)


def test_record_in_which_cgroups_change_verdicts_is_evaluated_with_cgroups(tmp_path: Path) -> None:
    assert compare(write_record(tmp_path, mixed_day(3)), CHANGES["same"])
    (tmp_path / "other").mkdir()
    assert not compare(write_record(tmp_path / "other", mixed_day(4)), CHANGES["same"])


def test_few_evaluations_of_a_quiet_hour_are_repeated(
    tmp_path: Path, repeated_evaluations: list[None]
) -> None:
    paths = write_record(tmp_path, list(quiet_steps(3600)))
    few, _ = few_verdicts(paths, CHANGES["same"], with_cgroups=False)
    assert len(few) > 350
    assert len(repeated_evaluations) < 12
    assert few == all_verdicts(paths, CHANGES["same"])[0]


def test_lasting_fault_does_not_repeat_all_evaluations(
    tmp_path: Path, repeated_evaluations: list[None]
) -> None:
    def day() -> Iterator[Any]:
        state = EngineState(EngineSettings("node-a"))
        for _, snapshot, report, use in quiet_steps(1800):
            assert snapshot.gpus is not None
            first, *others = snapshot.gpus.gpus
            first = replace(first, readings={**first.readings, GpuField.PCIE_WIDTH: 8})
            snapshot = replace(snapshot, gpus=replace(snapshot.gpus, gpus=(first, *others)))
            before = state
            state, report = step(before, snapshot, report.at)
            yield before, snapshot, report, use

    paths = write_record(tmp_path, list(day()))
    few, _ = few_verdicts(paths, CHANGES["same"], with_cgroups=False)
    assert any(state.causes for state in few[-1][3])
    assert len(repeated_evaluations) < 30
    assert few == all_verdicts(paths, CHANGES["same"])[0]


def test_state_with_a_fault_that_ended_before_its_report_is_not_steady() -> None:
    node = GpuNode()
    node.rest(120)
    node.nvml_xid(0, 48)
    for _ in range(30):
        node.read()
    report = node.evaluate()
    assert find_steady_state(node.state, node.snapshot(), report, _names, with_cgroups=False) is None


# --- readings -----------------------------------------------------------------------------------------------


class ReadSet(dict[GpuField, Reading]):
    """Readings that note which of them are read."""

    def __init__(self, readings: Any) -> None:
        super().__init__(readings)
        self.read: set[GpuField] = set()

    def get(self, name: Any, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("codes", [range(1, 80), range(80, 180)])
def test_state_of_gpus_depends_on_no_reading_that_may_move(codes: range) -> None:
    node = GpuNode(2)
    for code in codes:
        node.xid(code % 2, code)
    node.rest(20)
    seen = []
    for number in node.gpus:
        seen.append(ReadSet(node.gpus[number].readings))
        node.change(number, readings=seen[-1], beat_ns=node.now_ns + 1, passes=1_000_000)
    limits = node.state.settings.gpu
    evaluate_gpus(node.state.gpus, node.snapshot(), limits, node.now)
    read = seen[0].read | seen[1].read
    assert GpuField.RECOVERY_ACTION in read
    assert read <= _reading_checks(limits).fixed


@given(
    view=views,
    field=st.sampled_from(sorted(_reading_checks(GpuLimits()).watched)),
    values=st.tuples(st.integers(-5, 200), st.integers(-5, 200)),
    limit=st.integers(0, 100),
)
def test_readings_on_one_side_of_their_limit_give_equal_results(
    view: GpuRuleInput, field: GpuField, values: tuple[int, int], limit: int
) -> None:
    assert view.sample is not None
    wake = _reading_checks(GpuLimits()).watched[field]
    limits = {wake.limit: limit} if wake.limit else {}
    samples = [
        replace(view.sample, readings={**view.sample.readings, **limits, field: value}) for value in values
    ]
    gpu = _SteadyGpu(samples[0], _LastPass(SOURCE, 0), view, EngineState(EngineSettings("node-a")), _names)
    assume(gpu._side(wake, values[0]) == gpu._side(wake, values[1]))
    results = [[rule.evaluate(view._replace(sample=sample)) for rule in RULES] for sample in samples]
    assert list(map(_kind, results[0])) == list(map(_kind, results[1]))


def _names(_kind: type) -> tuple[str, ...]:
    return ()


def _kind(result: RuleResult) -> Any:
    return result.severity if isinstance(result, Finding) else type(result)


# --- differences --------------------------------------------------------------------------------------------


def test_sum_of_differences_has_the_effect_of_all() -> None:
    encoder = ValueEncoder(CLASSES)
    decoder = ValueDecoder(encoder.description(), CLASSES)
    snapshots = [snapshot for snapshot, _ in quiet_snapshots(300)]
    total: dict[Any, Any] = {}
    for before, after in pairwise(snapshots):
        add_difference(total, encoder.difference(before, after))
    assert decoder.apply(snapshots[0], total) == snapshots[-1]


@pytest.mark.parametrize("name", ["beat_ns", "state", "failures"])
def test_change_of_a_source_other_than_a_pass_ends_a_steady_state(name: str, tmp_path: Path) -> None:
    steps = list(quiet_steps(60))
    before, snapshot, report, use = steps[-1]
    first, *others = snapshot.sources
    changed = {"beat_ns": first.beat_ns - 5 * NS, "state": SourceState.FAILING, "failures": 1}[name]
    first = first._replace(**{name: changed})
    report = step(before, replace(snapshot, sources=(first, *others)), report.at)[1]
    steps[-1] = (before, replace(snapshot, sources=(first, *others)), report, use)
    (path,) = write_record(tmp_path, steps)[1:]
    reader = SegmentReader(path)
    inputs = list(reader.inputs())
    snapshot = reader.snapshot(inputs[0].difference)
    assert snapshot is not None
    evaluated = replace(snapshot, groups=())
    state, report = step(steps[len(steps) // 2][0], evaluated, inputs[0].now)
    steady = find_steady_state(state, evaluated, report, reader.field_names, with_cgroups=False)
    assert steady is not None
    assert [steady.accept(entry) for entry in inputs[1:]] == [
        *[True] * (len(inputs) - 2),
        False,
    ]

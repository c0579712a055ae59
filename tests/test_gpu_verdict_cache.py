"""Evaluations of changes give the verdicts of full evaluations, and skip the GPUs that have not changed."""

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from paper import pool_sample
from paper_gpus import HEARTBEAT_NS, GpuNode
from test_gpu_evaluation import apply_event, events

from agent.engine.step import EngineState, step
from agent.health.gpu.state import GpuVerdictCache
from agent.model.gpu import GpuField, GpuSample
from agent.model.report import Report

NOT_VISIBLE: Final = frozenset({GpuField.TEMP, GpuField.UTILIZATION, GpuField.PSTATE})
"""Readings that change in each pass here, and wake nothing while the GPU is cold."""


class ChangingNode(GpuNode):
    """Node whose GPUs count the passes with a change that rules evaluate, and that evaluates each snapshot
    in full and as a change."""

    def __init__(self, gpus: int = 2, **options: Any) -> None:
        self._visible: dict[int, object] = {}
        self.skipped: list[frozenset[int]] = []
        """GPUs that were not evaluated, by evaluation of a change."""
        super().__init__(gpus, **options)
        self.partial: EngineState = self.state
        self._full_ns = 0

    def read(self) -> None:
        super().read()
        for number, gpu in self.gpus.items():
            self._count_change(number, gpu)  # a story also changes readings of a GPU that hangs

    def _count_change(self, number: int, gpu: GpuSample) -> None:
        readings = {field: value for field, value in gpu.readings.items() if field not in NOT_VISIBLE}
        visible = readings, gpu.status, gpu.handles, gpu.migs, bool(gpu.passes)
        if visible != self._visible.get(number):
            self._visible[number] = visible
            self.change(number, changes=gpu.changes + 1)
        if number in self.hanging:
            return
        self.set_readings(number, temp=30 + gpu.passes % 5, utilization=gpu.passes % 100)

    def evaluate_twice(self) -> tuple[Report, Report]:
        """Return the reports of a full evaluation and of one as the engine loop does it."""
        snapshot, due_ns = self.snapshot(), self.partial.due_ns
        is_full = self.now_ns >= self._full_ns or (due_ns is not None and self.now_ns >= due_ns)
        if is_full:
            self._full_ns = self.now_ns + HEARTBEAT_NS
        before = self.partial.gpus.rule_state.per_gpu
        self.state, full = step(self.state, snapshot, self.now)
        self.partial, partial = step(self.partial, snapshot, self.now, is_full=is_full)
        per_gpu = self.partial.gpus.rule_state.per_gpu
        self.skipped.append(frozenset(number for number in per_gpu if per_gpu[number] is before.get(number)))
        return full, partial


stories = st.lists(events.filter(lambda event: event[0] != "restart"), max_size=25)


@given(stories)
@example([("hang", 0), ("action", 0, 1)])
def test_evaluation_of_changes_gives_devices_of_full_evaluation(story: list[Any]) -> None:
    node = ChangingNode(2, migs={0: [(1, 0)]})
    for event, *arguments in story:
        passes = 1
        if event == "rest":
            passes = int(arguments[0])
        else:
            apply_event(node, event, arguments)
        for _ in range(passes):
            node.read()
            full, partial = node.evaluate_twice()
            assert partial.devices == full.devices
            assert partial.cleared == full.cleared
            assert node.partial.checkpoint == node.state.checkpoint


def settled_node(gpus: int = 8) -> ChangingNode:
    """Return a node whose GPUs have been healthy for long."""
    node = ChangingNode(gpus)
    for _ in range(3):
        node.read()
        node.evaluate_twice()
    return node


def test_change_of_pool_evaluates_no_gpu() -> None:
    node = settled_node()
    node.read()
    node.pool(pool_sample(nr=5))
    full, partial = node.evaluate_twice()
    assert replace(partial, is_full=True) == full
    assert node.skipped[-1] == set(range(8))


def test_change_of_one_gpu_evaluates_that_gpu() -> None:
    node = settled_node()
    node.set_readings(3, remap_failure=1)
    node.read()
    full, partial = node.evaluate_twice()
    assert replace(partial, is_full=True) == full
    assert [device.device for device in partial.devices if device.causes] == ["gpu-3"]
    assert node.skipped[-1] == set(range(8)) - {3}


def test_gpu_with_conditions_is_evaluated_each_time() -> None:
    node = settled_node(2)
    node.nvml_xid(1, 48)
    for _ in range(3):
        node.read()
        full, partial = node.evaluate_twice()
        assert replace(partial, is_full=True) == full
        assert node.skipped[-1] == {0}


def test_full_evaluation_skips_no_gpu() -> None:
    node = settled_node(2)
    node.read()
    state, _ = step(node.partial, node.snapshot(), node.now)
    assert all(gpu.read_ns == node.now_ns for gpu in state.gpus.rule_state.per_gpu.values())


@pytest.mark.parametrize("change", ["library", "host", "log line", "hang", "settings"])
def test_input_of_all_gpus_evaluates_all_gpus(change: str) -> None:
    node = settled_node(2)
    if change == "library":
        node.library["driver"] = "580.65.06"
    elif change == "host":
        node.host = replace(node.host, fabric_manager=False)
    elif change == "log line":
        node.log_xid(0, 31)
    elif change == "hang":
        node.hang(0, 1)
        node.wait(6)
    elif change == "settings":
        settings = replace(node.settings, lease_s=node.settings.lease_s + 1)
        node.state = replace(node.state, settings=settings)
        node.partial = replace(node.partial, settings=settings)
    node.read()
    snapshot = node.snapshot()
    _, full = step(node.state, snapshot, node.now)
    state, partial = step(node.partial, snapshot, node.now, is_full=False)
    assert partial.devices == full.devices
    read_ns = {number: gpu.read_ns for number, gpu in state.gpus.rule_state.per_gpu.items()}
    assert read_ns == {number: gpu.beat_ns for number, gpu in node.gpus.items()}


def test_cache_of_unmonitored_gpus_is_empty() -> None:
    node = settled_node(2)
    snapshot = replace(node.snapshot(), gpus=None)
    state, _ = step(EngineState(node.settings), snapshot, node.now)
    assert state.gpu_cache == GpuVerdictCache()

"""Evaluations of changes give the report of full ones, without the rules of unchanged parts of the host."""

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from paper import group_sample, pool_sample
from test_declared_verdict_cache import CHANGES, CPUS, FullNode, apply_event, moves, stories

from agent.devices.inventory import DeviceKind
from agent.engine.step import EngineState, step
from agent.health.host.verdicts import MACHINE_SUBJECT
from agent.model.machine_samples import DimmSample
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.time import NS

HEARTBEAT_NS: Final = 10 * NS
ALL_PARTS: Final = {DeviceKind.CPU, DeviceKind.MEMORY, DeviceKind.HUGEPAGES, MACHINE_SUBJECT}


class ChangingNode(FullNode):
    """Node that evaluates each snapshot in full, and as the engine loop does it for a change."""

    def __init__(self) -> None:
        self.partial: EngineState | None = None
        self.reused: set[str] = set()
        """Parts of the host whose rules the last evaluation of a change did not run."""
        self._full_ns = 0
        super().__init__()

    def evaluate(self) -> Report:
        snapshot, before = self.snapshot(), self.partial or self.state
        is_full = self.now_ns >= self._full_ns
        if is_full:
            self._full_ns = self.now_ns + HEARTBEAT_NS
        self.state, full = step(self.state, snapshot, self.now)
        self.partial, partial = step(before, snapshot, self.now, is_full=is_full)
        known, parts = before.host_results.parts, self.partial.host_results.parts
        self.reused = {part for part in parts if parts[part] is known.get(part)}
        assert replace(partial, is_full=True) == full
        assert self.partial.checkpoint == self.state.checkpoint
        assert self.partial.conditions == self.state.conditions
        return full


def settled_node() -> ChangingNode:
    """Return a node that has been healthy for so long that no rule waits for history."""
    node = ChangingNode()
    for _ in range(15):
        node.wait(10)
        node.read()
        node.evaluate()
    node.stuck = {"pressure"}  # which is read every five seconds only
    node.wait(1)
    node.read()
    return node


@given(st.one_of(*map(stories, CHANGES), st.lists(st.one_of(*CHANGES.values(), moves, moves), max_size=30)))
@hypothesis_settings(max_examples=2 * hypothesis_settings.default.max_examples)
def test_evaluation_of_change_gives_report_of_full_evaluation(story: list[Any]) -> None:
    node = settled_node()
    node.stuck = set()
    for what, *how in story:
        apply_event(node, what, how)
        node.evaluate()
        node.next()


def test_change_of_pool_evaluates_no_other_part() -> None:
    node = settled_node()
    node.pool(pool_sample(nr=5))
    node.evaluate()
    assert node.reused == ALL_PARTS - {DeviceKind.HUGEPAGES}
    assert node.partial is not None
    assert "hugepages-2mi-node0" in {subject for subject, _ in node.partial.conditions}


def test_change_of_cgroup_evaluates_no_part() -> None:
    node = settled_node()
    node.groups = [group_sample(1)._replace(mem_oom_kill=1)]
    node.evaluate()
    assert node.reused == ALL_PARTS


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("cpus", "online", 0b1), {DeviceKind.CPU}),
        (("nodes", 0, 0b1), {DeviceKind.CPU, DeviceKind.MEMORY}),
        (("core", 0, "package", 7), {DeviceKind.CPU, DeviceKind.MEMORY}),
        (("numa", 0, "total_kib", 1), {DeviceKind.MEMORY}),
        (("stalls", "io_full", 30_000_000), {MACHINE_SUBJECT}),
        (("state", "edac", "failing"), ALL_PARTS),
    ],
)
def test_changed_reading_evaluates_its_parts(change: tuple[Any, ...], parts: set[str]) -> None:
    node = settled_node()
    what, *how = change
    apply_event(node, what, how)
    node.evaluate()
    assert not node.reused & parts


def test_package_of_cpus_decides_at_once_which_memory_a_controller_has() -> None:
    node = settled_node()
    node.change(dimms=(DimmSample(0, 0, "CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "", 0, 0),))
    for _ in range(15):
        node.wait(10)
        node.read()
        node.evaluate()
    before = node.evaluate().not_applicable
    node.wait(1)
    node.read()
    for cpu in CPUS:
        apply_event(node, "core", (cpu, "package", 7))
    assert node.evaluate().not_applicable != before


def test_declared_cpu_waits_for_history_no_longer_than_in_full_evaluations() -> None:
    node = settled_node()
    node.throttle = dict.fromkeys(CPUS, 0)
    waited = set()
    for _ in range(80):
        node.wait(1)
        node.read()
        report = node.evaluate()
        waited.add(any(rule.code == "cpu.throttled.core" for rule in report.not_evaluated))
    assert waited == {True, False}


def test_restarted_source_evaluates_all_parts_afterwards() -> None:
    node = settled_node()
    node.states["cpus"] = SourceState.STARTING
    node.evaluate()
    assert node.reused == set()
    node.states.clear()
    node.read()
    node.evaluate()
    assert node.reused == set()


def test_full_evaluation_reuses_no_part() -> None:
    node = settled_node()
    node.wait(10)
    node.read()
    node.evaluate()
    assert node.reused == set()


def test_skipped_readings_of_counters_count_as_read() -> None:
    node = settled_node()
    counting = DimmSample(0, 0, "DIMM_A1", "", 0, 0)
    node.throttle = dict.fromkeys(range(6), 0)
    node.change(dimms=(counting,))
    for _ in range(15):
        node.wait(10)
        node.read()
        node.evaluate()
    for second in range(1, 5):
        node.wait(1)
        node.read()
        node.pool(pool_sample(nr=10 + second))
        node.evaluate()
        assert node.reused >= {DeviceKind.CPU, DeviceKind.MEMORY}
    node.throttle[0] = 100
    node.change(dimms=(counting._replace(correctable=100),))
    for _ in range(40):
        node.wait(1)
        node.read()
        node.evaluate()

"""Hugepage rules: the expected number of pages and its source, and the findings about other pools."""

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from machine import HugepagePool, hugepages
from paper import ABSENT, EIO, codes, cpus_sample, device_of, pool_sample, without_since
from patience import PATIENCE_S

from agent.devices.inventory import hugepage_device, pools_by_device
from agent.engine.step import EngineState, step
from agent.health.host.hugepages import (
    ALLOC_FAILED_NS,
    DECLARED_POOL_RULES,
    POOL_RULES,
    DeclaredPageTotal,
    IncompleteBootAllocation,
    PoolRuleInput,
    PoolRuleState,
    declared_pages_rule_input,
    next_pool_state,
    pool_rule_input,
)
from agent.health.kernel_log.facts import KernelLogFact, KernelLogState
from agent.health.kernel_log.parse import parse_host_line
from agent.health.rules import OK, RuleInconclusive, RuleInputUnreadable, RuleNotApplicable, RuleResult
from agent.model.declared_devices import DeclaredFile, DeclaredHugepageDevice, DriverDevice
from agent.model.health import Finding
from agent.model.machine_samples import MachineSample, PressureSample
from agent.model.reading import Reading
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import HugepagePoolSample, Snapshot
from agent.model.time import NS, Instant
from agent.native.sampler import Sampler, SamplerOptions

ROWS: Final = {rule.code: rule for rule in (*POOL_RULES, *DECLARED_POOL_RULES)}
SHRUNK: Final = "mem.hugepages.pool_shrunk"
SHORT: Final = "mem.hugepages.short"
SURPLUS: Final = "mem.hugepages.surplus"
FAILED: Final = "mem.hugepages.surplus_failed"
FULL: Final = "mem.hugepages.exhausted"
MISSING: Final = "mem.hugepages.missing"
MIB2: Final = 2048
GIB1: Final = 1 << 20
UNREAD: Final = RuleInconclusive("nr_hugepages or surplus_hugepages cannot be read")


def bad(code: str, evidence: str) -> Finding:
    return Finding(code, ROWS[code].severity, evidence)


def without_advice(answer: RuleResult) -> RuleResult:
    return answer._replace(advice="") if isinstance(answer, Finding) else answer


# --- rules on a view --------------------------------------------------------------------------------------


def pool(
    nr: Reading, surplus: Reading = 0, expected: Reading = 10, *, is_configured: bool = False
) -> PoolRuleInput:
    """Return the view of a pool that once had the expected pages."""
    return PoolRuleInput(pool_sample(nr, surplus), MIB2, 0, expected, is_configured, max_seen=expected)


def declared_pool(nr: Reading, pages: int, devices: int = 1, *, max_seen: Reading = 2048) -> PoolRuleInput:
    return PoolRuleInput(
        pool_sample(nr), MIB2, 0, pages, declared=DeclaredPageTotal(pages, devices), max_seen=max_seen
    )


def booted_pool(nr: Reading, asked: int, got: int) -> PoolRuleInput:
    return pool(nr, expected=nr)._replace(boot=IncompleteBootAllocation(asked, got, machine_wide=False))


def pool_in_use(nr: Reading, free: Reading, whole_free: Reading = 64, reserved: Reading = 0) -> PoolRuleInput:
    """Return the view of a node's pool together with the machine's."""
    machine_pool = HugepagePoolSample(MIB2, None, nr, whole_free, reserved, 0, 0)
    return PoolRuleInput(
        HugepagePoolSample(MIB2, 0, nr, free, ABSENT, 0, ABSENT), MIB2, 0, nr, machine_pool=machine_pool
    )


def pool_with_failures(
    alloc_failures: Reading, *, lately: bool = False, overcommit: Reading = 8
) -> PoolRuleInput:
    machine_pool = HugepagePoolSample(MIB2, None, 10, 10, 0, 0, overcommit)
    return pool(10)._replace(
        machine_pool=machine_pool, alloc_failures=alloc_failures, alloc_failed_recently=lately
    )


NO_POOL: Final = PoolRuleInput(None, GIB1, 3, 4, is_configured=True)
CASES: Final[list[tuple[str, PoolRuleInput, RuleResult]]] = [
    (SHRUNK, pool(10), OK),
    (SHRUNK, pool(11), OK),
    (SHRUNK, pool(9), bad(SHRUNK, "9 pages of 2mi, 10 at start")),
    (SHRUNK, pool(0, is_configured=True), bad(SHRUNK, "0 pages of 2mi, 10 configured")),
    (SHRUNK, pool(12, 2), OK),
    (SHRUNK, pool(12, 3), bad(SHRUNK, "9 pages of 2mi, 10 at start")),
    (SHRUNK, pool(10, ABSENT), OK),
    (SHRUNK, pool(EIO), RuleInputUnreadable("nr_hugepages", EIO)),
    (SHRUNK, pool(10, EIO), RuleInputUnreadable("surplus_hugepages", EIO)),
    (SHRUNK, pool(ABSENT, expected=ABSENT), RuleInputUnreadable("nr_hugepages", ABSENT)),
    (SHRUNK, pool(10, expected=EIO), RuleInputUnreadable("pool size at start", EIO)),
    (SHRUNK, pool(0, expected=0), OK),
    (SHRUNK, NO_POOL, bad(SHRUNK, "no pool of 1gi pages, 4 configured")),
    (SHRUNK, NO_POOL._replace(expected=0), OK),
    # a pool that never had the pages did not shrink
    (SHRUNK, pool(8, is_configured=True)._replace(max_seen=8),
     bad(SHRUNK, "never more than 8 pages of 2mi, 10 configured")),
    (SHRUNK, pool(5, is_configured=True)._replace(max_seen=8),
     bad(SHRUNK, "never more than 8 pages of 2mi, 5 now, 10 configured")),
    (SHRUNK, pool(0, is_configured=True)._replace(max_seen=0),
     bad(SHRUNK, "never any pages of 2mi, 10 configured")),
    # the sum of declarations
    (SHRUNK, declared_pool(1024, 1024, 2), OK),
    (SHRUNK, declared_pool(600, 1024, 2), bad(SHRUNK,
     "600 pages of 2mi on NUMA node 0, 1024 declared by 2 devices")),
    (SHRUNK, declared_pool(600, 1024), bad(SHRUNK, "600 pages of 2mi on NUMA node 0, 1024 declared")),
    (SHRUNK, declared_pool(600, 1024, max_seen=600),
     bad(SHRUNK, "never more than 600 pages of 2mi on NUMA node 0, 1024 declared")),
    (SHRUNK, declared_pool(EIO, 1024), RuleInputUnreadable("nr_hugepages", EIO)),
    (SHRUNK, declared_pool(1, 1024)._replace(pool=None), OK),
    # no pool at all
    (MISSING, declared_pool(0, 1), OK),
    (MISSING, NO_POOL._replace(declared=DeclaredPageTotal(4, 1)), bad(MISSING,
     "no pool of 1gi pages on NUMA node 3")),
    # fewer than requested on the kernel's command line
    (SHORT, pool(10), OK),
    (SHORT, booted_pool(600, 1024, 600), bad(SHORT, "1024 pages of 2mi requested at boot, 600 allocated")),
    (SHORT, booted_pool(1023, 1024, 600),
     bad(SHORT, "1024 pages of 2mi requested at boot, 600 allocated, 1023 now")),
    (SHORT, booted_pool(1024, 1024, 600), OK),
    (SHORT, booted_pool(600, 1024, 600)._replace(is_configured=True), OK),
    (SHORT, booted_pool(EIO, 1024, 600), UNREAD),
    (SHORT, booted_pool(1024, 1024, 600)._replace(pool=pool_sample(1024, 1)),
     bad(SHORT, "1024 pages of 2mi requested at boot, 600 allocated, 1023 now")),
    # surplus pages
    (SURPLUS, pool(10, 0), OK),
    (SURPLUS, pool(10, 1), bad(SURPLUS, "1 surplus page of 2mi in use")),
    (SURPLUS, pool(10, 9), bad(SURPLUS, "9 surplus pages of 2mi in use")),
    (SURPLUS, pool(200, 123), bad(SURPLUS, "at least 100 surplus pages of 2mi in use")),
    (SURPLUS, pool(10, ABSENT), RuleNotApplicable("the kernel has no surplus_hugepages files")),
    (SURPLUS, pool(10, EIO), UNREAD),
    (SURPLUS, NO_POOL, OK),
    # failed allocations
    (FAILED, pool_with_failures(5), OK),
    (FAILED, pool_with_failures(5, lately=True),
     bad(FAILED, "a hugepage could not be allocated in the last 10 min")),
    (FAILED, pool_with_failures(5, lately=True, overcommit=0), OK),
    (FAILED, pool_with_failures(5, lately=True, overcommit=ABSENT), OK),
    (FAILED, pool_with_failures(ABSENT), RuleNotApplicable("no htlb_buddy_alloc_fail in /proc/vmstat")),
    (FAILED, pool_with_failures(EIO, lately=True), RuleInconclusive("htlb_buddy_alloc_fail cannot be read")),
    (FAILED, NO_POOL, OK),
    # free pages
    (FULL, pool_in_use(64, 1), OK),
    (FULL, pool_in_use(64, 0), bad(FULL, "all 64 pages of 2mi are in use")),
    (FULL, pool_in_use(0, 0), OK),
    (FULL, pool_in_use(64, 8, 8, 7), OK),
    (FULL, pool_in_use(64, 8, 8, 8), bad(FULL, "all free pages of 2mi are reserved")),
    (FULL, pool_in_use(64, 8, EIO, 8), OK),
    (FULL, pool_in_use(64, 8, 8, ABSENT), OK),
    (FULL, pool_in_use(64, EIO), RuleInputUnreadable("free_hugepages", EIO)),
    (FULL, pool_in_use(64, ABSENT), RuleNotApplicable("the kernel has no free_hugepages files")),
    (FULL, pool_in_use(EIO, EIO), UNREAD),
    (FULL, NO_POOL, OK),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_view_has_result(code: str, view: PoolRuleInput, answer: RuleResult) -> None:
    assert without_advice(ROWS[code].evaluate(view)) == answer


def test_advice_differs_for_pages_that_never_existed() -> None:
    went, never = (ROWS[SHRUNK].evaluate(pool(8)._replace(max_seen=max_seen)) for max_seen in (10, 8))
    assert isinstance(went, Finding)
    assert isinstance(never, Finding)
    assert not went.advice, "that of the row"
    assert "at boot" in never.advice
    found = ROWS[SHRUNK].evaluate(declared_pool(600, 1024, max_seen=600))
    assert isinstance(found, Finding)
    assert found.advice == f"declare fewer pages, or {never.advice}"


# --- rules with earlier readings --------------------------------------------------------------------------

START: Final = Instant(1_000 * NS, 1_700_000_000.0)


def instant_after(seconds: float) -> Instant:
    return Instant(START.mono_ns + int(seconds * NS), START.wall_s + seconds)


def snapshot(
    *pools: HugepagePoolSample, alloc_failures: Reading = 0, files: tuple[DeclaredFile, ...] = ()
) -> Snapshot:
    nothing = PressureSample(ABSENT, ABSENT, ABSENT)
    machine = MachineSample((), (), (), nothing, 0b1, 0b1, 0, alloc_failures, ABSENT, ())
    return Snapshot(seq=1, cpus=cpus_sample(), pools=pools, machine=machine, declared=files)


def file(driver: str, *declarations: tuple[str, int, int, int]) -> DeclaredFile:
    """Return a driver's devices: name, page size [KiB], pages, NUMA node."""
    return DeclaredFile(
        driver,
        tuple(
            DriverDevice(driver, "node-a", name, DeclaredHugepageDevice(size_kib, pages, node), 0)
            for name, size_kib, pages, node in declarations
        ),
    )


def result_of(
    past: PoolRuleState, seen: Snapshot, code: str, *, size_kib: int = MIB2, node: int = 0, at_s: float = 0
) -> RuleResult:
    """Return the result of a rule for a pool of the host."""
    device = hugepage_device(size_kib, node)
    view = pool_rule_input(
        past, pools_by_device(seen), seen, EngineSettings("node-a"), device, instant_after(at_s)
    )
    return ROWS[code].evaluate(view)


def state_after(
    *seen: Snapshot, settings: EngineSettings | None = None, log: KernelLogState | None = None
) -> PoolRuleState:
    """Return the state after these snapshots, a second apart."""
    past = PoolRuleState()
    for second, reading in enumerate(seen):
        past = next_pool_state(
            past,
            log or KernelLogState(),
            reading,
            settings or EngineSettings("node-a"),
            instant_after(second),
        )
    return past


def test_largest_pool_size_ignores_unreadable_readings() -> None:
    seen = [snapshot(pool_sample(nr, surplus)) for nr, surplus in ((6, 0), (9, 1), (4, 0), (EIO, EIO))]
    past = state_after(*seen, settings=EngineSettings("node-a", expect_pools={"hugepages-2mi-node0": 20}))
    assert (past.expected, past.max_seen) == ({"hugepages-2mi-node0": 20}, {"hugepages-2mi-node0": 8})


def test_failed_allocation_is_reported_for_ten_minutes() -> None:
    machine_pool = replace_overcommit(8)
    past = state_after(snapshot(machine_pool, alloc_failures=5), snapshot(machine_pool, alloc_failures=5))
    assert past.alloc_failed_ns is None, "what was counted before the start is old news"
    past = state_after(
        snapshot(machine_pool, alloc_failures=5),
        snapshot(machine_pool, alloc_failures=EIO),
        snapshot(machine_pool, alloc_failures=6),
    )
    seen = snapshot(machine_pool, alloc_failures=6)
    assert isinstance(result_of(past, seen, FAILED, at_s=2), Finding)
    assert isinstance(result_of(past, seen, FAILED, at_s=1.9 + ALLOC_FAILED_NS / NS), Finding)
    assert result_of(past, seen, FAILED, at_s=2 + ALLOC_FAILED_NS / NS) is OK


def test_fallen_allocation_counter_is_no_failure() -> None:
    past = state_after(
        *(snapshot(replace_overcommit(8), alloc_failures=alloc_failures) for alloc_failures in (5, 0, 0))
    )
    assert past.alloc_failed_ns is None
    assert (
        state_after(
            *(snapshot(alloc_failures=alloc_failures) for alloc_failures in (5, 0, 1))
        ).alloc_failed_ns
        == instant_after(2).mono_ns
    )


def test_allocation_failures_without_machine_sample_do_not_apply() -> None:
    seen = replace(snapshot(replace_overcommit(8)), machine=None)
    assert result_of(state_after(seen), seen, FAILED) == RuleNotApplicable(
        "no htlb_buddy_alloc_fail in /proc/vmstat"
    )


def replace_overcommit(pages: int) -> HugepagePoolSample:
    """Return the machine's pool with permission to overcommit."""
    return HugepagePoolSample(MIB2, None, 10, 10, 0, 0, pages)


# --- by the kernel log ------------------------------------------------------------------------------------


def log_of(*lines: str) -> KernelLogState:
    """Return the state of a log with these lines."""
    facts = {}
    for text in lines:
        line = parse_host_line(text)
        assert line is not None, text
        facts[line.code, line.location] = KernelLogFact(
            line.code, line.location, 1, START, START, text, line.values
        )
    return KernelLogState(facts)


ON_NODE_1: Final = "HugeTLB: allocating 4 of page size 1.00 GiB failed node1.  Only allocated 2 hugepages."
ANYWHERE: Final = "HugeTLB: allocating 8 of page size 1.00 GiB failed.  Only allocated 6 hugepages."


def big_pools(*pages: Reading) -> Snapshot:
    """Return a pool of 1 GiB pages per node, and the machine's."""
    counts = [count for count in pages if isinstance(count, int)]
    machine_pool = pool_sample(sum(counts), size_kib=GIB1, node=None)
    return snapshot(
        machine_pool, *(pool_sample(nr, size_kib=GIB1, node=node) for node, nr in enumerate(pages))
    )


def boot_results(seen: Snapshot, *lines: str) -> list[RuleResult]:
    """Return the results for the pool of each node."""
    past = state_after(seen, log=log_of(*lines))
    nodes = [pool.numa_node for pool in seen.pools if pool.numa_node is not None]
    return [without_since(result_of(past, seen, SHORT, size_kib=GIB1, node=node)) for node in nodes]


def test_boot_shortage_has_the_time_of_its_line() -> None:
    seen = big_pools(4, 2)
    found = result_of(state_after(seen, log=log_of(ON_NODE_1)), seen, SHORT, size_kib=GIB1, node=1)
    assert isinstance(found, Finding)
    assert found.since == START


def test_boot_shortage_counts_for_the_named_node() -> None:
    assert boot_results(big_pools(4, 2), ON_NODE_1) == [
        OK,
        bad(SHORT, "4 pages of 1gi requested at boot, 2 allocated"),
    ]
    assert boot_results(big_pools(4, 4), ON_NODE_1) == [OK, OK], "the pages were allocated later"


def test_boot_shortage_without_node_counts_for_all_nodes() -> None:
    text = "8 pages of 1gi requested at boot, 6 allocated"
    together = bad(SHORT, f"{text}, on all NUMA nodes together")
    assert boot_results(big_pools(3, 3), ANYWHERE) == [together, together]
    assert boot_results(big_pools(7, 1), ANYWHERE) == [OK, OK], "the line names no node"
    assert boot_results(big_pools(6), ANYWHERE) == [bad(SHORT, text)], "there is only one"


def test_boot_shortage_of_another_size_is_ignored() -> None:
    past = state_after(snapshot(pool_sample(1)), log=log_of(ANYWHERE))
    assert result_of(past, snapshot(pool_sample(1)), SHORT) is OK


# --- rules on declared pages ------------------------------------------------------------------------------


def declared_results(seen: Snapshot, code: str) -> list[RuleResult]:
    """Return the results of a rule for each declared device."""
    past = state_after(snapshot(*(pool_sample(2048, node=pool.numa_node) for pool in seen.pools)), seen)
    devices = [device for file_ in seen.declared for device in file_.devices]
    views = [declared_pages_rule_input(past, pools_by_device(seen), device) for device in devices]
    return [without_advice(ROWS[code].evaluate(view)) for view in views]


def test_overdeclared_pool_makes_all_its_devices_unhealthy() -> None:
    files = (
        file("a.example", ("huge-0", MIB2, 512, 0), ("huge-1", MIB2, 512, 1)),
        file("b.example", ("huge-0", MIB2, 512, 0), ("huge-9", GIB1, 9999, 0)),
    )
    enough = snapshot(pool_sample(1024, node=0), pool_sample(512, node=1), files=files)
    assert declared_results(enough, SHRUNK) == [OK] * 4
    short_by_one = snapshot(pool_sample(1023, node=0), pool_sample(512, node=1), files=files)
    text = bad(SHRUNK, "1023 pages of 2mi on NUMA node 0, 1024 declared by 2 devices")
    assert declared_results(short_by_one, SHRUNK) == [text, OK, text, OK]
    assert declared_results(short_by_one, MISSING) == [OK] * 3 + [
        bad(MISSING, "no pool of 1gi pages on NUMA node 0")
    ]


def test_surplus_pages_do_not_satisfy_a_declaration() -> None:
    files = (file("a.example", ("huge-0", MIB2, 10, 0)),)
    answer = declared_results(snapshot(pool_sample(12, 3), files=files), SHRUNK)
    assert answer == [bad(SHRUNK, "9 pages of 2mi on NUMA node 0, 10 declared")]


def test_declared_pages_are_summed_again_only_on_change() -> None:
    small, two = ((file("a.example", ("huge-0", MIB2, pages, 0)),) for pages in (3, 4))
    past = state_after(snapshot(files=small), snapshot(files=(*small,)))
    assert past.declared_pages == {(MIB2, 0): DeclaredPageTotal(3, 1)}
    same = next_pool_state(
        past, KernelLogState(), snapshot(files=small), EngineSettings("node-a"), instant_after(9)
    )
    assert same.declared_pages is past.declared_pages
    assert state_after(snapshot(files=small), snapshot(files=two)).declared_pages == {
        (MIB2, 0): DeclaredPageTotal(4, 1)
    }
    assert state_after(snapshot(files=small), snapshot()).declared_pages == {}


# --- on the real kernel -----------------------------------------------------------------------------------

OVERCOMMIT: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages")
HUGETLB: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000
PAGE: Final = MIB2 * 1024
NAME: Final = "hugepages-2mi-node0"
NO_PODS: Final = f"/drahealth-test-{os.getpid()}-pools"


class RealPools:
    """Real pools, read on request, with simulated time."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._state = EngineState(EngineSettings("node-a"))
        self._now_s = 0.0

    def evaluate(self, after_s: float = 0) -> Report:
        """Evaluate after some time, with heartbeats in between: a longer gap is a pause of the agent."""
        while after_s > 10:
            self.evaluate(10)
            after_s -= 10
        self._sampler.run_pass()
        seen = self._sampler.read()
        assert seen is not None
        self._now_s += after_s
        now = instant_after(self._now_s)
        sources = tuple(source._replace(beat_ns=now.mono_ns) for source in seen.sources)
        self._state, report = step(self._state, replace(seen, sources=sources), now)
        return report

    def causes(self, after_s: float = 0) -> dict[str, str]:
        """Return the evidence of the causes of the pool, by code."""
        device = device_of(self.evaluate(after_s), NAME)
        return {cause.code: cause.evidence for cause in device.causes}

    def codes_later(self) -> list[str]:
        """Return the remaining codes after four passes and five seconds."""
        reports = [self.evaluate(after_s) for after_s in (1, 1, 1, 2)]
        return codes(device_of(reports[-1], NAME))


@contextmanager
def real_pool(pages: int) -> Iterator[tuple[HugepagePool, RealPools]]:
    """Allocate this many free pages on the only NUMA node."""
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("more than one NUMA node: on which of them pages go is the kernel's choice")
    with hugepages(MIB2, pages) as pool:
        sampler = Sampler(SamplerOptions(kubelet_cgroup_root=NO_PODS))
        try:
            yield pool, RealPools(sampler)
        finally:
            assert sampler.stop(PATIENCE_S)


@contextmanager
def surplus_pages(pages: int) -> Iterator[None]:
    """Let the kernel allocate surplus pages; the caller holds the machine's lock."""
    before = OVERCOMMIT.read_text()
    OVERCOMMIT.write_text(f"{pages}\n")
    try:
        yield
    finally:
        OVERCOMMIT.write_text(before)


def touch(area: mmap.mmap, pages: int) -> None:
    for page in range(pages):
        area[page * PAGE] = 1


def test_real_pool_is_exhausted_when_reserved_or_used() -> None:
    with real_pool(4) as (_, real):
        assert real.causes() == {}
        with mmap.mmap(-1, 4 * PAGE, flags=HUGETLB) as area:
            assert real.causes(1) == {}
            assert real.causes(59) == {}, "for a moment it may"
            assert real.causes(1) == {FULL: "all free pages of 2mi are reserved"}
            touch(area, 4)
            assert real.causes(1) == {FULL: "all 4 pages of 2mi are in use"}
        assert real.codes_later() == []


def test_real_surplus_pages_are_reported_after_a_minute() -> None:
    with real_pool(2) as (_, real), surplus_pages(2):
        assert real.causes() == {}
        with mmap.mmap(-1, 4 * PAGE, flags=HUGETLB) as area:
            touch(area, 4)
            assert real.causes(1) == {}
            assert real.causes(60)[SURPLUS] == "2 surplus pages of 2mi in use"
        assert real.codes_later() == []


def test_real_pool_shrunk_in_use_is_a_finding() -> None:
    with real_pool(4) as (pool, real), mmap.mmap(-1, 4 * PAGE, flags=HUGETLB) as area:
        touch(area, 4)
        assert real.causes() == {}
        pool.file.write_text("1\n")
        assert pool.pages == 4, "they are surplus now, for as long as they are in use"
        assert real.causes(1) == {SHRUNK: "1 page of 2mi, 4 at start"}
        assert set(real.causes(60)) == {SHRUNK, SURPLUS, FULL}


# --- the rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ROWS)
def test_every_pool_row_is_complete_and_has_good_and_bad_cases(code: str) -> None:
    row = ROWS[code]
    assert all([row.threshold, row.why, row.advice, row.try_it, row.sampler_reads])
    assert row.source == "hugepages", "a pool is not unknown because another source is stalled"
    assert row.evaluate.__doc__
    assert re.search(r"Source: \S", row.evaluate.__doc__)
    answers = [answer for named, _, answer in CASES if named == code]
    assert OK in answers
    assert any(isinstance(answer, Finding) for answer in answers)

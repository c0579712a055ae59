"""The rules of hugepage pools: how many pages there must be, who says so, and what is told of the others."""

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
from paper import ABSENT, EIO, codes, cpus_sample, device_of, pool_sample
from patience import PATIENCE_S

from agent.devices.inventory import device_pools, pool_device
from agent.engine.step import State, step
from agent.health.host.hugepages.rules import DECLARED_POOL_RULES, POOL_RULES
from agent.health.host.hugepages.state import (
    FAILED_NS,
    Boot,
    PoolPast,
    PoolView,
    Wanted,
    remember_pools,
    view_declared_pages,
    view_pool,
)
from agent.health.kernel_log.parse import parse
from agent.health.kernel_log.values import LogFact, LogPast
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable
from agent.model.declared import Declared, DeclaredFile, DeclaredHugepages
from agent.model.health import Finding
from agent.model.machine import MachineSample, PressureSample
from agent.model.reading import Reading
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.snapshot import PoolSample, Snapshot
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
UNREAD: Final = RuleNotEvaluated("nr_hugepages or surplus_hugepages cannot be read")


def bad(code: str, evidence: str) -> Finding:
    return Finding(code, ROWS[code].severity, evidence)


def without_advice(answer: RuleResult) -> RuleResult:
    return answer._replace(advice="") if isinstance(answer, Finding) else answer


# --- by a view ----------------------------------------------------------------------------------------------


def pool(nr: Reading, surplus: Reading = 0, expected: Reading = 10, *, configured: bool = False) -> PoolView:
    """A pool that had what is expected once."""
    return PoolView(pool_sample(nr, surplus), MIB2, 0, expected, configured, most=expected)


def declared(nr: Reading, pages: int, devices: int = 1, *, most: Reading = 2048) -> PoolView:
    return PoolView(pool_sample(nr), MIB2, 0, pages, wanted=Wanted(pages, devices), most=most)


def booted(nr: Reading, asked: int, got: int) -> PoolView:
    return pool(nr, expected=nr)._replace(boot=Boot(asked, got, whole=False))


def using(nr: Reading, free: Reading, whole_free: Reading = 64, reserved: Reading = 0) -> PoolView:
    """A node's pool, and the machine's."""
    whole = PoolSample(MIB2, None, nr, whole_free, reserved, 0, 0)
    return PoolView(PoolSample(MIB2, 0, nr, free, ABSENT, 0, ABSENT), MIB2, 0, nr, whole=whole)


def lacking(failed: Reading, *, lately: bool = False, overcommit: Reading = 8) -> PoolView:
    whole = PoolSample(MIB2, None, 10, 10, 0, 0, overcommit)
    return pool(10)._replace(whole=whole, failed=failed, failed_lately=lately)


NO_POOL: Final = PoolView(None, GIB1, 3, 4, configured=True)
CASES: Final[list[tuple[str, PoolView, RuleResult]]] = [
    (SHRUNK, pool(10), OK),
    (SHRUNK, pool(11), OK),
    (SHRUNK, pool(9), bad(SHRUNK, "9 pages of 2mi, 10 at start")),
    (SHRUNK, pool(0, configured=True), bad(SHRUNK, "0 pages of 2mi, 10 configured")),
    (SHRUNK, pool(12, 2), OK),
    (SHRUNK, pool(12, 3), bad(SHRUNK, "9 pages of 2mi, 10 at start")),
    (SHRUNK, pool(10, ABSENT), OK),
    (SHRUNK, pool(EIO), Unreadable("nr_hugepages", EIO)),
    (SHRUNK, pool(10, EIO), Unreadable("surplus_hugepages", EIO)),
    (SHRUNK, pool(ABSENT, expected=ABSENT), Unreadable("nr_hugepages", ABSENT)),
    (SHRUNK, pool(10, expected=EIO), Unreadable("pool size at start", EIO)),
    (SHRUNK, pool(0, expected=0), OK),
    (SHRUNK, NO_POOL, bad(SHRUNK, "no pool of 1gi pages, 4 configured")),
    (SHRUNK, NO_POOL._replace(expected=0), OK),
    # what never was did not shrink
    (SHRUNK, pool(8, configured=True)._replace(most=8),
     bad(SHRUNK, "never more than 8 pages of 2mi, 10 configured")),
    (SHRUNK, pool(5, configured=True)._replace(most=8),
     bad(SHRUNK, "never more than 8 pages of 2mi, 5 now, 10 configured")),
    (SHRUNK, pool(0, configured=True)._replace(most=0), bad(SHRUNK, "never any pages of 2mi, 10 configured")),
    # what drivers declare, together
    (SHRUNK, declared(1024, 1024, 2), OK),
    (SHRUNK, declared(600, 1024, 2), bad(SHRUNK, "600 pages of 2mi on node 0, 1024 declared by 2 devices")),
    (SHRUNK, declared(600, 1024), bad(SHRUNK, "600 pages of 2mi on node 0, 1024 declared")),
    (SHRUNK, declared(600, 1024, most=600),
     bad(SHRUNK, "never more than 600 pages of 2mi on node 0, 1024 declared")),
    (SHRUNK, declared(EIO, 1024), Unreadable("nr_hugepages", EIO)),
    (SHRUNK, declared(1, 1024)._replace(pool=None), OK),
    # no pool at all
    (MISSING, declared(0, 1), OK),
    (MISSING, NO_POOL._replace(wanted=Wanted(4, 1)), bad(MISSING, "no pool of 1gi pages on node 3")),
    # fewer than the kernel's command line asks for
    (SHORT, pool(10), OK),
    (SHORT, booted(600, 1024, 600), bad(SHORT, "asked for 1024 pages of 2mi at boot, got 600")),
    (SHORT, booted(1023, 1024, 600), bad(SHORT, "asked for 1024 pages of 2mi at boot, got 600, 1023 now")),
    (SHORT, booted(1024, 1024, 600), OK),
    (SHORT, booted(600, 1024, 600)._replace(configured=True), OK),
    (SHORT, booted(EIO, 1024, 600), UNREAD),
    (SHORT, booted(1024, 1024, 600)._replace(pool=pool_sample(1024, 1)),
     bad(SHORT, "asked for 1024 pages of 2mi at boot, got 600, 1023 now")),
    # pages beyond the pool
    (SURPLUS, pool(10, 0), OK),
    (SURPLUS, pool(10, 1), bad(SURPLUS, "1 surplus page of 2mi in use")),
    (SURPLUS, pool(10, 9), bad(SURPLUS, "9 surplus pages of 2mi in use")),
    (SURPLUS, pool(200, 123), bad(SURPLUS, "at least 100 surplus pages of 2mi in use")),
    (SURPLUS, pool(10, ABSENT), RuleNotApplicable("no surplus hugepages")),
    (SURPLUS, pool(10, EIO), UNREAD),
    (SURPLUS, NO_POOL, OK),
    # pages that were not found
    (FAILED, lacking(5), OK),
    (FAILED, lacking(5, lately=True),
     bad(FAILED, "a hugepage was looked for and not found in the last 10 min")),
    (FAILED, lacking(5, lately=True, overcommit=0), OK),
    (FAILED, lacking(5, lately=True, overcommit=ABSENT), OK),
    (FAILED, lacking(ABSENT), RuleNotApplicable("no count of hugepages that were not found")),
    (FAILED, lacking(EIO, lately=True), RuleNotEvaluated("htlb_buddy_alloc_fail cannot be read")),
    (FAILED, NO_POOL, OK),
    # pages that are left
    (FULL, using(64, 1), OK),
    (FULL, using(64, 0), bad(FULL, "all 64 pages of 2mi are in use")),
    (FULL, using(0, 0), OK),
    (FULL, using(64, 8, 8, 7), OK),
    (FULL, using(64, 8, 8, 8), bad(FULL, "all free pages of 2mi are reserved")),
    (FULL, using(64, 8, EIO, 8), OK),
    (FULL, using(64, 8, 8, ABSENT), OK),
    (FULL, using(64, EIO), Unreadable("free_hugepages", EIO)),
    (FULL, using(64, ABSENT), RuleNotApplicable("no free_hugepages")),
    (FULL, using(EIO, EIO), UNREAD),
    (FULL, NO_POOL, OK),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_a_view_has_this_answer(code: str, view: PoolView, answer: RuleResult) -> None:
    assert without_advice(ROWS[code].judge(view)) == answer


def test_pages_that_never_were_are_advised_on_otherwise_than_those_that_went() -> None:
    went, never = (ROWS[SHRUNK].judge(pool(8)._replace(most=most)) for most in (10, 8))
    assert isinstance(went, Finding)
    assert isinstance(never, Finding)
    assert not went.advice, "that of the row"
    assert "at boot" in never.advice
    wanted = ROWS[SHRUNK].judge(declared(600, 1024, most=600))
    assert isinstance(wanted, Finding)
    assert wanted.advice == f"let fewer be declared, or {never.advice}"


# --- by what is remembered ----------------------------------------------------------------------------------

START: Final = Instant(1_000 * NS, 1_700_000_000.0)


def after(seconds: float) -> Instant:
    return Instant(START.mono_ns + int(seconds * NS), START.wall_s + seconds)


def snapshot(*pools: PoolSample, failed: Reading = 0, files: tuple[DeclaredFile, ...] = ()) -> Snapshot:
    nothing = PressureSample(ABSENT, ABSENT, ABSENT)
    machine = MachineSample((), (), (), nothing, 0b1, 0b1, 0, failed, ABSENT, ())
    return Snapshot(seq=1, cpus=cpus_sample(), pools=pools, machine=machine, declared=files)


def file(driver: str, *wants: tuple[str, int, int, int]) -> DeclaredFile:
    """A driver's devices: name, page size [KiB], pages, NUMA node."""
    return DeclaredFile(
        driver,
        tuple(
            Declared(driver, "node-a", name, DeclaredHugepages(size_kib, pages, node), 0)
            for name, size_kib, pages, node in wants
        ),
    )


def ask(
    past: PoolPast, seen: Snapshot, code: str, *, size_kib: int = MIB2, node: int = 0, at_s: float = 0
) -> RuleResult:
    """What a rule says of a pool of the host."""
    device = pool_device(size_kib, node)
    view = view_pool(past, device_pools(seen), seen, Settings("node-a"), device, after(at_s))
    return ROWS[code].judge(view)


def remember(*seen: Snapshot, settings: Settings | None = None, log: LogPast | None = None) -> PoolPast:
    """The past after these, a second apart."""
    past = PoolPast()
    for second, one in enumerate(seen):
        past = remember_pools(past, log or LogPast(), one, settings or Settings("node-a"), after(second))
    return past


def test_the_most_that_a_pool_had_is_remembered_and_what_cannot_be_read_is_not() -> None:
    seen = [snapshot(pool_sample(nr, surplus)) for nr, surplus in ((6, 0), (9, 1), (4, 0), (EIO, EIO))]
    past = remember(*seen, settings=Settings("node-a", expect_pools={"hugepages-2mi-node0": 20}))
    assert (past.expected, past.most) == ({"hugepages-2mi-node0": 20}, {"hugepages-2mi-node0": 8})


def test_a_hugepage_that_was_not_found_is_told_of_for_ten_minutes() -> None:
    whole = replace_overcommit(8)
    past = remember(snapshot(whole, failed=5), snapshot(whole, failed=5))
    assert past.failed_ns is None, "what was counted before the start is old news"
    past = remember(snapshot(whole, failed=5), snapshot(whole, failed=EIO), snapshot(whole, failed=6))
    seen = snapshot(whole, failed=6)
    assert isinstance(ask(past, seen, FAILED, at_s=2), Finding)
    assert isinstance(ask(past, seen, FAILED, at_s=1.9 + FAILED_NS / NS), Finding)
    assert ask(past, seen, FAILED, at_s=2 + FAILED_NS / NS) is OK


def test_a_count_that_fell_was_reset_and_is_none_of_pages_not_found() -> None:
    past = remember(*(snapshot(replace_overcommit(8), failed=failed) for failed in (5, 0, 0)))
    assert past.failed_ns is None
    assert remember(*(snapshot(failed=failed) for failed in (5, 0, 1))).failed_ns == after(2).mono_ns


def test_a_machine_that_nobody_reads_has_no_count() -> None:
    seen = replace(snapshot(replace_overcommit(8)), machine=None)
    assert ask(remember(seen), seen, FAILED) == RuleNotApplicable("no count of hugepages that were not found")


def replace_overcommit(pages: int) -> PoolSample:
    """The machine's pool, which may lend pages."""
    return PoolSample(MIB2, None, 10, 10, 0, 0, pages)


# --- by the kernel log --------------------------------------------------------------------------------------


def told(*lines: str) -> LogPast:
    """The log has these lines."""
    facts = {}
    for text in lines:
        line = parse(text)
        assert line is not None, text
        facts[line.code, line.place] = LogFact(line.code, line.place, 1, START, START, text, line.values)
    return LogPast(facts)


ON_NODE_1: Final = "HugeTLB: allocating 4 of page size 1.00 GiB failed node1.  Only allocated 2 hugepages."
ANYWHERE: Final = "HugeTLB: allocating 8 of page size 1.00 GiB failed.  Only allocated 6 hugepages."


def big(*pages: Reading) -> Snapshot:
    """A pool of 1 GiB pages per node, and that of the machine."""
    counts = [count for count in pages if isinstance(count, int)]
    whole = pool_sample(sum(counts), size_kib=GIB1, node=None)
    return snapshot(whole, *(pool_sample(nr, size_kib=GIB1, node=node) for node, nr in enumerate(pages)))


def short(seen: Snapshot, *lines: str) -> list[RuleResult]:
    """What is said of the pool of each node."""
    past = remember(seen, log=told(*lines))
    nodes = [pool.node for pool in seen.pools if pool.node is not None]
    return [ask(past, seen, SHORT, size_kib=GIB1, node=node) for node in nodes]


def test_the_node_that_the_kernel_names_got_fewer_pages_than_it_was_to() -> None:
    assert short(big(4, 2), ON_NODE_1) == [OK, bad(SHORT, "asked for 4 pages of 1gi at boot, got 2")]
    assert short(big(4, 4), ON_NODE_1) == [OK, OK], "somebody found them since"


def test_where_the_kernel_names_no_node_all_are_short_together() -> None:
    text = "asked for 8 pages of 1gi at boot, got 6"
    together = bad(SHORT, f"{text}, all NUMA nodes together")
    assert short(big(3, 3), ANYWHERE) == [together, together]
    assert short(big(7, 1), ANYWHERE) == [OK, OK], "nobody said of which node they must be"
    assert short(big(6), ANYWHERE) == [bad(SHORT, text)], "there is only one"


def test_a_line_about_another_size_says_nothing_of_this_one() -> None:
    past = remember(snapshot(pool_sample(1)), log=told(ANYWHERE))
    assert ask(past, snapshot(pool_sample(1)), SHORT) is OK


# --- by what drivers declare --------------------------------------------------------------------------------


def ask_declared(seen: Snapshot, code: str) -> list[RuleResult]:
    """What a rule says of each declared device."""
    past = remember(snapshot(*(pool_sample(2048, node=pool.node) for pool in seen.pools)), seen)
    devices = [device for one in seen.declared for device in one.devices]
    views = [view_declared_pages(past, device_pools(seen), device) for device in devices]
    return [without_advice(ROWS[code].judge(view)) for view in views]


def test_all_devices_of_a_pool_are_short_if_they_want_more_together_than_it_has() -> None:
    files = (
        file("a.example", ("huge-0", MIB2, 512, 0), ("huge-1", MIB2, 512, 1)),
        file("b.example", ("huge-0", MIB2, 512, 0), ("huge-9", GIB1, 9999, 0)),
    )
    enough = snapshot(pool_sample(1024, node=0), pool_sample(512, node=1), files=files)
    assert ask_declared(enough, SHRUNK) == [OK] * 4
    short_by_one = snapshot(pool_sample(1023, node=0), pool_sample(512, node=1), files=files)
    text = bad(SHRUNK, "1023 pages of 2mi on node 0, 1024 declared by 2 devices")
    assert ask_declared(short_by_one, SHRUNK) == [text, OK, text, OK]
    assert ask_declared(short_by_one, MISSING) == [OK] * 3 + [bad(MISSING, "no pool of 1gi pages on node 0")]


def test_surplus_pages_are_no_pages_to_declare() -> None:
    files = (file("a.example", ("huge-0", MIB2, 10, 0)),)
    answer = ask_declared(snapshot(pool_sample(12, 3), files=files), SHRUNK)
    assert answer == [bad(SHRUNK, "9 pages of 2mi on node 0, 10 declared")]


def test_what_is_declared_is_added_up_once_and_anew_when_it_changes() -> None:
    one, two = ((file("a.example", ("huge-0", MIB2, pages, 0)),) for pages in (3, 4))
    past = remember(snapshot(files=one), snapshot(files=(*one,)))
    assert past.wanted == {(MIB2, 0): Wanted(3, 1)}
    same = remember_pools(past, LogPast(), snapshot(files=one), Settings("node-a"), after(9))
    assert same.wanted is past.wanted
    assert remember(snapshot(files=one), snapshot(files=two)).wanted == {(MIB2, 0): Wanted(4, 1)}
    assert remember(snapshot(files=one), snapshot()).wanted == {}


# --- on the real kernel -------------------------------------------------------------------------------------

OVERCOMMIT: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages")
HUGETLB: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000
PAGE: Final = MIB2 * 1024
NAME: Final = "hugepages-2mi-node0"
NO_PODS: Final = f"/drahealth-test-{os.getpid()}-pools"


class RealPools:
    """The real pools, read when asked; time passes on paper."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._state = State(Settings("node-a"))
        self._now_s = 0.0

    def look(self, after_s: float = 0) -> Report:
        self._sampler.run_pass()
        seen = self._sampler.read()
        assert seen is not None
        self._now_s += after_s
        now = after(self._now_s)
        sources = tuple(source._replace(beat_ns=now.mono_ns) for source in seen.sources)
        self._state, report = step(self._state, replace(seen, sources=sources), now)
        return report

    def causes(self, after_s: float = 0) -> dict[str, str]:
        """What is said of the pool, with the evidence."""
        device = device_of(self.look(after_s), NAME)
        return {cause.code: cause.evidence for cause in device.causes}

    def codes_later(self) -> list[str]:
        """What is left after four passes and five seconds."""
        reports = [self.look(after_s) for after_s in (1, 1, 1, 2)]
        return codes(device_of(reports[-1], NAME))


@contextmanager
def real_pool(pages: int) -> Iterator[tuple[HugepagePool, RealPools]]:
    """So many free pages on the only NUMA node."""
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("more than one NUMA node: on which of them pages go is the kernel's choice")
    with hugepages(MIB2, pages) as pool:
        sampler = Sampler(SamplerOptions(kubelet_cgroup_root=NO_PODS))
        try:
            yield pool, RealPools(sampler)
        finally:
            assert sampler.stop(PATIENCE_S)


@contextmanager
def lent(pages: int) -> Iterator[None]:
    """The kernel may go beyond the pool by so many pages; the caller holds the machine's lock."""
    before = OVERCOMMIT.read_text()
    OVERCOMMIT.write_text(f"{pages}\n")
    try:
        yield
    finally:
        OVERCOMMIT.write_text(before)


def touch(area: mmap.mmap, pages: int) -> None:
    for page in range(pages):
        area[page * PAGE] = 1


def test_a_real_pool_is_full_when_its_pages_are_reserved_and_when_they_are_used() -> None:
    with real_pool(4) as (_, real):
        assert real.causes() == {}
        with mmap.mmap(-1, 4 * PAGE, flags=HUGETLB) as area:
            assert real.causes(1) == {}
            assert real.causes(59) == {}, "for a moment it may"
            assert real.causes(1) == {FULL: "all free pages of 2mi are reserved"}
            touch(area, 4)
            assert real.causes(1) == {FULL: "all 4 pages of 2mi are in use"}
        assert real.codes_later() == []


def test_real_pages_beyond_the_pool_are_told_of_after_a_minute() -> None:
    with real_pool(2) as (_, real), lent(2):
        assert real.causes() == {}
        with mmap.mmap(-1, 4 * PAGE, flags=HUGETLB) as area:
            touch(area, 4)
            assert real.causes(1) == {}
            assert real.causes(60)[SURPLUS] == "2 surplus pages of 2mi in use"
        assert real.codes_later() == []


def test_a_real_pool_that_shrinks_under_its_users_has_shrunk_though_nobody_lost_a_page() -> None:
    with real_pool(4) as (pool, real), mmap.mmap(-1, 4 * PAGE, flags=HUGETLB) as area:
        touch(area, 4)
        assert real.causes() == {}
        pool.file.write_text("1\n")
        assert pool.pages == 4, "they are surplus now, for as long as they are in use"
        assert real.causes(1) == {SHRUNK: "1 page of 2mi, 4 at start"}
        assert set(real.causes(60)) == {SHRUNK, SURPLUS, FULL}


# --- the rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ROWS)
def test_every_row_is_complete_and_shown_content_and_shown_bad(code: str) -> None:
    row = ROWS[code]
    assert all([row.threshold, row.why, row.advice, row.try_it, row.reads])
    assert row.source == "hugepages", "a pool is not unknown because another source stands still"
    assert row.judge.__doc__
    assert re.search(r"Source: \S", row.judge.__doc__)
    answers = [answer for named, _, answer in CASES if named == code]
    assert OK in answers
    assert any(isinstance(answer, Finding) for answer in answers)

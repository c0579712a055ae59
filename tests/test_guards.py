"""What the agent may cost, in figures that do not jitter: what ``python -m agent.bench --check`` holds it to.

That each guard bites is the claim of ``test_regressions.py``.
"""

import select
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from patience import PATIENCE_S

from agent.bench import counts
from agent.bench.budgets import FILE
from agent.bench.guards import KINDS, RACES, Bench, Guard, GuardResult, bench, guards
from agent.bench.result import Unmeasured
from agent.bench.trees import scratch, write_sysfs
from agent.health.host.catalog import wakes
from agent.model.time import NS
from agent.native.sampler import Sampler, SamplerOptions

ROOT: Final = Path(__file__).resolve().parents[1]
BUDGETS: Final[dict[str, Any]] = tomllib.loads((ROOT / FILE).read_text())


@pytest.fixture(scope="module")
def on() -> Iterator[Bench]:
    with bench(ROOT, BUDGETS) as made:
        yield made


@pytest.mark.parametrize("guard", guards(), ids=str)
def test_the_budget_is_held(on: Bench, guard: Guard) -> None:
    found = guard.hold(on)
    if found.met is None:
        pytest.skip(f"{guard}: {found.value}")
    assert found.met, f"{found.value}; budget {found.budget}"


def test_every_exact_budget_is_of_a_guard() -> None:
    """One that is misspelt, or of work that nobody does any more, would hold for ever."""
    for kind in KINDS.keys() - {"instructions", "ratio"}:
        assert set(BUDGETS[kind]) == set(KINDS[kind].names)
    names = set(KINDS["instructions"].names)
    for baselines in BUDGETS["instructions"].values():
        assert set(baselines) == names | {f"{name}_calls" for name in names}
    assert RACES.keys() <= BUDGETS["ratio"].keys()


def test_a_guard_without_a_budget_is_no_guard_that_holds(tmp_path: Path) -> None:
    with pytest.raises(Unmeasured, match=r"benchmarks/budgets\.toml: \[bytes\] has no health_8_devices"):
        Guard("bytes", "health_8_devices").hold(Bench(ROOT, {}, tmp_path))


def test_a_count_that_fell_is_a_miss(tmp_path: Path) -> None:
    on = Bench(ROOT, {"bytes": {"health_8_devices": 377}}, tmp_path)
    assert Guard("bytes", "health_8_devices").hold(on) == GuardResult("376", "377", met=False)


def test_what_cannot_be_measured_is_neither_held_nor_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert counts.compiler() == "no-such-compiler"
    found = Guard("allocations", "pass").hold(Bench(ROOT, BUDGETS, tmp_path))
    assert found == GuardResult("no-such-compiler is not installed", "", None)


def test_a_change_does_wake_python() -> None:
    """So that the silence of quiet passes is not that of a broken descriptor."""
    with scratch() as root:
        write_sysfs(root / "sys")
        options = SamplerOptions(
            sysfs_root=root / "sys", cgroupfs_root=root, period_ns=NS // 100, wakes=wakes(10, 60)
        )
        sampler = Sampler(options)
        try:
            sampler.start()
            assert readable(sampler, 5.0)
            sampler.clear()
            pool = root / "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
            with pool.open("r+b", buffering=0) as file:
                file.write(b"7\n")
            assert readable(sampler, 5.0)
        finally:
            sampler.stop(PATIENCE_S)


def readable(sampler: Sampler, within_s: float) -> bool:
    return bool(select.select([sampler], [], [], within_s)[0])

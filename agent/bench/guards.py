"""What ``--check`` holds the agent to: the figures of ``benchmarks/budgets.toml`` that do not jitter.

Counts are those of the budget to the last one: a count that fell is a miss too, so that its budget is
lowered and it cannot rise again unseen. Instructions may differ by half a percent, and a ratio of times may
exceed its budget by a twentieth. Absolute times are not here: they are the machine's.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.bench import counts
from agent.bench import idle_counts as quiet
from agent.bench.budgets import FILE
from agent.bench.counts import Driver
from agent.bench.result import Unmeasured
from agent.bench.suites.encode import entries_of
from agent.bench.suites.poll import open_sampler
from agent.bench.timing import Contender, Interval, paired_ratio, race
from agent.bench.trees import scratch, some_tree
from agent.native.encode import encode_health

WITHIN: Final = 0.005
"""Of a baseline of instructions."""
SLACK: Final = 0.05
"""Over a budget of a ratio."""
TRIES: Final = 4  # of a ratio that exceeds it: a neighbour was busy in one of them
ROUNDS: Final = 60
LIMIT_S: Final = 2.5
WORKS: Final = {work.name: work for work in counts.WORKS}
QUIET_LOOK: Final = "quiet_look"
QUIET: Final[Mapping[str, Callable[[], int]]] = {
    "quiet_passes": quiet.sampler_wakes,
    "quiet_minute": quiet.core_looks,
}
LISTS: Final = {f"health_{devices}_devices": devices for devices in (8, 128, 1000)}
RACES: Final = {
    "poll.pass.warm.core": 0,
    "poll.groups100.warm.core": 100,
    "poll.groups1000.warm.core": 1000,
}
"""Groups that are swept, by the key of the row. Those in situ would take minutes of pauses."""


class GuardResult(NamedTuple):
    """How a guard stands."""

    value: str
    """Why it could not be measured here, if ``met`` is None."""
    budget: str
    met: bool | None


class Bench:
    """What guards share: a checkout, its budgets, and the driver, built when it is first needed."""

    def __init__(self, root: Path, budgets: Mapping[str, Any], where: Path) -> None:
        self._root = root
        self._budgets = budgets
        self._where = where

    @cached_property
    def driver(self) -> Driver:
        """Linked with this checkout's core."""
        return counts.build(self._root, self._where)

    def budget(self, kind: str, name: str) -> Any:
        """Raises Unmeasured if there is none."""
        try:
            return self._budgets[kind][name]
        except KeyError:
            raise Unmeasured(f"{FILE}: [{kind}] has no {name}") from None

    def baselines(self) -> Mapping[str, float]:
        """Instructions as this compiler makes them; empty if nobody recorded them."""
        found: Mapping[str, float] = self._budgets.get("instructions", {}).get(counts.compiler_id(), {})
        return found


@contextlib.contextmanager
def bench(root: Path, budgets: Mapping[str, Any]) -> Iterator[Bench]:
    """For the guards of one checkout."""
    with scratch() as where:
        yield Bench(root, budgets, where)


class Guard(NamedTuple):
    """One figure that is held to a budget."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}"

    def hold(self, on: Bench) -> GuardResult:
        """Measure it, and judge.

        Raises:
            Unmeasured: A tool that is installed failed, or there is no budget.
        """
        tools = [counts.compiler() if tool == "cc" else tool for tool in KINDS[self.kind].tools]
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            return GuardResult(f"{missing[0]} is not installed", "", None)
        return KINDS[self.kind].hold(on, self.name)


class Kind(NamedTuple):
    """How figures of one table of the budgets are measured."""

    tools: tuple[str, ...]
    """Programs without which they cannot be; ``cc`` is the compiler."""
    names: Sequence[str]
    hold: Callable[[Bench, str], GuardResult]


def _system_calls(on: Bench, name: str) -> GuardResult:
    found, budget = counts.system_calls(on.driver, WORKS[name]), on.budget("system_calls", name)
    return GuardResult(_listed(found), _listed(budget), found == budget)


def _listed(calls: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in calls.items()) or "none"


def _instructions(on: Bench, name: str) -> GuardResult:
    own, calls = counts.instructions(on.driver, WORKS[name])
    value = _counted(own, calls)
    baselines = on.baselines()
    if not baselines:
        return GuardResult(f"{value}: no baseline for {counts.compiler_id()}; --record keeps them", "", None)
    if name not in baselines:
        raise Unmeasured(f'{FILE}: [instructions."{counts.compiler_id()}"] has no {name}; --record keeps it')
    budget, budget_calls = baselines[name], baselines[f"{name}_calls"]
    met = abs(own - budget) <= WITHIN * budget and calls == budget_calls
    return GuardResult(value, _counted(budget, budget_calls), met)


def _counted(own: float, calls: float) -> str:
    return f"{own:,.0f} in the core, {calls:,g} calls into libraries"


def _allocations(on: Bench, name: str) -> GuardResult:
    kept = quiet.blocks_kept() if name == QUIET_LOOK else counts.allocations(on.driver, WORKS[name])
    return _exact(kept, on.budget("allocations", name))


def _wakeups(on: Bench, name: str) -> GuardResult:
    return _exact(QUIET[name](), on.budget("wakeups", name))


def _bytes(on: Bench, name: str) -> GuardResult:
    found = sum(len(message) for message in encode_health(entries_of(LISTS[name])))
    return _exact(found, on.budget("bytes", name))


def _exact(found: float, budget: float) -> GuardResult:
    return GuardResult(f"{found:,g}", f"{budget:,g}", found == budget)


def _ratio(on: Bench, name: str) -> GuardResult:
    budget = float(on.budget("ratio", name))
    found = _core_to_floor(RACES[name])
    for _ in range(TRIES - 1):
        if found.median <= budget * (1 + SLACK):
            break
        found = min(found, _core_to_floor(RACES[name]), key=lambda one: one.median)
    value = f"{found.median:.2f}x the floor [{found.low:.2f}, {found.high:.2f}]"
    return GuardResult(value, f"{budget:.2f}x, or {SLACK:.0%} over", found.median <= budget * (1 + SLACK))


def _core_to_floor(groups: int) -> Interval:
    with contextlib.ExitStack() as stack:
        tree = stack.enter_context(some_tree(groups))[0] if groups else None
        sampler = open_sampler(tree)
        stack.callback(sampler.stop, 1.0)

        def core() -> None:
            sampler.run_pass()
            if groups:
                sampler.run_sweep()

        contenders = [
            Contender("core", "", core),
            Contender("floor", "", lambda: sampler.run_floor(sweep=groups > 0)),
        ]
        timed = race(contenders, rounds=ROUNDS, limit_s=LIMIT_S).timed
        return paired_ratio(timed["core"], timed["floor"])


BUILDS: Final = ("cc", "gcc", "make")
"""What the driver and its fake NVML are built with."""
KINDS: Final[Mapping[str, Kind]] = {
    "bytes": Kind((), tuple(LISTS), _bytes),
    "allocations": Kind(BUILDS, (*WORKS, QUIET_LOOK), _allocations),
    "system_calls": Kind((*BUILDS, "strace"), tuple(WORKS), _system_calls),
    "instructions": Kind((*BUILDS, "valgrind"), tuple(WORKS), _instructions),
    "wakeups": Kind((), tuple(QUIET), _wakeups),
    "ratio": Kind((), tuple(RACES), _ratio),
}
"""In the order in which they are checked: what is quick comes first."""


def guards(wanted: Sequence[str] = ()) -> tuple[Guard, ...]:
    """All of them, or those that are named, by table or each: ``system_calls``, ``bytes.health_8_devices``.

    Raises:
        LookupError: A name is of none.
    """
    every = tuple(Guard(kind, name) for kind in KINDS for name in KINDS[kind].names)
    for name in wanted:
        if name not in KINDS and name not in map(str, every):
            raise LookupError(f"no guard {name!r}; there are {', '.join(KINDS)}, and TABLE.NAME of each")
    return tuple(one for one in every if not wanted or one.kind in wanted or str(one) in wanted)

"""How each grows: with devices, cgroups, and who uses them; and the line that fits.

The figures stand elsewhere too; here they are of one run, one after the other, and as curves.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from agent.bench.effort import Effort
from agent.bench.fit import fit, words
from agent.bench.processes import HEALTH_METHOD, Subscriber, agent, health_socket, rss, subscriber
from agent.bench.result import Outcome, Row, Table, Unit, row_of, rows_of
from agent.bench.suites import scale_consumers
from agent.bench.suites.decide import DRIVER, declarations, now_of
from agent.bench.suites.encode import entries_of
from agent.bench.suites.poll import open_sampler, read
from agent.bench.timing import Contender, race
from agent.bench.trees import scratch, write_groups, write_sysfs
from agent.engine.step import State, step
from agent.model.settings import Settings
from agent.native.encode import encode_health

AGENTS: Final = 3
"""Sizes at which an agent is started for its memory, the smallest and the largest among them."""


def run(effort: Effort) -> Outcome:
    """Encoding, deciding, polling, memory; consumers and audits."""
    outcome = Outcome()
    _curve(effort, outcome, "encode", "device", "encode a list of devices", effort.sizes, _encode)
    _curve(effort, outcome, "decide", "device", "step(), quiet, declared devices", effort.sizes, _decide)
    with contextlib.ExitStack() as stack:
        poll = partial(_poll, stack)
        title = "a pass and a sweep over cgroups, files on tmpfs"
        _curve(effort, outcome, "poll", "cgroup", title, effort.groups, poll)
    _memory(effort, outcome)
    scale_consumers.run(effort, outcome)
    return outcome


def curve(outcome: Outcome, title: str, rows: Sequence[Row], unit: Unit, of: str) -> None:
    """A table of rows with an ``x``, and its fit."""
    fitted = words(fit(rows), unit, of)
    outcome.tables.append(Table(title, tuple(rows), notes=(fitted,), grows_with=f"{of}s"))


def _curve(
    effort: Effort,
    outcome: Outcome,
    key: str,
    of: str,
    title: str,
    sizes: Sequence[int],
    work: Callable[[int], Callable[[], object]],
) -> None:
    """Time of the same work at several sizes, which take turns."""
    contenders = [Contender(f"{size}", f"{size} {of}s", work(size)) for size in sizes]
    timed = race(contenders, rounds=effort.warm_rounds, limit_s=effort.warm_limit_s)
    labels = {one.key: one.label for one in contenders}
    plain = rows_of(f"scale.{key}", labels, timed, contenders[0].key)
    rows = [replace(row, x=float(size), ratio=None) for row, size in zip(plain, sizes, strict=True)]
    curve(outcome, title, rows, "s", of)
    outcome.reference_ns += timed.reference


def _encode(devices: int) -> Callable[[], object]:
    return partial(encode_health, entries_of(devices))


def _decide(devices: int) -> Callable[[], object]:
    sampler = open_sampler(None)
    alone = read(sampler)
    sampler.stop(1.0)
    snapshot = replace(alone, declared=declarations(alone, devices))
    now = now_of(snapshot)
    state, _ = step(State(Settings("bench")), snapshot, now)
    return lambda: step(state, snapshot, now)


def _poll(stack: contextlib.ExitStack, groups: int) -> Callable[[], object]:
    sampler = open_sampler(write_groups(stack.enter_context(scratch()), groups))
    stack.callback(sampler.stop, 1.0)

    def pass_and_sweep() -> None:
        sampler.run_pass()
        sampler.run_sweep()

    return pass_and_sweep


def _memory(effort: Effort, outcome: Outcome) -> None:
    """Of an agent that has told its first subscriber of so many declared devices; all run side by side."""
    sizes = effort.sizes[:: -(-len(effort.sizes) // AGENTS)]
    if sizes[-1] != effort.sizes[-1]:
        sizes = (*sizes, effort.sizes[-1])
    rows = []
    with contextlib.ExitStack() as stack:
        started = [(devices, *_started(stack, devices)) for devices in sizes]
        for devices, pid, client in started:
            client.wait(lambda line: bool(line.get("found")))
            row = row_of(f"scale.rss.{devices}", f"{devices} devices", (rss(pid),), "B")
            rows.append(replace(row, x=float(devices)))
    curve(outcome, "RSS of an agent that has told one subscriber", rows, "B", "device")


def _started(stack: contextlib.ExitStack, devices: int) -> tuple[int, Subscriber]:
    """The pid of an agent, and who will be told of its last device."""
    directory = stack.enter_context(scratch())
    write_sysfs(directory / "sys")
    _declare(directory / "run/devices.d", devices)
    flags = ["--cgroupfs-root", str(directory / "none"), "--sysfs-root", str(directory / "sys")]
    pid = stack.enter_context(agent(directory, flags))
    last = f"cpu-{devices - 1}\\x10"
    return pid, stack.enter_context(subscriber(health_socket(directory), HEALTH_METHOD, last))


def _declare(directory: Path, devices: int) -> None:
    directory.mkdir(parents=True)
    entries = (
        f'[[device]]\nname = "cpu-{one}"\nkind = "cpu"\ncpus = "{one % 8}"\n' for one in range(devices)
    )
    (directory / f"{DRIVER}.toml").write_text("version = 1\n" + "".join(entries))

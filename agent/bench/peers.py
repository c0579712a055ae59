"""Peers: other node agents that run on nodes, and what they cost while nothing changes.

``benchmarks/peers.toml`` lists the peers. Those in PATH are started with their default configuration, all at
once, after the agent has ended, and are measured as long as the agent was. Their files are in temporary
directories, and their servers on free ports of the loopback interface. All others have published figures in a
table of their own, because a figure of another machine is no sample of this run.
"""

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.bench.file_trees import temporary_directory
from agent.bench.processes import ThreadUsage, child_pids, cpu_percent, read_memory, read_threads
from agent.bench.result import PublishedTable, ResultTable, RunSize, SuiteOutcome, Unit, row_from_samples

END_S: Final = 5.0  # from SIGTERM to SIGKILL
NO_NUMBER: Final = "no published number found"
POLL_S: Final = 0.05
SCRAPE_PERIOD_S: Final = 15


class PublishedCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a peer in the figures of a public page."""

    what: str
    source: str
    cpu: str = NO_NUMBER
    memory: str = NO_NUMBER


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Node agent of another project, as ``benchmarks/peers.toml`` describes it."""

    name: str
    programs: tuple[str, ...]
    arguments: tuple[str, ...]
    published: tuple[PublishedCost, ...]
    files: dict[str, str] = {}
    metrics: str = ""


def load_peers(root: Path) -> tuple[Peer, ...]:
    """Load the peers of the checkout ``root``."""
    text = (root / "benchmarks/peers.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["peer"], tuple[Peer, ...])


class IdleCost(NamedTuple):
    """Cost of a program, with its child processes, while nothing changes."""

    cpu: float
    rss: float
    pss: float
    threads: float
    switches: float


_TITLES: Final = ("CPU, % of one core", "RSS", "PSS", "threads", "context switches per minute")
_UNITS: Final[tuple[Unit, ...]] = ("%", "B", "B", "1", "1")


def measure_cost(
    pid: int, before: Mapping[int, ThreadUsage], after: Mapping[int, ThreadUsage], duration_s: float
) -> IdleCost:
    """Return the cost of a process between two readings of its threads. Raises OSError if it has ended."""
    memory = _tree_memory(pid)
    switches = sum(sum(after[tid][2:]) - sum(before[tid][2:]) for tid in before.keys() & after.keys())
    cpu, rss, pss = cpu_percent(before, after, duration_s), *map(sum, zip(*memory, strict=True))
    return IdleCost(cpu, rss, pss, len(after), switches * 60 / duration_s)


def _tree_memory(pid: int) -> list[tuple[int, int]]:
    found = [read_memory(pid)]
    for child in child_pids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += _tree_memory(child)
    return found


class RunningPeer:
    """Started peer, whose process leads a process group."""

    def __init__(self, peer: Peer, program: str, directory: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        for name, text in peer.files.items():
            (directory / name).write_text(text)
        arguments = [text.format(directory=directory, port=self._port) for text in peer.arguments]
        self.peer = peer
        self.scrapes = 0
        self._program = program
        self._log = directory / "log"
        self._before: Mapping[int, ThreadUsage] = {}
        self._reaped_s = 0.0
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=os.environ | {"HOME": str(directory), "TMPDIR": str(directory), "NOTIFY_SOCKET": ""},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        """Return whether the process has ended. Its PID stays reserved until :meth:`end`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def begin(self) -> None:
        """Start the measurement. A process that has ended has no cost."""
        with contextlib.suppress(OSError):
            self._before, self._reaped_s = read_threads(self.pid), _read_reaped_s(self.pid)

    def read_cost(self, duration_s: float) -> IdleCost:
        """Return the cost since :meth:`begin`. Raises OSError if the process has ended."""
        cost = measure_cost(self.pid, self._before, read_threads(self.pid), duration_s)
        return cost._replace(cpu=cost.cpu + (_read_reaped_s(self.pid) - self._reaped_s) * 100 / duration_s)

    def scrape(self) -> None:
        """Read the metrics once, if the peer serves them. Blocks up to 2 s."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2.0)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            if self.peer.metrics:
                connection.request("GET", self.peer.metrics)
                connection.getresponse().read()
                self.scrapes += 1

    def describe(self) -> str:
        """Return the name of the peer, its version if its log states it, its path, and its scrapes."""
        found = re.search(r"(?i)version\W+v?(\d+\.\d+\.\d+)", self._log.read_text(errors="replace"))
        return f"{self.peer.name}{f' {found[1]}' if found else ''}: {self._program}, scrapes: {self.scrapes}"

    def last_line(self) -> str:
        """Return the last line of the log, which often has the reason why a process ended."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")

    def end(self) -> bool:
        """End the process group; return whether SIGTERM was enough. Blocks up to 5 s."""
        os.killpg(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while not (has_ended := self.has_ended()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        os.killpg(self.pid, signal.SIGKILL)  # before the PID is free, and for processes that are left
        self._process.wait()
        return has_ended


def _read_reaped_s(pid: int) -> float:
    """Return the CPU time of the child processes that a process has waited for [s]."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def start_peer(peer: Peer, program: str, skipped: list[str]) -> Iterator[RunningPeer]:
    """Run a peer in a ``with`` block. Raises OSError if the program cannot be executed."""
    with temporary_directory() as directory:
        running = RunningPeer(peer, program, directory)
        try:
            yield running
        finally:
            if not running.end():
                skipped.append(f"idle: peer {peer.name}: SIGTERM did not end it within {END_S:g} s; killed")


def measure_peers(peers: Sequence[Peer], run_size: RunSize, outcome: SuiteOutcome, agent: IdleCost) -> None:
    """Add tables of the costs of the agent and each installed peer; add published figures of the others."""
    found = {peer.name: next(filter(None, map(shutil.which, peer.programs)), "") for peer in peers}
    if missing := [name for name, program in found.items() if not program]:
        outcome.skipped.append(f"idle: peers not in PATH: {', '.join(missing)}")
    costs: dict[str, tuple[str, IdleCost]] = {}
    with contextlib.ExitStack() as stack:
        running: list[RunningPeer] = []
        for peer in peers:
            try:
                if program := found[peer.name]:
                    running.append(stack.enter_context(start_peer(peer, program, outcome.skipped)))
            except OSError as error:
                outcome.skipped.append(f"idle: peer {peer.name}: {error}")
        deadline = time.monotonic() + min(run_size.settle_s, 10.0)  # peers watch no cgroups
        while time.monotonic() < deadline and not all(peer.has_ended() for peer in running):
            time.sleep(POLL_S)
        for started in running:
            started.begin()
        start_s = time.monotonic()
        idle_s = 0.0 if all(peer.has_ended() for peer in running) else run_size.idle_s
        for at_s in range(SCRAPE_PERIOD_S // 2, round(idle_s), SCRAPE_PERIOD_S):
            time.sleep(max(0.0, start_s + at_s - time.monotonic()))
            for started in running:
                started.scrape()
        time.sleep(max(0.0, start_s + idle_s - time.monotonic()))
        duration_s = time.monotonic() - start_s
        for started in running:
            try:
                costs[started.peer.name] = (started.describe(), started.read_cost(duration_s))
            except OSError as error:
                reason = f"ended: {started.last_line()}" if started.has_ended() else str(error)
                outcome.skipped.append(f"idle: peer {started.peer.name}: {reason}")
    if costs:
        outcome.tables += _cost_tables({"agent": ("agent", agent)} | costs, duration_s)
    if others := [peer for peer in peers if peer.name not in costs]:
        outcome.published.append(_published_table(others))


def _cost_tables(costs: Mapping[str, tuple[str, IdleCost]], duration_s: float) -> Iterator[ResultTable]:
    section = f"agent and peers, {duration_s:.0f} s each, with their child processes"
    notes = ("the peers run at once, after the agent", "a scrape, as by Prometheus, is due every 15 s")
    for field, title, unit in zip(IdleCost._fields, _TITLES, _UNITS, strict=True):
        rows = (
            row_from_samples(f"idle.peers.{field}.{name}", label, (getattr(cost, field),), unit)
            for name, (label, cost) in costs.items()
        )
        yield ResultTable(title, tuple(rows), notes=notes, section=section)


def _published_table(peers: Sequence[Peer]) -> PublishedTable:
    published = [(peer.name, cost) for peer in peers for cost in peer.published]
    rows = [(f"{name} [{n}]", cost.cpu, cost.memory) for n, (name, cost) in enumerate(published, 1)]
    sources = [f"[{n}] {cost.what}: {cost.source}" for n, (_, cost) in enumerate(published, 1)]
    heading = ("", "CPU, % of one core", "memory")
    return PublishedTable("published figures of peers not measured here", [heading, *rows], sources)

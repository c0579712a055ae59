"""Command that kills an agent under load a thousand times and checks its files: ``python -m faults.kills``.

After each kill, the agent's files must have all that it had answered or written: prepares of a driver, usages
and changes of verdicts in the history, and a fault of a GPU that stays. No file may be damaged. The agents
are forked from one process with all modules, since a start takes a second otherwise.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from agents import DRIVER
from patience import PATIENCE_S
from scenarios.steps import xid_line

from agent.model.settings import HISTORY_FILE
from agent.store.driver_files import load_ledger
from agent.store.gpu_fault_file import load_gpu_faults
from agent.store.history_file import read_history, read_verdicts
from faults import save_figures
from faults.busy_node import BROKEN_GPU, BusyNode

LIFE_S: Final = 3.0
"""Longest time from the first answer of an agent to its kill."""
LASTING_XID: Final = 79
CLAIMS: Final = 1000
"""Number of claims, within the limit of the ledger."""
FORKS: Final = """
import os, sys
import agent.app.daemon, agent.cli.run, agent.serve.grpc_servers, agent.serve.driver_link.service
import agent.node.pods.poller, agent.store.history_file, agent.driver.session, grpclib.server
from agent.__main__ import process
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["drahealth", "run", *sys.argv[2:]]
        process()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forks:
    """Process that starts agents, one at a time."""

    def __init__(self, node: BusyNode, log: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS, str(log), *node.flags],
            env=node.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._agent = 0
        """Process id of the agent that runs; 0: none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        if self._agent:
            with suppress(ProcessLookupError):
                os.kill(self._agent, signal.SIGKILL)

    def start(self) -> int:
        """Start an agent and return its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write("start\n")
        self._process.stdin.flush()
        self._agent = int(self._read())
        return self._agent

    def wait(self) -> int:
        """Return the exit code of the agent once it has ended."""
        code = int(self._read())
        self._agent = 0
        return code

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class Kept:
    """Required content of an agent's files, from answers and from earlier content."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._prepared: set[str] = set()
        self._usages: set[str] = set()
        self._changes: set[tuple[str, int]] = set()
        self._has_fault = False
        self.answered = 0

    @property
    def has_fault(self) -> bool:
        """Whether the file of faults has had the lasting fault."""
        return self._has_fault

    @property
    def usages(self) -> int:
        """Number of usages that were seen in the history."""
        return len(self._usages)

    @property
    def changes(self) -> int:
        """Number of changes of verdicts that were seen in the history."""
        return len(self._changes)

    def add_prepare(self, uid: str) -> None:
        """Note a prepare that the agent has answered."""
        self._prepared.add(uid)
        self.answered += 1

    def find_losses(self) -> list[str]:
        """Return what the files lack, or why a file is damaged."""
        ledger, damaged = load_ledger(self._state / "drivers" / DRIVER, DRIVER)
        faults, unreadable = load_gpu_faults(self._state / "gpu-faults.json")
        problems = [text for text in (damaged, unreadable) if text]
        problems += [f"prepare of claim {uid}" for uid in self._prepared - ledger.claims.keys()]
        history = self._state / HISTORY_FILE
        if history.exists():
            usages = {fault.id for group in read_history(history)[:2] for fault in group}
            changes = [(change.period, change.number) for change in read_verdicts(history).changes]
            problems += [f"usage {usage}" for usage in self._usages - usages]
            problems += [
                f"change {number} of period {period}" for period, number in self._changes - {*changes}
            ]
            problems += ["a change is recorded twice"] if len({*changes}) < len(changes) else []
            self._usages |= usages
            self._changes.update(changes)
        elif self._usages or self._changes:
            problems.append("the history")
        has_fault = any(fault.code == f"gpu.xid.{LASTING_XID}" for fault in faults.faults)
        if self._has_fault and not has_fault:
            problems.append(f"XID {LASTING_XID} of GPU {BROKEN_GPU}")
        self._has_fault = self._has_fault or has_fault
        return problems


def kill_one(node: BusyNode, forks: Forks, kept: Kept, chance: random.Random) -> None:
    """Start an agent, load it from its first answer on, and kill it at a random moment.

    Raises RuntimeError: the agent ended by itself, or did not answer.
    """
    pid = forks.start()
    until_s = time.monotonic() + PATIENCE_S
    while not (uid := node.fail_a_prepare()):
        if not Path(f"/proc/{pid}").exists():
            if (code := forks.wait()) != os.EX_TEMPFAIL:
                raise RuntimeError(f"the agent ended with {code}")
            pid = forks.start()  # the directory was held; the unit tries again, too
        elif time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError("the agent does not answer")
        time.sleep(0.01)
    kept.add_prepare(uid)
    killing = threading.Timer(chance.random() ** 2 * LIFE_S, os.kill, (pid, signal.SIGKILL))
    killing.start()
    while killing.is_alive():
        node.change_pods()
        node.log_an_xid()
        if uid := node.fail_a_prepare():
            kept.add_prepare(uid)
    if (code := forks.wait()) != -signal.SIGKILL:
        raise RuntimeError(f"the agent ended with {code}")


class Run(NamedTuple):
    """Result of a number of kills on one node."""

    prepares: int
    usages: int
    changes: int
    lost: tuple[str, ...]


def kill_agents(kills: int, seed: int) -> Run:
    """Kill agents of one node under load, and check their files after each kill.

    Raises RuntimeError: an agent ended by itself or did not answer, or all lived too short.
    """
    lost: list[str] = []
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as name:
        directory = Path(name)
        node = BusyNode(directory, seed, CLAIMS)
        kept, chance, log = Kept(directory / "state"), random.Random(seed), directory / "log"
        node.machine.kernel(xid_line(LASTING_XID, gpu=BROKEN_GPU))
        with Forks(node, log) as forks:
            for number in range(1, kills + 1):
                log.write_bytes(b"")
                try:
                    kill_one(node, forks, kept, chance)
                except RuntimeError as error:
                    raise RuntimeError(f"kill {number}: {error}: {log.read_text()[-4000:]}") from None
                problems = kept.find_losses()
                if "Traceback" in (text := log.read_text()):
                    problems.append(text[-4000:])
                if problems:
                    sys.stderr.write(f"kill {number}: {'; '.join(problems)}\n")
                lost += problems
    if not (kept.usages and kept.changes and kept.has_fault):
        raise RuntimeError("the agents lived too short to write usages, changes of verdicts and faults")
    return Run(kept.answered, kept.usages, kept.changes, tuple(lost))


def main() -> None:
    """Kill agents; exit code 1: something is lost."""
    parser = argparse.ArgumentParser(description="Kill agents under load, and check their files.")
    parser.add_argument("--kills", type=int, default=1000, help="number of kills (default: 1000)")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes that share them (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the load (default: 1)")
    parser.add_argument("--save", action="store_true", help="store the figures for docs/reliability.md")
    args = parser.parse_args()
    began_s = time.monotonic()
    shares = [len(range(node, args.kills, args.nodes)) for node in range(args.nodes)]
    seeds = range(args.seed, args.seed + args.nodes)
    try:
        with ProcessPoolExecutor(args.nodes, multiprocessing.get_context("spawn")) as nodes:
            runs = list(nodes.map(kill_agents, shares, seeds))
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    lost = sum(len(run.lost) for run in runs)
    figures = {
        "kills": args.kills,
        "prepares": sum(run.prepares for run in runs),
        "usages": sum(run.usages for run in runs),
        "changes": sum(run.changes for run in runs),
        "lost": lost,
        "seconds": round(time.monotonic() - began_s),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    if args.save:
        save_figures("kills", figures)
    if lost:
        raise SystemExit(f"{lost} losses")


if __name__ == "__main__":
    main()

"""What a start takes: imports, a word of help, and an agent that is ready and has told its first subscriber.

Each is a process of its own; they take turns. The floor is an interpreter that does nothing.
"""

import contextlib
import importlib.util
import re
import socket
import subprocess
import sys
import time
from typing import Final

from agent.bench.effort import Effort
from agent.bench.latency import paired_rows, seconds
from agent.bench.processes import HEALTH_METHOD, Silence, agent, health_socket, rss, subscriber
from agent.bench.result import Outcome, Row, Table, row_of
from agent.bench.starts import Started, command, start
from agent.bench.trees import scratch

PROGRAMS: Final = {
    "floor": ("floor: an interpreter that does nothing", "pass"),
    "import": ("import agent: what a driver embeds", "import agent"),
    "help": ("drahealth --help", command("--help")),
    "psutil": ("import psutil", "import psutil"),
    "grpc": ("import grpc: grpcio, which we do without", "import grpc"),
}
IMPORTS: Final = "import agent.cli.main, agent.cli.run, agent.app.daemon"
IMPORTS_SHOWN: Final = 8
_IMPORT: Final = re.compile(r"^import time: +(\d+) \| +\d+ \|  *(\S+)$", re.M)
READY_S: Final = 60.0


def run(effort: Effort) -> Outcome:
    """Time and memory of each, and the dearest imports."""
    outcome = Outcome()
    programs = dict(PROGRAMS)
    if importlib.util.find_spec("grpc") is None:
        del programs["grpc"]
        outcome.skipped.append("startup: grpcio is not installed")
    found: dict[str, list[Started]] = {key: [] for key in programs}
    for _ in range(effort.starts):
        for key, (_, code) in programs.items():
            found[key].append(start(code))
    labels = {key: label for key, (label, _) in programs.items()}
    times = {key: [one.took_ns for one in starts] for key, starts in found.items()}
    rows = paired_rows("startup", labels, dict(times))
    section = "a process from start to end"
    outcome.tables.append(Table("time", rows, labels["floor"], section=section))
    sizes = [
        row_of(f"startup.{key}.rss", labels[key], [one.rss for one in starts], "B")
        for key, starts in found.items()
    ]
    outcome.tables.append(Table("the most memory that it had (RSS)", tuple(sizes), section=section))
    outcome.tables.append(_agent(effort))
    if effort.imports:
        outcome.tables.append(_imports())
    else:
        outcome.skipped.append("startup: imports, left to a run without --quick")
    return outcome


def _agent(effort: Effort) -> Table:
    ready: list[int] = []
    told: list[int] = []
    sizes: list[int] = []
    library = ""
    for _ in range(effort.starts):
        with scratch() as directory, contextlib.ExitStack() as stack:
            notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            notify.bind(str(directory / "notify"))
            notify.settimeout(READY_S)
            client = stack.enter_context(subscriber(health_socket(directory), HEALTH_METHOD, "$^"))
            start_ns = time.monotonic_ns()
            flags = ["--cgroupfs-root", str(directory / "none")]
            environment = {"NOTIFY_SOCKET": str(directory / "notify")}
            pid = stack.enter_context(agent(directory, flags, environment=environment))
            ready.append(_ready_ns(notify) - start_ns)
            told.append(client.wait(lambda line: "found" in line)["t_ns"] - start_ns)
            sizes.append(rss(pid))
            library = client.library
    rows = (
        row_of("startup.ready", "process start to READY=1", seconds(ready), "s"),
        row_of("startup.told", "process start to a subscriber's first list", seconds(told), "s"),
        row_of("startup.agent.rss", "RSS when it has it", sizes, "B"),
    )
    notes = (f"{library}, which was there before and waited for the socket",)
    return Table("drahealth run", rows, notes=notes)


def _ready_ns(notify: socket.socket) -> int:
    while True:
        try:
            said = notify.recv(4096)
        except TimeoutError:
            raise Silence(f"the agent was not ready in {READY_S:g} s") from None
        if b"READY=1" in said.split(b"\n"):
            return time.monotonic_ns()


def _imports() -> Table:
    """By -X importtime, of one start: each module's own time."""
    command = [sys.executable, "-X", "importtime", "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    own = {name: int(us) for us, name in _IMPORT.findall(done.stderr)}
    dearest = sorted(own, key=lambda name: -own[name])[:IMPORTS_SHOWN]
    rows: list[Row] = [
        row_of("startup.imports", f"all {len(own)} modules", [sum(own.values()) / 1e6], "s"),
        *(row_of(f"startup.imports.{name}", name, [own[name] / 1e6], "s") for name in dearest),
    ]
    notes = ("by -X importtime, once, which makes it slower; what a module imports is not its own",)
    return Table("what drahealth run imports, the dearest first", tuple(rows), notes=notes)

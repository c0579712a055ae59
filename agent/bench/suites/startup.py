"""Start-up time and memory of imports, ``drahealth --help``, and an agent until its first message.

Each program is a process; programs run in turns. The lower bound is an interpreter that does nothing.
"""

import contextlib
import importlib.util
import re
import socket
import subprocess
import sys
import time
from typing import Final

from agent.bench.file_trees import temporary_directory
from agent.bench.processes import (
    HEALTH_METHOD,
    ProcessError,
    ProcessRun,
    drahealth_program,
    driver_socket,
    read_resident_bytes,
    run_program,
    start_agent,
    start_subscriber,
)
from agent.bench.result import (
    ResultRow,
    ResultTable,
    SuiteOutcome,
    row_from_samples,
    rows_from_latencies,
    seconds_from_ns,
)
from agent.bench.run_size import RunSize

PROGRAMS: Final = {
    "floor": ("lower bound: an interpreter that does nothing", "pass"),
    "import": ("import drahealth: the library of drivers", "import drahealth"),
    "help": ("drahealth --help", drahealth_program("--help")),
    "psutil": ("import psutil", "import psutil"),
    "grpc": ("import grpc: grpcio, which the agent does not use", "import grpc"),
}
IMPORTS: Final = "import agent.cli.main, agent.cli.run, agent.app.daemon"
IMPORTS_SHOWN: Final = 8
_IMPORT: Final = re.compile(r"^import time: +(\d+) \| +\d+ \|  *(\S+)$", re.M)
READY_S: Final = 60.0


def run(run_size: RunSize) -> SuiteOutcome:
    """Measure time and memory of each program, and the slowest imports."""
    outcome = SuiteOutcome()
    programs = dict(PROGRAMS)
    if importlib.util.find_spec("grpc") is None:
        del programs["grpc"]
        outcome.skipped.append("startup: grpcio is not installed")
    runs: dict[str, list[ProcessRun]] = {key: [] for key in programs}
    for _ in range(run_size.starts):
        for key, (_, code) in programs.items():
            runs[key].append(run_program(code))
    labels = {key: label for key, (label, _) in programs.items()}
    times = {key: [process.took_ns for process in processes] for key, processes in runs.items()}
    rows = rows_from_latencies("startup", labels, dict(times))
    section = "a process from start to end"
    outcome.tables.append(ResultTable("time", rows, labels["floor"], section=section))
    sizes = [
        row_from_samples(f"startup.{key}.rss", labels[key], [process.peak_rss for process in processes], "B")
        for key, processes in runs.items()
    ]
    outcome.tables.append(ResultTable("peak memory (RSS)", tuple(sizes), section=section))
    outcome.tables.append(_measure_agent_starts(run_size))
    if run_size.imports:
        outcome.tables.append(_measure_imports())
    else:
        outcome.skipped.append("startup: imports: skipped by --quick")
    return outcome


def _measure_agent_starts(run_size: RunSize) -> ResultTable:
    ready: list[int] = []
    first_message: list[int] = []
    sizes: list[int] = []
    library = ""
    for _ in range(run_size.starts):
        with temporary_directory() as directory, contextlib.ExitStack() as stack:
            notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            notify.bind(str(directory / "notify"))
            notify.settimeout(READY_S)
            client = stack.enter_context(start_subscriber(driver_socket(directory), HEALTH_METHOD, "$^"))
            start_ns = time.monotonic_ns()
            flags = ["--cgroupfs-root", str(directory / "none")]
            environment = {"NOTIFY_SOCKET": str(directory / "notify")}
            pid = stack.enter_context(start_agent(directory, flags, environment=environment))
            ready.append(_wait_for_ready(notify) - start_ns)
            first_message.append(client.wait(lambda line: "found" in line)["t_ns"] - start_ns)
            sizes.append(read_resident_bytes(pid))
            library = client.library
    rows = (
        row_from_samples("startup.ready", "process start to READY=1", seconds_from_ns(ready), "s"),
        row_from_samples(
            "startup.told", "process start to a subscriber's first list", seconds_from_ns(first_message), "s"
        ),
        row_from_samples("startup.agent.rss", "RSS after the first list", sizes, "B"),
    )
    notes = (f"{library}, started before the agent and waiting for the socket",)
    return ResultTable("drahealth run", rows, notes=notes)


def _wait_for_ready(notify: socket.socket) -> int:
    while True:
        try:
            datagram = notify.recv(4096)
        except TimeoutError:
            raise ProcessError(f"agent: no READY=1 within {READY_S:g} s") from None
        if b"READY=1" in datagram.split(b"\n"):
            return time.monotonic_ns()


def _measure_imports() -> ResultTable:
    """Measure the import time of each module in one start, with -X importtime."""
    command = [sys.executable, "-X", "importtime", "-c", IMPORTS]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    own_us = {name: int(us) for us, name in _IMPORT.findall(completed.stderr)}
    slowest = sorted(own_us, key=lambda name: -own_us[name])[:IMPORTS_SHOWN]
    rows: list[ResultRow] = [
        row_from_samples("startup.imports", f"all {len(own_us)} modules", [sum(own_us.values()) / 1e6], "s"),
        *(row_from_samples(f"startup.imports.{name}", name, [own_us[name] / 1e6], "s") for name in slowest),
    ]
    notes = ("one run with -X importtime, which slows imports; times exclude imported modules",)
    return ResultTable("imports of drahealth run, slowest first", tuple(rows), notes=notes)

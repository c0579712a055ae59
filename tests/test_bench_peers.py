"""Peers of the benchmarks: programs in PATH are measured and ended; others have published figures."""

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.bench import report
from agent.bench.peers import (
    IdleCost,
    Peer,
    PublishedCost,
    RunningPeer,
    load_peers,
    measure_peers,
    start_peer,
)
from agent.bench.result import QUICK, RunSize, SuiteOutcome, find_checkout

AGENT: Final = IdleCost(0.25, 40 << 20, 31 << 20, 8, 700.0)
SIZE: Final[RunSize] = replace(QUICK, settle_s=0.0, idle_s=0.2)
PUBLISHED: Final = (PublishedCost("measured elsewhere", "https://example.com/cost", cpu="5 %"),)
PORTS: Final = 5
"""Number of ports that are tried, because another program may take a free port before its own binds it."""
NEVER_READY: Final = "trap '' TERM\ntouch \"$1/ready\"\nwhile :; do sleep 0.05; done"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory in front of PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def write_program(directory: Path, name: str, script: str) -> None:
    file = directory / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def peer(name: str, *arguments: str, metrics: str = "") -> Peer:
    return Peer(name, (f"{name}-of-another-name", name), arguments, PUBLISHED, {"conf": "level=1\n"}, metrics)


def measure(*peers: Peer, size: RunSize = SIZE) -> SuiteOutcome:
    outcome = SuiteOutcome()
    measure_peers(peers, size, outcome, AGENT)
    return outcome


def keys(outcome: SuiteOutcome) -> set[str]:
    return {row.key for table in outcome.tables for row in table.rows}


def names_in_group(group: int) -> list[str]:
    """Return the names of all processes of a process group but zombies."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


def test_installed_peer_is_measured_next_to_the_agent(programs: Path) -> None:
    write_program(programs, "sleeper", "sleep 1000")
    outcome = measure(peer("sleeper"))
    assert keys(outcome) == {
        f"idle.peers.{field}.{name}" for field in IdleCost._fields for name in ("agent", "sleeper")
    }
    rows = {row.key: row for table in outcome.tables for row in table.rows}
    assert rows["idle.peers.cpu.agent"].max == AGENT.cpu
    assert rows["idle.peers.pss.sleeper"].max > 0
    assert rows["idle.peers.threads.sleeper"].max >= 1
    assert not outcome.published
    assert not outcome.skipped


def test_peer_has_files_and_a_port_and_leaves_nothing_behind(programs: Path, tmp_path: Path) -> None:
    """The program starts two processes; one of them is not its child."""
    script = f"echo version=1.2.3\n(sleep 1000 &)\nsleep 1000 &\ncd {tmp_path}\n"
    script += 'echo "$1 $(cat "$2/conf") $HOME" >new && mv new ready\nwait'
    write_program(programs, "sleeper", script)
    sleeper = peer("sleeper", "--port={port}", "{directory}")
    with start_peer(sleeper, str(programs / "sleeper"), []) as running:
        eventually((tmp_path / "ready").exists, "the start of the program")
        assert running.describe() == f"sleeper 1.2.3: {programs / 'sleeper'}, scrapes: 0"
        eventually(lambda: len(names_in_group(running.pid)) == 3, "a shell and two processes")
    port, conf, home = (tmp_path / "ready").read_text().split()
    assert int(port.removeprefix("--port=")) > 0
    assert conf == "level=1"
    assert not Path(home).exists()
    eventually(lambda: not names_in_group(running.pid), "the end of all processes")


def test_peer_that_ends_at_once_is_named_with_its_last_line(programs: Path) -> None:
    """Nothing is waited for, although the measurement would take longer than a test may."""
    write_program(programs, "broken", "echo first; echo no GPU here >&2; echo; exit 3")
    outcome = measure(peer("broken"), size=replace(SIZE, settle_s=PATIENCE_S, idle_s=10 * PATIENCE_S))
    assert outcome.skipped == ["idle: peer broken: ended: no GPU here"]
    assert not outcome.tables
    assert outcome.published[0].grid[1:] == [("broken [1]", "5 %", "no published number found")]
    assert outcome.published[0].sources == ["[1] measured elsewhere: https://example.com/cost"]


def test_peer_that_cannot_be_executed_is_named(programs: Path) -> None:
    (programs / "garbage").write_bytes(b"\0")
    (programs / "garbage").chmod(0o755)
    outcome = measure(peer("garbage"))
    assert len(outcome.skipped) == 1
    assert outcome.skipped[0].startswith("idle: peer garbage: [Errno 8] Exec format error")


def test_peer_that_ignores_sigterm_is_killed_and_named(programs: Path, tmp_path: Path) -> None:
    write_program(programs, "stubborn", NEVER_READY)
    skipped: list[str] = []
    with start_peer(peer("stubborn", str(tmp_path)), str(programs / "stubborn"), skipped) as running:
        eventually((tmp_path / "ready").exists, "the start of the program")
        assert not running.has_ended()
    assert skipped == ["idle: peer stubborn: SIGTERM did not end it within 5 s; killed"]
    eventually(lambda: not names_in_group(running.pid), "the end of all processes")


def test_metrics_of_a_peer_are_scraped(programs: Path) -> None:
    server = "import http.server as h, sys; h.HTTPServer(('127.0.0.1', int(sys.argv[1])), type('H', (h."
    server += (
        "BaseHTTPRequestHandler,), {'do_GET': lambda s: (s.send_response(200), s.end_headers())})).serve_"
    )
    write_program(programs, "exporter", f'exec {sys.executable} -c "{server}forever()" "$1"')
    exporter = peer("exporter", "{port}", metrics="/metrics")
    for _ in range(PORTS):
        with start_peer(exporter, str(programs / "exporter"), []) as running:

            def is_scraped_or_over(running: RunningPeer = running) -> bool:
                running.scrape()
                return running.scrapes > 0 or running.has_ended()

            eventually(is_scraped_or_over, "a scrape")
            if running.scrapes:
                assert running.describe() == f"exporter: {programs / 'exporter'}, scrapes: {running.scrapes}"
                return
    raise AssertionError("the program always ended")


def test_cpu_time_of_ended_child_processes_counts(programs: Path, tmp_path: Path) -> None:
    """The program itself only waits; a child process used the CPU and has ended."""
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.5: pass'"
    write_program(
        programs,
        "parent",
        f'trap "({burn}); touch {tmp_path}/done" USR1\ntouch {tmp_path}/ready\nwhile :; do sleep 0.05; done',
    )
    with start_peer(peer("parent"), str(programs / "parent"), []) as running:
        eventually((tmp_path / "ready").exists, "the start of the program")
        running.begin()
        os.kill(running.pid, signal.SIGUSR1)
        eventually((tmp_path / "done").exists, "the end of the child process")
        assert running.read_cost(1.0).cpu >= 40.0


def test_peer_not_in_path_has_published_figures_apart_from_measured_ones(programs: Path) -> None:
    write_program(programs, "sleeper", "exec sleep 1000")
    outcome = measure(peer("sleeper"), peer("absent"))
    assert outcome.skipped == ["idle: peers not in PATH: absent"]
    text = report.text_report(report.read_host(), {"idle": outcome}, {})
    assert "5 %" in text.partition("published figures of peers not measured here")[2]
    assert "absent [1]" in text
    markdown = report.markdown_report(report.read_host(), {"idle": outcome}, {})
    assert "| absent [1] | 5 % | no published number found |" in markdown
    assert "- [1] measured elsewhere: https://example.com/cost" in markdown
    assert "absent" not in report.pyperf_document(report.read_host(), {"idle": outcome})


def test_peers_of_the_checkout_have_figures_with_a_page_each() -> None:
    root = find_checkout()
    assert root
    peers = load_peers(root)
    assert [entry.name for entry in peers] == [
        "node-problem-detector",
        "dcgm-exporter",
        "node_exporter",
        "gpud",
    ]
    for entry in peers:
        assert entry.published
        assert any("{port}" in argument for argument in entry.arguments)
        assert all(cost.source.startswith("https://") and cost.what for cost in entry.published)
        assert all(cost.cpu[0].isdigit() or cost.memory[0].isdigit() for cost in entry.published)

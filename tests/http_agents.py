"""Servers of HTTP in a thread, and an agent without devices for their applications."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents import Agent, PlainSysfs
from paper_gpus import GpuNode
from patience import PATIENCE_S
from reserved_ports import reserved_port
from wire.serving import at, device, report

from agent.config.config import Config
from agent.http.agent_view import AgentView, TotalsSinceStart
from agent.http.app import create_app
from agent.http.server import HttpServer
from agent.model.gpu import GpuField, NvmlCallCost, NvmlCosts, XidCount
from agent.model.health import Blame, Cause, DeviceHealth, NonDeviceCause, Repair, Severity
from agent.model.reading import DURATION_BOUNDS_S, PassDurations, SourceSample, SourceState
from agent.model.report import (
    AgentStatus,
    ClusterStatus,
    ConfigReload,
    PartsStatus,
    Report,
    SentinelStatus,
    SocketSubscriberCounts,
    StateFile,
)
from agent.model.socket_address import ListenAddress
from agent.model.time import NS, Instant
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread

HOSTILE = 'a"b\\c\nd\u2028e<script>{} 5'
"""Text that is markup, and ends a label's value, unless it is escaped."""
ANY_PORT = ListenAddress("127.0.0.1", 0)


@contextmanager
def serve_app(app: Any, *addresses: ListenAddress, **options: Any) -> Iterator[HttpServer]:
    """Serve an application in a thread."""
    server = HttpServer(addresses or (ANY_PORT,), app, **options)
    failures: list[BaseException] = []
    thread = AsyncioThread(server.run, on_failure=failures.append, name="test-http")
    thread.start(PATIENCE_S)
    try:
        yield server
    finally:
        assert thread.stop(PATIENCE_S)
    assert not failures


def no_status() -> AgentStatus:
    """Fail: a test of this agent reads no process."""
    raise AssertionError("not called")


NO_PASS = PassDurations((0,) * len(DURATION_BOUNDS_S), 0.0)


class FakeAgent:
    """Agent without devices whose clock and reports a test sets."""

    def __init__(self) -> None:
        self.now = Instant(100 * NS, 1000.0)
        self.subscribers: tuple[SocketSubscriberCounts, ...] = ()
        self.view = AgentView(
            latest=LatestValue(),
            config=lambda: Config(node_name="n"),
            snapshot=lambda: None,
            consumers=lambda: None,
            pass_durations=dict,
            status=no_status,
            totals=TotalsSinceStart(),
            subscribers=lambda: self.subscribers,
            prepares=dict,
            parts=PartsStatus,
            history_file=Path("/nonexistent"),
            encode_report=lambda shown: {"node": shown.node},
        )

    @property
    def app(self) -> Any:
        """Application that shows this agent."""
        return create_app(self.view, clock=lambda: self.now)

    def change(self, **fields: Any) -> None:
        """Replace fields of the view."""
        self.view = replace(self.view, **fields)

    def publish(self, report: Report) -> None:
        """Publish a report that differs from the last one."""
        self.view.totals.handle_report(report)
        if (snapshot := self.view.snapshot()) is not None and snapshot.gpus is not None:
            self.view.totals.count_xids(snapshot.gpus.gpus)
        self.view.latest.publish(report)


def cause(code: str = "a.b", severity: Severity = Severity.UNHEALTHY) -> Cause:
    return Cause(
        code, severity, Blame.HARDWARE, "1 of 2", "replace it", at(1), repair=Repair.REPLACE_HARDWARE
    )


def full_agent() -> FakeAgent:
    """Return an agent with all that metrics show: GPUs with a fault, notes, streams, prepares, a reload."""
    node = GpuNode(2)
    node.rest(5)
    node.xid(1, 79)
    shown = node.rest(30)
    gpus = node.snapshot().gpus
    assert gpus is not None
    every = dict.fromkeys(GpuField, 3)
    samples = tuple(
        replace(gpu, readings=every, links=2, xids=(XidCount(79, 0, 0, 2, 1, 1),)) for gpu in gpus.gpus
    )
    snapshot = replace(node.snapshot(), gpus=replace(gpus, gpus=samples))
    fake = FakeAgent()
    fake.subscribers = (
        SocketSubscriberCounts("drivers/a.sock", 1, 2, 3, 400),
        SocketSubscriberCounts("agent.sock", 1, 1),
    )
    fake.change(
        snapshot=lambda: snapshot,
        pass_durations=lambda: {"nvml": PassDurations((0, 5, 1, *[0] * 8, 2), 12.5), "idle": NO_PASS},
        prepares=lambda: {("a.example.com", "transient", HOSTILE): 2, ("a.example.com", "ok", ""): 1},
        parts=lambda: PartsStatus(
            ConfigReload(5.0),
            ClusterStatus("drahealth/drahealth-node-a", is_held=True, requests=7, success_wall_s=9.0),
            SentinelStatus("/run/connector.sock", 3),
            NvmlCosts(1.5, 20, 3.0, (NvmlCallCost("fields", 4, 0.5, 0.75),)),
            lost_snapshots=40,
            files=(StateFile("faults", "/state/gpu-faults.json: full"), StateFile("history")),
        ),
    )
    notes = (NonDeviceCause("node", cause("node.x")), NonDeviceCause("pod 1 (a/b)", cause("cgroup.y")))
    hostile = device("hostile", attributes=(("product", HOSTILE),), causes=(cause(HOSTILE),))
    fake.publish(replace(shown, devices=(*shown.devices, hostile), notes=notes))
    return fake


def running_report(second: int, devices: Iterable[DeviceHealth] = ()) -> Report:
    """Return a report of these devices, of an agent whose only source has finished a pass at its time."""
    shown = report(devices, second=second)
    cpus = SourceSample("cpus", SourceState.OK, shown.at.mono_ns, NS, 0, "", passes=5)
    return replace(shown, sources=(cpus,))


@contextmanager
def listening_agent(
    directory: Path, sysfs: PlainSysfs, *flags: str, host: str = "127.0.0.1"
) -> Iterator[tuple[Agent, int]]:
    """Start an agent that serves HTTP on a free port."""
    with reserved_port() as port:
        listen = ("--listen", f"{host}:{port}", "--sysfs-root", str(sysfs.root), "--period", "100ms")
        with Agent(directory, *listen, *flags, config='[stream]\nheartbeat = "500ms"\n') as agent:
            yield agent, port

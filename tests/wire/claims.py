"""Stands in for a driver behind its plugin service: prepares as it is told, and says what it was asked."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path

from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.model.report import Report
from agent.prepare.classify import Context, classify
from agent.prepare.errors import PrepareError
from agent.prepare.message import text
from agent.prepare.wire import WireMode
from agent.serve.dra_plugin.in_flight import Kind
from agent.serve.dra_plugin.paths import PluginPaths, plugin_paths
from agent.serve.dra_plugin.result import PreparedDevice
from agent.serve.dra_plugin.server import Plugin
from agent.system.threads.latest import Latest
from agent.system.threads.loop_thread import IoThread
from wire.serving import InThread

DRIVER = "gpu.example.com"

Behaviour = Callable[[Kind, ClaimRef], Awaitable[tuple[PreparedDevice, ...]]]


class Claims:
    """Answers with one device that is called like the claim, unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        """Kind and name, in order."""
        self.ended: list[tuple[str, str]] = []
        self.at_once = 0
        """How many were under way together, at most."""
        self.behaviour: dict[str, Behaviour] = {}
        """By the claim's name."""
        self.refuses = ""
        self._running = 0

    async def run(self, kind: Kind, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        """Does what it was told for the claim."""
        self.asked.append((str(kind), ref.name))
        self._running += 1
        self.at_once = max(self.at_once, self._running)
        try:
            behaviour = self.behaviour.get(ref.name)
            await asyncio.sleep(0)  # whoever may run beside it does
            if behaviour is not None:
                return await behaviour(kind, ref)
            if kind is Kind.UNPREPARE:
                return ()
            return (PreparedDevice(("r",), "pool", ref.name, (f"example.com/gpu={ref.uid}",)),)
        finally:
            self._running -= 1
            self.ended.append((str(kind), ref.name))

    def fail(self, name: str, error: Exception) -> None:
        """That claim fails, as a driver that raises this."""

        async def behave(kind: Kind, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
            verdict = self.judge(ref, error)
            raise PrepareError(verdict, text(verdict))

        self.behaviour[name] = behave

    def hold(self, name: str) -> "Future[None]":
        """That claim takes until the future has a result."""
        held: Future[None] = Future()

        async def behave(kind: Kind, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
            await asyncio.shield(asyncio.wrap_future(held))
            return () if kind is Kind.UNPREPARE else (PreparedDevice((), "pool", ref.name),)

        self.behaviour[name] = behave
        return held

    def judge(self, ref: ClaimRef, error: Exception) -> PrepareVerdict:
        """As the desk does, knowing of no device."""
        return classify(error, Context(Claim(*ref), {}))

    def refusal(self) -> str:
        """Why it takes nothing now."""
        return self.refuses


class Serving(InThread):
    """A driver's sockets."""

    def __init__(
        self,
        kubelet_dir: Path,
        *,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
    ) -> None:
        (kubelet_dir / "plugins_registry").mkdir(parents=True, exist_ok=True)
        self.claims = Claims()
        self.latest: Latest[Report] = Latest()
        self.failures = []
        self.paths: PluginPaths = plugin_paths(DRIVER, kubelet_dir=kubelet_dir, pod_uid=pod_uid)
        self.plugin = Plugin(
            self.latest,
            self.claims,
            driver=DRIVER,
            paths=self.paths,
            pod_uid=pod_uid,
            wire=wire,
        )
        self.thread = IoThread(self.plugin.run, on_failure=self.failures.append)

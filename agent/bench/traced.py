"""``python -m agent.bench.traced SETTINGS``: an agent that says when each hop of a change was.

The agent's own parts, put together as ``agent.app.daemon`` does, with the clock read between them; what has
no part in a change on its way is left out. SETTINGS are flags of ``drahealth run`` as a JSON object. It
prints a line of JSON for each message that it encodes: CLOCK_MONOTONIC [ns] when

    rung        the C core wrote to its eventfd, if that was what woke
    woken       the Trio thread ran
    read        the snapshot was copied and decoded
    decided     step() was done, and the picture was another
    taken       the asyncio thread began to encode it
    encoded     its bytes were there; what follows is the socket, and the client
"""

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import trio

from agent.app.daemon import SWITCH_INTERVAL_S, step_aside
from agent.config.config import Config, load
from agent.engine.loop import EngineLoop, Timing
from agent.engine.step import begin
from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.native.sampler import Sampler
from agent.node.node_source import Node
from agent.node.open import NODE_STOP_S, open_sampler, settings_of
from agent.serve.servers import Servers, encode_devices
from agent.system.clock import read_clocks
from agent.system.threads.latest import Latest
from agent.system.threads.loop_thread import IoThread
from agent.version import VERSION


class Traced:
    """The node as the core's source, the way out of it, and when each was passed."""

    def __init__(self, config: Config, sampler: Sampler) -> None:
        settings = settings_of(config)
        self._sampler = sampler
        self.node = Node(config, sampler, settings.gpu, config.period_ns, declares=False)
        self.latest = Latest[Report]()
        self._stamps: dict[str, int] = {}
        self._under_way: dict[str, int] = {}

    def fileno(self) -> int:
        return self._sampler.fileno()

    def clear(self) -> None:
        self._stamps = {"woken": time.monotonic_ns(), "rung": self._sampler.rung_ns()}
        self._sampler.clear()

    def read(self) -> Snapshot | None:
        snapshot = self.node.read()
        self._stamps["read"] = time.monotonic_ns()
        return snapshot

    def publish(self, report: Report) -> None:
        """From the core to the asyncio thread."""
        self._under_way = self._stamps | {"decided": time.monotonic_ns()}
        self.latest.publish(report)
        step_aside()

    def encode(self, devices: Sequence[DeviceHealth], extra_s: int) -> list[bytes]:
        """The message, and a line that tells of it when it is sent. In the asyncio thread."""
        stamps = self._under_way | {"taken": time.monotonic_ns()}
        messages = encode_devices(devices, extra_s)
        stamps["encoded"] = time.monotonic_ns()
        asyncio.get_running_loop().call_soon(_say, stamps)
        return messages


def _say(stamps: Mapping[str, int]) -> None:
    print(json.dumps(stamps), flush=True)


async def _until_told(core: EngineLoop, node: Node) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            nursery.start_soon(node.watch)
            async for _ in signals:
                nursery.cancel_scope.cancel()


def main(flags: Mapping[str, str | list[str]]) -> None:
    """Until SIGTERM."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    config = load(flags, {})
    traced = Traced(config, open_sampler(config, config.period_ns))
    core = EngineLoop(
        source=traced,
        state=begin(settings_of(config)),
        timing=Timing(config.heartbeat_s, config.coalesce_ns, None),
        clock=read_clocks,
        publish=traced.publish,
        remember=lambda _: None,
        alive=lambda: None,
        jitter=random.random,
    )
    servers = Servers(
        traced.latest,
        runtime_dir=config.runtime_dir,
        drivers=config.drivers,
        version=VERSION,
        encode=traced.encode,
    )
    io = IoThread(servers.run, on_failure=lambda error: print(f"traced: {error}", file=sys.stderr))
    io.start()
    traced.node.start()
    try:
        trio.run(_until_told, core, traced.node)
    finally:
        io.stop()
        traced.node.stop(NODE_STOP_S)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

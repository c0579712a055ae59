"""``python -m agent.bench.traced_agent SETTINGS``: an agent that prints the time of each hop of a change.

It assembles the agent's components as ``agent.app.daemon`` does and reads the clock between them. Components
that a change does not pass are left out. SETTINGS are flags of ``drahealth run`` as a JSON object. For each
message that the agent encodes, it prints a line of JSON with times (CLOCK_MONOTONIC, ns):

    rung        the C core wrote to its eventfd, if the eventfd woke the reader
    woken       the Trio thread ran
    read        the snapshot was copied and decoded
    decided     step() returned a changed report
    taken       the encoding of the report began: in the Trio thread, or in the asyncio thread if the Trio
                thread can send to no client
    encoded     the message was encoded; the socket and the client follow
"""

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import trio

from agent.app.daemon import SWITCH_INTERVAL_S, yield_to_senders
from agent.config.config import Config, load
from agent.engine.loop import EngineLoop, LoopTiming
from agent.engine.step import initial_state
from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.native.sampler import Sampler
from agent.node.node_source import SOURCES_STOP_S, NodeSource, engine_settings, open_sampler
from agent.serve.grpc_servers import GrpcServers, encode_device_health
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread
from agent.system.timing import read_clocks
from agent.version import VERSION


class TracedSource:
    """Snapshot source and report publisher of the engine loop, which record the times of a change.

    The times are those at which the change reaches each component of the agent.
    """

    def __init__(self, config: Config, sampler: Sampler) -> None:
        settings = engine_settings(config)
        self._sampler = sampler
        self.node = NodeSource(config, sampler, settings.gpu, config.period_ns, reads_declarations=False)
        self.latest = LatestValue[Report]()
        self._publisher = threading.get_ident()
        self._stamps: dict[str, int] = {}
        self._published_stamps: dict[str, int] = {}
        self._unprinted_stamps: dict[str, int] = {}

    def fileno(self) -> int:
        return self._sampler.fileno()

    def clear(self) -> None:
        self._stamps = {"woken": time.monotonic_ns(), "rung": self._sampler.last_wake_ns()}
        self._sampler.clear()

    def read(self) -> Snapshot | None:
        snapshot = self.node.read()
        self._stamps["read"] = time.monotonic_ns()
        return snapshot

    def publish(self, report: Report) -> None:
        """Pass a report from the engine loop to the asyncio thread."""
        self._published_stamps = self._stamps | {"decided": time.monotonic_ns()}
        self.latest.publish(report)
        if self._unprinted_stamps:
            _print_stamps(self._unprinted_stamps)
            self._unprinted_stamps = {}
        yield_to_senders()

    def encode(self, devices: Sequence[DeviceHealth], extra_s: int) -> list[bytes]:
        """Encode the message to subscribers; print the times of its hops after the message is sent."""
        stamps = self._published_stamps | {"taken": time.monotonic_ns()}
        messages = encode_device_health(devices, extra_s)
        stamps["encoded"] = time.monotonic_ns()
        if threading.get_ident() == self._publisher:
            self._unprinted_stamps = stamps
        else:
            asyncio.get_running_loop().call_soon(_print_stamps, stamps)
        return messages


def _print_stamps(stamps: Mapping[str, int]) -> None:
    print(json.dumps(stamps), flush=True)


def _end_process(error: BaseException) -> None:
    """Print the error of the servers and end this process. Thread-safe."""
    print(f"traced agent: servers failed: {error}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


async def _run_until_sigterm(loop: EngineLoop, node: NodeSource) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run)
            nursery.start_soon(node.run_watchers)
            async for _ in signals:
                nursery.cancel_scope.cancel()


def main(flags: Mapping[str, str | list[str]]) -> None:
    """Run the agent with these flags of ``drahealth run`` until SIGTERM."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    config = load(flags, {})
    source = TracedSource(config, open_sampler(config, config.period_ns))
    loop = EngineLoop(
        source=source,
        state=initial_state(engine_settings(config)),
        timing=LoopTiming(config.heartbeat_s, config.coalesce_ns, None),
        clock=read_clocks,
        publish=source.publish,
        save_state=lambda _: None,
        notify_watchdog=lambda: None,
        jitter=random.random,
    )
    servers = GrpcServers(
        source.latest,
        runtime_dir=config.runtime_dir,
        drivers=config.drivers,
        version=VERSION,
        encode_list=source.encode,
    )
    io = AsyncioThread(servers.run, on_failure=_end_process)
    io.start()
    source.node.start()
    try:
        trio.run(_run_until_sigterm, loop, source.node)
    finally:
        io.stop()
        source.node.stop(SOURCES_STOP_S)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""``python -m agent.bench.subscriber SOCKET METHOD MARKER``: a gRPC subscriber in a separate process.

It prints a line of JSON at start (the name of its gRPC library) and one for each message: arrival time
(CLOCK_MONOTONIC, taken before the bytes are parsed), size, and the matches of the regular expression MARKER.
It uses grpcio if installed, which behaves most like a kubelet's client; otherwise the agent's own client.
"""

import asyncio
import importlib
import importlib.util
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

CONNECT_POLL_S: Final = 0.001


def main(socket: str, method: str, marker: str) -> None:
    """Subscribe to ``method`` on ``socket``; print a line for each message until the stream ends."""
    pattern = re.compile(marker.encode(), re.DOTALL)
    grpc = importlib.import_module("grpc") if importlib.util.find_spec("grpc") else None
    _print_json(client=f"grpcio {grpc.__version__}" if grpc else "grpclib, which decodes each message first")
    while not Path(socket).exists():  # after a failed attempt, grpcio waits a second
        time.sleep(CONNECT_POLL_S)
    if grpc:
        _follow_grpcio(grpc, socket, method, pattern)
    else:
        # imported here: slower to load than grpcio
        follow = importlib.import_module("agent.serve.agent_api.client").follow
        asyncio.run(_follow_agent_client(follow(Path(socket)), pattern))


def _print_json(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _find_markers(pattern: re.Pattern[bytes], data: bytes) -> list[str]:
    return [match.decode() for match in pattern.findall(data)]


def _follow_grpcio(grpc: Any, socket: str, method: str, pattern: re.Pattern[bytes]) -> None:
    channel = grpc.insecure_channel(f"unix:{socket}")
    for data in channel.unary_stream(method)(b"", wait_for_ready=True):
        t_ns = time.monotonic_ns()
        _print_json(t_ns=t_ns, size=len(data), found=_find_markers(pattern, data))


async def _follow_agent_client(reports: AsyncIterator[object], pattern: re.Pattern[bytes]) -> None:
    async for report in reports:
        t_ns = time.monotonic_ns()
        text = repr(report).encode()
        _print_json(t_ns=t_ns, size=len(text), found=_find_markers(pattern, text))


if __name__ == "__main__":
    main(*sys.argv[1:4])

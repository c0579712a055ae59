"""``python -m agent.bench.client SOCKET METHOD MARKER``: a subscriber in a process of its own.

Prints a line of JSON when it starts (which library it is) and one for each message: when it came
(CLOCK_MONOTONIC, taken before the bytes are looked at), its size, and what MARKER matched in it. With grpcio
where there is one, since that is what a kubelet's client is closest to; else with our own.
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

LOOK_S: Final = 0.001


def main(socket: str, method: str, marker: str) -> None:
    """Until killed, or the stream ends."""
    pattern = re.compile(marker.encode(), re.DOTALL)
    grpc = importlib.import_module("grpc") if importlib.util.find_spec("grpc") else None
    _say(client=f"grpcio {grpc.__version__}" if grpc else "grpclib, which decodes each message first")
    while not Path(socket).exists():  # who fails to connect once tries again only a second later
        time.sleep(LOOK_S)
    if grpc:
        _grpcio(grpc, socket, method, pattern)
    else:
        follow = importlib.import_module("agent.serve.agent_api.client").follow  # takes longer than grpcio
        asyncio.run(_ours(follow(Path(socket)), pattern))


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def _found(pattern: re.Pattern[bytes], data: bytes) -> list[str]:
    return [match.decode() for match in pattern.findall(data)]


def _grpcio(grpc: Any, socket: str, method: str, pattern: re.Pattern[bytes]) -> None:
    channel = grpc.insecure_channel(f"unix:{socket}")
    for data in channel.unary_stream(method)(b"", wait_for_ready=True):
        t_ns = time.monotonic_ns()
        _say(t_ns=t_ns, size=len(data), found=_found(pattern, data))


async def _ours(reports: AsyncIterator[object], pattern: re.Pattern[bytes]) -> None:
    async for report in reports:
        t_ns = time.monotonic_ns()
        text = repr(report).encode()
        _say(t_ns=t_ns, size=len(text), found=_found(pattern, text))


if __name__ == "__main__":
    main(*sys.argv[1:4])

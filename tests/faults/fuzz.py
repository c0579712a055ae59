"""Command that gives parsers random bytes: ``python -m faults.fuzz [TARGET...] --seconds 60``.

Each target is a parser of bytes that others write, with valid inputs and the errors that its contract names.
Inputs are mutations of the valid ones, and of inputs whose outcome was new. An input with another error is
saved, and the command fails. ``tests/faults/corpus/<target>`` has more inputs; a test runs all of them.
"""

import argparse
import hashlib
import json
import logging
import random
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from explain_node import prepared_claim
from grpclib import GRPCError
from hpack import Encoder
from kubelet_files import checkpoint
from patience import PATIENCE_S
from usage_samples import device_usage
from wire.google import message_class
from wire.link import METHODS, claim
from wire.link import message as link_message
from wire.raw import DATA, END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, SETTINGS, frame, request_headers
from wire.raw import message as grpc_message
from wire.serving import Serving, device

from agent.conform.answer_decoders import decode_answers, decode_health_list
from agent.errors import ConfigError
from agent.model.health import Taints
from agent.model.persistent_faults import PersistentState
from agent.model.settings import UsageHistoryLimits
from agent.prepare.prepare_ledger import PrepareLedger
from agent.serve.driver_link import requests
from agent.sources.declaration_file import parse_declaration
from agent.sources.kubelet_files import parse_claims_checkpoint, parse_exclusive_cpus, parse_health_state
from agent.store.driver_files import (
    LedgerFileContent,
    decode_ledger,
    decode_taints,
    encode_ledger,
    encode_taints,
)
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults
from agent.store.history_file import HistoryFile, read_history
from agent.store.state_files import UnusableFile

CORPUS: Final = Path(__file__).with_name("corpus")
INPUT_MAX: Final = 16_384
KEPT_MAX: Final = 512
"""Number of inputs with a new outcome that are kept for further mutations."""
SOCKET_S: Final = 0.05
"""Time that the HTTP/2 target waits for an answer [s]."""
WORDS: Final = (
    b"\0",
    b"\xff",
    b"\x80\x80\x80\x80\x10",
    b"-1",
    b"1e999",
    b"null",
    b"{}",
    b"[]",
    b'""',
    b"\\u0000",
)
DRIVER: Final = "gpu.example.com"


class Target(NamedTuple):
    """One parser under test."""

    seeds: Sequence[bytes]
    parse: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...]
    """Errors that the contract of the parser names."""


def _of_checkpoint(data: bytes) -> object:
    """Parse claims whose checksum is right, so that all fields are reached."""
    text = data.decode("utf-8", "replace")
    envelope = {"Data": text, "Checksum": zlib.crc32(text.encode())}
    return parse_claims_checkpoint(json.dumps(envelope).encode())


def _link_seeds() -> dict[str, bytes]:
    """Return a valid request of each method of the driver link."""
    part = link_message("HugepagesPart", size="2Mi", pages=8)
    declared = link_message("DeclaredDevice", name="pages", hugepages=part)
    evidence = link_message("Evidence", errno=link_message("Errno", number=5, operation=1, text="I/O"))
    outcome = link_message("PrepareOutcome", claim=claim("u", "gpu-0"), failed=True, evidence=[evidence])
    fields: dict[str, dict[str, Any]] = {
        "SyncDevices": {"devices": [declared]},
        "CheckClaims": {"claims": [claim("u", "gpu-0", "gpu-1")]},
        "Classify": {"claim": claim("u", "gpu-0"), "evidence": [evidence]},
        "ReportPrepare": {"step": 1, "outcomes": [outcome]},
    }
    return {
        method: link_message(METHODS[method].input_type.name, **given).SerializeToString()
        for method, given in fields.items()
    }


def _field(number: int, content: bytes) -> bytes:
    """Encode a short field of bytes of a protobuf message."""
    return bytes([number << 3 | 2, len(content)]) + content


def _prepare_answer() -> bytes:
    """Return an answer to a prepare of two claims, of which one failed."""
    given = b"".join(
        _field(n, text) for n, text in enumerate((b"r", b"p", b"gpu-0", b"example.com/gpu=0"), 1)
    )
    done = _field(1, b"u") + _field(2, _field(1, given))
    failed = _field(1, b"w") + _field(2, _field(2, b"no such device"))
    return _field(1, done) + _field(1, failed)


def _health_list() -> bytes:
    found = message_class("v1", "NodeWatchResourcesResponse")()
    one = found.devices.add(health=1, last_updated_time=1_700_000_000, health_check_timeout_seconds=30)
    one.device.pool_name, one.device.device_name = "node-1", "gpu-0"
    data: bytes = found.SerializeToString()
    return data


def _http2_seeds() -> list[bytes]:
    """Return what a client sends on a connection: settings, a ping, and a request."""
    headers = Encoder().encode(request_headers())
    call = frame(HEADERS, END_HEADERS, 1, headers) + frame(DATA, END_STREAM, 1, grpc_message())
    return [frame(SETTINGS, 0, 0) + call, frame(SETTINGS, 0, 0) + frame(PING, 0, 0, b"12345678") + call]


class _Errors(logging.Handler):
    """Log handler that keeps the errors of a server, which are bugs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class ServerBug(Exception):
    """A server has logged an error, or serves others no more."""


def _send(socket_path: Path, errors: _Errors, data: bytes) -> object:
    """Send bytes after the preface on a connection of their own; returns the size of the answer."""
    received = 0
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(socket_path))
        sock.settimeout(SOCKET_S)
        with suppress(OSError):  # the server has closed the connection, or waits for more
            sock.sendall(PREFACE + data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65_536):
                received += len(part)
    if errors.texts:
        raise ServerBug(errors.texts.pop())
    return received


def _read_history(directory: Path, data: bytes) -> object:
    path = directory / "history.sqlite"
    path.write_bytes(data)
    return len(read_history(path).ended)


def _history_seed(directory: Path) -> bytes:
    path = directory / "seed.sqlite"
    file = HistoryFile(path, UsageHistoryLimits())
    file.write_uses([device_usage(1), device_usage(2, active=True)], (), 1.0, delete_by_age=False)
    return path.read_bytes()


@contextmanager
def open_targets() -> Iterator[dict[str, Target]]:
    """Yield all targets by name, with the server and the directory that some of them use."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    taken = json.loads(checkpoint([prepared_claim("c", "gpu-0", pods=["u"])]))["Data"].encode()
    health = {
        DRIVER: {"Devices": {"n/gpu-0": {"PoolName": "n", "DeviceName": "gpu-0", "Health": "Unhealthy"}}}
    }
    cpus = {"policyName": "static", "defaultCpuSet": "0-3", "entries": {"u": {"main": "2-3"}}, "checksum": 1}
    declared = (
        b'version = 1\n[[device]]\nname = "pages"\nkind = "hugepages"\nsize = "2Mi"\npages = 8\nnuma = 0\n'
    )
    ledger = encode_ledger(LedgerFileContent(DRIVER, "1", PrepareLedger()))
    decoders = {
        "SyncDevices": requests.decode_sync_devices,
        "CheckClaims": partial(_with_driver, requests.decode_check_claims),
        "Classify": partial(_with_driver, requests.decode_classify),
        "ReportPrepare": partial(_with_driver, requests.decode_report_prepare),
    }
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as name,
        Serving(Path(name) / "run") as serving,
    ):
        serving.publish(device())
        yield {
            "http2": Target(_http2_seeds(), partial(_send, serving.health, errors), ()),
            **{
                f"link-{method}": Target([seed], decoders[method], (GRPCError,))
                for method, seed in _link_seeds().items()
            },
            "conform-prepare": Target(
                [_prepare_answer()], lambda data: decode_answers(data, is_prepare=True), (ValueError,)
            ),
            "conform-health": Target(
                [_health_list()], lambda data: decode_health_list(data, 0.0, {}).decode_error, ()
            ),
            "checkpoint": Target([taken], _of_checkpoint, (ValueError,)),
            "kubelet-health": Target([json.dumps(health).encode()], parse_health_state, (ValueError,)),
            "cpu-manager": Target([json.dumps(cpus).encode()], parse_exclusive_cpus, (ValueError,)),
            "declaration": Target(
                [declared], lambda data: parse_declaration(data, DRIVER, "n"), (ConfigError,)
            ),
            "history": Target(
                [_history_seed(Path(name))], partial(_read_history, Path(name)), (UnusableFile,)
            ),
            "gpu-faults": Target(
                [encode_gpu_faults(PersistentState(runs=3))], decode_gpu_faults, (UnusableFile,)
            ),
            "ledger": Target([ledger], decode_ledger, (UnusableFile,)),
            "taints": Target([encode_taints(Taints())], decode_taints, (UnusableFile,)),
        }
    logging.getLogger().removeHandler(errors)


def _with_driver(decode: Callable[[bytes, str], object], data: bytes) -> object:
    return decode(data, DRIVER)


def mutate(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a changed input: bytes flipped, removed, repeated, inserted, or exchanged with another input."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(out) + 1)
        to = min(len(out), at + chance.choice((1, 1, 2, 8, 64, 1024)))
        match chance.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at:to]
            case 2:
                out[at:at] = out[at:to] * chance.choice((1, 2, 100))
            case 3:
                out[at:to] = chance.choice(WORDS)
            case 4:
                out[at:at] = chance.randbytes(chance.choice((1, 4, 16)))
            case _:
                other = chance.choice(others)
                out[at:to] = other[chance.randrange(len(other) + 1) :][: chance.choice((4, 64, 1024))]
        del out[INPUT_MAX:]
    return bytes(out)


def outcome(target: Target, data: bytes) -> str:
    """Parse one input; return a name of what happened. Raises an error that the contract does not name."""
    try:
        result = target.parse(data)
        return result if isinstance(result, str) else type(result).__name__
    except target.errors as error:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}"


def inputs_of(name: str, target: Target) -> list[bytes]:
    """Return the valid inputs of a target and those of its corpus."""
    saved = sorted((CORPUS / name).glob("*"))
    return [*target.seeds, *(path.read_bytes() for path in saved)]


def fuzz(name: str, target: Target, seconds: float, seed: int, found: Path) -> int:
    """Parse random inputs for some time; return their number. Raises SystemExit for a bug."""
    chance = random.Random(f"{name} {seed}")
    inputs = inputs_of(name, target)
    seen = {outcome(target, one) for one in inputs}
    runs, until_s = 0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        data = mutate(chance.choice(inputs), inputs, chance)
        runs += 1
        try:
            new = outcome(target, data)
        except Exception:
            found.mkdir(parents=True, exist_ok=True)
            path = found / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            traceback.print_exc()
            raise SystemExit(f"{name}: an error that the contract does not name; input: {path}") from None
        if new not in seen and len(inputs) < KEPT_MAX:
            seen.add(new)
            inputs.append(data)
    return runs


def main() -> None:
    """Fuzz the targets one after the other."""
    parser = argparse.ArgumentParser(description="Give parsers random bytes.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="parsers (default: all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each target (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the inputs (default: 1)")
    parser.add_argument(
        "--found", type=Path, default=Path("../build/fuzz"), help="directory of failing inputs"
    )
    args = parser.parse_args()
    with open_targets() as targets:
        if unknown := set(args.targets) - targets.keys():
            parser.error(f"no such targets: {', '.join(sorted(unknown))}; there are {', '.join(targets)}")
        for name in args.targets or targets:
            runs = fuzz(name, targets[name], args.seconds, args.seed, args.found)
            sys.stdout.write(f"{name}: runs {runs}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

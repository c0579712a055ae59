"""Command that gives parsers random bytes: ``python -m faults.fuzz [TARGET...] --seconds 60``.

Each target is a parser of bytes that others write, with valid inputs and the errors that its contract names.
Inputs are mutations of the valid ones, and of inputs whose outcome was new. An input with another error is
saved, and the command fails. ``tests/faults/corpus/<target>`` has more inputs, of former bugs and of distinct
outcomes (``--save``); a test runs all of them.
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

from cli_reports import gpu, source
from cli_reports import report as sample_report
from explain_node import claim_object, pod_object, prepared_claim
from grpclib import GRPCError
from hpack import Encoder
from http_agents import full_agent
from kubelet_files import checkpoint
from kubernetes_samples import POD
from log_lines import CASES as LOG_LINES
from patience import PATIENCE_S
from record_files import DIRECTORY as RECORDS
from wire.google import message_class
from wire.link import METHODS, claim
from wire.link import message as link_message
from wire.raw import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    request_headers,
)
from wire.raw import message as grpc_message
from wire.serving import Serving, device

from agent.cgroup_audit.kubelet_config import parse_kubelet_config
from agent.cgroup_audit.pod_parser import parse_pod
from agent.config.config import load
from agent.conform.answer_decoders import decode_answers, decode_health_list
from agent.conform.cdi_schema import cdi_file_error, cdi_ids
from agent.devices.consumers import kube_objects
from agent.errors import ConfigError, ProbeError
from agent.health.gpu.xid.log_lines import parse_line
from agent.health.kernel_log.parse import parse_host_line
from agent.http.server import HttpServer
from agent.http.web_config import read_web_config
from agent.model.health import Taints
from agent.model.persistent_faults import PersistentState
from agent.model.report import AgentStatus
from agent.model.socket_address import ListenAddress
from agent.node.nvml_process_main import decode_inventory
from agent.prepare.claim_parser import parse_claim
from agent.prepare.errors import BadConfigError, TransientError
from agent.prepare.prepare_ledger import PrepareLedger
from agent.record import segment_file
from agent.record.segment_file import SegmentReader
from agent.serve.agent_api.client import agent_v1, decode_report
from agent.serve.agent_api.encode import encode_report
from agent.serve.agent_api.service import CLEAR_REQUEST
from agent.serve.driver_link import requests
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.wire import read_by_schema
from agent.serve.kubelet.client import parse_podresources
from agent.serve.kubelet.pods_api import decode_pod
from agent.sources.declaration_file import parse_declaration
from agent.sources.kubectl_files import parse_all_objects, parse_documents
from agent.sources.kubelet_files import parse_claims_checkpoint, parse_exclusive_cpus, parse_health_state
from agent.store.driver_files import (
    LedgerFileContent,
    decode_ledger,
    decode_taints,
    encode_ledger,
    encode_taints,
)
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults
from agent.store.state_files import UnusableFile
from agent.system.threads.loop_thread import AsyncioThread

from .history_damage import DamagedHistory

CORPUS: Final = Path(__file__).with_name("corpus")
INPUT_MAX: Final = 16_384
KEPT_MAX: Final = 512
"""Number of inputs with a new outcome that are kept for further mutations."""
SAVED_MAX: Final = 16
"""Number of inputs of a target that ``--save`` adds to its corpus."""
SAVED_BYTES: Final = 2048
"""Largest size of an input that ``--save`` adds to a corpus [bytes]."""
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
    return parse_claims_checkpoint(json.dumps(envelope).encode())[0]


def _link_seeds() -> dict[str, bytes]:
    """Return a valid request of each method of the driver link."""
    part = link_message("HugepagesPart", size="2Mi", pages=8)
    declared = link_message("DeclaredDevice", name="pages", hugepages=part)
    evidence = link_message("Evidence", errno=link_message("Errno", number=5, operation=1, text="I/O"))
    outcome = link_message("PrepareOutcome", claim=claim("u", "gpu-0"), failed=True, evidence=[evidence])
    finding = link_message("CheckFinding", code="fpga.bank_locked", severity=2, evidence="bank 3")
    result = link_message("CheckResult", device="gpu-0", check="fabric", every_s=1.0, finding=finding)
    fields: dict[str, dict[str, Any]] = {
        "SyncDevices": {"devices": [declared]},
        "ReportChecks": {"results": [result]},
        "WatchTaints": {},
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
    added = found.devices.add(health=1, last_updated_time=1_700_000_000, health_check_timeout_seconds=30)
    added.device.pool_name, added.device.device_name = "node-1", "gpu-0"
    data: bytes = found.SerializeToString()
    return data


def _http2_seeds() -> list[bytes]:
    """Return what a client sends on a connection: settings, a ping, and a request."""
    headers = Encoder().encode(request_headers())
    call = frame(HEADERS, END_HEADERS, 1, headers) + frame(DATA, END_STREAM, 1, grpc_message())
    return [frame(SETTINGS, 0, 0) + call, frame(SETTINGS, 0, 0) + frame(PING, 0, 0, b"12345678") + call]


def _http_seeds() -> list[bytes]:
    """Return what a client of the HTTP server sends: HTTP/1.1, its upgrades, and HTTP/2."""
    host = b"Host: x\r\n"
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n"
    websocket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    chunks = b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"
    encoder = Encoder()
    begin = PREFACE + frame(SETTINGS, 0, 0)
    fields = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/?first=1"), (b":authority", b"x")]
    get = frame(HEADERS, END_HEADERS | END_STREAM, 1, encoder.encode(fields))
    fields[0], fields[2] = (b":method", b"POST"), (b":path", b"/metrics")
    post = frame(HEADERS, END_HEADERS, 3, encoder.encode(fields)) + frame(DATA, 0, 3, b"body")
    connect = [(b":method", b"CONNECT"), (b":protocol", b"websocket"), *fields[1:]]
    return [
        b"GET /healthz HTTP/1.1\r\n" + host + b"\r\nGET /nothing HTTP/1.1\r\n" + host + b"\r\n",
        b"GET /metrics HTTP/1.1\r\n" + host + b"Accept: application/openmetrics-text;version=1.0.0\r\n\r\n",
        b"POST /api/v1/report HTTP/1.1\r\n" + host + chunks,
        b"GET /page.css HTTP/1.1\r\n" + host + upgrade + b"\r\n" + begin,
        b"GET /events HTTP/1.1\r\n" + host + websocket + key + b"\r\n\x81\x01a",
        begin + get,
        begin + get + post + frame(RST_STREAM, 0, 3, b"\0\0\0\x08"),
        begin + frame(HEADERS, END_HEADERS, 1, Encoder().encode(connect)) + frame(DATA, 0, 1, b"\x81\x01a"),
    ]


class _Errors(logging.Handler):
    """Log handler that keeps the errors of servers' threads, which are bugs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.threads: set[int | None] = set()
        """Identifiers of the threads; other threads log errors of earlier tests."""
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread in self.threads:
            self.texts.append(self.format(record))


class ServerBug(Exception):
    """A server has logged an error, or serves others no more."""


@contextmanager
def _http_server(path: Path, errors: _Errors) -> Iterator[None]:
    """Serve an agent by HTTP on a unix socket, with a thousand times the usual limit of received bytes."""
    fake = full_agent()
    fake.change(status=lambda: AgentStatus("1.2.3", 1, 1_700_000_000.0, 2.5, 40 << 20, 9, 60))
    server = HttpServer([ListenAddress("", path=str(path))], fake.app)
    server._received.clock = lambda: 1000 * time.monotonic()
    thread = AsyncioThread(server.run, on_failure=lambda _: None, name="fuzz-http")
    thread.start(PATIENCE_S)
    errors.threads.add(thread._thread.ident)
    try:
        yield
    finally:
        assert thread.stop(PATIENCE_S)


def _kind_of_answer(answer: bytes) -> str:
    """Return the status of an answer in HTTP/1.1, or the types of the first frames."""
    if answer.startswith(b"HTTP/1.1 "):
        return answer[9:12].decode()
    kinds, rest = "", answer
    while len(rest) >= 9 and len(kinds) < 8:
        kinds += f"{rest[3]:x}"
        rest = rest[9 + int.from_bytes(rest[:3], "big") :]
    return f"frames {kinds}"


def _send(socket_path: Path, errors: _Errors, preface: bytes, data: bytes) -> str:
    """Send bytes after the preface on a connection of their own; returns the kind of the answer."""
    received = b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(socket_path))
        sock.settimeout(SOCKET_S)
        with suppress(OSError):  # the server has closed the connection, or waits for more
            sock.sendall(preface + data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65_536):
                received += part
    if errors.texts:
        raise ServerBug(errors.texts.pop())
    return _kind_of_answer(received)


def _load_config(directory: Path, data: bytes) -> object:
    path = directory / "config.toml"
    path.write_bytes(data)
    return type(load({}, {}, file=path, needs_runtime_dir=False)).__name__


def _load_web_config(directory: Path, data: bytes) -> object:
    path = directory / "web.yaml"
    path.write_bytes(data)
    return f"{len(read_web_config(path).users)} users"


def _parse_kernel_line(data: bytes) -> object:
    """Parse a line as one of the host and as one of a GPU; returns the names of the results."""
    text = data.decode("utf-8", "replace")
    return f"{type(parse_host_line(text)).__name__} {type(parse_line(text)).__name__}"


def _parse_pods(data: bytes) -> object:
    """Parse a text of Kubernetes objects as pods and claims, for the audit and for explain."""
    for obj in parse_all_objects(data):
        with suppress(ProbeError):
            parse_pod(obj)
        with suppress(ValueError):
            kube_objects.parse_pod(obj)
        kube_objects.parse_claim_object(obj)
    return "objects"


def _parse_first(parse: Callable[[Any], object], data: bytes) -> object:
    """Parse the first object of a JSON or YAML text."""
    first = parse_documents(data)[0]
    if not isinstance(first, dict):
        raise ValueError("is no object")  # noqa: TRY004  # as the parsers of objects
    return parse(first)


def _parse_cdi(data: bytes) -> object:
    document = parse_documents(data)[0]
    if problem := cdi_file_error(document):
        raise ValueError(problem)
    return f"{len(cdi_ids(document))} ids"


def _record_frames() -> list[bytes]:
    """Return the unpacked first frames of a committed record."""
    (path,) = segment_file.segment_paths(RECORDS / "mig-is-switched-on-and-off")
    zstandard, fed, frames = segment_file.import_zstandard(), segment_file._Feeder(), []
    stream = zstandard.ZstdDecompressor(max_window_size=1 << segment_file.WINDOW_LOG).stream_reader(fed)
    with path.open("rb") as file:
        for _, size, packed in segment_file._packed_frames(path, file):
            fed.data = packed
            frames.append(stream.read(size))
    return frames[:4]


def _read_record(directory: Path, frames: Sequence[bytes], data: bytes) -> object:
    """Read a record of which one frame is replaced: the first byte is its number, the others its content."""
    contents = list(frames)
    contents[data[0] % len(frames) if data else 0] = data[1:]
    zstandard = segment_file.import_zstandard()
    parameters = zstandard.ZstdCompressionParameters.from_level(
        segment_file.LEVEL, window_log=segment_file.WINDOW_LOG
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = directory / "record-00000001.drahrec"
    with path.open("wb") as file:
        file.write(segment_file.MAGIC)
        for content in contents:
            packed = compressor.compress(content) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            file.write(segment_file._FRAME.pack(len(packed), len(content), zlib.crc32(packed)) + packed)
    reader = SegmentReader(path)
    _, lost = reader.state()
    steps = sum(1 for _ in reader.steps())
    return f"{steps} steps{' without state' if lost else ''}{' until damage' if reader.problem else ''}"


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
        "ReportChecks": requests.decode_report_checks,
        "WatchTaints": requests.check_watch_taints,
        "CheckClaims": partial(_with_driver, requests.decode_check_claims),
        "Classify": partial(_with_driver, requests.decode_classify),
        "ReportPrepare": partial(_with_driver, requests.decode_report_prepare),
    }
    config = b"""[agent]\nperiod = "1s"\ndrivers = ["gpu.example.com"]\n[expect.hugepages]
"hugepages-2mi-node0" = 8\n[gpu.xids]\n31 = "ignore"\n[[rules]]\ncode = "gpu.ecc.*"\nseverity = "degraded"
[[check]]\nname = "disk"\ncommand = ["/bin/true"]\ntimeout = "5s"\n[http]\nlisten = ["localhost:9464"]\n"""
    password = b"$2b$10$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"
    objects = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [pod_object("p", "c"), claim_object("c", "gpu-0", reserved_for=[])],
    }
    kubelet = {"kind": "KubeletConfiguration", "systemReserved": {"cpu": "500m"}, "reservedSystemCPUs": "0-1"}
    kubelet["cpuCFSQuotaPeriod"] = "100ms"
    cdi = {
        "cdiVersion": "0.6.0",
        "kind": "example.com/gpu",
        "devices": [{"name": "0", "containerEdits": {"env": ["A=1"]}}],
    }
    attributes = [{"uuid": "GPU-1", "bus": "0000:3b:00.0", "profiles": [["MIG-1", "1g.10gb"]]}]
    clear = _field(1, b"gpu-0") + _field(2, b"gpu.xid.79")
    listed = _field(1, _field(1, b"p") + _field(2, b"n") + _field(3, _field(1, b"main")))
    frames = _record_frames()
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as name,
        Serving(Path(name) / "run") as serving,
        _http_server(Path(name) / "http.sock", errors),
    ):
        history = DamagedHistory(Path(name))
        errors.threads.add(serving.thread._thread.ident)
        serving.publish(device())
        yield {
            "http2": Target(_http2_seeds(), partial(_send, serving.health, errors, PREFACE), ()),
            "http": Target(_http_seeds(), partial(_send, Path(name) / "http.sock", errors, b""), ()),
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
            "history": Target(history.seeds(), history.use, (UnusableFile,)),
            "gpu-faults": Target(
                [encode_gpu_faults(PersistentState(runs=3))], decode_gpu_faults, (UnusableFile,)
            ),
            "ledger": Target([ledger], decode_ledger, (UnusableFile,)),
            "taints": Target([encode_taints(Taints())], decode_taints, (UnusableFile,)),
            "config": Target([config], partial(_load_config, Path(name)), (ConfigError,)),
            "web-config": Target(
                [b"basic_auth_users:\n  admin: " + password + b"\n"],
                partial(_load_web_config, Path(name)),
                (ConfigError,),
            ),
            "objects": Target(
                [json.dumps(objects).encode(), b"kind: Pod\nmetadata: {name: p, namespace: n, uid: u}\n"],
                _parse_pods,
                (ValueError,),
            ),
            "claim": Target(
                [json.dumps(claim_object("c", "gpu-0")).encode()],
                partial(_parse_first, lambda obj: parse_claim(obj, DRIVER)),
                (ValueError, TransientError, BadConfigError),
            ),
            "kubelet-config": Target(
                [json.dumps(kubelet).encode()],
                partial(_parse_first, lambda obj: parse_kubelet_config(obj, "file")),
                (ValueError,),
            ),
            "cdi": Target([json.dumps(cdi).encode()], _parse_cdi, (ValueError,)),
            "pod-resources": Target([listed], parse_podresources, (ValueError,)),
            "pods-api": Target(
                [POD],
                lambda data: kube_objects.parse_pod(decode_pod(data), from_kubelet=True),
                (ValueError,),
            ),
            "report": Target(
                [b"".join(encode_report(sample_report(gpu(0), sources=(source("gpu"),))))],
                lambda data: decode_report(Codec().decode(data, agent_v1.Report)),
                (GRPCError, ValueError),
            ),
            "clear-request": Target(
                [clear], lambda data: read_by_schema(data, CLEAR_REQUEST, "the request"), (ValueError,)
            ),
            "kernel-line": Target(
                [text.encode() for text, _ in LOG_LINES] + [b"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, lost"],
                _parse_kernel_line,
                (),
            ),
            "nvml-inventory": Target([json.dumps(attributes).encode()], decode_inventory, (OSError,)),
            "record": Target(
                [bytes([number]) + frame for number, frame in enumerate(frames)],
                partial(_read_record, Path(name), frames),
                (ProbeError,),
            ),
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


def fuzz(
    name: str, target: Target, seconds: float, seed: int, found: Path, save_in: Path | None = None
) -> int:
    """Parse random inputs for some time, at least one; return their number. Raises SystemExit for a bug.

    Args:
        name: Name of the target.
        target: The parser under test.
        seconds: Time for the inputs [s].
        seed: Seed of the inputs.
        found: Directory of failing inputs.
        save_in: Directory of corpora, to which small inputs with a new outcome are added; None: none are.
    """
    chance = random.Random(f"{name} {seed}")
    inputs = inputs_of(name, target)
    seen = {outcome(target, entry) for entry in inputs}
    runs, until_s = 0, time.monotonic() + seconds
    while not runs or time.monotonic() < until_s:
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
            if save_in is not None and len(data) <= SAVED_BYTES:
                _save_input(save_in / name, data)
    return runs


def _save_input(corpus: Path, data: bytes) -> None:
    """Add an input to a target's corpus, unless it has SAVED_MAX inputs."""
    corpus.mkdir(exist_ok=True)
    if len(list(corpus.iterdir())) < SAVED_MAX:
        (corpus / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)


def main() -> None:
    """Fuzz the targets one after the other."""
    parser = argparse.ArgumentParser(description="Give parsers random bytes.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="parsers (default: all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each target (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the inputs (default: 1)")
    parser.add_argument(
        "--found", type=Path, default=Path("../build/fuzz"), help="directory of failing inputs"
    )
    parser.add_argument(
        "--save", action="store_true", help="add small inputs with new outcomes to the committed corpora"
    )
    args = parser.parse_args()
    with open_targets() as targets:
        if unknown := set(args.targets) - targets.keys():
            parser.error(f"no such targets: {', '.join(sorted(unknown))}; there are {', '.join(targets)}")
        for name in args.targets or targets:
            save_in = CORPUS if args.save else None
            runs = fuzz(name, targets[name], args.seconds, args.seed, args.found, save_in)
            sys.stdout.write(f"{name}: runs {runs}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

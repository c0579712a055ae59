"""Protobuf messages that are sent to the kubelet, to drivers and to the command line, byte for byte.

Where a message holds a text that the code makes up, its fields are compared one by one instead, and the text
as ``compare`` compares texts. Requests are packed by field number: the names in the proto files do not count.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import ErrorClass, OtherDriverFailure, PrepareVerdict
from agent.native.health_encoder import WireHealth, encode_health_lists
from agent.prepare.classify import PrepareContext, classify_evidence
from agent.prepare.kubelet_message import kubelet_texts
from agent.serve.agent_api.client import decode_report, decode_status
from agent.serve.agent_api.encode import encode_report, encode_status
from agent.serve.dra_plugin.instance_server import RegistrationService
from agent.serve.dra_plugin.prepared_devices import PreparedDevice, WireMode, encode_error_class
from agent.serve.dra_plugin.service import _encode_devices
from agent.serve.driver_link.handler_interface import ReportedClaimResult, SyncDevicesResult
from agent.serve.driver_link.methods import METHODS, encode_taints
from agent.serve.grpc.gen.agent.drahealth import v1 as agent_v1
from agent.serve.grpc.gen.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from agent.serve.grpc.gen.dra_v1beta1.k8s.io.kubelet.pkg.apis.dra import v1beta1 as dra_v1beta1
from agent.serve.grpc.gen.registration_v1 import pluginregistration
from agent.serve.grpc_servers import encode_device_health
from golden import values
from golden.pack import TEXT, pack, unpack
from golden.plain import plain
from golden.values import DRIVER, POOL

ROWS: Final = (
    ("node-1", "gpu-0", 1, 1_790_000_000, 30, ""),
    ("node-1", "gpu-1", 2, 1_790_000_001, 3, "gpu.xid.79: 1 time; ünïcode … ✖"),
    ("", "", 0, 0, 0, ""),
    ("p" * 253, "d" * 63, -1, -1, (1 << 63) - 1, "m" * 1024),
    ("node-1", "gpu-3", 1, 1_790_000_000, 86_399, "x" * 127 + "é"),
)
"""Entries of a health list: pool, device, health, time, lease, message."""


def encode_messages() -> dict[str, str]:
    """Return messages by name, in hex; of a long message its length and its digest."""
    report = values.report()
    messages = {
        f"health.{number}": data for number, data in enumerate(encode_device_health(report.devices[3:]))
    }
    messages |= {f"health.lease.{n}": data for n, data in enumerate(encode_device_health(report.devices, 2))}
    messages |= {f"health.rows.{n}": data for n, data in enumerate(_health(ROWS))}
    many = [("node-1", f"gpu-{number}", number % 3, number, 30, "m" * 700) for number in range(2_000)]
    messages |= {f"health.many.{number}": data for number, data in enumerate(_health(many))}
    messages |= {
        "report": b"".join(encode_report(report)),
        "status": encode_status(values.status()),
        "status.new": encode_status(values.new_status()),
        "taints": encode_taints(values.taints()),
        "registration": bytes(asyncio.run(_registration())),
    }
    for version, module in {"v1": dra_v1, "v1beta1": dra_v1beta1}.items():
        messages[f"prepared.{version}"] = _encode_devices(module, _prepared_devices())
        messages[f"unprepared.{version}"] = _encode_devices(module, ())
    for mode in WireMode:
        for error_class in ErrorClass:
            messages[f"error.{mode.value}.{error_class.value}"] = encode_error_class(error_class, mode)
    return {name: data.hex() if len(data) < 4096 else _digest(data) for name, data in messages.items()}


def _digest(data: bytes) -> str:
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}"


def _health(rows: Sequence[tuple[str, str, int, int, int, str]]) -> list[bytes]:
    return encode_health_lists([WireHealth(*row) for row in rows])


async def _registration() -> pluginregistration.PluginInfo:
    plugin = RegistrationService(DRIVER, "/var/lib/kubelet/plugins/gpu.example.com/dra.sock")
    return await plugin.get_info(pluginregistration.InfoRequest())


def _prepared_devices() -> tuple[PreparedDevice, ...]:
    return (
        PreparedDevice(
            requests=("gpus", "gpus/first"),
            pool=POOL,
            device="gpu-0",
            cdi_ids=("example.com/gpu=gpu-0", "example.com/gpu=all"),
        ),
        PreparedDevice(pool=POOL, device="gpu-1", share_id="share-1"),
    )


def report_again(data: bytes) -> bytes:
    """Decode a report message of an earlier release and encode it again."""
    return b"".join(encode_report(decode_report(agent_v1.Report().parse(data))))


def status_again(data: bytes) -> bytes:
    """Decode a status message of an earlier release and encode it again."""
    return encode_status(decode_status(agent_v1.StatusReply().parse(data)))


# --- requests of drivers, and answers ----------------------------------------------------------------------

GIVEN: Final = {3: TEXT, 9: {}}
"""A verdict whose texts are the values that this module gives, but for the line made of them."""
VERDICT: Final = {3: TEXT, 4: TEXT, 5: TEXT, 6: TEXT, 9: {}}
ANSWERS: Final = {1: {2: GIVEN}}
SHAPES: Final[Mapping[str, Mapping[int, Any]]] = {
    "SyncDevices": {},
    "CheckClaims": ANSWERS,
    "Classify": {1: VERDICT},
    "ReportPrepare": ANSWERS,
}
"""Fields of each reply that hold a message or a text for people."""

CLAIM: Final = {
    1: "team-a",
    2: "gpus",
    3: "uid-a",
    4: [{1: "gpus", 2: POOL, 3: "gpu-0"}, {1: "gpus/first", 2: POOL, 3: "gpu-1", 4: "share-1"}],
    5: "v1.2",
}
OTHERS: Final = [CLAIM, *({1: "team-a", 2: name, 3: f"uid-{name}"} for name in "bcde")]
EVIDENCE: Final[Mapping[str, Any]] = {
    "errno": {1: {1: 28, 2: 2, 3: "/var/run/cdi/x.json", 4: "No space left on device"}},
    "errno.bare": {1: {1: 5}},
    "nvml": {2: {1: 15, 2: "gpu-0"}},
    "grpc": {3: {1: 14, 2: "connection refused"}},
    "http": {4: {1: 409, 2: "Conflict", 3: "the object has been modified", 4: 1}},
    "http.other": {4: {1: 503}},
    "late": {5: {1: "context.DeadlineExceeded", 2: 6, 3: "no lock"}},
    "late.bare": {5: {}},
    "undecoded": {6: {1: "strict decoding error", 2: "unknown field: shred"}},
    "undecoded.bare": {6: {}},
    "driver": {7: {1: 3, 2: "fpga.bank_locked", 3: "bank 3 is locked", 4: "more", 5: "gpu-1", 6: 2.5}},
    "driver.bare": {7: {1: 1}},
    "driver.unknown": {7: {1: 0, 3: "device or resource busy"}},
    "text": {8: "no space left on device"},
}
DEVICES: Final = [
    {1: "cpus-0", 2: "p", 3: 20, 4: {1: "0-3,8", 2: 0, 3: 1}},
    {1: "cpus-1", 4: {1: "4", 4: 1}},
    {1: "pages-0", 5: {1: "2Mi", 2: 512, 3: 1}},
    {1: "mem-0", 6: {1: "64Gi", 2: 1}},
    {1: "gpu-0", 7: {1: "0000:3b:00.0"}},
    {1: "gpu-1", 7: {2: "MIG-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", 3: 1, 4: 0}},
    {1: "nic-0", 8: {1: "0000:5e:00.1", 2: "mlx5_core"}},
]
REQUESTS: Final[Mapping[str, tuple[str, Mapping[int, Any]]]] = {
    "sync": ("SyncDevices", {1: DEVICES}),
    "sync.none": ("SyncDevices", {}),
    "check": ("CheckClaims", {1: OTHERS}),
    **{f"classify.{name}": ("Classify", {1: CLAIM, 2: [evidence]}) for name, evidence in EVIDENCE.items()},
    "classify.several": ("Classify", {2: [EVIDENCE["text"], EVIDENCE["errno"], EVIDENCE["grpc"]]}),
    "prepared": (
        "ReportPrepare",
        {
            1: 1,
            2: [
                {1: claim, 2: list(EVIDENCE.values()) if claim is CLAIM else [], 3: int(claim is CLAIM)}
                for claim in OTHERS
            ],
        },
    ),
    "unprepared": ("ReportPrepare", {1: 2, 2: [{1: claim, 3: 1} for claim in OTHERS]}),
}
REFUSED: Final[Mapping[str, tuple[str, Mapping[int, Any] | bytes]]] = {
    "no message": ("SyncDevices", b"\x0a\x05ab"),
    "too many devices": ("SyncDevices", {1: [{}] * 4097}),
    "no part": ("SyncDevices", {1: [{1: "x"}]}),
    "long name": ("SyncDevices", {1: [{1: "x" * 64, 4: {1: "0"}}]}),
    "lease": ("SyncDevices", {1: [{1: "x", 3: 86_400, 4: {1: "0"}}]}),
    "too many claims": ("CheckClaims", {1: [{3: "x"}] * 257}),
    "a claim twice": ("CheckClaims", {1: [CLAIM, CLAIM]}),
    "no uid": ("CheckClaims", {1: [{1: "a"}]}),
    "not printable": ("CheckClaims", {1: [{2: "a\nb", 3: "u"}]}),
    "no evidence": ("Classify", {1: CLAIM}),
    "too much evidence": ("Classify", {2: [EVIDENCE["text"]] * 17}),
    "errno": ("Classify", {2: [{1: {1: 4096}}]}),
    "nvml": ("Classify", {2: [{2: {1: 0}}]}),
    "grpc": ("Classify", {2: [{3: {1: 17}}]}),
    "http": ("Classify", {2: [{4: {1: 399}}]}),
    "long text": ("Classify", {2: [{8: "x" * 4097}]}),
    "long summary": ("Classify", {2: [{7: {1: 1, 3: "x" * 201}}]}),
    "retry": ("Classify", {2: [{7: {1: 1, 6: 86_401.0}}]}),
    "no step": ("ReportPrepare", {2: [{1: CLAIM}]}),
    "step": ("ReportPrepare", {1: 9, 2: [{1: CLAIM}]}),
    "no claim": ("ReportPrepare", {1: 1, 2: [{3: 1}]}),
    "evidence of success": ("ReportPrepare", {1: 1, 2: [{1: CLAIM, 2: [EVIDENCE["text"]]}]}),
}
"""Requests that cannot be used; each is answered with a gRPC status."""


class FixedLink:
    """An agent that answers every driver alike, and records what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def sync(self, rows: Any) -> SyncDevicesResult:
        self.given.append(rows)
        return SyncDevicesResult(len(rows), bool(rows))

    def check_claims(self, claims: Any) -> list[PrepareVerdict | None]:
        self.given.append(claims)
        return list(values.verdicts())

    def classify(self, claim: Claim, evidence: Any) -> PrepareVerdict:
        self.given.append([claim, evidence])
        return classify_evidence(evidence, PrepareContext(claim))

    def recorded_failures(self, uids: Any) -> list[PrepareVerdict]:
        return []

    def failures_at_other_drivers(self, claim: ClaimRef) -> list[OtherDriverFailure]:
        return []

    def record_prepares(self, ended: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        self.given.append(["prepared", *ended])
        return list(values.verdicts())

    def record_unprepares(self, ended: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        self.given.append(["unprepared", *ended])
        return list(values.verdicts())


def replies() -> dict[str, Any]:
    """Return what each request was understood as, and the fields of its reply."""
    found = {}
    for name, (method, request) in REQUESTS.items():
        link = FixedLink()
        data = METHODS[method](pack(request), DRIVER, lambda link=link: link)
        found[name] = {"request": plain(link.given), "reply": unpack(data, SHAPES[method])}
    return found


def refusals() -> dict[str, str]:
    """Return the gRPC status that each request is refused with."""
    found = {}
    for name, (method, request) in REFUSED.items():
        data = request if isinstance(request, bytes) else pack(request)
        try:
            METHODS[method](data, DRIVER, FixedLink)
        except Exception as error:
            found[name] = str(getattr(getattr(error, "status", None), "name", type(error).__name__))
        else:
            found[name] = "OK"
    return found


def lines() -> list[Any]:
    """Return the error line of each claim that failed in one call of the kubelet."""
    failed = [verdict for verdict in values.verdicts() if verdict is not None]
    return [{TEXT: line} for line in kubelet_texts(failed)]

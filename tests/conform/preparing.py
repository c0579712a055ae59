"""Good DRA driver that also prepares claims, from which drivers with faults in that derive.

It keeps nothing but its claims: an answer follows from the claim, and each claim has one CDI file. A command
``{root}/act WORD`` calls its method of that name, such as ``restart``, while it serves.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from wire.google import message_class

from conform.actions import Actions
from conform.lists import field
from conform.servers import DRA, Driver

CLAIMS: Final = ("--prepare", "--claims", "{root}/claims.json", "--cdi-dir", "{root}/cdi")
"""Flags for the driver's claims."""
RESTART: Final = ("--restart-command", "{root}/act restart")
DEVICE: Final = ("--device-command", "{root}/act")
MADE: Final = ("--device", "node-a/gpu-0", "--claim-command", "{root}/act")
"""Flags for a claim that the session makes."""
KIND: Final = "example.com/gpu"


class ClaimError(Exception):
    """Error of one claim."""


class Asked(NamedTuple):
    """Claim of a request."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Answered(NamedTuple):
    """Device of an answer."""

    request: str
    pool: str
    name: str
    cdi_ids: Sequence[str]

    def __bytes__(self) -> bytes:
        ids = b"".join(field(4, cdi_id.encode()) for cdi_id in self.cdi_ids)
        texts = (self.request, self.pool, self.name)
        return b"".join(field(index, text.encode()) for index, text in enumerate(texts, 1)) + ids


def claim_object(name: str, *devices: tuple[str, str], uid: str = "") -> dict[str, Any]:
    """Return a ResourceClaim with these allocated devices, each with its request."""
    results = [
        {"request": request, "driver": Driver.name, "pool": "node-a", "device": device}
        for request, device in devices
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "default", "name": name, "uid": uid or f"uid-{name}"},
        "status": {"allocation": {"devices": {"results": results}}},
    }


class PreparingDriver(Driver):
    """Driver that prepares the claims of its API server: two, and those that a session makes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.cdi = root / "cdi"
        self.claim_lock = threading.Lock()
        """Lock for drivers with faults."""
        self._file_lock = threading.Lock()
        objects = [
            claim_object("train", ("gpus", "gpu-0"), ("gpus", "gpu-1")),
            claim_object("infer", ("one/large", "gpu-1")),
        ]
        self.claims = {obj["metadata"]["name"]: obj for obj in objects}
        """Claims of the API server, by name."""
        self.removed = False
        """Whether the devices are removed."""
        (root / "claims.json").write_text(json.dumps({"kind": "List", "items": objects}))
        names = ("restart", "remove", "restore", "create", "delete")
        self._actions = Actions(root, {name: getattr(self, name) for name in names})

    # --- answers ----------------------------------------------------------------------------------------

    def prepare_claims(self, claims: Sequence[Asked]) -> Iterable[tuple[str, Sequence[Answered] | str]]:
        """Yield each claim's UID with its devices or its error, which names the other claims that failed."""
        found: dict[Asked, Sequence[Answered] | str] = {}
        for claim in claims:
            try:
                found[claim] = self.prepare_claim(claim)
            except ClaimError as error:
                found[claim] = str(error)
        for claim, answer in found.items():
            others = [str(other) for other in claims if other != claim and isinstance(found[other], str)]
            yield claim.uid, self.name_others(answer, others) if isinstance(answer, str) else answer

    def name_others(self, error: str, others: Sequence[str]) -> str:
        """Return the error of a claim with the names of others."""
        return f"{error}; also failed: {', '.join(others)}" if others else error

    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        """Prepare a claim. Raises ClaimError."""
        found = self.find_claim(claim)
        answer = [
            Answered(
                self.request_name(result["request"]),
                result["pool"],
                result["device"],
                self.ids(claim, result["device"]),
            )
            for result in found["status"]["allocation"]["devices"]["results"]
        ]
        self.write_file(claim, [cdi_id for device in answer for cdi_id in device.cdi_ids])
        return answer

    def request_name(self, request: str) -> str:
        """Return the name of a request for the answer: without its subrequest."""
        return request.partition("/")[0]

    def find_claim(self, claim: Asked) -> Any:
        """Return a claim of the API server. Raises ClaimError."""
        found = self.claims.get(claim.name)
        if found is None:
            raise ClaimError(f"claim {claim} does not exist")
        if found["metadata"]["uid"] != claim.uid:
            raise ClaimError(f"claim {claim} was created again")
        return found

    def ids(self, claim: Asked, device: str) -> Sequence[str]:
        """Return the CDI ids of a device."""
        return [f"{KIND}={claim.uid}-{device}"]

    def cdi_file(self, claim: Asked) -> Path:
        """Return the path of a claim's CDI file."""
        return self.cdi / f"gpu_{claim.uid}.json"

    def write_file(self, claim: Asked, ids: Iterable[str]) -> None:
        """Write the CDI file of a claim."""
        with self._file_lock:
            self.cdi.mkdir(exist_ok=True)
            new = self.cdi / f".{claim.uid}"
            new.write_text(json.dumps(self.cdi_document(dict.fromkeys(ids))))
            new.rename(self.cdi_file(claim))

    def cdi_document(self, ids: Iterable[str]) -> dict[str, Any]:
        """Return the content of a CDI file."""
        devices = [
            {"name": cdi_id.partition("=")[2], "containerEdits": {"env": [f"GPU={cdi_id}"]}} for cdi_id in ids
        ]
        return {"cdiVersion": "0.6.0", "kind": KIND, "devices": devices}

    def unprepare_claim(self, claim: Asked) -> None:
        """Unprepare a claim. Raises ClaimError."""
        self.cdi_file(claim).unlink(missing_ok=True)

    # --- calls of tests ---------------------------------------------------------------------------------

    def restart(self, text: str) -> None:
        """Stop and serve again, without what is in memory."""
        self.stop_serving()
        self.forget()
        self.ended = threading.Event()
        super().serve()

    def forget(self) -> None:
        """Lose what is in memory."""

    def remove(self, text: str) -> None:
        """Lose the devices."""
        self.removed = True

    def restore(self, text: str) -> None:
        """Get the devices back."""
        self.removed = False

    def create(self, text: str) -> None:
        """Create a claim in the API server."""
        made = json.loads(text)
        self.claims[made["metadata"]["name"]] = made

    def delete(self, text: str) -> None:
        """Delete a claim from the API server."""
        del self.claims[json.loads(text)["metadata"]["name"]]

    # --- sockets ----------------------------------------------------------------------------------------

    def serve(self) -> None:
        super().serve()
        self._actions.__enter__()

    def stop(self) -> None:
        self._actions.__exit__(None, None, None)
        self.stop_serving()

    def stop_serving(self) -> None:
        """Stop the servers, as the end of the process does."""
        super().stop()
        self._servers.clear()

    def plugin_methods(self, version: str) -> Mapping[str, Callable[[bytes], bytes]]:
        request = message_class(f"{DRA}.{version}", "NodePrepareResourcesRequest")

        def claims_of(data: bytes) -> list[Asked]:
            claims = request.FromString(data).claims
            return [Asked(claim.namespace, claim.name, claim.uid) for claim in claims]

        def prepare(data: bytes) -> bytes:
            self.prepare(version)
            claims = claims_of(data)
            return b"".join(answer(*pair) for pair in self.prepare_claims(claims)) if claims else b""

        def unprepare(data: bytes) -> bytes:
            return b"".join(map(self._unprepare, claims_of(data)))

        return {"NodePrepareResources": prepare, "NodeUnprepareResources": unprepare}

    def _unprepare(self, claim: Asked) -> bytes:
        try:
            self.unprepare_claim(claim)
        except ClaimError as error:
            return field(1, field(1, claim.uid.encode()) + field(2, field(1, str(error).encode())))
        return field(1, field(1, claim.uid.encode()) + field(2, b""))


def answer(uid: str, content: Sequence[Answered] | str) -> bytes:
    """Encode the answer for a claim: its devices, or its error."""
    if isinstance(content, str):
        value = field(2, content.encode())
    else:
        value = b"".join(field(1, bytes(device)) for device in content)
    return field(1, field(1, uid.encode()) + field(2, value))

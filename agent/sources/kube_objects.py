"""Objects in a file, as kubectl wrote them: a List, one object, or what the API server's list looks like raw;
as JSON or as YAML, there of several documents, too.

The reader of YAML is imported when there is some. What the objects say is in
agent.devices.consumers.kube_objects.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.errors import PermissionDenied, UsageError
from agent.model.claim_sources import Origin, Provenance, SourceAnswer
from agent.model.objects import Object
from agent.model.time import Instant
from agent.system.read_file import ReadError, WholeFile, read_bounded

FILE_BYTES: Final = 256 << 20
"""5,000 pods with all that servers and controllers note in them are about 100 MiB."""
POD: Final = "Pod"
CLAIM: Final = "ResourceClaim"
_ORIGINS: Final = {POD: Origin.PODS_FILE, CLAIM: Origin.CLAIMS_FILE}
_GROUPS: Final = {POD: "v1", CLAIM: "resource.k8s.io/"}
_COMMANDS: Final = {POD: "kubectl get pods -A -o json", CLAIM: "kubectl get resourceclaims -A -o json"}


def read_objects(path: Path, kind: str, now: Instant) -> SourceAnswer[Object]:
    """The objects of one kind in a file: :func:`read_file`, then :func:`objects_of`."""
    return objects_of(path, read_file(path), kind, now)


def read_file(path: Path) -> WholeFile:
    """All that is in the file. Blocks on the disk alone.

    Raises:
        UsageError: There is no such file, or none that can be read.
        PermissionDenied: It may not be read.
    """
    try:
        return read_bounded(path, FILE_BYTES)
    except ReadError as error:
        raise (PermissionDenied if error.is_forbidden else UsageError)(str(error)) from None


def objects_of(path: Path, file: WholeFile, kind: str, now: Instant) -> SourceAnswer[Object]:
    """The objects of one kind; others are passed over. Of YAML, 1,000 pods take a second.

    Args:
        path: Where it was read.
        file: What was there. It is taken to be as old as it is.
        kind: :data:`POD` or :data:`CLAIM`.
        now: When it was read.

    Raises:
        UsageError: It is neither JSON nor YAML, or holds other things but none of these.
    """
    try:
        found, others = parse_objects(file.data, kind)
    except ValueError as error:
        raise UsageError(f"{path}: {error}; write it with: {_COMMANDS[kind]}") from None
    if others and not found:
        held = ", ".join(f"{count} {other}" for other, count in sorted(others.items()))
        raise UsageError(f"{path}: no {kind}, but {held}; write it with: {_COMMANDS[kind]}")
    return SourceAnswer(Provenance(_ORIGINS[kind], now, file.written_s), found)


def parse_objects(data: bytes, kind: str) -> tuple[tuple[Object, ...], Mapping[str, int]]:
    """The objects of that kind, and how many there are of others.

    Raises:
        ValueError: It is neither JSON nor YAML, or what it holds are no objects.
    """
    found: list[Object] = []
    others: Counter[str] = Counter()
    for document in _documents(data.removeprefix(b"\xef\xbb\xbf")):
        for obj, said in _items(document):
            if said == kind:
                found.append(obj)
            else:
                others[said[:64] or "without a kind"] += 1
    return tuple(found), others


def _documents(text: bytes) -> Sequence[object]:
    """One of JSON, those of YAML that are not empty. YAML may begin as JSON does, but not kubectl's."""
    if text.lstrip()[:1] not in {b"{", b"["}:
        from agent.sources.yaml_text import parse_yaml

        if documents := [one for one in parse_yaml(text) if one is not None]:
            return documents
        raise ValueError("is empty")
    try:
        return [msgspec.json.decode(text)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("is no JSON: brackets within brackets without end") from None


def _items(document: object) -> Iterable[tuple[Object, str]]:
    """The objects, each with its kind. In a raw list that stands in the list's own."""
    items: object = document
    of = ""
    if isinstance(document, dict):
        said = str(document.get("kind"))
        if not said.endswith("List"):
            items = [document]
        else:
            items, of = document.get("items"), said.removesuffix("List")
            items = [] if items is None else items
    if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
        raise ValueError("holds no list of objects")
    for one in items:
        yield one, _kind(one, of)


def _kind(obj: Object, of: str) -> str:
    """What an object is; one of another API group that has the same name is not it."""
    said, version = obj.get("kind", of), obj.get("apiVersion")
    kind = said if isinstance(said, str) else ""
    group = _GROUPS.get(kind)
    if group is None or version is None or str(version).startswith(group):
        return kind
    return f"{kind} of {version}"

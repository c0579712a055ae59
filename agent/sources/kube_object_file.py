"""Reader of pods and ResourceClaims in a file that kubectl wrote, in JSON or YAML.

A file holds a List, one object, or a raw list of the API server; YAML may have several documents.
agent.devices.consumers.kube_objects interprets the objects.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.errors import PermissionDeniedError, UsageError
from agent.model.claim_sources import Origin, Provenance, SourceAnswer
from agent.model.json_values import JsonObject
from agent.model.time import Instant
from agent.system.files import FileContent, ReadError, read_bounded

FILE_BYTES: Final = 256 << 20
"""Largest accepted file [bytes]: 5,000 complete pod objects are about 100 MiB."""
POD: Final = "Pod"
CLAIM: Final = "ResourceClaim"
_ORIGINS: Final = {POD: Origin.PODS_FILE, CLAIM: Origin.CLAIMS_FILE}
_GROUPS: Final = {POD: "v1", CLAIM: "resource.k8s.io/"}
_COMMANDS: Final = {POD: "kubectl get pods -A -o json", CLAIM: "kubectl get resourceclaims -A -o json"}


def read_objects(path: Path, kind: str, now: Instant) -> SourceAnswer[JsonObject]:
    """Read and parse the objects of one kind in a file, with the errors of :func:`parse_object_file`."""
    return parse_object_file(path, read_object_file(path), kind, now)


def read_object_file(path: Path) -> FileContent:
    """Return the whole content of a file, at most FILE_BYTES. Blocks on the disk.

    Raises:
        UsageError: The file is absent or unreadable.
        PermissionDeniedError: This user may not read the file.
    """
    try:
        return read_bounded(path, FILE_BYTES)
    except ReadError as error:
        raise (PermissionDeniedError if error.is_forbidden else UsageError)(str(error)) from None


class ObjectFileContent(NamedTuple):
    """Objects that a file from kubectl holds: those of the expected kind, and the others."""

    answer: SourceAnswer[JsonObject]
    others: tuple[tuple[JsonObject, str], ...]
    """Objects of all other kinds in the file, each with its kind."""


def parse_object_file(path: Path, content: FileContent, kind: str, now: Instant) -> SourceAnswer[JsonObject]:
    """Parse the Kubernetes objects of one kind in a file; objects of other kinds are ignored.

    Arguments and errors as :func:`parse_mixed_object_file`.
    """
    return parse_mixed_object_file(path, content, kind, now).answer


def parse_mixed_object_file(path: Path, content: FileContent, kind: str, now: Instant) -> ObjectFileContent:
    """Parse the objects in a file. 1,000 pods in YAML take a second.

    Args:
        path: Path of the file.
        content: Content of the file; its modification time is the age of the objects.
        kind: :data:`POD` or :data:`CLAIM`.
        now: Time of the read.

    Raises:
        UsageError: The file is neither JSON nor YAML, or holds only objects of other kinds.
    """
    try:
        objects = tuple(_typed_objects(content.data))
    except ValueError as error:
        raise UsageError(f"file {path}: {error}; create it with: {_COMMANDS[kind]}") from None
    found, counts = _select(objects, kind)
    if counts and not found:
        held = ", ".join(f"{count} {other}" for other, count in sorted(counts.items()))
        raise UsageError(f"file {path}: holds no {kind}, but {held}; create it with: {_COMMANDS[kind]}")
    others = tuple(one for one in objects if one[1] != kind)
    return ObjectFileContent(SourceAnswer(Provenance(_ORIGINS[kind], now, content.written_s), found), others)


def parse_objects(data: bytes, kind: str) -> tuple[tuple[JsonObject, ...], Mapping[str, int]]:
    """Return the objects of `kind`, and the number of objects of each other kind.

    Raises:
        ValueError: The data is neither JSON nor YAML, or holds no objects.
    """
    return _select(_typed_objects(data), kind)


def _typed_objects(data: bytes) -> Iterator[tuple[JsonObject, str]]:
    """Yield the Kubernetes objects in a JSON or YAML text, each with its kind."""
    for document in parse_documents(data):
        yield from _items(document)


def _select(
    objects: Iterable[tuple[JsonObject, str]], kind: str
) -> tuple[tuple[JsonObject, ...], Mapping[str, int]]:
    found: list[JsonObject] = []
    others: Counter[str] = Counter()
    for obj, obj_kind in objects:
        if obj_kind == kind:
            found.append(obj)
        else:
            others[obj_kind[:64] or "without a kind"] += 1
    return tuple(found), others


def parse_all_objects(data: bytes) -> tuple[JsonObject, ...]:
    """Return the Kubernetes objects of all kinds in a JSON or YAML text.

    Raises ValueError like :func:`parse_objects`.
    """
    return tuple({"kind": kind, **obj} for obj, kind in _typed_objects(data))


def parse_documents(data: bytes) -> Sequence[object]:
    """Parse a text as one JSON document, or as YAML documents; empty documents are left out.

    Raises:
        ValueError: The data is neither JSON nor YAML, or holds no document.
    """
    text = data.removeprefix(b"\xef\xbb\xbf")
    if text.lstrip()[:1] not in {b"{", b"["}:  # kubectl's YAML never begins so
        from agent.sources.yaml_text import parse_yaml

        if documents := [document for document in parse_yaml(text) if document is not None]:
            return documents
        raise ValueError("is empty")
    try:
        return [msgspec.json.decode(text)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("is not readable JSON: objects are nested too deeply") from None


def _items(document: object) -> Iterable[tuple[JsonObject, str]]:
    """Yield the Kubernetes objects of a document (one object, or a list), each with its kind.

    Objects of a raw list take the kind from the list.
    """
    items: object = document
    default = ""
    if isinstance(document, dict):
        kind = str(document.get("kind"))
        if not kind.endswith("List"):
            items = [document]
        else:
            items, default = document.get("items"), kind.removesuffix("List")
            items = [] if items is None else items
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("holds neither an object nor a list of objects")
    for item in items:
        yield item, _kind(item, default)


def _kind(obj: JsonObject, default: str) -> str:
    """Return the kind of a Kubernetes object.

    ``Pod of example.com/v1`` if the kind belongs to another API group than expected.

    Args:
        default: Kind of an object that names none.
    """
    kind, version = obj.get("kind", default), obj.get("apiVersion")
    kind = kind if isinstance(kind, str) else ""
    group = _GROUPS.get(kind)
    if group is None or version is None or str(version).startswith(group):
        return kind
    return f"{kind} of {version}"

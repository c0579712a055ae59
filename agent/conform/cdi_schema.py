"""Validator of CDI files: fields, types, names and versions as container runtimes require them.

Format: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Never

from agent.model.json_values import format_short, type_in_words

VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Released CDI versions that runtimes accept, the oldest first."""
HOOKS: Final = frozenset(
    {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
)
NODE_TYPES: Final = frozenset({"", "b", "c", "u", "p"})

_LETTER: Final = r"[A-Za-z]"
VENDOR: Final = re.compile(rf"{_LETTER}(?:[-\w.]*[A-Za-z0-9])?", re.ASCII)
CLASS: Final = VENDOR
NAME: Final = re.compile(r"[A-Za-z0-9](?:[-\w.:]*[A-Za-z0-9])?", re.ASCII)
_PERMISSIONS: Final = re.compile(r"[rwm]*|none")

Check = Callable[[object, str], None]
"""Validator of a value at a place in a CDI file; raises ValueError that begins with the place."""


def cdi_file_error(document: object) -> str:
    """Return why runtimes refuse a CDI file with this content; empty: the file is valid."""
    try:
        _object(document, "", _FILE, required=("cdiVersion", "kind", "devices"))
        assert isinstance(document, Mapping)
        _check_version(document)
    except ValueError as error:
        return str(error)
    return ""


def cdi_id_error(cdi_id: str) -> str:
    """Return why a text is not a CDI id ``<vendor>/<class>=<name>``; empty: it is one."""
    kind, equals, name = cdi_id.partition("=")
    if not equals:
        return "has no ="
    if not _is_kind(kind):
        return f"{format_short(kind)} is not <vendor>/<class>"
    return "" if NAME.fullmatch(name) else f"{format_short(name)} is not a device name"


def cdi_ids(document: object) -> frozenset[str]:
    """Return the CDI ids that a file defines, as far as its content is readable."""
    if not isinstance(document, Mapping):
        return frozenset()
    devices = document.get("devices")
    return frozenset(
        f"{document.get('kind')}={device.get('name')}"
        for device in (devices if isinstance(devices, list) else ())
        if isinstance(device, Mapping)
    )


# --- values ------------------------------------------------------------------------------------------------


def _fail(place: str, problem: str) -> Never:
    raise ValueError(f"{place}: {problem}" if place else problem)


def _object(value: object, place: str, fields: Mapping[str, Check], required: tuple[str, ...] = ()) -> None:
    if not isinstance(value, Mapping):
        _fail(place, f"is {type_in_words(value)}, not an object")
    for key in required:
        if value.get(key) in (None, ""):
            _fail(f"{place}.{key}".lstrip("."), "is missing")
    for key, content in value.items():
        at = f"{place}.{key}".lstrip(".")
        if key not in fields:
            _fail(at, "is not a field of CDI")
        if content is not None:
            fields[key](content, at)


def _list_of(check: Check) -> Check:
    def check_list(value: object, place: str) -> None:
        if not isinstance(value, list):
            _fail(place, f"is {type_in_words(value)}, not a list")
        for number, item in enumerate(value):
            check(item, f"{place}[{number}]")

    return check_list


def _text(value: object, place: str) -> None:
    if not isinstance(value, str):
        _fail(place, f"is {type_in_words(value)}, not text")


def _text_of(is_valid: Callable[[str], object], noun: str) -> Check:
    def check_text(value: object, place: str) -> None:
        _text(value, place)
        if not is_valid(str(value)):
            _fail(place, f"{format_short(value)} is not {noun}")

    return check_text


def _number(value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= (1 << 32) - 1:
        _fail(place, f"{format_short(value)} is not a whole number from 0 to 4,294,967,295")


def _truth_value(value: object, place: str) -> None:
    if not isinstance(value, bool):
        _fail(place, f"is {type_in_words(value)}, not true or false")


def _annotations(value: object, place: str) -> None:
    if not isinstance(value, Mapping):
        _fail(place, f"is {type_in_words(value)}, not an object")
    for key, text in value.items():
        _text(text, f"{place}.{key}")


def _of_object(fields: Mapping[str, Check], *required: str) -> Check:
    return lambda value, place: _object(value, place, fields, required)


def _is_kind(text: str) -> bool:
    vendor, slash, class_ = text.partition("/")
    return bool(slash and VENDOR.fullmatch(vendor) and CLASS.fullmatch(class_))


def _device(value: object, place: str) -> None:
    _object(value, place, _DEVICE, ("name", "containerEdits"))
    assert isinstance(value, Mapping)
    if not any(value["containerEdits"].values()):
        _fail(f"{place}.containerEdits", "is empty")


def _devices(value: object, place: str) -> None:
    _list_of(_device)(value, place)
    assert isinstance(value, list)
    if not value:
        _fail(place, "is empty")
    for name, number in Counter(device["name"] for device in value).items():
        if number > 1:
            _fail(place, f"has {number} devices with the name {format_short(name)}")


_PATH: Final = _text_of(bool, "a path")
_ENV: Final = _list_of(_text_of(lambda text: text.find("=") > 0, "<variable>=<value>"))
_NODE: Final = {
    "path": _PATH,
    "hostPath": _text,
    "type": _text_of(NODE_TYPES.__contains__, "a type of device file"),
    "major": _number,
    "minor": _number,
    "fileMode": _number,
    "permissions": _text_of(_PERMISSIONS.fullmatch, "a combination of r, w and m"),
    "uid": _number,
    "gid": _number,
}
_MOUNT: Final = {"hostPath": _PATH, "containerPath": _PATH, "options": _list_of(_text), "type": _text}
_HOOK: Final = {
    "hookName": _text_of(HOOKS.__contains__, "a hook of OCI"),
    "path": _PATH,
    "args": _list_of(_text),
    "env": _ENV,
    "timeout": _number,
}
_NET_DEVICE: Final = {"hostInterfaceName": _text, "name": _text}
_RDT: Final = {
    "closID": _text,
    "l3CacheSchema": _text,
    "memBwSchema": _text,
    "schemata": _list_of(_text),
    "enableMonitoring": _truth_value,
    "enableCMT": _truth_value,
    "enableMBM": _truth_value,
}
_EDITS: Final = {
    "env": _ENV,
    "deviceNodes": _list_of(_of_object(_NODE, "path")),
    "netDevices": _list_of(_of_object(_NET_DEVICE, "hostInterfaceName", "name")),
    "hooks": _list_of(_of_object(_HOOK, "hookName", "path")),
    "mounts": _list_of(_of_object(_MOUNT, "hostPath", "containerPath")),
    "intelRdt": _of_object(_RDT),
    "additionalGids": _list_of(_number),
}
_DEVICE: Final = {
    "name": _text_of(NAME.fullmatch, "a device name"),
    "annotations": _annotations,
    "containerEdits": _of_object(_EDITS),
}
_FILE: Final = {
    "cdiVersion": _text_of(VERSIONS.__contains__, f"a CDI version: {', '.join(VERSIONS)}"),
    "kind": _text_of(_is_kind, "<vendor>/<class>"),
    "annotations": _annotations,
    "devices": _devices,
    "containerEdits": _of_object(_EDITS),
}


# --- versions ----------------------------------------------------------------------------------------------


def _check_version(document: Mapping[str, object]) -> None:
    """Raise ValueError if a CDI file uses a feature that its CDI version does not have."""
    version = str(document["cdiVersion"])
    for needed, feature in _features(document):
        if VERSIONS.index(needed) > VERSIONS.index(version):
            _fail("cdiVersion", f"{version}, but {feature} needs {needed}")


def _features(document: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (CDI version, feature) for each feature of a valid CDI file that needs at least this version."""
    devices: list[Mapping[str, Mapping[str, list[Mapping[str, object]]]]] = document["devices"]  # type: ignore[assignment]
    if "." in str(document["kind"]).partition("/")[2]:
        yield "0.6.0", "a dot in the class"
    if document.get("annotations") or any(device.get("annotations") for device in devices):
        yield "0.6.0", "annotations"
    if any(not re.match(_LETTER, str(device["name"])) for device in devices):
        yield "0.5.0", "a device name that begins with a digit"
    edits = [device["containerEdits"] for device in devices]
    edits += [document["containerEdits"]] if document.get("containerEdits") else []  # type: ignore[list-item]
    for edit in edits:
        if any(node.get("hostPath") for node in edit.get("deviceNodes") or ()):
            yield "0.5.0", "hostPath of a device file"
        if any(mount.get("type") for mount in edit.get("mounts") or ()):
            yield "0.4.0", "type of a mount"
        if edit.get("intelRdt") or edit.get("additionalGids"):
            yield "0.7.0", "intelRdt or additionalGids"
        rdt: Mapping[str, object] = edit.get("intelRdt") or {}  # type: ignore[assignment]
        if edit.get("netDevices") or rdt.get("schemata") or rdt.get("enableMonitoring"):
            yield "1.1.0", "netDevices, or schemata or enableMonitoring of intelRdt,"

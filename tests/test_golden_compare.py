"""The comparison of golden files: what it finds, and what it leaves free."""

from typing import Any

import pytest
from golden.compare import VOLATILE, differences, mask_keys, without_prose
from golden.pack import TEXT, pack, unpack
from golden.plain import plain

GOLDEN: dict[str, Any] = {
    "code": "gpu.xid.79",
    "count": 3,
    "at": None,
    "message": "gpu.xid.79: off the bus",
    "evidence": ["one", "two"],
    "devices": [{"name": "gpu-0", "ok": True}],
}


def test_reworded_texts_are_no_difference() -> None:
    today = {**GOLDEN, "message": "gpu.xid.79: the GPU has left the bus", "evidence": ["1", "2"]}
    assert list(differences(GOLDEN, today)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("code", "gpu.xid.80"),
        ("count", 4),
        ("count", 3.0),
        ("count", "3"),
        ("at", "2026-01-01T00:00:00Z"),
        ("message", ""),
        ("message", None),
        ("message", "gpu.xid.80: off the bus"),
        ("message", "off the bus"),
        ("evidence", ["one"]),
        ("evidence", ["one", ""]),
        ("devices", [{"ok": True, "name": "gpu-0"}]),
        ("devices", [{"name": "gpu-0"}]),
        ("devices", [{"name": "gpu-0", "ok": 1}]),
        ("devices", []),
    ],
)
def test_any_other_change_is_a_difference(key: str, value: Any) -> None:
    assert len(list(differences(GOLDEN, {**GOLDEN, key: value}))) >= 1


def test_new_key_is_a_difference() -> None:
    assert list(differences(GOLDEN, {**GOLDEN, "more": 1})) != []


def test_head_of_a_prepare_error_is_compared() -> None:
    golden = {"text": "[class=transient code=cdi.write retry=later] no room; team-a/c (transient cdi.write)."}
    assert list(differences(golden, {"text": golden["text"].replace("no room", "disk full")})) == []
    assert list(differences(golden, {"text": golden["text"].replace("retry=later", "retry=never")})) != []
    assert list(differences(golden, {"text": golden["text"].replace("cdi.write).", "cdi.read).")})) != []


def test_reduced_value_compares_as_the_whole_one() -> None:
    assert list(differences(without_prose(GOLDEN), GOLDEN)) == []
    assert without_prose(GOLDEN)["message"] == "<text> gpu.xid.79: "
    assert without_prose(GOLDEN)["evidence"] == ["<text>", "<text>"]


def test_masked_value_keeps_whether_there_is_one() -> None:
    assert mask_keys([{"at": 1, "in": {"at": None}}], frozenset({"at"})) == [
        {"at": VOLATILE, "in": {"at": None}}
    ]


def test_packed_message_is_unpacked_by_number() -> None:
    message = {1: "a", 2: [300, -1], 3: {1: 2.5, 2: "text"}}
    assert unpack(pack(message), {3: {2: TEXT}}) == [
        [1, "a"], [2, 300], [2, (1 << 64) - 1], [3, [[1, 2.5], [2, {TEXT: "text"}]]]
    ]  # fmt: skip


def test_plain_form_of_an_unknown_type_is_refused() -> None:
    assert plain({"b": (1, None), "a": {2}}) == [["a", [2]], ["b", [1, None]]]
    with pytest.raises(TypeError, match="object has no plain form"):
        plain(object())

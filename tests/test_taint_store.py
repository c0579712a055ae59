"""State file of taints: round trip, invalid files, and write errors."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.claim import DeviceRef
from agent.model.health import Effect, Taint, Taints
from agent.store.driver_files import decode_taints, encode_taints, load_taints, save_taints
from agent.store.state_files import StateWriteError, UnusableFile

GPU: Final = DeviceRef("gpu.example.com", "node-1", "gpu-0")
XID: Final = Taint("gpu.example.com/xid", "79", Effect.NO_SCHEDULE, 1_790_000_000)
TAINTS: Final = Taints({GPU: (XID, XID._replace(value="48", effect=Effect.NONE))})

taints = st.builds(
    Taint,
    key=st.text(st.characters(codec="utf-8")),
    value=st.text(st.characters(codec="utf-8")),
    effect=st.sampled_from(Effect),
    added_wall_s=st.integers(0, 253_402_300_799),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "taints.json"


def changed_file(**values: object) -> bytes:
    """Return the file with changed values in its first taint."""
    document = json.loads(encode_taints(TAINTS))
    document["devices"][0]["taints"][0] |= values
    return json.dumps(document).encode()


def double_devices(document: dict[str, Any]) -> None:
    document["devices"] *= 2


def repeat_taint(document: dict[str, Any]) -> None:
    document["devices"][0]["taints"][1]["value"] = "79"


def remove_taints(document: dict[str, Any]) -> None:
    document["devices"][0]["taints"] = []


@given(st.lists(taints, min_size=1, max_size=20, unique_by=lambda taint: (taint.key, taint.value)))
def test_saved_taints_survive_a_round_trip(some: list[Taint]) -> None:
    kept = Taints({GPU: tuple(some), GPU._replace(device="gpu-1"): (XID,)})
    assert decode_taints(encode_taints(kept)) == kept


def test_devices_without_taints_are_left_out() -> None:
    assert decode_taints(encode_taints(Taints({GPU: ()}))) == Taints()


def test_first_start_has_no_taints_and_no_problem(path: Path) -> None:
    assert load_taints(path) == (Taints(), "")


def test_saved_taints_are_loaded_from_a_private_file(path: Path) -> None:
    save_taints(path, TAINTS)
    assert load_taints(path) == (TAINTS, "")
    assert path.stat().st_mode & 0o777 == 0o600


def test_field_of_a_later_release_is_ignored() -> None:
    assert decode_taints(changed_file(until=3)) == TAINTS


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (changed_file(effect="NoFun"), "invalid enum value 'NoFun' - at `$.devices[0].taints[0].effect`"),
        (changed_file(added_wall_s=-1), "expected `int` >= 0 - at `$.devices[0].taints[0].added_wall_s`"),
        (changed_file(added_wall_s=10**12), "expected `int` <= 253402300799"),
        (changed_file(added_wall_s=1.5), "expected `int`, got `float`"),
        (b'{"version": 2}', "state file has format version 2, this agent reads up to 1"),
        (b"", "state file cannot be parsed"),
    ],
)
def test_invalid_file_is_refused_with_place(data: bytes, reason: str) -> None:
    with pytest.raises(UnusableFile) as raised:
        decode_taints(data)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (double_devices, "taint file has device gpu.example.com/node-1/gpu-0 twice"),
        (
            repeat_taint,
            "taint file has 2 taints of device gpu.example.com/node-1/gpu-0, but only 1 with different key "
            "and value",
        ),
        (remove_taints, "expected `array` of length >= 1"),
    ],
)
def test_inconsistent_file_is_refused(change: Any, reason: str) -> None:
    document = json.loads(encode_taints(TAINTS))
    change(document)
    with pytest.raises(UnusableFile) as raised:
        decode_taints(json.dumps(document).encode())
    assert reason in str(raised.value)


def test_corrupt_file_is_set_aside_and_reported(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"{")
    taints, problem = load_taints(path)
    assert taints == Taints()
    assert problem.startswith(f"{path}: state file cannot be parsed: ")
    assert problem.endswith("renamed to taints.json.corrupt-1")
    assert path.with_name("taints.json.corrupt-1").read_bytes() == b"{"


def test_write_error_names_the_path(path: Path) -> None:
    path.parent.write_text("in the way")
    with pytest.raises(StateWriteError, match=f"{path}: .* bytes could not be written: "):
        save_taints(path, TAINTS)

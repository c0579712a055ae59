"""The kubelet's checkpoint of claims is read as the kubelet reads it; a torn one is never half believed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubelet_files import DRIVER, checkpoint, claim, crc32, device, devices, sealed
from kubernetes_wrote import CHECKPOINT, EMPTY_CHECKPOINT

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import DeviceUse, Origin, PreparedClaim
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.sources.kubelet_checkpoint import (
    ATTEMPTS,
    FILE_BYTES,
    PAUSE_S,
    Torn,
    parse_checkpoint,
    read_checkpoint,
)

NOW = Instant(5_000_000_000, 1_700_000_000.0)

# kubelet cm/dra/state/checkpointer_test.go, 1.37.1: what stands in the file, and the sum that it must have
_UID = "067798be-454e-4be4-9047-1aa06aea63f7"
_POD = "139cdb46-f989-4f17-9561-ca10cfb509a6"
_TEST_DRIVER = "test-driver.cdi.k8s.io"


def _upstream(number: int, **changes: Any) -> dict[str, Any]:
    found = {
        "PoolName": "worker-1",
        "DeviceName": f"dev-{number}",
        "ShareID": None,
        "RequestNames": ["test request"],
        "CDIDeviceIDs": ["example.com/example=cdi-example"],
        **changes,
    }
    return {key: value for key, value in found.items() if value != "leave out"}


def _upstream_claim(*found: dict[str, Any], uid: str = _UID, name: str = "example") -> dict[str, Any]:
    return claim(
        uid, name=name, namespace="default", pods=[_POD], drivers={_TEST_DRIVER: {"Devices": list(found)}}
    )


_SECOND = {"uid": "4cf8db2d-06c0-7d70-1a51-e59b25b2c16c", "name": "example-2"}
_NO_NAMES = {"RequestNames": None, "CDIDeviceIDs": None}
_OLD = _upstream(1, ShareID="leave out", RequestNames="leave out")
_V0 = "checkpoint.dra.kubelet.k8s.io/v0"

UPSTREAM: dict[str, tuple[list[dict[str, Any]], dict[str, Any], int]] = {
    "single-claim-info-state": ([_upstream_claim(_upstream(1))], {}, 2570581864),
    "single-claim-info-state-with-share-id": (
        [_upstream_claim(_upstream(1, ShareID="aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"))],
        {},
        736302156,
    ),
    "claim-info-state-with-multiple-devices": (
        [_upstream_claim(_upstream(1), _upstream(2))],
        {},
        1223221469,
    ),
    "two-claim-info-states": (
        [
            _upstream_claim(_upstream(1), name="example-1"),
            _upstream_claim(_upstream(2, **_NO_NAMES), **_SECOND),
        ],
        {},
        2820117767,
    ),
    "upgraded-structure": ([_upstream_claim(_OLD)], {}, 1137250765),
    "upgraded-structure-and-version": ([_upstream_claim(_OLD)], {"apiVersion": _V0}, 1284376732),
}


def use(name: str, *requests: str, share: str = "", driver: str = DRIVER, pool: str = "node-1") -> DeviceUse:
    return DeviceUse(DeviceRef(driver, pool, name), requests, share)


def only(data: bytes) -> PreparedClaim:
    (found,) = parse_checkpoint(data)
    return found


def refused(data: bytes) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        parse_checkpoint(data)
    return str(caught.value)


# --- what the kubelet writes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstreams_own_cases_have_upstreams_sums_and_are_read(name: str) -> None:
    claims, more, checksum = UPSTREAM[name]
    data = checkpoint(claims, **more)
    assert json.loads(data)["Checksum"] == checksum
    found = parse_checkpoint(data)
    assert [(one.ref.uid, one.ref.name, one.pods) for one in found] == [
        (one["ClaimUID"], one["ClaimName"], (_POD,)) for one in claims
    ]
    assert [use.device.device for one in found for use in one.devices] == [
        device["DeviceName"] for one in claims for device in one["DriverState"][_TEST_DRIVER]["Devices"]
    ]


def test_what_the_kubelets_own_code_wrote_is_read_whole() -> None:
    train, none = parse_checkpoint(CHECKPOINT.encode())
    assert train == PreparedClaim(
        ref=ClaimRef("team-a", "train", "u-1"),
        devices=(use("gpu-0", "big", share="aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"),),
        pods=("p-1", "p-2"),
        waiting=("nic.example.com",),
        skipped=("tag.example.com",),
        cdi=(("example.com/gpu=<0&1>\u2028\u00e9", use("gpu-0").device),),
    )
    assert none == PreparedClaim(ClaimRef("team-a", "none", "u-2"))
    assert parse_checkpoint(EMPTY_CHECKPOINT.encode()) == ()


def test_the_sum_is_of_the_text_and_not_of_how_it_is_escaped() -> None:
    envelope = json.loads(CHECKPOINT)
    assert crc32(envelope["Data"].encode()) == envelope["Checksum"]
    assert parse_checkpoint(json.dumps(envelope, ensure_ascii=True).encode()) == parse_checkpoint(
        CHECKPOINT.encode()
    )


def test_a_claim_before_its_prepare_has_a_driver_without_devices() -> None:
    found = only(checkpoint([claim("u", pods=["p"], drivers={DRIVER: {"Devices": None}})]))
    assert (found.devices, found.pods, found.waiting) == ((), ("p",), (DRIVER,))


@pytest.mark.parametrize("operations", [["*"], ["NodePrepareResources", "NodeUnprepareResources"]])
def test_a_driver_that_is_not_called_is_not_waited_for(operations: list[str]) -> None:
    state = {DRIVER: {"Devices": None, "skipNodeOperations": operations}}
    found = only(checkpoint([claim("u", drivers=state)]))
    assert (found.waiting, found.skipped) == ((), (DRIVER,))


def test_a_driver_whose_unprepare_alone_is_skipped_is_called() -> None:
    state = {DRIVER: {"Devices": None, "skipNodeOperations": ["NodeUnprepareResources", "Later"]}}
    assert only(checkpoint([claim("u", drivers=state)])).waiting == (DRIVER,)


def test_devices_that_a_repeated_prepare_listed_twice_are_one() -> None:
    found = only(checkpoint([claim("u", drivers=devices(device(), device("gpu-1"), device()))]))
    assert found.devices == (use("gpu-0", "gpus"), use("gpu-1", "gpus"))


def test_two_shares_of_one_device_are_two() -> None:
    found = only(checkpoint([claim("u", drivers=devices(device(share="s-1"), device(share="s-2")))]))
    assert found.devices == (use("gpu-0", "gpus", share="s-1"), use("gpu-0", "gpus", share="s-2"))


def test_a_claim_that_stands_there_twice_loses_nothing() -> None:
    first = claim("u", name="c", pods=["p-2"], drivers=devices(device()))
    second = claim("u", name="c", pods=["p-1"], drivers={**devices(device("gpu-1")), "nic": {}})
    found = only(checkpoint([first, second]))
    assert found.pods == ("p-1", "p-2")
    assert found.devices == (use("gpu-0", "gpus"), use("gpu-1", "gpus"))


def test_two_claims_of_one_name_stay_two() -> None:
    found = parse_checkpoint(checkpoint([claim("u-1", name="c"), claim("u-2", name="c")]))
    assert [one.ref.uid for one in found] == ["u-1", "u-2"]


def test_fields_and_versions_that_are_younger_are_passed_over() -> None:
    one = claim("u", drivers={DRIVER: {"Devices": [{**device(), "Binding": {"a": 1}}], "Lease": 3}})
    data = checkpoint([{**one, "Phase": "new"}], apiVersion="checkpoint.dra.kubelet.k8s.io/v7", Extra=[])
    assert only(data).devices == (use("gpu-0", "gpus"),)


# --- what it does not write --------------------------------------------------------------------------------


@given(st.integers(0, len(CHECKPOINT.encode()) - 1))
def test_a_file_that_ends_early_is_torn_wherever_it_ends(size: int) -> None:
    with pytest.raises(Torn):
        parse_checkpoint(CHECKPOINT.encode()[:size])


def test_a_wrong_sum_is_torn_and_both_are_named() -> None:
    data = checkpoint([claim("u")])
    right = json.loads(data)["Checksum"]
    wrong = json.dumps({**json.loads(data), "Checksum": right + 1}).encode()
    with pytest.raises(Torn, match=f"its sum is {right}, it says {right + 1}"):
        parse_checkpoint(wrong)


def test_a_checkpoint_of_something_else_is_refused_by_name() -> None:
    assert refused(sealed('{"kind":"CPUCheckpoint"}')) == "is a 'CPUCheckpoint', no DRACheckpoint"


@pytest.mark.parametrize(
    "data",
    [b"[]", b'{"version":"v1","entries":[],"checksum":3}', b'{"Data":7,"Checksum":7}', b"[" * 100_000],
)
def test_other_json_is_refused(data: bytes) -> None:
    assert refused(data)


@pytest.mark.parametrize("text", ["", "{", '{"kind":"DRACheckpoint","ClaimInfoStateList":[{"ClaimUID":1}]}'])
def test_a_right_sum_over_what_nobody_understands_is_no_tear(text: str) -> None:
    with pytest.raises(ValueError, match="Data: ") as caught:
        parse_checkpoint(sealed(text))
    assert not isinstance(caught.value, Torn)


# --- the file ----------------------------------------------------------------------------------------------


def no_pause(seconds: float) -> None:
    raise AssertionError(f"nobody had to wait {seconds} s")


def test_the_file_tells_when_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "dra_manager_state"
    path.write_bytes(checkpoint([claim("u")]))
    os.utime(path, (1_600_000_000, 1_600_000_000))
    told = read_checkpoint(path, NOW, no_pause)
    assert told.witness == (Origin.CHECKPOINT, NOW, 1_600_000_000.0)
    assert [one.ref.uid for one in told.items] == ["u"]
    assert told.is_whole


def test_no_file_is_a_kubelet_without_claims_and_not_one_that_has_none(tmp_path: Path) -> None:
    told = read_checkpoint(tmp_path / "dra_manager_state", NOW, no_pause)
    assert (told.absence, told.items) == (Absence.ABSENT, ())
    assert "dra_manager_state: No such file" in told.why


def test_a_torn_file_that_is_replaced_meanwhile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    whole = checkpoint([claim("u", pods=["p"])])
    path.write_bytes(whole[:-9])
    pauses: list[float] = []

    def replaced(seconds: float) -> None:
        pauses.append(seconds)
        new = tmp_path / ".state"
        new.write_bytes(whole)
        new.rename(path)

    told = read_checkpoint(path, NOW, replaced)
    assert [one.pods for one in told.items] == [("p",)]
    assert pauses == [PAUSE_S]


def test_a_file_that_stays_torn_is_unreadable_and_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(checkpoint([claim("u")])[:-9])
    pauses: list[float] = []
    told = read_checkpoint(path, NOW, pauses.append)
    assert told.absence is Absence.UNREADABLE
    assert told.why.startswith(f"{path}: is no JSON: ")
    assert told.why.endswith(f", {ATTEMPTS} times")
    assert len(pauses) == ATTEMPTS - 1


def test_what_no_further_attempt_mends_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(sealed('{"kind":"CPUCheckpoint"}'))
    assert "CPUCheckpoint" in read_checkpoint(path, NOW, no_pause).why


def test_neither_a_pipe_nor_a_directory_nor_too_much_stops_us(tmp_path: Path) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(FILE_BYTES + 1)
    for path, why in (
        (pipe, "is no regular file"),
        (tmp_path, "Is a directory"),
        (huge, f"is {FILE_BYTES + 1} bytes, limit {FILE_BYTES}"),
    ):
        told = read_checkpoint(path, NOW, no_pause)
        assert told.absence is Absence.UNREADABLE
        assert why in told.why

"""Kubelet's checkpoint of claims: read as the kubelet reads it; an incomplete file is never accepted."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubelet_files import DRIVER, checkpoint, claim, crc32, device, devices, with_checksum
from kubernetes_samples import CHECKPOINT, EMPTY_CHECKPOINT

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import AllocatedDevice, Origin, PreparedClaim
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.sources.kubelet_files import (
    ATTEMPTS,
    CLAIM_PARTS_MAX,
    CLAIMS_MAX,
    CLAIMS_MAX_BYTES,
    RETRY_PAUSE_S,
    IncompleteCheckpoint,
    parse_claims_checkpoint,
    read_claims_checkpoint,
)

NOW = Instant(5_000_000_000, 1_700_000_000.0)

# kubelet cm/dra/state/checkpointer_test.go, 1.37.1: content of the file, and its checksum
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


def use(
    name: str, *requests: str, share: str = "", driver: str = DRIVER, pool: str = "node-1"
) -> AllocatedDevice:
    return AllocatedDevice(DeviceRef(driver, pool, name), requests, share)


def only_claim(data: bytes) -> PreparedClaim:
    (found,), _, _ = parse_claims_checkpoint(data)
    return found


def parse_error(data: bytes) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        parse_claims_checkpoint(data)
    return str(caught.value)


# --- valid checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_test_cases_have_valid_checksums_and_parse(name: str) -> None:
    claims, more, checksum = UPSTREAM[name]
    data = checkpoint(claims, **more)
    assert json.loads(data)["Checksum"] == checksum
    found, _, _ = parse_claims_checkpoint(data)
    assert [(claim_.ref.uid, claim_.ref.name, claim_.pods) for claim_ in found] == [
        (claim["ClaimUID"], claim["ClaimName"], (_POD,)) for claim in claims
    ]
    assert [use.device.device for claim_ in found for use in claim_.devices] == [
        device["DeviceName"] for claim in claims for device in claim["DriverState"][_TEST_DRIVER]["Devices"]
    ]


def test_checkpoint_written_by_kubelet_code_parses_completely() -> None:
    (train, none), _, _ = parse_claims_checkpoint(CHECKPOINT.encode())
    assert train == PreparedClaim(
        ref=ClaimRef("team-a", "train", "u-1"),
        devices=(use("gpu-0", "big", share="aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"),),
        pods=("p-1", "p-2"),
        waiting=("nic.example.com",),
        skipped=("tag.example.com",),
        cdi_ids=(("example.com/gpu=<0&1>\u2028\u00e9", use("gpu-0").device),),
    )
    assert none == PreparedClaim(ClaimRef("team-a", "none", "u-2"))
    assert parse_claims_checkpoint(EMPTY_CHECKPOINT.encode()) == ((), 0, 0)


def test_checksum_covers_the_text_and_not_its_escaping() -> None:
    envelope = json.loads(CHECKPOINT)
    assert crc32(envelope["Data"].encode()) == envelope["Checksum"]
    assert parse_claims_checkpoint(
        json.dumps(envelope, ensure_ascii=True).encode()
    ) == parse_claims_checkpoint(CHECKPOINT.encode())


def test_claim_before_prepare_has_waiting_driver() -> None:
    found = only_claim(checkpoint([claim("u", pods=["p"], drivers={DRIVER: {"Devices": None}})]))
    assert (found.devices, found.pods, found.waiting) == ((), ("p",), (DRIVER,))


@pytest.mark.parametrize("operations", [["*"], ["NodePrepareResources", "NodeUnprepareResources"]])
def test_skipped_driver_is_not_waiting(operations: list[str]) -> None:
    state = {DRIVER: {"Devices": None, "skipNodeOperations": operations}}
    found = only_claim(checkpoint([claim("u", drivers=state)]))
    assert (found.waiting, found.skipped) == ((), (DRIVER,))


def test_driver_with_skipped_unprepare_only_is_called() -> None:
    state = {DRIVER: {"Devices": None, "skipNodeOperations": ["NodeUnprepareResources", "Later"]}}
    assert only_claim(checkpoint([claim("u", drivers=state)])).waiting == (DRIVER,)


def test_devices_listed_twice_by_repeated_prepare_are_merged() -> None:
    found = only_claim(checkpoint([claim("u", drivers=devices(device(), device("gpu-1"), device()))]))
    assert found.devices == (use("gpu-0", "gpus"), use("gpu-1", "gpus"))


def test_two_shares_of_one_device_are_distinct() -> None:
    found = only_claim(checkpoint([claim("u", drivers=devices(device(share="s-1"), device(share="s-2")))]))
    assert found.devices == (use("gpu-0", "gpus", share="s-1"), use("gpu-0", "gpus", share="s-2"))


def test_duplicate_claim_entries_are_merged() -> None:
    first = claim("u", name="c", pods=["p-2"], drivers=devices(device()))
    second = claim("u", name="c", pods=["p-1"], drivers={**devices(device("gpu-1")), "nic": {}})
    found = only_claim(checkpoint([first, second]))
    assert found.pods == ("p-1", "p-2")
    assert found.devices == (use("gpu-0", "gpus"), use("gpu-1", "gpus"))


def test_two_claims_of_one_name_stay_distinct() -> None:
    found, _, _ = parse_claims_checkpoint(checkpoint([claim("u-1", name="c"), claim("u-2", name="c")]))
    assert [claim_.ref.uid for claim_ in found] == ["u-1", "u-2"]


def test_unknown_fields_and_versions_are_ignored() -> None:
    with_binding = claim("u", drivers={DRIVER: {"Devices": [{**device(), "Binding": {"a": 1}}], "Lease": 3}})
    data = checkpoint(
        [{**with_binding, "Phase": "new"}], apiVersion="checkpoint.dra.kubelet.k8s.io/v7", Extra=[]
    )
    assert only_claim(data).devices == (use("gpu-0", "gpus"),)


# --- invalid checkpoints --------------------------------------------------------------------------------


@given(st.integers(0, len(CHECKPOINT.encode()) - 1))
def test_truncated_file_is_torn_at_any_length(size: int) -> None:
    with pytest.raises(IncompleteCheckpoint):
        parse_claims_checkpoint(CHECKPOINT.encode()[:size])


def test_wrong_checksum_is_torn_and_both_values_are_named() -> None:
    data = checkpoint([claim("u")])
    right = json.loads(data)["Checksum"]
    wrong = json.dumps({**json.loads(data), "Checksum": right + 1}).encode()
    with pytest.raises(
        IncompleteCheckpoint, match=f"checksum of the content is {right}, but the file states {right + 1}"
    ):
        parse_claims_checkpoint(wrong)


def test_other_checkpoint_kind_is_refused_by_name() -> None:
    assert (
        parse_error(with_checksum('{"kind":"CPUCheckpoint"}'))
        == "key kind is 'CPUCheckpoint', expected 'DRACheckpoint'"
    )


@pytest.mark.parametrize(
    "data",
    [b"[]", b'{"version":"v1","entries":[],"checksum":3}', b'{"Data":7,"Checksum":7}', b"[" * 100_000],
)
def test_other_json_is_refused(data: bytes) -> None:
    assert parse_error(data)


@pytest.mark.parametrize("text", ["", "{", '{"kind":"DRACheckpoint","ClaimInfoStateList":[{"ClaimUID":1}]}'])
def test_valid_checksum_over_unknown_format_is_not_torn(text: str) -> None:
    with pytest.raises(ValueError, match="key Data cannot be parsed: ") as caught:
        parse_claims_checkpoint(with_checksum(text))
    assert not isinstance(caught.value, IncompleteCheckpoint)


# --- the file ----------------------------------------------------------------------------------------------


def no_pause(seconds: float) -> None:
    raise AssertionError(f"unexpected pause of {seconds} s")


def test_answer_has_modification_time_of_file(tmp_path: Path) -> None:
    path = tmp_path / "dra_manager_state"
    path.write_bytes(checkpoint([claim("u")]))
    os.utime(path, (1_600_000_000, 1_600_000_000))
    answer = read_claims_checkpoint(path, NOW, no_pause)
    assert answer.provenance == (Origin.CHECKPOINT, NOW, 1_600_000_000.0)
    assert [item.ref.uid for item in answer.items] == ["u"]
    assert answer.is_complete


def test_claims_above_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "dra_manager_state"
    path.write_bytes(checkpoint([claim(f"u-{number}") for number in range(CLAIMS_MAX + 7)]))
    answer = read_claims_checkpoint(path, NOW, no_pause)
    assert len(answer.items) == CLAIMS_MAX == 8192
    assert answer.invalid == (
        f"claims checkpoint {path}: has 8199 claims, of which 7 exceed a limit: 8192 claims, 1048576 bytes "
        "of a claim, 131072 pods and devices of all claims; the pods of 7 claims are not known",
    )
    assert not answer.is_complete, "no use of a device ends because its claim is left out"


def test_claim_with_too_many_pods_is_left_out_and_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "dra_manager_state"
    pods = {f"p-{number}": {} for number in range(256)}
    full = [{**claim(f"u-{number}"), "PodUIDs": pods} for number in range(CLAIM_PARTS_MAX // 256 + 2)]
    drivers = {f"{number}.example": {} for number in range(40_000)}
    full[:0] = [{**claim(f"waits-{number}"), "DriverState": drivers} for number in range(4)]
    large = {**claim("large"), "PodUIDs": {f"{number:064}": {} for number in range(16_000)}}
    path.write_bytes(checkpoint([claim("first"), large, *full]))
    answer = read_claims_checkpoint(path, NOW, no_pause)
    kept = [item.ref.uid for item in answer.items]
    assert kept[:5] == ["first", "waits-0", "waits-1", "waits-2", "u-0"]
    parts = sum(len((*item.pods, *item.devices, *item.cdi_ids, *item.waiting)) for item in answer.items)
    assert CLAIM_PARTS_MAX - 300 < parts <= CLAIM_PARTS_MAX
    left_out = len(full) + 2 - len(answer.items)
    assert left_out >= 3
    assert f"the pods of {left_out} claims are not known" in answer.invalid[0]


def test_damaged_claim_above_the_limit_is_not_decoded(tmp_path: Path) -> None:
    """It costs neither memory nor the claims before it."""
    path = tmp_path / "dra_manager_state"
    wrong = [{**claim("u"), "ClaimUID": 5}]
    path.write_bytes(checkpoint([claim(f"u-{number}") for number in range(CLAIMS_MAX)] + wrong))
    assert len(read_claims_checkpoint(path, NOW, no_pause).items) == CLAIMS_MAX
    path.write_bytes(checkpoint(wrong))
    assert "key Data cannot be parsed" in read_claims_checkpoint(path, NOW, no_pause).reason


def test_file_above_the_size_limit_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "dra_manager_state"
    with path.open("wb") as file:
        file.truncate((32 << 20) + 1)
    answer = read_claims_checkpoint(path, NOW, no_pause)
    assert (answer.absence, answer.items) == (Absence.UNREADABLE, ())
    assert answer.reason.endswith("file is 33554433 bytes, limit 33554432")


def test_absent_file_is_absent_and_not_empty(tmp_path: Path) -> None:
    answer = read_claims_checkpoint(tmp_path / "dra_manager_state", NOW, no_pause)
    assert (answer.absence, answer.items) == (Absence.ABSENT, ())
    assert "dra_manager_state: No such file" in answer.reason


def test_torn_file_replaced_during_retry_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    whole = checkpoint([claim("u", pods=["p"])])
    path.write_bytes(whole[:-9])
    pauses: list[float] = []

    def replace_file(seconds: float) -> None:
        pauses.append(seconds)
        new = tmp_path / ".state"
        new.write_bytes(whole)
        new.rename(path)

    answer = read_claims_checkpoint(path, NOW, replace_file)
    assert [item.pods for item in answer.items] == [("p",)]
    assert pauses == [RETRY_PAUSE_S]


def test_file_that_stays_torn_is_unreadable_and_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(checkpoint([claim("u")])[:-9])
    pauses: list[float] = []
    answer = read_claims_checkpoint(path, NOW, pauses.append)
    assert answer.absence is Absence.UNREADABLE
    assert answer.reason.startswith(f"claims checkpoint {path}: is not JSON: ")
    assert answer.reason.endswith(f", in {ATTEMPTS} attempts")
    assert len(pauses) == ATTEMPTS - 1


def test_permanent_error_is_not_retried(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(with_checksum('{"kind":"CPUCheckpoint"}'))
    assert "CPUCheckpoint" in read_claims_checkpoint(path, NOW, no_pause).reason


def test_fifo_directory_or_large_file_is_unreadable(tmp_path: Path) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(CLAIMS_MAX_BYTES + 1)
    for path, why in (
        (pipe, "is not a regular file"),
        (tmp_path, "Is a directory"),
        (huge, f"is {CLAIMS_MAX_BYTES + 1} bytes, limit {CLAIMS_MAX_BYTES}"),
    ):
        answer = read_claims_checkpoint(path, NOW, no_pause)
        assert answer.absence is Absence.UNREADABLE
        assert why in answer.reason

"""Kubelet's file of device health, and when an entry has lapsed."""

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes_samples import HEALTH_STATE

from agent.model.claim import DeviceRef
from agent.model.claim_sources import KubeletHealthRecord, Origin
from agent.model.health import Health
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.sources.kubelet_files import DEFAULT_LEASE_S, parse_health_state, read_health_state

NOW = Instant(5_000_000_000, 1_700_000_000.0)
UPDATED = "2023-11-14T22:13:20Z"
UPDATED_S = 1_700_000_000.0


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "PoolName": "node-1",
        "DeviceName": "gpu-0",
        "Health": "Healthy",
        "LastUpdated": UPDATED,
        "HealthCheckTimeout": 0,
        "Message": "",
        **changes,
    }


def parse_entry(**changes: Any) -> KubeletHealthRecord:
    state = {"gpu.example.com": {"Devices": {"node-1/gpu-0": entry(**changes)}}}
    (belief,), wrong = parse_health_state(json.dumps(state).encode())
    assert wrong == ()
    return belief


def test_file_written_by_kubelet_code_parses_completely() -> None:
    beliefs, wrong = parse_health_state(HEALTH_STATE.encode())

    def ref(number: int) -> DeviceRef:
        return DeviceRef("gpu.example.com", "node-1", f"gpu-{number}")

    assert wrong == ()
    assert beliefs == (
        KubeletHealthRecord(ref(0), Health.HEALTHY, "", 1_700_000_000.123456, 45.0),
        KubeletHealthRecord(ref(1), Health.UNHEALTHY, "XID 79 <bus>", 1_700_000_000.0, DEFAULT_LEASE_S),
        KubeletHealthRecord(ref(2), Health.UNKNOWN, "", -62_135_596_800.0, DEFAULT_LEASE_S),  # Go's zero time
    )


@pytest.mark.parametrize("health", ["", "unhealthy", "Sick"])
def test_unknown_health_value_is_unknown(health: str) -> None:
    assert parse_entry(Health=health).health is Health.UNKNOWN


# kubelet cm/dra/healthinfo_test.go, TestGetHealthInfoRobust
@pytest.mark.parametrize(
    ("timeout_ns", "age_s", "lapsed"),
    [
        (0, 29.9, False),
        (0, 30.0, False),
        (0, 30.1, True),
        (90_000_000_000, 89.0, False),
        (90_000_000_000, 91.0, True),
        (-1, 0.0, True),  # more seconds than Go's nanoseconds can count, asked for by a driver
    ],
)
def test_entry_lapses_by_the_kubelets_rule(timeout_ns: int, age_s: float, lapsed: bool) -> None:
    assert parse_entry(HealthCheckTimeout=timeout_ns).has_lapsed(UPDATED_S + age_s) is lapsed


def test_entry_without_time_is_invalid_and_others_stay() -> None:
    state = {"d": {"Devices": {"node-1/gpu-0": entry(LastUpdated="soon"), "node-1/gpu-1": entry()}}}
    beliefs, wrong = parse_health_state(json.dumps(state).encode())
    assert len(beliefs) == 1
    assert wrong == ("device 'node-1/gpu-0' of d: LastUpdated 'soon' is not a time",)


@pytest.mark.parametrize("text", ["null", "{}", '{"d":{"Devices":null}}', '{"d":{},"e":{"New":1}}'])
def test_empty_file_has_no_devices(text: str) -> None:
    assert parse_health_state(text.encode()) == ((), ())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"d":7}', '{"d":{"Devices":[]}}'])
def test_invalid_file_is_unreadable_and_not_empty(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dra_health_state"
    path.write_text(text)
    answer = read_health_state(path, NOW)
    assert answer.absence is Absence.UNREADABLE
    assert answer.reason.startswith(f"device health file {path}: is not in the kubelet's format: ")


def test_answer_has_modification_time_of_file(tmp_path: Path) -> None:
    path = tmp_path / "dra_health_state"
    assert read_health_state(path, NOW).absence is Absence.ABSENT
    path.write_text(HEALTH_STATE)
    answer = read_health_state(path, NOW)
    assert answer.provenance == (Origin.HEALTH_STATE, NOW, path.stat().st_mtime)
    assert len(answer.items) == 3

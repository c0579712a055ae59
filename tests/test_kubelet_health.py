"""What the kubelet wrote down of devices' health is read, and told from what it believes now."""

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes_wrote import HEALTH_STATE

from agent.model.claim import DeviceRef
from agent.model.claim_sources import Belief, Origin
from agent.model.health import Health
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.sources.kubelet_health import LEASE_S, parse_health_state, read_health_state

NOW = Instant(5_000_000_000, 1_700_000_000.0)
HEARD = "2023-11-14T22:13:20Z"
HEARD_S = 1_700_000_000.0


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "PoolName": "node-1",
        "DeviceName": "gpu-0",
        "Health": "Healthy",
        "LastUpdated": HEARD,
        "HealthCheckTimeout": 0,
        "Message": "",
        **changes,
    }


def parsed(**changes: Any) -> Belief:
    state = {"gpu.example.com": {"Devices": {"node-1/gpu-0": entry(**changes)}}}
    (belief,), wrong = parse_health_state(json.dumps(state).encode())
    assert wrong == ()
    return belief


def test_what_the_kubelets_own_code_wrote_is_read_whole() -> None:
    beliefs, wrong = parse_health_state(HEALTH_STATE.encode())

    def ref(number: int) -> DeviceRef:
        return DeviceRef("gpu.example.com", "node-1", f"gpu-{number}")

    assert wrong == ()
    assert beliefs == (
        Belief(ref(0), Health.HEALTHY, "", 1_700_000_000.123456, 45.0),
        Belief(ref(1), Health.UNHEALTHY, "XID 79 <bus>", 1_700_000_000.0, LEASE_S),
        Belief(ref(2), Health.UNKNOWN, "", -62_135_596_800.0, LEASE_S),  # Go's zero time
    )


@pytest.mark.parametrize("health", ["", "unhealthy", "Sick"])
def test_a_word_that_is_none_of_the_kubelets_is_unknown(health: str) -> None:
    assert parsed(Health=health).health is Health.UNKNOWN


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
def test_an_entry_lapses_by_the_kubelets_own_rule(timeout_ns: int, age_s: float, lapsed: bool) -> None:
    assert parsed(HealthCheckTimeout=timeout_ns).has_lapsed(HEARD_S + age_s) is lapsed


def test_an_entry_without_a_time_is_wrong_and_the_others_stay() -> None:
    state = {"d": {"Devices": {"node-1/gpu-0": entry(LastUpdated="soon"), "node-1/gpu-1": entry()}}}
    beliefs, wrong = parse_health_state(json.dumps(state).encode())
    assert len(beliefs) == 1
    assert wrong == ("d 'node-1/gpu-0': LastUpdated 'soon' is no time",)


@pytest.mark.parametrize("text", ["null", "{}", '{"d":{"Devices":null}}', '{"d":{},"e":{"New":1}}'])
def test_a_kubelet_that_knows_of_nothing_says_so(text: str) -> None:
    assert parse_health_state(text.encode()) == ((), ())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"d":7}', '{"d":{"Devices":[]}}'])
def test_what_no_kubelet_writes_is_unreadable_and_not_empty(text: str, tmp_path: Path) -> None:
    path = tmp_path / "dra_health_state"
    path.write_text(text)
    told = read_health_state(path, NOW)
    assert told.absence is Absence.UNREADABLE
    assert told.why.startswith(f"{path}: is not understood: ")


def test_the_file_says_when_it_was_written_and_none_says_that(tmp_path: Path) -> None:
    path = tmp_path / "dra_health_state"
    assert read_health_state(path, NOW).absence is Absence.ABSENT
    path.write_text(HEALTH_STATE)
    told = read_health_state(path, NOW)
    assert told.witness == (Origin.HEALTH_STATE, NOW, path.stat().st_mtime)
    assert len(told.items) == 3

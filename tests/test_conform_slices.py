"""Choice of devices for conform's own claims, from ResourceSlices and the claims that hold devices."""

from collections.abc import Mapping
from typing import Any

import pytest
from kubelet.claims import allocated_claim

from agent.conform.kubelet.api_claims import _in_version, choose_devices

DRIVER, NODE = "gpu.example.com", "node-a"


def slice_of(
    *devices: str | Mapping[str, Any],
    pool: str = NODE,
    node: str = NODE,
    generation: int = 1,
    count: int = 1,
    driver: str = DRIVER,
) -> dict[str, Any]:
    return {
        "kind": "ResourceSlice",
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": pool, "generation": generation, "resourceSliceCount": count},
            "devices": [{"name": device} if isinstance(device, str) else device for device in devices],
        },
    }


def tainted_device(name: str, effect: str, *, nested: bool = False) -> dict[str, Any]:
    fields = {"taints": [{"key": "k", "effect": effect}]}
    return {"name": name, "basic": fields} if nested else {"name": name, **fields}


def chosen_devices(*slices: Mapping[str, Any], claims: Any = (), node: str = NODE) -> list[str]:
    return ["/".join(device) for device in choose_devices(slices, claims, DRIVER, node)]


def test_first_two_devices_of_the_driver_are_chosen() -> None:
    assert chosen_devices(slice_of("d-2", "d-0", "d-1"), slice_of("e-0", driver="other.example.com")) == [
        "node-a/d-0",
        "node-a/d-1",
    ]
    assert chosen_devices(slice_of("d-0")) == ["node-a/d-0"]


def test_device_that_a_claim_holds_is_not_chosen() -> None:
    held = allocated_claim("one", "uid-1", ("it", DRIVER, NODE, "d-0"), pods=["p"])
    same_name = allocated_claim("two", "uid-2", ("it", "other.example.com", NODE, "d-1"), pods=[])
    unallocated = {"kind": "ResourceClaim", "metadata": {}, "spec": {}}
    found = chosen_devices(slice_of("d-0", "d-1", "d-2"), claims=[held, same_name, unallocated])
    assert found == ["node-a/d-1", "node-a/d-2"]


@pytest.mark.parametrize("nested", [False, True])
def test_device_whose_taint_keeps_pods_off_is_not_chosen(nested: bool) -> None:
    devices = [
        tainted_device("d-0", "NoSchedule", nested=nested),
        tainted_device("d-1", "NoExecute", nested=nested),
        tainted_device("d-2", "None", nested=nested),
    ]
    assert chosen_devices(slice_of(*devices)) == ["node-a/d-2"]


def test_device_that_shares_its_hardware_is_not_chosen() -> None:
    devices = [
        {"name": "d-0", "consumesCounters": [{"counterSet": "x"}]},
        {"name": "d-1", "allowMultipleAllocations": True},
        {"name": "d-2", "allowMultipleAllocations": False},
    ]
    assert chosen_devices(slice_of(*devices)) == ["node-a/d-2"]


def test_only_the_newest_complete_generation_of_a_pool_counts() -> None:
    assert chosen_devices(slice_of("old"), slice_of("new", generation=2)) == ["node-a/new"]
    with pytest.raises(ValueError, match="1 in slices of a pool that is not complete"):
        chosen_devices(slice_of("old", "older"), slice_of("new", generation=2, count=2))


def test_slices_of_other_nodes_are_not_chosen() -> None:
    slices = [slice_of("d-0", pool="b", node="node-b"), slice_of("d-0"), slice_of("d-1")]
    slices[1]["spec"]["pool"]["resourceSliceCount"] = 2
    slices[2]["spec"]["pool"]["resourceSliceCount"] = 2
    assert chosen_devices(*slices) == ["node-a/d-0", "node-a/d-1"]
    assert chosen_devices(slices[0]) == ["b/d-0"]
    with pytest.raises(ValueError, match="belong to nodes node-a, node-b, not to node-c; choose one with"):
        chosen_devices(*slices, node="node-c")


def test_reasons_are_counted_if_no_device_is_free() -> None:
    held = allocated_claim("one", "uid-1", ("it", DRIVER, NODE, "d-0"), pods=["p"])
    devices = ["d-0", tainted_device("d-1", "NoSchedule"), tainted_device("d-2", "NoExecute")]
    with pytest.raises(
        ValueError, match=f"no device of driver {DRIVER} is free: 1 in claims, 2 with a taint"
    ):
        chosen_devices(slice_of(*devices), claims=[held])
    with pytest.raises(ValueError, match="is free: its slices have none"):
        chosen_devices(slice_of())
    with pytest.raises(ValueError, match=f"no ResourceSlice belongs to driver {DRIVER}"):
        chosen_devices(slice_of("e-0", driver="other.example.com"))


def test_request_of_the_oldest_version_has_no_exactly() -> None:
    requests = [{"name": "it", "exactly": {"deviceClassName": "c"}}]
    assert _in_version(requests, "v1beta1") == [{"name": "it", "deviceClassName": "c"}]
    assert _in_version(requests, "v1beta2") == requests

"""Devices of a node and their names: DNS labels that stay the same over restarts."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import EIO, PaperNode, node_sample, pool_sample

from agent.devices.inventory import (
    DeviceKind,
    InventoryDevice,
    canonical_pool_name,
    cpu_device,
    declared_device,
    format_page_size,
    gpu_device,
    hugepage_device,
    memory_device,
    mig_device,
    parse_pool_name,
    pools_by_device,
    update_inventory,
)
from agent.model.declared_devices import (
    DeclaredNicDevice,
    DeclaredOtherDevice,
    DeclaredPciDevice,
    DriverDevice,
)


def names(
    node: PaperNode, expected: dict[str, int] | None = None, known: tuple[InventoryDevice, ...] = ()
) -> list[str]:
    return [device.name for device in update_inventory(node.snapshot(), known, expected or {})]


@pytest.mark.parametrize(
    ("kib", "name"),
    [(64, "64ki"), (1000, "1000ki"), (2048, "2mi"), (32768, "32mi"), (1 << 20, "1gi"), (1 << 34, "16ti")],
)
def test_size_name_follows_kubernetes(kib: int, name: str) -> None:
    assert format_page_size(kib) == name


def test_every_numa_node_has_a_cpu_device_and_its_pools() -> None:
    node = PaperNode()
    node.nodes = {0: node_sample(0, 0b01), 1: node_sample(1, 0b10)}
    for number in (0, 1):
        node.pool(pool_sample(size_kib=2048, node=number))
        node.pool(pool_sample(size_kib=1 << 20, node=number))
    node.pool(pool_sample(20, node=None))
    assert names(node) == [
        "cpu-node0", "cpu-node1",
        "hugepages-2mi-node0", "hugepages-2mi-node1",
        "hugepages-1gi-node0", "hugepages-1gi-node1",
    ]  # fmt: skip


def test_numa_node_without_cpus_has_no_cpu_device() -> None:
    node = PaperNode()
    node.nodes = {0: node_sample(0), 1: node_sample(1, 0), 2: node_sample(2, EIO)}
    assert names(node) == ["cpu-node0", "cpu-node2"]


def test_devices_are_ordered_by_numa_node_number() -> None:
    node = PaperNode()
    node.nodes = {n: node_sample(n) for n in (10, 9, 0)}
    assert names(node) == ["cpu-node0", "cpu-node9", "cpu-node10"]


def test_pools_of_a_kernel_without_numa_are_on_node_0() -> None:
    node = PaperNode()
    node.pool(pool_sample(7, node=None))
    assert names(node) == ["cpu-node0", "hugepages-2mi-node0"]
    assert [pool.nr for pool in pools_by_device(node.snapshot()).values()] == [7]


def test_machine_wide_pool_is_left_out_if_node_pools_exist() -> None:
    node = PaperNode()
    node.pool(pool_sample(20, node=None))
    node.pool(pool_sample(5, node=0))
    assert [pool.nr for pool in pools_by_device(node.snapshot()).values()] == [5]


def test_known_device_stays_though_its_source_lost_it() -> None:
    node = PaperNode()
    node.pool(pool_sample())
    known = update_inventory(node.snapshot(), (), {})
    assert update_inventory(PaperNode().snapshot(), known, {}) == known


def test_expected_pool_that_the_machine_lacks_is_a_device() -> None:
    assert names(PaperNode(), {"hugepages-1gi-node1": 4}) == ["cpu-node0", "hugepages-1gi-node1"]


@pytest.mark.parametrize(
    "name",
    ["", "cpu-node0", "hugepages-2mi", "hugepages-2mi-node", "hugepages-2048ki-node0", "hugepages-0mi-node0",
     "hugepages-2Mi-node0", "hugepages-2mi-node00", "hugepages-٢mi-node0", "xhugepages-2mi-node0",
     "hugepages-2mi-node0\n", "hugepages-02mi-node0"],
)  # fmt: skip
def test_name_not_in_canonical_spelling_is_no_pool(name: str) -> None:
    assert parse_pool_name(name) is None


def test_pool_name_in_another_spelling_becomes_canonical() -> None:
    assert canonical_pool_name("hugepages-2048ki-node0") == "hugepages-2mi-node0"
    assert canonical_pool_name("hugepages-2Mi-node00") == "hugepages-2mi-node0"
    for name in ("hugepages-0mi-node0", "cpu-node0", "hugepages-2-node0"):
        assert canonical_pool_name(name) is None


@given(st.integers(1, 1 << 40), st.integers(0, 63))
def test_pool_name_is_a_dns_label_and_parses_back(size_kib: int, node: int) -> None:
    device = hugepage_device(size_kib, node)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", device.name)
    assert parse_pool_name(device.name) == device


def test_every_kind_has_a_device() -> None:
    host = [cpu_device(0), memory_device(0), hugepage_device(2048, 0), gpu_device(0), mig_device(0, 1, 0)]
    parts = (DeclaredPciDevice("0000:5e:00.0", ""), DeclaredNicDevice("", "mlx5_0"), DeclaredOtherDevice())
    declared = [
        declared_device(DriverDevice("a.example.com", "node-a", f"dev-{number}", part, 0))
        for number, part in enumerate(parts)
    ]
    assert {device.kind for device in [*host, *declared]} == set(DeviceKind)

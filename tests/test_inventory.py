"""Which devices a node has, and their names: DNS labels that are the same after every restart."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import EIO, PaperNode, node_sample, pool_sample

from agent.devices.inventory import (
    Device,
    Kind,
    cpu_device,
    declared_device,
    device_pools,
    devices_of,
    gpu_device,
    memory_device,
    mig_device,
    parse_pool_name,
    pool_device,
    size_name,
    spell_pool_name,
)
from agent.model.declared import Declared, DeclaredOther, DeclaredPci


def names(
    node: PaperNode, expected: dict[str, int] | None = None, known: tuple[Device, ...] = ()
) -> list[str]:
    return [device.name for device in devices_of(node.snapshot(), known, expected or {})]


@pytest.mark.parametrize(
    ("kib", "name"),
    [(64, "64ki"), (1000, "1000ki"), (2048, "2mi"), (32768, "32mi"), (1 << 20, "1gi"), (1 << 34, "16ti")],
)
def test_sizes_are_named_as_kubernetes_names_them(kib: int, name: str) -> None:
    assert size_name(kib) == name


def test_every_numa_node_has_its_cpus_and_its_pools() -> None:
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


def test_a_numa_node_of_memory_alone_has_no_cpus_to_judge() -> None:
    node = PaperNode()
    node.nodes = {0: node_sample(0), 1: node_sample(1, 0), 2: node_sample(2, EIO)}
    assert names(node) == ["cpu-node0", "cpu-node2"]


def test_nodes_are_in_the_order_of_their_numbers() -> None:
    node = PaperNode()
    node.nodes = {n: node_sample(n) for n in (10, 9, 0)}
    assert names(node) == ["cpu-node0", "cpu-node9", "cpu-node10"]


def test_a_kernel_without_numa_has_its_pools_on_node_0() -> None:
    node = PaperNode()
    node.pool(pool_sample(7, node=None))
    assert names(node) == ["cpu-node0", "hugepages-2mi-node0"]
    assert [pool.nr for pool in device_pools(node.snapshot()).values()] == [7]


def test_the_machines_pool_is_not_told_twice() -> None:
    node = PaperNode()
    node.pool(pool_sample(20, node=None))
    node.pool(pool_sample(5, node=0))
    assert [pool.nr for pool in device_pools(node.snapshot()).values()] == [5]


def test_what_was_once_seen_stays() -> None:
    node = PaperNode()
    node.pool(pool_sample())
    known = devices_of(node.snapshot(), (), {})
    assert devices_of(PaperNode().snapshot(), known, {}) == known


def test_a_pool_that_the_configuration_expects_is_a_device_though_the_machine_has_none() -> None:
    assert names(PaperNode(), {"hugepages-1gi-node1": 4}) == ["cpu-node0", "hugepages-1gi-node1"]


@pytest.mark.parametrize(
    "name",
    ["", "cpu-node0", "hugepages-2mi", "hugepages-2mi-node", "hugepages-2048ki-node0", "hugepages-0mi-node0",
     "hugepages-2Mi-node0", "hugepages-2mi-node00", "hugepages-٢mi-node0", "xhugepages-2mi-node0",
     "hugepages-2mi-node0\n", "hugepages-02mi-node0"],
)  # fmt: skip
def test_what_names_no_pool_in_our_spelling_is_none(name: str) -> None:
    assert parse_pool_name(name) is None


def test_a_pool_in_another_spelling_is_recognized() -> None:
    assert spell_pool_name("hugepages-2048ki-node0") == "hugepages-2mi-node0"
    assert spell_pool_name("hugepages-2Mi-node00") == "hugepages-2mi-node0"
    for name in ("hugepages-0mi-node0", "cpu-node0", "hugepages-2-node0"):
        assert spell_pool_name(name) is None


@given(st.integers(1, 1 << 40), st.integers(0, 63))
def test_a_pools_name_is_a_dns_label_and_leads_back_to_the_pool(size_kib: int, node: int) -> None:
    device = pool_device(size_kib, node)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", device.name)
    assert parse_pool_name(device.name) == device


def test_the_kinds_are_those_of_the_devices() -> None:
    host = [cpu_device(0), memory_device(0), pool_device(2048, 0), gpu_device(0), mig_device(0, 1, 0)]
    nic = declared_device(Declared("nic.example.com", "node-a", "nic-0", DeclaredPci("0000:5e:00.0", ""), 0))
    other = declared_device(Declared("a.example.com", "node-a", "dev-0", DeclaredOther(), 0))
    assert {device.kind for device in [*host, nic, other]} == set(Kind)

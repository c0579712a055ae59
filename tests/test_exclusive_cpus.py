"""Exclusive CPUs of containers from a driver, by its declared devices and the consumer map."""

from claim_samples import DRIVER, device, known_pod, listed_prepared, source_answers, use

from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import exclusive_cpus
from agent.model.claim_sources import AllocatedDevice, ContainerClaim, ContainerObject, PodClaim
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import (
    Declarations,
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredPciDevice,
    DriverDevice,
)


def cpus(name: str, cpu_list: str, *, exclusive: bool = True) -> DriverDevice:
    return DriverDevice(
        DRIVER, "node-1", name, DeclaredCpuDevice(parse_cpus(cpu_list), None, exclusive, False), 0
    )


DECLARED: Declarations = (
    DeclaredFile(
        DRIVER,
        (
            cpus("own-a", "2-3"),
            cpus("own-b", "8-9"),
            cpus("shared", "4-7", exclusive=False),
            DriverDevice(DRIVER, "node-1", "nic", DeclaredPciDevice("0000:5e:00.0", ""), 0),
        ),
    ),
)


def exclusive_cpus_of(*claims, pods=None):
    answers = source_answers(
        checkpoint=claims, pods_file=[known_pod("p", "claim-c")] if pods is None else pods
    )
    return exclusive_cpus(build_consumer_map(answers), DECLARED)


def test_container_has_the_cpus_of_its_claim():
    assert exclusive_cpus_of(listed_prepared("c", use("own-a"), pods=["p"])) == {
        "p": {"main": parse_cpus("2-3")}
    }


def test_cpus_of_several_devices_add_up():
    found = exclusive_cpus_of(
        listed_prepared("c", use("own-a", "x"), use("own-b", "y"), use("nic", "z"), pods=["p"])
    )
    assert found == {"p": {"main": parse_cpus("2-3,8-9")}}


def test_claim_not_prepared_for_the_pod_gives_no_cpus():
    assert exclusive_cpus_of(listed_prepared("c", use("own-a"))) == {}


def test_container_has_the_cpus_of_its_requests_only():
    containers = tuple(
        ContainerObject(name, (ContainerClaim("mine", request),))
        for name, request in (("one", "x"), ("two", "y"))
    )
    pod = known_pod("p", claims=(PodClaim("mine", "claim-c"),), containers=containers)
    found = exclusive_cpus_of(
        listed_prepared("c", use("own-a", "x"), use("own-b", "y"), pods=["p"]), pods=[pod]
    )
    assert found == {"p": {"one": parse_cpus("2-3"), "two": parse_cpus("8-9")}}


def test_claim_without_a_pod_object_gives_no_container_cpus():
    assert exclusive_cpus_of(listed_prepared("c", use("own-a"), pods=["p"]), pods=[]) == {}


def test_container_with_shared_cpus_too_is_left_out():
    assert exclusive_cpus_of(listed_prepared("c", use("own-a", "x"), use("shared", "y"), pods=["p"])) == {}


def test_share_of_a_device_gives_no_exclusive_cpus():
    part = AllocatedDevice(device("own-a"), (), "share-1")
    assert exclusive_cpus_of(listed_prepared("c", part, pods=["p"])) == {}


def test_shared_device_gives_no_exclusive_cpus():
    assert exclusive_cpus_of(listed_prepared("c", use("shared"), pods=["p"])) == {}

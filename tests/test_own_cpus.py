"""Which containers have CPUs for themselves from a driver, by what it declares and who uses what."""

from claims_paper import DRIVER, device, heard, known_pod, prepared, use

from agent.devices.consumers.consumer_map import consumer_map
from agent.devices.consumers.exclusive_cpus import own_cpus
from agent.model.claim_sources import Container, ContainerClaim, DeviceUse, PodClaim
from agent.model.cpuset import parse_cpus
from agent.model.declared import Declarations, Declared, DeclaredCpus, DeclaredFile, DeclaredPci


def cpus(name: str, of: str, *, exclusive: bool = True) -> Declared:
    return Declared(DRIVER, "node-1", name, DeclaredCpus(parse_cpus(of), None, exclusive, False), 0)


DECLARED: Declarations = (
    DeclaredFile(
        DRIVER,
        (
            cpus("own-a", "2-3"),
            cpus("own-b", "8-9"),
            cpus("shared", "4-7", exclusive=False),
            Declared(DRIVER, "node-1", "nic", DeclaredPci("0000:5e:00.0", ""), 0),
        ),
    ),
)


def given(*claims, pods=None):
    said = heard(checkpoint=claims, pods_file=[known_pod("p", "claim-c")] if pods is None else pods)
    return own_cpus(consumer_map(said), DECLARED)


def test_a_container_has_the_cpus_of_the_claim_that_it_names():
    assert given(prepared("c", use("own-a"), pods=["p"])) == {"p": {"main": parse_cpus("2-3")}}


def test_cpus_of_several_devices_add_up_beside_devices_of_other_kinds():
    found = given(prepared("c", use("own-a", "x"), use("own-b", "y"), use("nic", "z"), pods=["p"]))
    assert found == {"p": {"main": parse_cpus("2-3,8-9")}}


def test_what_is_not_prepared_for_the_pod_here_is_not_its_own():
    assert given(prepared("c", use("own-a"))) == {}


def test_each_container_has_those_of_the_requests_that_it_names():
    containers = tuple(
        Container(name, (ContainerClaim("mine", request),)) for name, request in (("one", "x"), ("two", "y"))
    )
    pod = known_pod("p", claims=(PodClaim("mine", "claim-c"),), containers=containers)
    found = given(prepared("c", use("own-a", "x"), use("own-b", "y"), pods=["p"]), pods=[pod])
    assert found == {"p": {"one": parse_cpus("2-3"), "two": parse_cpus("8-9")}}


def test_of_which_container_nobody_says_that_none_has():
    assert given(prepared("c", use("own-a"), pods=["p"]), pods=[]) == {}


def test_a_container_that_has_cpus_beside_its_own_is_left_out():
    assert given(prepared("c", use("own-a", "x"), use("shared", "y"), pods=["p"])) == {}


def test_a_part_of_a_device_is_not_all_of_its_cpus():
    part = DeviceUse(device("own-a"), (), "share-1")
    assert given(prepared("c", part, pods=["p"])) == {}


def test_a_device_that_is_not_exclusive_gives_nobody_cpus_of_its_own():
    assert given(prepared("c", use("shared"), pods=["p"])) == {}

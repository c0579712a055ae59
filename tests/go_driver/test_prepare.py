"""Claims through the driver in Go: errors in the agent's words, and no claim that waits for an agent."""

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
from agents import Agent
from driver_scenarios.program import Program
from kubelet import Pace
from kubelet.history import UnprepareFailed

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, Ask, GoNode, parameters

WRONG = parameters("CpuParameters", cpus="9")
NOT_OF_IT = "CPUs 9 are not of cpus-node0-0, which has 0"
BAD = (
    f"[class=bad-config code=cpu.opaque_cpuset.invalid device={GO}/{NODE}/{CPU_0} request=r retry=never]"
    f" {NOT_OF_IT}; the claim must change."
)
TOO_MANY = parameters("HugepagesParameters", pages=9)
BAD_TOO = (
    f"[class=bad-config code=config.invalid device={GO}/{NODE}/{PAGES} request=r retry=never]"
    " 9 pages of hugepages-2mi-node0-0, which has 8; the claim must change."
)


def sees_online(node: GoNode, cpus: str) -> None:
    """The CPUs that the driver finds from now on; the agent holds the file that was there before."""
    node.sysfs.write("devices/system/cpu/online", cpus)


# --- what kind of failure it is ----------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
def test_what_the_user_got_wrong_is_told_in_the_same_words_and_tried_once(node: GoNode) -> None:
    pod = node.run("it", Ask("it", {"r": CPU_0}, [WRONG]))
    node.tells(pod, "it", BAD, times=3)
    verdict = node.verdict("it")
    assert (verdict["class"], verdict["code"]) == ("bad-config", "cpu.opaque_cpuset.invalid")
    assert verdict["count"] == 1, "answered from memory since"
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_what_cannot_be_decoded_is_named(node: GoNode) -> None:
    pod = node.run("it", Ask("it", {"r": CPU_0}, [parameters("CpuParameters", cpu="0")]))
    node.tells(
        pod,
        "it",
        f"[class=bad-config code=config.decode device={GO}/{NODE}/{CPU_0} request=r retry=never]"
        ' parameters: json.strictError: unknown field "cpu"; the claim must change.',
    )
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_claims_of_one_pod_that_fail_name_one_another(node: GoNode) -> None:
    """The kubelet shows one of them, and not always the same."""
    pod = node.run("both", Ask("one", {"r": CPU_0}, [WRONG]), Ask("other", {"r": PAGES}, [TOO_MANY]))
    told = {
        f" one: {BAD} Other failing claims in this call: default/other (bad-config config.invalid).",
        f" other: {BAD_TOO} Other failing claims in this call: default/one (bad-config"
        " cpu.opaque_cpuset.invalid).",
    }
    node.kubelet.wait_for(lambda: sum(one.count for one in node.failures(pod)) >= 3, "three tries")
    said = {event.message.partition("ResourceClaim")[2] for event in node.failures(pod)}
    assert said <= told
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_what_somebody_else_has_is_waited_for(node: GoNode) -> None:
    free = f"devices/system/node/node0/{node.sysfs.POOL}/free_hugepages"
    node.sysfs.write(free, "3")
    pod = node.run("it", Ask("it", {"r": PAGES}))
    node.tells(
        pod,
        "it",
        f"[class=transient code=mem.hugepages.insufficient device={GO}/{NODE}/{PAGES} request=r"
        " retry=after-release] 8 pages of 2Mi needed on NUMA node 0, 3 are free; it is tried again.",
    )
    assert node.verdict("it")["count"] >= 2, "each time anew"
    assert node.kubelet.health(GO, NODE, PAGES).health == "Healthy"
    node.sysfs.write(free, "8")
    node.kubelet.wait_running(pod)
    node.remembers_prepared("it")
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_a_device_that_only_the_driver_finds_broken_is_unhealthy_until_it_could_be_prepared(
    node: GoNode,
) -> None:
    sees_online(node, "0")
    pod = node.run("it", Ask("it", {"r": CPU_1}))
    node.tells(
        pod,
        "it",
        f"[class=failed-device code=cpu.offline device={GO}/{NODE}/{CPU_1} request=r retry=after-repair]"
        " CPUs 1 are not online; the device is Unhealthy, its taint is offered.",
    )
    message = node.kubelet.wait_health(GO, NODE, CPU_1, "Unhealthy").message
    assert message.startswith("cpu.offline: CPUs 1 are not online. Advice: ")
    sees_online(node, "0-1")
    node.end(pod, node.running("another", Ask("another", {"r": CPU_1})))
    node.wait_healthy(CPU_1)


@pytest.mark.usefixtures("driver")
def test_a_device_that_is_known_to_be_broken_is_not_tried(node: GoNode) -> None:
    """In the words of its health, which the driver itself cannot know."""
    node.sysfs.resize(7)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    pod = node.run("it", Ask("it", {"r": PAGES}))
    node.tells(
        pod,
        "it",
        f"[class=failed-device code=mem.hugepages.pool_shrunk device={GO}/{NODE}/{PAGES} request=r"
        " retry=after-repair] 7 pages of 2mi on node 0, 8 declared; the device is Unhealthy, its taint is"
        " offered.",
    )
    node.sysfs.resize(8)
    node.kubelet.wait_running(pod)
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_a_claim_of_a_broken_device_can_be_unprepared_whatever_happens(node: GoNode) -> None:
    """Else its pod would never end. Of a device that is well the error is told, until it is mended."""
    broken = node.running("broken", Ask("broken", {"r": PAGES}))
    well = node.running("well", Ask("well", {"r": CPU_0}))
    node.sysfs.resize(7)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    for claim in ("broken", "well"):
        (file,) = node.cdi.glob(f"*uid-{claim}.json")
        file.unlink()
        (file / "in-the-way").mkdir(parents=True)
    node.kubelet.delete_pod(well)
    node.end(broken)
    node.kubelet.wait_for(lambda: node.kubelet.history.of(UnprepareFailed), "the failure")
    assert {(one.pod, one.error) for one in node.kubelet.history.of(UnprepareFailed)} == {
        (
            well.uid,
            "NodeUnprepareResources failed for ResourceClaim well: [class=unknown code=os.enotempty"
            f" device={GO}/{NODE}/{CPU_0} request=- retry=later] ENOTEMPTY (remove /tmp/<name>: directory not"
            " empty) while writing a CDI file: /tmp/<name>; it is tried again.",
        )
    }
    (file / "in-the-way").rmdir()
    file.rmdir()
    node.kubelet.wait_gone(well)


# --- nobody to ask ------------------------------------------------------------------------------------------


def test_without_an_agent_errors_are_the_drivers_own(node: GoNode) -> None:
    driver = node.driver()
    pod = node.run("it", Ask("it", {"r": CPU_0}, [WRONG]))
    node.tells(pod, "it", NOT_OF_IT)
    agent = node.agent()
    node.wait_healthy(CPU_0)
    node.kubelet.wait_for(lambda: any(BAD in event.message for event in node.failures(pod)), "the class")
    node.end(pod)
    assert (agent.end(), driver.end()) == (0, 0)


def test_what_happened_while_the_agent_was_away_is_told_when_it_is_back(
    node: GoNode, agent: Agent, driver: Program
) -> None:
    agent.end(signal.SIGKILL)
    pod = node.running("it", Ask("it", {"cpu": CPU_0, "pages": PAGES}))
    node.agent()
    node.remembers_prepared("it")
    node.end(pod)


def test_a_hung_agent_holds_no_claim_up(make_node: Callable[..., GoNode]) -> None:
    """The kubelet gives each call five seconds: to prepare five claims, one by one, and to unprepare them."""
    node = make_node(version="1.37", pace=replace(Pace.fast(), call_s=5.0))
    agent = node.agent()
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    agent.process.send_signal(signal.SIGSTOP)
    wrong = node.run("wrong", Ask("wrong", {"r": CPU_0}, [WRONG]))
    pods = [node.running(f"{number}", Ask(f"it-{number}", {"cpu": CPU_1})) for number in range(5)]
    node.tells(wrong, "wrong", NOT_OF_IT)
    node.end(*pods)
    calls = node.calls() + node.calls("NodeUnprepareResources")
    assert {call.error for call in calls} == {""}
    agent.process.send_signal(signal.SIGCONT)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.kubelet.wait_for(lambda: any(BAD in event.message for event in node.failures(wrong)), "the class")
    node.end(wrong)

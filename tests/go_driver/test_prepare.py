"""Claims through the Go driver: errors with the agent's text, and no claim that waits for an agent."""

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml
from agents import Agent
from driver_scenarios.program import Program
from kubelet import Pace
from kubelet.history import UnprepareFailed

from go_driver.api_server import RESOURCE
from go_driver.module import DRIVER
from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, Ask, GoNode, parameters

WRONG = parameters("CpuParameters", cpus="9")
WRONG_CPUS = "CPUs 9 are not of cpus-node0-0, which has 0"
BAD = (
    f"[class=bad-config code=cpu.opaque_cpuset.invalid device={GO}/{NODE}/{CPU_0} request=r retry=never]"
    f" {WRONG_CPUS}; the claim must change."
)
TOO_MANY = parameters("HugepagesParameters", pages=9)
BAD_TOO = (
    f"[class=bad-config code=config.invalid device={GO}/{NODE}/{PAGES} request=r retry=never]"
    " 9 pages of hugepages-2mi-node0-0, which has 8; the claim must change."
)


def set_online(node: GoNode, cpus: str) -> None:
    """Change the online CPUs for the driver only: the agent keeps the previous file open."""
    node.sysfs.write("devices/system/cpu/online", cpus)


# --- classes of failures ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
def test_bad_config_has_a_stable_text_and_is_tried_once(node: GoNode) -> None:
    pod = node.run("it", Ask("it", {"r": CPU_0}, [WRONG]))
    node.wait_event(pod, "it", BAD, times=3)
    verdict = node.verdict("it")
    assert (verdict["class"], verdict["code"]) == ("bad-config", "cpu.opaque_cpuset.invalid")
    assert verdict["count"] <= 1 + node.unanswered_tries(pod), "later answers come from the agent's memory"
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_undecodable_parameters_name_the_field(node: GoNode) -> None:
    pod = node.run("it", Ask("it", {"r": CPU_0}, [parameters("CpuParameters", cpu="0")]))
    node.wait_event(
        pod,
        "it",
        f"[class=bad-config code=config.decode device={GO}/{NODE}/{CPU_0} request=r retry=never]"
        ' parameters: json.strictError: unknown field "cpu"; the claim must change.',
    )
    node.end(pod)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [(WRONG, "cpu.opaque_cpuset.invalid"), (parameters("CpuParameters", cpu="0"), "config.decode")],
    ids=["value", "decode"],
)
@pytest.mark.usefixtures("driver")
def test_wrong_parameters_blame_only_the_devices_of_their_request(
    node: GoNode, wrong: dict[str, object], code: str
) -> None:
    pod = node.run("it", Ask("it", {"cpus": CPU_0, "pages": PAGES}, [{**wrong, "requests": ["cpus"]}]))
    text = f"[class=bad-config code={code} device={GO}/{NODE}/{CPU_0} request=cpus retry=never]"
    node.kubelet.wait_for(lambda: any(text in failure.message for failure in node.failures(pod)), text)
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_failing_claims_of_one_pod_name_each_other(node: GoNode) -> None:
    """The kubelet shows one of them at random."""
    pod = node.run("both", Ask("one", {"r": CPU_0}, [WRONG]), Ask("other", {"r": PAGES}, [TOO_MANY]))
    expected = {
        f" one: {BAD} Other failing claims in this call: default/other (bad-config config.invalid).",
        f" other: {BAD_TOO} Other failing claims in this call: default/one (bad-config"
        " cpu.opaque_cpuset.invalid).",
    }

    def has_expected_tries() -> bool:
        events = node.failures(pod)
        messages = {event.message.partition("ResourceClaim")[2] for event in events}
        return messages <= expected and sum(event.count for event in events) >= 3

    node.kubelet.wait_for(has_expected_tries, "three tries")
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_pages_in_use_are_transient_and_retried(node: GoNode) -> None:
    free = f"devices/system/node/node0/{node.sysfs.POOL}/free_hugepages"
    node.sysfs.write(free, "3")
    pod = node.run("it", Ask("it", {"r": PAGES}))
    node.wait_event(
        pod,
        "it",
        f"[class=transient code=mem.hugepages.insufficient device={GO}/{NODE}/{PAGES} request=r"
        " retry=after-release] 8 pages of 2Mi needed on NUMA node 0, 3 are free; the kubelet retries.",
    )
    assert node.verdict("it")["count"] >= 2, "tried at each retry"
    assert node.kubelet.health(GO, NODE, PAGES).health == "Healthy"
    node.sysfs.write(free, "8")
    node.kubelet.wait_running(pod)
    node.wait_prepared("it")
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_device_failure_found_by_the_driver_lasts_until_a_prepare(
    node: GoNode,
) -> None:
    set_online(node, "0")
    pod = node.run("it", Ask("it", {"r": CPU_1}))
    node.wait_event(
        pod,
        "it",
        f"[class=failed-device code=cpu.offline device={GO}/{NODE}/{CPU_1} request=r retry=after-repair]"
        " CPUs 1 are not online; the device is Unhealthy, its taint is offered.",
    )
    message = node.kubelet.wait_health(GO, NODE, CPU_1, "Unhealthy").message
    assert message.startswith("cpu.offline: CPUs 1 are not online. Advice: ")
    set_online(node, "0-1")
    node.end(pod, node.run_and_wait("another", Ask("another", {"r": CPU_1})))
    node.wait_healthy(CPU_1)


@pytest.mark.usefixtures("driver")
def test_claim_of_an_unhealthy_device_is_not_tried(node: GoNode) -> None:
    """The error has the text of the device's health, which only the agent knows."""
    node.sysfs.resize(7)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    node.own.add("8 pages of 2Mi needed on NUMA node 0, 7 are free")
    pod = node.run("it", Ask("it", {"r": PAGES}))
    node.wait_event(
        pod,
        "it",
        f"[class=failed-device code=mem.hugepages.pool_shrunk device={GO}/{NODE}/{PAGES} request=r"
        " retry=after-repair] 7 pages of 2mi on NUMA node 0, 8 declared; the device is Unhealthy, its taint is"  # noqa: E501
        " offered.",
    )
    node.sysfs.resize(8)
    node.kubelet.wait_running(pod)
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_failed_unprepare_of_an_unhealthy_device_succeeds(node: GoNode) -> None:
    """Otherwise its pod could not terminate. The error of a Healthy device is returned until it is fixed."""
    broken = node.run_and_wait("broken", Ask("broken", {"r": PAGES}))
    working = node.run_and_wait("working", Ask("working", {"r": CPU_0}))
    node.sysfs.resize(7)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    for claim in ("broken", "working"):
        (file,) = node.cdi.glob(f"*uid-{claim}.json")
        file.unlink()
        (file / "in-the-way").mkdir(parents=True)
    node.kubelet.delete_pod(working)
    node.end(broken)

    def classified_errors() -> set[tuple[str, str]]:
        failures = node.kubelet.history.of(UnprepareFailed)
        return {(failure.pod, failure.error) for failure in failures if "[class=" in failure.error}

    node.kubelet.wait_for(classified_errors, "a failure with the agent's text")
    assert classified_errors() == {
        (
            working.uid,
            "NodeUnprepareResources failed for ResourceClaim working: [class=unknown code=os.enotempty"
            f" device={GO}/{NODE}/{CPU_0} request=- retry=later] ENOTEMPTY (remove /tmp/<name>: directory not"
            " empty) while writing a CDI file: /tmp/<name>; the kubelet retries.",
        )
    }
    (file / "in-the-way").rmdir()
    file.rmdir()
    node.kubelet.wait_gone(working)


@pytest.mark.usefixtures("driver")
def test_claim_that_cannot_be_fetched_has_a_class(node: GoNode) -> None:
    """The kubeletplugin helper fetches claims before it calls the driver."""
    claim = Ask("it", {"r": CPU_0})
    pod = node.pod("it", claim)
    stored = f"{RESOURCE}/namespaces/default/resourceclaims/it"
    node.api.delete(stored, {})
    node.kubelet.run_pod(pod)
    expected = (
        "get resource claims: retrieve claim default/it: [class=transient code=claim.not_found retry=later]"
        ' API server: 404 NotFound: resourceclaims "it" not found; the kubelet retries.'
    )

    def has_expected_event() -> bool:
        return any(e.count >= 2 and e.message.endswith(expected) for e in node.kubelet.events_of(pod))

    node.kubelet.wait_for(has_expected_event, "the event, twice")
    texts = {
        event.message.partition(": rpc error: code = Unknown desc = ")[2]
        for event in node.kubelet.events_of(pod)
    }
    assert {text for text in texts if "[class=" in text} == {expected}
    node.api.add_claim(node.kubelet.claims["default", "it"])
    node.kubelet.wait_running(pod)
    node.end(pod)


# --- without the agent --------------------------------------------------------------------------------------


def test_errors_without_agent_are_the_drivers_own(node: GoNode) -> None:
    driver = node.driver()
    pod = node.run("it", Ask("it", {"r": CPU_0}, [WRONG]))
    node.wait_event(pod, "it", WRONG_CPUS)
    agent = node.agent()
    node.wait_healthy(CPU_0)
    node.kubelet.wait_for(lambda: any(BAD in event.message for event in node.failures(pod)), "the class")
    node.end(pod)
    assert (agent.end(), driver.end()) == (0, 0)


def test_results_without_agent_are_reported_when_it_is_back(
    node: GoNode, agent: Agent, driver: Program
) -> None:
    agent.end(signal.SIGKILL)
    pod = node.run_and_wait("it", Ask("it", {"cpu": CPU_0, "pages": PAGES}))
    node.agent()
    node.wait_prepared("it")
    node.end(pod)


def test_hung_agent_delays_no_claim_beyond_the_deadline(make_node: Callable[..., GoNode]) -> None:
    """The kubelet's deadline is fifteen seconds for each prepare and unprepare of five claims."""
    node = make_node(version="1.37", pace=replace(Pace.fast(), call_s=15.0))
    agent = node.agent()
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    agent.process.send_signal(signal.SIGSTOP)
    wrong = node.run("wrong", Ask("wrong", {"r": CPU_0}, [WRONG]))
    pods = [node.run_and_wait(f"{number}", Ask(f"it-{number}", {"cpu": CPU_1})) for number in range(5)]
    node.wait_event(wrong, "wrong", WRONG_CPUS)
    node.end(*pods)
    calls = node.calls() + node.calls("NodeUnprepareResources")
    assert {call.error for call in calls} == {""}
    agent.process.send_signal(signal.SIGCONT)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.kubelet.wait_for(lambda: any(BAD in event.message for event in node.failures(wrong)), "the class")
    node.end(wrong)


@pytest.mark.usefixtures("agent")
def test_command_and_parameters_of_the_readme_work(node: GoNode) -> None:
    readme = (DRIVER / "README.md").read_text()
    (command,) = re.findall(r"^\./go-driver (.*)$", readme, re.MULTILINE)
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    given, _, kubeconfig = command.partition(" --kubeconfig ")
    assert kubeconfig, "replaced by the address of the API server"
    node.driver(devices=given.split())
    node.wait_healthy(PAGES)
    values = yaml.safe_load(block)
    wanted = parameters(values.pop("kind"), **values)
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES}, (wanted,)))
    (file,) = node.cdi.glob("*.json")
    (device,) = json.loads(file.read_text())["devices"]
    assert f"size={values['pages'] * 2048}K" in device["containerEdits"]["mounts"][0]["options"]
    node.end(pod)

"""A failure of each class that is no device's: what the pod's events say, twice, and what is remembered."""

from collections.abc import Sequence, Set

import pytest
from private_mounts import within_mounts

from driver_scenarios.failing_driver import ANY_CLAIM
from driver_scenarios.node import (
    CPU_0,
    CPU_1,
    HOSTDEV,
    NODE,
    ORDER_TRIES,
    PAGES,
    SICK,
    TEXT_LIMIT,
    Ask,
    Node,
    parameters,
)
from driver_scenarios.program import Program

ON = f"device={HOSTDEV}/{NODE}/{PAGES} request=r"
ON_CPU = f"device={HOSTDEV}/{NODE}/{CPU_0} request=r"
READ_ONLY = 'mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"'


def stored_verdict(node: Node, claim: str) -> tuple[str, str]:
    """Return class and code of a claim's failure, as ``drahealth prepares`` lists them."""
    verdict = node.verdict(claim)
    return verdict["class"], verdict["code"]


# --- bad-config --------------------------------------------------------------------------------------------

BAD = {
    "an unknown field": (
        PAGES,
        parameters("HugepagesParameters", "r", page=1),
        "config.decode",
        f"[class=bad-config code=config.decode {ON} retry=never] HugepagesParameters: object contains unknown"
        " field `page`; the claim must change.",
    ),
    "a wrong kind": (
        PAGES,
        parameters("PageParameters", "r"),
        "config.decode",
        f"[class=bad-config code=config.decode {ON} retry=never] '{HOSTDEV}/v1/PageParameters' is not one of"
        f" the driver's kinds; did you mean '{HOSTDEV}/v1/HugepagesParameters'?; the claim must"
        f" change. Known kinds: {HOSTDEV}/v1/CpuParameters, {HOSTDEV}/v1/GpuParameters,"
        f" {HOSTDEV}/v1/HugepagesParameters.",
    ),
    "a kind for other devices": (
        PAGES,
        parameters("CpuParameters", "r"),
        "config.conflict",
        f"[class=bad-config code=config.conflict {ON} retry=never] CpuParameters for request r, which was"
        f" given {PAGES}; the claim must change.",
    ),
    "more pages than there are": (
        PAGES,
        parameters("HugepagesParameters", "r", pages=9),
        "config.invalid",
        f"[class=bad-config code=config.invalid {ON} retry=never] 9 pages are more than the 8 of {PAGES};"
        " the claim must change.",
    ),
    "CPUs that it was not given": (
        CPU_0,
        parameters("CpuParameters", "r", cpus="0-1"),
        "cpu.opaque_cpuset.invalid",
        f"[class=bad-config code=cpu.opaque_cpuset.invalid {ON_CPU} retry=never] CPUs 1 are not of {CPU_0},"
        " which has 0; the claim must change.",
    ),
}


@pytest.mark.usefixtures("hostdev")
def test_impossible_request_is_bad_config(node: Node) -> None:
    """e2e_node: gRPC serving error reported"""
    claims = {what.replace(" ", "-").lower(): bad for what, bad in BAD.items()}
    pods = {name: node.run(name, Ask(name, {"r": bad[0]}, [bad[1]])) for name, bad in claims.items()}
    for name, (_, _, _, text) in claims.items():
        node.wait_event(pods[name], name, text)
    verdicts = {
        name: (prepare["verdict"]["class"], prepare["verdict"]["code"])
        for name, prepare in node.prepares().items()
    }
    assert verdicts == {name: ("bad-config", bad[2]) for name, bad in claims.items()}
    assert node.cdi_files() == set()
    node.end(*pods.values())


@pytest.mark.usefixtures("hostdev")
def test_corrected_claim_is_prepared_at_the_next_try(node: Node) -> None:
    """e2e_node: prepare fails then succeeds"""
    wrong = Ask("it", {"r": CPU_0}, [parameters("CpuParameters", cpus="1")])
    pod = node.run("it", wrong)
    node.wait_event(pod, "it", BAD["CPUs that it was not given"][3])
    node.pod(
        "it", wrong._replace(config=())
    )  # the API server rejects such a change; a recreated claim is a new one
    node.kubelet.wait_running(pod)


# --- transient failures ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
def test_resource_of_another_claim_is_waited_for(node: Node) -> None:
    """e2e_node: prepare fails then succeeds"""
    first = node.run_and_wait("first", Ask("first", {"cpu": CPU_0}))
    second = node.run("second", Ask("second", {"r": CPU_0}))
    text = (
        f"[class=transient code=cpu.overlap {ON_CPU} retry=after-release] CPUs 0 of {CPU_0} are still held by"
        " claim default/first; the kubelet retries."
    )
    node.wait_event(second, "second", text)
    assert stored_verdict(node, "second") == ("transient", "cpu.overlap")
    node.end(first)
    node.kubelet.wait_running(second)
    node.wait_prepared("second")


@pytest.mark.usefixtures("hostdev")
def test_short_failure_is_retried_within_the_call(node: Node) -> None:
    """The claim's file is there a moment too late: the kubelet never hears of it."""
    pod = node.pod("it", Ask("it", {"cpu": CPU_0}))
    late = node.claim_file("it").rename(node.root / "late")
    node.kubelet.run_pod(pod)
    node.kubelet.wait_for(lambda: node.kubelet.claim_info("it"), "the call")
    late.rename(node.claim_file("it"))
    node.kubelet.wait_running(pod)
    assert node.kubelet.events_of(pod) == []
    assert len(node.calls()) == 1


# --- permanent failures ------------------------------------------------------------------------------------


def test_unwritable_directory_is_permanent_without_device_fault(node: Node) -> None:
    node.cdi.mkdir()
    driver = node.hostdev(within=within_mounts(READ_ONLY, node.cdi))
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    pod = node.run("it", Ask("it", {"r": CPU_0}))
    text = (
        f"[class=permanent code=cdi.write {ON_CPU} retry=after-fix] EROFS (Read-only file system) while"
        " writing a CDI file: /tmp/<name>; the node or its driver must be fixed."
    )
    node.wait_event(pod, "it", text)
    assert stored_verdict(node, "it") == ("permanent", "cdi.write")
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    assert driver.end() == 0
    restarted = node.hostdev()
    node.wait_healthy(CPU_1)
    node.end(node.run_and_wait("another", Ask("another", {"r": CPU_1})))
    node.kubelet.wait_running(pod)  # a failed write is tried again at each prepare
    assert "prepare failed: " not in restarted.log
    node.end(pod)
    node.end(node.run_and_wait("next", Ask("next", {"r": CPU_0})))


# --- unknown -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
def test_malformed_kernel_file_is_a_driver_bug_and_retried(node: Node) -> None:
    free = "devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages"
    node.sysfs.write(free, "many")
    pod = node.run("it", Ask("it", {"r": PAGES}))
    text = (
        f"[class=unknown code=driver.bug.value_error {ON} retry=later] ValueError: invalid literal for int()"
        " with base 10: 'many'; the kubelet retries."
    )
    node.wait_event(pod, "it", text)
    assert stored_verdict(node, "it") == ("unknown", "driver.bug.value_error")
    node.sysfs.write(free, "8")
    node.kubelet.wait_running(pod)


def test_unknown_exception_is_class_unknown_and_retried(node: Node, failing_driver: Program) -> None:
    node.fate(it=["odd", "the moon is full"])
    pod = node.run("it", Ask("it", {"r": "thing-0"}), driver=SICK)
    text = (
        f"[class=unknown code=driver.exception.odd device={SICK}/{NODE}/thing-0 request=r retry=later]"
        " Odd: the moon is full; the kubelet retries."
    )
    node.wait_event(pod, "it", text)
    assert len(failing_driver.records("prepare")) >= 2, "the driver is called each time"
    verdict = node.verdict("it")
    assert (verdict["class"], verdict["count"] >= 2) == ("unknown", True)
    node.fate()
    node.kubelet.wait_running(pod)
    node.wait_healthy("thing-0", driver=SICK)


# --- several at once ---------------------------------------------------------------------------------------


def texts_of(node: Node, names: Sequence[str], failed: Set[str]) -> dict[str, set[str]]:
    """Return the kubelet's texts of each claim, from calls until each failed claim was shown."""
    pod = node.pod("all", *(Ask(name, {"r": f"thing-{i}"}) for i, name in enumerate(names)), driver=SICK)
    texts: dict[str, set[str]] = {}
    for _ in range(ORDER_TRIES):
        with pytest.raises(ValueError, match="failed for ResourceClaim") as caught:
            node.kubelet.prepare_pod(pod)
        claim, _, text = str(caught.value).partition("ResourceClaim ")[2].partition(": ")
        texts.setdefault(claim, set()).add(text)
        if failed <= texts.keys():
            break
    return texts


def test_every_text_names_all_failed_claims_in_any_order(node: Node, failing_driver: Program) -> None:
    node.fate(a=["bad", "no such mode"], b=["busy", "in use"], c=["odd", "full moon"])
    found = texts_of(node, ["a", "b", "c", "fine"], {"a", "b", "c"})
    assert found == {
        "a": {
            f"[class=bad-config code=config.invalid device={SICK}/{NODE}/thing-0 request=r retry=never]"
            " no such mode; the claim must change. Other failing claims in this call: default/b (transient"
            " driver.transient), default/c (unknown driver.exception.odd)."
        },
        "b": {
            f"[class=transient code=driver.transient device={SICK}/{NODE}/thing-1 request=r retry=later]"
            " in use; the kubelet retries. Other failing claims in this call: default/a (bad-config"
            " config.invalid), default/c (unknown driver.exception.odd)."
        },
        "c": {
            f"[class=unknown code=driver.exception.odd device={SICK}/{NODE}/thing-2 request=r retry=later]"
            " Odd: full moon; the kubelet retries. Other failing claims in this call: default/a (bad-config"
            " config.invalid), default/b (transient driver.transient)."
        },
    }
    assert {name for call in node.calls() for name in call.response.claims if call.claims} == {
        f"uid-{name}" for name in ("a", "b", "c", "fine")
    }


def test_hundreds_of_failed_claims_fit_in_one_readable_answer(node: Node) -> None:
    """The limit of each text bounds the answer: a thousand claims would fit into 4 MiB."""
    node.start_failing_driver("at-once")
    node.kubelet.wait_registered(SICK)
    asks = [Ask(f"{'n' * 230}-{number:04}", {"r": f"thing-{number % 4}"}) for number in range(256)]
    node.fate(**{ANY_CLAIM: ["bad", "no such mode " * 100]})
    with pytest.raises(ValueError, match="Other failing claims in this call: default/nn") as caught:
        node.kubelet.prepare_pod(node.pod("all", *asks, driver=SICK))
    assert "and 253 more." in str(caught.value)
    (call,) = node.calls()
    assert call.error == ""
    assert set(call.response.claims) == {ask.uid for ask in asks}
    assert all("class=bad-config" in claim.error for claim in call.response.claims.values())
    assert max(len(claim.error.encode()) for claim in call.response.claims.values()) <= TEXT_LIMIT
    assert len(node.prepares()) == 256


def test_failing_driver_delays_no_other_driver(node: Node, hostdev: Program, failing_driver: Program) -> None:
    """e2e_node: two plugins, one failing"""
    node.fate(bad=["busy", "in use"])
    bad = node.run("bad", Ask("bad", {"r": "thing-0"}), driver=SICK)
    good = node.run_and_wait("good", Ask("good", {"r": CPU_0}))
    text = (
        f"[class=transient code=driver.transient device={SICK}/{NODE}/thing-0 request=r retry=later] in use;"
    )
    node.wait_event(bad, "bad", f"{text} the kubelet retries.")
    failing_driver.end()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.end(good)

"""A failure of each class that is no device's: what the pod's events say, twice, and what is remembered."""

from collections.abc import Sequence

import pytest

from driver_scenarios.node import CPU_0, CPU_1, HOSTDEV, NODE, PAGES, SICK, TEXT_LIMIT, Ask, Node, parameters
from driver_scenarios.program import Program
from driver_scenarios.sick_driver import EVERYBODY

ON = f"device={HOSTDEV}/{NODE}/{PAGES} request=r"
ON_CPU = f"device={HOSTDEV}/{NODE}/{CPU_0} request=r"
MOUNT = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
READ_ONLY = ("unshare", "-m", "sh", "-c", MOUNT)
"""In a mount namespace of its own a program may not write into a directory."""


def remembered(node: Node, claim: str) -> tuple[str, str]:
    """Class and code, as ``drahealth prepares`` has them."""
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
        f"[class=bad-config code=config.decode {ON} retry=never] '{HOSTDEV}/v1/PageParameters' is none of the"
        f" driver's kinds; did you mean '{HOSTDEV}/v1/HugepagesParameters'?; the claim must change. They are"
        f" {HOSTDEV}/v1/CpuParameters, {HOSTDEV}/v1/GpuParameters, {HOSTDEV}/v1/HugepagesParameters.",
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
def test_what_can_never_be_had_is_the_users_to_mend(node: Node) -> None:
    """e2e_node: gRPC serving error reported"""
    claims = {what.replace(" ", "-").lower(): bad for what, bad in BAD.items()}
    pods = {name: node.run(name, Ask(name, {"r": bad[0]}, [bad[1]])) for name, bad in claims.items()}
    for name, (_, _, _, text) in claims.items():
        node.tells(pods[name], name, text)
    said = {name: (one["verdict"]["class"], one["verdict"]["code"]) for name, one in node.prepares().items()}
    assert said == {name: ("bad-config", bad[2]) for name, bad in claims.items()}
    assert node.cdi_files() == set()
    node.end(*pods.values())


@pytest.mark.usefixtures("hostdev")
def test_a_claim_that_was_corrected_is_prepared_at_the_next_try(node: Node) -> None:
    """e2e_node: prepare fails then succeeds"""
    wrong = Ask("it", {"r": CPU_0}, [parameters("CpuParameters", cpus="1")])
    pod = node.run("it", wrong)
    node.tells(pod, "it", BAD["CPUs that it was not given"][3])
    node.pod(
        "it", wrong._replace(config=())
    )  # the API server takes no such change; made anew it is a new claim
    node.kubelet.wait_running(pod)


# --- transient ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
def test_what_another_claim_holds_is_waited_for(node: Node) -> None:
    """e2e_node: prepare fails then succeeds"""
    first = node.running("first", Ask("first", {"cpu": CPU_0}))
    second = node.run("second", Ask("second", {"r": CPU_0}))
    text = (
        f"[class=transient code=cpu.overlap {ON_CPU} retry=after-release] CPUs 0 of {CPU_0} are still held by"
        " claim default/first; it is tried again."
    )
    node.tells(second, "second", text)
    assert remembered(node, "second") == ("transient", "cpu.overlap")
    node.end(first)
    node.kubelet.wait_running(second)
    node.remembers_prepared("second")


@pytest.mark.usefixtures("hostdev")
def test_a_hitch_is_waited_out_within_the_call(node: Node) -> None:
    """The claim's file is there a moment too late: the kubelet never hears of it."""
    pod = node.pod("it", Ask("it", {"cpu": CPU_0}))
    late = node.claim_file("it").rename(node.root / "late")
    node.kubelet.run_pod(pod)
    node.kubelet.wait_for(lambda: node.kubelet.claim_info("it"), "the call")
    late.rename(node.claim_file("it"))
    node.kubelet.wait_running(pod)
    assert node.kubelet.events_of(pod) == []
    assert len(node.calls()) == 1


# --- permanent ---------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_the_nodes_and_no_device_is_sick_of_it(node: Node) -> None:
    node.cdi.mkdir()
    driver = node.hostdev(within=(*READ_ONLY, str(node.cdi)))
    skip_unless_mounted(driver)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    pod = node.run("it", Ask("it", {"r": CPU_0}))
    text = (
        f"[class=permanent code=cdi.write {ON_CPU} retry=after-fix] EROFS (Read-only file system) while"
        " writing a CDI file: /tmp/<name>; the node or its driver must be mended."
    )
    node.tells(pod, "it", text)
    assert remembered(node, "it") == ("permanent", "cdi.write")
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    assert driver.end() == 0
    mended = node.hostdev()
    node.wait_healthy(CPU_1)
    node.end(node.running("another", Ask("another", {"r": CPU_1})))
    node.tells(pod, "it", text, times=4)
    assert "could not be prepared" not in mended.log, "answered from memory, for a minute"
    node.end(pod)
    node.end(node.running("anew", Ask("anew", {"r": CPU_0})))


def skip_unless_mounted(driver: Program) -> None:
    driver.logs("\n")
    if "unshare:" in driver.log or "mount:" in driver.log:
        pytest.skip(f"may not mount: {driver.log.strip()}")


# --- unknown -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
def test_nonsense_of_the_kernel_s_is_a_mistake_of_the_driver_s_and_tried_again(node: Node) -> None:
    free = "devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages"
    node.sysfs.write(free, "many")
    pod = node.run("it", Ask("it", {"r": PAGES}))
    text = (
        f"[class=unknown code=driver.bug.value_error {ON} retry=later] ValueError: invalid literal for int()"
        " with base 10: 'many'; it is tried again."
    )
    node.tells(pod, "it", text)
    assert remembered(node, "it") == ("unknown", "driver.bug.value_error")
    node.sysfs.write(free, "8")
    node.kubelet.wait_running(pod)


def test_an_exception_that_nobody_knows_is_unknown_and_tried_again(node: Node, sick: Program) -> None:
    node.fate(it=["odd", "the moon is full"])
    pod = node.run("it", Ask("it", {"r": "thing-0"}), driver=SICK)
    text = (
        f"[class=unknown code=driver.exception.odd device={SICK}/{NODE}/thing-0 request=r retry=later]"
        " Odd: the moon is full; it is tried again."
    )
    node.tells(pod, "it", text)
    assert len(sick.said("prepare")) >= 2, "asked each time"
    verdict = node.verdict("it")
    assert (verdict["class"], verdict["count"] >= 2) == ("unknown", True)
    node.fate()
    node.kubelet.wait_running(pod)
    node.wait_healthy("thing-0", driver=SICK)


# --- several at once ---------------------------------------------------------------------------------------


def texts_of(node: Node, names: Sequence[str], tries: int) -> dict[str, set[str]]:
    """What the kubelet says of each claim, in however many tries with its dice."""
    pod = node.pod("all", *(Ask(name, {"r": f"thing-{i}"}) for i, name in enumerate(names)), driver=SICK)
    said: dict[str, set[str]] = {}
    for _ in range(tries):
        with pytest.raises(ValueError, match="failed for ResourceClaim") as caught:
            node.kubelet.prepare_pod(pod)
        claim, _, text = str(caught.value).partition("ResourceClaim ")[2].partition(": ")
        said.setdefault(claim, set()).add(text)
    return said


def test_every_text_names_all_that_failed_and_none_depends_on_the_kubelets_dice(
    node: Node, sick: Program
) -> None:
    node.fate(a=["bad", "no such mode"], b=["busy", "in use"], c=["odd", "full moon"])
    said = texts_of(node, ["a", "b", "c", "fine"], 24)
    assert said == {
        "a": {
            f"[class=bad-config code=config.invalid device={SICK}/{NODE}/thing-0 request=r retry=never]"
            " no such mode; the claim must change. Other failing claims in this call: default/b (transient"
            " driver.transient), default/c (unknown driver.exception.odd)."
        },
        "b": {
            f"[class=transient code=driver.transient device={SICK}/{NODE}/thing-1 request=r retry=later]"
            " in use; it is tried again. Other failing claims in this call: default/a (bad-config"
            " config.invalid), default/c (unknown driver.exception.odd)."
        },
        "c": {
            f"[class=unknown code=driver.exception.odd device={SICK}/{NODE}/thing-2 request=r retry=later]"
            " Odd: full moon; it is tried again. Other failing claims in this call: default/a (bad-config"
            " config.invalid), default/b (transient driver.transient)."
        },
    }
    assert {name for call in node.calls() for name in call.response.claims if call.claims} == {
        f"uid-{name}" for name in ("a", "b", "c", "fine")
    }


def test_a_thousand_claims_that_fail_at_once_are_one_answer_that_can_be_read(node: Node) -> None:
    """Well within 4 MiB, whatever their names."""
    node.sick("at-once")
    node.kubelet.wait_registered(SICK)
    asks = [Ask(f"{'n' * 230}-{number:04}", {"r": f"thing-{number % 4}"}) for number in range(1024)]
    node.fate(**{EVERYBODY: ["bad", "no such mode " * 100]})
    with pytest.raises(ValueError, match="Other failing claims in this call: default/nn") as caught:
        node.kubelet.prepare_pod(node.pod("all", *asks, driver=SICK))
    assert "and 1022 more." in str(caught.value)
    (call,) = node.calls()
    assert call.error == ""
    assert set(call.response.claims) == {ask.uid for ask in asks}
    assert all("class=bad-config" in one.error for one in call.response.claims.values())
    assert max(len(one.error.encode()) for one in call.response.claims.values()) <= TEXT_LIMIT
    assert len(node.prepares()) == 1024


def test_a_driver_that_fails_delays_no_other_one(node: Node, hostdev: Program, sick: Program) -> None:
    """e2e_node: two plugins, one failing"""
    node.fate(bad=["busy", "in use"])
    bad = node.run("bad", Ask("bad", {"r": "thing-0"}), driver=SICK)
    good = node.running("good", Ask("good", {"r": CPU_0}))
    text = (
        f"[class=transient code=driver.transient device={SICK}/{NODE}/thing-0 request=r retry=later] in use;"
    )
    node.tells(bad, "bad", f"{text} it is tried again.")
    sick.end()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.end(good)

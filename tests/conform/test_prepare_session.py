"""Sessions that prepare claims: what they refuse, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from go_driver.api_server import SLICES
from go_driver.api_server import ApiError as Refusal
from kube_api import FakeKubeApi, forbid, write_kubeconfig
from patience import PATIENCE_S

from conform.preparing import CLAIMS, DEVICE, MADE, Answered, Asked, ClaimError, PreparingDriver, claim_object
from conform.running import TIMED, ConformRun, conform_driver, repeated_run

WAITING: Final = "drahealth: waiting up to 45 s for the driver, to unprepare; Ctrl-C ends at once\n"


class ObservedDriver(PreparingDriver):
    """Driver that records what is prepared, and blocks its second prepare call if a test wants that."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.prepared = dict[str, str]()
        """Names of the prepared claims, by UID."""
        self.calls = 0
        self.blocked, self.released = threading.Event(), threading.Event()
        self.released.set()
        self.is_stuck = False
        """Whether every unprepare fails."""
        self.created = list[str]()
        """Devices of the claims that were created."""

    def prepare_claims(self, claims: Sequence[Asked]) -> Iterable[tuple[str, Sequence[Answered] | str]]:
        self.prepared |= {claim.uid: claim.name for claim in claims if claim.name in self.claims}
        self.calls += 1
        if self.calls == 2:
            self.blocked.set()
            self.released.wait(PATIENCE_S)
        return super().prepare_claims(claims)

    def create(self, text: str) -> None:
        [result] = json.loads(text)["status"]["allocation"]["devices"]["results"]
        self.created.append(result["device"])
        super().create(text)

    def unprepare_claim(self, claim: Asked) -> None:
        if self.is_stuck:
            raise ClaimError("the device is busy")
        super().unprepare_claim(claim)
        self.prepared.pop(claim.uid, None)


@pytest.fixture
def driver() -> Iterator[ObservedDriver]:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        ObservedDriver(Path(directory)) as driver,
    ):
        yield driver


def run(driver: ObservedDriver, *flags: str) -> ConformRun:
    """Run a session, again if a busy machine delayed the answer to GetInfo: then nothing is prepared."""

    def has_answered(found: ConformRun) -> bool:
        return not found.output or found.results["registration.get_info"] in {"pass", "warn"}

    return repeated_run(lambda: conform_driver(driver, *flags, for_s=2), has_answered)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_session_unprepares_and_deletes_claims(
    driver: ObservedDriver, number: signal.Signals
) -> None:
    driver.released.clear()
    flags = [flag.format(root=driver.root) for flag in (*CLAIMS, *MADE)]
    places = ["--plugin-dir", str(driver.registry), "--kubelet-dir", str(driver.root), "--for", "2s"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "conform", *places, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("DRAHEALTH_")},
    )
    try:
        assert driver.blocked.wait(PATIENCE_S), "the session repeats the first prepare"
        assert len(driver.prepared) == 3
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.readline() == WAITING
        assert len(driver.prepared) == 3, "a prepare in progress is not overtaken"
        driver.released.set()
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        driver.released.set()
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors == ""
    assert driver.prepared == {}
    assert set(driver.claims) == {"train", "infer"}
    assert list(driver.cdi.iterdir()) == []


def test_claim_that_stays_prepared_is_named(driver: ObservedDriver) -> None:
    driver.is_stuck = True
    found = run(driver, *CLAIMS)
    assert found.results["unprepare.all"] == "fail"
    assert (
        "drahealth: claim default/train: unprepare failed: the device is busy; it may stay prepared\n"
        in found.errors
    )


def test_restored_device_is_restored_once(driver: ObservedDriver) -> None:
    found = repeated_run(lambda: run(driver, *CLAIMS, *DEVICE), lambda found: found.code == 0)
    assert found.matches({}), found.not_passed
    assert found.results["unprepare.lost_device"] == "pass"
    assert not driver.removed


def test_claims_in_yaml_are_prepared(driver: ObservedDriver) -> None:
    claims = driver.root / "claims.yaml"
    documents = [json.dumps(claim) for claim in driver.claims.values()]
    claims.write_text("".join(f"---\n{document}\n" for document in documents))
    found = run(driver, "--prepare", "--claims", str(claims), "--cdi-dir", "{root}/cdi")
    assert found.observation("prepare.first") == "2 claims with v1.DRAPlugin"


def test_bad_claims_of_a_file_must_fail(driver: ObservedDriver) -> None:
    bad = driver.root / "bad.json"
    bad.write_text(json.dumps([claim_object("other", ("gpus", "gpu-0")), driver.claims["train"]]))
    expected = {"prepare.bad_claim": "fail"}
    found = repeated_run(
        lambda: run(driver, *CLAIMS, "--bad-claims", str(bad)), lambda found: found.not_passed == expected
    )
    assert found.matches(expected), found.not_passed
    assert found.observation("prepare.bad_claim") == "default/train: no error"


def test_reserved_claim_is_refused_before_any_call(driver: ObservedDriver) -> None:
    reserved = claim_object("train", ("gpus", "gpu-0"))
    reserved["status"]["reservedFor"] = [{"resource": "pods", "name": "p", "uid": "u"}]
    (driver.root / "claims.json").write_text(json.dumps(reserved))
    found = run(driver, *CLAIMS)
    assert (found.code, found.output, driver.calls) == (64, "", 0)
    assert found.errors == (
        "drahealth: --claims: claim default/train is reserved for a pod, from which unprepare would take the "
        "devices; use an allocated claim without reservedFor\n"
    )


def test_claim_of_another_driver_is_refused(driver: ObservedDriver) -> None:
    other = claim_object("train", ("gpus", "gpu-0"))
    other["status"]["allocation"]["devices"]["results"][0]["driver"] = "nic.example.com"
    (driver.root / "claims.json").write_text(json.dumps(other))
    found = run(driver, *CLAIMS)
    assert (found.code, driver.calls) == (64, 0)
    assert "claim train: the claim has no allocated device of gpu.example.com" in found.errors


def test_failed_claim_command_is_named_and_nothing_is_prepared(driver: ObservedDriver) -> None:
    found = run(driver, "--prepare", "--device", "node-a/gpu-0", "--claim-command", "exit 3;")
    assert (found.code, driver.calls) == (64, 0)
    assert found.errors.endswith("drahealth: --claim-command: 'exit 3; create' exited with 3\n")


def test_failed_restart_command_is_a_reason(driver: ObservedDriver) -> None:
    found = run(driver, *CLAIMS, "--restart-command", "exit 4")
    assert found.results["prepare.restart"] == "not run"
    assert found.observation("prepare.restart") == "--restart-command: 'exit 4' exited with 4"
    assert found.results["unprepare.all"] == "pass"


# --- claims that the session makes -----------------------------------------------------------------------


def slices_file(driver: ObservedDriver, *devices: str) -> str:
    """Write the ResourceSlices of a driver, and a claim that holds gpu-9, as kubectl writes them."""
    spec = {
        "driver": driver.name,
        "nodeName": "node-a",
        "pool": {"name": "node-a", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": name} for name in devices],
    }
    items = [{"kind": "ResourceSlice", "spec": spec}, claim_object("held", ("it", "gpu-9"))]
    path = driver.root / "slices.json"
    path.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": items}))
    return str(path)


def test_claims_are_made_for_free_devices_of_a_file(driver: ObservedDriver) -> None:
    made = ("--claim-command", f"{driver.root}/act", "--cdi-dir", str(driver.cdi))
    found = run(driver, "--prepare", "--slices", slices_file(driver, "gpu-0", "gpu-1", "gpu-9"), *made)
    results = {code: result for code, result in found.results.items() if "prepare" in code}
    assert results["prepare.first"] == results["unprepare.deleted_claim"] == "pass", found.errors
    assert results["prepare.devices"] == "pass"
    assert driver.calls > 0
    assert set(driver.claims) == {"train", "infer"}


def test_devices_of_other_flags_are_not_chosen_from_a_file(driver: ObservedDriver) -> None:
    slices = slices_file(driver, "gpu-0", "gpu-1", "gpu-2", "gpu-3")
    made = ("--claim-command", f"{driver.root}/act", "--cdi-dir", str(driver.cdi))
    flags = ("--claims", "{root}/claims.json", "--slices", slices, "--device", "node-a/gpu-2")
    run(driver, "--prepare", *flags, *made)
    assert driver.created == ["gpu-2", "gpu-3"]


def test_odd_output_of_the_claim_command_is_named_and_the_claim_deleted(driver: ObservedDriver) -> None:
    command = driver.root / "odd"
    command.write_text(f"#!/bin/sh\n{driver.root}/act $1\n[ $1 = delete ] || echo '{{\"a\": 1}}'\n")
    command.chmod(0o755)
    found = run(driver, "--prepare", "--device", "node-a/gpu-0", "--claim-command", str(command))
    assert (found.code, driver.calls) == (64, 0)
    problem = "claim None: None of None is not a ResourceClaim of resource.k8s.io"
    assert found.errors == f"drahealth: --claim-command: {problem}\n"
    assert set(driver.claims) == {"train", "infer"}


def test_odd_claim_of_a_file_is_named(driver: ObservedDriver) -> None:
    (driver.root / "claims.json").write_text(json.dumps(driver.claims["train"] | {"metadata": []}))
    found = run(driver, *CLAIMS)
    assert (found.code, driver.calls) == (64, 0)
    assert found.errors == "drahealth: --claims: claim None: metadata: is a list, not an object\n"


def test_odd_taint_in_a_file_of_slices_is_named(driver: ObservedDriver) -> None:
    path = Path(slices_file(driver, "gpu-0"))
    path.write_text(path.read_text().replace('"gpu-0"', '"gpu-0", "taints": [{"effect": []}]'))
    found = run(driver, "--prepare", "--slices", str(path))
    assert (found.code, driver.calls) == (64, 0)
    assert found.errors == "drahealth: --slices: taint.effect: is a list, not text\n"


def test_lack_of_free_devices_is_named_and_nothing_is_prepared(driver: ObservedDriver) -> None:
    found = run(driver, "--prepare", "--slices", slices_file(driver, "gpu-9"))
    assert found.code == 64
    assert found.errors == f"drahealth: --slices: no device of driver {driver.name} is free: 1 in claims\n"
    assert driver.calls == 0


class ApiDriver(ObservedDriver):
    """Driver that reads its claims from an API server."""

    api: FakeKubeApi

    def find_claim(self, claim: Asked) -> Any:
        try:
            found = self.api.get(
                f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}"
            )
        except Refusal as error:
            raise ClaimError(str(error)) from None
        if found["metadata"]["uid"] != claim.uid:
            raise ClaimError(f"claim {claim} was created again")
        return found


def test_claims_are_made_at_the_api_server_and_deleted() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        FakeKubeApi(None) as api,
        ApiDriver(Path(directory)) as driver,
    ):
        driver.api = api
        items = json.loads(Path(slices_file(driver, "gpu-0", "gpu-1", "gpu-2")).read_text())["items"]
        api.create(SLICES, items[0] | {"metadata": {"name": "one"}})
        held = items[1] | {"spec": {}}
        api.add_claim(held)
        kubeconfig = write_kubeconfig(driver.root / "kubeconfig", api, token="me")
        found = run(driver, "--prepare", "--kubeconfig", str(kubeconfig), "--cdi-dir", str(driver.cdi))
        assert found.errors == ""
        assert found.results["prepare.first"] == found.results["unprepare.deleted_claim"] == "pass"
        allowed = {"prepare.errors.names", "health.heartbeat", "health.v1"}
        assert found.not_passed.keys() <= allowed | TIMED
        claims = api.all_of("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims", {})["items"]
        assert [claim["metadata"]["name"] for claim in claims] == ["held"]
        assert {call.token for call in api.calls} == {"Bearer me"}


def test_claim_that_is_half_made_is_deleted() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        FakeKubeApi(None) as api,
        ApiDriver(Path(directory)) as driver,
    ):
        driver.api = api
        api.create(
            SLICES,
            json.loads(Path(slices_file(driver, "gpu-0")).read_text())["items"][0]
            | {"metadata": {"name": "one"}},
        )
        api.refuse = forbid("PUT", "/status")
        kubeconfig = write_kubeconfig(driver.root / "kubeconfig", api)
        found = run(driver, "--prepare", "--kubeconfig", str(kubeconfig))
        assert found.code == 77
        assert "update of resourceclaims/status.resource.k8s.io" in found.errors
        assert not api.all_of("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims", {})["items"]
        assert driver.calls == 0

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
from typing import Final

import pytest
from patience import PATIENCE_S

from conform.preparing import (
    CLAIMS,
    DEVICE,
    MADE,
    Answered,
    Asked,
    ClaimError,
    PreparingDriver,
    claim_object,
)
from conform.running import ConformRun, conform_driver

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

    def prepare_claims(self, claims: Sequence[Asked]) -> Iterable[tuple[str, Sequence[Answered] | str]]:
        self.prepared |= {claim.uid: claim.name for claim in claims if claim.name in self.claims}
        self.calls += 1
        if self.calls == 2:
            self.blocked.set()
            self.released.wait(PATIENCE_S)
        return super().prepare_claims(claims)

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
    return conform_driver(driver, *flags, for_s=2)


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
    assert run(driver, *CLAIMS, *DEVICE).code == 0
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
    found = run(driver, *CLAIMS, "--bad-claims", str(bad))
    assert found.not_passed == {"prepare.bad_claim": "fail"}
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
    assert found.code == 3
    assert found.observation("prepare.restart") == "--restart-command: 'exit 4' exited with 4"
    assert found.results["unprepare.all"] == "pass"

"""Driver of ``drahealth new-driver --language go``: its own tests, and the driver on a node."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from conform.running import repeated_run
from driver_scenarios.program import Program
from kubelet.history import Changed, StreamEnded
from kubelet_real.implementations import MARKS
from wire.serving import eventually

from agent.cli.main import main as drahealth
from go_driver.module import DRIVER, LIBRARY, LIBRARY_PATH, ROOT, GoModule
from go_driver.node import GO, NODE, Ask, GoNode, GoProgram
from go_driver.objects import Decode

FIRST, OTHER = "godev-0", "godev-1"
MISSING: Final = "godev.missing: "


def new_driver(go: GoModule, name: str, directory: Path) -> GoModule:
    """Create a driver whose library is that of the checkout; skip the test if a module is missing."""
    assert drahealth(["new-driver", name, "--language", "go", "--directory", str(directory)]) == 0
    shutil.copy(DRIVER / "go.sum", directory)
    made = GoModule(directory, {**go.environ, "GOFLAGS": "-mod=mod -buildvcs=false -trimpath"})
    assert made.go("mod", "edit", f"-replace={LIBRARY_PATH}={LIBRARY}").returncode == 0
    tidied = made.go("mod", "tidy")
    if tidied.returncode != 0:
        assert "SECURITY ERROR" not in tidied.stderr, tidied.stderr
        pytest.skip(f"Go modules cannot be downloaded: {tidied.stderr.strip().splitlines()[-1]}")
    return made


@pytest.fixture(scope="session")
def generated_module(go: GoModule, tmp_path_factory: pytest.TempPathFactory) -> GoModule:
    return new_driver(go, GO, tmp_path_factory.mktemp("new") / "driver")


# --- files of the new driver ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [GO, f"3d-{'long-' * 9}card.a.io"])
def test_new_driver_is_formatted_and_passes_vet_and_its_tests(
    go: GoModule, tmp_path: Path, name: str
) -> None:
    made = new_driver(go, name, tmp_path / "driver")
    gofmt = Path(made.go("env", "GOROOT").stdout.strip(), "bin", "gofmt")
    done = subprocess.run(
        [gofmt, "-l", "-d", "."], cwd=made.directory, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("", "")
    for command in (("vet", "./..."), ("test", "-count=1", "-short", "./...")):
        done = made.go(*command)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow  # conform records for 40 s
def test_new_driver_passes_conform_with_claims_at_once(generated_module: GoModule, tmp_path: Path) -> None:
    command = tmp_path / "drahealth"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m agent "$@"\n')
    command.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    test = ("test", "-count=1", "-v", "-run", "Conforms", ".")
    done = repeated_run(  # conform warns of answers that a busy machine delays by half a second
        lambda: generated_module.go(*test, PATH=path, PYTHONPATH=str(ROOT)),
        lambda run: "drahealth conform: exit status 1\n" not in run.stdout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--- PASS: TestDriverConforms" in done.stdout, done.stdout


# --- on a node --------------------------------------------------------------------------------------------


class NewDriverNode(GoNode):
    """Node of the new driver, with device files that a test can remove."""

    def __init__(self, *arguments: Any, **kubelet: Any) -> None:
        super().__init__(*arguments, **kubelet)
        self.dev = self.root / "dev"
        self.dev.mkdir()
        for name in ("null", "zero"):
            self.restore(name)

    def restore(self, name: str) -> None:
        """Create a device file."""
        (self.dev / name).symlink_to(f"/dev/{name}")

    def new_driver(self) -> Program:
        """Start the driver, and wait until its devices are Healthy."""
        directories = (
            "--kubelet-dir",
            str(self.kubelet.root),
            "--cdi-dir",
            str(self.cdi),
            "--dev",
            str(self.dev),
        )
        places = ("--drahealth-socket", str(self.socket), "--api-server", self.api.url, "--node-name", NODE)
        log_file = self.root / f"log-{len(self._programs)}"
        program = GoProgram(self.binary, *directories, *places, log_file=log_file)
        self._programs.append(program)
        self.wait_healthy(FIRST, OTHER)
        return program

    def codes(self, device: str) -> tuple[str, list[str]]:
        """Return the agent's health and codes of a device, from its own socket."""
        document = self.drahealth("watch", "--once", str(self.root / "agent/run/agent.sock"))
        (found,) = [entry for entry in document["devices"] if entry["name"] == device]
        return found["health"], [cause["code"] for cause in found["causes"]]


@pytest.fixture
def make_node(
    generated_module: GoModule, decode: Decode, tmp_path: Path
) -> Iterator[Callable[..., NewDriverNode]]:
    generated_module.build(tmp_path / "driver")
    with ExitStack() as stack:

        def make(**kubelet: Any) -> NewDriverNode:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp"))
            return stack.enter_context(NewDriverNode(Path(directory), tmp_path / "driver", decode, **kubelet))

        yield make


@pytest.mark.parametrize(
    "kubelet",
    [
        pytest.param({"version": "1.37"}, id="1.37"),
        pytest.param({"version": "1.36", "real": True}, id="real-1.36", marks=MARKS),
        pytest.param({"version": "1.37", "real": True}, id="real-1.37", marks=MARKS),
    ],
)
def test_finding_of_the_driver_check_reaches_pods_and_prepares(
    make_node: Callable[..., NewDriverNode], kubelet: dict[str, Any]
) -> None:
    node = make_node(**kubelet)
    node.agent()
    node.new_driver()
    pod = node.run_and_wait("it", Ask("it", {"card": FIRST}))
    (node.dev / "null").unlink()
    node.kubelet.wait_health(GO, NODE, FIRST, "Unhealthy")
    # without the cause of a run that a busy machine delays
    wanted = f"{MISSING}{node.dev}/null does not exist. Advice: check the kernel module"
    node.kubelet.wait_for(
        lambda: node.kubelet.health(GO, NODE, FIRST).message.startswith(wanted), "the finding of the check"
    )
    message = node.kubelet.health(GO, NODE, FIRST).message
    node.wait_resources(pod, [("Unhealthy", message)])
    eventually(lambda: node.codes(OTHER) == ("Healthy", []), "the other device is Healthy")
    late = node.run("late", Ask("late", {"card": FIRST}))
    text = "[class=failed-device code=godev.missing "
    node.kubelet.wait_for(lambda: any(text in failure.message for failure in node.failures(late)), text)
    node.restore("null")
    node.wait_healthy(FIRST)
    node.wait_resources(pod, [("Healthy", "")])
    node.kubelet.wait_running(late)
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod, late)


def test_check_of_a_driver_that_hangs_expires_in_the_agent(make_node: Callable[..., NewDriverNode]) -> None:
    node = make_node(version="1.37")
    node.agent()
    driver = node.new_driver()
    driver.pause()
    expired = ("Unknown", ["check.device-file.expired"])
    eventually(lambda: node.codes(FIRST) == expired, "the lease of the check ends")
    driver.resume()
    eventually(lambda: node.codes(FIRST) == ("Healthy", []), "the check has results again")


def test_restarted_agent_has_the_results_of_the_driver_check(make_node: Callable[..., NewDriverNode]) -> None:
    node = make_node(version="1.37")
    agent = node.agent()
    node.new_driver()
    (node.dev / "null").unlink()
    node.kubelet.wait_health(GO, NODE, FIRST, "Unhealthy")
    since = len(node.kubelet.history)
    agent.end(signal.SIGKILL)
    node.wait_agent_absent(FIRST)
    node.agent()
    assert node.kubelet.wait_health(GO, NODE, FIRST, "Unhealthy").message.startswith(MISSING)
    node.wait_healthy(OTHER)
    changes = [
        change.health for change in node.kubelet.history.of(Changed, since=since) if change.device == FIRST
    ]
    assert "Healthy" not in changes

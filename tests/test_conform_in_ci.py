"""The workflow, the claim script and the container command of docs/drivers.md, run as they are written.

They run against a driver of the tests and Kubernetes' own API server, in a mount namespace with the kubelet's
directories. Replaced are the driver's name and three programs: ``pip`` (nothing is installed), ``sudo`` (the
test's user) and ``drahealth`` (this checkout). Not run are ``actions/upload-artifact``, which needs GitHub,
and ``docker``, which needs a daemon and an image from a registry: of that command the shell part runs, and
its mounts are compared with the paths that it uses.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from conform.running import repeated_run
from embedded import cluster_driver
from patience import PATIENCE_S
from private_mounts import within_mounts
from real_kube_api import PROGRAM, RealKubeApi, real_kube_api
from test_real_kube_api import driver_rules
from wire.serving import eventually

from agent.conform.kubelet.api_claims import create_claim
from agent.conform.kubelet.prepare_session import make_claim

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = (ROOT / "docs/drivers.md").read_text().replace("gpu.example.com", cluster_driver.NAME)
NODE: Final = "kind-control-plane"
CARDS: Final = ("card-0", "card-1", "card-2")
STUBS: Final = {
    "pip": 'echo "$*" >>{root}/pip.log',
    "sudo": 'exec "$@"',
    "drahealth": 'exec {python} -m drahealth "$@"',
    "kubectl": 'exec {kubernetes} kubectl "$@"',
}
MOUNTS: Final = """
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /run
mkdir /var/lib/kubelet /run/cdi
mount --bind "$1" /var/lib/kubelet
mount --bind "$1/cdi" /run/cdi
"""
KUBECONFIG: Final = """
apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "{url}", certificate-authority: "{ca}"}}}}]
users: [{{name: me, user: {{token: "{token}"}}}}]
contexts: [{{name: me, context: {{cluster: here, user: me}}}}]
current-context: me
"""


def block(language: str, part: str) -> str:
    """Return the only code block of the page in a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = (block for block in blocks if part in block)
    return str(found)


class Runner:
    """The machine of the workflow: a cluster, a driver, and a directory for the commands."""

    def __init__(self, server: RealKubeApi, root: Path, work: Path) -> None:
        self.server, self.root, self.work = server, root, work
        self.within = within_mounts(MOUNTS, root)
        stubs = work / "bin"
        stubs.mkdir()
        for name, text in STUBS.items():
            command = text.format(root=work, python=sys.executable, kubernetes=PROGRAM)
            (stubs / name).write_text(f"#!/bin/sh\n{command}\n")
            (stubs / name).chmod(0o755)
        home = work / "home"
        (home / ".kube").mkdir(parents=True)
        self.write_kubeconfig(home / ".kube/config", server.access.token)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAHEALTH_")}
        paths = {"PATH": f"{stubs}:{os.environ['PATH']}", "HOME": str(home), "PYTHONPATH": str(ROOT)}
        self.environ = kept | paths

    def write_kubeconfig(self, path: Path, token: str) -> None:
        """Write a kubeconfig with a token."""
        access = self.server.access
        path.write_text(KUBECONFIG.format(url=access.url, ca=access.ca_file, token=token))

    def shell(self, script: str, *shell: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a script as GitHub runs a step, and return its output."""
        command = [*self.within, *(shell or ("bash", "-e", "-c")), script]

        def run_once() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, cwd=self.work, env=self.environ, capture_output=True, text=True, check=False
            )

        def is_expected(run: subprocess.CompletedProcess[str]) -> bool:
            """Return False for another result of conform, as of answers that a busy machine delays."""
            return run.returncode in codes or "drahealth conform" not in script

        done = repeated_run(run_once, is_expected)
        assert done.returncode in codes, f"{script}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def claims(self) -> list[str]:
        """Return the names of all claims."""
        path = "/apis/resource.k8s.io/v1/resourceclaims"
        return [obj["metadata"]["name"] for obj in self.server.admin.list_objects(path).items]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    for tool in ("jq", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    root, work = tmp_path_factory.mktemp("kubelet"), tmp_path_factory.mktemp("work")
    for name in ("plugins_registry", "cdi"):
        (root / name).mkdir()
    for card in CARDS:
        (root / card).write_text("up\n")
    with real_kube_api(tmp_path_factory.mktemp("kube-api")) as server:
        server.create("/api/v1/nodes", "Node", NODE)
        runner = Runner(server, root, work)
        runner.write_kubeconfig(work / "driver.conf", server.service_account("driver", driver_rules()).token)
        environ = runner.environ | {"NODE_NAME": NODE, "KUBECONFIG": str(work / "driver.conf")}
        driver = [sys.executable, cluster_driver.__file__, "/var/lib/kubelet"]
        with (
            (work / "driver.log").open("wb") as log,
            subprocess.Popen([*runner.within, *driver], env=environ, stderr=log) as process,
        ):
            try:
                slices = "/apis/resource.k8s.io/v1/resourceslices"
                eventually(lambda: bool(server.admin.list_objects(slices).items), "the driver's slice")
                yield runner
            finally:
                process.terminate()
                process.wait(PATIENCE_S)


def assert_passed(document: dict[str, Any], *areas: str) -> None:
    """Assert that all checks of some areas have passed that the options include."""
    bad = {
        result["code"]: result["saw"]
        for result in document["results"]
        if result["result"] not in {"pass", "skipped"}
    }
    assert not bad
    assert {
        result["code"].partition(".")[0] for result in document["results"] if result["result"] == "pass"
    } >= {*areas}


def test_workflow_makes_claims_a_result_and_a_badge(runner: Runner) -> None:
    steps = yaml.safe_load(block("yaml", "conform.json"))
    for step in steps:
        if "run" in step:
            runner.shell(step["run"])
        else:
            assert step["uses"].startswith("actions/upload-artifact@")
            assert sorted(path.name for path in runner.work.glob(step["with"]["path"])) == [
                "badge.json",
                "conform.json",
            ]
    assert (runner.work / "pip.log").read_text() == "install drahealth\n"
    document = json.loads((runner.work / "conform.json").read_text())
    assert_passed(document, "health", "registration", "prepare", "unprepare")
    assert json.loads((runner.work / "badge.json").read_text()) == document["badge"]
    assert document["badge"]["color"] == "brightgreen"
    assert runner.claims() == []


def test_claim_script_replaces_the_kubeconfig(runner: Runner) -> None:
    (runner.work / "claim.sh").write_text(block("sh", "kubectl create"))
    (runner.work / "claim.sh").chmod(0o755)
    (text,) = re.findall(r"`(--slices .*?)`\s+in\s+place\s+of\s+`--kubeconfig`", PAGE, re.DOTALL)
    flags = " ".join(text.split())
    (saving,) = re.findall(r"after\s+`(kubectl get [^`]*)`", PAGE)
    runner.shell(" ".join(saving.split()))
    (step,) = (
        item["run"]
        for item in yaml.safe_load(block("yaml", "conform.json"))
        if "--prepare" in item.get("run", "")
    )
    assert "--kubeconfig $HOME/.kube/config" in step
    changed = step.replace("--kubeconfig $HOME/.kube/config", flags).replace("> conform", "--for 2s > script")
    runner.shell(changed, codes=(0, 3))
    document = json.loads((runner.work / "script.json").read_text())
    results = {result["code"]: result["result"] for result in document["results"]}
    assert results["prepare.first"] == results["unprepare.deleted_claim"] == "pass"
    assert runner.claims() == []


def test_container_command_prepares_the_claims_of_its_file(runner: Runner) -> None:
    command = shlex.split(block("", "docker run").replace("$PWD", str(runner.work)).replace("\\\n", " "))
    mounts = [command[number + 1] for number, word in enumerate(command) if word == "-v"]
    sources = {part.partition(":")[0]: part.partition(":")[2] for part in mounts}
    assert sources == {
        "/var/lib/kubelet": "/var/lib/kubelet",
        "/var/run/cdi": "/var/run/cdi",
        str(runner.work): command[command.index("-w") + 1],
    }
    for number, card in enumerate(CARDS[:2]):
        create_claim(runner.server.admin, make_claim(cluster_driver.NAME, NODE, card, number))
    runner.shell("kubectl get resourceclaims -A -o yaml > claims.yaml")
    *_, shell, flag, script = command
    document = json.loads(runner.shell(script, shell, flag))
    assert_passed(document, "prepare", "unprepare")
    assert len(runner.claims()) == 2
    runner.shell("kubectl delete resourceclaims --all")

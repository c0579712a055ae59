"""Kubernetes' dra-example-driver with the client library embedded, under ``drahealth conform``.

``upstream/`` has the changes: a file with the client of the agent and a check, and a patch that calls it.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from conform.running import conform, repeated_run
from kubelet import allocated_claim
from kubelet.history import StreamEnded

from go_driver.module import LIBRARY, LIBRARY_PATH, GoModule
from go_driver.node import NODE, Ask, GoNode, GoProgram
from go_driver.objects import Decode

MODULE: Final = "sigs.k8s.io/dra-example-driver"
VERSION: Final = "v0.2.1"
CDI_MODULE: Final = "tags.cncf.io/container-device-interface@v1.1.0"
"""Version that agrees with the other modules of the helper 0.37."""
CHANGES: Final = Path(__file__).parent / "upstream"
COMMAND: Final = "cmd/dra-example-kubeletplugin"
GPU: Final = "gpu.example.com"
FIRST, OTHER = "gpu-0", "gpu-1"

pytestmark = pytest.mark.slow  # compiles 500 packages


@pytest.fixture(scope="session")
def upstream(go: GoModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the driver's binary; skips the test if one of its modules cannot be downloaded."""
    directory = tmp_path_factory.mktemp("upstream")
    download = go.go("mod", "download", "-json", f"{MODULE}@{VERSION}", GOFLAGS="-mod=mod")
    found = json.loads(download.stdout or "{}")
    if "Dir" not in found:
        pytest.skip(f"{MODULE} {VERSION} cannot be downloaded: {found.get('Error', download.stderr).strip()}")
    shutil.copytree(found["Dir"], directory / "driver", copy_function=shutil.copyfile)
    for path in (directory / "driver").rglob("*/"):
        path.chmod(0o755)  # the module cache is not writable
    (directory / "driver").chmod(0o755)
    module = GoModule(directory / "driver", {**go.environ, "GOFLAGS": "-mod=mod -buildvcs=false -trimpath"})
    shutil.copy(CHANGES / "drahealth.go", module.directory / COMMAND)
    patch = ["git", "apply", "--unidiff-zero", str(CHANGES / "embed.patch")]
    done = subprocess.run(patch, cwd=module.directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = (f"-require={LIBRARY_PATH}@v0.0.0", f"-replace={LIBRARY_PATH}={LIBRARY}")
    assert module.go("mod", "edit", *library).returncode == 0
    fetched = module.go("get", CDI_MODULE)
    if fetched.returncode != 0:
        assert "SECURITY ERROR" not in fetched.stderr, fetched.stderr
        pytest.skip(f"modules of {MODULE} cannot be downloaded: {fetched.stderr.strip().splitlines()[-1]}")
    built = module.go("build", "-o", str(directory / "binary"), f"./{COMMAND}")
    assert built.returncode == 0, built.stderr
    return directory / "binary"


class UpstreamNode(GoNode):
    """Node of the driver, whose simulated devices have a text as their state."""

    def state(self, device: str, text: str) -> None:
        """Set the state of a device; empty: it works."""
        if text:
            (self.root / "states" / device).write_text(text)
        else:
            (self.root / "states" / device).unlink()

    def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start agent and driver, and wait until the devices are Healthy."""
        self.agent("--driver", GPU, config='[stream]\nheartbeat = "500ms"\n')
        (self.root / "states").mkdir()
        monkeypatch.setenv("DEVICE_STATES", str(self.root / "states"))
        monkeypatch.setenv("DRAHEALTH_SOCKET", str(self.socket.with_name(f"{GPU}.sock")))
        kubeconfig = self.root / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "it", "cluster": {"server": self.api.url}}],
                    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
                    "users": [{"name": "it", "user": {}}],
                    "current-context": "it",
                }
            )
        )
        root = self.kubelet.root
        registry = ("--kubelet-registrar-directory-path", str(root / "plugins_registry"))
        plugins = ("--kubelet-plugins-directory-path", str(root / "plugins"), "--kubeconfig", str(kubeconfig))
        flags = ("--node-name", NODE, "--cdi-root", str(self.cdi), "--num-devices", "2")
        log_file = self.root / f"log-{len(self._programs)}"
        self._programs.append(GoProgram(self.binary, *flags, *registry, *plugins, log_file=log_file))
        self.wait_healthy(FIRST, OTHER, driver=GPU)

    def claim(self, name: str, device: str, *config: dict[str, Any]) -> dict[str, Any]:
        """Add an allocated claim that no pod uses to the API server, and return it."""
        made = allocated_claim(name, f"uid-{name}", ("r", GPU, NODE, device), pods=[], config=config)
        self.api.add_claim(made)
        return made


@pytest.fixture
def node(upstream: Path, decode: Decode, monkeypatch: pytest.MonkeyPatch) -> Iterator[UpstreamNode]:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        UpstreamNode(Path(directory), upstream, decode, version="1.37") as node,
    ):
        node.start(monkeypatch)
        yield node


def test_check_of_the_upstream_driver_reaches_the_pod(node: UpstreamNode) -> None:
    pod = node.run_and_wait("it", Ask("it", {"gpu": FIRST}), driver=GPU)
    node.state(FIRST, "burnt")
    message = node.kubelet.wait_health(GPU, NODE, FIRST, "Unhealthy").message
    assert message.startswith("gpu.simulated: state is burnt")
    node.wait_resources(pod, [("Unhealthy", message)])
    node.state(FIRST, "")
    node.wait_resources(pod, [("Healthy", "")])
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod)


def test_upstream_driver_conforms_but_for_its_shared_cdi_id(node: UpstreamNode) -> None:
    """All devices of the upstream driver have the first CDI id ``common``."""
    parameters = {"apiVersion": "gpu.resource.example.com/v1alpha1", "kind": "NoSuchKind"}
    wrong = {"source": "FromClaim", "requests": [], "opaque": {"driver": GPU, "parameters": parameters}}
    given = [node.claim("one", FIRST), node.claim("two", OTHER)]
    bad = [node.claim(f"bad-{number}", FIRST, wrong) for number in range(2)]
    for name, objects in {"given": given, "bad": bad}.items():
        (node.root / f"{name}.json").write_text(json.dumps(objects))
    registry = ("--plugin-dir", node.kubelet.root / "plugins_registry", "--kubelet-dir", node.kubelet.root)
    files = ("--claims", node.root / "given.json", "--bad-claims", node.root / "bad.json")
    expected = {"prepare.first_cdi_id": "warn"}
    report = repeated_run(
        lambda: conform(*registry, "--for", "5s", "--prepare", "--cdi-dir", node.cdi, *files),
        lambda report: report.not_passed == expected,
    )
    assert report.matches(expected), json.dumps(report.document, indent=1)
    assert report.errors == ""

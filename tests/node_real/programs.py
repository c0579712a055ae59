"""Programs and images of a node: Kubernetes, etcd, containerd, runc and CNI plugins, from their Go modules.

The binaries are kept in ``build/node-real``; Go decides what is up to date. The first build takes about ten
minutes on two cores and writes 3 GiB into Go's build cache. Missing tools and modules skip the tests;
a program that does not compile fails them.
"""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
BINARIES: Final = ROOT / "build" / "node-real"
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "kubernetes": ("-ldflags", "-s -w -X k8s.io/component-base/version.gitVersion={kubernetes}", "."),
    "containerd": ("-ldflags", "-s -w", "tool"),
    "runc": ("-tags", "seccomp", "tool"),
    "cni": ("-ldflags", "-s -w", "tool"),
}
"""Directory of each module, and the arguments of its build. Without a version the kubelet is v0.0.0."""
TOOLS: Final = ("go", "gcc", "pkg-config", "openssl", "ip", "nsenter", "setpriv", "unshare")

# The only process of a sandbox and of a pod: ends at once on SIGTERM, or with a given status. The first
# process of a PID namespace has no default handlers.
PAUSE: Final = """
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
int main(int count, char **arguments) {
    if (count > 1) return atoi(arguments[1]);
    signal(SIGTERM, end);
    signal(SIGINT, end);
    for (;;) pause();
}
"""
IMAGE: Final = "node.local/pause:1"
"""Image of sandboxes and of pods."""
HOST_IMAGE: Final = "node.local/host:1"
"""Image of pods that mount the host's ``/usr``, for programs in Python."""
USR_LINKS: Final = ("bin", "lib", "lib64", "sbin")


def kubernetes_version() -> str:
    """Return the version of Kubernetes in ``go.mod``."""
    found = re.search(r"k8s\.io/kubernetes (v\S+)", (HERE / "kubernetes" / "go.mod").read_text())
    assert found, "kubernetes/go.mod names no version of Kubernetes"
    return found[1]


def build() -> Path:
    """Build all programs and images. Returns their directory. Skips the test where a tool is missing."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if subprocess.run(["pkg-config", "--exists", "libseccomp"], check=False).returncode:
        pytest.skip("libseccomp-dev is not installed; runc needs it")
    BINARIES.mkdir(parents=True, exist_ok=True)
    for module, arguments in MODULES.items():
        _build_module(HERE / module, [part.format(kubernetes=kubernetes_version()) for part in arguments])
    pause = BINARIES / "pause"
    _run("gcc", "-static", "-Os", "-x", "c", "-", "-o", str(pause), text=PAUSE)
    file = ("pause", pause.read_bytes(), 0o755)
    _write_image(BINARIES / "pause.tar", IMAGE, files=[file], links={}, entrypoint="/pause")
    links = {name: f"usr/{name}" for name in USR_LINKS}
    _write_image(BINARIES / "host.tar", HOST_IMAGE, files=[], links=links, entrypoint="/usr/bin/true")
    return BINARIES


def _build_module(module: Path, arguments: list[str]) -> None:
    environ = os.environ | {"GOFLAGS": "-mod=readonly -buildvcs=false -trimpath", "GOTOOLCHAIN": "local"}
    download = subprocess.run(
        ["go", "mod", "download"], cwd=module, env=environ, capture_output=True, text=True, check=False
    )
    if download.returncode:
        assert "SECURITY ERROR" not in download.stderr, download.stderr
        last = download.stderr.strip().splitlines()[-1]
        pytest.skip(f"Go modules of {module.name} cannot be downloaded: {last}")
    output = BINARIES / module.name if arguments[-1] == "." else BINARIES
    done = subprocess.run(
        ["go", "build", "-p", "2", "-o", f"{output}{os.sep if output == BINARIES else ''}", *arguments],
        cwd=module,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{module.name} does not compile:\n{done.stderr}"


def _run(*command: str, text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- images ------------------------------------------------------------------------------------------------


def _write_image(
    file: Path,
    name: str,
    *,
    files: Iterable[tuple[str, bytes, int]],
    links: Mapping[str, str],
    entrypoint: str,
) -> None:
    """Write an image of one layer as an OCI archive."""
    layer = _tar(files, links)
    config = _json(
        {
            "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
            "os": "linux",
            "config": {"Entrypoint": [entrypoint], "Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    oci = "application/vnd.oci.image"
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": _descriptor(f"{oci}.config.v1+json", config),
            "layers": [_descriptor(f"{oci}.layer.v1.tar", layer)],
        }
    )
    entry = _descriptor(f"{oci}.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": name}
    blobs = [(f"blobs/{_digest(blob).replace(':', '/')}", blob, 0o644) for blob in (layer, config, manifest)]
    index = ("index.json", _json({"schemaVersion": 2, "manifests": [entry]}), 0o644)
    layout = ("oci-layout", _json({"imageLayoutVersion": "1.0.0"}), 0o644)
    file.write_bytes(_tar([layout, index, *blobs], {}))


def _tar(files: Iterable[tuple[str, bytes, int]], links: Mapping[str, str]) -> bytes:
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w") as archive:
        for name, data, mode in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return result.getvalue()


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}

"""Build the kubelet's own code: ``python tests/kubelet_real/build.py 1.36 1.37``.

The programs come to ``build/kubelet``. Without Go, or without a way to its modules, nothing is built, and a
file ``VERSION.missing`` has the reason, which the skipped tests name. An error of the compiler fails.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parent / "go"
BINARIES: Final = Path(__file__).parents[2] / "build" / "kubelet"
FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "1.37": (),
    "1.36": ("-modfile=kubelet-1.36.mod", "-tags=kubelet_1_36"),
}
"""Flags of ``go build`` by version of the kubelet."""
ENVIRON: Final = {
    "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath",
    "GOTOOLCHAIN": "local",
    "GOWORK": "off",
    "CGO_ENABLED": "0",
}


def required_go() -> str:
    """Return the version of Go that Kubernetes requires."""
    found = re.search(r"^go (\S+)$", (SOURCE / "go.mod").read_text(), re.MULTILINE)
    assert found is not None, "go.mod names no version of Go"
    return found[1]


def reason_not_to_build(version: str) -> str:
    """Return why this version cannot be built here, an empty text if it can."""
    if shutil.which("go") is None:
        return f"Go is not installed; {required_go()} or later is required"
    installed = go("env", "GOVERSION").stdout.strip()
    if numbers(installed) < numbers(required_go()):
        return f"Go {required_go()} or later is required, installed: {installed}"
    modfile = (flag for flag in FLAGS[version] if flag.startswith("-modfile"))
    download = go("mod", "download", *modfile, "k8s.io/kubernetes")  # the build downloads the others
    if download.returncode == 0:
        return ""
    assert "SECURITY ERROR" not in download.stderr, download.stderr
    return f"Go modules cannot be downloaded: {download.stderr.strip().splitlines()[-1]}"


def numbers(version: str) -> tuple[int, ...]:
    """Parse ``go1.26.8``; a release candidate counts as the release."""
    return tuple(map(int, re.findall(r"\d+", version.partition("rc")[0])))


def go(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``go`` in the module."""
    return subprocess.run(
        ["go", *arguments],
        cwd=SOURCE,
        env=os.environ | ENVIRON,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def main(versions: list[str]) -> int:
    """Build each version; return the exit status."""
    BINARIES.mkdir(parents=True, exist_ok=True)
    for version in versions:
        missing, binary = BINARIES / f"{version}.missing", BINARIES / version
        if reason := reason_not_to_build(version):
            print(f"== kubelet {version}: skipped: {reason}")
            missing.write_text(reason)
            continue
        print(f"== kubelet {version}: build", flush=True)
        built = go("build", *FLAGS[version], "-p=2", "-o", str(binary), ".")
        if built.returncode != 0:
            print(built.stderr, file=sys.stderr)
            return 1
        missing.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FLAGS)))

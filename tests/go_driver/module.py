"""Go commands in the module ``examples/go-driver``, with the installed Go.

No command writes into the source tree. Missing tools and modules skip a test; compile errors fail it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).parents[2] / "examples" / "go-driver"
MODULES: Final = ("k8s.io/api", "k8s.io/apimachinery")
# Read-only tree, installed Go, no C compiler. All commands share the settings, and so the build cache.
SETTINGS: Final = {
    "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath",
    "GOTOOLCHAIN": "local",
    "GOWORK": "off",
    "CGO_ENABLED": "0",
}


@dataclass(frozen=True, slots=True)
class GoModule:
    """Go module whose dependencies are all downloaded."""

    environ: Mapping[str, str]

    def go(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``go`` in the module, with additional environment variables."""
        return _run(*arguments, environ={**self.environ, **environ})

    def build(self, binary: Path) -> None:
        """Compile the driver."""
        done = self.go("build", "-o", str(binary), ".")
        assert done.returncode == 0, f"examples/go-driver does not compile:\n{done.stderr}"

    def directories(self) -> dict[str, Path]:
        """Return the source directories of Kubernetes' modules, by module path."""
        output = self.go("list", "-m", "-f", "{{.Path}}={{.Dir}}", *MODULES).stdout
        return {
            name: Path(directory) for name, _, directory in (line.partition("=") for line in output.split())
        }


def required_go() -> str:
    """Return the Go version that ``go.mod`` requires."""
    match = re.search(r"^go (\S+)$", (SOURCE / "go.mod").read_text(), re.MULTILINE)
    assert match is not None, "go.mod names no version of Go"
    return match[1]


def go_module() -> GoModule:
    """Return the module ready to be built; skip the test if Go or modules are missing."""
    required = required_go()
    if shutil.which("go") is None:
        pytest.skip(f"Go is not installed; {required} or later is required")
    environ = os.environ | SETTINGS
    installed = _run("env", "GOVERSION", environ=environ, directory=Path("/")).stdout.strip()
    if _numbers(installed) < _numbers(required):
        pytest.skip(f"Go {required} or later is required, installed: {installed or 'older than 1.16'}")
    download = _run("mod", "download", environ=environ)
    if download.returncode != 0:
        assert "SECURITY ERROR" not in download.stderr, download.stderr
        pytest.skip(f"Go modules cannot be downloaded: {download.stderr.strip().splitlines()[-1]}")
    return GoModule(environ)


def _numbers(version: str) -> tuple[int, ...]:
    """Parse ``go1.26.8 X:some`` or ``1.26.0``; a release candidate counts as the release."""
    return tuple(map(int, re.findall(r"\d+", version.partition(" ")[0].partition("rc")[0])))


def _run(
    *arguments: str, environ: Mapping[str, str], directory: Path = SOURCE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["go", *arguments],
        cwd=directory,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

"""The Go module in ``examples/go-driver``, and the Go that is here: what a test does with both of them.

Nothing of it is written into the tree. What is missing on this machine is a reason to skip; what does not
compile is a failure.
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
# The tree as it is, the Go that is here, no C compiler; the same for all, so that nothing is compiled twice.
SETTINGS: Final = {
    "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath",
    "GOTOOLCHAIN": "local",
    "GOWORK": "off",
    "CGO_ENABLED": "0",
}


@dataclass(frozen=True, slots=True)
class GoModule:
    """All modules that it requires are on this machine."""

    environ: Mapping[str, str]

    def go(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs ``go`` in the module, with more environment."""
        return _run(*arguments, environ={**self.environ, **environ})

    def build(self, binary: Path) -> None:
        """Compiles the driver."""
        done = self.go("build", "-o", str(binary), ".")
        assert done.returncode == 0, f"examples/go-driver does not compile:\n{done.stderr}"

    def directories(self) -> dict[str, Path]:
        """Where the sources of Kubernetes' own modules lie, by their names."""
        said = self.go("list", "-m", "-f", "{{.Path}}={{.Dir}}", *MODULES).stdout
        return {name: Path(where) for name, _, where in (line.partition("=") for line in said.split())}


def needed_go() -> str:
    """The version that ``go.mod`` asks for."""
    found = re.search(r"^go (\S+)$", (SOURCE / "go.mod").read_text(), re.MULTILINE)
    assert found is not None, "go.mod names no version of Go"
    return found[1]


def go_module() -> GoModule:
    """The module, ready to be built; skips where that is not to be had on this machine."""
    needed = needed_go()
    if shutil.which("go") is None:
        pytest.skip(f"no Go; {needed} or later is needed")
    environ = os.environ | SETTINGS
    here = _run("env", "GOVERSION", environ=environ, directory=Path("/")).stdout.strip()
    if _numbers(here) < _numbers(needed):
        pytest.skip(f"Go {needed} or later is needed, this is {here or 'one before 1.16'}")
    had = _run("mod", "download", environ=environ)
    if had.returncode != 0:
        assert "SECURITY ERROR" not in had.stderr, had.stderr
        pytest.skip(f"Go's modules cannot be had: {had.stderr.strip().splitlines()[-1]}")
    return GoModule(environ)


def _numbers(version: str) -> tuple[int, ...]:
    """``go1.26.8 X:some`` or ``1.26.0``; a release candidate counts as the release."""
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

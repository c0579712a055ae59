"""Go commands in the modules ``go`` (the client library) and ``examples/go-driver``, with the installed Go.

No command writes into the source tree. Missing tools and modules skip a test; compile errors fail it.
"""

import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
LIBRARY: Final = ROOT / "go"
LIBRARY_PATH: Final = "drahealth.example.com/go"
DRIVER: Final = ROOT / "examples" / "go-driver"
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

    directory: Path
    environ: Mapping[str, str]

    def go(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``go`` in the module, with additional environment variables."""
        return _run(*arguments, environ={**self.environ, **environ}, directory=self.directory)

    def build(self, binary: Path) -> None:
        """Compile the module's command."""
        done = self.go("build", "-o", str(binary), ".")
        assert done.returncode == 0, f"{self.directory} does not compile:\n{done.stderr}"

    def used_by(self, path: str, directory: Path, *, replaced: bool = True) -> "GoModule":
        """Create a module that requires this one: from its directory, or, if not ``replaced``, by a later
        ``go get``."""
        directory.mkdir()
        user = GoModule(directory, self.environ)
        assert user.go("mod", "init", path).returncode == 0
        shutil.copy(self.directory / "go.sum", directory)
        if replaced:
            changes = (f"-require={LIBRARY_PATH}@v0.0.0", f"-replace={LIBRARY_PATH}={self.directory}")
            assert user.go("mod", "edit", *changes).returncode == 0
        return user

    def publish_version(self, proxy: Path, cache: Path, *, version: str) -> "GoModule":
        """Return the module with a module proxy that has this version of it, and with a module cache of its
        own, which takes all other modules from the real cache."""
        real = Path(self.go("env", "GOMODCACHE").stdout.strip())
        versions = proxy / LIBRARY_PATH / "@v"
        versions.mkdir(parents=True)
        (versions / "list").write_text(f"{version}\n")
        (versions / f"{version}.info").write_text(f'{{"Version": "{version}"}}')
        shutil.copy(self.directory / "go.mod", versions / f"{version}.mod")
        with zipfile.ZipFile(versions / f"{version}.zip", "w") as packed:
            for file in sorted(path for path in self.directory.rglob("*") if path.is_file()):
                packed.write(file, f"{LIBRARY_PATH}@{version}/{file.relative_to(self.directory)}")
        (cache / "cache" / "download").mkdir(parents=True)
        for directory in [*real.iterdir(), *(real / "cache" / "download").iterdir()]:
            if directory.is_dir() and directory.name not in ("cache", LIBRARY_PATH.partition("/")[0]):
                (cache / directory.relative_to(real)).symlink_to(directory)
        settings = {
            "GOMODCACHE": str(cache),
            "GOPROXY": f"file://{proxy},file://{real / 'cache' / 'download'}",
            "GOFLAGS": f"{self.environ['GOFLAGS']} -modcacherw",
            "GONOSUMDB": LIBRARY_PATH,
        }
        return GoModule(self.directory, {**self.environ, **settings})

    def directories(self) -> dict[str, Path]:
        """Return the source directories of Kubernetes' modules, by module path."""
        output = self.go("list", "-m", "-f", "{{.Path}}={{.Dir}}", *MODULES).stdout
        return {
            name: Path(directory) for name, _, directory in (line.partition("=") for line in output.split())
        }


def required_go(directory: Path) -> str:
    """Return the Go version that the ``go.mod`` of a module requires."""
    match = re.search(r"^go (\S+)$", (directory / "go.mod").read_text(), re.MULTILINE)
    assert match is not None, "go.mod names no version of Go"
    return match[1]


def go_module(directory: Path) -> GoModule:
    """Return the module in a directory, ready to be built; skip the test if Go or modules are missing."""
    required = required_go(directory)
    if shutil.which("go") is None:
        pytest.skip(f"Go is not installed; {required} or later is required")
    environ = os.environ | SETTINGS
    installed = _run("env", "GOVERSION", environ=environ, directory=Path("/")).stdout.strip()
    if _numbers(installed) < _numbers(required):
        pytest.skip(f"Go {required} or later is required, installed: {installed or 'older than 1.16'}")
    download = _run("mod", "download", environ=environ, directory=directory)
    if download.returncode != 0:
        assert "SECURITY ERROR" not in download.stderr, download.stderr
        pytest.skip(f"Go modules cannot be downloaded: {download.stderr.strip().splitlines()[-1]}")
    return GoModule(directory, environ)


def _numbers(version: str) -> tuple[int, ...]:
    """Parse ``go1.26.8 X:some`` or ``1.26.0``; a release candidate counts as the release."""
    return tuple(map(int, re.findall(r"\d+", version.partition(" ")[0].partition("rc")[0])))


def _run(*arguments: str, environ: Mapping[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["go", *arguments],
        cwd=directory,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

"""Go modules: format, vet, tests, go.mod, generated code, README, and use by another module."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from go_driver.module import DRIVER, LIBRARY, LIBRARY_PATH, ROOT, GoModule

GENERATED = LIBRARY / "drahealthv1"
WHAT_TO_WRITE = "## What to write"
LINES_TO_WRITE = 12
USER = "gpu.example.com/driver"
HELPER = "k8s.io/dynamic-resource-allocation"


def test_module_is_formatted_by_gofmt(module: GoModule) -> None:
    gofmt = Path(module.go("env", "GOROOT").stdout.strip(), "bin", "gofmt")
    command = [gofmt, "-l", "-d", "."]
    done = subprocess.run(command, cwd=module.directory, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


def test_go_vet_reports_no_problem(module: GoModule) -> None:
    done = module.go("vet", "./...")
    assert done.returncode == 0, done.stderr


def test_go_tests_pass(module: GoModule) -> None:
    done = module.go("test", "-count=1", "./...")
    assert done.returncode == 0, done.stdout + done.stderr


def test_go_mod_is_tidy(module: GoModule) -> None:
    done = module.go("mod", "tidy", "-diff", GOFLAGS="-mod=mod")
    if done.returncode != 0 and not done.stdout.startswith("diff "):
        pytest.skip(f"modules of tests cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout == ""


def test_generated_messages_match_the_proto(library: GoModule, tmp_path: Path) -> None:
    protoc = f"{sys.executable} -m grpc_tools.protoc"
    command = ["sh", str(GENERATED / "generate.sh"), str(tmp_path)]
    done = subprocess.run(
        command, env={**library.environ, "PROTOC": protoc}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in GENERATED.glob("*.pb.go")}


@pytest.mark.parametrize("directory", [LIBRARY, DRIVER], ids=lambda path: path.name)
def test_each_file_begins_with_its_licence(directory: Path) -> None:
    """The test needs no Go."""
    assert (LIBRARY / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    written = [path for path in directory.rglob("*.go") if not path.name.endswith(".pb.go")]
    licence = "// Copyright The drahealth Authors.\n// SPDX-License-Identifier: Apache-2.0\n\n"
    assert [path for path in written if not path.read_text().startswith(licence)] == []


@pytest.mark.parametrize("call", ["Transient(", "BadConfig(", "Permanent(", 'FailedDevice("gpu-3", '])
def test_vet_finds_wrong_formats_of_classified_errors(library: GoModule, tmp_path: Path, call: str) -> None:
    user = library.used_by(USER, tmp_path / "driver")
    (user.directory / "main.go").write_text(
        f"""package main

import "{LIBRARY_PATH}/drahealth"

func main() {{ println(drahealth.{call}"gpu.link", "link %d is down", "two").Error()) }}
"""
    )
    done = user.go("vet", "-mod=mod", ".")
    assert "format %d has arg" in done.stderr


@pytest.mark.parametrize("severity", ["Unhealthy", "Degraded", "Unknown"])
def test_vet_finds_wrong_formats_of_findings(library: GoModule, tmp_path: Path, severity: str) -> None:
    user = library.used_by(USER, tmp_path / "driver")
    (user.directory / "main.go").write_text(
        f"""package main

import "{LIBRARY_PATH}/drahealth"

func main() {{ println(drahealth.{severity}("gpu.link", "link %d is down", "two").Evidence) }}
"""
    )
    done = user.go("vet", "-mod=mod", ".")
    assert "format %d has arg" in done.stderr


def test_library_requires_no_module_that_the_helper_does_not(library: GoModule) -> None:
    """A driver with the kubeletplugin helper downloads nothing else."""
    required = set(
        library.go("list", "-m", "-f", "{{if not .Indirect}}{{.Path}}{{end}}", "all").stdout.split()
    )
    graph = [line.split() for line in library.go("mod", "graph").stdout.splitlines()]
    of_helper = {to.partition("@")[0] for source, to in graph if source.startswith(f"{HELPER}@")}
    assert required - of_helper == {LIBRARY_PATH, HELPER}


def test_parts_for_an_older_helper_compile_without_newer_names(library: GoModule, tmp_path: Path) -> None:
    """A driver with an older helper copies the packages without the files that the README names."""
    text = (LIBRARY / "README.md").read_text()
    sentence = text.partition("copies the two packages")[2].partition("serves")[0]
    *health, taints = re.findall(r"`(\w+\.go)`", sentence)
    assert (health, taints) == (["health.go", "relay.go", "kubeclient.go"], "taints.go")
    parts = GoModule(tmp_path / "parts", library.environ)
    shutil.copytree(LIBRARY, parts.directory, ignore=shutil.ignore_patterns("*_test.go", *health))
    for removed, newer in (
        ([], r"kubeletplugin\.(DeviceHealth|HealthStatus)"),  # 0.37
        ([taints], "DeviceTaintEffectNone|ResourceSliceMaxDevicesWithAdvancedFeatures"),  # after 0.34
    ):
        for name in removed:
            (parts.directory / "drahealth" / name).unlink()
        done = parts.go("build", "./...")
        assert done.returncode == 0, done.stderr
        sources = (parts.directory / "drahealth").glob("*.go")
        assert [path.name for path in sources if re.search(newer, path.read_text())] == []


def test_second_copy_of_the_messages_starts_no_panic(library: GoModule, tmp_path: Path) -> None:
    """Protobuf's global registry refuses a second file of the same name, for example a vendored copy."""
    user = library.used_by(USER, tmp_path / "driver")
    shutil.copytree(GENERATED, user.directory / "copied")
    (user.directory / "main.go").write_text(
        f"""package main

import (
	one "{LIBRARY_PATH}/drahealthv1"
	other "{USER}/copied"
)

func main() {{ println((&one.GpuPart{{Pci: "a"}}).String(), (&other.GpuPart{{Pci: "b"}}).String()) }}
"""
    )
    done = user.go("run", "-mod=mod", ".")
    assert done.returncode == 0, done.stderr


def test_library_can_be_fetched_with_go_get(library: GoModule, tmp_path: Path) -> None:
    """The user gets the module from a proxy, by tag; its program is the example of the documentation."""
    user = library.publish_version(tmp_path / "proxy", tmp_path / "cache", version="v0.1.0").used_by(
        USER, tmp_path / "driver", replaced=False
    )
    fetched = user.go("get", f"{LIBRARY_PATH}/drahealth@v0.1.0")
    assert fetched.returncode == 0, fetched.stderr
    example = (LIBRARY / "drahealth" / "example_driver_test.go").read_text()
    program = example.replace("package drahealth_test", "package main").replace(
        "func Example_driver", "func main"
    )
    (user.directory / "main.go").write_text(program)
    built = user.go("build", "-mod=mod", "-o", str(tmp_path / "binary"), ".")
    assert built.returncode == 0, built.stderr


README_PRELUDE = f"""package main

import (
	"context"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drahealthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"{LIBRARY_PATH}/drahealth"
)

// nvmlReturn is like nvml.Return of go-nvml.
type nvmlReturn int32

func (nvmlReturn) Error() string {{ return "" }}

type driver struct {{
	drahealthv1alpha1.UnimplementedDRAResourceHealthServer
	agent            *drahealth.Client
	conn             *grpc.ClientConn
	prepare          func(context.Context, *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error)
	unprepare        func(context.Context, kubeletplugin.NamespacedObject) error
	unknownUntilBack func(drahealthv1alpha1.DRAResourceHealth_NodeWatchResourcesServer, error) error
}}

func (d *driver) HandleError(context.Context, error, string) {{}}

func linkState(context.Context, string) (string, error) {{ return "up", nil }}

// What the helper needs, and an older one.
var _ kubeletplugin.DRAPlugin = &driver{{}}

var _ drahealthv1alpha1.DRAResourceHealthServer = &driver{{}}

var (
	d                                          = &driver{{}}
	err                                        error
	ret                                        nvmlReturn
	version, nodeName, mode, modes, has, needs string
	link                                       int
	client                                     kubernetes.Interface
)

func main() {{
	statements()
	if err != nil {{
		panic(err)
	}}
	println("closed:", d.agent.Close() == nil)
}}
"""


def test_readme_blocks_compile_and_run(library: GoModule, tmp_path: Path) -> None:
    blocks = re.findall(r"^```go\n(.*?)^```$", (LIBRARY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    methods = [block for block in blocks if "func (" in block]
    statements = [block for block in blocks if "func (" not in block]
    assert (len(methods), len(statements)) == (2, 3)
    options = re.findall(r"`(kubeletplugin\.[^`]*)`", (LIBRARY / "README.md").read_text())
    body = "".join([*statements, *(f"_ = {option}\n" for option in options)])
    user = library.used_by(USER, tmp_path / "driver")
    (user.directory / "main.go").write_text(
        "\n".join([README_PRELUDE, *methods, f"func statements() {{\n{body}}}"])
    )
    done = user.go("vet", "-mod=mod", ".")
    assert done.returncode == 0, done.stderr
    done = user.go("run", "-mod=mod", ".")
    assert (done.returncode, done.stderr) == (0, "closed: true\n")


def test_go_doc_prints_the_reference(library: GoModule) -> None:
    done = library.go("doc", f"{LIBRARY_PATH}/drahealth")
    assert done.returncode == 0, done.stderr
    assert "type HealthCheck struct" in done.stdout


def test_lines_to_write_in_the_readme_are_in_the_driver() -> None:
    """The test needs no Go."""
    section = (LIBRARY / "README.md").read_text().partition(f"{WHAT_TO_WRITE}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```go\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= LINES_TO_WRITE
    sources = [path.read_text() for path in sorted(DRIVER.rglob("*.go"))]
    assert any(block in source for source in sources), f"not in any file:\n{block}"

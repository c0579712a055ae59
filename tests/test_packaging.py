"""Packaging: one abi3 wheel with the C core, pinned requirements, import contracts."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from conform.running import CONFORM_WARNS, repeated_run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parent.parent
CORE = "agent/native/_core.abi3.so"
SHIPPED = (
    "agent",
    "drahealth",
    "native",
    "proto",
    "pyproject.toml",
    "setup_build.py",
    "MANIFEST.in",
    "LICENSE",
)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


# --- the build ----------------------------------------------------------------------------------------------


def copy_tree(to: Path) -> Path:
    """Directory with the sources, without files built in place."""
    for name in SHIPPED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "build"))
        else:
            shutil.copy(source, to / name)
    (to / "README.md").write_text("drahealth\n")
    return to


def build(tree: Path, *what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build", "--no-isolation", *what]
    return subprocess.run(
        command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dist/ with a source distribution, and the wheel made from it and nothing else."""
    tree = copy_tree(tmp_path_factory.mktemp("sources"))
    done = build(tree)
    assert done.returncode == 0, done.stdout
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def test_wheel_is_for_python_3_11_and_later(wheel: Path) -> None:
    assert re.fullmatch(r"drahealth-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)


def test_wheel_has_exactly_the_modules_and_the_core(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    roots = ("agent", "drahealth")
    modules = {
        str(path.relative_to(REPOSITORY)) for root in roots for path in (REPOSITORY / root).rglob("*.py")
    }
    templates = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "agent").rglob("*.template")}
    assets = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "agent/http/assets").iterdir()}
    assert templates
    assert len(assets) == 4
    assert names == modules | templates | assets | {CORE, "agent/py.typed", "drahealth/py.typed"}


def test_core_of_the_wheel_can_be_imported(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = "import agent.native._core as core; print(core.__file__, core.lib.DH_VERSION)"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout
    (version,) = re.findall(
        r"^#define DH_VERSION (\d+)$", (REPOSITORY / "native/include/drahealth.h").read_text(), re.MULTILINE
    )
    assert printed.split() == [str(tmp_path / CORE), version]


def run_clean(
    *command: str | Path, cwd: Path, bin_dir: Path, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    """Run a command with the programs of a virtual environment, and without anything of the checkout.

    ``path`` lists the directories of further programs.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    environ = kept | {"PATH": f"{bin_dir}:{path}", "VIRTUAL_ENV": str(bin_dir.parent)}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


def install(wheel: Path, directory: Path) -> Path:
    """Install the wheel and its requirements into a new virtual environment; return its programs."""
    venv.create(directory / "venv", with_pip=True)
    bin_dir = directory / "venv/bin"
    done = run_clean("pip", "install", "--quiet", wheel, cwd=directory, bin_dir=bin_dir)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return bin_dir


NOT_MEASURED = """\
poll: GPUs of the fake NVML: the fake NVML can be built in a checkout only
encode: Google's protobuf is not installed
publish: grpcio is not installed
detect: GPUs: the fake NVML can be built in a checkout only
idle: the lower bounds in C can be built in a checkout only
idle: without GPUs: the fake NVML can be built in a checkout only
startup: grpcio is not installed
startup: without GPUs: the fake NVML can be built in a checkout only
"""
AGENT_ENVIRONMENT = """\
from pathlib import Path
from agent.bench.processes import HEALTH_METHOD, driver_socket, start_agent, start_subscriber
here = Path()
socket = driver_socket(here)
with start_agent(here, []) as agent, start_subscriber(socket, HEALTH_METHOD, "", agent) as client:
    client.wait(lambda line: "found" in line)
    print(Path(f"/proc/{agent.pid}/environ").read_text().split("\\0"))
"""


@pytest.mark.timeout(1200)
def test_installed_bench_needs_no_compiler_and_no_grpcio(wheel: Path, tmp_path: Path) -> None:
    """The wheel and its requirements alone, and no program in PATH but those of the environment."""
    bin_dir = install(wheel, tmp_path)
    bench = ("python", "-m", "agent.bench", "--quick")
    done = run_clean(*bench, cwd=tmp_path, bin_dir=bin_dir, path="")
    assert done.returncode == 0, done.stderr
    progress = ("measuring ", "waiting for /tmp/drahealth-machine.lock")
    assert [line for line in done.stderr.splitlines() if not line.startswith(progress)] == []
    lines = done.stdout.splitlines()
    for reason in NOT_MEASURED.splitlines():
        assert lines.count(f"not measured: {reason}") == 1, reason
    done = run_clean("python", "-c", AGENT_ENVIRONMENT, cwd=tmp_path, bin_dir=bin_dir, path="")
    assert "'PYTHONMALLOC=malloc'" in done.stdout, done.stderr


def test_readme_of_a_new_driver_is_followed_with_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """The last of its tests runs conform for 40 s."""
    bin_dir = install(wheel, tmp_path)
    assert (
        run_clean("drahealth", "new-driver", "card.example.com", cwd=tmp_path, bin_dir=bin_dir).returncode
        == 0
    )
    made = tmp_path / "card-driver"
    (block,) = re.findall(r"^```\n(.*?)^```$", (made / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    setup, check, *images = block.splitlines()
    assert [line.split()[0] for line in (setup, check, *images)] == ["pip", "python", "podman", "kubectl"]
    done = run_clean("bash", "-ec", setup, cwd=made, bin_dir=bin_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    done = repeated_run(
        lambda: run_clean("bash", "-ec", check, cwd=made, bin_dir=bin_dir),
        lambda run: CONFORM_WARNS not in run.stdout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_core_exports_only_its_entry_point(wheel: Path, tmp_path: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    core = zipfile.ZipFile(wheel).extract(CORE, tmp_path)
    command = ["nm", "--dynamic", "--defined-only", core]
    symbols = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert {line.split()[-1] for line in symbols} - {"_init", "_fini"} == {"PyInit__core"}


def test_source_distribution_has_all_files_of_the_build(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {
        str(path.relative_to(REPOSITORY))
        for folder in ("native/include", "native/src", "proto")
        for path in (REPOSITORY / folder).rglob("*.*")
    }
    assert wanted | {"setup_build.py", "LICENSE"} <= names
    assert not [name for name in names if name.endswith(".so") or name.startswith("native/build")]


def remove_pattern(text: str, pattern: str) -> str:
    changed, count = re.subn(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
    assert count == 1, f"{pattern} is not in the file"
    return changed


@pytest.mark.parametrize(
    ("file", "pattern", "complaint"),
    [
        # not declared: setuptools alone would build a pure wheel without an error
        ("pyproject.toml", r"^ext-modules = [^\n]*$", "declares no extension agent.native._core"),
        # declared, but not handed to cffi: setuptools alone would link an empty module
        ("pyproject.toml", r"^build_ext = [^\n]*$", "unknown file type '.h'"),
        ("native/include/drahealth.h", r"^/\* cffi: end \*/$", "1 lines are a cffi mark, expected 2"),
    ],
)
def test_build_without_the_core_fails(tmp_path: Path, file: str, pattern: str, complaint: str) -> None:
    tree = copy_tree(tmp_path)
    (tree / file).write_text(remove_pattern((tree / file).read_text(), pattern))
    done = build(tree, "--wheel")
    assert done.returncode != 0
    assert complaint in done.stdout
    assert not list(tree.glob("dist/*.whl"))


def test_build_without_c_files_fails(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    shutil.rmtree(tree / "native" / "src")
    done = build(tree, "--wheel")
    assert done.returncode != 0
    assert "native/src/ has no C files" in done.stdout


# --- the requirements ---------------------------------------------------------------------------------------


def lines(name: str) -> list[str]:
    """Return the lines of a file in requirements/, with continued lines joined and without comments."""
    text = (REPOSITORY / "requirements" / name).read_text().replace("\\\n", " ")
    return [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]


def requirements_in(name: str) -> set[str]:
    """Return the requirements of an .in file as comparable texts."""
    return {str(Requirement(line)) for line in lines(name) if not line.startswith("-")}


def pinned_versions(name: str) -> dict[str, str]:
    """Return the versions by name in a .txt file; assert that each line has only hashes in addition."""
    versions: dict[str, str] = {}
    for line in lines(name):
        requirement, *hashes = line.split(" --hash=")
        assert hashes, f"{name}: {requirement} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", value) for value in hashes), line
        parsed = Requirement(requirement)
        (specifier,) = parsed.specifier
        assert specifier.operator == "=="
        versions[canonicalize_name(parsed.name)] = specifier.version
    return versions


def test_runtime_requirements_match_the_distribution() -> None:
    declared = {str(Requirement(line)) for line in pyproject()["project"]["dependencies"]}
    backend = {str(Requirement(line)) for line in pyproject()["build-system"]["requires"]}
    assert requirements_in("run.in") == declared | backend
    extras = pyproject()["project"]["optional-dependencies"]
    assert {str(Requirement(line)) for extra in extras.values() for line in extra} <= requirements_in(
        "dev.in"
    )
    assert requirements_in("package.in") == declared | {
        str(Requirement(line)) for extra in ("http", "record") for line in extras[extra]
    }


@pytest.mark.parametrize("name", ["run", "dev", "package", "release"])
def test_pins_satisfy_the_requirements(name: str) -> None:
    pins = pinned_versions(f"{name}.txt")
    for requirement in map(Requirement, requirements_in(f"{name}.in")):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)], prereleases=True)


def test_tests_use_the_runtime_pins() -> None:
    dev = pinned_versions("dev.txt")
    assert pinned_versions("run.txt").items() <= dev.items()
    assert pinned_versions("package.txt").items() <= dev.items()


@pytest.mark.parametrize("name", ["run.txt", "dev.txt", "docs.txt", "package.txt", "release.txt"])
def test_requirement_files_name_no_package_index(name: str) -> None:
    assert "://" not in (REPOSITORY / "requirements" / name).read_text()


def test_packages_that_tests_import_are_installed_by_make_test() -> None:
    pins = pinned_versions("dev.txt")
    packages = packages_distributions()
    files = sorted((REPOSITORY / "tests").rglob("*.py"))
    near = [*files, *(path for name in ("examples", "tools") for path in (REPOSITORY / name).rglob("*.py"))]
    own = {"agent", "drahealth", *(path.stem for path in near), *(path.parent.name for path in near)}
    own |= {"dra", "plugin_registration"}  # generated from the kubelet's APIs by a test
    missing = [
        f"{path.relative_to(REPOSITORY)}: {module}"
        for path in files
        if "packages" not in path.parts  # they run after requirements/release.txt is installed
        for module in sorted(imported_at_start(path) - own - sys.stdlib_module_names)
        if pins.keys().isdisjoint(map(canonicalize_name, packages.get(module, ())))
    ]
    assert missing == []


def imported_at_start(path: Path) -> set[str]:
    """Return the top-level modules that a file imports when it is imported itself."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


# --- the import graph ---------------------------------------------------------------------------------------


def imported_modules(path: Path) -> set[str]:
    """Return the modules that a file imports, "from a import b" as both a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def test_only_agent_native_imports_the_core() -> None:
    """import-linter cannot check this contract: it reads Python files only."""
    importers = {
        path
        for path in (REPOSITORY / "agent").rglob("*.py")
        if "agent.native._core" in imported_modules(path)
    }
    assert importers
    assert {path.parent for path in importers} == {REPOSITORY / "agent" / "native"}


def test_import_contracts_cover_every_package() -> None:
    """A package in no layer could import any other."""
    (layers,) = [
        contract["layers"]
        for contract in pyproject()["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]
    placed = {name.strip() for layer in layers for name in re.split(r"[|:]", layer)}
    assert placed == packages()


@pytest.mark.parametrize("package", ["agent.native", "agent.sources", "agent.serve"])
def test_exclusive_import_is_forbidden_to_all_other_packages(package: str) -> None:
    """Hardware, pynvml, gRPC: a package that a contract omits could import them."""
    (contract,) = [
        contract
        for contract in pyproject()["tool"]["importlinter"]["contracts"]
        if contract["name"].startswith(f"only {package} ")
    ]
    assert set(contract["source_modules"]) == packages() - {package, "agent.__main__"}


def packages() -> set[str]:
    """Return all modules and packages directly below agent."""
    children = (REPOSITORY / "agent").iterdir()
    return {
        f"agent.{path.stem}"
        for path in children
        if path.stem != "__init__" and (path.suffix == ".py" or any(path.rglob("*.py")))
    }


# --- requirements/system ----------------------------------------------------------------------------------


def run_system_script(directory: Path, uid: int, apt_get: str | None) -> subprocess.CompletedProcess[str]:
    """Run requirements/system without a compiler on PATH, as if by a user, with this apt-get (None: none)."""
    bash = shutil.which("bash")
    assert bash is not None
    programs = {"id": f"echo {uid}"} | ({"apt-get": apt_get} if apt_get is not None else {})
    for name, text in programs.items():
        (directory / name).write_text(f"#!{bash}\n{text}\n")
        (directory / name).chmod(0o755)
    return subprocess.run(
        [bash, REPOSITORY / "requirements/system", "run", sys.executable],
        env={"PATH": str(directory)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_missing_packages_of_a_user_give_a_command_that_works(tmp_path: Path) -> None:
    done = run_system_script(tmp_path, 1000, "exit 1")
    assert done.returncode == 1
    command = "as root: apt-get update && apt-get install --yes --no-install-recommends gcc"
    assert command in done.stderr


@pytest.mark.parametrize("uid", [0, 1000])
def test_missing_packages_without_apt_name_no_apt(tmp_path: Path, uid: int) -> None:
    done = run_system_script(tmp_path, uid, None)
    assert done.returncode == 1
    assert done.stderr.startswith("missing system packages: gcc")
    assert "apt" not in done.stderr


def test_output_of_apt_is_shown_only_after_a_failure(tmp_path: Path) -> None:
    good = run_system_script(tmp_path, 0, "echo unpacking")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("== system packages: gcc")
    assert "unpacking" not in good.stdout
    bad = run_system_script(tmp_path, 0, "echo no space; exit 100")
    assert bad.returncode == 1
    assert bad.stderr.startswith("no space\nrequirements/system: apt could not install gcc")

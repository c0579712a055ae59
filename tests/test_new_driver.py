"""``drahealth new-driver``: the new driver's own tests pass, and its files agree with each other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conform.running import CONFORM_WARNS, repeated_run
from small_disk import run_on_small_disk

from agent.cli.main import main as drahealth
from agent.cli.new_driver.command import GO_MODULE, LANGUAGES, driver_files

REPOSITORY = Path(__file__).parents[1]
DRIVER = "card.example.com"


@pytest.fixture(params=[DRIVER, "3d-card.example.com"])
def driver_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """New driver in Python."""
    assert drahealth(["new-driver", request.param, "--directory", str(tmp_path / "made")]) == 0
    return tmp_path / "made"


def run_in(directory: Path, *command: str) -> None:
    """Run a Python module in a directory, as the driver's author does; it must succeed.

    It runs again if conform only warns, as of answers that a busy machine delays.
    """

    def run_once() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    done = repeated_run(run_once, lambda run: CONFORM_WARNS not in run.stdout)
    assert done.returncode == 0, done.stdout


def test_new_driver_passes_its_own_tests(driver_dir: Path) -> None:
    run_in(driver_dir, "pytest", "-q", "-p", "no:cacheprovider", "-k", "not conforms")


def test_full_disk_leaves_no_part_of_the_new_driver(tmp_path: Path) -> None:
    program = f"""
import os
from agent.cli.main import main
with open({str(tmp_path / "full")!r}, "wb", buffering=0) as full:
    full.write(bytes(120 << 10))
print(main(["new-driver", "card.example.com", "--directory", {str(tmp_path / "made")!r}]))
print(os.listdir({str(tmp_path)!r}))
"""
    assert run_on_small_disk(program, tmp_path) == ["75", "['full']"]


@pytest.mark.slow  # conform records for 40 s
def test_new_driver_passes_conform_at_once(driver_dir: Path) -> None:
    run_in(driver_dir, "pytest", "-q", "-p", "no:cacheprovider", "-k", "conforms")


def test_new_driver_passes_a_strict_type_check(driver_dir: Path) -> None:
    run_in(
        driver_dir,
        "mypy",
        "--strict",
        "--cache-dir",
        str(driver_dir / "cache"),
        "driver.py",
        "test_driver.py",
    )


@pytest.mark.parametrize("language", LANGUAGES)
def test_manifests_grant_the_api_calls_of_the_driver(language: str) -> None:
    files = driver_files(DRIVER, "card", language)
    objects = {obj["kind"]: obj for obj in yaml.safe_load_all(files["deploy.yaml"])}
    verbs = {rule["resources"][0]: set(rule["verbs"]) for rule in objects["ClusterRole"]["rules"]}
    slice_verbs = {"list", "watch", "create", "update", "delete"} | ({"get"} if language == "go" else set())
    assert verbs == {"resourceclaims": {"get"}, "resourceslices": slice_verbs, "nodes": {"get"}}
    assert DRIVER in objects["DeviceClass"]["spec"]["selectors"][0]["cel"]["expression"]
    (container,) = objects["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert {entry["name"] for entry in container["env"]} == {"NODE_NAME", "POD_UID"}
    assert "/driver" in files["Containerfile"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_mark_of_a_template_is_left(language: str) -> None:
    files = driver_files(DRIVER, "card", language)
    assert not [name for name, text in files.items() if re.search(r"@[A-Z_]+@", text)]


@pytest.mark.parametrize(("label", "variable"), [("card", "CARD"), ("3d-card", "D3D_CARD")])
def test_container_variable_of_a_new_driver_is_a_literal(label: str, variable: str) -> None:
    text = driver_files(f"{label}.example.com", label, "python")["driver.py"]
    assert f'env={{"{variable}": device.device}}' in text


def test_version_of_the_go_module_is_the_one_that_its_readme_tags() -> None:
    assert f"git tag -a go/{GO_MODULE} " in (REPOSITORY / "go" / "README.md").read_text()


def test_existing_directory_is_refused_and_unchanged(
    driver_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (driver_dir / "driver.py").read_text()
    assert drahealth(["new-driver", "other.example.com", "--directory", str(driver_dir)]) == 64
    assert "exists already; choose another one with --directory" in capsys.readouterr().err
    assert (driver_dir / "driver.py").read_text() == before


def test_invalid_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drahealth(["new-driver", "Not A Driver", "--directory", str(tmp_path / "made")]) == 64
    assert "is not a DNS subdomain" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()

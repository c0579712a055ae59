"""``drahealth new-driver``: the new driver's own tests pass, and its files agree with each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent.cli.main import main as drahealth
from agent.cli.new_driver.command import driver_files

REPOSITORY = Path(__file__).parents[1]
DRIVER = "card.example.com"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    assert drahealth(["new-driver", DRIVER, "--directory", str(tmp_path / "made")]) == 0
    return tmp_path / "made"


def run_in(directory: Path, *command: str) -> None:
    """Run a Python module in a directory, as the driver's author does; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_new_driver_passes_its_own_tests(made: Path) -> None:
    run_in(made, "pytest", "-q", "-p", "no:cacheprovider", "-k", "not conforms")


@pytest.mark.slow  # conform records for 40 s
def test_new_driver_passes_conform_at_once(made: Path) -> None:
    run_in(made, "pytest", "-q", "-p", "no:cacheprovider", "-k", "conforms")


def test_new_driver_passes_a_strict_type_check(made: Path) -> None:
    run_in(
        made,
        "mypy",
        "--strict",
        "--cache-dir",
        str(made / "cache"),
        "driver.py",
        "test_driver.py",
    )


def test_manifests_allow_what_the_driver_calls(made: Path) -> None:
    objects = {obj["kind"]: obj for obj in yaml.safe_load_all((made / "deploy.yaml").read_text())}
    verbs = {rule["resources"][0]: set(rule["verbs"]) for rule in objects["ClusterRole"]["rules"]}
    assert verbs == {
        "resourceclaims": {"get"},
        "resourceslices": {"list", "watch", "create", "update", "delete"},
        "nodes": {"get"},
    }
    assert DRIVER in objects["DeviceClass"]["spec"]["selectors"][0]["cel"]["expression"]
    (container,) = objects["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert {entry["name"] for entry in container["env"]} == {"NODE_NAME", "POD_UID"}
    assert "/driver/driver.py" in (made / "Containerfile").read_text()


def test_no_mark_of_a_template_is_left(made: Path) -> None:
    assert not [path.name for path in made.iterdir() if path.is_file() and "@LABEL@" in path.read_text()]
    assert not [name for name, text in driver_files(DRIVER, "card", "python").items() if "@DRIVER@" in text]


def test_existing_directory_is_refused_and_unchanged(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (made / "driver.py").read_text()
    assert drahealth(["new-driver", "other.example.com", "--directory", str(made)]) == 64
    assert "exists already; choose another one with --directory" in capsys.readouterr().err
    assert (made / "driver.py").read_text() == before


def test_invalid_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drahealth(["new-driver", "Not A Driver", "--directory", str(tmp_path / "made")]) == 64
    assert "is not a DNS subdomain" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()

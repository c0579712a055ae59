"""Go module: format, vet, tests, go.mod, generated code and README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from go_driver.module import SOURCE, GoModule

GENERATED = SOURCE / "drahealthv1"
WHAT_TO_COPY = "## What to copy"
LINES_TO_COPY = 12


def test_module_is_formatted_by_gofmt(go: GoModule) -> None:
    gofmt = Path(go.go("env", "GOROOT").stdout.strip(), "bin", "gofmt")
    done = subprocess.run([gofmt, "-l", "-d", "."], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


def test_vet_finds_nothing(go: GoModule) -> None:
    done = go.go("vet", "./...")
    assert done.returncode == 0, done.stderr


def test_go_tests_pass(go: GoModule) -> None:
    done = go.go("test", "-count=1", "./...")
    assert done.returncode == 0, done.stdout + done.stderr


def test_go_mod_is_tidy(go: GoModule) -> None:
    done = go.go("mod", "tidy", "-diff", GOFLAGS="-mod=mod")
    if done.returncode != 0 and not done.stdout.startswith("diff "):
        pytest.skip(f"modules of tests cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout == ""


def test_generated_messages_match_the_proto(go: GoModule, tmp_path: Path) -> None:
    protoc = f"{sys.executable} -m grpc_tools.protoc"
    command = ["sh", str(GENERATED / "generate.sh"), str(tmp_path)]
    done = subprocess.run(
        command, env={**go.environ, "PROTOC": protoc}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in GENERATED.glob("*.pb.go")}


def test_lines_to_copy_in_the_readme_are_in_the_driver() -> None:
    """Needs no Go."""
    section = (SOURCE / "README.md").read_text().partition(f"{WHAT_TO_COPY}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```go\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= LINES_TO_COPY
    sources = [path.read_text() for path in sorted(SOURCE.rglob("*.go"))]
    assert any(block in source for source in sources), f"not in any file:\n{block}"

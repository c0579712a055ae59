"""The scenario language of the fake NVML: strict, documented, and safe to use at any time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import NATIVE, FakeNvml, fake_nvml, library, play

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

FAKE_H = NATIVE / "fake" / "fake.h"
DOCS = NATIVE.parent / "docs" / "fake-nvml.md"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["gpu 0 set tempreature=91"], "1: no such quantity: 'tempreature'"),
        (["", "gpu 8 lost"], "2: the GPU is a number from 0 to 0, not '8'"),
        (["gpu 0 set temperature"], "1: expected name=value: 'temperature'"),
        (["gpu 0 set temperature=hot"], "1: a value is 5, -5, +5 (more) or none: 'hot'"),
        (["gpu 0 set nvlink.18.state=0"], "1: the GPU has no such link: 'nvlink.18.state'"),
        (["profile a100", "gpu 0 fail link 12 999"], "2: the GPU has no such link: '12'"),
        (["gpu 0 hang nvmlDeviceGetTemprature"], "1: no such call: 'nvmlDeviceGetTemprature'"),
        (["gpu 0 hang all 30"], "1: a time is written 2.5s, 200ms or 50us: '30'"),
        (["gpu 0 lost now"], "1: not expected here: 'now'"),
        (["gpu 0 mig 4g.40gb 4g.40gb"], "1: no room: 7 compute and 8 memory slices: '4g.40gb'"),
        (["profile t4", "gpu 0 mig on"], "2: this profile has no MIG: 't4'"),
        (["profile v100"], "1: no such profile: 'v100'"),
        (["gpu 0 lost", "profile t4"], "2: the profile comes before all other commands"),
        (["at 1s socket /x"], "1: a profile and a socket are from the beginning"),
        ([f"socket /{'x' * 107}"], "1: the socket's path is 108 bytes, limit 107"),
        (["explode"], "1: no such command: 'explode'"),
        (["count 999 twice"], "1: expected once: 'twice'"),
        (["reload gpus=41"], "1: gpus is a number from 0 to 40, not '41'"),
        (["storm gpu 0 xid 31 rate=0 for=1s"], "1: a storm's rate is at least 1 per second, not: '0'"),
    ],
)
def test_scenario_error_is_named_and_init_fails(tmp_path: Path, lines: list[str], error: str) -> None:
    fake = FakeNvml(library(), tmp_path / "scenario.txt", tmp_path / "nvml.sock")
    fake.scenario.write_text("\n".join([*lines, ""]))
    script = f"import ctypes; print(ctypes.CDLL({str(fake.library)!r}).nvmlInit_v2())"
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=fake.env, capture_output=True, text=True, check=True)
    assert ran.stdout == "999\n"
    assert ran.stderr == f"{fake.scenario}:{error}\n"


def test_without_a_scenario_there_is_one_h100() -> None:
    script = f"""
import pynvml as n
n.nvmlLib = n.CDLL({str(library())!r})
n.nvmlInit()
print(n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(0)))
"""
    env = {name: value for name, value in os.environ.items() if name != "FAKE_NVML"}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "1 NVIDIA H100 80GB HBM3\n"


def test_scenario_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    script = f"import ctypes; print(ctypes.CDLL({str(library())!r}).nvmlInit_v2())"
    env = {**os.environ, "FAKE_NVML": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("999\n", f"{tmp_path}:0: cannot be read: Is a directory\n")


def test_socket_refuses_a_bad_command_and_continues(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path),
        """
        answer = []
        for command in ("gpu 0 set tempreature=91", "profile t4"):
            try:
                send(command)
            except ValueError as error:
                answer.append(str(error))
        send("gpu 0 set temperature=91", "gpu 0 set temperature=+1")
        answer.append(n.nvmlDeviceGetTemperature(gpus[0], 0))
        send("gpu 0 set temperature=none")
        answer.append(refused(n.nvmlDeviceGetTemperature, gpus[0], 0))
        """,
    )
    assert answer == [
        "gpu 0 set tempreature=91: no such quantity: 'tempreature'",
        "profile t4: a profile and a socket stand in the file only",
        92,
        3,
    ]


def test_only_a_dead_process_socket_is_taken_over(tmp_path: Path) -> None:
    fake = fake_nvml(tmp_path)
    assert play(fake, "answer = 0") == 0
    assert fake.control.is_socket()
    code = """
        import subprocess
        second = f"import ctypes; print(ctypes.CDLL({str(fake.library)!r}).nvmlInit_v2())"
        ran = subprocess.run([sys.executable, "-c", second], capture_output=True, text=True)
        answer = [ran.stdout, ran.stderr.split(": ", 1)[1]]
        """
    assert play(fake, code) == ["999\n", f"socket {fake.control}: Address already in use\n"]


def names(macro: str) -> list[str]:
    """Return the scenario names of one of the tables of quantities in fake.h."""
    table = FAKE_H.read_text().split(f"#define {macro}(X)")[1].split("\n\n")[0]
    return re.findall(r'X\(\w+, "([\w.]+)"', table)


def test_every_scenario_command_is_documented() -> None:
    docs, command = DOCS.read_text(), (NATIVE / "fake" / "command.c").read_text()
    profiles = re.findall(r'\.name = "(\w+)"', (NATIVE / "fake" / "profiles.c").read_text())
    quantities = names("FAKE_QUANTITIES") + [f"nvlink.L.{name}" for name in names("FAKE_LINK_QUANTITIES")]
    assert len(quantities) > 80
    assert profiles == ["h100", "a100", "t4"]
    assert [name for name in quantities + profiles if f"`{name}`" not in docs] == []
    grammar = docs.split("```text")[1].split("```")[0]
    words = set(re.findall(r'{ "(\w+)", FAKE_', command))
    assert {word for word in words if not re.search(rf"\b{word}\b", grammar)} == set()


def test_every_documented_quantity_can_be_set(tmp_path: Path) -> None:
    section = DOCS.read_text().split("## Quantities")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert len(documented) > 80
    commands = [f"gpu 0 set {name.replace('.L.', '.0.')}=1" for name in documented]
    assert play(fake_nvml(tmp_path), f"answer = send(*{commands!r})") == ""


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress_test_is_clean_under_the_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    fake = fake_nvml(tmp_path, "profile h100 gpus=4", "storm gpu 2 xid 31 rate=20000 for=1s")
    sources = [*(NATIVE / "fake").glob("*.c"), NATIVE / "fake" / "tests" / "hammer.c"]
    flags = ["-std=c11", "-g", "-O1", "-pthread", "-D_GNU_SOURCE", f"-I{NATIVE / 'src'}"]
    command = ["gcc", *flags, f"-fsanitize={sanitizer}", *sources, "-o", tmp_path / "hammer"]
    build = subprocess.run(command, capture_output=True, check=False)
    if build.returncode != 0 and b"cannot find" in build.stderr:
        pytest.skip(f"the {sanitizer} sanitizer is not installed")
    assert build.returncode == 0, build.stderr
    # ThreadSanitizer of GCC 12 fails if the kernel randomizes more address bits than it expects.
    command = ["setarch", "-R", tmp_path / "hammer", fake.control]
    ran = subprocess.run(command, env=fake.env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")

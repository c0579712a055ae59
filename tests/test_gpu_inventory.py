"""Inventory of GPUs through pynvml and the fake NVML, each test in a process of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml, fake_nvml
from patience import PATIENCE_S

from agent.sources.nvml import normalize_pci_address, parse_mig_profile

READ = """
import json, sys
from pathlib import Path
from agent.sources.nvml import read_gpu_inventory
gpus = read_gpu_inventory(sys.argv[1], Path(sys.argv[2]))
print(json.dumps([gpu._asdict() for gpu in gpus]))
"""


def run(program: str, fake: FakeNvml, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(
        command, env=fake.env, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )


def inventory(fake: FakeNvml, sysfs: Path) -> list[dict[str, Any]]:
    done = run(READ, fake, str(fake.library), str(sysfs))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_failure(fake: FakeNvml, library: str) -> str:
    """Return the last error line of a process that cannot read the inventory."""
    return run(READ, fake, library, "/sys").stderr.strip().rpartition("\n")[2]


def put_node(sysfs: Path, bus: str, text: str) -> None:
    device = sysfs / "bus/pci/devices" / bus
    device.mkdir(parents=True)
    (device / "numa_node").write_text(text)


def test_inventory_row_has_all_attributes_of_a_gpu(tmp_path):
    put_node(tmp_path, "0000:1b:00.0", "1\n")
    assert inventory(fake_nvml(tmp_path, "profile h100"), tmp_path) == [
        {
            "uuid": "GPU-fa4e0009-0000-4000-8000-000000000000",
            "bus": "0000:1b:00.0",
            "serial": "1650009000000",
            "product": "NVIDIA H100 80GB HBM3",
            "driver": "580.95.05",
            "vbios": "96.00.89.00.01",
            "architecture": "Hopper",
            "numa_node": 1,
            "profiles": [],
        }
    ]


@pytest.mark.parametrize("text", ["-1\n", "many\n", ""])
def test_numa_node_unknown_to_firmware_is_none(tmp_path, text):
    put_node(tmp_path, "0000:1b:00.0", text)
    (gpu,) = inventory(fake_nvml(tmp_path, "profile h100"), tmp_path)
    assert gpu["numa_node"] is None


def test_mig_instance_has_its_profile(tmp_path):
    fake = fake_nvml(tmp_path, "profile a100 gpus=2", "gpu 1 mig 3g.20gb 1g.5gb")
    whole, parted = inventory(fake, tmp_path)
    assert whole["profiles"] == []
    assert [profile for _, profile in parted["profiles"]] == ["3g.20gb", "1g.5gb"]
    assert all(uuid.startswith("MIG-") for uuid, _ in parted["profiles"])


def test_lost_gpu_has_empty_fields_and_others_keep_theirs(tmp_path):
    lost, good = inventory(fake_nvml(tmp_path, "profile h100 gpus=2", "gpu 0 lost"), tmp_path)
    assert {value for key, value in lost.items() if key not in {"driver", "numa_node", "profiles"}} == {""}
    assert good["serial"] == "1650009000001"


def test_unsupported_attribute_is_empty(tmp_path):
    fake = fake_nvml(tmp_path, "profile h100 gpus=2", "gpu 1 fail nvmlDeviceGetSerial 3")
    assert [gpu["serial"] for gpu in inventory(fake, tmp_path)] == ["1650009000000", ""]


@pytest.mark.parametrize("branch", [535, 570, 575])
def test_older_driver_functions_are_used_as_fallback(tmp_path, branch):
    (gpu,) = inventory(fake_nvml(tmp_path, "profile t4", branch=branch), tmp_path)
    assert (gpu["architecture"], gpu["driver"].partition(".")[0]) == ("Turing", str(branch))


# --- failures ---------------------------------------------------------------------------------------


def test_absent_library_is_named_in_error(tmp_path):
    words = "agent.errors.ProbeError: NVML library cannot be loaded: /none/libnvidia-ml.so.1: cannot open shared object file: "  # noqa: E501
    assert read_failure(fake_nvml(tmp_path), "/none/libnvidia-ml.so.1").startswith(words)


@pytest.mark.parametrize(
    ("code", "name"), [(9, "driver not loaded"), (18, "lib rm version mismatch"), (999, "unknown")]
)
def test_failed_nvml_init_is_reported_with_code(tmp_path, code, name):
    fake = fake_nvml(tmp_path, f"init {code}")
    words = f"agent.errors.ProbeError: NVML library {fake.library}: nvmlInit failed: {name} ({code})"
    assert read_failure(fake, str(fake.library)) == words


def test_library_without_nvml_functions_is_refused(tmp_path):
    assert "nvmlInit failed: function not found (13)" in read_failure(fake_nvml(tmp_path), "libc.so.6")


HANG = """
import sys, threading
from pathlib import Path
from agent.errors import ProbeError
from agent.sources.nvml import read_gpu_inventory
threading.Thread(target=read_gpu_inventory, args=(sys.argv[1], Path("/sys")), daemon=True).start()
sys.stdin.readline()
try:
    read_gpu_inventory(sys.argv[1], Path("/sys"))
except ProbeError as error:
    print(error)
"""


def test_second_session_fails_while_the_first_hangs(tmp_path):
    fake = fake_nvml(tmp_path, "profile h100", "gpu 0 hang nvmlDeviceGetSerial")
    with subprocess.Popen(
        [sys.executable, "-c", HANG, str(fake.library)],
        env=fake.env,
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        while not fake.calls(0, "nvmlDeviceGetSerial"):
            pass
        out, _ = process.communicate("go\n", timeout=PATIENCE_S)
    assert out == f"NVML library {fake.library}: not opened: an earlier call of NVML has not returned\n"


# --- sessions and libraries ---------------------------------------------------------------------------


PLAIN_NVML = """
int nvmlInitWithFlags(unsigned int flags) { return (int)(flags & 0); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = COUNT; return 0; }
"""
COUNT_TWICE = """
import sys
from pathlib import Path
from agent.sources.nvml import open_nvml_session
library, newer = map(Path, sys.argv[1:])
assert "pynvml" not in sys.modules, "pynvml was imported before the first session"
with open_nvml_session(str(library)) as nvml:
    print(nvml.call("nvmlDeviceGetCount"))
newer.rename(library)
with open_nvml_session(str(library)) as nvml:
    print(nvml.call("nvmlDeviceGetCount"))
"""


def test_replaced_library_is_loaded_again(tmp_path):
    """The test replaces the library, as a driver upgrade does.

    The fake stays loaded, to keep its machine.
    """
    if shutil.which("gcc") is None:
        pytest.skip("building a library needs gcc")
    for count in ("1", "2"):
        command = ["gcc", "-shared", "-fPIC", f"-DCOUNT={count}", "-xc", "-", "-o", tmp_path / f"{count}.so"]
        subprocess.run(command, input=PLAIN_NVML, text=True, check=True)
    done = run(COUNT_TWICE, fake_nvml(tmp_path), str(tmp_path / "1.so"), str(tmp_path / "2.so"))
    assert (done.stdout, done.stderr) == ("1\n2\n", "")


# --- texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "1g.10gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "1c.3g.20gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", "1g.10gb+me"),
        ("MIG 7g.80gb", "7g.80gb"),
        ("NVIDIA H100 80GB HBM3", ""),
        ("", ""),
    ],
)
def test_profile_is_parsed_from_instance_name(name, profile):
    assert parse_mig_profile(name) == profile


@pytest.mark.parametrize(
    ("nvml_text", "bus"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("", ""),
        ("nonsense", ""),
    ],
)
def test_bus_address_is_converted_to_kernel_form(nvml_text, bus):
    assert normalize_pci_address(nvml_text) == bus

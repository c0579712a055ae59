"""native/src/gpu/nvml.h against pynvml: NVIDIA's own structures, sizes and numbers.

The agent's C, and the fake library of the tests, know NVML through that header alone.
"""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
from fake_nvml import NATIVE, library

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

HEADER = NATIVE / "src" / "gpu" / "nvml.h"
STRUCTURES = {
    "nvmlEventData_t": "c_nvmlEventData_t",
    "nvmlPciInfo_t": "nvmlPciInfo_t",
    "nvmlUtilization_t": "c_nvmlUtilization_t",
    "nvmlEccSramErrorStatus_t": "c_nvmlEccSramErrorStatus_v1_t",
    "nvmlRepairStatus_t": "c_nvmlRepairStatus_t",
    "nvmlUnrepairableMemory_v1_t": "c_nvmlUnrepairableMemory_v1_t",
    "nvmlTemperature_t": "c_nvmlTemperature_v1_t",
    "nvmlMarginTemperature_t": "c_nvmlMarginTemperature_v1_t",
    "nvmlGpuFabricInfo_t": "c_nvmlGpuFabricInfo_t",
    "nvmlGpuFabricInfo_v2_t": "c_nvmlGpuFabricInfo_v2_t",
    "nvmlGpuFabricInfo_v3_t": "c_nvmlGpuFabricInfo_v3_t",
    "nvmlDeviceAttributes_t": "c_nvmlDeviceAttributes",
    "nvmlProcessInfo_t": "c_nvmlProcessInfo_v3_t",
    "nvmlFieldValue_t": "c_nvmlFieldValue_t",
    "nvmlValue_t": "c_nvmlValue_t",
}
NOT_IN_PYNVML = {
    "NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}


def compile_and_run(directory: Path, body: str) -> list[str]:
    """Compile and run a C program with the given main(), and return its output."""
    library()  # skips without a compiler
    source, program = directory / "facts.c", directory / "facts"
    source.write_text(f'#include "nvml.h"\n#include <stdio.h>\nint main(void) {{ {body} return 0; }}\n')
    subprocess.run(["gcc", "-std=c11", f"-I{HEADER.parent}", source, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


def test_structures_have_pynvmls_sizes_and_offsets(tmp_path: Path) -> None:
    wanted, body = [], ""
    for ours, theirs in STRUCTURES.items():
        structure = getattr(pynvml, theirs)
        wanted.append(f"{ours} {ctypes.sizeof(structure)}")
        body += f'printf("{ours} %zu\\n", sizeof({ours}));'
        for name, *_ in structure._fields_:
            wanted.append(f"{ours}.{name} {getattr(structure, name).offset}")
            body += f'printf("{ours}.{name} %zu\\n", offsetof({ours}, {name}));'
    assert compile_and_run(tmp_path, body) == wanted


def test_every_structure_is_checked() -> None:
    declared = re.findall(r"typedef (?:struct|union) \w+ {[^}]*} (\w+);", HEADER.read_text())
    assert set(declared) == set(STRUCTURES)


def test_constants_equal_pynvmls(tmp_path: Path) -> None:
    text = HEADER.read_text()
    names = re.findall(r"\b(NVML_\w+) = \d", text)
    names += re.findall(r"^#define (\w+) (?!\\)\S", text, re.MULTILINE)
    assert len(names) > 200
    known = [name for name in names if hasattr(pynvml, name)]
    assert set(names) - set(known) == NOT_IN_PYNVML
    body = "".join(f'printf("%lld\\n", (long long)({name}));' for name in known)
    ours = dict(zip(known, map(int, compile_and_run(tmp_path, body)), strict=True))
    assert ours == {name: getattr(pynvml, name) for name in known}


def test_every_function_exists_in_pynvml() -> None:
    ours = re.findall(r"X\([^,]+, (nvml\w+),", HEADER.read_text())
    asked = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(pynvml.__file__).read_text()))
    assert set(ours) - asked == {"nvmlInit_v2"}  # pynvml calls nvmlInitWithFlags instead

"""A driver's devices in Python: the same devices, and the same refusals, as in a file of devices.d."""

from typing import Any, Final

import pytest

from agent.embed.devices import Cpus, Device, DevicePart, Gpu, Hugepages, Memory, Nic, Pci
from agent.errors import ConfigError
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredGpuDevice,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredOtherDevice,
    DeclaredPart,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.sources.declaration_file import KEYS_BY_KIND, parse_declaration

DRIVER: Final = "demo.example.com"
UUID: Final = "GPU-3d5cf3a6-0000-4c2e-9f8b-0123456789ab"

PARTS: Final[list[tuple[DevicePart | None, str, DeclaredPart]]] = [
    (None, "", DeclaredOtherDevice()),
    (Cpus("0-3"), 'kind = "cpu"\ncpus = "0-3"', DeclaredCpuDevice(0xF, None, False, False)),
    (
        Cpus("0,2", numa=0, exclusive=True, isolated=True),
        'kind = "cpu"\ncpus = "0,2"\nnuma = 0\nexclusive = true\nisolated = true',
        DeclaredCpuDevice(0b101, 0, True, True),
    ),
    (
        Hugepages("2Mi", pages=4, numa=1),
        'kind = "hugepages"\nsize = "2Mi"\npages = 4\nnuma = 1',
        DeclaredHugepageDevice(2048, 4, 1),
    ),
    (Memory(), 'kind = "memory"\nnuma = 0', DeclaredMemoryDevice(0, 0)),
    (Memory(size="1Gi", numa=1), 'kind = "memory"\nsize = "1Gi"\nnuma = 1', DeclaredMemoryDevice(1 << 30, 1)),
    (
        Gpu(pci="0000:3b:00.0"),
        'kind = "gpu"\npci = "0000:3b:00.0"',
        DeclaredGpuDevice("0000:3b:00.0", "", -1, -1),
    ),
    (
        Gpu(uuid=UUID, gi=0, ci=1),
        f'kind = "gpu"\nuuid = "{UUID}"\ngi = 0\nci = 1',
        DeclaredGpuDevice("", UUID, 0, 1),
    ),
    (
        Pci("0000:00:04.0", driver="nvme"),
        'kind = "pci"\naddress = "0000:00:04.0"\ndriver = "nvme"',
        DeclaredPciDevice("0000:00:04.0", "nvme"),
    ),
    (Nic(pci="0000:41:00.0"), 'kind = "nic"\npci = "0000:41:00.0"', DeclaredNicDevice("0000:41:00.0", "")),
    (Nic(rdma="mlx5_0"), 'kind = "nic"\nrdma = "mlx5_0"', DeclaredNicDevice("", "mlx5_0")),
]


@pytest.mark.parametrize(("part", "keys", "what"), PARTS)
def test_part_has_the_keys_of_a_file(part: DevicePart | None, keys: str, what: DeclaredPart) -> None:
    found = Device("d-0", part, lease_s=60).declare(DRIVER, "node-7")
    assert found == DriverDevice(DRIVER, "node-7", "d-0", what, 60)
    if part is not None:
        text = f'version = 1\n[[device]]\nname = "d-0"\nlease = "60s"\n{keys}\n'
        assert parse_declaration(text.encode(), DRIVER, "node-7") == (found,)


def test_every_kind_of_a_file_has_a_part() -> None:
    kinds = {type(what) for _, _, what in PARTS}
    assert kinds >= {
        DeclaredCpuDevice,
        DeclaredGpuDevice,
        DeclaredHugepageDevice,
        DeclaredMemoryDevice,
        DeclaredNicDevice,
        DeclaredPciDevice,
    }
    assert len(kinds - {DeclaredOtherDevice}) == len(KEYS_BY_KIND)


def test_device_has_its_own_pool_or_the_nodes() -> None:
    assert Device("d-0").declare(DRIVER, "node-7").pool == "node-7"
    assert Device("d-0", pool="rack-1/shelf-2").declare(DRIVER, "node-7").pool == "rack-1/shelf-2"


WRONG: Final[list[tuple[dict[str, Any], str]]] = [
    ({"name": "GPU_0"}, "device 'GPU_0': name: 'GPU_0' is not a DNS label, such as gpu-3"),
    ({"name": ""}, "device '': name: '' is not a DNS label, such as gpu-3"),
    ({"name": 3}, "device '3': name: 3 is not a string; put it in quotes"),
    ({"name": "x" * 64}, f"device {'x' * 63!r}: name: {'x' * 64!r} is 64 bytes, limit 63"),
    (
        {"pool": "Rack 1"},
        "device 'd-0': pool: pool name 'Rack 1' is not valid: it must be DNS subdomains, ",
    ),
    ({"lease_s": 2}, "device 'd-0': lease: 2s is below the limit of 3s"),
    ({"lease_s": 0.5}, "device 'd-0': lease: '0.5s' is not a whole number of seconds"),
    ({"part": Cpus("")}, "device 'd-0': required key 'cpus' is missing"),
    ({"part": Cpus("3-1")}, "device 'd-0': cpus: "),
    ({"part": Cpus("0", numa=5000)}, "device 'd-0': numa: 5000 is over the limit of 1023"),
    (
        {"part": Hugepages("3Mi", pages=4)},
        "device 'd-0': size: '3Mi' is not a page size: 3072 KiB is not a power of two",
    ),
    ({"part": Hugepages("2Mi", pages=0)}, "device 'd-0': pages: 0 is below the limit of 1"),
    ({"part": Memory(size="much")}, "device 'd-0': size: 'much' is not a size; "),
    ({"part": Gpu()}, "device 'd-0': GPU has neither 'pci' nor 'uuid'; give one of them"),
    ({"part": Gpu(uuid=UUID, gi=1)}, "device 'd-0': only one of 'gi' and 'ci'"),
    ({"part": Nic()}, "device 'd-0': NIC has neither 'pci' nor 'rdma'; give one of them"),
    ({"part": Pci("nowhere")}, "device 'd-0': address: "),
    ({"part": "0-3"}, "device 'd-0': part: '0-3' is not one of Cpus, Hugepages, Memory, Gpu, Pci, Nic"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_error_names_device_key_and_limit(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Device(**{"name": "d-0", **wrong})
    assert str(raised.value).startswith(text)


def test_file_without_a_kind_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"device 1 \(d-0\): required key 'kind' is missing"):
        parse_declaration(b'version = 1\n[[device]]\nname = "d-0"\n', DRIVER, "node-7")

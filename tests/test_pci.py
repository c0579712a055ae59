"""PCI functions: from trees of plain files, this machine's bus, and an overlay on /sys."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from private_mounts import within_mounts

from agent.model.machine_samples import PciSample
from agent.model.reading import Absence, Missing
from agent.sources import pci
from agent.sources.pci import (
    UDEV_SYSFS_ROOT,
    UNPARSABLE,
    parse_aer_total,
    parse_pci_address,
    read_pci_functions,
)

ABSENT: Final = Missing(Absence.ABSENT, 2)
GPU: Final = "0000:3b:00.0"
AER: Final = {
    "aer_dev_correctable": "RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 7",
    "aer_dev_fatal": "Undefined 0\nDLP 1\nTOTAL_ERR_FATAL 1",
    "aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 2",
}


class Bus:
    """Sysfs tree with PCI devices, each below its bridge."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def plug(
        self, address: str = GPU, *, driver: str = "nvidia", port: str = "0000:3a:00.0", **files: str
    ) -> Path:
        """Add an H100 with changed files; an empty value removes the file."""
        device = self.root / "devices/pci0000:3a" / port / address
        device.mkdir(parents=True)
        whole = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200"}
        whole |= {"current_link_width": "16", "max_link_width": "16", **AER, **files}
        for name, text in whole.items():
            if text:
                (device / name).write_text(f"{text}\n")
        (device / "uevent").write_text(f"PCI_SLOT_NAME={address}\n")
        if driver:
            self._link(device / "driver", f"bus/pci/drivers/{driver}")
        self._link(device / "subsystem", "bus/pci")
        self._link(self.root / "bus/pci/devices" / address, str(device.relative_to(self.root)))
        return device

    def _link(self, path: Path, target: str) -> None:
        path.symlink_to(os.path.relpath(self.root / target, path.parent))

    def read(self, *wanted: str) -> tuple[PciSample, ...]:
        found = read_pci_functions(self.root, wanted)
        assert isinstance(found, tuple)
        return found

    def read_one(self) -> PciSample:
        [sample] = self.read()
        return sample


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    return Bus(tmp_path)


# --- list of functions -------------------------------------------------------------------------------


def addresses(samples: tuple[PciSample, ...]) -> list[str]:
    return [sample.address for sample in samples]


def test_gpus_and_declared_functions_are_found(bus: Bus) -> None:
    bus.plug("10000:01:00.0")
    bus.plug(GPU)
    bus.plug("0000:3b:00.1", **{"class": "0x040300"})  # its audio
    bus.plug("0000:03:00.0", **{"class": "0x068000"})  # an NVSwitch
    bus.plug("0000:5e:00.0", vendor="0x15b3", **{"class": "0x020000"})
    bus.plug("0000:5e:00.1", vendor="0x15b3", **{"class": "0x020000"})
    assert addresses(bus.read()) == [GPU, "10000:01:00.0"]
    assert addresses(bus.read("0000:5e:00.1", "0000:99:00.0", GPU)) == [GPU, "0000:5e:00.1", "10000:01:00.0"]


def test_gpu_passed_to_virtual_machine_is_on_the_bus(bus: Bus) -> None:
    bus.plug(driver="vfio-pci")
    assert bus.read_one().driver == "vfio-pci"


def test_virtual_function_is_found_if_declared(bus: Bus) -> None:
    (bus.plug("0000:3b:00.4") / "physfn").symlink_to(f"../{GPU}")
    assert bus.read() == ()
    assert addresses(bus.read("0000:3b:00.4")) == ["0000:3b:00.4"]


@pytest.mark.parametrize("listed", [{}, {GPU: "H100"}], ids=["nothing", "one of two"])
def test_function_that_libudev_leaves_out_is_found(
    listed: dict[str, str], bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libudev lists nothing in some containers, and too little while the process lacks descriptors."""
    bus.plug(GPU)
    bus.plug("0000:5e:00.0")
    monkeypatch.setattr(pci, "UDEV_SYSFS_ROOT", bus.root)
    monkeypatch.setattr(pci, "_list_by_udev", lambda _: listed)
    assert {sample.address: sample.model for sample in bus.read()} == {GPU: "", "0000:5e:00.0": ""} | listed


def test_function_removed_during_read_is_skipped(bus: Bus) -> None:
    (bus.root / "bus/pci/devices" / GPU).symlink_to("../gone")
    assert bus.read(GPU) == ()


def test_machine_without_bus_is_missing_and_not_empty(tmp_path: Path) -> None:
    assert read_pci_functions(tmp_path, []) == ABSENT


@pytest.mark.parametrize("file", ["vendor", "class"])
def test_gpu_is_not_lost_without_descriptors(bus: Bus, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Another thread has taken the descriptor that listed the bus."""
    bus.plug()
    bus.plug("0000:5e:00.0", vendor="0x15b3", **{"class": "0x020000"})
    read = pci.read_sysfs_text

    def read_without_descriptors(path: Path) -> str | Missing:
        return Missing(Absence.UNREADABLE, errno.EMFILE) if path.name == file else read(path)

    monkeypatch.setattr(pci, "read_sysfs_text", read_without_descriptors)
    assert read_pci_functions(bus.root, ["0000:5e:00.0"]) == Missing(Absence.UNREADABLE, errno.EMFILE)


def test_driver_is_not_unbound_without_memory(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    bus.plug(driver="nvidia")

    def read_without_memory(_: Path) -> str:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "readlink", read_without_memory)
    assert read_pci_functions(bus.root, []) == Missing(Absence.UNREADABLE, errno.ENOMEM)


def test_unreadable_bus_is_missing(tmp_path: Path) -> None:
    (tmp_path / "bus").touch()
    assert read_pci_functions(tmp_path, []) == Missing(Absence.UNREADABLE, 20)


# --- fields of a function ----------------------------------------------------------------------------------


def test_all_fields_of_a_function_are_read(bus: Bus) -> None:
    bus.plug()
    assert bus.read_one() == PciSample(
        address=GPU, vendor=0x10DE, device=0x2330, driver="nvidia", model="", width=16, width_max=16,
        aer_nonfatal=2, aer_fatal=1, aer_correctable=7, upstream_bridge="0000:3a:00.0",
    )  # fmt: skip


def test_absent_attribute_is_missing_and_not_zero(bus: Bus) -> None:
    bus.plug(driver="", device="", current_link_width="", max_link_width="", **dict.fromkeys(AER, ""))
    found = bus.read_one()
    assert (found.driver, found.device) == ("", -1)
    counts = (found.width, found.width_max, found.aer_nonfatal, found.aer_fatal, found.aer_correctable)
    assert counts == (ABSENT,) * 5


def test_function_on_root_bus_has_no_port(bus: Bus) -> None:
    bus.plug(port="")
    assert bus.read_one().upstream_bridge == ""


@pytest.mark.parametrize(
    ("text", "lanes"),
    [
        ("1", 1),
        ("32", 32),
        ("0", Missing(Absence.ABSENT)),  # a virtual function
        ("63", UNPARSABLE),  # a removed device
        ("255", UNPARSABLE),
        ("x16", UNPARSABLE),
        ("\xff", UNPARSABLE),
    ],
)
def test_only_valid_link_widths_are_accepted(bus: Bus, text: str, lanes: int | Missing) -> None:
    (bus.plug() / "current_link_width").write_bytes(text.encode("latin-1") + b"\n")
    assert bus.read_one().width == lanes


def test_attribute_that_is_no_file_is_unreadable(bus: Bus) -> None:
    (bus.plug(aer_dev_fatal="") / "aer_dev_fatal").mkdir()
    assert bus.read_one().aer_fatal == Missing(Absence.UNREADABLE, 21)


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("RxErr 3\nTOTAL_ERR_COR 7\n", 7),
        ("RxErr 3\n", UNPARSABLE),
        ("TOTAL_ERR_COR", UNPARSABLE),
        ("TOTAL_ERR_COR -1\n", UNPARSABLE),
        ("TOTAL_ERR_CORE 7\n", UNPARSABLE),
        ("", UNPARSABLE),
    ],
)
def test_aer_total_is_read_from_its_line(text: str, total: int | Missing) -> None:
    assert parse_aer_total(text, "TOTAL_ERR_COR") == total


@pytest.mark.parametrize(
    ("text", "address"),
    [("0000:3b:00.0", GPU), ("00000000:3B:00.0", GPU), ("10000:e1:1f.7", "10000:e1:1f.7")],
)
def test_address_is_normalized_to_one_spelling(text: str, address: str) -> None:
    assert parse_pci_address(text) == address


VALID: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.IGNORECASE)


@given(
    st.sampled_from(["3b:00.0", "0000:3b:00.8", "0000:3b:20.0", "0000:3b:00", "PCI:0000:3b:00.0"])
    | st.text().filter(lambda text: not VALID.fullmatch(text))  # hypothesis also draws texts of our modules
)
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a PCI address"):
        parse_pci_address(text)


# --- this machine ------------------------------------------------------------------------------------------


def _functions_of_this_machine() -> list[str]:
    found = [path.name for path in (UDEV_SYSFS_ROOT / "bus/pci/devices").glob("*")]
    if not found:
        pytest.skip("this machine has no PCI bus")
    return found


def test_libudev_and_sysfs_list_the_same_functions_here() -> None:
    wanted = _functions_of_this_machine()[::2]
    found = pci._list_by_udev(wanted)
    if pci._udev_context() is None:
        pytest.skip("no libudev here")
    assert found.keys() >= set(wanted)
    assert found.keys() == pci._list_by_sysfs(UDEV_SYSFS_ROOT / "bus/pci/devices", wanted).keys()


def test_every_function_of_this_machine_is_readable() -> None:
    wanted = _functions_of_this_machine()
    found = read_pci_functions(UDEV_SYSFS_ROOT, wanted)
    assert isinstance(found, tuple)
    assert {sample.address for sample in found} == set(wanted)
    assert all(sample.vendor > 0 and sample.device > 0 for sample in found)


OVERLAY: Final = """
mount --make-rprivate / && mount -t tmpfs none "$1" && cd "$1" && mkdir added && tar -xf "$2" -C added &&
mount -t overlay overlay -o lowerdir="$1/added:/sys" /sys
"""
BOTH: Final = """
from pathlib import Path
from agent.sources import pci
sysfs = Path("/sys")
print(pci._list_by_udev([]).keys() == pci._list_by_sysfs(sysfs / "bus/pci/devices", []).keys())
print(*(f"{one.address} {one.driver} {one.width} {one.upstream_bridge}" for one in pci.read_pci_functions(sysfs, [])))
"""  # noqa: E501


@pytest.mark.parametrize("trusts", [True, False], ids=["libudev answers", "libudev takes it for no sysfs"])
def test_gpu_added_to_sysfs_by_overlay_is_found(bus: Bus, tmp_path: Path, *, trusts: bool) -> None:
    if read_pci_functions(UDEV_SYSFS_ROOT, []):
        pytest.skip("this machine has GPUs of its own, or no PCI bus")
    bus.plug()
    (tmp_path / "mount").mkdir()
    subprocess.run(["tar", "-cf", tmp_path / "bus.tar", "-C", tmp_path, "bus", "devices"], check=True)
    command = within_mounts(OVERLAY.strip(), tmp_path / "mount", tmp_path / "bus.tar")
    environ = {"SYSTEMD_DEVICE_VERIFY_SYSFS": "0"} if trusts else {}
    command += [sys.executable, "-c", BOTH]
    ran = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ran.stdout, ran.stderr) == (f"{trusts}\n{GPU} nvidia 16 0000:3a:00.0\n", "")


def test_embedding_driver_does_not_search_for_libudev(tmp_path: Path) -> None:
    """Finding libudev starts a child process, which a driver that waits for its children would reap."""
    program = (
        "import sys; from pathlib import Path; from agent.sources.pci import read_pci_functions; "
        "read_pci_functions(Path('/sys'), ['0000:00:00.0'], udev=False); print('pyudev' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert printed.stdout == "False\n"

"""Declarations of drivers: the format, key by key, and the checks of files."""

import os
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_user import give_to_other_user

from agent.config.files import LINE_BYTES
from agent.errors import ConfigError, ProbeError
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import (
    Declarations,
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredGpuDevice,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredOtherDevice,
    DeclaredPart,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.sources.declaration_file import (
    DEVICES_MAX,
    ERROR_CHARS,
    FILE_BYTES,
    FILES_MAX,
    check_owner_and_mode,
    parse_declaration,
    read_declarations,
)

DRIVER: Final = "gpu.example.com"
NODE: Final = "node-7"
PAGE: Final = Path(__file__).parent.parent / "docs" / "declared-devices.md"


def parse_devices(text: str) -> tuple[DriverDevice, ...]:
    return parse_declaration(text.encode(), DRIVER, NODE)


def device(keys: str) -> DriverDevice:
    """Parse the only device of a file with these keys and a name."""
    [found] = parse_devices(f'version = 1\n[[device]]\nname = "d-0"\n{keys}\n')
    return found


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_devices(text)
    return str(raised.value)


def error_in(keys: str) -> str:
    """Return the error for the only device of a file."""
    with pytest.raises(ConfigError) as raised:
        device(keys)
    who, _, error = str(raised.value).partition(": ")
    assert who == "device 1 (d-0)"
    return error


# --- the format --------------------------------------------------------------------------------------------

KINDS: Final[list[tuple[str, DeclaredPart]]] = [
    ('kind = "cpu"\ncpus = "8-15"', DeclaredCpuDevice(0xFF00, None, False, False)),
    (
        'kind = "cpu"\ncpus = "0,8191"\nnuma = 1023\nexclusive = true\nisolated = true',
        DeclaredCpuDevice(parse_cpus("0,8191"), 1023, True, True),
    ),
    ('kind = "gpu"\npci = "0000:3b:00.0"', DeclaredGpuDevice("0000:3b:00.0", "", -1, -1)),
    ('kind = "gpu"\npci = "00010000:3B:1F.7"', DeclaredGpuDevice("10000:3b:1f.7", "", -1, -1)),
    ('kind = "gpu"\nuuid = "MIG-5f0c"', DeclaredGpuDevice("", "MIG-5f0c", -1, -1)),
    ('kind = "gpu"\nuuid = "GPU-1f"\ngi = 0\nci = 255', DeclaredGpuDevice("", "GPU-1f", 0, 255)),
    ('kind = "hugepages"\nsize = "2Mi"\npages = 512\nnuma = 0', DeclaredHugepageDevice(2048, 512, 0)),
    ('kind = "hugepages"\nsize = "1Gi"\npages = 1\nnuma = 3', DeclaredHugepageDevice(1 << 20, 1, 3)),
    ('kind = "hugepages"\nsize = "1024Ki"\npages = 1\nnuma = 0', DeclaredHugepageDevice(1024, 1, 0)),
    ('kind = "memory"\nsize = "64Gi"\nnuma = 0', DeclaredMemoryDevice(64 << 30, 0)),
    ('kind = "memory"\nnuma = 1', DeclaredMemoryDevice(0, 1)),
    ('kind = "pci"\naddress = "0000:3B:00.0"', DeclaredPciDevice("0000:3b:00.0", "")),
    (
        'kind = "pci"\naddress = "0000:3b:00.0"\ndriver = "mlx5_core"',
        DeclaredPciDevice("0000:3b:00.0", "mlx5_core"),
    ),
    ('kind = "nic"\npci = "0000:41:00.0"', DeclaredNicDevice("0000:41:00.0", "")),
    ('kind = "nic"\nrdma = "mlx5_0"', DeclaredNicDevice("", "mlx5_0")),
]


@pytest.mark.parametrize(("keys", "what"), KINDS)
def test_each_kind_of_device_is_parsed(keys: str, what: DeclaredPart) -> None:
    assert device(keys) == DriverDevice(DRIVER, NODE, "d-0", what, 0)


def test_device_has_its_own_lease() -> None:
    assert device('kind = "memory"\nnuma = 0\nlease = "90s"').lease_s == 90


def test_file_has_its_own_pool() -> None:
    [found] = parse_devices(
        'version = 1\npool = "rack-1/node-7"\n[[device]]\nname = "m"\nkind = "memory"\nnuma = 0'
    )
    assert found.subject == f"{DRIVER}/rack-1/node-7/m"


def test_device_has_its_own_pool() -> None:
    [found_device, other] = parse_devices(
        'version = 1\npool = "rack-1"\n[[device]]\nname = "m"\nkind = "memory"\nnuma = 0\npool = "rack-2"\n'
        '[[device]]\nname = "n"\nkind = "memory"\nnuma = 0'
    )
    assert (found_device.pool, other.pool) == ("rack-2", "rack-1")


def test_empty_declaration_is_valid() -> None:
    assert parse_devices("version = 1") == ()


def test_documented_example_has_every_kind() -> None:
    example = PAGE.read_text().split("```toml\n")[1].split("```")[0]
    whats = {type(found_device.part) for found_device in parse_devices(example)}
    parts = {
        DeclaredCpuDevice,
        DeclaredGpuDevice,
        DeclaredHugepageDevice,
        DeclaredMemoryDevice,
        DeclaredPciDevice,
        DeclaredNicDevice,
    }
    assert whats == {*parts, DeclaredOtherDevice}


def memories(count: int) -> str:
    return "version = 1\n" + "".join(
        f'[[device]]\nname = "m-{number}"\nkind = "memory"\nnuma = 0\n' for number in range(count)
    )


def test_file_with_too_many_devices_is_refused() -> None:
    assert len(parse_devices(memories(DEVICES_MAX))) == DEVICES_MAX
    assert (
        error_of(memories(DEVICES_MAX + 1))
        == f"the file declares {DEVICES_MAX + 1} devices, limit {DEVICES_MAX}"
    )


FILES: Final = [
    ("", "required key 'version' is missing"),
    ("version = 2", "file format version 2 is not supported; write version = 1"),
    ("version = true", "version: True is not a whole number; write digits without quotes"),
    ("version = 1\ndevices = []", "unknown key 'devices'; did you mean 'device'?"),
    ("version = 1\ndevice = 3", "'device' is not a list of tables; write [[device]] above each device"),
    ("version = 1\ndevice = [3]", "'device' is not a list of tables; write [[device]] above each device"),
    ("version = 1\npool = 7", "pool: 7 is not a string; put it in quotes"),
    ("version = 1\nversion = 1\n", "is not valid TOML: Cannot overwrite a value (at line 2, column 12)"),
    ("version = 1\n[[device]]\n", "device 1: required key 'name' is missing"),
    ("version = 1\n[[device]]\nname = 'M'", "device 1: name: 'M' is not a DNS label, such as gpu-3"),
    (
        f"version = 1\n[[device]]\nname = '{'m' * 64}'",
        f"device 1: name: '{'m' * 64}' is 64 bytes, limit 63",
    ),
    (
        memories(2) + '[[device]]\nname = "m-0"\nkind = "memory"\nnuma = 1',
        "device 3 (m-0): device 1 has the same name",
    ),
]


@pytest.mark.parametrize(("text", "error"), FILES)
def test_invalid_file_is_refused_with_line(text: str, error: str) -> None:
    assert error_of(text) == error


GPU: Final = 'kind = "gpu"\npci = "0000:3b:00.0"\n'
PAGES: Final = 'kind = "hugepages"\nnuma = 0\n'
DEVICES: Final = [
    ("", "required key 'kind' is missing"),
    ('kind = "fpga"', "kind: 'fpga' is not one of cpu, gpu, hugepages, memory, nic, pci"),
    ('kind = "cpu"', "required key 'cpus' is missing"),
    ('kind = "cpu"\ncpus = "8-15"\nnuna = 1', "unknown key 'nuna' of kind 'cpu'; did you mean 'numa'?"),
    ('kind = "memory"\nnuma = 0\ncpus = "1"', "unknown key 'cpus' of kind 'memory'"),
    ('kind = "cpu"\ncpus = ""', "cpus: '' is an empty list of CPUs; name at least one, such as 0-3"),
    ('kind = "cpu"\ncpus = "8-8192"', "cpus: CPU range '8-8192' is empty or exceeds CPU 8191, the limit"),
    ('kind = "cpu"\ncpus = "8"\nnuma = 1024', "numa: 1024 is over the limit of 1023"),
    (
        'kind = "cpu"\ncpus = "8"\nexclusive = 1',
        "exclusive: 1 is neither true nor false; write one of them without quotes",
    ),
    ('kind = "nic"', "NIC has neither 'pci' nor 'rdma'; give one of them"),
    ('kind = "nic"\npci = "0000:41:00.0"\nrdma = "a"', "NIC has both 'pci' and 'rdma'; give one of them"),
    ('kind = "nic"\nrdma = "../a"', "rdma: '../a' is not the name of an RDMA device, such as mlx5_0"),
    ('kind = "gpu"', "GPU has neither 'pci' nor 'uuid'; give one of them"),
    (GPU + "gi = 1", "only one of 'gi' and 'ci' is given; a MIG instance needs both"),
    (GPU + "gi = 256\nci = 0", "gi: 256 is over the limit of 255"),
    (GPU + 'uuid = "1f0c"', "uuid: '1f0c' is not an NVIDIA UUID, such as GPU-... or MIG-..."),
    ('kind = "gpu"\npci = "3b:00.0"', "pci: '3b:00.0' is not a PCI address with a domain, such as 0000:3b:00.0"),  # noqa: E501
    (PAGES + 'size = "2M"\npages = 1',
     "size: '2M' is not a size; write a number and Ki, Mi, Gi, Ti or Pi, such as 2Mi"),
    (PAGES + 'size = "3Mi"\npages = 1', "size: '3Mi' is not a page size: 3072 KiB is not a power of two"),
    (PAGES + 'size = "2Mi"\npages = 0', "pages: 0 is below the limit of 1"),
    (PAGES + 'size = "2Mi"', "required key 'pages' is missing"),
    ('kind = "memory"', "required key 'numa' is missing"),
    ('kind = "pci"\naddress = "0000:3b:00.0"\ndriver = "a/b"',
     "driver: 'a/b' is not a kernel driver, such as nvme"),
    (GPU + 'lease = "2s"', "lease: 2s is below the limit of 3s"),
    (GPU + 'lease = "24h"', "lease: 24h is over the limit of 86399s"),
    (GPU + 'lease = "3.5s"',
     "lease: '3.5s' is not a whole number of seconds; write a value such as 30s or 5m"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "error"), DEVICES)
def test_invalid_device_is_refused_with_key_and_value(keys: str, error: str) -> None:
    assert error_in(keys) == error


SCRAPS: Final = [
    *("version = 1\n", "[[device]]\n", 'name = "a"\n', 'kind = "cpu"\n', 'cpus = "1-3"\n', "numa = 0\n"),
    *(f"gi = {'9' * 5000}\n", f"pool = {'[' * 3000}", '"\\u0000" = 1\n', "\xff", "ci = -1\n", "]]\n"),
]


@given(st.lists(st.sampled_from(SCRAPS)).map(lambda scraps: "".join(scraps).encode("latin-1")) | st.binary())
def test_random_bytes_give_devices_or_config_error(data: bytes) -> None:
    try:
        found = parse_declaration(data, DRIVER, NODE)
    except ConfigError:
        return
    assert all(file.driver == DRIVER for file in found)


# --- the files ---------------------------------------------------------------------------------------------

ONE: Final = 'version = 1\n[[device]]\nname = "m-0"\nkind = "memory"\nnuma = 0\n'
TWO: Final = ONE.replace("m-0", "m-1")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "devices.d"
    found.mkdir()
    return found


def write(directory: Path, text: str = ONE, driver: str = DRIVER) -> Path:
    path = directory / f"{driver}.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def read(directory: Path, before: Declarations = ()) -> Declarations:
    return read_declarations(directory, before, NODE)


def names(declarations: Declarations) -> dict[str, list[str]]:
    return {file.driver: [device.name for device in file.devices] for file in declarations}


def declaration_error(directory: Path, path: Path) -> str:
    """Return the error of the only file, and check that its previous devices stay."""
    before = (DeclaredFile(DRIVER, parse_devices(ONE)),)
    [file] = read(directory, before)
    assert file.devices == before[0].devices
    assert file.error.startswith(f"declaration file {path}: ")
    return file.error.removeprefix(f"declaration file {path}: ")


def test_each_driver_has_its_own_file(directory: Path) -> None:
    write(directory, TWO, "z.example.com")
    write(directory, ONE, "a.example.com")
    assert names(read(directory)) == {"a.example.com": ["m-0"], "z.example.com": ["m-1"]}


def test_two_drivers_may_declare_the_same_hardware(directory: Path) -> None:
    for driver in ("a.example.com", "z.example.com"):
        write(directory, ONE, driver)
    assert [file.error for file in read(directory)] == ["", ""]


def test_absent_directory_has_no_declarations(tmp_path: Path) -> None:
    assert read(tmp_path / "devices.d", (DeclaredFile(DRIVER, parse_devices(ONE)),)) == ()


def test_unreadable_directory_is_an_error_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "devices.d").touch()
    with pytest.raises(ProbeError, match=r"devices\.d: cannot be listed: Not a directory"):
        read(tmp_path / "devices.d")


def test_removed_file_declares_nothing(directory: Path) -> None:
    path = write(directory)
    before = read(directory)
    path.unlink()
    assert read(directory, before) == ()


def test_file_that_becomes_invalid_keeps_devices_until_fixed(directory: Path) -> None:
    path = write(directory)
    before = read(directory)
    path.write_text("version = 2")
    [wrong] = read(directory, before)
    assert names((wrong,)) == {DRIVER: ["m-0"]}
    assert (
        wrong.error == f"declaration file {path}: file format version 2 is not supported; write version = 1"
    )
    path.write_text(TWO)
    assert read(directory, (wrong,)) == (DeclaredFile(DRIVER, parse_devices(TWO)),)


def test_editor_backup_files_are_ignored(directory: Path) -> None:
    for name in (f".{DRIVER}.toml.swp", f".{DRIVER}.toml", f"{DRIVER}.toml~", f"{DRIVER}.toml.new", ".toml"):
        (directory / name).write_text("no TOML at all")
    assert read(directory) == ()


def test_file_with_invalid_driver_name_is_reported(directory: Path) -> None:
    write(directory, driver="My GPUs")
    [file] = read(directory)
    assert file.devices == ()
    assert file.error.endswith("driver name 'My GPUs' is not a DNS subdomain, such as gpu.example.com")


def test_file_name_of_arbitrary_bytes_is_printable(directory: Path) -> None:
    with open(os.fsencode(directory) + b"/\xff.toml", "w"):
        pass
    [file] = read(directory)
    assert file.error.isascii()


def test_symbolic_link_is_refused(directory: Path, tmp_path: Path) -> None:
    path = directory / f"{DRIVER}.toml"
    path.symlink_to(write(tmp_path))
    assert declaration_error(directory, path) == "is a symbolic link"


def test_fifo_does_not_block(directory: Path) -> None:
    path = directory / f"{DRIVER}.toml"
    os.mkfifo(path, 0o644)
    assert declaration_error(directory, path) == "is not a regular file"


def test_directory_instead_of_file_is_refused(directory: Path) -> None:
    path = directory / f"{DRIVER}.toml"
    path.mkdir(0o755)
    assert declaration_error(directory, path) == "is not a regular file"


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_file_writable_by_others_is_refused(directory: Path, mode: int) -> None:
    path = write(directory)
    path.chmod(mode)
    assert (
        declaration_error(directory, path)
        == f"is writable by group or others: mode {mode:04o}; set at most 0644"
    )


def test_file_of_another_user_is_refused(directory: Path) -> None:
    path = write(directory)
    give_to_other_user(path)
    assert declaration_error(directory, path) == "belongs to user id 65534; must belong to user id 0"


def test_unprivileged_agent_accepts_files_of_root_and_itself(directory: Path) -> None:
    found = write(directory).stat()
    check_owner_and_mode(found, {0, found.st_uid})
    with pytest.raises(ConfigError, match="must belong to user id 70000 or 70001"):
        check_owner_and_mode(found, {70_001, 70_000})


def test_file_at_size_limit_is_read_and_above_refused(directory: Path) -> None:
    lines, rest = divmod(FILE_BYTES - len(ONE), 64)
    path = write(directory, ONE + ("#" * 63 + "\n") * lines + "#" * rest)
    assert names(read(directory)) == {DRIVER: ["m-0"]}
    with path.open("a") as file:
        file.write("#")
    assert declaration_error(directory, path) == f"is larger than {FILE_BYTES} bytes, the limit"


def test_error_text_is_cut_to_limit(directory: Path) -> None:
    write(directory, f'version = 1\npool = "{"x" * 100_000}"')
    assert len(read(directory)[0].error) <= ERROR_CHARS


@pytest.fixture
def full(directory: Path) -> Declarations:
    """Return the largest number of drivers."""
    for number in range(FILES_MAX):
        write(directory, driver=f"d{number:02}.example.com")
    return read(directory)


def test_new_file_above_file_limit_is_refused_and_old_ones_stay(directory: Path, full: Declarations) -> None:
    path = write(directory, driver="a.example.com")
    write(directory, driver="b.example.com")
    newest, *rest = read(directory, full)
    assert tuple(rest) == full
    assert newest == DeclaredFile(
        "a.example.com",
        (),
        f"declaration file {path}: not read: one of {FILES_MAX + 2} files, limit {FILES_MAX}",
    )
    assert read(directory, (newest, *rest)) == (newest, *rest), "having been refused gives it no place"


def test_file_that_shrinks_makes_room_for_one_that_grows_in_the_same_read(directory: Path) -> None:
    write(directory, memories(DEVICES_MAX - 50), "zz.example.com")
    write(directory, memories(50), "aa.example.com")
    before = read_declarations(directory, (), "node-a")
    write(directory, memories(100), "zz.example.com")
    write(directory, memories(DEVICES_MAX - 100), "aa.example.com")
    files = read_declarations(directory, before, "node-a")
    assert [(len(file.devices), file.error) for file in files] == [(DEVICES_MAX - 100, ""), (100, "")]


def test_device_limit_applies_to_all_drivers_together(directory: Path) -> None:
    write(directory, memories(DEVICES_MAX - 1), "a.example.com")
    path = write(directory, ONE, "b.example.com")
    before = read(directory)
    assert [file.error for file in before] == ["", ""]
    write(directory, memories(2), "b.example.com")
    small, grown = read(directory, before)
    assert small == before[0]
    counts = f"declares 2 devices, other drivers {DEVICES_MAX - 1}"
    error = f"declaration file {path}: {counts}; limit of all: {DEVICES_MAX}"
    assert grown == DeclaredFile("b.example.com", before[1].devices, error)


def test_growing_driver_removes_no_devices_of_others(directory: Path) -> None:
    write(directory, ONE, "a.example.com")
    write(directory, memories(DEVICES_MAX - 1), "z.example.com")
    before = read(directory)
    write(directory, memories(2), "a.example.com")
    assert names(read(directory, before)) == names(before)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_directory_whose_files_others_can_replace_is_not_read(directory: Path, *, is_foreign: bool) -> None:
    write(directory, memories(1))
    if is_foreign:
        give_to_other_user(directory)
        why = "belongs to uid 65534, who can replace its files"
    else:
        directory.chmod(0o777)
        why = "has mode 0777: all users may write to it"
    with pytest.raises(ProbeError, match=f"declaration directory {directory}: not read: {why}"):
        read(directory)


def test_room_freed_by_one_driver_is_available_to_others(directory: Path) -> None:
    path = write(directory, memories(DEVICES_MAX), "a.example.com")
    before = read(directory)
    path.unlink()
    write(directory, memories(DEVICES_MAX), "b.example.com")
    assert [file.error for file in read(directory, before)] == [""]


def test_long_line_is_refused_before_parsing() -> None:
    key = ".".join("a" * 10_000)
    assert error_of(f"version = 1\n{key} = 1\n") == (
        f"line 2: line is {len(key) + 4} bytes, limit {LINE_BYTES}; split it"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"version{'.a' * 64} = 1\n", "line 1: dotted key has over 64 parts, the limit; shorten it"),
        (f"version = 1\n[[device]]\nname = {'[' * 40}{']' * 40}\n", "nested more than 32 deep, the limit"),
        (f"version = {'[' * 900}", "arrays or tables are nested too deeply; remove brackets"),
        (f"version = 0x{'f' * 4000}\n", "version: integer has 16000 bits, limit 64; write a smaller one"),
    ],
    ids=["dotted key", "brackets", "more brackets", "digits"],
)
def test_file_that_costs_too_much_is_refused(text: str, words: str) -> None:
    assert words in error_of(text)

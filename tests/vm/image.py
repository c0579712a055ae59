"""An initrd with the agent, its Python and a busybox: all that a virtual machine needs to run it.

Nothing is downloaded here but the kernel, as a Debian package; Python, its libraries and the agent are those
of the environment that runs this.
"""

import compileall
import gzip
import importlib.metadata
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).resolve().parent
SCRIPTS: Final = (
    *(HERE / name for name in ("init", "guest.py", "guest_audit.py")),
    *(HERE.parent / name for name in ("audit_samples.py", "cgroup_audit_pods.py", "kubelet_files.py")),
)
MODULES: Final = ("mce-inject", "hwpoison-inject")
"""Kernel modules that inject hardware errors."""
UNUSED: Final = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "ensurepip",
        "turtledemo",
        "lib2to3",
        "__pycache__",
        "site-packages",
        "dist-packages",
    }
)
DISTRIBUTION: Final = "drahealth"


class Image(NamedTuple):
    """Kernel and initrd for QEMU."""

    kernel: Path
    initrd: Path


def build(directory: Path) -> Image:
    """Build the image; the kernel is downloaded only once."""
    package = _kernel_package(directory)
    unpacked = directory / "kernel"
    if not unpacked.exists():
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
    root = directory / "root"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "dev", "proc", "sys", "tmp", "run", "etc", "modules"):
        (root / name).mkdir(parents=True)
    for name in MODULES:
        shutil.copy(next(unpacked.rglob(f"{name}.ko")), root / "modules")
    _copy_program(root, Path(_find_program("busybox")), root / "bin/busybox")
    _copy_python(root)
    for script in SCRIPTS:
        shutil.copy(script, root)
    (root / "init").chmod(0o755)
    _compile_python(root)
    return Image(next((unpacked / "boot").glob("vmlinuz-*")), _pack(root, directory / "initrd.gz"))


def _kernel_package(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(directory.glob("linux-image-*.deb"))):
        depends = subprocess.run(
            ["apt-cache", "depends", "linux-image-amd64"], check=True, capture_output=True, text=True
        ).stdout
        name = re.search(r"Depends: (linux-image-\S+)", depends)
        if name is None:
            raise LookupError(f"apt knows no kernel image: {depends!r}")
        subprocess.run(["apt-get", "download", name[1]], check=True, cwd=directory, capture_output=True)
        found = sorted(directory.glob("linux-image-*.deb"))
    return found[-1]


def _find_program(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise FileNotFoundError(f"{program} is not installed")
    return found


# --- Python and the agent ----------------------------------------------------------------------------------


def _copy_python(root: Path) -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    _copy_program(root, Path(sys.executable).resolve(), root / "bin/python3")
    shutil.copytree(
        stdlib, _path_below(root, stdlib), ignore=lambda _, names: UNUSED & {*names}, symlinks=True
    )
    for library in [*stdlib.rglob("*.so"), *_libpython()]:
        _copy_libraries(root, library)
    packages = root / "packages"
    for path, target in _files(DISTRIBUTION):
        (packages / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, packages / target)
        if path.suffix == ".so":
            _copy_libraries(root, path)
    home = root / "python-home"
    home.write_text(sys.base_prefix)


def _compile_python(root: Path) -> None:
    """Compile all modules below ``root``; else each process of the emulated machine compiles them."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(root, quiet=2, force=True, invalidation_mode=mode, stripdir=str(root))


def _libpython() -> Iterator[Path]:
    directory, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if directory and name and (path := Path(directory, name)).suffix != ".a" and path.exists():
        yield path


def _files(distribution: str) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a distribution and of its requirements, with their paths below the packages."""
    agent = HERE.parent.parent / "agent"
    for path in agent.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path, path.relative_to(agent.parent)
    for name in sorted(_closure(distribution) - {distribution}):
        for file in importlib.metadata.distribution(name).files or ():
            path = Path(str(file.locate()))
            if path.is_file() and ".." not in file.parts and "__pycache__" not in file.parts:
                yield path, Path(*file.parts)


def _closure(distribution: str) -> set[str]:
    names, left = set(), [distribution]
    while left:
        name = left.pop()
        if name in names:
            continue
        names.add(name)
        for requirement in importlib.metadata.requires(name) or ():
            wanted = re.match(r"[A-Za-z0-9._-]+", requirement)
            if wanted and "extra ==" not in requirement and _is_installed(wanted[0]):
                left.append(wanted[0])
    return names


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- programs and libraries --------------------------------------------------------------------------------


def _copy_program(root: Path, program: Path, target: Path) -> None:
    shutil.copy(program, target)
    _copy_libraries(root, program)


def _copy_libraries(root: Path, binary: Path) -> None:
    listing = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
    for path in re.findall(r"(?:=> )?(/\S+) \(0x", listing):
        target = _path_below(root, Path(path))
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def _path_below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _pack(root: Path, target: Path) -> Path:
    names = "\0".join(_names(root))
    archive = subprocess.run(
        ["cpio", "--null", "--create", "--format=newc", "--quiet", "--owner=0:0"],
        input=names.encode(),
        stdout=subprocess.PIPE,
        cwd=root,
        check=True,
    ).stdout
    with gzip.open(target, "wb", compresslevel=1) as file:
        file.write(archive)
    return target


def _names(root: Path) -> Iterable[str]:
    for directory, _, files in os.walk(root):
        here = Path(directory).relative_to(root)
        yield str(here)
        yield from (str(here / name) for name in files)

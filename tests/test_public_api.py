"""The public API: one list of names, types for all of them, names as the field has them."""

import ast
import inspect
import re
import subprocess
import sys
import typing
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import agent.api
import drahealth

REPOSITORY = Path(__file__).parents[1]
GUIDES = (
    REPOSITORY / "docs/embedding.md",
    REPOSITORY / "README.md",
    REPOSITORY / "examples/hostdev_driver/README.md",
)
PUBLIC = {name: getattr(drahealth, name) for name in drahealth.__all__}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}


def test_package_has_exactly_the_names_of_the_api() -> None:
    assert drahealth.__all__ == agent.api.__all__ == sorted(agent.api.__all__)
    assert {name for name in dir(drahealth) if not name.startswith("_")} == set(drahealth.__all__)
    assert agent.api.MODULE_OF.keys() == set(drahealth.__all__)
    with pytest.raises(AttributeError, match="module 'drahealth' has no attribute 'Monitr'"):
        getattr(drahealth, "Monitr")  # noqa: B009  # a type checker refuses drahealth.Monitr


def test_names_come_from_the_modules_that_type_checkers_read() -> None:
    block = next(node for node in ast.parse(inspect.getsource(agent.api)).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {name.name: node.module for node in imports for name in node.names} == agent.api.MODULE_OF


def test_type_checkers_read_no_function_that_accepts_any_name() -> None:
    for module in (agent.api, drahealth):
        functions = (node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If))
        conditions = [ast.unparse(node.test).rpartition(".")[2] for node in functions]
        assert {condition.removeprefix("not ") for condition in conditions} == {"TYPE_CHECKING"}


def test_import_loads_no_module_of_a_name() -> None:
    program = "import drahealth, sys; print(sorted(n for n in sys.modules if n.startswith('agent.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['agent.api', 'agent.version']\n"


def test_both_packages_are_typed() -> None:
    for package in ("agent", "drahealth"):
        assert (REPOSITORY / package / "py.typed").exists()


def test_internal_package_has_no_public_names() -> None:
    program = "import agent, sys; print([n for n in sys.modules if n.startswith('agent.')]); agent.Monitor"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "['agent.version']\n"
    assert "module 'agent' has no attribute 'Monitor'" in done.stderr


LIBRARIES = "asyncio, betterproto, cffi, grpclib.server, h2.connection, msgspec, ssl, trio"
LATER = ["http.client", "jinja2", "pynvml", "psutil", "pyudev", "sqlite3", "starlette", "yaml"]
"""Modules that are imported only when there is something for them."""


def test_all_names_take_16_mib_more_than_its_libraries() -> None:
    program = f"""
import sys, {LIBRARIES}
def pages(): return int(open("/proc/self/statm").read().split()[1])
before = pages()
import drahealth
for name in drahealth.__all__: getattr(drahealth, name)
print((pages() - before) * 4096, *(name for name in {LATER} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    size, *later = done.stdout.split()
    assert int(size) < 16 << 20
    assert later == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_name_of_a_guide_is_exported(guide: Path) -> None:
    code = re.findall(r"^```python\n(.*?)^```$|(`[^`\n]+`)", guide.read_text(), re.DOTALL | re.MULTILINE)
    names = {
        name for pair in code for text in pair for name in re.findall(r"(?<![\w.-])drahealth\.(\w+)", text)
    }
    assert "Monitor" in names
    assert names - {"example"} <= set(PUBLIC)


PAGES = sorted([
    *(page for page in REPOSITORY.glob("*.md")),
    *(REPOSITORY / "docs").glob("*.md"),
    *(REPOSITORY / "examples").rglob("*.md"),
])  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_pages_name_the_public_package_only(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"(?<![\w/.-])agent\.(\w+)", text))
    assert not named & set(PUBLIC), "these names are of the package drahealth"
    for block in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        assert not re.search(r"^\s*(?:import|from) agent\b", block, re.MULTILINE), block
        assert set(re.findall(r"(?<![\w.-])drahealth\.(\w+)", block)) - {"example"} <= set(PUBLIC), block


def test_every_error_that_a_docstring_names_is_exported() -> None:
    documented = "\n".join(
        inspect.getdoc(member) or ""
        for value in PUBLIC.values()
        for member in (value, *(vars(value).values() if inspect.isclass(value) else ()))
        if callable(member)
    )
    named = set(
        re.findall(r"^ {2,8}(\w+Error|ResourceBusy\w*|PermissionDenied\w*):", documented, re.MULTILINE)
    )
    standard = {name for name in named if hasattr(__builtins__, name) or name in dir(__import__("builtins"))}
    assert {"ConfigError", "PrepareError"} <= named
    assert named - standard <= set(PUBLIC)


def test_exceptions_end_in_error_and_all_others_do_not() -> None:
    for name, value in CLASSES.items():
        assert issubclass(value, Exception) == name.endswith("Error"), name


def test_mistake_of_an_author_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="'Not A Driver' is not a DNS subdomain"):
        drahealth.Monitor("Not A Driver")
    with pytest.raises(ValueError, match="required key 'cpus' is missing"):
        drahealth.Device("d", drahealth.Cpus(""))


def parameters_of(value: object) -> typing.Iterator[inspect.Parameter]:
    """Yield the parameters of a public function, or of a class and its public methods."""
    members = [value, *vars(value).values()] if inspect.isclass(value) else [value]
    for member in members:
        if callable(member) and not getattr(member, "__name__", "").startswith("_"):
            try:
                yield from inspect.signature(member).parameters.values()
            except (ValueError, TypeError):
                continue


CALLABLE = sorted(set(PUBLIC) - {"Config"})
"""Names with parameters of their own: the fields of Config are the keys of the configuration file."""


@pytest.mark.parametrize("name", CALLABLE)
def test_numbers_of_seconds_are_spelled_with_s(name: str) -> None:
    for parameter in parameters_of(PUBLIC[name]):
        assert parameter.name not in {"every", "timeout", "seconds", "interval", "delay", "lease"}, name


@pytest.mark.parametrize("name", CALLABLE)
def test_directories_may_be_strings_or_path_objects(name: str) -> None:
    for parameter in parameters_of(PUBLIC[name]):
        if re.search(r"_dir$|^directory$|^file$", parameter.name):
            assert "PathLike" in str(parameter.annotation), f"{name}: {parameter}"


VALUES = (
    "ApiAccess CdiDevice CdiMount CdiNode Claim Cpus Device Gpu Hugepages Memory Nic Pci PreparedDevice "
    "SliceDevice TaintPolicy"
)


@pytest.mark.parametrize("name", VALUES.split())
def test_fields_with_a_default_are_given_by_name(name: str) -> None:
    """A field that a later version adds in the middle changes no program."""
    optional = [
        field
        for field in fields(CLASSES[name])
        if (field.default, field.default_factory) != (MISSING, MISSING)
    ]
    assert [field.name for field in optional if not field.kw_only] == (["part"] if name == "Device" else [])


def test_empty_path_is_refused_with_the_name_of_the_argument() -> None:
    with pytest.raises(drahealth.ConfigError, match="argument kubelet_dir: '' is not a path"):
        drahealth.Monitor("demo.example.com", kubelet_dir="")
    with pytest.raises(drahealth.ConfigError, match="argument state_dir: 7 is not a path"):
        drahealth.Monitor("demo.example.com", state_dir=7)  # type: ignore[arg-type]

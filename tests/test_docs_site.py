"""The documentation site has every page and every public name; `make docs` builds it, without warnings.

Documents name only commands, source files and C functions that exist.
"""

import functools
import json
import re
from pathlib import Path

import pytest

import drahealth

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "docs" / "index.md"


def listed_pages() -> list[Path]:
    """Return the pages in the tables of contents of the start page."""
    tables = re.findall(r"```\{toctree\}\n(.*?)```", INDEX.read_text(), re.DOTALL)
    entries = [line for table in tables for line in table.splitlines() if line and line[0] != ":"]
    return [(INDEX.parent / f"{entry}.md").resolve() for entry in entries]


def test_start_page_lists_every_page_once() -> None:
    pages = listed_pages()
    expected = {
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "go" / "README.md",
    }
    assert sorted(pages) == sorted(expected - {INDEX})


def test_python_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "python-api.md").read_text()
    names = re.findall(r"^\.\. auto[a-z]+:: (\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(drahealth.__all__)


VERBS = json.loads((ROOT / "tests/golden/surface/flags.json").read_text())
PAGES = sorted({INDEX, *listed_pages()})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_page_have_existing_verbs_and_flags(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for verb, rest in re.findall(r"(?:^|[`\s/(])drahealth ([a-z-]+)([^`|;&\n)#]*)", text):
        if verb in VERBS:  # else prose
            given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest))
            assert given <= {*VERBS[verb]["flags"]}, f"drahealth {verb}{rest}"
    for verb in re.findall(r"`drahealth ([a-z-]+)", text):
        assert verb in {*VERBS, "help"}, f"drahealth {verb}"


# --- names of the sources ----------------------------------------------------------------------------------

OTHER_FILES = {
    "/etc/drahealth/config.toml",
    "/etc/drahealth/config.d/*.toml",
    "config.toml",
    "devices.d/<driver>.toml",
    "/run/drahealth/devices.d/gpu.example.com.toml",
    ".gpu.example.com.toml",
}
"""Files in the documents that an operator or a driver writes."""

SOURCE_DOCUMENTS = [
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCE_DIRECTORIES = (
    "agent", "benchmarks", "deploy", "drahealth", "examples", "go", "native", "tests", "tools",
)  # fmt: skip


def code_spans(document: Path) -> list[str]:
    """Return the texts in backticks of a document, without its code blocks."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", text)


@functools.cache
def source_files() -> tuple[Path, ...]:
    files = [file for name in SOURCE_DIRECTORIES for file in (ROOT / name).rglob("*.*")]
    files += ROOT.glob("*.*")
    return tuple(file for file in files if file.suffix in {".py", ".c", ".h", ".toml"})


def is_source_file(name: str) -> bool:
    """Return whether a file of the tree has the name, which may have directories; ``<theme>`` is any one."""
    pattern = re.sub("<[a-z]+>", "*", name)
    return any(file.relative_to(ROOT).match(pattern) for file in source_files())


@pytest.mark.parametrize("document", SOURCE_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_files_that_a_document_names_exist(document: Path) -> None:
    names = {
        name
        for span in code_spans(document)
        for name in re.findall(r"[\w./<>*-]+\.(?:py|c|h|toml)(?![\w.])", span)
    }
    assert sorted(name for name in names - OTHER_FILES if not is_source_file(name)) == []


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_classes_and_methods_that_a_document_names_exist(document: str) -> None:
    files = [*(ROOT / "agent").rglob("*.py"), *(ROOT / "proto").rglob("*.proto")]
    text = "\n".join(file.read_text() for file in files)
    defined = set(re.findall(r"\b(?:class|rpc) (\w+)", text))
    members = {a or b for a, b in re.findall(r"\bdef (\w+)|^    (\w+)\s*[:=]", text, re.MULTILINE)}
    spans = [span for span in code_spans(ROOT / document) if not span.endswith((".md", ".yaml"))]
    names = [re.fullmatch(r"([A-Z][A-Za-z]*[a-z])(\.\w+)?", span) for span in spans]
    assert sorted({name[1] for name in names if name} - defined) == []
    assert sorted({name[2][1:] for name in names if name and name[2]} - members) == []


@pytest.mark.parametrize("document", SOURCE_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_c_functions_that_a_document_names_exist(document: Path) -> None:
    names = {name for span in code_spans(document) for name in re.findall(r"\b(dh_\w+)\(", span)}
    sources = [file for file in source_files() if file.suffix in {".c", ".h"}] if names else []
    text = "".join(file.read_text() for file in sources)
    assert sorted(name for name in names if not re.search(rf"\b{name}\(", text)) == []

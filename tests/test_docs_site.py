"""The documentation site has every page and every public name; `make docs` builds it, without warnings."""

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

"""Manual pages: each verb, flag and setting has its entry, and groff has no warning."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from man_pages import escaped, pages

from agent.cli.main import VERBS, build_parser
from agent.config.config import SETTINGS

PAGES = pages()
TOOL = Path(__file__).parent.parent / "tools" / "man_pages.py"


def test_every_verb_has_a_page() -> None:
    assert PAGES.keys() == {"drahealth.1", "drahealth.toml.5", *(f"drahealth-{verb}.1" for verb in VERBS)}
    assert all(rf"\fBdrahealth\-{escaped(verb)}\fR(1)" in PAGES["drahealth.1"] for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_of_a_verb_is_in_its_page(verb: str) -> None:
    _, parsers = build_parser([verb])
    for action in parsers[verb]._actions:
        for name in action.option_strings:
            assert rf"\fB{escaped(name)}\fR" in PAGES[f"drahealth-{verb}.1"]


def test_page_of_a_verb_names_the_variables_of_its_flags() -> None:
    assert escaped("Each flag can also be set by a variable DRAHEALTH_<FLAG>") in PAGES["drahealth-run.1"]
    assert "DRAHEALTH_<FLAG>" not in PAGES["drahealth-checks.1"]


def test_keys_of_an_entry_are_in_the_page_of_the_file() -> None:
    keys = "code, device, off, severity, probation, limit"
    assert f"Keys of an entry: {keys}\n" in PAGES["drahealth.toml.5"]
    assert escaped("Keys of an entry: name, command, devices, period") in PAGES["drahealth.toml.5"]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_is_in_the_page_of_the_file(setting) -> None:  # type: ignore[no-untyped-def]
    table, _, name = setting.key.rpartition(".")
    title = re.escape(f"[{escaped(table)}]" if table else "Other tables")
    part = re.split(rf'\.SS "{title}"', PAGES["drahealth.toml.5"], maxsplit=1)[1]
    assert f"\\fB{escaped(name)}\\fR\n{escaped(setting.help)}\n" in part


@pytest.mark.parametrize("name", PAGES)
def test_groff_formats_a_page_without_warning(name: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-ww", "-Tascii"]
    done = subprocess.run(command, input=PAGES[name], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    plain = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    assert "NAME" in plain


def test_tool_writes_all_pages(tmp_path: Path) -> None:
    subprocess.run([sys.executable, TOOL, tmp_path / "man"], check=True)
    assert {path.name: path.read_text() for path in (tmp_path / "man").iterdir()} == PAGES

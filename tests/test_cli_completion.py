"""``drahealth completion``: a real shell completes verbs, flags and values with the printed script."""

import shutil
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE_S

from agent.cli.main import VERBS, build_parser, main


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    from agent.cli.completion import completion_script

    path = tmp_path_factory.mktemp("completion") / "drahealth"
    path.write_text(completion_script(*build_parser()))
    return path


def complete_words(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in ("drahealth", *words))
    code = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _drahealth; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    found = subprocess.run(["bash", "-uc", code], capture_output=True, text=True, check=True)
    return found.stdout.split()


def test_first_word_is_a_verb(script: Path) -> None:
    assert complete_words(script, "") == [*VERBS, "help"]
    assert complete_words(script, "co") == ["conform", "config", "completion"]


def test_flag_of_the_program_is_completed(script: Path) -> None:
    assert complete_words(script, "--v") == ["--version"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_of_a_verb_is_completed(script: Path, verb: str) -> None:
    _, parsers = build_parser([verb])
    flags = [name for action in parsers[verb]._actions for name in action.option_strings]
    offered = complete_words(script, verb, "-")
    assert set(offered) == {flag for flag in flags if flag.startswith("--")}


def test_values_of_a_flag_are_completed_in_both_forms(script: Path) -> None:
    assert complete_words(script, "run", "--table", "a") == ["auto", "always"]
    assert complete_words(script, "run", "--table", "=", "ne") == ["never"]
    assert complete_words(script, "run", "--table", "=") == ["auto", "always", "never"]
    assert complete_words(script, "checks", "-o", "m") == ["markdown"]
    assert complete_words(script, "scan", "--output", "m") == [], "scan has no Markdown"


def test_values_of_an_argument_are_completed(script: Path) -> None:
    assert complete_words(script, "config", "") == ["show", "check", "schema"]
    assert complete_words(script, "completion", "z") == ["zsh"]
    assert complete_words(script, "config", "check", "") == [], "the next argument is a file"
    assert complete_words(script, "explain", "") == ["pod", "claim"]
    assert complete_words(script, "explain", "claim", "") == [], "the next argument is a name"


def test_other_values_are_left_to_the_shell(script: Path) -> None:
    assert complete_words(script, "run", "--config", "/etc/") == []


def test_script_is_printed_for_both_shells(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert main(["completion", "bash"]) == 0
    printed = capsys.readouterr().out
    assert printed == script.read_text()
    assert main(["completion", "zsh"]) == 0
    assert printed in capsys.readouterr().out


def test_zsh_accepts_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    assert main(["completion", "zsh"]) == 0
    file = tmp_path / "drahealth.zsh"
    file.write_text(capsys.readouterr().out)
    subprocess.run(["zsh", "-fc", f"autoload -U compinit; compinit -D; source {file}"], check=True)


ZSH_SESSION = r"""
zmodload zsh/zpty
zpty shell "TERM=xterm zsh -fi"
zpty -w shell "fpath=($PWD \$fpath); autoload -U compinit; compinit -D -u; echo re''ady"
zpty -r -m shell line '*ready*'
zpty -w -n shell $'drahealth chec\t'
zpty -r -m shell line '*checks*'
"""
"""A zsh on a terminal, with the working directory in fpath, and a command that a tab completes."""


def test_zsh_completes_a_verb_at_the_first_use_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "_drahealth").write_text(capsys.readouterr().out)
    subprocess.run(["zsh", "-fc", ZSH_SESSION], cwd=tmp_path, check=True, timeout=PATIENCE_S)

"""``drahealth completion``: prints a script that completes verbs, flags and their values in a shell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from agent.cli.subcommand import Subcommand

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

SHELLS: Final = ("bash", "zsh")

ZSH_HEAD: Final = """\
#compdef drahealth
autoload -U +X bashcompinit && bashcompinit
"""
ZSH_TAIL: Final = """\
if [[ ${funcstack[1]} == _drahealth ]]; then
    _bash_complete -o bashdefault -o default -F _drahealth
fi
"""
"""End of the zsh script: completes at once if the script is the file `_drahealth` in zsh's fpath."""

SCRIPT: Final = """\
_drahealth() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} verb= words= i
    if [[ $cur == = ]]; then
        cur=
    elif [[ $prev == = ]]; then
        prev=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            {verbs}) verb=${{COMP_WORDS[i]}}; break ;;
        esac
    done
    case $verb:$prev in
{values}
        *)
            case $verb:$cur in
{flags}
            esac ;;
    esac
    COMPREPLY=()
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
    fi
}}
complete -o bashdefault -o default -F _drahealth drahealth
"""
"""Completion function of bash. If it has no words to offer, the shell completes names of files."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" or ".join(SHELLS))


def main(args: Namespace) -> int:
    from agent.cli.main import build_parser

    parser, parsers = build_parser()
    script = completion_script(parser, parsers)
    print(f"{ZSH_HEAD}{script}{ZSH_TAIL}" if args.shell == "zsh" else script, end="")
    return 0


def completion_script(parser: ArgumentParser, parsers: Mapping[str, ArgumentParser]) -> str:
    """Return the completion function for bash, from the parsers of ``drahealth`` and of its subcommands."""
    flags = [f"                {verb}:-*) words={_quote(_flags(sub))} ;;" for verb, sub in parsers.items()]
    flags.append(f"                :-*) words={_quote(_flags(parser))} ;;")
    for verb, sub in parsers.items():
        if words := list(_argument_values(sub)):
            is_given = '[[ " $words " == *" $prev "* ]]'
            flags.append(f"                {verb}:*) words={_quote(words)}; {is_given} && words= ;;")
    flags.append(f"                :*) words={_quote([*parsers, 'help'])} ;;")
    values = [
        f"        {'|'.join(f'{verb}:{flag}' for flag in names)}) words={_quote(choices)} ;;"
        for verb, sub in parsers.items()
        for names, choices in _flag_values(sub)
    ]
    return SCRIPT.format(verbs="|".join(parsers), values="\n".join(values), flags="\n".join(flags))


def _flags(parser: ArgumentParser) -> list[str]:
    """Return the long flags of a parser, and its short ones that have no long form."""
    found: list[str] = []
    for action in parser._actions:
        long = [name for name in action.option_strings if name.startswith("--")]
        found += long or action.option_strings
    return found


def _flag_values(parser: ArgumentParser) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names and the values of each flag with a fixed set of values."""
    for action in parser._actions:
        if action.option_strings and action.choices:
            yield list(action.option_strings), [str(choice) for choice in action.choices]


def _argument_values(parser: ArgumentParser) -> Iterator[str]:
    """Yield the fixed values of arguments that are no flags; a literal word of a metavar is in lower case."""
    for action in parser._actions:
        if not action.option_strings:
            yield from map(str, action.choices or re.findall(r"\b[a-z]+\b", str(action.metavar)))


def _quote(words: list[str]) -> str:
    return f'"{" ".join(words)}"'


VERB = Subcommand(
    name="completion",
    summary="print the completion script of a shell",
    description=(
        "Prints a script with which bash or zsh completes verbs, flags and their values. It is made from the "
        "same tables as --help."
    ),
    examples=(
        ("drahealth completion bash", "for /usr/share/bash-completion/completions/drahealth"),
        ("drahealth completion zsh", "for ~/.zshrc, after compinit, or a file _drahealth in fpath"),
    ),
    add_arguments=add_arguments,
    main=main,
)

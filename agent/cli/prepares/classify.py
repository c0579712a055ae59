"""``drahealth classify``: what drahealth makes of an error that somebody describes."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.document import API_VERSION
from agent.cli.output.terminal import style_of
from agent.cli.output.text import GAP, Entry, format_age, format_entries, wrap
from agent.cli.verb import Verb, add_config, add_output, config_file_of
from agent.config.config import load
from agent.config.values import number_within
from agent.errors import UsageError, suggestion
from agent.model.claim import Claim, ClaimDevice
from agent.model.health import Health
from agent.model.prepare import Operation

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import Style
    from agent.model.prepare import PrepareVerdict
    from agent.prepare.evidence import Errno, Evidence, GrpcStatus, HttpStatus, NvmlCode
    from agent.prepare.patterns import Pattern

CLAIM: Final = Claim(
    "<namespace>", "<claim>", "<uid>", (ClaimDevice("<request>", "<driver>", "<pool>", "<device>"),)
)
"""Whose prepare it is said to be: of one device, or a broken one could not be told from the others."""
ERRNO_MAX: Final = 4095
"""Of the kernel; drivers have numbers of their own that the C library does not name."""
NVML_MAX: Final = 999
TOLD: Final = "The kubelet would be told, of a claim with one device that is not known to be broken:"
HELP: Final = "\ntry 'drahealth classify --help'"


def add_arguments(parser: ArgumentParser) -> None:
    numbers: dict[str, Any] = {"dest": "numbers", "action": "append", "default": []}
    parser.add_argument("text", metavar="TEXT", nargs="?", default="", help="the error's message")
    parser.add_argument("--errno", metavar="ERRNO", type=_errno, help="ENOSPC, 28 or -28", **numbers)
    parser.add_argument(
        "--doing",
        choices=tuple(map(str, Operation)),
        help="what the driver was doing when --errno came; api: the API server answered --http",
    )
    parser.add_argument(
        "--nvml", metavar="CODE", type=_nvml, help="NVML's return code: 15 or GPU_IS_LOST", **numbers
    )
    parser.add_argument(
        "--grpc",
        metavar="STATUS",
        type=_grpc,
        help="of a call of another service: 14 or UNAVAILABLE",
        **numbers,
    )
    parser.add_argument(
        "--http", metavar="STATUS", type=_http, help="of a server's answer: 403 or FORBIDDEN", **numbers
    )
    add_output(parser)
    add_config(parser)


def main(args: Namespace) -> int:
    from agent.prepare.classify import Context, classify_evidence

    doing = Operation(args.doing) if args.doing else None
    evidence = _evidence(args.text, args.numbers, doing)
    config = load({}, os.environ, file=config_file_of(args), serves=False)
    verdict = classify_evidence(evidence, Context(CLAIM, patterns=config.prepare_patterns))
    if args.output == "json":
        print(json.dumps(document(verdict), indent=2))
    else:
        style = style_of(sys.stdout, args.color, os.environ)
        print(render(verdict, style, args.text, config.prepare_patterns), end="")
    return 0


# --- what was given ----------------------------------------------------------------------------------------


def _evidence(text: str, numbers: Sequence[Evidence], doing: Operation | None) -> tuple[Evidence, ...]:
    """What was given, as the evidence of one failure. The text is the message of numbers that can have one.

    Raises:
        UsageError: nothing was given, or what the driver was doing and nothing that depends on it.
    """
    from agent.prepare.evidence import Errno, GrpcStatus, HttpStatus, Text

    if not text and not numbers:
        raise UsageError(f"give the error's TEXT, --errno, --nvml, --grpc or --http, or several{HELP}")
    meant = Errno | HttpStatus if doing is Operation.API else Errno
    if doing and not any(isinstance(piece, meant) for piece in numbers):
        words = "--errno or --http" if doing is Operation.API else "--errno"
        raise UsageError(f"--doing {doing} is for {words}: it says nothing of what else was given{HELP}")
    found: list[Evidence] = []
    for piece in numbers:
        match piece:
            case Errno(number):
                found.append(Errno(number, doing, "", text or os.strerror(number)))
            case GrpcStatus():
                found.append(piece._replace(message=text))
            case HttpStatus():
                found.append(piece._replace(message=text, kubernetes=doing is Operation.API))
            case _:
                found.append(piece)
    if text and not any(isinstance(piece, Errno | GrpcStatus | HttpStatus) for piece in found):
        found.insert(0, Text(text))
    return tuple(found)


def _errno(word: str) -> Errno:
    from agent.prepare.evidence import Errno

    names = {name: number for name, number in vars(errno).items() if name.startswith("E")}
    number = word.removeprefix("-")  # as C returns it, and as drivers log it
    return Errno(_number(number, "errno", names, 1, ERRNO_MAX))


def _nvml(word: str) -> NvmlCode:
    from agent.prepare.evidence import NVML_NAMES, NvmlCode

    names = {name: number for number, name in NVML_NAMES.items()}
    return NvmlCode(_number(word, "return code of NVML", names, 0, NVML_MAX, prefix="NVML_ERROR"))


def _grpc(word: str) -> GrpcStatus:
    from agent.prepare.evidence import GRPC_NAMES, GrpcStatus

    names = {name: number for number, name in enumerate(GRPC_NAMES)}
    return GrpcStatus(_number(word, "gRPC status", names, 0, len(GRPC_NAMES) - 1, prefix="STATUS_CODE"))


def _http(word: str) -> HttpStatus:
    from http import HTTPStatus

    from agent.prepare.evidence import HttpStatus

    errors = {status.name: status for status in HTTPStatus if status >= 400}
    number = _number(word, "HTTP status of an error", errors, 400, 599)
    return HttpStatus(number, HTTPStatus(number).phrase if number in errors.values() else "")


def _number(
    word: str, what: str, names: Mapping[str, int], least: int, most: int, *, prefix: str = ""
) -> int:
    """A number as it is, or by its name, however its language or library writes that.

    Raises:
        ArgumentTypeError: It is none; says which may have been meant, or the limit.
    """
    if re.fullmatch(r"[0-9]{1,9}", word):
        try:
            number_within(least, most)(int(word))
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
        return int(word)
    bare = {_bare(name): number for name, number in names.items()}
    number = bare.get(_bare(word).removeprefix(_bare(prefix)))
    if number is None:
        raise ArgumentTypeError(f"{word!r} is no {what}{suggestion(word.upper(), names)}")
    return number


def _bare(name: str) -> str:
    """``DEADLINE_EXCEEDED``, ``DeadlineExceeded`` and ``deadline exceeded`` are one name."""
    return re.sub(r"[\W_]", "", name).upper()


# --- what is made of it ------------------------------------------------------------------------------------


def render(verdict: PrepareVerdict, style: Style, text: str, patterns: Sequence[Pattern]) -> str:
    """For people: what it is, why, what follows, and the line that the kubelet would get."""
    from agent.cli.prepares.codes import CLASSES, COLOURS
    from agent.prepare.message import text as line_of

    kind = verdict.error_class
    head = f"{style.paint(verdict.code, 'bold')}{GAP}{style.paint(kind, COLOURS[kind])}"
    entries = [Entry(title, words) for title, words in _facts(verdict, text, patterns)]
    lines = [
        head,
        *wrap(CLASSES[kind], style, first="  ", rest="  "),
        "",
        *format_entries(entries, style),
        "",
        *wrap(TOLD, style, first="", rest="", paint=("dim",)),
        line_of(verdict),  # not wrapped: this is how it looks in an event
    ]
    return "\n".join(lines) + "\n"


def _facts(verdict: PrepareVerdict, text: str, patterns: Sequence[Pattern]) -> Iterator[tuple[str, str]]:
    from agent.cli.prepares.codes import follows
    from agent.prepare.taxonomy import FAMILY, row_of

    row = row_of(verdict.code, verdict.error_class)
    named = row.code == verdict.code or row.code.endswith(FAMILY)
    yield "said", verdict.summary
    yield "means", row.why if named else f"what its pattern says; it is handled like {row.code}"
    yield "what to do", verdict.advice
    kept = f"; the same claim gets this answer for {format_age(row.sticky_s)} while nothing changes"
    yield "what follows", follows(row) + (kept if row.sticky_s else "")
    yield "reach", verdict.scope
    for word in verdict.evidence:
        yield "shown by", word
    yield "confidence", f"{verdict.confidence} (0 is a guess, 1 is proof)"
    if text and patterns:
        yield "patterns", _patterns(verdict, text, patterns)


def _patterns(verdict: PrepareVerdict, text: str, patterns: Sequence[Pattern]) -> str:
    """Which of the configuration has the text, and whether that was what decided."""
    from agent.prepare.normalize import clean

    found = [number for number, one in enumerate(patterns, 1) if one.takes(clean(text))]
    if not found:
        return f"of {len(patterns)} in the configuration none is found in the text"
    code = patterns[found[0] - 1].code
    words = f"number {found[0]} of {len(patterns)} in the configuration is found in the text"
    return words if code == verdict.code else f"{words}, but what else was given shows more than {code}"


def document(verdict: PrepareVerdict) -> dict[str, Any]:
    """The same for programs."""
    from agent.prepare.message import text
    from agent.prepare.taxonomy import row_of

    row = row_of(verdict.code, verdict.error_class)
    return {
        "apiVersion": API_VERSION,
        "class": verdict.error_class,
        "code": verdict.code,
        "scope": verdict.scope,
        "summary": verdict.summary,
        "advice": verdict.advice,
        "retry": row.retry,
        "stickySeconds": verdict.sticky_s,
        "health": None if verdict.health is None else Health(verdict.health).name.capitalize(),
        "taint": verdict.taint._asdict() if verdict.taint else None,
        "evidence": list(verdict.evidence),
        "confidence": verdict.confidence,
        "text": text(verdict),
    }


VERB = Verb(
    name="classify",
    summary="what would be made of an error while preparing a claim",
    description=(
        "Judges an error as a driver that embeds drahealth would, with the patterns of the configuration: "
        "its class, what follows, what to do, and the line that the kubelet would get. All that is given is "
        "of one error, the outermost number first. Needs no agent, and touches nothing. Exits with 0."
    ),
    examples=(
        ("drahealth classify --errno ENOSPC --doing cdi", "the disk was full when a CDI file was written"),
        ("drahealth classify 'bank 3 is locked' --config my.toml", "whether a pattern of mine is found"),
    ),
    add_arguments=add_arguments,
    main=main,
)

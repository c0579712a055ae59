"""``drahealth classify``: classifies a prepare error that is described by flags."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION, REMEDIATION, ObjectKeys
from agent.cli.output.table import GAP, ListEntry, format_entries, wrap
from agent.cli.output.terminal import style_of
from agent.cli.output.text import format_age
from agent.cli.verb import Verb, add_config, add_output, config_file_of
from agent.config.config import load
from agent.config.values import number_within
from agent.errors import UsageError, suggestion
from agent.model.claim import Claim, ClaimDevice
from agent.model.prepare import Operation

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.model.prepare import PrepareVerdict
    from agent.prepare.evidence import Errno, Evidence, GrpcStatus, HttpStatus, NvmlCode
    from agent.prepare.patterns import Pattern

CLAIM: Final = Claim(
    "<namespace>", "<claim>", "<uid>", (ClaimDevice("<request>", "<driver>", "<pool>", "<device>"),)
)
"""Claim of the assumed prepare, with one device: of several, the failed one would be unknown."""
ERRNO_MAX: Final = 4095
"""Largest errno of the kernel; drivers have numbers that the C library does not name."""
NVML_MAX: Final = 999
KUBELET_LINE: Final = "Line for the kubelet, for a claim with one device that is not known to be broken:"
HELP: Final = "\ntry 'drahealth classify --help'"


def add_arguments(parser: ArgumentParser) -> None:
    numbers: dict[str, Any] = {"dest": "numbers", "action": "append", "default": []}
    parser.add_argument("text", metavar="TEXT", nargs="?", default="", help="the error's message")
    parser.add_argument("--errno", metavar="ERRNO", type=_errno, help="errno: ENOSPC, 28 or -28", **numbers)
    parser.add_argument(
        "--doing",
        choices=tuple(map(str, Operation)),
        help="what the driver did when it got --errno; api: the API server answered with --http",
    )
    parser.add_argument(
        "--nvml", metavar="CODE", type=_nvml, help="return code of NVML: 15 or GPU_IS_LOST", **numbers
    )
    parser.add_argument(
        "--grpc",
        metavar="STATUS",
        type=_grpc,
        help="status of a gRPC call: 14 or UNAVAILABLE",
        **numbers,
    )
    parser.add_argument(
        "--http", metavar="STATUS", type=_http, help="status of an HTTP response: 403 or FORBIDDEN", **numbers
    )
    add_output(parser)
    add_config(parser)


def main(args: Namespace) -> int:
    from agent.prepare.classify import PrepareContext, classify_evidence

    doing = Operation(args.doing) if args.doing else None
    evidence = _evidence(args.text, args.numbers, doing)
    config = load({}, os.environ, file=config_file_of(args), serves=False)
    verdict = classify_evidence(evidence, PrepareContext(CLAIM, patterns=config.prepare_patterns))
    if args.output == "json":
        print(json.dumps(document(verdict), indent=2))
    else:
        style = style_of(sys.stdout, args.color, os.environ)
        print(render(verdict, style, args.text, config.prepare_patterns), end="")
    return 0


# --- arguments ---------------------------------------------------------------------------------------------


def _evidence(text: str, numbers: Sequence[Evidence], doing: Operation | None) -> tuple[Evidence, ...]:
    """Return the arguments as evidence of one failure. `text` becomes the message of numbers that have one.

    Raises:
        UsageError: No evidence is given, or ``--doing`` without a flag that depends on it.
    """
    from agent.prepare.evidence import Errno, ErrorText, GrpcStatus, HttpStatus

    if not text and not numbers:
        raise UsageError(f"no error is given: use TEXT, --errno, --nvml, --grpc or --http, or several{HELP}")
    applies_to = Errno | HttpStatus if doing is Operation.API else Errno
    if doing and not any(isinstance(piece, applies_to) for piece in numbers):
        flags = "--errno or --http" if doing is Operation.API else "--errno"
        raise UsageError(f"--doing {doing} needs {flags}{HELP}")
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
        found.insert(0, ErrorText(text))
    return tuple(found)


def _errno(word: str) -> Errno:
    from agent.prepare.evidence import Errno

    names = {name: number for name, number in vars(errno).items() if name.startswith("E")}
    number = word.removeprefix("-")  # as C returns it, and as drivers log it
    return Errno(_number(number, "an errno", names, 1, ERRNO_MAX))


def _nvml(word: str) -> NvmlCode:
    from agent.prepare.evidence import NVML_NAMES, NvmlCode

    names = {name: number for number, name in NVML_NAMES.items()}
    return NvmlCode(_number(word, "a return code of NVML", names, 0, NVML_MAX, prefix="NVML_ERROR"))


def _grpc(word: str) -> GrpcStatus:
    from agent.prepare.evidence import GRPC_NAMES, GrpcStatus

    names = {name: number for number, name in enumerate(GRPC_NAMES)}
    return GrpcStatus(_number(word, "a gRPC status", names, 0, len(GRPC_NAMES) - 1, prefix="STATUS_CODE"))


def _http(word: str) -> HttpStatus:
    from http import HTTPStatus

    from agent.prepare.evidence import HttpStatus

    errors = {status.name: status for status in HTTPStatus if status >= 400}
    number = _number(word, "the HTTP status of an error", errors, 400, 599)
    return HttpStatus(number, HTTPStatus(number).phrase if number in errors.values() else "")


def _number(
    word: str, kind: str, names: Mapping[str, int], minimum: int, maximum: int, *, prefix: str = ""
) -> int:
    """Return the number that `word` is or names, in the spelling of any language or library.

    Raises:
        ArgumentTypeError: The name is not known, or the number is out of range.
    """
    if re.fullmatch(r"[0-9]{1,9}", word):
        try:
            number_within(minimum, maximum)(int(word))
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
        return int(word)
    bare = {_bare(name): number for name, number in names.items()}
    number = bare.get(_bare(word).removeprefix(_bare(prefix)))
    if number is None:
        raise ArgumentTypeError(f"{word!r} is not {kind}{suggestion(word.upper(), names)}")
    return number


def _bare(name: str) -> str:
    """Return the common spelling of ``DEADLINE_EXCEEDED``, ``DeadlineExceeded`` and ``deadline exceeded``."""
    return re.sub(r"[\W_]", "", name).upper()


# --- result ------------------------------------------------------------------------------------------------


def render(verdict: PrepareVerdict, style: TextStyle, text: str, patterns: Sequence[Pattern]) -> str:
    """Return class, reasons, consequence and advice of a verdict as text, and the line for the kubelet."""
    from agent.cli.prepares.text import CLASS_COLOURS, CLASSES
    from agent.prepare.message import kubelet_text

    error_class = verdict.error_class
    head = f"{style.paint(verdict.code, 'bold')}{GAP}{style.paint(error_class, CLASS_COLOURS[error_class])}"
    entries = [ListEntry(title, fact) for title, fact in _facts(verdict, text, patterns)]
    lines = [
        head,
        *wrap(CLASSES[error_class], style, first="  ", rest="  "),
        "",
        *format_entries(entries, style),
        "",
        *wrap(KUBELET_LINE, style, first="", rest="", paint=("dim",)),
        kubelet_text(verdict),  # not wrapped, as in an event
    ]
    return "\n".join(lines) + "\n"


def _facts(verdict: PrepareVerdict, text: str, patterns: Sequence[Pattern]) -> Iterator[tuple[str, str]]:
    from agent.cli.prepares.text import consequence
    from agent.prepare.taxonomy import FAMILY, row_of

    row = row_of(verdict.code, verdict.error_class)
    is_listed = row.code == verdict.code or row.code.endswith(FAMILY)
    yield "error", verdict.summary
    yield "meaning", row.why if is_listed else f"as its pattern states; handled like {row.code}"
    yield "advice", verdict.advice
    cached = f"; answers the same claim from the cache for {format_age(row.sticky_s)} while nothing changes"
    yield "consequence", consequence(row) + (cached if row.sticky_s else "")
    yield "scope", verdict.scope
    for evidence in verdict.evidence:
        yield "evidence", evidence
    yield "confidence", f"{verdict.confidence} (0 is a guess, 1 is proof)"
    if text and patterns:
        yield "patterns", _patterns(verdict, text, patterns)


def _patterns(verdict: PrepareVerdict, text: str, patterns: Sequence[Pattern]) -> str:
    """Return which configured pattern matches the text, and whether the pattern decided the verdict."""
    from agent.prepare.normalize import sanitize

    found = [number for number, pattern in enumerate(patterns, 1) if pattern.matches(sanitize(text))]
    if not found:
        return f"none of {len(patterns)} in the configuration matches the text"
    code = patterns[found[0] - 1].code
    match = f"number {found[0]} of {len(patterns)} in the configuration matches the text"
    return match if code == verdict.code else f"{match}, but other evidence is stronger than {code}"


VERDICT: Final = ObjectKeys("class:error_class code scope summary advice")
EVIDENCE: Final = ObjectKeys("stickySeconds:sticky_s health taint evidence confidence", taint=REMEDIATION)


def document(verdict: PrepareVerdict) -> dict[str, Any]:
    """Return the verdict as JSON. Keys are only ever added."""
    from agent.prepare.message import kubelet_text
    from agent.prepare.taxonomy import row_of

    return {
        "apiVersion": API_VERSION,
        **VERDICT(verdict),
        "retry": row_of(verdict.code, verdict.error_class).retry,
        **EVIDENCE(verdict),
        "text": kubelet_text(verdict),
    }


VERB = Verb(
    name="classify",
    summary="classify a prepare error without a failing claim",
    description=(
        "Classifies an error as a driver that embeds drahealth does, with the patterns of the configuration, "
        "and shows its class, consequence, advice and the line that the kubelet would get. All arguments "
        "describe one error, with the outermost number first. Needs no agent and changes nothing. Exits "
        "with 0."
    ),
    examples=(
        ("drahealth classify --errno ENOSPC --doing cdi", "the disk was full when a CDI file was written"),
        ("drahealth classify 'bank 3 is locked' --config my.toml", "test a pattern of the configuration"),
    ),
    add_arguments=add_arguments,
    main=main,
)

"""``drahealth classify``: classifies an error of preparing a claim.

The flags describe the error. With ``--parameters``, the command checks opaque parameters before a claim with
them is prepared, and classifies the error that they would cause.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.cli.output.json import API_VERSION, REMEDIATION, ObjectKeys
from agent.cli.output.text import GAP, ListEntry, clean, format_entries, wrap
from agent.cli.subcommand import Subcommand, add_config, add_output, load_config, print_result
from agent.config.values import number_within
from agent.errors import UsageError, suggestion
from agent.model.claim import Claim, ClaimDevice
from agent.model.prepare import Operation
from agent.model.time import format_age

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.model.json_values import JsonObject
    from agent.model.prepare import PrepareVerdict
    from agent.prepare.claim_parser import ParameterCheck, Parameters
    from agent.prepare.error_tables import ErrorPattern
    from agent.prepare.evidence import ErrnoEvidence, Evidence, GrpcStatus, HttpStatus, NvmlCode

CLAIM: Final = Claim(
    "<namespace>", "<claim>", "<uid>", devices=(ClaimDevice("<request>", "<driver>", "<pool>", "<device>"),)
)
"""Claim that the error is assumed to belong to. It has one device, which is then the failed one."""
ERRNO_MAX: Final = 4095
"""Largest errno of the kernel; drivers use numbers for which the C library has no name."""
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
        "--grpc", metavar="STATUS", type=_grpc, help="status of a gRPC call: 14 or UNAVAILABLE", **numbers
    )
    parser.add_argument(
        "--http", metavar="STATUS", type=_http, help="status of an HTTP response: 403 or FORBIDDEN", **numbers
    )
    parser.add_argument(
        "--parameters",
        metavar="FILE",
        type=Path,
        help="check the opaque parameters of the ResourceClaims, templates and DeviceClasses in FILE instead",
    )
    parser.add_argument(
        "--kinds",
        metavar="MODULE:NAME",
        help="with --parameters: the driver's types of parameters, a mapping in a Python module; without it "
        "only size, apiVersion and kind are checked",
    )
    parser.add_argument("--driver", metavar="NAME", help="with --parameters: only those for this driver")
    add_output(parser)
    add_config(parser)


def main(args: Namespace) -> int:
    from agent.prepare.classify import PrepareContext, classify_evidence
    from agent.prepare.prepare_ledger import PrepareLedger, with_failure

    if args.parameters is not None:
        if args.text or args.numbers or args.doing:
            raise UsageError(f"--parameters cannot be combined with TEXT, --doing or error numbers{HELP}")
        return check_file(args, document)
    if args.kinds or args.driver:
        raise UsageError(f"--kinds and --driver need --parameters{HELP}")
    doing = Operation(args.doing) if args.doing else None
    evidence = _failure_evidence(args.text, args.numbers, doing)
    config = load_config(args)
    verdict = classify_evidence(evidence, PrepareContext(CLAIM, patterns=config.prepare_patterns))
    # the ledger caches a failure that only the driver reports for a shorter time
    _, verdict = with_failure(PrepareLedger(), CLAIM, "", verdict, time.time())
    patterns = config.prepare_patterns
    print_result(args, lambda: document(verdict), lambda style: render(verdict, style, args.text, patterns))
    return 0


# --- arguments ---------------------------------------------------------------------------------------------


def _failure_evidence(
    text: str, numbers: Sequence[Evidence], doing: Operation | None
) -> tuple[Evidence, ...]:
    """Return the arguments of the command line as evidence of one failed prepare.

    `text` is the error message. If `numbers` has an errno or a status, the message belongs to it.

    Raises:
        UsageError: No evidence is given, or ``--doing`` without the errno or status that it belongs to.
    """
    from agent.prepare.evidence import ErrnoEvidence, ErrorText, GrpcStatus, HttpStatus

    if not text and not numbers:
        raise UsageError(f"no error is given: use TEXT, --errno, --nvml, --grpc or --http, or several{HELP}")
    applies_to = ErrnoEvidence | HttpStatus if doing is Operation.API else ErrnoEvidence
    if doing and not any(isinstance(piece, applies_to) for piece in numbers):
        flags = "--errno or --http" if doing is Operation.API else "--errno"
        raise UsageError(f"--doing {doing} needs {flags}{HELP}")
    found: list[Evidence] = []
    for piece in numbers:
        match piece:
            case ErrnoEvidence(number):
                found.append(ErrnoEvidence(number, doing, "", text or os.strerror(number)))
            case GrpcStatus():
                found.append(piece._replace(message=text))
            case HttpStatus():
                found.append(piece._replace(message=text, from_api_server=doing is Operation.API))
            case _:
                found.append(piece)
    if text and not any(isinstance(piece, ErrnoEvidence | GrpcStatus | HttpStatus) for piece in found):
        found.insert(0, ErrorText(text))
    return tuple(found)


def _errno(word: str) -> ErrnoEvidence:
    from agent.prepare.evidence import ErrnoEvidence

    names = {name: number for name, number in vars(errno).items() if name.startswith("E")}
    number = word.removeprefix("-")  # as C returns it, and as drivers log it
    return ErrnoEvidence(_parse_number(number, "an errno", names, 1, ERRNO_MAX))


def _nvml(word: str) -> NvmlCode:
    from agent.prepare.evidence import NVML_NAMES, NvmlCode

    names = {name: number for number, name in NVML_NAMES.items()}
    return NvmlCode(_parse_number(word, "a return code of NVML", names, 0, NVML_MAX, prefix="NVML_ERROR"))


def _grpc(word: str) -> GrpcStatus:
    from agent.prepare.evidence import GRPC_NAMES, GrpcStatus

    names = {name: number for number, name in enumerate(GRPC_NAMES)}
    return GrpcStatus(
        _parse_number(word, "a gRPC status", names, 0, len(GRPC_NAMES) - 1, prefix="STATUS_CODE")
    )


def _http(word: str) -> HttpStatus:
    from http import HTTPStatus

    from agent.prepare.evidence import HttpStatus

    errors = {status.name: status for status in HTTPStatus if status >= 400}
    number = _parse_number(word, "the HTTP status of an error", errors, 400, 599)
    return HttpStatus(number, HTTPStatus(number).phrase if number in errors.values() else "")


def _parse_number(
    word: str, kind: str, names: Mapping[str, int], minimum: int, maximum: int, *, prefix: str = ""
) -> int:
    """Return the number in `word`, which is a number or the name of a number.

    The spelling of the name may be that of any programming language.

    Raises:
        ArgumentTypeError: The name is not known, or the number is out of range.
    """
    if re.fullmatch(r"[0-9]{1,9}", word):
        try:
            number_within(minimum, maximum)(int(word))
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
        return int(word)
    bare = {_without_separators(name): number for name, number in names.items()}
    number = bare.get(_without_separators(word).removeprefix(_without_separators(prefix)))
    if number is None:
        raise ArgumentTypeError(f"{word!r} is not {kind}{suggestion(word.upper(), names)}")
    return number


def _without_separators(name: str) -> str:
    """Return `name` in capitals without separators: ``DEADLINEEXCEEDED`` for ``deadline exceeded``."""
    return re.sub(r"[\W_]", "", name).upper()


# --- result ------------------------------------------------------------------------------------------------


def render(verdict: PrepareVerdict, style: TextStyle, text: str, patterns: Sequence[ErrorPattern]) -> str:
    """Return the classified error as text: code, class, reasons, advice, the line for the kubelet."""
    from agent.cli.prepares.text import CLASS_COLOURS, CLASSES
    from agent.prepare.kubelet_message import kubelet_text

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


def _facts(verdict: PrepareVerdict, text: str, patterns: Sequence[ErrorPattern]) -> Iterator[tuple[str, str]]:
    from agent.cli.prepares.text import consequence
    from agent.prepare.failure_kinds import FAMILY, failure_kind

    row = failure_kind(verdict.code, verdict.error_class)
    is_listed = row.code == verdict.code or row.code.endswith(FAMILY)
    yield "error", verdict.summary
    yield "meaning", row.explanation if is_listed else f"as its pattern states; handled like {row.code}"
    yield "advice", verdict.advice
    cached = f"; the same claim gets this verdict again for {format_age(verdict.sticky_s)}"
    yield "consequence", consequence(row) + (f"{cached} while nothing changes" if verdict.sticky_s else "")
    yield "scope", verdict.scope
    for evidence in verdict.evidence:
        yield "evidence", evidence
    yield "confidence", f"{verdict.confidence} (0 is a guess, 1 is proof)"
    if text and patterns:
        yield "patterns", _patterns(verdict, text, patterns)


def _patterns(verdict: PrepareVerdict, text: str, patterns: Sequence[ErrorPattern]) -> str:
    """Return which pattern of the configuration matches `text`, and whether it decided the verdict."""
    from agent.prepare.kubelet_message import sanitize

    found = [number for number, pattern in enumerate(patterns, 1) if pattern.matches(sanitize(text))]
    if not found:
        return f"none of {len(patterns)} in the configuration matches the text"
    code = patterns[found[0] - 1].code
    match = f"number {found[0]} of {len(patterns)} in the configuration matches the text"
    return match if code == verdict.code else f"{match}, but other evidence is stronger than {code}"


VERDICT: Final = ObjectKeys("class:error_class code scope summary advice repair")
EVIDENCE: Final = ObjectKeys("stickySeconds:sticky_s health taint evidence confidence", taint=REMEDIATION)


def document(verdict: PrepareVerdict) -> dict[str, Any]:
    """Return the classified error as JSON. Later versions only add keys."""
    from agent.prepare.failure_kinds import failure_kind
    from agent.prepare.kubelet_message import kubelet_text

    return {
        "apiVersion": API_VERSION,
        **VERDICT(verdict),
        "retry": failure_kind(verdict.code, verdict.error_class).retry,
        **EVIDENCE(verdict),
        "text": kubelet_text(verdict),
    }


VERB = Subcommand(
    name="classify",
    summary="classify a prepare error without a failing claim",
    description=(
        "Classifies an error as a driver that embeds drahealth does, with the patterns of the configuration, "
        "and shows its class, consequence, advice and the line that the kubelet would get. All arguments "
        "describe one error, with the outermost number first. With --parameters, decodes the opaque "
        "parameters of claims that need not exist yet as the driver would. Needs no agent and changes "
        "nothing. Exits with 0, or with 2 if parameters are wrong."
    ),
    examples=(
        ("drahealth classify --errno ENOSPC --doing cdi", "the disk was full when a CDI file was written"),
        (
            "drahealth classify --parameters claim.yaml --kinds hostdev_driver.parameters:KINDS",
            "check a claim's parameters before it is created",
        ),
    ),
    add_arguments=add_arguments,
    main=main,
)


# --- opaque parameters -------------------------------------------------------------------------------------


class CheckedParameters(NamedTuple):
    """Parameters of one object in the file of ``--parameters``, and the error of a prepare with them."""

    kind: str
    namespace: str
    name: str
    path: str
    driver: str
    verdict: PrepareVerdict | None
    """Verdict on the failed prepare; None: the parameters can be decoded."""

    @property
    def subject(self) -> str:
        """Object that has the parameters: ``ResourceClaim default/pages``, or ``DeviceClass pages``."""
        return f"{self.kind} {f'{self.namespace}/' if self.namespace else ''}{self.name or '<no name>'}"


def check_file(args: Namespace, verdict_document: Callable[[PrepareVerdict], JsonObject]) -> int:
    """Check the parameters in the file of ``--parameters`` and print the result.
    Return the command's exit code.

    Args:
        args: Arguments of the command line.
        verdict_document: Converts a verdict to JSON.

    Raises:
        UsageError: The file is not readable or has no object with parameters, or ``--kinds`` names no types.
    """
    kinds = load_kinds(args.kinds) if args.kinds else None
    checked = list(_check_objects(args.parameters, kinds, args.driver or ""))
    print_result(
        args,
        lambda: {
            "apiVersion": API_VERSION,
            "parameters": [
                {**row._asdict(), "verdict": None if row.verdict is None else verdict_document(row.verdict)}
                for row in checked
            ],
        },
        lambda style: _render_parameters(checked, style),
    )
    return 2 if any(checked_object.verdict is not None for checked_object in checked) else 0


def load_kinds(name: str) -> Mapping[str, type[Parameters]]:
    """Import a driver's types of parameters, ``module:NAME``; the current directory is searched first.

    Raises:
        UsageError: The module cannot be imported, or the value is no mapping of types.
    """
    from agent.prepare.claim_parser import Parameters

    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"--kinds {name}: is not MODULE:NAME, such as hostdev_driver.parameters:KINDS")
    sys.path.insert(0, "")  # the current directory
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # the module is the driver's own and may raise anything
        raise UsageError(f"--kinds {name}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove("")
    if not isinstance(found, Mapping) or not all(
        isinstance(kind, type) and issubclass(kind, Parameters) for kind in found.values()
    ):
        raise UsageError(f"--kinds {name}: is not a mapping of '<apiVersion>/<kind>' to drahealth.Parameters")
    return found


def _check_objects(
    path: Path, kinds: Mapping[str, type[Parameters]] | None, driver: str
) -> Iterator[CheckedParameters]:
    from agent.prepare.claim_parser import PARAMETER_KINDS, check_parameters
    from agent.sources.kubectl_files import parse_all_objects, read_object_file

    content = read_object_file(path)
    try:
        objects = [obj for obj in parse_all_objects(content.data) if str(obj.get("kind")) in PARAMETER_KINDS]
        for obj in objects:
            for check in check_parameters(obj, kinds, driver):
                yield _check_object(obj, check)
    except ValueError as error:
        raise UsageError(f"file {path}: {error}") from None
    if not objects:
        raise UsageError(f"file {path}: has no object of kind {' or '.join(PARAMETER_KINDS)}")


def _check_object(obj: JsonObject, check: ParameterCheck) -> CheckedParameters:
    from agent.model.claim import Claim
    from agent.prepare.classify import PrepareContext, classify

    metadata = obj.get("metadata")
    names = metadata if isinstance(metadata, Mapping) else {}
    namespace, name = (str(names.get(key) or "") for key in ("namespace", "name"))
    context = PrepareContext(Claim(namespace, name, ""))
    verdict = None if check.error is None else classify(check.error, context)
    return CheckedParameters(str(obj["kind"]), namespace, name, check.path, check.driver, verdict)


# --- result ------------------------------------------------------------------------------------------------


def _render_parameters(checked: Iterable[CheckedParameters], style: TextStyle) -> str:
    """Return the checked parameters as text: one line for each object and, if they are wrong, the error."""
    from agent.prepare.kubelet_message import kubelet_text

    blocks = []
    for row in checked:
        result = style.paint("ok", "green") if row.verdict is None else style.paint(row.verdict.code, "red")
        lines = [GAP.join([style.paint(clean(row.subject), "bold"), clean(row.path), result])]
        if row.verdict is not None:
            facts = {
                "error": row.verdict.summary,
                "detail": row.verdict.detail,
                "kubelet": kubelet_text(row.verdict),
            }
            lines += format_entries([ListEntry(*fact) for fact in facts.items() if fact[1]], style)
        blocks.append("\n".join(lines))
    return "\n".join(blocks or ["no opaque parameters"]) + "\n"

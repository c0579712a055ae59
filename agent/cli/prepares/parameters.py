"""``drahealth classify --parameters``: checks opaque parameters before a claim with them is prepared."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.cli.output.json import API_VERSION
from agent.cli.output.table import GAP, ListEntry, format_entries
from agent.cli.subcommand import print_result
from agent.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from agent.cli.output.terminal import TextStyle
    from agent.model.json_values import JsonObject
    from agent.model.prepare import PrepareVerdict
    from agent.prepare.claim_parser import ParameterCheck, Parameters


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
    print_result(args, lambda: document(checked, verdict_document), lambda style: render(checked, style))
    return 2 if any(one.verdict is not None for one in checked) else 0


def load_kinds(name: str) -> Mapping[str, type[Parameters]]:
    """Import a driver's types of parameters, ``module:NAME``; the current directory is searched first.

    Raises:
        UsageError: The module cannot be imported, or the value is no mapping of types.
    """
    from agent.prepare.claim_parser import Parameters

    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"--kinds {name}: is not MODULE:NAME, such as hostdev_driver.parameters:KINDS")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # the module is the driver's own and may raise anything
        raise UsageError(f"--kinds {name}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(found, Mapping) or not all(
        isinstance(kind, type) and issubclass(kind, Parameters) for kind in found.values()
    ):
        raise UsageError(f"--kinds {name}: is not a mapping of '<apiVersion>/<kind>' to drahealth.Parameters")
    return found


def _check_objects(
    path: Path, kinds: Mapping[str, type[Parameters]] | None, driver: str
) -> Iterator[CheckedParameters]:
    from agent.prepare.claim_parser import PARAMETER_KINDS, check_parameters
    from agent.sources.kube_object_file import parse_all_objects, read_object_file

    content = read_object_file(path)
    try:
        objects = [obj for obj in parse_all_objects(content.data) if obj.get("kind") in PARAMETER_KINDS]
        for obj in objects:
            for check in check_parameters(obj, kinds, driver):
                yield _checked(obj, check)
    except ValueError as error:
        raise UsageError(f"file {path}: {error}") from None
    if not objects:
        raise UsageError(f"file {path}: has no object of kind {' or '.join(PARAMETER_KINDS)}")


def _checked(obj: JsonObject, check: ParameterCheck) -> CheckedParameters:
    from agent.model.claim import Claim
    from agent.prepare.classify import PrepareContext, classify

    metadata = obj.get("metadata")
    names = metadata if isinstance(metadata, Mapping) else {}
    namespace, name = (str(names.get(key) or "") for key in ("namespace", "name"))
    context = PrepareContext(Claim(namespace, name, ""))
    verdict = None if check.error is None else classify(check.error, context)
    return CheckedParameters(str(obj["kind"]), namespace, name, check.path, check.driver, verdict)


# --- result ------------------------------------------------------------------------------------------------


def render(checked: Iterable[CheckedParameters], style: TextStyle) -> str:
    """Return the results as text: one line for correct parameters, else also the error."""
    from agent.prepare.kubelet_message import kubelet_text

    blocks = []
    for one in checked:
        result = style.paint("ok", "green") if one.verdict is None else style.paint(one.verdict.code, "red")
        lines = [GAP.join([style.paint(one.subject, "bold"), one.path, result])]
        if one.verdict is not None:
            facts = {
                "error": one.verdict.summary,
                "detail": one.verdict.detail,
                "kubelet": kubelet_text(one.verdict),
            }
            lines += format_entries([ListEntry(*fact) for fact in facts.items() if fact[1]], style)
        blocks.append("\n".join(lines))
    return "\n".join(blocks or ["no opaque parameters"]) + "\n"


def document(
    checked: Iterable[CheckedParameters], verdict_document: Callable[[PrepareVerdict], JsonObject]
) -> dict[str, Any]:
    """Return the results as JSON. Later versions only add keys."""
    return {
        "apiVersion": API_VERSION,
        "parameters": [
            {**one._asdict(), "verdict": None if one.verdict is None else verdict_document(one.verdict)}
            for one in checked
        ],
    }

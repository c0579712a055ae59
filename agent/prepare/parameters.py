"""What a user says of a claim in a driver's own words: opaque parameters, decoded into the driver's types.

Whatever is not understood is the user's to mend, and said at once: a version nobody knows, a field that was
misspelled. A parameter that is passed over in silence is a promise that nobody keeps.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from agent.errors import suggestion
from agent.model.claim import Claim, ClaimConfig
from agent.prepare.errors import BadConfig


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a driver's types of parameters are made of; so are the objects within them.

    A field without a default must be given. A ``__post_init__`` that raises ValueError refuses what the types
    alone would allow.
    """


P = TypeVar("P", bound=Parameters)


def decode_parameters(config: ClaimConfig, kinds: Mapping[str, type[P]]) -> P:
    """The parameters as one of a driver's types.

    Args:
        config: Of a claim.
        kinds: By ``<apiVersion>/<kind>``, e.g. ``gpu.example.com/v1/GpuParameters``.

    Raises:
        BadConfig: ``config.decode``, with the kind and the field at fault.
    """
    version, kind = (config.parameters.get(key) for key in ("apiVersion", "kind"))
    for key, value in (("apiVersion", version), ("kind", kind)):
        if not isinstance(value, str) or not value:
            raise _undecodable(config, f"parameters have no {key}")
    name = f"{version}/{kind}"
    if name not in kinds:
        what = f"{name[:128]!a} is none of the driver's kinds{suggestion(name[:128], kinds)}"
        raise _undecodable(config, what, f"They are {', '.join(sorted(kinds))}")
    fields = {key: value for key, value in config.parameters.items() if key not in {"apiVersion", "kind"}}
    try:
        return msgspec.convert(fields, kinds[name])
    except msgspec.ValidationError as error:
        raise _undecodable(config, f"{kind}: {_one_line(str(error))}") from None


def configs_for(claim: Claim, request: str) -> tuple[ClaimConfig, ...]:
    """The parameters that are meant for a request, the last of which outranks the others.

    Args:
        claim: With its parameters.
        request: As a device of the claim names it. ``<request>/<subrequest>`` is meant by its own name and by
            that of its request.
    """
    names = {request, request.partition("/")[0]}
    return tuple(config for config in claim.configs if not config.requests or names & set(config.requests))


def _undecodable(config: ClaimConfig, what: str, detail: str = "") -> BadConfig:
    return BadConfig(what, code="config.decode", detail=detail, requests=config.requests)


def _one_line(text: str) -> str:
    """Of a message with the user's own words in it."""
    return text[:1].lower() + "".join(one if one.isprintable() else "?" for one in text[1:])

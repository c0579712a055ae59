"""Opaque parameters of the driver, and the grant that a claim requests with them.

``HugepagesParameters`` and ``CpuParameters`` of ``hostdev.drahealth.example.com/v1``. Unknown parameters and
impossible requests are errors of the user and raise BadConfigError.
"""

from collections.abc import Mapping
from typing import Final

import drahealth
from hostdev_driver.grants import Grant
from hostdev_driver.host import Found, Host, format_cpus, parse_cpus, parse_size_kib

VERSION: Final = "hostdev.drahealth.example.com/v1"


class HugepagesParameters(drahealth.Parameters, frozen=True):
    """Parameters for a share of a hugepage pool."""

    pages: int | None = None
    """Number of the device's pages; None: all."""
    size: str = ""
    """Required page size, such as 2Mi; empty: any."""

    def __post_init__(self) -> None:
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"{self.pages} pages are fewer than 1")
        if self.size:
            parse_size_kib(self.size)


class CpuParameters(drahealth.Parameters, frozen=True):
    """Parameters for CPUs."""

    cpus: str | None = None
    """CPUs of the device, ``0-3,8``; None: all."""
    exclusive: bool = True
    """Whether no other claim may hold any of the CPUs."""


class GpuParameters(drahealth.Parameters, frozen=True):
    """Parameters for a GPU: there are none."""


KINDS: Final[Mapping[str, type[drahealth.Parameters]]] = {
    f"{VERSION}/{kind.__name__}": kind for kind in (HugepagesParameters, CpuParameters, GpuParameters)
}
_KIND_OF_PART: Final[Mapping[type, type[drahealth.Parameters]]] = {
    drahealth.Hugepages: HugepagesParameters,
    drahealth.Cpus: CpuParameters,
    drahealth.Gpu: GpuParameters,
}


def requested_grant(claim: drahealth.Claim, device: drahealth.ClaimDevice, host: Host) -> Grant:
    """Return the grant that a claim requests of an allocated device.

    Raises:
        BadConfigError: ``config.decode``, ``config.conflict``, ``cpu.opaque_cpuset.invalid``,
            ``config.invalid``, ``mem.hugepages.size_unsupported``.
        PermanentError: ``device.unknown``.
    """
    found = host.find(device)
    parameters = _chosen_parameters(claim, device, found)
    part = found.device.part
    grant = Grant(request=device.request, pool=device.pool, device=device.device, share_id=device.share_id)
    if isinstance(part, drahealth.Hugepages) and isinstance(parameters, HugepagesParameters):
        return grant.with_pages(part.size, _pages(parameters, part, device, host), part.numa)
    if isinstance(part, drahealth.Cpus) and isinstance(parameters, CpuParameters):
        return grant.with_cpus(_cpus(parameters, part, device), exclusive=parameters.exclusive)
    return grant.with_nodes(found.nodes)


def _chosen_parameters(
    claim: drahealth.Claim, device: drahealth.ClaimDevice, found: Found
) -> drahealth.Parameters:
    """Return the last parameters for the request that fit the device."""
    kind = _KIND_OF_PART[type(found.device.part)]
    chosen = kind()
    for config in drahealth.configs_for(claim, device.request):
        parameters = drahealth.decode_parameters(config, KINDS)
        if isinstance(parameters, kind):
            chosen = parameters
        elif config.requests:  # parameters for all requests may be meant for other devices
            text = (
                f"{type(parameters).__name__} for request {device.request}, which was given {device.device}"
            )
            raise drahealth.BadConfigError(text, code="config.conflict", requests=(device.request,))
    return chosen


def _pages(
    parameters: HugepagesParameters, part: drahealth.Hugepages, device: drahealth.ClaimDevice, host: Host
) -> int:
    if parameters.size and parse_size_kib(parameters.size) != parse_size_kib(part.size):
        sizes = sorted(host.page_sizes(), key=parse_size_kib)
        if parse_size_kib(parameters.size) not in map(parse_size_kib, sizes):
            raise drahealth.BadConfigError(
                f"this node has pages of {', '.join(sizes)}, not of {parameters.size}",
                code="mem.hugepages.size_unsupported",
                requests=(device.request,),
            )
        raise drahealth.BadConfigError(
            f"pages of {parameters.size} for request {device.request}, which was given pages of {part.size}",
            code="config.conflict",
            requests=(device.request,),
        )
    if parameters.pages is not None and parameters.pages > part.pages:
        text = f"{parameters.pages} pages are more than the {part.pages} of {device.device}"
        raise drahealth.BadConfigError(text, requests=(device.request,))
    return parameters.pages or part.pages


def _cpus(parameters: CpuParameters, part: drahealth.Cpus, device: drahealth.ClaimDevice) -> set[int]:
    available = parse_cpus(part.cpus)
    if parameters.cpus is None:
        return available
    try:
        requested = parse_cpus(parameters.cpus)
    except ValueError as error:
        raise _no_cpuset(str(error), device) from None
    if not requested:
        raise _no_cpuset(f"{parameters.cpus!r} names no CPU", device)
    if not requested <= available:
        others = format_cpus(requested - available)
        raise _no_cpuset(f"CPUs {others} are not of {device.device}, which has {part.cpus}", device)
    return requested


def _no_cpuset(text: str, device: drahealth.ClaimDevice) -> drahealth.BadConfigError:
    return drahealth.BadConfigError(text, code="cpu.opaque_cpuset.invalid", requests=(device.request,))

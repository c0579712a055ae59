"""What users may say of a claim: the opaque parameters of this driver, and what they come to for a device.

``HugepagesParameters`` and ``CpuParameters`` of ``hostdev.drahealth.example.com/v1``. Whatever is not
understood, or cannot be had of the device, is the user's to mend and raised as BadConfig.
"""

from collections.abc import Mapping
from typing import Final

import agent
from hostdev_driver.book import Grant
from hostdev_driver.host import Found, Host, format_cpus, kib_of, parse_cpus

VERSION: Final = "hostdev.drahealth.example.com/v1"


class HugepagesParameters(agent.Parameters, frozen=True):
    """For a share of a hugepage pool."""

    pages: int | None = None
    """How many of the device's; None: all."""
    size: str = ""
    """That they must have, such as 2Mi; empty: any."""

    def __post_init__(self) -> None:
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"{self.pages} pages are fewer than 1")
        if self.size:
            kib_of(self.size)


class CpuParameters(agent.Parameters, frozen=True):
    """For CPUs."""

    cpus: str | None = None
    """Which of the device's, ``0-3,8``; None: all."""
    exclusive: bool = True
    """No other claim may have any of them."""


class GpuParameters(agent.Parameters, frozen=True):
    """A GPU is handed out as it is."""


KINDS: Final[Mapping[str, type[agent.Parameters]]] = {
    f"{VERSION}/{kind.__name__}": kind for kind in (HugepagesParameters, CpuParameters, GpuParameters)
}
_MEANT_FOR: Final[Mapping[type, type[agent.Parameters]]] = {
    agent.Hugepages: HugepagesParameters,
    agent.Cpus: CpuParameters,
    agent.Gpu: GpuParameters,
}


def wanted(claim: agent.Claim, device: agent.ClaimDevice, host: Host) -> Grant:
    """What a claim wants of a device that it was given.

    Raises:
        BadConfig: ``config.decode``, ``config.conflict``, ``cpu.opaque_cpuset.invalid``, ``config.invalid``.
        PermanentError: ``device.unknown``, ``mem.hugepages.size_unsupported``.
    """
    found = host.look_up(device)
    said = _said(claim, device, found)
    part = found.device.part
    grant = Grant(request=device.request, pool=device.pool, device=device.device, share_id=device.share_id)
    if isinstance(part, agent.Hugepages) and isinstance(said, HugepagesParameters):
        return grant.with_pages(part.size, _pages(said, part, device, host), part.numa)
    if isinstance(part, agent.Cpus) and isinstance(said, CpuParameters):
        return grant.with_cpus(_cpus(said, part, device), exclusive=said.exclusive)
    return grant.with_nodes(found.nodes)


def _said(claim: agent.Claim, device: agent.ClaimDevice, found: Found) -> agent.Parameters:
    """Of those that are meant for the request, the last that fits the device."""
    meant = _MEANT_FOR[type(found.device.part)]
    said = meant()
    for config in agent.configs_for(claim, device.request):
        parameters = agent.decode_parameters(config, KINDS)
        if isinstance(parameters, meant):
            said = parameters
        elif config.requests:  # those for all requests may be for others' devices
            text = (
                f"{type(parameters).__name__} for request {device.request}, which was given {device.device}"
            )
            raise agent.BadConfig(text, code="config.conflict", requests=(device.request,))
    return said


def _pages(said: HugepagesParameters, part: agent.Hugepages, device: agent.ClaimDevice, host: Host) -> int:
    if said.size and kib_of(said.size) != kib_of(part.size):
        sizes = sorted(host.page_sizes(), key=kib_of)
        if kib_of(said.size) not in map(kib_of, sizes):
            raise agent.PermanentError(
                f"this node has pages of {', '.join(sizes)}, not of {said.size}",
                code="mem.hugepages.size_unsupported",
                requests=(device.request,),
            )
        raise agent.BadConfig(
            f"pages of {said.size} for request {device.request}, which was given pages of {part.size}",
            code="config.conflict",
            requests=(device.request,),
        )
    if said.pages is not None and said.pages > part.pages:
        text = f"{said.pages} pages are more than the {part.pages} of {device.device}"
        raise agent.BadConfig(text, requests=(device.request,))
    return said.pages or part.pages


def _cpus(said: CpuParameters, part: agent.Cpus, device: agent.ClaimDevice) -> set[int]:
    has = parse_cpus(part.cpus)
    if said.cpus is None:
        return has
    try:
        asked = parse_cpus(said.cpus)
    except ValueError as error:
        raise _no_cpuset(str(error), device) from None
    if not asked:
        raise _no_cpuset(f"{said.cpus!r} names no CPU", device)
    if not asked <= has:
        others = format_cpus(asked - has)
        raise _no_cpuset(f"CPUs {others} are not of {device.device}, which has {part.cpus}", device)
    return asked


def _no_cpuset(text: str, device: agent.ClaimDevice) -> agent.BadConfig:
    return agent.BadConfig(text, code="cpu.opaque_cpuset.invalid", requests=(device.request,))

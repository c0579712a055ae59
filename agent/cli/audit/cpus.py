"""Which CPUs drivers gave to containers for themselves: for ``drahealth audit``, which asks no agent.

Drivers declare what is exclusive, the kubelet notes which claim was given it, pods which container names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agent.errors import ProbeError
from agent.model.declared import Declarations, DeclaredCpus
from agent.sources import declared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.config.config import Config
    from agent.model.claim_sources import SourceAnswer
    from agent.node.cgroup_audit import Given


class DriverCpus(NamedTuple):
    """What is known of them."""

    given: Given
    gaps: tuple[str, ...] = ()
    """Why there may be more."""


def read_driver_cpus(config: Config, pods: SourceAnswer[Mapping[str, object]]) -> DriverCpus:
    """By what stands in files now.

    Args:
        config: Where the files are.
        pods: The pods' objects.
    """
    try:
        files = declared.read_declarations(config.runtime_dir / declared.DIRECTORY, (), config.node_name)
    except ProbeError as error:
        return DriverCpus({}, _gaps(str(error)))
    wrong = _gaps(*(file.error for file in files))
    if not _has_exclusive(files):
        return DriverCpus({}, wrong)
    from agent.devices.consumers.consumer_map import consumer_map
    from agent.devices.consumers.exclusive_cpus import own_cpus
    from agent.devices.consumers.kube_objects import pods_from
    from agent.model.claim_sources import SourceAnswers
    from agent.sources import kubelet_checkpoint

    prepared = kubelet_checkpoint.read_checkpoint(
        config.kubelet_dir / kubelet_checkpoint.NAME, pods.witness.read
    )
    known = consumer_map(SourceAnswers(prepared=(prepared,), pods=(pods_from(pods),)))
    return DriverCpus(own_cpus(known, files), (*wrong, *_gaps(prepared.why)))


def _has_exclusive(files: Declarations) -> bool:
    kinds = (one.what for file in files for one in file.devices)
    return any(isinstance(one, DeclaredCpus) and one.exclusive for one in kinds)


def _gaps(*reasons: str) -> tuple[str, ...]:
    return tuple(f"CPUs that drivers gave: {why}" for why in reasons if why)

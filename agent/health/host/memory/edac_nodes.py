"""Which NUMA node a memory controller belongs to. EDAC does not say, so it is concluded, or not known."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from agent.model.cpuset import cpus_of
from agent.model.machine import DimmSample, MachineSample
from agent.model.reading import Missing
from agent.model.snapshot import NodeSample

_SOCKET: Final = re.compile(r"(?:SrcID|Socket)#(\d{1,4})")
"""``CPU_SrcID#0_MC#0_Chan#0_DIMM#0``, ``Ivy Bridge SrcID#0_Ha#0``: by Intel's drivers. The firmware's names
say no such thing: one vendor's ``P1-DIMMA1`` is of the first socket, another's of the second."""
_AMD: Final = re.compile(r"F[0-9A-F]{1,2}h(?:_M[0-9A-F]{1,2}h)?")
"""amd64_edac's controllers of CPUs, ``F19h_M10h``; it has others, of GPUs."""
_IN_PACKAGE: Final = "HBMC#"
"""High-bandwidth memory may be a NUMA node of its own, without CPUs: which one, the label does not say."""


def memory_nodes(machine: MachineSample) -> int:
    """The NUMA nodes that have memory, as a bit set."""
    if isinstance(machine.nodes_memory, int):
        return machine.nodes_memory
    return sum(1 << numa.node for numa in machine.numa if isinstance(numa.total_kib, int) and numa.total_kib)


class ControllerNodes:
    """The NUMA nodes of controllers, as bit sets; None where they are not known."""

    def __init__(self, machine: MachineSample, nodes: Iterable[NodeSample]) -> None:
        self._memory = memory_nodes(machine)
        self._amd = {
            sample.controller
            for sample in machine.dimms
            if sample.dimm is None and _AMD.fullmatch(sample.label)
        }
        self._sockets = self._nodes_of_sockets(machine, nodes) if machine.dimms else {}

    def _nodes_of_sockets(self, machine: MachineSample, nodes: Iterable[NodeSample]) -> dict[int, int]:
        """By package, those of its NUMA nodes that have memory."""
        package_of = {core.cpu: core.package for core in machine.cores}
        found: dict[int, int] = {}
        for node in nodes:
            if isinstance(node.cpus, Missing) or not self._memory >> node.node & 1:
                continue
            for package in {package_of.get(cpu) for cpu in cpus_of(node.cpus)}:
                if isinstance(package, int):
                    found[package] = found.get(package, 0) | 1 << node.node
        return found

    def of_controller(self, samples: Sequence[DimmSample]) -> int | None:
        """The nodes of a controller and its modules, modules first."""
        number = samples[0].controller
        if number in self._amd and self._memory.bit_count() > 1:
            # amd64_edac numbers its controllers as the hardware does: by socket, of the first EPYC by die
            if len(self._amd) == self._memory.bit_count():
                return 1 << number if self._memory >> number & 1 else None
            return self._sockets.get(number) if len(self._amd) == len(self._sockets) else None
        # modules first: the "Socket#" of a controller's name was a node's number once
        return self.of_label(" ".join(sample.label for sample in samples))

    def of_label(self, label: str) -> int | None:
        """The nodes of a module by what a driver calls it."""
        if self._memory.bit_count() == 1:
            return self._memory
        match = _SOCKET.search(label)
        return self._sockets.get(int(match[1])) if match and _IN_PACKAGE not in label else None

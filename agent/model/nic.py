"""RDMA network adapters (NICs) that DRA drivers declare as devices."""

from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.reading import Missing, Reading

DISABLED: Final = 3
"""Physical state of an InfiniBand port that is disabled; an Ethernet port without a carrier has it too."""
LINK_UP: Final = 5
"""Physical state of a port whose link is up."""
_STATES: Final = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_ACTIVE_STATES: Final = (4, 5)
_PHYSICAL_STATES: Final = (
    "unknown",
    "Sleep",
    "Polling",
    "Disabled",
    "PortConfigurationTraining",
    "LinkUp",
    "LinkErrorRecovery",
    "Phy Test",
)


class LinkLayer(StrEnum):
    """Link layer of a port; it decides which files count the link's errors."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    """Ethernet (RoCE): the network interface's counters count errors, those of InfiniBand do not."""
    UNKNOWN = ""


class NicPortSample(NamedTuple):
    """State of one port of a NIC. Source: ``/sys/class/infiniband/<name>/ports/<number>``."""

    number: int
    link_layer: LinkLayer
    state: Reading
    """Logical state of the port, from 1 (DOWN) to 5 (ACTIVE_DEFER)."""
    phys_state: Reading
    """Physical state of the port; 5: LinkUp."""
    rate_mbps: Reading
    """Data rate of the port [Mb/s]."""
    width: Reading
    """Number of lanes of the port's link."""
    link_downs: Reading
    """Times that the link went down: ``link_downed`` (InfiniBand), ``carrier_down_count`` (Ethernet)."""
    link_ups: Reading
    """Times that the link came up since boot: ``carrier_up_count``; absent for InfiniBand."""
    symbol_errors: Reading
    """Symbol errors of an InfiniBand port, from its file ``symbol_error``; absent for Ethernet."""
    receive_errors: Reading
    """``port_rcv_errors`` (InfiniBand), ``rx_crc_errors`` of the network interface (Ethernet)."""
    integrity_errors: Reading
    """Physical errors above an InfiniBand link's limit, ``local_link_integrity_errors``; absent for Ethernet.
    """
    buffer_overruns: Reading
    """Overflows of an InfiniBand receive buffer (``excessive_buffer_overrun_errors``); absent for Ethernet.
    """
    interface: str = ""
    """Network interface of an Ethernet port; empty: none, or InfiniBand."""
    is_interface_up: bool = True
    """False: the network interface is set down (``ip link set down``)."""
    working_bond: str = ""
    """Bond that the interface is a slave of, if the bond has a carrier; else empty."""

    @property
    def is_active(self) -> bool:
        """True if the port's logical state is ACTIVE."""
        return self.state in _ACTIVE_STATES

    @property
    def is_disabled(self) -> bool:
        """True if the port is disabled by configuration, so that it cannot have a link."""
        if self.link_layer is LinkLayer.ETHERNET:
            return not self.is_interface_up
        return self.phys_state == DISABLED

    @property
    def label(self) -> str:
        """Name of the port in texts: ``port 1``, or with its interface ``port 1 (eth0)``."""
        return f"port {self.number} ({self.interface})" if self.interface else f"port {self.number}"


class NicSample(NamedTuple):
    """State of one NIC. Source: ``/sys/class/infiniband/<name>``."""

    name: str
    """RDMA name of the NIC, ``mlx5_0``."""
    address: str
    """PCI address of its function; empty: the NIC is not a PCI function itself (soft RoCE)."""
    guid: str
    """Node GUID of the NIC; empty: it cannot be read."""
    ports: tuple[NicPortSample, ...] | Missing
    """Ports of the NIC by number; Missing: they cannot be listed."""


def port_state_name(state: int) -> str:
    """Return the kernel's name of a port's logical state: ``DOWN`` for 1."""
    return _STATES[state] if 0 <= state < len(_STATES) else f"state {state}"


def physical_state_name(state: int) -> str:
    """Return the kernel's name of a port's physical state: ``Polling`` for 2."""
    return _PHYSICAL_STATES[state] if 0 <= state < len(_PHYSICAL_STATES) else f"state {state}"

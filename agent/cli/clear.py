"""``drahealth clear``: clears remembered faults of a device after its repair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.cli.output.json import clear_document
from agent.cli.output.text import clean
from agent.cli.subcommand import Subcommand, add_output, add_settings, agent_socket_of, print_result

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "device",
        metavar="DEVICE",
        help="name as another command prints it, such as driver/pool/name, or UUID or PCI address of a GPU",
    )
    parser.add_argument(
        "--code", metavar="CODE", default="", help="clear only the fault with this code, e.g. gpu.xid.79"
    )
    add_output(parser)
    add_settings(parser, "--runtime-dir")


def main(args: Namespace) -> int:
    socket = agent_socket_of(args)
    import asyncio

    from agent.serve.agent_api import client

    cleared = asyncio.run(client.clear_faults(socket, args.device, args.code))
    text = "".join(f"{clean(fault.device)}: fault {clean(fault.code)} cleared\n" for fault in cleared)
    print_result(args, lambda: clear_document(cleared), lambda _: text)
    return 0


VERB = Subcommand(
    name="clear",
    summary="clear remembered faults of a device after its repair",
    description=(
        "States that a device was repaired, or is right as it is: clears faults that no reading shows and "
        "that the agent remembers, such as XIDs, faults in their probation, and faults that a driver "
        "reported; and faults of readings that differ from those at start, such as the size of a hugepage "
        "pool, which are then compared with what the device has now. The agent records who cleared them. A "
        "new occurrence is reported as usual. Only root and the user of the agent may clear faults. Exits "
        "with 0 if the faults are cleared; 64 if the device or the fault is not known, or a reading decides "
        "the fault; 69 if no agent answers; 75 if a reading still shows a fault of the device, then nothing "
        "is cleared; 77 for other users."
    ),
    examples=(
        ("drahealth clear gpu-3", "clear all remembered faults of a GPU"),
        ("drahealth clear hugepages-2mi-node0", "accept the pool's size now"),
    ),
    add_arguments=add_arguments,
    main=main,
)

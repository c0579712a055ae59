"""What the containers of a claim see of what it holds.

CPUs and pages are named to them in variables, pages are mounted, GPUs get their device nodes. Nothing is
enforced: cpusets and hugetlb limits are the container runtime's and the kubelet's, who own the cgroups.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import agent
from hostdev_driver.book import Grant
from hostdev_driver.host import format_cpus, kib_of

PAGES_AT: Final = "/dev/hugepages"


def devices_for(grants: Sequence[Grant]) -> list[agent.CdiDevice]:
    """One device per grant, in their order.

    A container gets all devices of a request or none, and of a variable that several devices set it gets one.
    So each of them says what all of its request have.
    """
    return [_device(grant, [one for one in grants if one.request == grant.request]) for grant in grants]


def _device(grant: Grant, of_request: Sequence[Grant]) -> agent.CdiDevice:
    words = [grant.request.replace("/", "."), grant.device, grant.share_id]
    return agent.CdiDevice(
        name=".".join(filter(None, words)),
        env=_variables(of_request),
        mounts=tuple(_mounts(grant)),
        nodes=tuple(agent.CdiNode(path) for path in grant.nodes),
    )


def _variables(grants: Sequence[Grant]) -> dict[str, str]:
    variables = {
        "HOSTDEV_CPUS": format_cpus(cpu for grant in grants for cpu in grant.cpus),
        "HOSTDEV_HUGEPAGES": ":".join(f"{PAGES_AT}/{grant.device}" for grant in grants if grant.pages),
        "HOSTDEV_NUMA": format_cpus({grant.numa for grant in grants if grant.pages}),
    }
    return {name: value for name, value in variables.items() if value}


def _mounts(grant: Grant) -> Iterable[agent.CdiMount]:
    if grant.pages:
        size = kib_of(grant.size)
        options = ("nosuid", "nodev", f"pagesize={size}K", f"size={grant.pages * size}K", "mode=1777")
        yield agent.CdiMount("hugetlbfs", f"{PAGES_AT}/{grant.device}", options, "hugetlbfs")

"""CDI devices of a claim: what its containers see.

CPUs and pages are named in variables, pages are mounted, GPUs get their device nodes. The driver sets no
cgroup limit: cpusets and hugetlb limits belong to the container runtime and the kubelet.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import drahealth
from hostdev_driver.grants import Grant
from hostdev_driver.host import format_cpus, parse_size_kib

PAGES_AT: Final = "/dev/hugepages"


def devices_for(grants: Sequence[Grant]) -> list[drahealth.CdiDevice]:
    """Return one CDI device per grant, in order.

    A container gets all devices of a request or none, and only one value of a variable that several devices
    set. So each device sets the variables of its whole request.
    """
    return [_device(grant, [given for given in grants if given.request == grant.request]) for grant in grants]


def _device(grant: Grant, of_request: Sequence[Grant]) -> drahealth.CdiDevice:
    parts = [grant.request.replace("/", "."), grant.device, grant.share_id]
    return drahealth.CdiDevice(
        name=".".join(filter(None, parts)),
        env=_variables(of_request),
        mounts=tuple(_mounts(grant)),
        nodes=tuple(drahealth.CdiNode(path) for path in grant.nodes),
    )


def _variables(grants: Sequence[Grant]) -> dict[str, str]:
    variables = {
        "HOSTDEV_CPUS": format_cpus(cpu for grant in grants for cpu in grant.cpus),
        "HOSTDEV_HUGEPAGES": ":".join(f"{PAGES_AT}/{grant.device}" for grant in grants if grant.pages),
        "HOSTDEV_NUMA": format_cpus({grant.numa for grant in grants if grant.pages}),
    }
    return {name: value for name, value in variables.items() if value}


def _mounts(grant: Grant) -> Iterable[drahealth.CdiMount]:
    if grant.pages:
        size = parse_size_kib(grant.size)
        options = ("nosuid", "nodev", f"pagesize={size}K", f"size={grant.pages * size}K", "mode=1777")
        yield drahealth.CdiMount("hugetlbfs", f"{PAGES_AT}/{grant.device}", options=options, type="hugetlbfs")

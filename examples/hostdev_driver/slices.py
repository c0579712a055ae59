"""The host's devices for the scheduler: attributes and capacity, for selectors of claims."""

import drahealth
from hostdev_driver.host import Found, format_size, parse_cpus, parse_size_kib


def slice_device(found: Found) -> drahealth.SliceDevice:
    """Return a device as the ResourceSlice has it."""
    part = found.device.part
    if isinstance(part, drahealth.Hugepages):
        size = format_size(part.pages * parse_size_kib(part.size))
        return drahealth.SliceDevice(
            found.device.name,
            attributes={"kind": "hugepages", "pageSize": part.size, "numaNode": part.numa},
            capacity={"pages": part.pages, "memory": size},
        )
    if isinstance(part, drahealth.Cpus):
        node = {} if part.numa is None else {"numaNode": part.numa}
        return drahealth.SliceDevice(
            found.device.name,
            attributes={"kind": "cpu", **node},
            capacity={"cpus": len(parse_cpus(part.cpus))},
        )
    assert isinstance(part, drahealth.Gpu)
    return drahealth.SliceDevice(found.device.name, attributes={"kind": "gpu", "pciAddress": part.pci})

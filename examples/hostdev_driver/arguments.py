"""Command-line arguments of the program, as a table."""

import argparse
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hostdev_driver.host import Pool, parse_cpus, parse_size_kib


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of the program."""
    result = argparse.ArgumentParser(
        prog="python -m hostdev_driver",
        description="A DRA driver for this host's hugepages, CPUs and GPUs.",
        epilog="It reads claims from the API server and publishes ResourceSlices. With --claims it needs no "
        "API server, and publishes nothing unless --kubeconfig names one.",
    )
    for title, arguments in ARGUMENTS.items():
        group = result.add_argument_group(title)
        for name, argument in arguments.items():
            group.add_argument(name, **argument)
    return result


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 4096:
        raise argparse.ArgumentTypeError(f"{number} is not 1 to 4096")
    return number


def _cpus(text: str) -> frozenset[int]:
    try:
        return frozenset(parse_cpus(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pool_size(text: str) -> tuple[Pool, int]:
    node, _, pool = text.partition(":")
    size, _, pages = pool.partition("=")
    if not (node.isdecimal() and pages.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE:SIZE=PAGES, such as 0:2Mi=64")
    try:
        return Pool(int(node), parse_size_kib(size)), int(pages)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _directory(default: str | None, what: str = "") -> dict[str, Any]:
    return {
        "type": Path,
        "default": Path(default) if default else None,
        "metavar": "DIR",
        "help": what or "default: %(default)s",
    }


ARGUMENTS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "identity": {
        "--driver-name": {
            "default": "hostdev.drahealth.example.com",
            "metavar": "NAME",
            "help": "default: %(default)s",
        },
        "--node-name": {
            # the kubelet writes the host's name in lower case, too
            "default": os.environ.get("NODE_NAME") or socket.gethostname().lower(),
            "metavar": "NAME",
            "help": "pool of the devices; default: $NODE_NAME, or this host's name",
        },
        "--pod-uid": {
            "default": os.environ.get("POD_UID", ""),
            "metavar": "UID",
            "help": "UID of the driver's pod, for rolling updates; default: $POD_UID",
        },
    },
    "directories of the kubelet and the container runtime": {
        "--kubelet-dir": _directory("/var/lib/kubelet"),
        "--plugin-dir": _directory(None, "default: plugins/<driver name> in the kubelet's"),
        "--registry-dir": _directory(None, "default: plugins_registry in the kubelet's"),
        "--cdi-dir": _directory("/var/run/cdi"),
        "--state-dir": _directory(None, "saved state; default: the plugin directory"),
    },
    "source of claims": {
        "--claims": _directory(None, "files <namespace>_<name>.json; default: the API server"),
        "--kubeconfig": {
            "type": Path,
            "metavar": "FILE",
            "help": "API server; default: that of the pod's cluster, else of $KUBECONFIG or ~/.kube/config",
        },
    },
    "offered devices": {
        "--hugepage-shares": {
            "type": _count,
            "default": 1,
            "metavar": "N",
            "help": "devices per hugepage pool; default: 1",
        },
        "--hugepages": {
            "type": _pool_size,
            "action": "append",
            "default": [],
            "metavar": "NODE:SIZE=PAGES",
            "help": "size of a NUMA node's pool, such as 0:2Mi=64; may be repeated; default: the largest "
            "since boot",
        },
        "--cpus-each": {
            "type": _count,
            "default": 0,
            "metavar": "N",
            "help": "CPUs of a device; default: all of a NUMA node",
        },
        "--reserved-cpus": {
            "type": _cpus,
            "default": frozenset(),
            "metavar": "LIST",
            "help": "CPUs that are never offered, such as 0-1",
        },
        "--sysfs-root": _directory("/sys"),
        "--procfs-root": _directory("/proc"),
    },
    "health": {
        "--evict": {
            "action": "append",
            "default": [],
            "metavar": "CODE",
            "help": "evict the pods of devices Unhealthy for this, such as gpu.xid.79; may be repeated",
        },
        "--log-level": {
            "default": "info",
            "choices": ("debug", "info", "warning", "error"),
            "help": "default: %(default)s",
        },
    },
}

"""Where a driver's sockets are, so that the kubelet finds them and the kernel takes them.

Names are those that Kubernetes' own drivers use. They hold the uid of the driver's pod where two
instances run side by side during an update, and hashes where a path would be too long.
"""

import hashlib
import os
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from agent.config.values import check_driver
from agent.errors import ConfigError
from agent.model.sockets import PATH_LIMIT
from agent.serve.dra_plugin.request_checks import UID, UID_LIMIT


class PluginPaths(NamedTuple):
    """The directories and sockets of one instance of a driver; absolute and clean."""

    plugin_dir: Path
    """The driver's own, shared by its instances."""
    service: Path
    registry_dir: Path
    """Which the kubelet watches for registration sockets."""
    registration: Path


def plugin_paths(
    driver: str,
    *,
    kubelet_dir: Path,
    plugin_dir: Path | None = None,
    registry_dir: Path | None = None,
    pod_uid: str = "",
) -> PluginPaths:
    """Where the sockets of this instance belong. Looks at no file.

    Args:
        driver: The driver's name.
        kubelet_dir: The kubelet's own, as the kubelet sees it.
        plugin_dir: None: ``plugins/<driver>`` below it.
        registry_dir: None: ``plugins_registry`` below it.
        pod_uid: Of the pod that the driver runs in; empty: there are no two instances at a time.

    Raises:
        ConfigError: the driver's name or the uid is none; a directory is relative; the service socket is
            outside of the kubelet's directory, where the kubelet would refuse it; a path is too long.
    """
    try:
        check_driver(driver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if pod_uid and (len(pod_uid) > UID_LIMIT or not UID.fullmatch(pod_uid)):
        raise ConfigError(
            f"pod uid {pod_uid[:80]!r} of {len(pod_uid)} characters is none: letters, digits, '-', '_', '.', "
            f"at most {UID_LIMIT}"
        )
    kubelet_dir = _clean(kubelet_dir, "--kubelet-dir")
    plugins = _clean(plugin_dir or kubelet_dir / "plugins" / driver, "--plugin-dir")
    registry = _clean(registry_dir or kubelet_dir / "plugins_registry", "--registry-dir")
    if not plugins.is_relative_to(kubelet_dir):
        raise ConfigError(
            f"{plugins}: is not below {kubelet_dir}, where the kubelet wants a driver's socket; "
            "see --plugin-dir and --kubelet-dir"
        )
    service = _fitting(plugins, _service_names(pod_uid), "--plugin-dir")
    registration = _fitting(registry, _registration_names(driver, pod_uid), "--registry-dir")
    return PluginPaths(plugins, service, registry, registration)


def _clean(path: Path, flag: str) -> Path:
    if not path.is_absolute():
        raise ConfigError(f"{path}: is relative; {flag} takes an absolute path")
    return Path(os.path.normpath(path))


def _service_names(pod_uid: str) -> Sequence[str]:
    if not pod_uid:
        return ("dra.sock",)
    uid = _hash(pod_uid, 8)
    return (f"dra-{pod_uid}.sock", f"dra-{uid}.sock", f"{uid}.sock")


def _registration_names(driver: str, pod_uid: str) -> Sequence[str]:
    last = f"dra-{_hash(chr(0).join((driver, pod_uid)), 16)}-reg.sock"
    if not pod_uid:
        return (f"{driver}-reg.sock", last)
    return (f"{driver}-{pod_uid}-reg.sock", f"{driver}-{_hash(pod_uid, 8)}-reg.sock", last)


def _hash(text: str, size: int) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:size]).rstrip(b"=").decode()


def _fitting(directory: Path, names: Sequence[str], flag: str) -> Path:
    """The first of the names that a unix socket in the directory can have."""
    used = len(os.fsencode(directory)) + 1
    for name in names:
        if used + len(name) <= PATH_LIMIT:
            return directory / name
    raise ConfigError(
        f"{directory / names[-1]}: is {used + len(names[-1])} bytes, a socket's limit is {PATH_LIMIT}; "
        f"{flag} uses {used} of them"
    )

"""What has to be seen before a check can judge: each says in words what is missing, nothing if nothing is."""

from __future__ import annotations

from agent.conform.observed import V1, V1ALPHA1, Observed


def socket(seen: Observed) -> str:
    """A service socket's path."""
    return "" if seen.socket else "no service socket is known: see registration.get_info"


def connected(seen: Observed) -> str:
    """A service socket that takes connections."""
    return socket(seen) or ("" if seen.watches else "the service socket takes no connection")


def heard(seen: Observed) -> str:
    """A health list, in any version."""
    return connected(seen) or ("" if seen.main.told else "no list was heard")


def both(seen: Observed) -> str:
    """A health list in each version."""
    silent = [version for version in (V1, V1ALPHA1) if not seen.watch(version).told]
    return connected(seen) or (f"no list was heard of {' and '.join(silent)}" if silent else "")


def directory(seen: Observed) -> str:
    """A directory with registration sockets."""
    return "" if seen.directory else "registration is looked at with --plugin-dir only"


def introduced(seen: Observed) -> str:
    """A driver that has said what it is."""
    if seen.directory and any(one.introduction.info for one in seen.directory.registrations):
        return ""
    return directory(seen) or "nobody has answered GetInfo"


def introduced_and_connected(seen: Observed) -> str:
    """Both."""
    return introduced(seen) or connected(seen)

"""Checks of registration: what the kubelet's plugin watcher finds, asks and is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from agent.conform.observed import V1, V1ALPHA1, Answer, Info, Observed, Registration
from agent.conform.verdicts import (
    Judgement,
    Verdict,
    count,
    failed,
    listed,
    not_run,
    passed,
    said,
    seconds,
    shorten,
    warned,
    worst,
)
from agent.model.sockets import PATH_LIMIT

PLUGIN_TYPE: Final = "DRAPlugin"
PLUGIN_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""The newest first."""
HEALTH_SERVICES: Final = {V1: "v1.DRAResourceHealth", V1ALPHA1: "v1alpha1.DRAResourceHealth"}
"""By version, in the order of the kubelet's preference."""
KNOWN: Final = (*PLUGIN_SERVICES, *HEALTH_SERVICES.values())
GET_INFO_S: Final = 1.0
SLOW_S: Final = 0.5
NAME_LIMIT: Final = 63
PATH_SHOWN: Final = 120
SERVICES_SHOWN: Final = 160

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
HASHED: Final = re.compile(r"dra-[-_A-Za-z0-9]{22}-reg\.sock")


def _all(seen: Observed) -> tuple[Registration, ...]:
    return seen.directory.registrations if seen.directory else ()


def _named(registration: Registration) -> str:
    """The file, for texts."""
    return shorten(registration.introduction.path.rpartition("/")[2], 100)


def _over(seen: Observed, judge: Callable[[Registration], Iterator[Judgement]], well: str) -> Judgement:
    """What is found at each socket, with its name where there are several."""
    everybody = _all(seen)
    found = [
        one._replace(saw=f"{_named(registration)}: {one.saw}") if len(everybody) > 1 else one
        for registration in everybody
        for one in judge(registration)
    ]
    return worst(found, passed(well))


def _infos(seen: Observed) -> list[Info]:
    return [one.introduction.info for one in _all(seen) if one.introduction.info]


def socket(seen: Observed) -> Judgement:
    """Name, kind and path's length of each file of the driver's are read."""
    assert seen.directory is not None
    if not seen.directory.registrations:
        return failed(f"{seen.directory.path}: none of this driver")

    def odd(one: Registration) -> Iterator[Judgement]:
        path, name = one.introduction.path, one.introduction.path.rpartition("/")[2]
        size = len(path.encode(errors="surrogateescape"))
        if not one.introduction.is_socket:
            yield failed(f"{shorten(name)} is no socket")
        elif name.startswith("."):
            yield failed(f"{shorten(name)} begins with a dot")
        elif size > PATH_LIMIT:
            yield failed(f"{shorten(name)}: its path is {size} bytes, a socket's limit is {PATH_LIMIT}")
        elif (info := one.introduction.info) and not _is_conventional(name, info.name):
            yield warned(f"{shorten(name)}: others are named {shorten(info.name)}-reg.sock")

    return _over(seen, odd, listed(_named(one) for one in _all(seen)))


def _is_conventional(name: str, driver: str) -> bool:
    own = name == f"{driver}-reg.sock" or (name.startswith(f"{driver}-") and name.endswith("-reg.sock"))
    return own or HASHED.fullmatch(name) is not None


def get_info(seen: Observed) -> Judgement:
    """GetInfo is called on each socket, and its time measured."""

    def slow(one: Registration) -> Iterator[Judgement]:
        answer = one.introduction.answer
        if answer is None:
            return
        if not answer.ok:
            yield failed(_how(answer))
        elif answer.took_s > SLOW_S:
            judge = failed if answer.took_s > GET_INFO_S else warned
            yield judge(f"answered after {seconds(answer.took_s)}")

    answers = [one.introduction.answer for one in _all(seen) if one.introduction.answer]
    if not answers:
        return not_run("there is no socket to ask")
    return _over(seen, slow, f"answered after {seconds(max(one.took_s for one in answers))}")


def _how(answer: Answer) -> str:
    """How a call failed."""
    return f"{said(answer.status, answer.text)}, after {seconds(answer.took_s)}"


def kind(seen: Observed) -> Judgement:
    """The type in the answer is read."""
    found = [failed(f"{shorten(info.type)!r}") for info in _infos(seen) if info.type != PLUGIN_TYPE]
    return worst(found, passed(PLUGIN_TYPE))


def name(seen: Observed) -> Judgement:
    """The driver's name in the answer is read."""
    found = []
    for info in _infos(seen):
        size = len(info.name.encode())
        if size > NAME_LIMIT:
            found.append(failed(f"{shorten(info.name)!r}: {size} bytes, limit {NAME_LIMIT}"))
        elif not SUBDOMAIN.fullmatch(info.name.lower()):
            found.append(failed(f"{shorten(info.name)!r} is no DNS subdomain"))
        elif info.name != info.name.lower():
            found.append(warned(f"{info.name!r} is not in lower case"))
        elif "." not in info.name:
            found.append(warned(f"{info.name!r} has no domain"))
    return worst(found, passed(listed(info.name for info in _infos(seen))))


def endpoint(seen: Observed) -> Judgement:
    """The endpoint in the answer is read, and connected to."""

    def odd(one: Registration) -> Iterator[Judgement]:
        at = one.endpoint
        if at is None or seen.directory is None:
            return
        path = shorten(at.path, PATH_SHOWN)
        if not at.absolute:
            yield failed(f"{path!r} is no absolute path")
        elif at.size > PATH_LIMIT:
            yield failed(f"{path}: {at.size:,} bytes, a socket's limit is {PATH_LIMIT}")
        elif not at.inside:
            yield failed(f"{path}: is not below {seen.directory.kubelet_dir}; see --kubelet-dir")
        elif at.error:
            yield failed(f"{path}: {at.error}")

    paths = [one.endpoint.path for one in _all(seen) if one.endpoint]
    judged = _over(seen, odd, listed(shorten(path, PATH_SHOWN) for path in paths))
    if judged.verdict is Verdict.PASS and seen.socket not in paths:
        return warned(f"{judged.saw}: not the socket that was listened to")
    return judged


def versions(seen: Observed) -> Judgement:
    """The services in the answer are read, in their order."""
    found = []
    for info in _infos(seen):
        plugin = [one for one in info.versions if one in PLUGIN_SERVICES]
        all_of_it = _services(info) or "nothing"
        if not plugin:
            found.append(failed(f"no DRAPlugin service: {all_of_it}"))
        elif plugin[0] != PLUGIN_SERVICES[0]:
            found.append(warned(f"{plugin[0]} is the first of the DRAPlugin services: {all_of_it}"))
        elif strange := [one for one in info.versions if one not in KNOWN]:
            found.append(warned(f"unknown to kubelets: {listed(map(shorten, strange))}"))
    return worst(found, passed(listed(map(_services, _infos(seen)))))


def _services(info: Info) -> str:
    return shorten(", ".join(info.versions), SERVICES_SHOWN)


def health(seen: Observed) -> Judgement:
    """The health services in the answer are compared with those that were heard."""
    served = [service for version, service in HEALTH_SERVICES.items() if seen.watch(version).told]
    missing = [service for version, service in HEALTH_SERVICES.items() if seen.watch(version).unimplemented]
    found = []
    for info in _infos(seen):
        told = [service for service in HEALTH_SERVICES.values() if service in info.versions]
        if empty := [service for service in told if service in missing]:
            found.append(failed(f"{', '.join(empty)}: advertised, and UNIMPLEMENTED"))
        elif not told:
            found.append(
                failed(f"{', '.join(served)}: served, and not advertised")
                if served
                else warned("none is advertised")
            )
        elif told[0] != HEALTH_SERVICES[V1]:
            found.append(warned(f"{told[0]} alone is advertised"))
    if not served and not missing:
        return worst(found, not_run("no health service has answered: see health.unavailable"))
    return worst(found, passed("as it is served"))


def prepare(seen: Observed) -> Judgement:
    """NodePrepareResources is called without claims, in each version that is advertised."""
    calls = [(version, answer) for one in _all(seen) for version, answer in one.prepared]
    found = [failed(f"{version}: {_how(answer)}") for version, answer in calls if not answer.ok]
    if not calls:
        return not_run("no endpoint that advertises a DRAPlugin service takes a connection")
    return worst(
        found, passed(listed(f"{version} after {seconds(answer.took_s)}" for version, answer in calls))
    )


def notify(seen: Observed) -> Judgement:
    """NotifyRegistrationStatus is called: it is registered."""

    def wrong(one: Registration) -> Iterator[Judgement]:
        if one.notified is not None and not one.notified.ok:
            yield failed(_how(one.notified))

    slowest_s = max((one.notified.took_s for one in _all(seen) if one.notified), default=0.0)
    return _over(seen, wrong, f"answered after {seconds(slowest_s)}")


def again(seen: Observed) -> Judgement:
    """GetInfo is called once more, on a new connection."""

    def other(one: Registration) -> Iterator[Judgement]:
        before, now = one.introduction.info, one.again
        if before is None or now is None or now.answer is None:
            return
        if not now.answer.ok:
            yield failed(_how(now.answer))
        elif now.info != before:
            yield failed(f"{_introduced(now.info)}; before: {_introduced(before)}")

    return _over(seen, other, "the same answer")


def _introduced(info: Info | None) -> str:
    words = [info.type, info.name, info.endpoint, *info.versions] if info else ["nothing"]
    return shorten(" ".join(words), SERVICES_SHOWN)


def several(seen: Observed) -> Judgement:
    """The endpoints are compared that the driver's sockets name."""
    by_endpoint: dict[str, list[str]] = {}
    for one in _all(seen):
        if one.endpoint:
            by_endpoint.setdefault(one.endpoint.path, []).append(_named(one))
    for path, files in by_endpoint.items():
        if len(files) > 1:
            return failed(f"{listed(files)} all name {shorten(path, PATH_SHOWN)}")
    if len(by_endpoint) > 1:
        return warned(
            f"{count(len(by_endpoint), 'endpoint')}, as in a rolling update: all are heard up to 1.37.1"
        )
    return passed(f"{count(len(by_endpoint), 'endpoint')}")


def refused(seen: Observed) -> Judgement:
    """With --refuse: NotifyRegistrationStatus with an error, then GetInfo, then it is registered."""

    def gone(one: Registration) -> Iterator[Judgement]:
        if one.refused is None:
            return
        if not one.refused.info.ok:
            yield failed(f"GetInfo after it: {_how(one.refused.info)}")
        elif not one.refused.notified.ok:
            yield failed(f"registering after it: {_how(one.refused.notified)}")

    if not any(one.refused for one in _all(seen)):
        return not_run("only with --refuse: some drivers end then")
    return _over(seen, gone, "it can be registered afterwards")

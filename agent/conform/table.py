"""The checks: for each its code, what the kubelet does that makes it matter, and what to do.

Numbers such as 1.36 are releases of the kubelet; without one, all from 1.34 to 1.37 are meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from agent.conform import contents, kubelets, leases, needs, registering, serving
from agent.conform.observed import Observed
from agent.conform.verdicts import Judgement


class Check(NamedTuple):
    """One row."""

    code: str
    title: str
    """What holds of a good driver."""
    why: str
    """What a kubelet does if it does not hold."""
    advice: str
    judge: Callable[[Observed], Judgement]
    need: Callable[[Observed], str]
    """What is missing to judge, in words; empty: nothing."""

    @property
    def looks(self) -> str:
        """What is looked at, in the words of its judge."""
        return " ".join((self.judge.__doc__ or "").split())


CHECKS: Final = (
    Check(
        "socket.path",
        "the path of the service socket is at most 107 bytes",
        "The kernel takes no longer path for a unix socket: the kubelet could never connect.",
        "shorten the directory, or hash what makes the name long",
        serving.socket_path,
        needs.socket,
    ),
    Check(
        "health.v1",
        "the health service is there in v1",
        "Kubelets from 1.37 call v1 if it is advertised. Else they call v1alpha1, which is to go in 1.40.",
        "serve v1.DRAResourceHealth, too: the messages are the same bytes",
        serving.serves_v1,
        needs.connected,
    ),
    Check(
        "health.v1alpha1",
        "the health service is there in v1alpha1",
        "Kubelets 1.34 to 1.36 call only this one. They hear nothing, ask again every 5 s for ever, and "
        "log an error each time.",
        "serve v1alpha1.DRAResourceHealth, too: the messages are the same bytes",
        serving.serves_v1alpha1,
        needs.connected,
    ),
    Check(
        "health.unavailable",
        "a stream can be opened at once",
        "The kubelet opens the stream again 5 s after any end but UNIMPLEMENTED, with which 1.37 gives up. "
        "Meanwhile every device is Unknown.",
        "serve before the registration socket is there; UNAVAILABLE while it is not ready, never "
        "UNIMPLEMENTED",
        serving.unavailable,
        needs.connected,
    ),
    Check(
        "health.unknown_method",
        "what does not exist is UNIMPLEMENTED",
        "Kubelet 1.37 stops asking for a health service on this status alone; any other is retried every 5 "
        "s.",
        "let the gRPC library answer what it does not know",
        serving.unknown_method,
        needs.connected,
    ),
    Check(
        "health.first_list",
        "the first list comes within 1 s",
        "The kubelet knows of no device until then: pods that start show Unknown.",
        "send what is known as soon as the stream is open, Unknown for what is not",
        serving.first_list,
        needs.connected,
    ),
    Check(
        "health.whole",
        "all devices are told of within 1 s of the first list",
        "A device that was never told of is Unknown in the pod's status, as if it were not watched. 1.37 "
        "remembers 16,384 devices of a driver, and ignores what else it is told of.",
        "begin each stream with every device there is",
        serving.whole,
        needs.heard,
    ),
    Check(
        "health.heartbeat",
        "each device is told of again before its lease ends, best at a third of it",
        "A lease counts from receipt. Once it ends the device reads Unknown. Pods are told at their next "
        "sync, or when a list leaves the device out; by a late list that says the same as before, never.",
        "send every device again at a third of its lease, as long as it is really looked at",
        leases.heartbeat,
        needs.heard,
    ),
    Check(
        "health.lease",
        "leases are 0, or 3 s to a day",
        "0 is the kubelet's 30 s, and so is a negative one. The kubelet counts nanoseconds in 64 bits: above "
        "9,223,372,036 s they overflow, and of a lease below zero the device is Unknown for ever. 1.34 "
        "ignores leases: 30 s.",
        "three times the heartbeat, at least 30 s",
        leases.lease,
        needs.heard,
    ),
    Check(
        "health.lease.stable",
        "a device's lease stays as it is",
        "From 1.35 on, a lease that differs is a change: the state file is written and every pod with the "
        "device is synced, at each list.",
        "send the same lease each time",
        leases.stable_lease,
        needs.heard,
    ),
    Check(
        "health.text.stable",
        "a message changes with the health, not by itself",
        "From 1.36 on, a message that differs is a change: the state file is written and every pod with the"
        " device is synced, at each list.",
        "keep temperatures, counts and ages out of the message",
        contents.stable_text,
        needs.heard,
    ),
    Check(
        "health.message.size",
        "a message is at most 1,024 bytes",
        "The kubelet (1.36 on) keeps the first 1,021 bytes and adds three dots. Of a character that is cut "
        "in two each byte becomes three, U+FFFD; that is too long, and the API server refuses the pod's "
        "whole status.",
        "cut it yourself, between two characters",
        contents.message_size,
        needs.heard,
    ),
    Check(
        "health.utf8",
        "every string is UTF-8",
        "grpc-go cannot decode the list: the stream ends, the health of all the driver's devices is "
        "forgotten, and so again every 5 s.",
        "replace what is no UTF-8 before it is sent",
        contents.utf8,
        needs.heard,
    ),
    Check(
        "health.decode",
        "every list is a NodeWatchResourcesResponse",
        "The kubelet cannot decode it: the stream ends, the health of all the driver's devices is "
        "forgotten, and so again every 5 s.",
        "use the kubelet's proto files",
        contents.decode,
        needs.heard,
    ),
    Check(
        "health.size",
        "a list is at most 1 MiB",
        "The kubelet reads no message above 4 MiB: the stream ends with RESOURCE_EXHAUSTED, the health of "
        "all devices is forgotten, and so again every 5 s.",
        "split it: a list may have some of the devices, the others keep what was said of them",
        contents.size,
        needs.connected,
    ),
    Check(
        "health.rate",
        "there are at most 20 lists in a second",
        "The kubelet compares each list with all it knows, and writes its state file for each that changes "
        "something. Its queue for pods holds 100 such lists; what does not fit in is lost.",
        "gather what changes within 100 ms, and send it together",
        serving.rate,
        needs.heard,
    ),
    Check(
        "health.duplicates",
        "a list has each device once",
        "The last one counts, but each that differs from the one before is a change: state file and pod "
        "syncs at every list.",
        "one entry for each pool and name",
        contents.duplicates,
        needs.heard,
    ),
    Check(
        "health.names",
        "each entry has a pool and a device as the ResourceSlice names them",
        "The kubelet checks nothing: an entry whose names are not exactly those that prepare returned is "
        "about no device.",
        "take the names from the same table as the ResourceSlice",
        contents.names,
        needs.heard,
    ),
    Check(
        "health.enum",
        "the health is 0, 1 or 2",
        "The kubelet takes any other number for Unknown.",
        "send 0 (Unknown), 1 (Healthy) or 2 (Unhealthy)",
        contents.enum,
        needs.heard,
    ),
    Check(
        "health.time",
        "last_updated_time is Unix time in seconds",
        "The kubelet puts its own time there; people and other readers of the stream take it as it is.",
        "send the time of the last look, in whole seconds",
        contents.time,
        needs.heard,
    ),
    Check(
        "health.ends",
        "a stream stays open",
        "Whatever the status, OK too: the kubelet forgets the health of all the driver's devices, and asks "
        "again 5 s later. Pods are not told.",
        "return from the handler only when the kubelet has gone",
        serving.ends,
        needs.heard,
    ),
    Check(
        "health.goaway",
        "the server closes no connection by itself",
        "grpc-go connects anew, and keeps the open stream until the server's grace is over. With it goes the "
        "health of all devices, at each of the server's turns.",
        "no MaxConnectionAge and no MaxConnectionIdle on this server",
        serving.goaway,
        needs.connected,
    ),
    Check(
        "health.versions_agree",
        "v1 and v1alpha1 tell the same",
        "Which one is heard depends on the kubelet's release alone.",
        "serve both from one implementation",
        serving.versions_agree,
        needs.both,
    ),
    Check(
        "health.reconnect",
        "a stream that is opened again begins with everything",
        "The kubelet has forgotten all it knew when the stream before ended, and opens the next on the same"
        " connection or, after a restart, on a new one.",
        "keep what was sent for each stream, not for the process",
        kubelets.reconnect,
        needs.heard,
    ),
    Check(
        "health.two_kubelets",
        "two kubelets hear the same, and one that leaves takes nothing with it",
        "A kubelet that restarts connects before the old connection is noticed to be dead.",
        "give each stream its own state; end one by its own context alone",
        kubelets.two_kubelets,
        needs.heard,
    ),
    Check(
        "health.stopped_reader",
        "a reader that stops delays nobody, and hears the newest when it reads again",
        "A kubelet under load reads late: what is queued for it is old, and whoever waits for it tells "
        "nobody.",
        "for each stream keep the newest list only, and send it from a task of its own",
        kubelets.stopped_reader,
        needs.heard,
    ),
    Check(
        "registration.socket",
        "the registration socket can be found",
        "The kubelet looks at every socket below plugins_registry whose name does not begin with a dot; "
        "everything else it passes over.",
        "name it <driver>-reg.sock, or <driver>-<pod uid>-reg.sock for rolling updates",
        registering.socket,
        needs.directory,
    ),
    Check(
        "registration.get_info",
        "GetInfo is answered within 1 s",
        "The kubelet gives up after 1 s, and tries again with growing pauses: the driver is not registered "
        "meanwhile.",
        "answer from memory",
        registering.get_info,
        needs.directory,
    ),
    Check(
        "registration.type",
        "the type is DRAPlugin",
        "The kubelet takes the plugin for what it says it is, CSIPlugin and DevicePlugin too, and refuses a "
        "type without a handler.",
        "send DRAPlugin",
        registering.kind,
        needs.introduced,
    ),
    Check(
        "registration.name",
        "the driver's name is a DNS subdomain of at most 63 bytes",
        "Kubelets after 1.37 refuse others; the API server takes no ResourceSlice of such a driver. Both "
        "take upper case, as it is: GPU.example.com is another driver than gpu.example.com.",
        "a domain of yours in lower case, such as gpu.example.com",
        registering.name,
        needs.introduced,
    ),
    Check(
        "registration.endpoint",
        "the endpoint is an absolute path in the kubelet's directory, and takes connections",
        "The kubelet connects as soon as it has registered the plugin. Kubelets after 1.37 refuse paths "
        "that are relative, too long, or outside of their directory.",
        "serve <kubelet's directory>/plugins/<driver>/dra.sock before the registration socket is there",
        registering.endpoint,
        needs.introduced,
    ),
    Check(
        "registration.versions",
        "v1.DRAPlugin comes first, and nothing is advertised that kubelets do not know",
        "The kubelet takes the first of the plugin's list that it knows, and refuses a list without any.",
        "v1.DRAPlugin, v1beta1.DRAPlugin, v1.DRAResourceHealth, v1alpha1.DRAResourceHealth",
        registering.versions,
        needs.introduced,
    ),
    Check(
        "registration.health",
        "health is advertised as it is served",
        "Kubelets from 1.37 open the stream only if it was advertised, and after UNIMPLEMENTED no more "
        "until the plugin registers anew. Older ones ask in any case.",
        "advertise both health services, and serve both",
        registering.health,
        needs.introduced_and_connected,
    ),
    Check(
        "registration.prepare",
        "each DRAPlugin version that is advertised answers",
        "The kubelet calls the one it took from the list; if it is not there, no pod with a claim starts.",
        "serve what is advertised, both at the endpoint that is named",
        registering.prepare,
        needs.introduced,
    ),
    Check(
        "registration.notify",
        "NotifyRegistrationStatus is answered within 5 s",
        "If it fails, the kubelet takes the registration back and begins again.",
        "take note, and answer at once",
        registering.notify,
        needs.introduced,
    ),
    Check(
        "registration.again",
        "a kubelet that restarts gets the same answer",
        "It finds the socket that is there, and registers the plugin from scratch.",
        "answer every GetInfo alike, for as long as the process lives",
        registering.again,
        needs.introduced,
    ),
    Check(
        "registration.several",
        "no two registration sockets name one endpoint",
        "The same driver with the same endpoint twice is an error. Two endpoints are a rolling update: "
        "prepare goes to the newest that is connected; up to 1.37.1 both are heard, into one memory, which "
        "is cleared when either ends.",
        "remove the socket of an instance that is gone; during an update only the newer one should tell "
        "health",
        registering.several,
        needs.introduced,
    ),
    Check(
        "registration.refused",
        "a driver that was refused once can be registered later",
        "Whatever fails on the kubelet's side is told so, and tried again: the reason may pass.",
        "take note, log it, and stay",
        registering.refused,
        needs.introduced,
    ),
)
"""In the order in which a kubelet would meet them."""

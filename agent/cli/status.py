"""``drahealth status``: shows the resource usage, subscribers and sources of the running agent."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from agent.cli.output.json import status_document
from agent.cli.output.report_text import cgroup_entry, headline, source_entries
from agent.cli.output.text import ListEntry, clean, format_bytes, format_count, format_entries
from agent.cli.subcommand import (
    Subcommand,
    add_output,
    add_settings,
    agent_socket_of,
    exit_of_severities,
    print_result,
)
from agent.health.rules import format_duration
from agent.model.time import format_age

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from agent.cli.output.terminal import TextStyle
    from agent.model.gpu import NvmlCosts
    from agent.model.report import AgentStatus, ClusterStatus, ConfigReload, SentinelStatus


CALLS_SHOWN: Final = 3
"""Number of kinds of NVML calls that are shown, the most expensive first."""


def add_arguments(parser: ArgumentParser) -> None:
    add_output(parser)
    add_settings(parser, "--runtime-dir")


def main(args: Namespace) -> int:
    socket = agent_socket_of(args)
    import asyncio

    from agent.serve.agent_api import client

    status = asyncio.run(client.fetch_status(socket))
    print_result(
        args, lambda: status_document(status), lambda style: render_status(status, style, now_s=time.time())
    )
    return exit_of_severities((tally.severity for tally in status.tallies), sources=status.sources)


def render_status(status: AgentStatus, style: TextStyle, *, now_s: float) -> str:
    """Return the state of the agent as text: devices, resource usage, subscribers, sources and cgroups."""
    counts = Counter({tally.severity: tally.devices for tally in status.tallies})
    uptime_s = max(now_s - status.started_wall_s, 1e-9)
    core = status.core
    usage = [
        f"{status.cpu_s:.2f} s CPU ({100 * status.cpu_s / uptime_s:.2f} % of a CPU)",
        format_bytes(status.rss_bytes),
        format_count(status.threads, "thread"),
        format_count(status.descriptors, "descriptor"),
    ]
    core_usage = [
        format_count(core.passes, "pass", "passes"),
        format_count(core.wakes, "wake-up"),
        format_count(core.reads, "read"),
        format_count(core.opens, "open"),
        format_count(core.descriptors, "descriptor"),
        format_count(core.watches, "watch", "watches"),
        f"{format_bytes(core.kernel_bytes)} in the kernel",
    ]
    reports, parts, lost = "none yet", status.parts, status.parts.lost_snapshots
    if status.at:
        reports = f"{status.publications:,} published, the last {format_age(now_s - status.at.wall_s)} ago"
    entries = [
        ListEntry("agent", f"drahealth {clean(status.version)}, pid {status.pid}, up {format_age(uptime_s)}"),
        ListEntry("usage", ", ".join(usage)),
        ListEntry("core", ", ".join(core_usage)),
        ListEntry("reports", reports),
        *_config_reload(parts.config_reload, now_s),
        *_nvml(parts.nvml, uptime_s),
        *_cluster(parts.cluster, now_s),
        *_nvsentinel(parts.nvsentinel),
        *([ListEntry("record", f"{format_count(lost, 'snapshot')} lost")] if lost is not None else ()),
        *(
            ListEntry("not written", clean(f"{file.name}: {file.error}"))
            for file in parts.files
            if file.error
        ),
        *(
            ListEntry(
                "subscribers",
                f"{clean(subscriber.socket)}: {format_count(subscriber.streams, 'stream')}, "
                f"{format_count(subscriber.connections, 'connection')}",
            )
            for subscriber in status.subscribers
        ),
        *source_entries(status.sources, status.at, now_s, explains_all=True),
        cgroup_entry(status.groups, core),
    ]
    return "\n".join([headline(status.node, counts, style), "", *format_entries(entries, style)]) + "\n"


def _config_reload(reload: ConfigReload | None, now_s: float) -> Iterator[ListEntry]:
    """Yield the result of the last reload of the configuration, if there was one."""
    if reload is not None:
        age = f"{format_age(now_s - reload.at_wall_s)} ago"
        text = f"reloaded {age}: {'; '.join(reload.changes) or 'no setting has changed'}"
        if reload.error:
            text = f"not reloaded {age}: {reload.error}; the configuration in effect stays"
        yield ListEntry("config", clean(text))


def _nvsentinel(state: SentinelStatus | None) -> Iterator[ListEntry]:
    """Yield the line on the events that the agent sends to NVSentinel; nothing if it sends no events."""
    if state is not None:
        counts = f"{format_count(state.events, 'event')}, {format_count(state.failures, 'failure')}"
        text = f"{counts}; failing: {state.error}" if state.error else f"{counts} at {state.socket}"
        yield ListEntry("nvsentinel", clean(text))


def _nvml(costs: NvmlCosts | None, uptime_s: float) -> Iterator[ListEntry]:
    """Yield the line on CPU time and period of calls to NVML; nothing if the agent does not call NVML."""
    if costs is None:
        return
    calls = (
        f"{call.kind} {1e6 * call.cpu_s / call.calls:,.0f} µs CPU "
        f"in {1e6 * call.duration_s / call.calls:,.0f} µs"
        for call in sorted(costs.calls, key=lambda call: -call.cpu_s)[:CALLS_SHOWN]
    )
    share = 100 * costs.cpu_s / max(uptime_s, 1.0)
    parts = [
        f"{share:.2f} % of a CPU, {format_count(costs.switches, 'context switch', 'context switches')}",
        f"a pass every {format_duration(costs.period_s)}",
        *calls,
    ]
    yield ListEntry("nvml", clean("; ".join(parts)))


def _cluster(cluster: ClusterStatus | None, now_s: float) -> Iterator[ListEntry]:
    """Yield the line on the agent's Lease and Node conditions in the API; nothing if it writes none."""
    if cluster is None:
        return
    holder = "held by this agent" if cluster.is_held else f"held by {cluster.holder or 'no agent'}"
    age = "never" if cluster.success_wall_s is None else f"{format_age(now_s - cluster.success_wall_s)} ago"
    parts = [
        f"lease {cluster.lease} {holder}",
        *(f"{condition.type} {condition.status} ({condition.reason})" for condition in cluster.conditions),
        *([format_count(cluster.taint_rules, "taint rule")] if cluster.taint_rules else ()),
        *([f"in maintenance: {', '.join(cluster.maintenance)}"] if cluster.maintenance else ()),
        f"{format_count(cluster.requests, 'request')}, {format_count(cluster.failures, 'failure')}, "
        f"{format_count(cluster.events, 'event')}",
        f"last success {age}",
        *([f"failing: {cluster.error}"] if cluster.error else ()),
    ]
    yield ListEntry("cluster", clean("; ".join(parts)))


VERB = Subcommand(
    name="status",
    summary="show the resource usage, subscribers and sources of the running agent",
    description=(
        "Shows the state of the running agent. Exits with 0 if all its devices are healthy, 1 if the worst "
        "is degraded, 2 if it is unhealthy, 3 if it is unknown or there is no report yet, and 69 if no agent "
        "answers."
    ),
    examples=(
        ("drahealth status", "the agent of this node"),
        ("drahealth status -o json | jq .rssBytes", "the memory that the agent uses"),
    ),
    add_arguments=add_arguments,
    main=main,
)

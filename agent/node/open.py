"""What an agent that runs and a single look are both made of: the node's sources, opened as configured.

Apart from agent.app.daemon, so that a look needs nothing of what serves.
"""

from typing import Final

from agent.config.config import Config
from agent.health.host.catalog import wakes
from agent.model.settings import GpuLimits, HostLimits, Settings
from agent.model.time import NS
from agent.native.sampler import Sampler, SamplerOptions
from agent.node.node_source import Node, Pods

NODE_STOP_S: Final = 0.6
"""What the sources have to end [s]."""


def settings_of(config: Config) -> Settings:
    """What the decision core needs of the configuration."""
    return Settings(
        node=config.node_name,
        drivers=config.drivers,
        lease_s=config.lease_s,
        throttle_events=config.throttle_events,
        throttle_window_s=config.throttle_window_s,
        expect_cpus=config.expect_cpus,
        expect_pools=config.expect_pools,
        host=HostLimits(
            correctable_errors=config.correctable_errors,
            correctable_window_s=config.correctable_window_s,
            throttled_percent=config.throttled_percent,
            throttled_window_s=config.throttled_window_s,
            pressure_percent=config.pressure_percent,
            pressure_window_s=config.pressure_window_s,
        ),
        gpu=GpuLimits(
            deadline_s=config.gpu_deadline_ns / NS,
            dead_s=config.gpu_dead_ns / NS,
            probation_s=config.gpu_probation_ns / NS,
            correctable_errors=config.gpu_correctable_errors,
            correctable_window_s=config.gpu_correctable_window_s,
            expect=config.expect_gpus,
            xids=tuple(sorted(config.gpu_xids.items())),
        ),
    )


def open_sampler(config: Config, period_ns: int) -> Sampler:
    """A sampler of the configured roots, not started.

    Raises:
        ConfigError: a root is too long.
        ProbeError: the kernel refused descriptors or memory.
    """
    return Sampler(
        SamplerOptions(
            sysfs_root=config.sysfs_root,
            cgroupfs_root=config.cgroupfs_root,
            kubelet_cgroup_root=config.kubelet_cgroup_root,
            period_ns=period_ns,
            sweep_ns=config.sweep_ns,
            resync_ns=config.resync_ns,
            group_max=config.group_max,
            wakes=wakes(config.throttle_events, config.throttle_window_s),
        )
    )


def open_node(
    config: Config,
    settings: Settings,
    period_ns: int,
    *,
    declares: bool,
    udev: bool = True,
    pods: Pods | None = None,
) -> Node:
    """All sources of the configuration, not started. Raises as :func:`open_sampler`.

    Args:
        declares: Drivers may declare devices in the runtime directory.
        udev: libudev may be asked, which starts a process to find it.
        pods: Who uses the devices; None: nobody asks.
    """
    sampler = open_sampler(config, period_ns)
    return Node(config, sampler, settings.gpu, period_ns, declares=declares, udev=udev, pods=pods)

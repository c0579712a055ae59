"""Command that runs an agent under load for an hour and measures what grows: ``python -m faults.soak``.

Every half minute the load rests, all clients disconnect, and memory, descriptors and threads of the agent are
read. After a warm-up, their slopes must be within their limits. The result is printed as one line of JSON,
which ``--save`` stores for docs/reliability.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import psutil
from wire.serving import is_served

from agent.bench.suites.soak import growth_of_medians, growth_per_hour
from faults import save_figures
from faults.busy_node import BusyNode

REST_EVERY_S: Final = 30.0
REST_S: Final = 3.0
EVENT_EVERY_S: Final = 0.25
WARM_UP: Final = 0.25
"""Part of the run before its figures count."""
RSS_MAX_MIB_H: Final = 0.5
GROWTHS: Final = {
    "descriptors without files of cgroups": "other_descriptors_growth",
    "threads": "threads_growth",
}
MIB: Final = 1 << 20


class Sample(NamedTuple):
    """Resources of the agent at one moment of rest."""

    at_s: float
    rss_mib: float
    heap_mib: float
    """Part of the resident memory that the C library's heap has."""
    descriptors: int
    cgroup_files: int
    """Part of the descriptors that are files of cgroups, which stay open while a pod runs."""
    threads: int


def count_files_below(process: psutil.Process, directory: Path) -> int:
    """Return the number of descriptors of a process that are files below a directory."""
    found = 0
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += entry.readlink().is_relative_to(directory)
    return found


def read_sample(process: psutil.Process, cgroups: Path, began_s: float) -> Sample:
    """Return the lowest of five readings, between which periodic work begins and ends."""
    samples = []
    for _ in range(5):
        with process.oneshot():
            heap = sum(area.rss for area in process.memory_maps() if area.path == "[heap]")
            memory = process.memory_info().rss / MIB, heap / MIB
            files = process.num_fds(), count_files_below(process, cgroups)
            samples.append((*memory, *files, process.num_threads()))
        time.sleep(REST_S / 5)
    rss, heap, *counts = map(min, zip(*samples, strict=True))
    return Sample(time.monotonic() - began_s, rss, heap, *map(int, counts))


def evaluate(samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Return the figures of a run after its warm-up."""
    steady = [sample for sample in samples if sample.at_s > seconds * WARM_UP]
    at_s = [sample.at_s for sample in steady]
    return {
        "seconds": round(seconds),
        "samples": len(steady),
        "rss_first_mib": round(steady[0].rss_mib, 1),
        "rss_last_mib": round(steady[-1].rss_mib, 1),
        "rss_slope_mib_h": round(growth_per_hour(at_s, [sample.rss_mib for sample in steady]), 2),
        "heap_slope_mib_h": round(growth_per_hour(at_s, [sample.heap_mib for sample in steady]), 2),
        "descriptors": max(sample.descriptors for sample in steady),
        "descriptors_growth": growth_of_medians([sample.descriptors for sample in steady]),
        "other_descriptors_growth": growth_of_medians(
            [sample.descriptors - sample.cgroup_files for sample in steady]
        ),
        "threads": max(sample.threads for sample in steady),
        "threads_growth": growth_of_medians([sample.threads for sample in steady]),
    }


def failures(figures: dict[str, Any]) -> list[str]:
    """Return what exceeds its limit."""
    problems = []
    if figures["rss_slope_mib_h"] > RSS_MAX_MIB_H:
        problems.append(f"memory grows by {figures['rss_slope_mib_h']} MiB/h, limit {RSS_MAX_MIB_H}")
    problems += [f"{name} grew by {figures[key]}" for name, key in GROWTHS.items() if figures[key] > 0]
    return problems


def raise_if_failed(agent: subprocess.Popen[bytes], log: BinaryIO) -> None:
    """Raise RuntimeError if the agent has ended or its new log lines have a traceback."""
    code = agent.poll()
    text = log.read().decode(errors="replace")
    if code is not None:
        raise RuntimeError(f"the agent ended with {code}: {text[-4000:]}")
    if "Traceback" in text:
        raise RuntimeError(f"the agent logged a traceback: {text[-4000:]}")


def soak(directory: Path, seconds: float, seed: int) -> tuple[list[Sample], int, int]:
    """Run an agent under load; return the samples, the number of events, and the agent's exit code.

    Raises RuntimeError: the agent ended, or logged a traceback.
    """
    node = BusyNode(directory, seed, prepared_claims=100)
    began_s = time.monotonic()
    samples: list[Sample] = []
    events = 0
    with (directory / "log").open("ab") as output:
        agent = subprocess.Popen(
            [sys.executable, "-m", "agent", "run", *node.flags],
            env=node.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    log = (directory / "log").open("rb")
    try:
        process = psutil.Process(agent.pid)
        while not is_served(node.driver_socket):
            raise_if_failed(agent, log)
            time.sleep(0.1)
        rest_s = began_s + REST_EVERY_S
        while (now_s := time.monotonic()) < began_s + seconds:
            raise_if_failed(agent, log)
            if now_s >= rest_s:
                node.close_subscribers()
                time.sleep(REST_S)
                samples.append(read_sample(process, directory / "cgroup", began_s))
                rest_s = time.monotonic() + REST_EVERY_S
            node.one_event()
            node.aer()
            node.change_subscribers()
            events += 1
            time.sleep(EVENT_EVERY_S)
        node.close_subscribers()
        raise_if_failed(agent, log)
        agent.terminate()
        return samples, events, agent.wait(60)
    finally:
        node.close_subscribers()
        with suppress(ProcessLookupError):
            agent.kill()
        agent.wait()
        log.close()


def main() -> None:
    """Run the soak; exit code 1: something grows."""
    parser = argparse.ArgumentParser(
        prog="python -m faults.soak", description="Measure what grows under load."
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="length of the run (default: 3600)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the load (default: 1)")
    parser.add_argument("--samples", type=Path, help="file for all samples, as CSV")
    parser.add_argument("--save", action="store_true", help="store the figures for docs/reliability.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        samples, events, code = soak(Path(directory), args.seconds, args.seed)
    if args.samples:
        rows = (",".join(map(str, sample)) for sample in samples)
        args.samples.write_text("\n".join([",".join(Sample._fields), *rows, ""]))
    figures = evaluate(samples, args.seconds) | {"events": events, "exit_code": code}
    sys.stdout.write(json.dumps(figures) + "\n")
    if args.save:
        save_figures("soak", figures)
    problems = failures(figures) + ([f"the agent ended with exit code {code}"] if code else [])
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()

"""Conversion of benchmark figures to and from a pyperf benchmark suite.

It serves ``pyperf compare_to`` and similar tools.

Format: https://pyperf.readthedocs.io/en/latest/api.html, version 1.0. pyperf has the units second, byte and
integer; a percentage of a core becomes seconds of CPU per second. pyperf refuses zero, so counts of zero are
left out.
"""

import datetime
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from agent.bench.report import HostFacts
from agent.bench.result import ResultRow, SuiteOutcome, Unit

UNITS: Final[Mapping[Unit, str]] = {"s": "second", "%": "second", "B": "byte", "1": "integer"}
FORMAT: Final = "1.0"
_UNITS_BY_NAME: Final[Mapping[str, Unit]] = {"second": "s", "byte": "B", "integer": "1"}


class FigureMedian(NamedTuple):
    """Unit and median of one benchmark figure, which is a result row of a suite."""

    unit: Unit
    median: float


def encode_results(host: HostFacts, outcomes: Mapping[str, SuiteOutcome]) -> str:
    """Encode the result rows of all suites as one JSON document of pyperf."""
    rows = [row for outcome in outcomes.values() for table in outcome.tables for row in table.rows]
    metadata = {
        "cpu_model_name": host.cpu,
        "cpu_count": host.cpus,
        "hostname": os.uname().nodename,
        "platform": f"Linux-{host.kernel}",
        "python_version": host.python,
        "load_avg_1min": float(host.load),
        "drahealth_version": host.version,
        "drahealth_compiler": host.compiler,
        "drahealth_cflags": host.flags,
    }
    document = {"version": FORMAT, "metadata": metadata, "benchmarks": list(_benchmarks(rows))}
    return json.dumps(document, indent=1)


def decode_figures(document: str) -> dict[str, FigureMedian]:
    """Return unit and median of each benchmark in a JSON document of pyperf, by name."""
    return {
        benchmark["metadata"]["name"]: FigureMedian(
            _UNITS_BY_NAME[benchmark["metadata"]["unit"]],
            statistics.median(value for run in benchmark["runs"] for value in run["values"]),
        )
        for benchmark in json.loads(document)["benchmarks"]
    }


def _benchmarks(rows: list[ResultRow]) -> Iterator[dict[str, Any]]:
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    for row in rows:
        if row.max <= 0:
            continue
        scale = 0.01 if row.unit == "%" else 1
        values = [value * scale for value in row.values if value > 0]
        if row.unit in {"B", "1"}:
            values = [round(value) or 1 for value in values]
        yield {
            "metadata": {
                "name": row.key,
                "unit": UNITS[row.unit],
                "loops": row.loops,
                "description": row.label,
            },
            "runs": [{"metadata": {"date": date}, "values": values}],
        }

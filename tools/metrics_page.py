"""Writer of the tables in docs/metrics.md, from the metric families: tools/metrics_page.py [--write]."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT))  # run as a program, this folder is first on the path, not the project

from agent.http.metric_families import AGENT_FAMILIES, DEVICE_FAMILIES, TIME_FAMILIES, MetricFamily  # noqa: E402

PAGE: Final = PROJECT / "docs" / "metrics.md"
BEGIN: Final = "<!-- The tables below are written by tools/metrics_page.py --write. -->\n"
END: Final = "<!-- End of the tables. -->\n"
GPU_PREFIX: Final = "drahealth_gpu_"


def tables() -> str:
    """Return the tables of all metric families in Markdown."""
    agent = [family for family in AGENT_FAMILIES if not family.name.startswith(GPU_PREFIX)]
    gpus = [family for family in AGENT_FAMILIES if family.name.startswith(GPU_PREFIX)]
    parts = (("Devices", (*DEVICE_FAMILIES, *TIME_FAMILIES)), ("GPUs", gpus), ("Agent and node", agent))
    return "\n".join(line for title, families in parts for line in _section(title, families)) + "\n"


def _section(title: str, families: "tuple[MetricFamily, ...] | list[MetricFamily]") -> Iterator[str]:
    yield from (f"\n### {title}\n", "| metric | type | labels | meaning | series |", "|---|---|---|---|---|")
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.series_labels)
        yield f"| `{family.series_name}` | {family.kind} | {labels} | {family.help} | {family.limit} |"


def page(text: str) -> str:
    """Return the text of the page with new tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}\n{END}{after}"


if __name__ == "__main__":
    new = page(PAGE.read_text())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new)
    else:
        print(new, end="")

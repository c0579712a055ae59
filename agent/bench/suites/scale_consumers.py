"""Who uses the devices of a large node, and whether its cgroups keep what was promised: both as commands.

Each is a process from start to end, with what it imports. The floor of the first reads the same files and
does nothing with them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agent.bench.effort import Effort
from agent.bench.fit import fit, words
from agent.bench.pods import NAMESPACE, write_node
from agent.bench.result import Outcome, Row, Table, Unequal, row_of
from agent.bench.starts import Started, command, start
from agent.bench.trees import Tree, scratch, some_tree
from agent.model.time import NS

STEPS: Final = (0.1, 0.5, 1.0)
CLAIMS_PER_POD: Final = 2
RUNNING: Final = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
ANSWERS: Final = range(4)
"""Exit codes of a command that has something to say: how bad it is."""
READ: Final = "import json, sys\nfor path in {}:\n    with open(path, 'rb') as file:\n        json.load(file)"


def run(effort: Effort, outcome: Outcome) -> None:
    """Consumers of the effort's pods and their claims; an audit of its pods."""
    if effort.pods:
        _explain(effort, outcome)
        _audit(effort, outcome)
    else:
        outcome.skipped.append("scale: consumers and audits, left to a run without --quick")


def _curves(
    outcome: Outcome, title: str, key: str, found: Mapping[str, Mapping[int, Started]], *notes: str
) -> None:
    """Time and memory of programs, by how many pods there were; the lines fit the first of them."""
    times: list[Row] = []
    sizes: list[Row] = []
    for name, starts in found.items():
        for pods, one in starts.items():
            said, x = f"{name}, {pods} pods", float(pods)
            timed = row_of(f"{key}.{name}.{pods}", said, (one.took_ns / NS,), "s")
            peak = row_of(f"{key}.{name}.{pods}.rss", said, (float(one.rss),), "B")
            times.append(replace(timed, x=x))
            sizes.append(replace(peak, x=x))
    number = len(next(iter(found.values())))
    for what, rows in (("from start to end", times), ("most memory that it had", sizes)):
        remarks = (words(fit(rows[:number]), rows[0].unit, "pod"), *notes)
        outcome.tables.append(Table(what, tuple(rows), notes=remarks, section=title, grows_with="pods"))


def _explain(effort: Effort, outcome: Outcome) -> None:
    found: dict[str, dict[int, Started]] = {"explain": {}, "floor": {}}
    for pods in sizes_of(effort.pods):
        with scratch() as directory:
            files = write_node(directory, pods, CLAIMS_PER_POD * pods)
            name = f"{NAMESPACE}/pod-{pods // 2}"
            places = ("--kubelet-dir", files.kubelet_dir, "--pods", files.pods, "--claims", files.claims)
            told = start(command("explain", "pod", name, *places), ANSWERS)
            if f"claim-{pods // 2}" not in told.output:
                raise Unequal(f"explain: {name} has a claim-{pods // 2}, of which nothing is said")
            found["explain"][pods] = told
            found["floor"][pods] = start(READ.format([str(files.pods), str(files.claims)]))
    title = f"drahealth explain pod, {CLAIMS_PER_POD} claims for each"
    _curves(outcome, title, "scale", found, "floor: the same files read as JSON, and let go of")


def sizes_of(most: int) -> list[int]:
    """Numbers of pods up to the most."""
    return sorted({max(1, round(most * step)) for step in STEPS})


def _audit(effort: Effort, outcome: Outcome) -> None:
    found: dict[str, dict[int, Started]] = {"audit": {}}
    backend = ""
    for pods in sizes_of(effort.audited):
        with some_tree(2 * pods) as (tree, why), scratch() as directory:
            if why:
                outcome.skipped.append(f"scale: {why}; audited on {tree.backend}")
            file = directory / "pods.json"
            file.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": pod_objects(tree)}))
            roots = ("--cgroupfs-root", tree.cgroupfs, "--kubelet-cgroup-root", tree.kubelet_root)
            asked = ("audit", "--all", "--pods", file, "--kubelet-dir", directory, "-o", "json", *roots)
            told = start(command(*asked), ANSWERS)
            judged = len(audited(told.output))
            if judged != pods:
                raise Unequal(f"audit: {pods} pods have cgroups, {judged} were judged")
            found["audit"][pods] = told
            backend = tree.backend
    title = f"drahealth audit --all, a container in each pod; {backend}"
    _curves(outcome, title, "scale", found)


def pod_objects(tree: Tree) -> list[dict[str, Any]]:
    """The pods of a tree, as the API server would have them."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "bench", "name": f"pod-{place}", "uid": uid},
            "spec": {
                "nodeName": "node-a",
                "containers": [
                    {"name": "main", "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}
                ],
            },
            "status": {
                "phase": "Running",
                "qosClass": "Burstable",
                "containerStatuses": [
                    {"name": "main", "containerID": f"containerd://{name}", "state": RUNNING},
                ],
            },
        }
        for place, (uid, name) in enumerate(group for group in tree.groups if group[1])
    ]


def audited(output: str) -> list[Any]:
    """The pods in a command's JSON, which other lines follow."""
    document, _ = json.JSONDecoder().raw_decode(output)
    pods = document["pods"]
    assert isinstance(pods, list)
    return pods

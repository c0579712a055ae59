"""Schemas of the kinds in the chart, and of those that the agent writes, from published OpenAPI documents.

Usage: ``python tests/packages/make_schemas.py``, with Go and a way to its modules. Writes
``schemas/kubernetes-<VERSION>.json`` and ``schemas/podmonitor.json``: JSON schemas without texts, which
refuse fields that the API does not have.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
RELEASES = ("v1.34.4", "v1.35.4", "v1.36.3", "v1.37.2")
KINDS = {
    "api__v1": ("ConfigMap", "Event", "Namespace", "Node", "ServiceAccount"),
    "apis__admissionregistration.k8s.io__v1": (
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ),
    "apis__apps__v1": ("DaemonSet",),
    "apis__coordination.k8s.io__v1": ("Lease",),
    "apis__networking.k8s.io__v1": ("NetworkPolicy",),
    "apis__rbac.authorization.k8s.io__v1": ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    "apis__resource.k8s.io__v1": ("DeviceTaintRule",),
    "apis__resource.k8s.io__v1alpha3": ("DeviceTaintRule",),
    "apis__resource.k8s.io__v1beta2": ("DeviceTaintRule",),
    "apis__scheduling.k8s.io__v1": ("PriorityClass",),
}
"""Kinds by the document that defines them. A release lacks documents of versions that it does not have."""
OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
PODMONITOR = "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"
TEXTS = ("description", "default", "example", "externalDocs")


def module(name: str) -> Path:
    """Download a Go module and return its directory."""
    with tempfile.TemporaryDirectory() as empty:
        command = ["go", "mod", "download", "-json", name]
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=True)
    return Path(json.loads(done.stdout)["Dir"])


def reduce_schema(schema: Any) -> Any:
    """Return a schema without texts and extensions, which refuses fields without a name in it."""
    if isinstance(schema, list):
        return [reduce_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: reduce_schema(field) for name, field in value.items()}
        elif key not in TEXTS and not key.startswith("x-kubernetes-"):
            found[key] = reduce_schema(value)
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    if "$ref" in found:
        found["$ref"] = found["$ref"].replace("#/components/schemas/", "#/definitions/")
    return found


def references(schema: Any) -> set[str]:
    """Return the names of all definitions that a schema refers to."""
    if isinstance(schema, list):
        return set().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return own.union(*map(references, schema.values()))


def kubernetes_schema(root: Path) -> dict[str, Any]:
    """Return the definitions that the kinds need, and the definition of each kind by ``apiVersion/kind``."""
    definitions: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for document, names in KINDS.items():
        path = root / f"api/openapi-spec/v3/{document}_openapi.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        schemas = found["components"]["schemas"]
        waiting = set()
        for name, schema in schemas.items():
            for own in schema.get("x-kubernetes-group-version-kind", ()):
                if own["kind"] in names and document.endswith(own["version"]):
                    version = "/".join(filter(None, (own["group"], own["version"])))
                    kinds[f"{version}/{own['kind']}"] = name
                    waiting.add(name)
        while waiting:
            name = waiting.pop()
            definitions[name] = reduce_schema(schemas[name])
            waiting |= references(definitions[name]) - definitions.keys()
    return {"kinds": kinds, "definitions": definitions}


def write(name: str, found: dict[str, Any]) -> None:
    """Write kinds and definitions, one definition in a line."""
    lines = [
        f'  "{key}": {json.dumps(found["definitions"][key], sort_keys=True)}'
        for key in sorted(found["definitions"])
    ]
    text = f'{{\n"kinds": {json.dumps(found["kinds"], sort_keys=True)},\n"definitions": {{\n' + ",\n".join(
        lines
    )
    (SCHEMAS / name).write_text(text + "\n}\n}\n")


def main() -> None:
    SCHEMAS.mkdir(exist_ok=True)
    for release in RELEASES:
        version = release.removeprefix("v").rpartition(".")[0]
        write(f"kubernetes-{version}.json", kubernetes_schema(module(f"k8s.io/kubernetes@{release}")))
    crd = yaml.safe_load((module(OPERATOR) / PODMONITOR).read_text())
    (version,) = crd["spec"]["versions"]
    schema = reduce_schema(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    name = crd["spec"]["names"]["kind"]
    key = f"{crd['spec']['group']}/{version['name']}/{name}"
    write("podmonitor.json", {"kinds": {key: name}, "definitions": {name: schema}})


if __name__ == "__main__":
    sys.exit(main())

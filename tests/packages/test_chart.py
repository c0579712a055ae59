"""The Helm chart and the plain manifests: valid for each Kubernetes, with few rights, and a pod that runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from containers import Container, Mount, Process, oci_config, run_container
from patience import PATIENCE_S
from wire.serving import eventually

from agent.config.config import load
from agent.config.values import parse_listen_addresses
from agent.version import VERSION

pytestmark = pytest.mark.timeout(1200)

REPOSITORY = Path(__file__).parent.parent.parent
CHART = REPOSITORY / "deploy" / "helm" / "drahealth"
PLAIN = REPOSITORY / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = ("1.34", "1.35", "1.36", "1.37")
DRIVER = "gpu.example.com"
CONFIG = '[agent]\nperiod = "500ms"\n'
TERM = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
VARIANTS = {
    "default": {},
    "everything": {
        "config": CONFIG,
        "drivers": [DRIVER, "nic.example.com"],
        "image": {"repository": "registry.example.com/drahealth", "tag": "1.0"},
        "imagePullSecrets": [{"name": "registry"}],
        "cluster": {"enabled": True, "conditionKinds": ["gpu", "nic"], "taintRules": [DRIVER]},
        "nvsentinel": {"enabled": True, "remediate": True},
        "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [TERM]}}},
        "kernelLog": {"enabled": True},
        "maxUnavailable": 1,
        "nvidia": {"enabled": True},
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"example.com/c": "d"},
        "podMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": "a.*", "action": "drop"}],
        },
        "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"monitoring": "true"}}}]},
    },
    "nothing": {
        "customChecks": {"enabled": True},
        "kubelet": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "nodeSelector": {},
        "priorityClass": {"create": False},
        "serviceAccount": {"create": False},
        "tolerations": [],
    },
}  # fmt: skip
"""Values of the chart by name: together they render each line of the templates."""


@pytest.fixture(scope="session")
def helm() -> Path:
    """Return the program that `make test-packages` builds."""
    program = REPOSITORY / "build" / "tools" / "helm"
    if not program.exists():
        pytest.skip("build/tools/helm is not built: make test-packages")
    return program


def template(
    helm: Path, values: Mapping[str, object], version: str = "1.37", release: str = "drahealth"
) -> subprocess.CompletedProcess[str]:
    """Render the chart for a version of Kubernetes, as a release in a namespace of the same name."""
    command = [
        helm, "template", release, CHART, "--namespace", release, "--kube-version", f"{version}.0",
        "--values", "-",
    ]  # fmt: skip
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


def render_chart(
    helm: Path, values: Mapping[str, object], version: str = "1.37", release: str = "drahealth"
) -> dict[str, Any]:
    """Return the objects of the chart by kind."""
    done = template(helm, values, version, release)
    assert done.returncode == 0, done.stderr
    return {found["kind"]: found for found in yaml.safe_load_all(done.stdout)}


# --- the manifests ------------------------------------------------------------------------------------------


def schema_errors(found: Mapping[str, Any], version: str) -> list[str]:
    """Return what the schemas of a Kubernetes version have against an object."""
    for name in (f"kubernetes-{version}", "podmonitor"):
        schemas = json.loads((SCHEMAS / f"{name}.json").read_text())
        if definition := schemas["kinds"].get(f"{found['apiVersion']}/{found['kind']}"):
            schema = {"$ref": f"#/definitions/{definition}", "definitions": schemas["definitions"]}
            errors = jsonschema.Draft202012Validator(schema).iter_errors(found)
            return [f"{error.json_path}: {error.message}" for error in errors]
    return [f"Kubernetes {version} has no {found['apiVersion']}/{found['kind']}"]


def test_chart_passes_lint(helm: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rendered_objects_fit_the_schemas_of_kubernetes(helm: Path, variant: str, version: str) -> None:
    objects = render_chart(helm, VARIANTS[variant], version)
    assert ("PodMonitor" in objects, "ConfigMap" in objects) == (variant == "everything",) * 2
    assert [complaint for found in objects.values() for complaint in schema_errors(found, version)] == []


def test_numeric_names_are_texts(helm: Path) -> None:
    names = {
        "nvidia": {"enabled": True, "runtimeClassName": "1"},
        "priorityClass": {"name": "2"},
        "serviceAccount": {"name": "3"},
    }
    objects = render_chart(helm, {**VARIANTS["everything"], **names}, release="123")
    assert [complaint for found in objects.values() for complaint in schema_errors(found, "1.37")] == []
    assert {found["metadata"].get("namespace", "123") for found in objects.values()} == {"123"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_selinux_options_are_those_of_the_container(helm: Path, variant: str) -> None:
    objects = render_chart(helm, {**VARIANTS[variant], "seLinuxOptions": {"type": "spc_t"}})
    assert pod_spec(objects)["containers"][0]["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert [complaint for found in objects.values() for complaint in schema_errors(found, "1.37")] == []


def test_each_of_two_releases_has_a_priority_class(helm: Path) -> None:
    gpu = {"nvidia": {"enabled": True}}
    for release, values in (("drahealth-gpu", gpu), ("drahealth-cpu", {})):
        objects = render_chart(helm, values, release=release)
        assert objects["PriorityClass"]["metadata"]["name"] == release
        assert pod_spec(objects)["priorityClassName"] == release
    guide = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    assert "priorityClass.create=false" not in guide


@pytest.mark.parametrize("version", KUBERNETES)
def test_schemas_refuse_misspelt_missing_and_mistyped_fields(helm: Path, version: str) -> None:
    daemonset = render_chart(helm, {})["DaemonSet"]
    container = daemonset["spec"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    container["ports"][0]["containerPort"] = "http"
    del daemonset["spec"]["selector"]
    found = " ".join(schema_errors(daemonset, version))
    assert all(
        text in found for text in ("'volumeMount' was unexpected", "'http' is not of", "'selector' is a")
    )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"driver": [DRIVER]}, "additional properties 'driver' not allowed"),
        ({"seLinuxOptions": {"label": "spc_t"}}, "additional properties 'label' not allowed"),
        ({"port": "14680"}, "got string, want integer"),
        ({"port": 80}, "minimum: got 80, want 1,024"),
        ({"address": "localhost"}, "value must be one of '0.0.0.0', '[::]'"),
        ({"runtimeDir": "run"}, "does not match pattern"),
        ({"drivers": ["GPU.example.com"]}, "does not match pattern"),
        ({"drivers": ["gpu..example.com"]}, "does not match pattern"),
        ({"cluster": {"taintRules": [DRIVER, DRIVER]}}, "items at 0 and 1 are equal"),
        ({"cluster": {"conditionKinds": ["gpus"]}}, "value must be one of"),
        ({"nvsentinel": {"socket": "/run/c.sock"}}, "does not match pattern"),
        ({"maxUnavailable": "0%"}, "does not match pattern"),
        ({"podLabels": {"app.kubernetes.io/name": "a"}}, "invalid propertyName 'app.kubernetes.io/name'"),
        ({"podLabels": {"app.kubernetes.io/instance": "a"}}, "invalid propertyName"),
    ],
)
def test_invalid_values_are_refused_by_name(helm: Path, values: Mapping[str, object], complaint: str) -> None:
    done = template(helm, values)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize(
    ("file", "values"),
    [("drahealth.yaml", []), ("drahealth-cluster.yaml", ["--set", "cluster.enabled=true"])],
)
def test_plain_manifests_are_those_of_the_chart(helm: Path, file: str, values: list[str]) -> None:
    command = [REPOSITORY / "deploy" / "helm" / "manifests", helm, *values]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (PLAIN / file).read_text() == printed, "make manifests"


@pytest.mark.parametrize("version", KUBERNETES)
def test_plain_manifests_fit_the_schemas_of_kubernetes(version: str) -> None:
    files = yaml.safe_load((PLAIN / "kustomization.yaml").read_text())["resources"]
    objects = [found for file in files for found in yaml.safe_load_all((PLAIN / file).read_text())]
    kinds = ["Namespace", "PriorityClass", "NetworkPolicy", "ServiceAccount", "DaemonSet"]
    assert [found["kind"] for found in objects] == kinds
    assert [complaint for found in objects for complaint in schema_errors(found, version)] == []


def test_chart_and_changes_have_the_version_of_the_agent() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    headings = re.findall(
        r"^## \[(.*)\]( - \d{4}-\d\d-\d\d)?$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert next(name for name, _ in headings if name != "Unreleased") == VERSION


# --- the rights of the pod ----------------------------------------------------------------------------------


def pod_spec(objects: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = objects["DaemonSet"]["spec"]["template"]["spec"]
    return found


def test_default_pod_has_no_privilege_and_no_token(helm: Path) -> None:
    pod = pod_spec(render_chart(helm, {}))
    (container,) = pod["containers"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "readOnlyRootFilesystem": True,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_pod_with_custom_checks_has_three_capabilities(helm: Path) -> None:
    (container,) = pod_spec(render_chart(helm, {"customChecks": {"enabled": True}}))["containers"]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["KILL", "SETGID", "SETUID"]}
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_pod_mounts_only_the_paths_that_it_needs(helm: Path, is_enabled: bool) -> None:
    pod = pod_spec(render_chart(helm, {"kubelet": {"enabled": is_enabled}}))
    paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    kubelet = {"/var/lib/kubelet"} if is_enabled else set()
    assert paths == {"/run/drahealth", "/var/lib/drahealth", "/sys", "/proc"} | kubelet
    mounts = pod["containers"][0]["volumeMounts"]
    assert {mount["name"] for mount in mounts if not mount.get("readOnly")} == {"run", "state"}


def test_directories_of_the_node_may_have_any_name(helm: Path) -> None:
    name = '/a, b}/c "d" #\\e'
    values = {
        "runtimeDir": f"{name}/run",
        "stateDir": f"{name}/state",
        "kubelet": {"dir": f"{name}/kubelet"},
        "nvsentinel": {"enabled": True, "socket": f'{name}/nvsentinel/x, "y".sock'},
    }
    objects = render_chart(helm, values)
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod_spec(objects)["volumes"]
        if "hostPath" in volume
    }
    mounted = ("run", "state", "kubelet", "nvsentinel")
    assert {key: paths[key] for key in mounted} == {key: f"{name}/{key}" for key in mounted}
    config = tomllib.loads(objects["ConfigMap"]["data"]["cluster.toml"])
    assert config["nvsentinel"]["socket"] == '/run/nvsentinel/x, "y".sock'


ROLES = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def test_default_chart_grants_no_right(helm: Path) -> None:
    assert not set(ROLES) & set(render_chart(helm, {}))


def test_cluster_gives_the_pods_a_token_roles_and_a_way_to_the_api_server(helm: Path) -> None:
    values = {
        "cluster": {"enabled": True, "conditionKinds": ["gpu"]},
        "networkPolicy": {"apiServerPorts": [6443]},
    }
    objects = render_chart(helm, values)
    assert set(ROLES) <= set(objects)
    assert "ValidatingAdmissionPolicy" in objects
    assert "ValidatingAdmissionPolicy" not in render_chart(
        helm, {"cluster": {"enabled": True, "admissionPolicy": False}}
    )
    for kind in ROLES:
        for rule in objects[kind].get("rules", ()):
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
    pod = pod_spec(objects)
    assert pod["automountServiceAccountToken"] is True
    (subject,) = objects["ClusterRoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == (pod["serviceAccountName"], "drahealth")
    egress = objects["NetworkPolicy"]["spec"]["egress"]
    assert egress == [{"ports": [{"port": 6443, "protocol": "TCP"}]}]


def test_settings_of_cluster_are_a_drop_in_that_the_agent_reads(helm: Path, tmp_path: Path) -> None:
    cluster = {"enabled": True, "conditionKinds": ["gpu"], "taintRules": [DRIVER]}
    nvsentinel = {"enabled": True, "socket": "/var/run/sentinel/c.sock"}
    objects = render_chart(helm, {"cluster": cluster, "config": CONFIG, "nvsentinel": nvsentinel})
    (volume,) = (volume for volume in pod_spec(objects)["volumes"] if volume["name"] == "config")
    for item in volume["configMap"]["items"]:
        file = tmp_path / item["path"]
        file.parent.mkdir(exist_ok=True)
        file.write_text(objects["ConfigMap"]["data"][item["key"]])
    config = load({}, {}, default_file=tmp_path / "config.toml", needs_runtime_dir=False)
    assert (config.k8s_enabled, config.k8s_condition_kinds, config.k8s_events) == (True, ("gpu",), True)
    assert config.k8s_taint_rules == (DRIVER,)
    assert (str(config.nvsentinel_socket), config.nvsentinel_remediate) == ("/run/nvsentinel/c.sock", False)
    paths = {
        found_volume["name"]: found_volume["hostPath"]["path"]
        for found_volume in pod_spec(objects)["volumes"]
        if "hostPath" in found_volume
    }
    assert paths["nvsentinel"] == "/var/run/sentinel"
    assert config.period_ns == 500_000_000


@pytest.mark.parametrize(
    "text", [CONFIG, f"\n{CONFIG}", '  a = """\n    b\n c"""\n', "a = 1", "\t# tab\r\n", "# <&>"]
)
def test_text_of_config_reaches_the_agent_unchanged(helm: Path, text: str) -> None:
    assert render_chart(helm, {"config": text})["ConfigMap"]["data"]["config.toml"] == text


def test_null_in_place_of_a_default_is_a_valid_setting(helm: Path) -> None:
    cluster = {"enabled": True, "conditionKinds": None, "events": None, "taintRules": None}
    objects = render_chart(helm, {"cluster": cluster, "nvsentinel": {"enabled": True, "remediate": None}})
    settings = tomllib.loads(objects["ConfigMap"]["data"]["cluster.toml"])
    assert settings["k8s"] == {"enabled": True, "condition-kinds": [], "events": False, "taint-rules": []}
    assert settings["nvsentinel"]["remediate"] is False


def test_events_for_nvsentinel_alone_need_no_token(helm: Path) -> None:
    objects = render_chart(helm, {"nvsentinel": {"enabled": True}})
    assert not set(ROLES) & set(objects)
    assert pod_spec(objects)["automountServiceAccountToken"] is False
    assert "k8s" not in objects["ConfigMap"]["data"]["cluster.toml"]


@pytest.mark.parametrize(
    ("values", "features"),
    [
        ({}, {"conditions", "events"}),
        ({"events": False}, {"conditions"}),
        ({"events": False, "taintRules": [DRIVER]}, {"conditions", "taintRules"}),
    ],
)
def test_role_has_the_rules_of_the_enabled_features_only(
    helm: Path, values: Mapping[str, object], features: set[str]
) -> None:
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["cluster"]
    found = render_chart(helm, {"cluster": {"enabled": True, **values}})["ClusterRole"]["rules"]
    assert found == [rule for feature, own in rules.items() if feature in features for rule in own]


def test_network_policy_opens_the_probed_and_scraped_port_only(helm: Path) -> None:
    objects = render_chart(helm, {"port": 20000, "podMonitor": {"enabled": True}})
    (container,) = pod_spec(objects)["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 20000, "protocol": "TCP"}]
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}]}]
    assert "egress" not in policy
    assert [endpoint["port"] for endpoint in objects["PodMonitor"]["spec"]["podMetricsEndpoints"]] == ["http"]
    probes = [container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness", "readiness")]
    assert set(probes) == {"http"}
    selected = policy["podSelector"]["matchLabels"].items()
    assert selected <= objects["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(("values", "listen"), [({}, "0.0.0.0:14680"), ({"address": "[::]"}, "[::]:14680")])
def test_agent_of_the_pod_listens_at_the_address(
    helm: Path, values: Mapping[str, object], listen: str
) -> None:
    (container,) = pod_spec(render_chart(helm, values))["containers"]
    assert f"--listen={listen}" in container["args"]
    assert [str(address) for address in parse_listen_addresses([listen])] == [listen]


def test_pod_monitor_names_job_and_instance_as_alerts_expect(helm: Path) -> None:
    objects = render_chart(helm, {"podMonitor": {"enabled": True}})
    monitor = objects["PodMonitor"]["spec"]
    labels = objects["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    alerts = (REPOSITORY / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert set(re.findall(r'job="([^"]*)"', alerts)) == {labels[monitor["jobLabel"]]}
    (endpoint,) = monitor["podMetricsEndpoints"]
    node = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"}
    assert endpoint["relabelings"] == [node]
    assert "metricRelabelings" not in endpoint
    everything = render_chart(helm, VARIANTS["everything"])["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
    assert [rule["regex"] for rule in everything["metricRelabelings"]] == ["a.*"]


# --- the running pod ----------------------------------------------------------------------------------------

SECRET = "pods/0a1b/volumes/kubernetes.io~secret/token/token"
CHECKPOINT = "dra_manager_state"


def pod_config(objects: Mapping[str, Any], root: Path, directories: Path) -> dict[str, Any]:
    """Return the configuration of the pod's container, as the kubelet's runtime makes it from the manifest.

    Directories that the agent writes, and that of the kubelet, are in ``directories`` by the volume's name.
    """
    pod = pod_spec(objects)
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    fields = {"spec.nodeName": "node-7"}
    env = {
        entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }
    mounts = []
    for mount in container["volumeMounts"]:
        (volume,) = (found for found in pod["volumes"] if found["name"] == mount["name"])
        source: Path | None = directories / mount["name"]
        if mount["name"] in {"sys", "proc"}:
            source = Path(volume["hostPath"]["path"])
        elif "emptyDir" in volume:
            source = None
        elif "configMap" in volume:
            for name, content in objects["ConfigMap"]["data"].items():
                (directories / mount["name"] / name).write_text(content)
        is_slave = mount.get("mountPropagation") == "HostToContainer"
        mounts.append(Mount(mount["mountPath"], source, mount.get("readOnly", False), is_slave))
    process = Process(
        ["/opt/drahealth/bin/drahealth", *container["args"]], security["runAsUser"], security["runAsGroup"],
        env={"PATH": "/usr/bin", "PYTHONMALLOC": "malloc", **env},
    )  # fmt: skip
    return oci_config(root, process, mounts)


@pytest.fixture(scope="module")
def pod(
    helm: Path, image_root: Path, oci_runtime: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Container, Path]]:
    """Run the container of the DaemonSet's pod; return it and the directories of its volumes."""
    directories = tmp_path_factory.mktemp("volumes")
    for name in ("run", "state", "kubelet", "config"):
        (directories / name).mkdir(mode=0o755)
    (directories / "kubelet" / SECRET).parent.mkdir(parents=True)
    (directories / "kubelet" / SECRET).write_text("secret")
    (directories / "kubelet" / CHECKPOINT).write_text("{}")
    objects = render_chart(helm, {"config": CONFIG, "drivers": [DRIVER]})
    with run_container(oci_runtime, pod_config(objects, image_root, directories)) as container:
        end = time.monotonic() + PATIENCE_S
        while container.run("/usr/bin/drahealth", "status").returncode > 3:
            assert container.process.poll() is None, container.process.communicate()[0]
            assert time.monotonic() < end, "the agent does not answer"
            time.sleep(0.2)
        yield container, directories


def test_agent_of_the_pod_reports_the_node(pod: tuple[Container, Path]) -> None:
    container, directories = pod
    status = json.loads(container.run("/usr/bin/drahealth", "status", "-o", "json").stdout)
    assert status["node"] == "node-7"
    reports: list[Any] = []

    def is_read() -> bool:
        """Return whether the agent has read all sources, not only started."""
        report = json.loads(container.run("/usr/bin/drahealth", "watch", "--once", "-o", "json").stdout)
        reports.append(report)
        states = {source["name"]: source["state"] for source in report["sources"]}
        return {states[name] for name in ("cpus", "hugepages", "memory", "uevents", "devices.d")} == {"ok"}

    eventually(is_read, lambda: f"all sources ok in {reports[-1]['sources']}")
    report = reports[-1]
    assert {device["kind"] for device in report["devices"]} >= {"cpu", "memory"}
    assert (directories / "run" / "drivers" / f"{DRIVER}.sock").is_socket()
    assert (directories / "state" / "agent.lock").exists()


def test_settings_of_the_chart_are_those_of_the_agent(pod: tuple[Container, Path]) -> None:
    container, _ = pod
    printed = container.run("/usr/bin/drahealth", "config", "-o", "json").stdout
    assert '"500ms"' in printed
    assert "/etc/drahealth/config.toml" in printed
    values = {item["key"]: item["value"] for item in json.loads(printed)["settings"]}
    assert values["agent.node-name"] == "node-7"
    roots = {name: values[f"roots.{name}"] for name in ("sysfs", "procfs", "cgroupfs")}
    assert roots == {"sysfs": "/host/sys", "procfs": "/host/proc", "cgroupfs": "/host/sys/fs/cgroup"}


def test_bundle_of_the_pod_has_the_status_of_the_agent(pod: tuple[Container, Path]) -> None:
    container, _ = pod
    done = container.run("/usr/bin/drahealth", "bundle", "--list")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  status.json +[1-9].* KiB +state of the agent's process$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("probe", ["startup", "liveness", "readiness"])
def test_probes_of_the_pod_succeed(helm: Path, pod: tuple[Container, Path], probe: str) -> None:
    container, _ = pod
    (manifest,) = pod_spec(render_chart(helm, {}))["containers"]
    path, port = manifest[f"{probe}Probe"]["httpGet"]["path"], manifest["ports"][0]["containerPort"]
    assert ask(container, port, path).startswith("200 ")


def test_scraped_path_of_the_pod_has_metrics(helm: Path, pod: tuple[Container, Path]) -> None:
    container, _ = pod
    objects = render_chart(helm, {"podMonitor": {"enabled": True}})
    (endpoint,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    (manifest,) = pod_spec(objects)["containers"]
    answer = ask(container, manifest["ports"][0]["containerPort"], endpoint["path"])
    assert answer.startswith("200 ")
    assert "drahealth_" in answer


def ask(container: Container, port: int, path: str) -> str:
    """Return status and body of an answer of the agent over HTTP."""
    program = (
        f"import http.client; connection = http.client.HTTPConnection('127.0.0.1', {port}); "
        f"connection.request('GET', '{path}'); answer = connection.getresponse(); "
        "print(answer.status, answer.read().decode())"
    )
    done = container.run("/opt/drahealth/bin/python", "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_in(container: Container, expression: str) -> str:
    """Return the value of an expression of Python in the container."""
    program = f"import os, pathlib; print({expression})"
    done = container.run("/opt/drahealth/bin/python", "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_container_sees_the_processes_and_adapters_of_the_node(pod: tuple[Container, Path]) -> None:
    container, _ = pod
    first = read_in(container, "pathlib.Path('/host/proc/1/comm').read_text()")
    assert first == Path("/proc/1/comm").read_text().strip()
    adapters = read_in(container, "sorted(os.listdir('/host/sys/class/net'))")
    assert adapters == str(sorted(os.listdir("/sys/class/net")))


def test_container_reads_the_kubelets_files_but_no_secret(pod: tuple[Container, Path]) -> None:
    container, _ = pod
    assert read_in(container, f"pathlib.Path('/var/lib/kubelet/{CHECKPOINT}').read_text()") == "{}"
    assert read_in(container, "os.listdir('/var/lib/kubelet/pods')") == "[]"


def test_container_writes_to_two_directories_only(pod: tuple[Container, Path]) -> None:
    container, _ = pod
    places = (
        "/",
        "/etc/drahealth",
        "/host/sys",
        "/host/proc",
        "/tmp",
        "/var/lib/kubelet",
        "/var/lib/kubelet/pods",
    )
    writable = f"[place for place in {places!r} if os.access(place, os.W_OK)]"
    assert read_in(container, writable) == "[]"
    ours = ("/run/drahealth", "/var/lib/drahealth")
    assert read_in(container, f"[place for place in {ours!r} if os.access(place, os.W_OK)]") == str(
        list(ours)
    )


def test_process_of_the_container_has_no_capability(pod: tuple[Container, Path]) -> None:
    container, _ = pod
    status = read_in(container, "pathlib.Path('/proc/1/status').read_text()")
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(lines[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert lines["NoNewPrivs"] == "1"

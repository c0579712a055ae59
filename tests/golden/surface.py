"""Names and numbers that operators, scripts and other programs rely on."""

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from agent.cli.main import VERBS
from agent.cli.subcommand import EXIT_OF_ERROR, EXIT_OF_SEVERITY
from agent.config.config import SETTINGS, Config
from agent.config.config import load as load_config
from agent.model.settings import HISTORY_FILE
from agent.serve import grpc_servers
from agent.serve.agent_api import service as agent_api
from agent.serve.dra_plugin import instance_locks
from agent.serve.driver_link import service as driver_link
from agent.sources import declaration_file, kubelet_files
from agent.store import driver_files, gpu_fault_file, history_file
from golden.commands import run
from golden.files import INPUTS, load
from golden.plain import plain

ROOT: Final = Path(__file__).resolve().parents[2]
NO_FILE: Final = Path("/nothing/drahealth.toml")


# --- the command line --------------------------------------------------------------------------------------


def flags() -> dict[str, Any]:
    """Return the flags of each verb with their choices, from what ``--help`` prints; not its texts."""
    found = {}
    for verb in ("", *VERBS):
        code, out, _ = run([*filter(None, [verb]), "--help"])
        usage, _, options = out.partition("usage:")[2].partition("\n\n")
        heads = re.findall(r"^  (-.*?)(?:  |$)", options, re.MULTILINE)
        found[verb] = {
            "exit": code,
            "flags": sorted({flag for head in heads for flag in re.findall(r"(?:^|, )(--?[a-z-]+)", head)}),
            "choices": sorted(re.findall(r"(--?[a-z-]+) \{([^}]*)\}", re.sub(r"\s+", " ", usage))),
        }
    return found


def exit_codes() -> dict[str, Any]:
    """Return the exit code of each severity and error, and of command lines that end early."""
    commands = load(INPUTS / "settings.json")["commands"]
    return {
        "severities": {int(severity): code for severity, code in EXIT_OF_SEVERITY.items()},
        "errors": [code for _, code in EXIT_OF_ERROR],
        "commands": {" ".join(argv): run(argv)[0] for argv in commands},
    }


# --- configuration -----------------------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    """Return each key of the configuration with its flag, its variable and its default."""
    config = Config(node_name="node-1")
    return {
        setting.key: {
            "flag": setting.flag,
            "variable": setting.variable if setting.flag else "",
            "many": setting.is_repeatable,
            "switch": setting.is_switch,
            "default": plain(getattr(config, setting.field)),
        }
        for setting in SETTINGS
    }


def limits() -> dict[str, dict[str, Any]]:
    """Return by key what each value of ``inputs/settings.json`` is read as; what is refused is left out."""
    values = load(INPUTS / "settings.json")["values"]
    found: dict[str, dict[str, Any]] = {}
    for setting in SETTINGS:
        found[setting.key] = {}
        for value in values:
            try:
                read = setting.parse(value)
                setting.check_limits(read)
            except (ValueError, TypeError):
                continue
            found[setting.key][json.dumps(value)] = _plain_setting(read)
    return found


def _plain_setting(value: Any) -> Any:
    """Return a value of a setting as plain JSON."""
    if isinstance(value, tuple):
        return [_plain_setting(inner) for inner in value]
    if isinstance(value, Path | str) and not isinstance(value, Enum):
        return str(value).replace(os.getcwd(), "<cwd>")
    return plain(value)


def load_configurations() -> dict[str, Any]:
    """Return the configuration that a file, the environment and flags make, alone and together."""
    inputs = load(INPUTS / "settings.json")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.toml"
        file.write_text(inputs["file"])
        found = {
            "file": load_config({}, {}, file=file, needs_runtime_dir=False),
            "environ": load_config({}, inputs["environ"], default_file=NO_FILE, needs_runtime_dir=False),
            "flags": load_config(
                inputs["flags"], {"DRAHEALTH_NODE_NAME": "n"}, default_file=NO_FILE, needs_runtime_dir=False
            ),
            "all": load_config(inputs["flags"], inputs["environ"], file=file, needs_runtime_dir=False),
        }
    return {
        name: {setting.key: _plain_setting(getattr(config, setting.field)) for setting in SETTINGS}
        for name, config in found.items()
    }


# --- files, sockets and messages ---------------------------------------------------------------------------


def file_names() -> dict[str, Any]:
    """Return the names of files and sockets that outlive a process or are shared with another program."""
    return {
        "faults": [gpu_fault_file.FILE, gpu_fault_file.VERSION],
        "prepares": [driver_files.LEDGER_FILE, driver_files.LOCK, driver_files.VERSION],
        "taints": [driver_files.TAINTS_FILE, driver_files.VERSION],
        "locks": [instance_locks.FILE],
        "history": HISTORY_FILE,
        "observed": history_file.period_file_path(Path(HISTORY_FILE)).name,
        "declarations": [declaration_file.DIRECTORY, declaration_file.SUFFIX],
        "kubelet": [kubelet_files.CLAIMS_FILE, kubelet_files.HEALTH_FILE],
        "sockets": list(grpc_servers.socket_names(["a.example.com"])),
        "methods": [agent_api.STATUS, agent_api.WATCH, driver_link.SERVICE],
    }


def messages() -> dict[str, Any]:
    """Return each method of our proto files with the fields of its messages by number, unnamed."""
    sources = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "set"
        code = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--descriptor_set_out={out}", *sources])
        assert code == 0, "protoc refuses the proto files"
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    found = {}
    for file in files:
        kinds: dict[str, Any] = {}
        _collect(kinds, f".{file.package}", file.message_type, file.enum_type)
        for service in file.service:
            for method in service.method:
                found[f"/{file.package}.{service.name}/{method.name}"] = {
                    "request": _fields(method.input_type, kinds),
                    "reply": _fields(method.output_type, kinds),
                    "streams": [method.client_streaming, method.server_streaming],
                }
    return found


def _collect(kinds: dict[str, Any], prefix: str, messages: Any, enums: Any) -> None:
    kinds.update({f"{prefix}.{kind.name}": kind for kind in (*messages, *enums)})
    for kind in messages:
        _collect(kinds, f"{prefix}.{kind.name}", kind.nested_type, kind.enum_type)


def _fields(name: str, kinds: Mapping[str, Any]) -> Any:
    kind = kinds[name]
    if isinstance(kind, descriptor_pb2.EnumDescriptorProto):
        return sorted(value.number for value in kind.value)
    return [
        [
            field.number,
            descriptor_pb2.FieldDescriptorProto.Type.Name(field.type),
            descriptor_pb2.FieldDescriptorProto.Label.Name(field.label),
            field.oneof_index if field.HasField("oneof_index") else None,
            _fields(field.type_name, kinds) if field.type_name else None,
        ]
        for field in sorted(kind.field, key=lambda field: int(field.number))
    ]


def budgets() -> dict[str, Any]:
    """Return the names of what the benchmarks are held to, by table."""
    tables = tomllib.loads((ROOT / "benchmarks" / "budgets.toml").read_text())
    return {
        name: {
            key: sorted(value) if isinstance(value, dict) else None for key, value in sorted(table.items())
        }
        for name, table in tables.items()
    }


SURFACE: Final[Mapping[str, Callable[[], Any]]] = {
    "flags": flags,
    "exit-codes": exit_codes,
    "settings": settings,
    "limits": limits,
    "loaded": load_configurations,
    "file-names": file_names,
    "messages": messages,
    "budgets": budgets,
}
"""Readers by the name of their golden file."""

"""``drahealth config``: values with origins, checked files, and a JSON schema that agrees with the parser."""

import json
import re
import tomllib
from typing import Any

import pytest
from test_config import EVERYTHING

from agent.cli.config import config_schema
from agent.cli.main import main
from agent.config.config import SETTINGS, load, read_config


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DRAHEALTH_CONFIG", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def full_config_file(tmp_path):
    path = tmp_path / "all.toml"
    path.write_text(EVERYTHING)
    return path


def violations(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Return what a value has against a schema of the keywords that :func:`config_schema` uses."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{place}: {value!r} not in {schema['enum']}"]
    kind = schema["type"]
    if isinstance(kind, list):
        return min((violations(value, {**schema, "type": name}, place) for name in kind), key=len)
    if not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool)):
        return [f"{place}: {value!r} is no {kind}"]
    found: list[str] = []
    if kind == "object":
        found += [f"{place}: {name} missing" for name in schema.get("required", ()) if name not in value]
        for name, inner in value.items():
            by_pattern = [s for p, s in schema.get("patternProperties", {}).items() if re.search(p, name)]
            inner_schema = schema.get("properties", {}).get(name) or next(iter(by_pattern), None)
            inner_schema = inner_schema or schema["additionalProperties"]
            if inner_schema is False:
                found.append(f"{place}: {name} unknown")
            else:
                found += violations(inner, inner_schema, f"{place}.{name}")
    elif kind == "array":
        found += [text for inner in value for text in violations(inner, schema["items"], f"{place}[]")]
    elif kind == "string" and not re.search(schema.get("pattern", ""), value):
        found.append(f"{place}: {value!r} does not match")
    elif kind == "integer" and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{place}: {value!r} out of range")
    return found


def test_shown_configuration_is_a_file_with_the_same_values(full_config_file, tmp_path, capsys):
    assert main(["config", "--config", str(full_config_file)]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert read_config(shown) == read_config(full_config_file)


def test_shown_defaults_are_a_file_with_the_same_values(tmp_path, capsys):
    assert main(["config", "--config", "/dev/null"]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    config = load({}, {"XDG_RUNTIME_DIR": str(tmp_path)}, file=shown)
    assert config == load({}, {"XDG_RUNTIME_DIR": str(tmp_path)}, default_file=tmp_path / "absent")


def test_derived_heartbeat_is_shown_within_its_limit(tmp_path, capsys):
    (tmp_path / "a.toml").write_text('[stream]\nlease = "20s"')
    assert main(["config", "--config", str(tmp_path / "a.toml")]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert read_config(shown).heartbeat_s == 6.666


def test_each_shown_value_has_its_origin(full_config_file, capsys, monkeypatch):
    monkeypatch.setenv("DRAHEALTH_NODE_NAME", "worker-8")
    assert main(["config", "--config", str(full_config_file), "--period", "2s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    origins = {name.strip(): origin for name, _, origin in (line.partition("# ") for line in lines) if name}
    assert origins['node-name = "worker-8"'] == "DRAHEALTH_NODE_NAME"
    assert origins['period = "2s"'] == "--period"
    assert origins["[gpu.xids]"] == origins["events = 3"] == str(full_config_file)


def test_document_has_all_settings_with_origin(full_config_file, capsys):
    assert main(["config", "-o", "json", "--config", str(full_config_file), "--period", "2s"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == [str(full_config_file)]
    settings = {entry.pop("key"): entry for entry in document["settings"]}
    assert settings.keys() == {setting.key for setting in SETTINGS}
    assert settings["agent.period"] == {
        "value": "2s",
        "origin": {"kind": "flag", "name": "--period"},
        "reloads": False,
    }
    assert settings["throttle.window"] == {
        "value": "30s",
        "origin": {"kind": "file", "name": str(full_config_file)},
        "reloads": True,
    }


def test_check_of_a_valid_file_succeeds(full_config_file, capsys):
    assert main(["config", "check", str(full_config_file)]) == 0
    assert capsys.readouterr().out == f"{full_config_file}: valid\n"


def test_check_of_an_invalid_file_names_key_and_limit(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text("[throttle]\nevents = 0")
    assert main(["config", "check", str(file)]) == 78
    assert f"{file}: throttle.events: 0 is below the limit of 1" in capsys.readouterr().err


def test_check_refuses_a_web_configuration_without_address(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text('[http]\nweb-config = "/etc/web.yml"')
    assert main(["config", "check", str(file)]) == 78
    assert "http.web-config: /etc/web.yml has no effect without an address" in capsys.readouterr().err
    assert main(["config", "check", "--config", str(file), "--listen", "localhost"]) == 0
    assert main(["config", "show", "--config", str(file)]) == 0


def test_config_check_without_file_checks_the_agents_files(full_config_file, capsys):
    assert main(["config", "check", "--config", str(full_config_file), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "apiVersion": "drahealth/v1",
        "valid": True,
        "files": [str(full_config_file)],
    }
    assert main(["config", "check", "--config", str(full_config_file), "--period", "1ms"]) == 78
    assert "--period: 1ms is below the limit of 10ms" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--config", "/none.toml"], ["--period", "1ms"], ["--kmsg-any-facility"]])
def test_check_of_a_file_refuses_other_settings(full_config_file, capsys, flags):
    assert main(["config", "check", *flags, str(full_config_file)]) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    refusal = f"FILE '{full_config_file}' needs no settings; leave out FILE, or {flags[0]}"
    assert captured.err == f"drahealth: {refusal}\n"


def test_file_without_check_is_refused(full_config_file, capsys):
    assert main(["config", "show", str(full_config_file)]) == 64
    assert "name the file with --config" in capsys.readouterr().err


def test_schema_accepts_a_file_with_every_key(capsys):
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert violations(tomllib.loads(EVERYTHING), schema) == []


@pytest.mark.parametrize(
    "text",
    [
        "[throttle]\nevents = 0",
        "[throttle]\nevents = true",
        "[throttle]\nwrong = 1",
        "[gpu]\nwatch = 1",
        '[gpu.xids]\n31 = "fatal"',
        '[gpu.xids]\n1000 = "info"',
        "[agent]\nperiod = 1",
        '[agent]\nperiod = "1 week"',
        "[agent]\ndrivers = [1]",
        '[[prepare.patterns]]\nmatch = "x"',
        "[cgroups]\nheld-memory = 1024",
        '[cgroups]\nheld-memory = "1024"',
    ],
)
def test_schema_and_parser_refuse_the_same_file(tmp_path, text):
    file = tmp_path / "a.toml"
    file.write_text(text)
    assert violations(tomllib.loads(text), config_schema())
    assert main(["config", "check", str(file)]) == 78


@pytest.mark.parametrize("size", ["0", '"0"', '"4 MiB"', '"32MiB"'])
def test_schema_and_parser_accept_the_same_size(tmp_path, size):
    file = tmp_path / "a.toml"
    file.write_text(text := f"[cgroups]\nheld-memory = {size}")
    assert violations(tomllib.loads(text), config_schema()) == []
    assert main(["config", "check", str(file)]) == 0


def test_check_of_an_empty_path_is_refused(capsys):
    assert main(["config", "check", ""]) == 64
    assert "the value after 'check' is empty; write a value or omit the argument" in capsys.readouterr().err


def test_schema_has_meaning_and_default_of_each_setting():
    for setting in SETTINGS:
        leaf: dict[str, Any] = config_schema()
        for name in setting.key.split("."):
            leaf = leaf["properties"][name]
        assert leaf["description"]
        if "default" in leaf:
            assert setting.kind.show(setting.parse(leaf["default"])) == leaf["default"]

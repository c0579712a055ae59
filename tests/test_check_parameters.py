"""Opaque parameters are checked like in a prepare before anything is allocated: library and command."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from agent.cli.main import main
from agent.model.claim import ClaimConfig
from agent.prepare.claim_parser import Parameters, check_parameters, decode_parameters
from agent.prepare.errors import BadConfigError

CARD: Final = "card.example.com"
VERSION: Final = f"{CARD}/v1"


class CardParameters(Parameters, frozen=True):
    """Parameters of the test's driver."""

    mode: str
    flash_s: float = 0

    def __post_init__(self) -> None:
        if not 0 <= self.flash_s <= 40:
            raise ValueError(f"flash_s {self.flash_s:g} is not within 0 and 40")


KINDS: Final = {f"{VERSION}/CardParameters": CardParameters}


def parameters(**fields: object) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": "CardParameters", **fields}


def config(given: object, driver: str = CARD, **more: object) -> dict[str, Any]:
    return {"opaque": {"driver": driver, "parameters": given}, **more}


def claim(*configs: Mapping[str, Any]) -> dict[str, Any]:
    return resource("ResourceClaim", {"devices": {"config": list(configs)}})


def template(*configs: Mapping[str, Any]) -> dict[str, Any]:
    return resource("ResourceClaimTemplate", {"spec": {"devices": {"config": list(configs)}}})


def device_class(*configs: Mapping[str, Any]) -> dict[str, Any]:
    return resource("DeviceClass", {"config": list(configs)})


def resource(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": "it", "namespace": "default"}
    return {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


Make = Callable[..., dict[str, Any]]
GOOD: Final = parameters(mode="fast")
WRONG: Final[tuple[object, ...]] = (
    parameters(),
    parameters(mode="fast", flash_s=41),
    parameters(mode="fast", colour="red"),
    {**GOOD, "kind": "CardParams"},
    {"mode": "fast"},
    [1],
    None,
)


@pytest.mark.parametrize("given", [GOOD, *WRONG])
def test_check_has_the_error_of_the_prepare(given: object) -> None:
    [check] = check_parameters(claim(config(given, requests=["r"])), KINDS)
    if not isinstance(given, dict):
        assert check.error is not None
        assert str(check.error).startswith("spec.devices.config[0].opaque.parameters: is ")
        return
    error = decoding_error(given)
    assert (check.error is None) == (error is None)
    if check.error is not None and error is not None:
        assert (check.error.code, str(check.error), check.error.requests) == (
            error.code,
            str(error),
            error.requests,
        )


def decoding_error(given: Mapping[str, object]) -> BadConfigError | None:
    """Return the error with which a prepare would fail."""
    try:
        decode_parameters(ClaimConfig("FromClaim", ("r",), given), KINDS)
    except BadConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("make", "path"),
    [(claim, "spec.devices"), (template, "spec.spec.devices"), (device_class, "spec")],
)
def test_each_kind_of_object_is_checked_at_its_path(make: Make, path: str) -> None:
    others = config({"any": "thing"}, driver="nic.example.com")
    checks = check_parameters(make(config(GOOD), others, config(parameters()), {}), KINDS, CARD)
    assert [(check.path, check.driver, check.error is None) for check in checks] == [
        (f"{path}.config[0].opaque.parameters", CARD, True),
        (f"{path}.config[2].opaque.parameters", CARD, False),
    ]


def test_parameters_without_types_are_checked_for_size_version_and_kind() -> None:
    large = {**GOOD, "mode": "x" * 10_241}
    size = len(json.dumps(large, separators=(",", ":")))
    checks = check_parameters(claim(*map(config, [GOOD, parameters(), {"mode": "fast"}, large])))
    assert [check.error and str(check.error) for check in checks] == [
        None,
        None,
        "the parameters have no apiVersion",
        f"spec.devices.config[3].opaque.parameters: parameters of {size} bytes, limit 10240",
    ]


@pytest.mark.parametrize("make", [claim, template, device_class])
def test_object_without_parameters_has_no_checks(make: Make) -> None:
    assert check_parameters(make(), KINDS) == ()
    assert check_parameters(resource(make()["kind"], {}), KINDS) == ()


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (resource("Pod", {}), "'Pod' of 'resource.k8s.io/v1' is none of ResourceClaim, "),
        ({**claim(), "apiVersion": "v1"}, "'ResourceClaim' of 'v1' is none of"),
        (claim({"opaque": 1}), "spec.devices.config"),
        (resource("ResourceClaim", {"devices": 1}), "spec.devices"),
    ],
)
def test_other_objects_are_refused_with_their_path(obj: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_parameters(obj, KINDS)


# --- command -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command on objects, in a directory with a driver's module."""
    (tmp_path / "card_kinds.py").write_text(
        "import drahealth\n\n\nclass CardParameters(drahealth.Parameters, frozen=True):\n    mode: str\n\n\n"
        f"KINDS = {{'{VERSION}/CardParameters': CardParameters}}\nNOT_KINDS = [1]\n"
    )
    monkeypatch.chdir(tmp_path)

    def run(*words: str, objects: object) -> tuple[int, str, str]:
        (tmp_path / "objects.json").write_text(json.dumps(objects))
        code = main(["classify", "--parameters", "objects.json", *words])
        return code, *capsys.readouterr()

    return run


Run = Callable[..., tuple[int, str, str]]
WITH_KINDS: Final = ("--kinds", "card_kinds:KINDS")


def test_command_shows_the_line_that_the_kubelet_would_get(run: Run) -> None:
    code, out, err = run(*WITH_KINDS, objects=template(config(parameters(), requests=["r"]), config(GOOD)))
    assert (code, err) == (2, "")
    assert "[class=bad-config code=config.decode request=r retry=never]" in out
    assert "ResourceClaimTemplate default/it  spec.spec.devices.config[1].opaque.parameters  ok" in out


def test_command_checks_every_object_of_a_list_as_json(run: Run) -> None:
    items = [claim(config(GOOD)), {"apiVersion": "v1", "kind": "Service"}, device_class(config(parameters()))]
    code, out, _ = run(*WITH_KINDS, "-o", "json", objects={"kind": "List", "items": items})
    found = json.loads(out)["parameters"]
    assert code == 2
    assert [(entry["kind"], entry["verdict"] and entry["verdict"]["code"]) for entry in found] == [
        ("ResourceClaim", None),
        ("DeviceClass", "config.decode"),
    ]


def test_command_exits_with_0_for_correct_parameters(run: Run) -> None:
    assert run(*WITH_KINDS, objects=claim(config(GOOD)))[0] == 0
    assert run(*WITH_KINDS, "--driver", "nic.example.com", objects=claim(config(parameters())))[:2] == (
        0,
        "no opaque parameters\n",
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--kinds", "card_kinds"), "--kinds card_kinds: is not MODULE:NAME"),
        (("--kinds", "no_module:KINDS"), "--kinds no_module:KINDS: ModuleNotFoundError"),
        (("--kinds", "card_kinds:NONE"), "--kinds card_kinds:NONE: AttributeError"),
        (
            ("--kinds", "card_kinds:NOT_KINDS"),
            "is not a mapping of '<apiVersion>/<kind>' to drahealth.Parameters",
        ),
        (("--errno", "ENOSPC"), "--parameters cannot be combined with TEXT"),
    ],
)
def test_command_refuses_wrong_arguments(run: Run, words: tuple[str, ...], error: str) -> None:
    code, _, err = run(*words, objects=claim(config(GOOD)))
    assert code == 64
    assert error in err


def test_command_refuses_a_file_without_claims(run: Run) -> None:
    code, _, err = run(objects={"apiVersion": "v1", "kind": "Pod"})
    assert code == 64
    assert "objects.json: has no object of kind ResourceClaim or ResourceClaimTemplate or DeviceClass" in err


def test_object_whose_kind_is_a_list_counts_as_another_kind(run: Run) -> None:
    assert run(objects={"apiVersion": "v1", "kind": []})[0] == 64
    assert run(objects=[{"kind": []}, claim(config(GOOD))])[0] == 0


def test_names_with_control_characters_are_cleaned(run: Run) -> None:
    odd = claim(config(GOOD)) | {"metadata": {"namespace": "n\x1b[2J", "name": "evil\x1b]0;owned\x07"}}
    _, out, _ = run(objects=odd)
    assert out.startswith("ResourceClaim n\ufffd[2J/evil\ufffd]0;owned\ufffd  ")


def test_kinds_without_parameters_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "text", *WITH_KINDS]) == 64
    assert "--kinds and --driver need --parameters" in capsys.readouterr().err

"""Documents of ``-o json`` for reports and status."""

import json
from dataclasses import replace

from cli_reports import BUSY, GPUS, NOW_S, SHRUNK, UNREADABLE, device, report
from test_cli_render import STATUS

from agent.cli.output.json import process_documents, report_document, status_document
from agent.model.health import Health, Repair, Severity
from agent.model.report import AgentStatus, RepairCount
from agent.sources.gpu_os_facts import ProcessFacts


def test_unhealthy_device_has_its_causes_with_advice():
    (entry,) = report_document(report(device("hugepages-2mi-node0", SHRUNK)))["devices"]
    assert entry == {
        "driver": "",
        "pool": "worker-7",
        "name": "hugepages-2mi-node0",
        "kind": "hugepages",
        "health": "Unhealthy",
        "severity": "unhealthy",
        "message": "mem.hugepages.pool_shrunk: 500 pages, 512 at start",
        "since": "2026-11-21T10:03:52Z",
        "lastVerified": "2026-11-21T10:04:03Z",
        "timeoutSeconds": 30,
        "causes": [
            {
                "code": "mem.hugepages.pool_shrunk",
                "severity": "unhealthy",
                "blame": "configuration",
                "evidence": "500 pages, 512 at start",
                "advice": SHRUNK.advice,
                "since": "2026-11-21T10:03:52Z",
                "repair": "none",
            }
        ],
        "attributes": {},
        "repair": "none",
    }


def test_device_and_causes_have_their_repair():
    reset, reboot = (replace(SHRUNK, repair=repair) for repair in (Repair.RESET_DEVICE, Repair.REBOOT_NODE))
    sick, well = report_document(report(device("gpu-0", reset, reboot), device("gpu-1")))["devices"]
    assert [cause["repair"] for cause in sick["causes"]] == ["reset-device", "reboot-node"]
    assert (sick["repair"], well["repair"]) == ("reboot-node", "none")


def test_repair_of_a_faulty_device_without_causes_is_null():
    unhealthy = device("gpu-0", SHRUNK)._replace(causes=())
    assert report_document(report(unhealthy))["devices"][0]["repair"] is None


def test_device_has_its_hardware_attributes():
    documents = {d["name"]: d for d in report_document(GPUS)["devices"]}
    assert documents["gpu-1"]["attributes"] == {
        "uuid": "GPU-00000001", "pciBusId": "0000:1c:00.0", "serial": "1650001",
        "product": "NVIDIA A100-SXM4-40GB", "driver": "570.86.15",
    }  # fmt: skip
    assert len(documents) == 21, "the table folds MIG instances, JSON does not"


def test_report_has_its_keys_in_order():
    document = report_document(BUSY)
    assert list(document) == [
        "apiVersion", "node", "at", "devices", "notes", "notApplicable", "notEvaluated", "cleared", "sources",
        "cgroups",
    ]  # fmt: skip
    assert document["apiVersion"] == "drahealth/v1"
    assert document["node"] == "worker-7"
    assert document["at"] == "2026-11-21T10:04:04Z"


def test_health_has_three_values_and_severity_five():
    pairs = {(d["health"], d["severity"]) for d in report_document(BUSY)["devices"]}
    assert pairs == {
        ("Healthy", "ok"), ("Healthy", "degraded"), ("Unhealthy", "unhealthy"), ("Unknown", "unknown")
    }  # fmt: skip
    assert {h.name.capitalize() for h in Health} == {"Healthy", "Unhealthy", "Unknown"}
    assert {s.name.lower() for s in Severity} == {"ok", "info", "degraded", "unknown", "unhealthy"}


def test_notes_and_rules_without_a_result_are_listed():
    document = report_document(BUSY)
    assert [(note["subject"][:8], note["code"], note["severity"]) for note in document["notes"]] == [
        ("pod 0f3c", "cgroup.hugetlb.max_hit", "info")
    ]
    assert document["notApplicable"][2] == {
        "device": "", "code": "cgroup.hugetlb.max_hit", "reason": "no hugetlb controller"
    }  # fmt: skip
    assert document["notEvaluated"][0]["reason"] == "needs 60 s of history"
    assert document["cgroups"] == {"watched": 214, "dropped": 2, "unwatched": 0}


def test_source_has_the_wall_time_of_its_last_read():
    failing = report_document(BUSY)["sources"][2]
    assert failing == {
        "name": "hugepages",
        "state": "failing",
        "lastRead": "2026-11-21T10:04:01Z",
        "periodSeconds": 1.0,
        "failures": 3,
        "detail": "hugepages-1048576kB/nr_hugepages: Input/output error",
        "vital": True,
    }


def test_source_never_read_has_no_time():
    never = BUSY.sources[0]._replace(beat_ns=0)
    assert report_document(report(sources=(never,)))["sources"][0]["lastRead"] is None


def test_processes_have_every_field():
    facts = ProcessFacts("kubelet", 7, NOW_S - 60, 1.234, 88 << 20, 24)
    assert process_documents([facts]) == [
        {
            "name": "kubelet",
            "pid": 7,
            "since": "2026-11-21T10:03:04Z",
            "cpuSeconds": 1.23,
            "rssBytes": 88 << 20,
            "threads": 24,
        }
    ]


def test_status_has_every_field():
    document = status_document(STATUS)
    assert document["devices"] == {"unhealthy": 1, "ok": 2}
    assert document["repairs"] == {}
    counts = (RepairCount(Repair.REBOOT_NODE, 1), RepairCount(Repair.RESET_DEVICE, 7))
    with_repairs = status_document(replace(STATUS, repairs=counts))
    assert list(with_repairs["repairs"].items()) == [("reboot-node", 1), ("reset-device", 7)]
    assert document["lastReport"] == "2026-11-21T10:04:00Z"
    assert document["subscribers"][1] == {
        "socket": "drivers/gpu.example.com.sock",
        "streams": 2,
        "connections": 3,
    }
    assert document["core"]["wakes"] == 3
    assert status_document(AgentStatus("0.1.0", 42, NOW_S, 0.1, 1, 4, 31))["lastReport"] is None


def test_any_text_is_valid_json():
    odd = device("a\ud800b", UNREADABLE, message="\x1b[31m\n")
    assert json.loads(json.dumps(report_document(report(odd))))["devices"][0]["message"] == "\x1b[31m\n"
    assert json.dumps(report_document(BUSY)).isascii()
    json.dumps(status_document(STATUS))

"""The fake NVML through pynvml: loss, hangs, failures, resets, driver reloads, repartitioning."""

from pathlib import Path

import pytest
from fake_nvml import fake_nvml, play

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


def test_lost_gpu_is_counted_and_every_call_returns_15(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile h100 gpus=3"),
        """
        events, uuid = watch(*gpus), n.nvmlDeviceGetUUID(gpus[1])
        send("gpu 1 lost")
        e = n.nvmlEventSetWait_v2(events, 60_000)
        calls = [(n.nvmlDeviceGetUUID, gpus[1]), (n.nvmlDeviceGetIndex, gpus[1]),
                 (n.nvmlDeviceGetFieldValues, gpus[1], [4]), (n.nvmlDeviceGetHandleByIndex, 1),
                 (n.nvmlDeviceGetHandleByUUID, uuid), (n.nvmlDeviceGetPciInfo_v3, gpus[1])]
        answer = [n.nvmlDeviceGetCount(), e.eventType, {refused(*c) for c in calls} == {15},
                  n.nvmlDeviceGetUUID(gpus[0]) != n.nvmlDeviceGetUUID(gpus[2])]
        send("gpu 1 back")
        answer.append(n.nvmlDeviceGetUUID(gpus[1]) == uuid)
        """,
    )
    assert answer == [3, 0x4000, True, True, True]


def test_hang_blocks_its_call_on_its_gpu_until_released(tmp_path: Path) -> None:
    fake = fake_nvml(tmp_path, "profile h100 gpus=2", "gpu 1 hang nvmlDeviceGetFieldValues")
    answer = play(
        fake,
        """
        done = []
        thread = threading.Thread(target=lambda: done.append(fields(gpus[1], 4)))
        thread.start()
        while send("gpu 1 hung") == "0":
            time.sleep(0.001)
        answer = [fields(gpus[0], 4), n.nvmlDeviceGetTemperature(gpus[1], 0), list(done)]
        send("gpu 1 release")
        thread.join()
        answer += [done, send("gpu 1 hung")]
        """,
    )
    assert answer == [[0], 33, [], [[0]], "0"]


def test_hang_with_the_drivers_lock_blocks_every_gpu(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile h100 gpus=2"),
        """
        send("gpu 1 hang nvmlDeviceGetTemperature lock")
        done = []
        def ask(gpu):
            done.append([gpu, n.nvmlDeviceGetTemperature(gpus[gpu], 0)])
        threads = []
        for gpu in (1, 0):
            threads.append(threading.Thread(target=ask, args=[gpu]))
            threads[-1].start()
            while send(f"gpu {gpu} hung") == "0":
                time.sleep(0.001)
        answer = [list(done)]
        send("gpu 1 release")
        for thread in threads:
            thread.join()
        answer.append(sorted(done))
        """,
    )
    assert answer == [[], [[0, 33], [1, 33]]]


def test_hang_with_a_duration_ends_by_itself(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path),
        """
        began = time.monotonic()
        send("gpu 0 hang all 300ms")
        answer = [n.nvmlDeviceGetTemperature(gpus[0], 0), time.monotonic() - began >= 0.3]
        """,
    )
    assert answer == [33, True]


def test_slow_gpu_answers_late_and_delays_no_other(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile h100 gpus=2"),
        """
        send("gpu 0 slow 10s")
        threading.Thread(target=n.nvmlDeviceGetTemperature, args=[gpus[0], 0], daemon=True).start()
        while fake.calls(0, "nvmlDeviceGetTemperature") == 0:
            time.sleep(0.001)
        answer = [n.nvmlDeviceGetTemperature(gpus[1], 0)]
        send("gpu 0 slow 50ms")
        began = time.monotonic()
        answer += [n.nvmlDeviceGetPowerUsage(gpus[0]), time.monotonic() - began >= 0.05]
        """,
    )
    assert answer == [33, 71000, True]


def test_failed_call_recovers_after_code_0(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path),
        """
        answer = []
        for command in ("fail nvmlDeviceGetTemperature 999", "fail all 16", "fail all 0",
                        "fail nvmlDeviceGetTemperature 0"):
            send("gpu 0 " + command)
            answer.append([refused(n.nvmlDeviceGetTemperature, gpus[0], 0),
                           refused(n.nvmlDeviceGetUUID, gpus[0])])
        """,
    )
    assert answer == [[999, 0], [999, 16], [999, 0], [0, 0]]


def test_reset_clears_the_same_as_a_real_reset(tmp_path: Path) -> None:
    fake = fake_nvml(
        tmp_path,
        "gpu 0 set recovery_action=1 remap.pending=1 remap.uncorrectable=1 nvlink.3.replay=4 pcie.replay=9",
        "gpu 0 reset",
    )
    assert play(fake, "answer = fields(gpus[0], 230, 144, 143, (161, 3), 94)") == [0, 0, 1, 0, 0]


def test_replaced_gpu_is_another_gpu_in_the_same_slot(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 set remap.failure=1"),
        """
        def who():
            return [n.nvmlDeviceGetUUID(gpus[0]), n.nvmlDeviceGetSerial(gpus[0])]
        before = who()
        send("gpu 0 replace")
        answer = [before[0] != who()[0], before[1] != who()[1], n.nvmlDeviceGetPciInfo_v3(gpus[0]).busId,
                  fields(gpus[0], 145)]
        """,
    )
    assert answer == [True, True, "00000000:1B:00.0", [0]]


# --- the driver ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [9, 18], ids=["driver not loaded", "version mismatch"])
def test_init_returns_the_scenarios_code(tmp_path: Path, code: int) -> None:
    fake = fake_nvml(tmp_path, f"init {code}")
    answer = play(
        fake,
        """
        answer = [refused(n.nvmlInit)]
        send("init 0")
        answer += [refused(n.nvmlInit), n.nvmlDeviceGetCount()]
        """,
        init=False,
    )
    assert answer == [code, 0, 1]


def test_count_fails_once_or_until_changed(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile h100 gpus=2"),
        """
        answer = []
        for command in ("count 999", "count 0", "count 999 once"):
            send(command)
            answer += [refused(n.nvmlDeviceGetCount), refused(n.nvmlDeviceGetCount)]
        """,
    )
    assert answer == [999, 999, 0, 0, 999, 0]


def test_init_hangs_for_its_duration(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "init hang 200ms"),
        "began = time.monotonic()\nn.nvmlInit()\nanswer = time.monotonic() - began >= 0.2",
        init=False,
    )
    assert answer is True


def test_after_a_reload_only_a_new_session_works(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile h100 gpus=8"),
        """
        events = watch(gpus[0])
        threading.Timer(0.1, send, ["reload driver=575.57.08 gpus=7"]).start()
        answer = [refused(event, events), refused(n.nvmlDeviceGetUUID, gpus[0])]
        answer.append(refused(n.nvmlDeviceGetCount))
        n.nvmlInit()
        answer.append(refused(n.nvmlDeviceGetCount))
        n.nvmlShutdown()
        n.nvmlShutdown()
        n.nvmlInit()
        answer += [n.nvmlDeviceGetCount(), n.nvmlSystemGetDriverVersion()]
        answer.append(refused(n.nvmlDeviceGetUUID, gpus[0]))
        """,
    )
    assert answer == [1, 1, 1, 1, 7, "575.57.08", 2]


# --- MIG -----------------------------------------------------------------------------------------------


def test_mig_instances_are_devices_of_their_gpu(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "profile a100 gpus=2", "gpu 1 mig 3g.20gb 2g.10gb 1g.5gb 1g.5gb"),
        """
        g, answer = gpus[1], []
        for i in range(n.nvmlDeviceGetMaxMigDeviceCount(g)):
            if refused(n.nvmlDeviceGetMigDeviceHandleByIndex, g, i) == n.NVML_ERROR_NOT_FOUND:
                break
            m = n.nvmlDeviceGetMigDeviceHandleByIndex(g, i)
            a = n.nvmlDeviceGetAttributes_v2(m)
            assert n.nvmlDeviceIsMigDeviceHandle(m) and not n.nvmlDeviceIsMigDeviceHandle(g)
            assert same(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m), g)
            assert same(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(m)), m)
            answer.append([n.nvmlDeviceGetName(m), n.nvmlDeviceGetUUID(m), n.nvmlDeviceGetIndex(m),
                           n.nvmlDeviceGetGpuInstanceId(m), n.nvmlDeviceGetComputeInstanceId(m),
                           a.gpuInstanceSliceCount, a.multiprocessorCount, a.memorySizeMB])
        m = n.nvmlDeviceGetMigDeviceHandleByIndex(g, 0)
        answer.append([n.nvmlDeviceGetMigMode(g), refused(n.nvmlDeviceGetTemperature, m, 0),
                       refused(n.nvmlDeviceGetUtilizationRates, g), refused(n.nvmlDeviceGetGpuInstanceId, g)])
        """,
    )
    product = "NVIDIA A100-SXM4-40GB MIG"
    assert answer == [
        [f"{product} 3g.20gb", "MIG-fa4e0007-0000-5001-8000-000000000001", 0, 1, 0, 3, 42, 19968],
        [f"{product} 2g.10gb", "MIG-fa4e0007-0000-5003-8000-000000000001", 1, 3, 0, 2, 28, 9856],
        [f"{product} 1g.5gb", "MIG-fa4e0007-0000-5007-8000-000000000001", 2, 7, 0, 1, 14, 4864],
        [f"{product} 1g.5gb", "MIG-fa4e0007-0000-5008-8000-000000000001", 3, 8, 0, 1, 14, 4864],
        [[1, 1], 3, 3, 3],
    ]


def test_repartitioning_is_an_event_and_voids_old_handles(tmp_path: Path) -> None:
    answer = play(
        fake_nvml(tmp_path, "gpu 0 mig 7g.80gb"),
        """
        events, old = watch(gpus[0]), n.nvmlDeviceGetMigDeviceHandleByIndex(gpus[0], 0)
        send("gpu 0 mig 3g.40gb 4g.40gb")
        answer = [event(events)[1], refused(n.nvmlDeviceGetUUID, old),
                  n.nvmlDeviceGetGpuInstanceId(n.nvmlDeviceGetMigDeviceHandleByIndex(gpus[0], 1))]
        send("gpu 0 mig off")
        answer.append(n.nvmlDeviceGetMigMode(gpus[0]))
        answer.append(refused(n.nvmlDeviceGetMigDeviceHandleByIndex, gpus[0], 0))
        """,
    )
    assert answer == [0x100, 2, 2, [0, 0], 6]

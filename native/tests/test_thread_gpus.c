/* Tests of GPUs that are read, lost, hang, and come back, without affecting others. */
#include "check.h"
#include "gpu_fixture.h"
#include "hung_fixture.h"
#include "readers_fixture.h"

static void test_every_gpu_is_read(void)
{
    int descriptors = fx_count("/proc/self/fd");
    struct gx g = gx_start(580, "profile h100 gpus=3\n"
                           "gpu 1 set temperature=71 temperature.margin=-3\n"
                           "gpu 1 set nvlink.4.state=0 nvlink.2.replay=5");

    gx_ready(&g, 3);
    CHECK_U64(g.head->generation, 1);
    CHECK_U64(g.head->count, 3);
    CHECK_STR(g.head->driver, "580.95.05");
    for (uint32_t i = 0; i < 3; i++) {
        const struct dh_gpu *gpu = gx_gpu(&g, i);

        CHECK_INT(gpu->status, 0);
        CHECK_INT(gpu->state, DH_STATE_OK);
        CHECK_U64(gpu->handles, 1);
        CHECK_U64(gpu->links, 18);
        CHECK_STR(gpu->name, "NVIDIA H100 80GB HBM3");
        CHECK(strlen(gpu->uuid) == 40 && strlen(gpu->bus) == 12);
        CHECK(gpu->probe_p50_ns > 0);
    }
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), 33);
    CHECK_INT(gx_value(&g, 1, DH_GPU_TEMP), 71);
    CHECK_INT(gx_value(&g, 1, DH_GPU_MARGIN), -3);
    CHECK_INT(gx_value(&g, 0, DH_GPU_LINKS_UP), 0x3ffff);
    CHECK_INT(gx_value(&g, 1, DH_GPU_LINKS_UP), 0x3ffef);
    EVENTUALLY(gx_value(&g, 1, DH_GPU_LINK_REPLAY) == 5);
    CHECK_U64(gx_gpu(&g, 1)->link_errors[2], 5);
    CHECK_INT(gx_value(&g, 0, DH_GPU_RETIRED_SBE), -1); /* it remaps rows instead */
    CHECK_INT(gx_gpu(&g, 0)->code[DH_GPU_RETIRED_SBE], NVML_ERROR_NOT_SUPPORTED);
    EVENTUALLY(gx_woken(&g));
    CHECK_INT(dh_gpus_start(g.w), -EBUSY);
    gx_stop(&g);
    EVENTUALLY(fx_count("/proc/self/fd") <= descriptors + 1); /* the fake's own socket stays open */
}

static void test_older_driver_lacks_fields_and_functions(void)
{
    struct gx g = gx_start(535, "profile h100 gpus=1\ngpu 0 set nvlink.3.crc_flit=9");

    gx_ready(&g, 1);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), 33);
    CHECK_INT(gx_value(&g, 0, DH_GPU_RECOVERY_ACTION), -1);
    CHECK_INT(gx_gpu(&g, 0)->code[DH_GPU_RECOVERY_ACTION], NVML_ERROR_NOT_SUPPORTED);
    CHECK_INT(gx_gpu(&g, 0)->code[DH_GPU_MARGIN], NVML_ERROR_FUNCTION_NOT_FOUND);
    CHECK_INT(gx_value(&g, 0, DH_GPU_FABRIC_STATE), 3); /* the first version of the structure has it */
    CHECK_INT(gx_value(&g, 0, DH_GPU_FABRIC_HEALTH), -1);
    CHECK_INT(gx_value(&g, 0, DH_GPU_SLOWED_HW_THERMAL), -1);
    EVENTUALLY(gx_value(&g, 0, DH_GPU_LINK_CRC) == 9);
    CHECK_INT(gx_gpu(&g, 0)->event_mask & nvmlEventTypeGpuRecoveryAction, 0);
    gx_stop(&g);
}

/* One call for all fields, and one for each of three sensors: the cost of a second without changes. */
static void test_unchanged_pass_makes_four_calls(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");
    struct dh_gpu before, after;
    uint64_t passes;

    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    passes = gx_gpu(&g, 0)->passes;
    EVENTUALLY(gx_gpu(&g, 0)->passes >= passes + 5); /* the pass in which it registered has ended too */
    before = *gx_gpu(&g, 0);
    EVENTUALLY(gx_gpu(&g, 0)->passes >= before.passes + 20);
    after = *gx_gpu(&g, 0);
    CHECK_U64(after.calls - before.calls, 4 * (after.passes - before.passes));
    CHECK_U64(after.slow_passes, before.slow_passes);
    gx_stop(&g);
}

/* If nvmlDeviceGetFieldValues does not support links, they have functions of their own. */
static void test_links_are_read_by_function_without_field_support(void)
{
    struct gx g = gx_start(580, "profile a100 gpus=1\ngpu 0 fail field 165 3\ngpu 0 fail field 161 3\n"
                           "gpu 0 set nvlink.7.state=0 nvlink.1.replay=2");

    gx_ready(&g, 1);
    CHECK_U64(gx_gpu(&g, 0)->links, 12);
    CHECK_INT(gx_value(&g, 0, DH_GPU_LINKS_UP), 0xf7f);
    EVENTUALLY(gx_value(&g, 0, DH_GPU_LINK_REPLAY) == 2);
    CHECK_U64(gx_gpu(&g, 0)->link_errors[1], 2);
    gx_stop(&g);
}

static uint64_t is_identifying(struct gx *g, int gpu)
{
    return gx_command(g, "gpu %d calls nvmlDeviceGetHandleByUUID", gpu) +
           gx_command(g, "gpu %d calls nvmlDeviceGetUUID", gpu);
}

static void test_lost_gpu_is_reported_and_found_again(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=3");
    uint64_t passes, others;

    gx_ready(&g, 3);
    gx_command(&g, "gpu 1 lost");
    EVENTUALLY(gx_gpu(&g, 1)->status == NVML_ERROR_GPU_IS_LOST);
    CHECK_INT(gx_gpu(&g, 1)->state, DH_STATE_FAILING);
    CHECK_U64(gx_gpu(&g, 1)->valid[0] | gx_gpu(&g, 1)->valid[1], 0);
    CHECK(strlen(gx_gpu(&g, 1)->uuid) == 40);
    EVENTUALLY(gx_gpu(&g, 1)->event_count[14] == 1);
    others = is_identifying(&g, 0);
    passes = gx_gpu(&g, 1)->passes;
    EVENTUALLY(gx_gpu(&g, 1)->passes > passes + 12); /* some of them request a new handle */
    CHECK_U64(gx_gpu(&g, 1)->handles, 1);
    CHECK_U64(gx_gpu(&g, 1)->failures >= 12, 1);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    CHECK_U64(is_identifying(&g, 0), others);
    CHECK_U64(gx_head(&g)->generation, 1);

    while (gx_woken(&g))
        ;
    gx_command(&g, "gpu 1 back");
    EVENTUALLY(gx_gpu(&g, 1)->status == 0);
    CHECK_U64(gx_gpu(&g, 1)->handles, 2);
    CHECK_INT(gx_value(&g, 1, DH_GPU_TEMP), 33);
    CHECK_INT(gx_value(&g, 1, DH_GPU_TEMP_SHUTDOWN), 95);
    EVENTUALLY(gx_woken(&g));
    gx_stop(&g);
}

/* Fields that are read rarely failed with it, and are read again before the GPU counts as readable. */
static void test_gpu_that_answers_again_has_all_its_values(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");

    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    EVENTUALLY(gx_value(&g, 0, DH_GPU_LINK_CRC) == 0);
    gx_command(&g, "gpu 0 lost");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_GPU_IS_LOST);
    gx_command(&g, "gpu 0 fail all 16");
    gx_command(&g, "gpu 0 back");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(gx_value(&g, 0, DH_GPU_LINK_CRC), -1);
    gx_command(&g, "gpu 0 fail all 0");
    EVENTUALLY(gx_gpu(&g, 0)->status == 0);
    CHECK_INT(gx_value(&g, 0, DH_GPU_LINK_CRC), 0);
    CHECK_INT(gx_value(&g, 0, DH_GPU_ECC_MODE), 1);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP_SHUTDOWN), 95);
    gx_stop(&g);
}

static void test_gpu_lost_from_the_start_has_a_record(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2\ngpu 1 lost");

    EVENTUALLY(gx_gpu(&g, 1)->status == NVML_ERROR_GPU_IS_LOST);
    CHECK_STR(gx_gpu(&g, 1)->uuid, "");
    CHECK_U64(gx_gpu(&g, 1)->handles, 0);
    gx_command(&g, "gpu 1 back");
    EVENTUALLY(gx_gpu(&g, 1)->status == 0 && gx_value(&g, 1, DH_GPU_TEMP) == 33);
    CHECK(strlen(gx_gpu(&g, 1)->uuid) == 40);
    CHECK_U64(gx_gpu(&g, 1)->handles, 1);
    CHECK_U64(gx_head(&g)->gpus, 2);
    gx_stop(&g);
}

/* The result of one function concerns no other field, unless it concerns the GPU as a whole. */
static void test_failed_field_is_no_lost_gpu(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    gx_ready(&g, 1);
    gx_command(&g, "gpu 0 fail nvmlDeviceGetTemperature 999");
    EVENTUALLY(gx_gpu(&g, 0)->code[DH_GPU_TEMP] == 999);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), -1);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    CHECK_INT(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE), 0);
    gx_command(&g, "gpu 0 fail nvmlDeviceGetTemperature 0");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_TEMP) == 33);

    gx_command(&g, "gpu 0 fail nvmlDeviceGetFieldValues 999");
    EVENTUALLY(gx_gpu(&g, 0)->status == 999);
    CHECK_INT(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE), -1);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), 33);
    gx_command(&g, "gpu 0 fail nvmlDeviceGetFieldValues 0");
    EVENTUALLY(gx_gpu(&g, 0)->status == 0 && gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == 0);

    gx_command(&g, "gpu 0 fail field 4 16");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(gx_value(&g, 0, DH_GPU_RECOVERY_ACTION), 0); /* which names the action to take */
    gx_stop(&g);
}

static void test_hung_gpu_delays_no_other(void)
{
    struct gx g = gx_start_short_deadlines(580, "profile h100 gpus=3");
    uint64_t heartbeat, overdue, passes[2], checks;

    gx_ready(&g, 3);
    while (gx_woken(&g))
        ;
    gx_command(&g, "gpu 1 hang nvmlDeviceGetFieldValues");
    gx_await_hang(&g, 1);
    CHECK_INT(gx_gpu(&g, 1)->call, DH_CALL_FIELDS);
    CHECK(dh_now_ns() - gx_gpu(&g, 1)->call_ns >= 200 * MS);
    EVENTUALLY(gx_woken(&g));
    heartbeat = gx_gpu(&g, 1)->heartbeat_ns;
    overdue = gx_gpu(&g, 1)->overdue;
    CHECK(overdue >= 1);
    passes[0] = gx_gpu(&g, 0)->passes;
    passes[1] = gx_gpu(&g, 2)->passes;
    checks = gx_head(&g)->passes;
    EVENTUALLY(gx_gpu(&g, 0)->passes > passes[0] + 30 && gx_gpu(&g, 2)->passes > passes[1] + 30);
    EVENTUALLY(gx_head(&g)->passes > checks + 3);
    CHECK_U64(gx_gpu(&g, 1)->heartbeat_ns, heartbeat);
    CHECK_U64(gx_gpu(&g, 1)->overdue, overdue); /* once, however long it takes */
    while (gx_woken(&g))
        ;
    gx_command(&g, "gpu 1 release");
    EVENTUALLY(gx_gpu(&g, 1)->heartbeat_ns > heartbeat);
    CHECK(gx_woken(&g)); /* woken at the end of the call, before its results are published */
    CHECK_INT(gx_gpu(&g, 1)->status, 0);
    gx_stop(&g);
}

/*
 * A lock inside the driver blocks all GPUs: each is overdue by its own deadline, and the reader still reads.
 */
static void test_driver_lock_stops_all_gpus_but_no_reader(void)
{
    struct gx g = gx_start_short_deadlines(580, "profile h100 gpus=4");

    gx_ready(&g, 4);
    gx_command(&g, "gpu 2 hang all lock");
    for (uint32_t i = 0; i < 4; i++) {
        gx_await_hang(&g, i);
        CHECK(gx_gpu(&g, i)->overdue >= 1);
    }
    EVENTUALLY(gx_is_overdue(&g, &g.w->opener) && gx_head(&g)->call == DH_CALL_SYSTEM);
    gx_command(&g, "gpu 2 release");
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t passes = gx_gpu(&g, i)->passes;

        EVENTUALLY(gx_gpu(&g, i)->passes > passes + 1);
    }
    gx_stop(&g);
}

static void test_hang_in_init_is_reported(void)
{
    struct gx g = gx_start_short_deadlines(580, "profile h100 gpus=1\ninit hang 3600s");

    EVENTUALLY(gx_head(&g)->call == DH_CALL_INIT);
    CHECK_INT(g.head->state, DH_STATE_STARTING);
    EVENTUALLY(gx_is_overdue(&g, &g.w->opener));
    EVENTUALLY(gx_woken(&g));
    CHECK_INT(gx_head(&g)->call, DH_CALL_INIT);
    gx_command(&g, "init hang 0s");
    gx_ready(&g, 1);
    gx_stop(&g);
}

static void test_stop_does_not_wait_for_init(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1\ninit hang 3600s");

    EVENTUALLY(gx_head(&g)->call == DH_CALL_INIT);
    gx_connect(&g); /* the fake's socket, which opens when the fake knows of the hang */
    CHECK_INT(dh_gpus_stop(g.w, 50 * MS), -ETIMEDOUT);
    EVENTUALLY(fx_threads("dh-gpu", false) == 1);
    CHECK_INT(fx_threads("dh-gpu-open", false), 1);
    gx_command(&g, "init hang 0s");
    EVENTUALLY(fx_threads("dh-gpu", false) == 0); /* the library stays initialized */
    gx_free(&g);
}

/* Stop has a timeout. Abandoned threads end by themselves and free everything, which LeakSanitizer checks. */
static void test_stop_abandons_hung_threads(void)
{
    struct gx g = gx_start_short_deadlines(580, "profile h100 gpus=3");
    uint64_t begun;

    gx_ready(&g, 3);
    gx_command(&g, "gpu 1 hang all");
    gx_await_hang(&g, 1);
    begun = dh_now_ns();
    CHECK_INT(dh_gpus_stop(g.w, 700 * MS), -ETIMEDOUT);
    CHECK(dh_now_ns() - begun >= 700 * MS);
    EVENTUALLY(fx_threads("dh-gpu", false) == 1);
    CHECK_INT(fx_threads("dh-gpu-1", false), 1);
    while (gx_woken(&g))
        ;
    gx_command(&g, "gpu 1 release");
    EVENTUALLY(fx_threads("dh-gpu", false) == 0);
    CHECK(!gx_woken(&g)); /* nothing of the caller's is accessed any more */
    gx_free(&g);
}

static const struct dh_gpu *gpu_of(const void *copy)
{
    return (const struct dh_gpu *)(const void *)((const struct dh_gpus *)copy + 1);
}

/* The fake changes two counters together; the same pass reads them one after the other. */
static const char *check_copy_of(const void *was_before, const void *is_now)
{
    const struct dh_gpu *before = gpu_of(was_before), *now = gpu_of(is_now);

    if (now->passes < before->passes || now->heartbeat_ns < before->heartbeat_ns || now->calls < before->calls)
        return "time went back";
    if (now->passes < now->slow_passes || !dh_gpu_is_valid(now, DH_GPU_PCIE_REPLAY))
        return "the record has a wrong size";
    if (now->value[DH_GPU_ECC_UNCORRECTABLE] != now->value[DH_GPU_PCIE_REPLAY])
        return "two passes in one record";
    return NULL;
}

static int64_t copy(void *from, void *buf, size_t cap)
{
    return dh_gpus_read(from, buf, cap);
}

static uint64_t moves(const void *now)
{
    return gpu_of(now)->value[DH_GPU_PCIE_REPLAY];
}

static void test_reader_never_gets_a_torn_copy(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");
    struct rx_source source = { .copy = copy, .check_copy_of = check_copy_of, .moves = moves, .changes = RX_CHANGES };
    struct rx readers;

    o.period_ns = 10 * MS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    source.from = g.w;
    source.bytes = g.cap;
    rx_start(&readers, &source, 2);
    for (uint64_t i = 1; i <= 200 * RX_CHANGES; i++) {
        gx_command(&g, "gpu 0 set ecc.dram.uncorrectable.volatile=+1 pcie.replay=+1");
        if (i % 200 == 0)
            EVENTUALLY(rx_have_seen(&readers, i / 200));
    }
    rx_end(&readers);
    gx_stop(&g);
}

int main(void)
{
    fx_begin();
    test_every_gpu_is_read();
    test_older_driver_lacks_fields_and_functions();
    test_unchanged_pass_makes_four_calls();
    test_links_are_read_by_function_without_field_support();
    test_lost_gpu_is_reported_and_found_again();
    test_gpu_that_answers_again_has_all_its_values();
    test_gpu_lost_from_the_start_has_a_record();
    test_failed_field_is_no_lost_gpu();
    test_hung_gpu_delays_no_other();
    test_driver_lock_stops_all_gpus_but_no_reader();
    test_hang_in_init_is_reported();
    test_stop_does_not_wait_for_init();
    test_stop_abandons_hung_threads();
    test_reader_never_gets_a_torn_copy();
    return check_done("test_thread_gpus");
}

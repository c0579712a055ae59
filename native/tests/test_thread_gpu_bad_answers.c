/* Tests of invalid answers of NVML: none causes a busy loop, a failure of another GPU, or a zero. */
#include "check.h"
#include "gpu_fixture.h"

static void test_gpus_beyond_the_table_are_reported(void)
{
    struct gx g = gx_start(580, "profile t4 gpus=34");

    EVENTUALLY(gx_head(&g)->gpus == DH_GPU_MAX && g.head->state == DH_STATE_OK);
    CHECK_INT(g.head->err, DH_EFULL);
    CHECK_STR(g.head->err_text, "NVML counts 34 GPUs, of which 32 are watched");
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->generation == 2 && g.head->err == DH_EFULL); /* it is still reported */
    CHECK_INT(g.head->state, DH_STATE_OK);
    CHECK_U64(g.head->count, 34);
    gx_stop(&g);
}

static void test_gpus_without_uuid_do_not_share_a_record(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2\ngpu 0 nameless\ngpu 1 nameless");

    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_UNKNOWN && gx_gpu(&g, 1)->status == NVML_ERROR_UNKNOWN);
    CHECK_STR(gx_gpu(&g, 0)->uuid, "");
    gx_command(&g, "gpu 0 replace");
    EVENTUALLY(gx_gpu(&g, 0)->status == 0);
    CHECK(strlen(gx_gpu(&g, 0)->uuid) == 40);
    CHECK_INT(gx_gpu(&g, 1)->status, NVML_ERROR_UNKNOWN);
    CHECK_U64(gx_head(&g)->gpus, 2);
    gx_stop(&g);
}

/* Texts without an end have other bytes behind them in each call: still the same GPUs. */
static void test_texts_without_end_make_no_further_gpus(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=4\nendless on");
    uint64_t passes;

    gx_ready(&g, 4);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(strlen(gx_gpu(&g, i)->uuid) == 40 && strlen(gx_gpu(&g, i)->name) < sizeof(gx_gpu(&g, i)->name));
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->generation >= 2);
    passes = g.head->passes;
    EVENTUALLY(gx_head(&g)->passes >= passes + 3);
    CHECK_U64(g.head->gpus, 4);
    gx_stop(&g);
}

/* A removed GPU may keep a handle that still answers. */
static void test_gpu_that_is_no_longer_listed_is_not_found(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=3");

    gx_ready(&g, 3);
    gx_command(&g, "listed 2");
    dh_gpus_check_count(g.w);
    EVENTUALLY(gx_gpu(&g, 2)->status == NVML_ERROR_GPU_NOT_FOUND);
    CHECK_U64(gx_head(&g)->count, 2);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    CHECK_U64(gx_gpu(&g, 0)->handles, 1);
    gx_command(&g, "listed 3");
    EVENTUALLY(gx_gpu(&g, 2)->status == 0);
    CHECK_U64(gx_head(&g)->generation, 1);
    gx_stop(&g);
}

static void test_one_failed_check_does_not_close_the_library(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");
    uint64_t passes;

    gx_ready(&g, 1);
    gx_command(&g, "count 999 once");
    EVENTUALLY(gx_head(&g)->failures == 1);
    passes = g.head->passes;
    EVENTUALLY(gx_head(&g)->passes >= passes + 2);
    CHECK_U64(g.head->generation, 1);
    CHECK_U64(g.head->failures, 1);
    CHECK_INT(g.head->err, 0);
    gx_command(&g, "count 999");
    EVENTUALLY(gx_head(&g)->state == DH_STATE_FAILING);
    CHECK_INT(g.head->err, 999);
    gx_command(&g, "count 0");
    EVENTUALLY(gx_head(&g)->generation == 2);
    EVENTUALLY(gx_gpu(&g, 0)->status == 0 && gx_gpu(&g, 0)->handles == 2);
    gx_stop(&g);
}

/* NVML does not name the GPU, so none is marked. */
static void test_library_error_lost_marks_no_gpu_lost(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_command(&g, "init 15");
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->err == NVML_ERROR_GPU_IS_LOST);
    for (uint32_t i = 0; i < 2; i++)
        EVENTUALLY(gx_gpu(&g, i)->status == NVML_ERROR_UNKNOWN);
    gx_stop(&g);
}

static void test_gpu_not_found_does_not_reopen_the_library(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    uint64_t passes;

    gx_ready(&g, 2);
    gx_command(&g, "gpu 1 fail nvmlDeviceGetFieldValues 28");
    EVENTUALLY(gx_gpu(&g, 1)->status == NVML_ERROR_GPU_NOT_FOUND);
    passes = gx_head(&g)->passes;
    EVENTUALLY(gx_head(&g)->passes >= passes + 3);
    CHECK_U64(g.head->generation, 1);
    CHECK_U64(gx_gpu(&g, 0)->handles, 1);
    gx_stop(&g);
}

static void test_unknown_error_of_a_lost_gpu_keeps_it_lost(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");
    uint64_t passes;

    gx_ready(&g, 1);
    gx_command(&g, "gpu 0 fail nvmlDeviceGetTemperature 999");
    gx_command(&g, "gpu 0 fail nvmlDeviceGetFieldValues 15");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_GPU_IS_LOST);
    passes = gx_gpu(&g, 0)->passes;
    EVENTUALLY(gx_gpu(&g, 0)->passes >= passes + 10);
    CHECK_INT(gx_gpu(&g, 0)->status, NVML_ERROR_GPU_IS_LOST);
    CHECK_U64(gx_gpu(&g, 0)->handles, 1);
    gx_stop(&g);
}

static void test_refused_call_does_not_request_a_handle_each_pass(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1\ngpu 0 fail nvmlDeviceGetFieldValues 2");

    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    EVENTUALLY(gx_gpu(&g, 0)->passes >= 20);
    CHECK_INT(gx_gpu(&g, 0)->status, NVML_ERROR_INVALID_ARGUMENT);
    CHECK_U64(gx_gpu(&g, 0)->handles, 1);
    gx_stop(&g);
}

static void test_field_seen_once_is_retried_at_once(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");

    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    gx_command(&g, "gpu 0 fail field 4 3");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == -1);
    gx_command(&g, "gpu 0 fail field 4 0");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == 0);
    gx_stop(&g);
}

static bool is_absent(struct gx *g, enum dh_gpu_field field)
{
    const struct dh_gpu *gpu = gx_gpu(g, 0);

    return !dh_gpu_has_bit(gpu->valid, field) && !dh_gpu_has_bit(gpu->seen, field);
}

/* The counters become unsupported before the mode, a slow field, is due. */
static void test_ecc_counters_of_a_gpu_without_ecc_are_absent(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");

    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    CHECK(dh_gpu_has_bit(gx_gpu(&g, 0)->seen, DH_GPU_ECC_UNCORRECTABLE));
    gx_command(&g, "gpu 0 set ecc.mode=0");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_MODE) == 0);
    CHECK(is_absent(&g, DH_GPU_ECC_UNCORRECTABLE));
    gx_command(&g, "gpu 0 set ecc.mode=1");
    gx_command(&g, "reload");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == 0);
    gx_stop(&g);
}

static void test_field_that_mig_removes_is_absent(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    gx_ready(&g, 1);
    gx_command(&g, "gpu 0 fail field 4 3"); /* NVML_FI_DEV_ECC_DBE_VOL_TOTAL is not supported */
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == -1);
    CHECK(!is_absent(&g, DH_GPU_ECC_UNCORRECTABLE)); /* nothing explains it */
    gx_command(&g, "gpu 0 mig 3g.40gb");
    EVENTUALLY(is_absent(&g, DH_GPU_ECC_UNCORRECTABLE));
    gx_command(&g, "gpu 0 fail field 4 0");
    gx_command(&g, "gpu 0 mig off");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == 0);
    gx_stop(&g);
}

static void test_field_that_another_driver_lacks_is_absent(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    gx_ready(&g, 1);
    gx_command(&g, "gpu 0 fail field 4 3");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == -1);
    CHECK(!is_absent(&g, DH_GPU_ECC_UNCORRECTABLE));
    gx_command(&g, "reload driver=570.10.1");
    EVENTUALLY(is_absent(&g, DH_GPU_ECC_UNCORRECTABLE));
    gx_stop(&g);
}

static void test_gpu_that_answers_by_the_handle_of_another_has_its_own_record(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    char uuid[sizeof(gx_gpu(&g, 0)->uuid)];

    gx_ready(&g, 2);
    snprintf(uuid, sizeof(uuid), "%s", gx_gpu(&g, 0)->uuid);
    gx_command(&g, "gpu 0 lost");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_GPU_IS_LOST);
    gx_command(&g, "gpu 0 replace");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_GPU_NOT_FOUND);
    CHECK_STR(gx_gpu(&g, 0)->uuid, uuid);
    EVENTUALLY(gx_head(&g)->gpus == 3 && gx_gpu(&g, 2)->state == DH_STATE_OK);
    CHECK(strlen(gx_gpu(&g, 2)->uuid) == 40 && strcmp(gx_gpu(&g, 2)->uuid, uuid) != 0);
    EVENTUALLY(gx_gpu(&g, 2)->event_mask);
    gx_command(&g, "gpu 0 xid 79");
    EVENTUALLY(gx_gpu(&g, 0)->xids + gx_gpu(&g, 2)->xids == 1);
    CHECK_U64(gx_gpu(&g, 2)->xids, 1);
    CHECK_U64(gx_gpu(&g, 0)->event_mask, 0);
    gx_stop(&g);
}

static void test_wait_that_ends_early_is_no_busy_loop(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");
    uint64_t waits, begun, failures;

    gx_ready(&g, 1);
    gx_command(&g, "wait empty");
    failures = gx_head(&g)->wait_failures;
    EVENTUALLY(gx_head(&g)->wait_failures > failures);
    begun = dh_now_ns();
    waits = gx_head(&g)->wait_passes;
    EVENTUALLY(gx_head(&g)->wait_passes >= waits + 20);
    CHECK(dh_now_ns() - begun > 20 * 10 * MS / 2);
    CHECK_INT(g.head->wait_err, NVML_ERROR_GPU_NOT_FOUND);
    CHECK_U64(gx_gpu(&g, 0)->xids, 0);
    gx_command(&g, "wait 0");
    gx_command(&g, "gpu 0 xid 79");
    EVENTUALLY(gx_gpu(&g, 0)->xids == 1);
    gx_stop(&g);
}

static void test_wide_error_code_is_truncated_consistently(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    gx_ready(&g, 1);
    for (int i = 0; i < 3; i++)
        gx_command(&g, "gpu 0 event 0x8 data=0x10000004f");
    EVENTUALLY(gx_gpu(&g, 0)->event_count[3] == 3);
    CHECK_U64(gx_gpu(&g, 0)->xids, 1);
    CHECK_U64(gx_gpu(&g, 0)->xid[0].count, 3);
    CHECK_U64(gx_gpu(&g, 0)->event_last_data[3], 0x10000004f);
    gx_stop(&g);
}

static void test_event_after_a_reload_is_not_assigned_by_an_old_handle(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_command(&g, "gpu 1 replace");
    gx_command(&g, "reload same_handles");
    EVENTUALLY(gx_head(&g)->gpus == 3);
    EVENTUALLY(gx_gpu(&g, 1)->status == NVML_ERROR_GPU_NOT_FOUND);
    EVENTUALLY(gx_gpu(&g, 2)->event_mask);
    gx_command(&g, "gpu 1 xid 79");
    EVENTUALLY(gx_gpu(&g, 1)->xids + gx_gpu(&g, 2)->xids == 1);
    CHECK_U64(gx_gpu(&g, 2)->xids, 1);
    gx_stop(&g);
}

/* As for months on a node whose driver never loads. */
static void test_repeated_load_attempts_leave_nothing_open(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1\ninit 9");
    int descriptors;

    gx_watch(&g, &o, NULL, 0);
    EVENTUALLY(gx_head(&g)->failures >= 2);
    descriptors = fx_count("/proc/self/fd");
    EVENTUALLY(gx_head(&g)->failures >= 12);
    EVENTUALLY(fx_count("/proc/self/fd") <= descriptors); /* an attempt may have been under way */
    gx_stop(&g);
}

int main(void)
{
    fx_begin();
    test_gpus_beyond_the_table_are_reported();
    test_gpus_without_uuid_do_not_share_a_record();
    test_texts_without_end_make_no_further_gpus();
    test_gpu_that_is_no_longer_listed_is_not_found();
    test_one_failed_check_does_not_close_the_library();
    test_library_error_lost_marks_no_gpu_lost();
    test_gpu_not_found_does_not_reopen_the_library();
    test_unknown_error_of_a_lost_gpu_keeps_it_lost();
    test_refused_call_does_not_request_a_handle_each_pass();
    test_field_seen_once_is_retried_at_once();
    test_ecc_counters_of_a_gpu_without_ecc_are_absent();
    test_field_that_mig_removes_is_absent();
    test_field_that_another_driver_lacks_is_absent();
    test_gpu_that_answers_by_the_handle_of_another_has_its_own_record();
    test_wait_that_ends_early_is_no_busy_loop();
    test_wide_error_code_is_truncated_consistently();
    test_event_after_a_reload_is_not_assigned_by_an_old_handle();
    test_repeated_load_attempts_leave_nothing_open();
    return check_done("test_thread_gpu_bad_answers");
}

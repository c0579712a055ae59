/* What NVML may answer and makes no sense: nothing of it becomes a loop, another GPU's fault, or a zero. */
#include "check.h"
#include "gpu_fixture.h"

static void gpus_without_a_record_are_told_of(void)
{
    struct gx g = gx_start(580, "profile t4 gpus=34");

    EVENTUALLY(gx_head(&g)->gpus == DH_GPU_MAX && g.head->state == DH_STATE_OK);
    CHECK_INT(g.head->err, DH_EFULL);
    CHECK_STR(g.head->why, "NVML counts 34 GPUs, of which 32 are watched");
    gx_tell(&g, "reload");
    EVENTUALLY(gx_head(&g)->generation == 2 && g.head->err == DH_EFULL); /* it is not forgotten */
    CHECK_INT(g.head->state, DH_STATE_OK);
    CHECK_U64(g.head->count, 34);
    gx_stop(&g);
}

static void two_without_a_name_are_not_one(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2\ngpu 0 nameless\ngpu 1 nameless");

    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_UNKNOWN && gx_gpu(&g, 1)->status == NVML_ERROR_UNKNOWN);
    CHECK_STR(gx_gpu(&g, 0)->uuid, "");
    gx_tell(&g, "gpu 0 replace");
    EVENTUALLY(gx_gpu(&g, 0)->status == 0);
    CHECK(strlen(gx_gpu(&g, 0)->uuid) == 40);
    CHECK_INT(gx_gpu(&g, 1)->status, NVML_ERROR_UNKNOWN);
    CHECK_U64(gx_head(&g)->gpus, 2);
    gx_stop(&g);
}

static void one_look_without_an_answer_closes_nothing(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");
    uint64_t passes;

    gx_ready(&g, 1);
    gx_tell(&g, "count 999 once");
    EVENTUALLY(gx_head(&g)->failures == 1);
    passes = g.head->passes;
    EVENTUALLY(gx_head(&g)->passes >= passes + 2);
    CHECK_U64(g.head->generation, 1);
    CHECK_U64(g.head->failures, 1);
    CHECK_INT(g.head->err, 0);
    gx_tell(&g, "count 999");
    EVENTUALLY(gx_head(&g)->state == DH_STATE_FAILING);
    CHECK_INT(g.head->err, 999);
    gx_tell(&g, "count 0");
    EVENTUALLY(gx_head(&g)->generation == 2);
    EVENTUALLY(gx_gpu(&g, 0)->status == 0 && gx_gpu(&g, 0)->handles == 2);
    gx_stop(&g);
}

/* NVML does not say which GPU is meant, so it is none. */
static void a_library_that_says_lost_makes_no_gpu_lost(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_tell(&g, "init 15");
    gx_tell(&g, "reload");
    EVENTUALLY(gx_head(&g)->err == NVML_ERROR_GPU_IS_LOST);
    for (uint32_t i = 0; i < 2; i++)
        EVENTUALLY(gx_gpu(&g, i)->status == NVML_ERROR_UNKNOWN);
    gx_stop(&g);
}

static void a_gpu_that_is_not_found_has_no_other_opened_anew(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    uint64_t passes;

    gx_ready(&g, 2);
    gx_tell(&g, "gpu 1 fail nvmlDeviceGetFieldValues 28");
    EVENTUALLY(gx_gpu(&g, 1)->status == NVML_ERROR_GPU_NOT_FOUND);
    passes = gx_head(&g)->passes;
    EVENTUALLY(gx_head(&g)->passes >= passes + 3);
    CHECK_U64(g.head->generation, 1);
    CHECK_U64(gx_gpu(&g, 0)->handles, 1);
    gx_stop(&g);
}

static void unknown_is_no_answer_of_a_lost_gpu(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");
    uint64_t passes;

    gx_ready(&g, 1);
    gx_tell(&g, "gpu 0 fail nvmlDeviceGetTemperature 999");
    gx_tell(&g, "gpu 0 fail nvmlDeviceGetFieldValues 15");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_GPU_IS_LOST);
    passes = gx_gpu(&g, 0)->passes;
    EVENTUALLY(gx_gpu(&g, 0)->passes >= passes + 10);
    CHECK_INT(gx_gpu(&g, 0)->status, NVML_ERROR_GPU_IS_LOST);
    CHECK_U64(gx_gpu(&g, 0)->handles, 1);
    gx_stop(&g);
}

static void a_call_that_is_refused_is_no_new_handle_each_time(void)
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

static void a_field_that_was_there_is_asked_for_again_at_once(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");

    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    gx_tell(&g, "gpu 0 fail field 4 3");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == -1);
    gx_tell(&g, "gpu 0 fail field 4 0");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == 0);
    gx_stop(&g);
}

static void a_wait_that_ends_without_an_event_is_no_loop(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");
    uint64_t waits, begun, failures;

    gx_ready(&g, 1);
    gx_tell(&g, "wait empty");
    failures = gx_head(&g)->wait_failures;
    EVENTUALLY(gx_head(&g)->wait_failures > failures);
    begun = dh_now_ns();
    waits = gx_head(&g)->wait_passes;
    EVENTUALLY(gx_head(&g)->wait_passes >= waits + 20);
    CHECK(dh_now_ns() - begun > 20 * 10 * MS / 2);
    CHECK_INT(g.head->wait_err, NVML_ERROR_GPU_NOT_FOUND);
    CHECK_U64(gx_gpu(&g, 0)->xids, 0);
    gx_tell(&g, "wait 0");
    gx_tell(&g, "gpu 0 xid 79");
    EVENTUALLY(gx_gpu(&g, 0)->xids == 1);
    gx_stop(&g);
}

static void a_code_too_wide_is_still_one_code(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    gx_ready(&g, 1);
    for (int i = 0; i < 3; i++)
        gx_tell(&g, "gpu 0 event 0x8 data=0x10000004f");
    EVENTUALLY(gx_gpu(&g, 0)->event_count[3] == 3);
    CHECK_U64(gx_gpu(&g, 0)->xids, 1);
    CHECK_U64(gx_gpu(&g, 0)->xid[0].count, 3);
    CHECK_U64(gx_gpu(&g, 0)->event_last_data[3], 0x10000004f);
    gx_stop(&g);
}

static void an_event_is_not_that_of_who_had_the_handle_before(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_tell(&g, "gpu 1 replace");
    gx_tell(&g, "reload same_handles");
    EVENTUALLY(gx_head(&g)->gpus == 3);
    EVENTUALLY(gx_gpu(&g, 1)->status == NVML_ERROR_GPU_NOT_FOUND);
    EVENTUALLY(gx_gpu(&g, 2)->event_mask);
    gx_tell(&g, "gpu 1 xid 79");
    EVENTUALLY(gx_gpu(&g, 1)->xids + gx_gpu(&g, 2)->xids == 1);
    CHECK_U64(gx_gpu(&g, 2)->xids, 1);
    gx_stop(&g);
}

/* As it will be for a year on a node whose driver never loads. */
static void a_library_that_is_tried_again_and_again_leaves_nothing_open(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1\ninit 9");
    int descriptors;

    gx_watch(&g, &o, NULL, 0);
    EVENTUALLY(gx_head(&g)->failures >= 2);
    descriptors = fx_count("/proc/self/fd");
    EVENTUALLY(gx_head(&g)->failures >= 12);
    EVENTUALLY(fx_count("/proc/self/fd") <= descriptors); /* which may have been in the midst of a try */
    gx_stop(&g);
}

int main(void)
{
    fx_begin();
    gpus_without_a_record_are_told_of();
    two_without_a_name_are_not_one();
    one_look_without_an_answer_closes_nothing();
    a_library_that_says_lost_makes_no_gpu_lost();
    a_gpu_that_is_not_found_has_no_other_opened_anew();
    unknown_is_no_answer_of_a_lost_gpu();
    a_call_that_is_refused_is_no_new_handle_each_time();
    a_field_that_was_there_is_asked_for_again_at_once();
    a_wait_that_ends_without_an_event_is_no_loop();
    a_code_too_wide_is_still_one_code();
    an_event_is_not_that_of_who_had_the_handle_before();
    a_library_that_is_tried_again_and_again_leaves_nothing_open();
    return check_done("test_thread_gpu_nonsense");
}

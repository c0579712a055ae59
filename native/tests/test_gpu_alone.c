/* A watch without threads: passes on our own, and their floor. */
#include "check.h"
#include "gpu_fixture.h"

#define HOUR_NS (3600 * DH_NS)
#define SETTLING 3 /* passes until nothing is asked for that is not there, and no slow field is due */

/* As gx_watch(), but nobody starts it. */
static struct gx alone(const char *scenario)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, scenario);

    o.slow_ns = o.retry_ns = HOUR_NS;
    g.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fx_must(!dh_gpus_open(&o, g.library, fx_root, NULL, 0, g.wake_fd, &g.w), "dh_gpus_open");
    g.cap = dh_gpus_size(g.w);
    g.head = aligned_alloc(8, g.cap);
    fx_must(g.head != NULL, "aligned_alloc");
    return g;
}

static void a_pass_reads_what_is_there_now(void)
{
    struct gx g = alone("profile h100 gpus=2");

    for (int i = 0; i < SETTLING; i++)
        CHECK(dh_gpus_pass(g.w) > 0);
    CHECK_INT(gx_value(&g, 1, DH_GPU_TEMP), 33);
    CHECK_U64(gx_gpu(&g, 1)->passes, SETTLING);
    gx_tell(&g, "gpu 1 set temperature=71");
    dh_gpus_pass(g.w);
    CHECK_INT(gx_value(&g, 1, DH_GPU_TEMP), 71);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), 33);
    gx_stop(&g);
}

/* Equal answers are not taken again, so each must be told from those around it. */
static void one_answer_that_changes_among_equal_ones_is_taken(void)
{
    static const struct {
        const char *set, *back;
        enum dh_gpu_field field;
        int64_t now, then;
    } table[] = {
        { "pcie.replay=3", "pcie.replay=0", DH_GPU_PCIE_REPLAY, 3, 0 },
        { "temperature.memory=71", "temperature.memory=45", DH_GPU_MEM_TEMP, 71, 45 },
        { "nvlink.17.state=0", "nvlink.17.state=1", DH_GPU_LINKS_UP, (1 << 17) - 1, (1 << 18) - 1 },
        { "remap.uncorrectable=1", "remap.uncorrectable=0", DH_GPU_REMAP_UNCORRECTABLE, 1, 0 },
    };
    struct gx g = alone("profile h100 gpus=2");

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
        check_row = table[i].set;
        gx_tell(&g, "gpu 1 set %s", table[i].set);
        for (int pass = 0; pass < 2; pass++) {
            dh_gpus_pass(g.w);
            CHECK_INT(gx_value(&g, 1, table[i].field), table[i].now);
            CHECK_INT(gx_value(&g, 0, table[i].field), table[i].then);
        }
        gx_tell(&g, "gpu 1 set %s", table[i].back);
        dh_gpus_pass(g.w);
        CHECK_INT(gx_value(&g, 1, table[i].field), table[i].then);
    }
    check_row = "";
    gx_stop(&g);
}

/* Also when they are what they were before the call failed, or the GPU was lost. */
static void after_a_failure_every_answer_is_taken(void)
{
    static const char *const faults[][2] = {
        { "gpu 1 fail nvmlDeviceGetFieldValues 999", "gpu 1 fail nvmlDeviceGetFieldValues 0" },
        { "gpu 1 fail field 94 999", "gpu 1 fail field 94 0" },
        { "gpu 1 lost", "gpu 1 back" },
    };
    struct gx g = alone("profile h100 gpus=2");

    dh_gpus_pass(g.w);
    gx_tell(&g, "gpu 1 set pcie.replay=3");
    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    for (size_t i = 0; i < sizeof(faults) / sizeof(*faults); i++) {
        check_row = faults[i][0];
        gx_tell(&g, "%s", faults[i][0]);
        for (int pass = 0; pass < 2; pass++) {
            dh_gpus_pass(g.w);
            CHECK_INT(gx_value(&g, 1, DH_GPU_PCIE_REPLAY), -1);
            CHECK_INT(gx_value(&g, 0, DH_GPU_PCIE_REPLAY), 0);
        }
        gx_tell(&g, "%s", faults[i][1]);
        dh_gpus_pass(g.w);
        CHECK_INT(gx_value(&g, 1, DH_GPU_PCIE_REPLAY), 3);
    }
    check_row = "";
    gx_stop(&g);
}

/* Of a pass that asked what the last one did: no answer of its readings was another one. */
static void a_gpu_that_is_lost_in_the_last_call_of_a_quiet_pass_is_forgotten(void)
{
    struct gx g = alone("profile h100 gpus=1\ngpu 0 mig on\n" /* asked for until it is answered */
                        "gpu 0 fail nvmlDeviceGetMigDeviceHandleByIndex 999");

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), 33);
    gx_tell(&g, "gpu 0 fail nvmlDeviceGetMigDeviceHandleByIndex %d", NVML_ERROR_GPU_IS_LOST);
    dh_gpus_pass(g.w);
    CHECK_INT(gx_gpu(&g, 0)->status, NVML_ERROR_GPU_IS_LOST);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        CHECK_INT(gx_value(&g, 0, f), -1);
    CHECK_INT(gx_gpu(&g, 0)->code[DH_GPU_TEMP], NVML_ERROR_GPU_IS_LOST);
    gx_stop(&g);
}

/* Time passes for the GPU's thread, that is for its notes of when it last did something. */
static void elapse(struct gx *g, uint64_t ns)
{
    struct dh_gpu_slot *s = atomic_load(&g->w->slot[0]);

    s->slow_ns -= ns;
    s->links_ns -= s->links_ns ? ns : 0;
}

static void a_pass_that_comes_a_little_early_reads_the_slow_fields_all_the_same(void)
{
    struct gx g = alone("profile h100 gpus=1");
    uint64_t slow_passes;

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    slow_passes = gx_gpu(&g, 0)->slow_passes;
    gx_tell(&g, "gpu 0 set pstate=5");
    dh_gpus_pass(g.w);
    CHECK_INT(gx_value(&g, 0, DH_GPU_PSTATE), 0);
    elapse(&g, HOUR_NS - 9 * MS); /* less than half a period */
    dh_gpus_pass(g.w);
    CHECK_U64(gx_gpu(&g, 0)->slow_passes, slow_passes + 1);
    CHECK_INT(gx_value(&g, 0, DH_GPU_PSTATE), 5);
    gx_stop(&g);
}

/* Through nvmlDeviceGetFieldValues, and through functions of their own. */
static const char *const link_scenarios[] = {
    "profile a100 gpus=1\ngpu 0 fail link 7 %d",
    "profile a100 gpus=1\ngpu 0 fail field 165 3\ngpu 0 fail link 7 %d",
};

/* What it said was no reason to believe that it is not there. */
static void a_link_that_fails_at_first_is_found_as_soon_as_it_answers(void)
{
    for (int i = 0; i < 2; i++) {
        char scenario[200];
        struct gx g;

        snprintf(scenario, sizeof(scenario), link_scenarios[i], NVML_ERROR_UNKNOWN);
        g = alone(scenario);
        check_row = scenario;
        for (int pass = 0; pass < SETTLING; pass++, elapse(&g, HOUR_NS))
            dh_gpus_pass(g.w);
        CHECK_U64(gx_gpu(&g, 0)->links, 11);
        CHECK_INT(gx_value(&g, 0, DH_GPU_LINKS_UP), 0xf7f);
        gx_tell(&g, "gpu 0 fail link 7 0");
        dh_gpus_pass(g.w);
        CHECK_U64(gx_gpu(&g, 0)->links, 12);
        CHECK_INT(gx_value(&g, 0, DH_GPU_LINKS_UP), 0xfff);
        gx_stop(&g);
    }
    check_row = "";
}

/* A GPU that is partitioned has no links, and one that was reset may have more. */
static void a_link_that_was_not_there_is_asked_for_now_and_then(void)
{
    for (int i = 0; i < 2; i++) {
        char scenario[200];
        struct gx g;
        int passes = 0;

        snprintf(scenario, sizeof(scenario), link_scenarios[i], NVML_ERROR_NOT_SUPPORTED);
        g = alone(scenario);
        check_row = scenario;
        for (int pass = 0; pass < SETTLING; pass++)
            dh_gpus_pass(g.w);
        CHECK_U64(gx_gpu(&g, 0)->links, 11);
        gx_tell(&g, "gpu 0 fail link 7 0");
        for (; gx_gpu(&g, 0)->links < 12 && passes < 100; passes++, elapse(&g, HOUR_NS))
            dh_gpus_pass(g.w);
        CHECK_INT(passes, 31);
        gx_stop(&g);
    }
    check_row = "";
}

static void the_floor_makes_the_calls_of_a_quiet_pass_and_no_others(void)
{
    static const char *const calls[] = { "nvmlDeviceGetFieldValues", "nvmlDeviceGetTemperature",
                                         "nvmlDeviceGetMarginTemperature",
                                         "nvmlDeviceGetCurrentClocksEventReasons" };
    struct gx g = alone("profile h100 gpus=2");

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
        uint64_t before = gx_tell(&g, "gpu 1 calls %s", calls[i]);

        check_row = calls[i];
        CHECK_INT(dh_gpus_pass(g.w), 2 * 4);
        CHECK_U64(gx_tell(&g, "gpu 1 calls %s", calls[i]), before + 1);
        CHECK_INT(dh_gpus_floor(g.w), 2 * 4);
        CHECK_U64(gx_tell(&g, "gpu 1 calls %s", calls[i]), before + 2);
    }
    check_row = "";
    gx_stop(&g);
}

static void threads_and_we_do_not_take_turns(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    CHECK_INT(dh_gpus_pass(g.w), -EBUSY);
    CHECK_INT(dh_gpus_floor(g.w), -EBUSY);
    gx_stop(&g);
}

static void without_a_library_there_is_nothing_to_call(void)
{
    struct dh_gpus_options o = gx_options();
    struct dh_gpu_watch *w;
    int fd = eventfd(0, EFD_CLOEXEC);

    fx_must(!dh_gpus_open(&o, "libnone.so.1", fx_root, NULL, 0, fd, &w), "dh_gpus_open");
    CHECK_INT(dh_gpus_pass(w), 0);
    CHECK_INT(dh_gpus_floor(w), 0);
    CHECK_INT(dh_gpus_stop(w, 0), 0);
    close(fd);
}

int main(void)
{
    fx_begin();
    a_pass_reads_what_is_there_now();
    one_answer_that_changes_among_equal_ones_is_taken();
    after_a_failure_every_answer_is_taken();
    a_gpu_that_is_lost_in_the_last_call_of_a_quiet_pass_is_forgotten();
    a_pass_that_comes_a_little_early_reads_the_slow_fields_all_the_same();
    a_link_that_fails_at_first_is_found_as_soon_as_it_answers();
    a_link_that_was_not_there_is_asked_for_now_and_then();
    the_floor_makes_the_calls_of_a_quiet_pass_and_no_others();
    threads_and_we_do_not_take_turns();
    without_a_library_there_is_nothing_to_call();
    return check_done("test_gpu_alone");
}

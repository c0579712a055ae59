/* Tests of a watch without threads: passes on the caller's thread, and their lower bound. */
#include "check.h"
#include "gpu_fixture.h"

#define HOUR_NS (3600 * DH_NS)
#define SETTLING 3 /* passes until missing values are not queried any more, and no slow field is due */

/* Open a watch as gx_watch(), without starting it. */
static struct gx unstarted_of(int branch, const char *scenario)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(branch, scenario);

    o.slow_ns = o.retry_ns = HOUR_NS;
    g.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fx_must(!dh_gpus_open(&o, g.library, fx_root, NULL, 0, g.wake_fd, -1, &g.w), "dh_gpus_open");
    g.cap = dh_gpus_size(g.w);
    g.head = aligned_alloc(8, g.cap);
    fx_must(g.head != NULL, "aligned_alloc");
    return g;
}

static struct gx unstarted(const char *scenario)
{
    return unstarted_of(580, scenario);
}

static void test_pass_reads_the_current_values(void)
{
    struct gx g = unstarted("profile h100 gpus=2");

    for (int i = 0; i < SETTLING; i++)
        CHECK(dh_gpus_pass(g.w) > 0);
    CHECK_INT(gx_value(&g, 1, DH_GPU_TEMP), 33);
    CHECK_U64(gx_gpu(&g, 1)->passes, SETTLING);
    gx_command(&g, "gpu 1 set temperature=71");
    dh_gpus_pass(g.w);
    CHECK_INT(gx_value(&g, 1, DH_GPU_TEMP), 71);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), 33);
    gx_stop(&g);
}

/* Equal results are not stored again, so each must be distinguished from its neighbours. */
static void test_one_changed_result_among_equal_ones_is_stored(void)
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
    struct gx g = unstarted("profile h100 gpus=2");

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
        check_row = table[i].set;
        gx_command(&g, "gpu 1 set %s", table[i].set);
        for (int pass = 0; pass < 2; pass++) {
            dh_gpus_pass(g.w);
            CHECK_INT(gx_value(&g, 1, table[i].field), table[i].now);
            CHECK_INT(gx_value(&g, 0, table[i].field), table[i].then);
        }
        gx_command(&g, "gpu 1 set %s", table[i].back);
        dh_gpus_pass(g.w);
        CHECK_INT(gx_value(&g, 1, table[i].field), table[i].then);
    }
    check_row = "";
    gx_stop(&g);
}

/* Also if the results are the same as before a failed call or a lost GPU. */
static void test_after_a_failure_every_result_is_stored(void)
{
    static const char *const faults[][2] = {
        { "gpu 1 fail nvmlDeviceGetFieldValues 999", "gpu 1 fail nvmlDeviceGetFieldValues 0" },
        { "gpu 1 fail field 94 999", "gpu 1 fail field 94 0" },
        { "gpu 1 lost", "gpu 1 back" },
    };
    struct gx g = unstarted("profile h100 gpus=2");

    dh_gpus_pass(g.w);
    gx_command(&g, "gpu 1 set pcie.replay=3");
    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    for (size_t i = 0; i < sizeof(faults) / sizeof(*faults); i++) {
        check_row = faults[i][0];
        gx_command(&g, "%s", faults[i][0]);
        for (int pass = 0; pass < 2; pass++) {
            dh_gpus_pass(g.w);
            CHECK_INT(gx_value(&g, 1, DH_GPU_PCIE_REPLAY), -1);
            CHECK_INT(gx_value(&g, 0, DH_GPU_PCIE_REPLAY), 0);
        }
        gx_command(&g, "%s", faults[i][1]);
        dh_gpus_pass(g.w);
        CHECK_INT(gx_value(&g, 1, DH_GPU_PCIE_REPLAY), 3);
    }
    check_row = "";
    gx_stop(&g);
}

/* The failing pass repeats a pass without changed readings. */
static void test_gpu_lost_in_the_last_call_of_a_pass_loses_its_values(void)
{
    struct gx g = unstarted("profile h100 gpus=1\ngpu 0 mig on\n" /* queried until it answers */
                        "gpu 0 fail nvmlDeviceGetMigDeviceHandleByIndex 999");

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    CHECK_INT(gx_value(&g, 0, DH_GPU_TEMP), 33);
    gx_command(&g, "gpu 0 fail nvmlDeviceGetMigDeviceHandleByIndex %d", NVML_ERROR_GPU_IS_LOST);
    dh_gpus_pass(g.w);
    CHECK_INT(gx_gpu(&g, 0)->status, NVML_ERROR_GPU_IS_LOST);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        CHECK_INT(gx_value(&g, 0, f), -1);
    CHECK_INT(gx_gpu(&g, 0)->code[DH_GPU_TEMP], NVML_ERROR_GPU_IS_LOST);
    gx_stop(&g);
}

/* Let time pass for the GPU's thread: move its time stamps back. */
static void elapse(struct gx *g, uint64_t ns)
{
    struct dh_gpu_slot *s = dh_gpu_slot_at(g->w, 0);

    s->slow_ns -= ns;
    s->links_ns -= s->links_ns ? ns : 0;
}

static void test_pass_slightly_early_still_reads_the_slow_fields(void)
{
    struct gx g = unstarted("profile h100 gpus=1");
    uint64_t slow_passes;

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    slow_passes = gx_gpu(&g, 0)->slow_passes;
    gx_command(&g, "gpu 0 set pstate=5");
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

/*
 * The first report may follow the first pass. A counter that only the second pass reads counts no increase
 * between both.
 */
static void test_first_pass_reads_all_fields_of_the_gpu(void)
{
    static const int branches[] = { 535, 570, 575, 580, 590 };
    static const char *const scenarios[] = {
        "profile h100 gpus=1",
        "profile h100 gpus=1\ngpu 0 fail field 165 3",
        "profile a100 gpus=1",
        "profile h100 gpus=1\ngpu 0 mig 3g.40gb 1g.10gb",
    };

    for (size_t i = 0; i < 5 * sizeof(scenarios) / sizeof(*scenarios); i++) {
        struct gx g = unstarted_of(branches[i % 5], scenarios[i / 5]);
        struct dh_gpu first;

        check_row = scenarios[i / 5];
        dh_gpus_pass(g.w);
        first = *gx_gpu(&g, 0);
        for (int pass = 0; pass < SETTLING; pass++, elapse(&g, HOUR_NS))
            dh_gpus_pass(g.w);
        CHECK_U64(first.links, gx_gpu(&g, 0)->links);
        for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
            check_row = dh_gpu_rows[f].name;
            CHECK_INT(dh_gpu_is_valid(&first, f), dh_gpu_is_valid(gx_gpu(&g, 0), f));
        }
        gx_stop(&g);
    }
    check_row = "";
}

/* Its error did not mean that the link does not exist. */
static void test_link_that_failed_at_first_is_found_when_it_answers(void)
{
    for (int i = 0; i < 2; i++) {
        char scenario[200];
        struct gx g;

        snprintf(scenario, sizeof(scenario), link_scenarios[i], NVML_ERROR_UNKNOWN);
        g = unstarted(scenario);
        check_row = scenario;
        for (int pass = 0; pass < SETTLING; pass++, elapse(&g, HOUR_NS))
            dh_gpus_pass(g.w);
        CHECK_U64(gx_gpu(&g, 0)->links, 11);
        CHECK_INT(gx_value(&g, 0, DH_GPU_LINKS_UP), 0xf7f);
        gx_command(&g, "gpu 0 fail link 7 0");
        dh_gpus_pass(g.w);
        CHECK_U64(gx_gpu(&g, 0)->links, 12);
        CHECK_INT(gx_value(&g, 0, DH_GPU_LINKS_UP), 0xfff);
        gx_stop(&g);
    }
    check_row = "";
}

/* A partitioned GPU has no links, and a GPU that was reset may have more. */
static void test_missing_link_is_queried_again_after_thirty_slow_passes(void)
{
    for (int i = 0; i < 2; i++) {
        char scenario[200];
        struct gx g;
        int passes = 0;

        snprintf(scenario, sizeof(scenario), link_scenarios[i], NVML_ERROR_NOT_SUPPORTED);
        g = unstarted(scenario);
        check_row = scenario;
        for (int pass = 0; pass < SETTLING; pass++)
            dh_gpus_pass(g.w);
        CHECK_U64(gx_gpu(&g, 0)->links, 11);
        gx_command(&g, "gpu 0 fail link 7 0");
        for (; gx_gpu(&g, 0)->links < 12 && passes < 100; passes++, elapse(&g, HOUR_NS))
            dh_gpus_pass(g.w);
        CHECK_INT(passes, 31);
        gx_stop(&g);
    }
    check_row = "";
}

static void test_lower_bound_makes_exactly_the_calls_of_a_fast_pass(void)
{
    static const char *const calls[] = { "nvmlDeviceGetFieldValues", "nvmlDeviceGetTemperature",
                                         "nvmlDeviceGetMarginTemperature",
                                         "nvmlDeviceGetCurrentClocksEventReasons" };
    struct gx g = unstarted("profile h100 gpus=2");

    for (int i = 0; i < SETTLING; i++)
        dh_gpus_pass(g.w);
    for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
        uint64_t before = gx_command(&g, "gpu 1 calls %s", calls[i]);

        check_row = calls[i];
        CHECK_INT(dh_gpus_pass(g.w), 2 * 4);
        CHECK_U64(gx_command(&g, "gpu 1 calls %s", calls[i]), before + 1);
        CHECK_INT(dh_gpus_lower_bound(g.w), 2 * 4);
        CHECK_U64(gx_command(&g, "gpu 1 calls %s", calls[i]), before + 2);
    }
    check_row = "";
    gx_stop(&g);
}

static void test_pass_is_refused_while_the_threads_run(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    CHECK_INT(dh_gpus_pass(g.w), -EBUSY);
    CHECK_INT(dh_gpus_lower_bound(g.w), -EBUSY);
    gx_stop(&g);
}

static void test_without_a_library_no_calls_are_made(void)
{
    struct dh_gpus_options o = gx_options();
    struct dh_gpu_watch *w;
    int fd = eventfd(0, EFD_CLOEXEC);

    fx_must(!dh_gpus_open(&o, "libnone.so.1", fx_root, NULL, 0, fd, -1, &w), "dh_gpus_open");
    CHECK_INT(dh_gpus_pass(w), 0);
    CHECK_INT(dh_gpus_lower_bound(w), 0);
    CHECK_INT(dh_gpus_stop(w, 0), 0);
    close(fd);
}

int main(void)
{
    fx_begin();
    test_pass_reads_the_current_values();
    test_one_changed_result_among_equal_ones_is_stored();
    test_after_a_failure_every_result_is_stored();
    test_gpu_lost_in_the_last_call_of_a_pass_loses_its_values();
    test_pass_slightly_early_still_reads_the_slow_fields();
    test_first_pass_reads_all_fields_of_the_gpu();
    test_link_that_failed_at_first_is_found_when_it_answers();
    test_missing_link_is_queried_again_after_thirty_slow_passes();
    test_lower_bound_makes_exactly_the_calls_of_a_fast_pass();
    test_pass_is_refused_while_the_threads_run();
    test_without_a_library_no_calls_are_made();
    return check_done("test_gpu_bench");
}

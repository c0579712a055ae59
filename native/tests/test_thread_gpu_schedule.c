/* Tests of which thread runs the passes over GPUs: one for all while they are short, otherwise one per GPU. */
#include "check.h"
#include "gpu_fixture.h"

/* Start a watch whose passes are short also on a busy machine, and whose calls are soon overdue. */
static struct gx started(const char *scenario)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, scenario);

    o.period_ns = o.slow_ns = 100 * MS;
    o.deadline_ns = 200 * MS;
    gx_watch(&g, &o, NULL, 0);
    return g;
}

static bool is_common(struct gx *g)
{
    bool common;

    pthread_mutex_lock(&g->w->lock);
    common = g->w->is_common;
    pthread_mutex_unlock(&g->w->lock);
    return common;
}

static bool is_running(struct gx *g, uint32_t index)
{
    bool running;

    pthread_mutex_lock(&g->w->lock);
    running = dh_gpu_slot_at(g->w, index)->is_running;
    pthread_mutex_unlock(&g->w->lock);
    return running;
}

/* Return whether the next passes of all GPUs are due at one multiple of the period. */
static bool are_aligned(struct gx *g, uint32_t gpus)
{
    bool aligned = true;

    pthread_mutex_lock(&g->w->lock);
    for (uint32_t i = 0; i < gpus; i++) {
        const struct dh_gpu_slot *s = dh_gpu_slot_at(g->w, i);

        aligned &= s->next_ns % g->w->opt.period_ns == 0 && s->next_ns == g->w->slots[0].next_ns;
    }
    pthread_mutex_unlock(&g->w->lock);
    return aligned;
}

static void await_passes(struct gx *g, uint32_t index, uint64_t number)
{
    uint64_t passes = gx_gpu(g, index)->passes;

    EVENTUALLY(gx_gpu(g, index)->passes >= passes + number);
}

static void test_short_passes_move_to_the_common_thread(void)
{
    struct gx g = started("profile h100 gpus=3");

    gx_ready(&g, 3);
    EVENTUALLY(is_common(&g));
    for (uint32_t i = 0; i < 3; i++)
        await_passes(&g, i, 3);
    EVENTUALLY(are_aligned(&g, 3)); /* not in the middle of a round */
    gx_command(&g, "gpu 2 set temperature=71");
    EVENTUALLY(gx_value(&g, 2, DH_GPU_TEMP) == 71);
    gx_stop(&g);
}

static void test_single_gpu_stays_in_its_own_thread(void)
{
    struct gx g = started("profile h100 gpus=1");

    gx_ready(&g, 1);
    await_passes(&g, 0, 20);
    CHECK(!is_common(&g));
    gx_stop(&g);
}

static void test_hang_in_the_common_thread_delays_no_other_for_long(void)
{
    struct gx g = started("profile h100 gpus=3");
    uint64_t passes;

    gx_ready(&g, 3);
    EVENTUALLY(is_common(&g));
    gx_command(&g, "gpu 0 hang all");
    gx_await_hang(&g, 0);
    passes = gx_gpu(&g, 0)->passes;
    await_passes(&g, 1, 5);
    await_passes(&g, 2, 5);
    await_passes(&g, 1, 50); /* enough short passes for the common thread, if it were free */
    await_passes(&g, 2, 3);
    CHECK_U64(gx_gpu(&g, 0)->passes, passes);
    gx_command(&g, "gpu 0 release");
    await_passes(&g, 0, 3);
    EVENTUALLY(is_common(&g));
    await_passes(&g, 0, 3);
    gx_stop(&g);
}

/* The costs of its round are noted while a thread of its own reads another GPU of the round. */
static void test_hang_of_the_last_gpu_of_a_round_affects_no_record(void)
{
    struct gx g = started("profile h100 gpus=3");

    gx_ready(&g, 3);
    EVENTUALLY(is_common(&g));
    gx_command(&g, "gpu 2 hang all");
    gx_await_hang(&g, 2);
    await_passes(&g, 0, 3);
    gx_command(&g, "gpu 0 slow 30ms");
    EVENTUALLY(is_running(&g, 0));
    gx_command(&g, "gpu 2 release");
    gx_command(&g, "gpu 0 slow 0s");
    await_passes(&g, 2, 3);
    await_passes(&g, 0, 3);
    gx_stop(&g);
}

static void test_slow_gpu_leaves_the_common_thread(void)
{
    struct gx g = started("profile h100 gpus=3");

    gx_ready(&g, 3);
    EVENTUALLY(is_common(&g));
    gx_command(&g, "gpu 1 slow 20ms");
    EVENTUALLY(!is_common(&g));
    for (uint32_t i = 0; i < 3; i++)
        await_passes(&g, i, 5);
    EVENTUALLY(!is_common(&g)); /* it stays so, unless the machine is too busy to run the other thread */
    gx_command(&g, "gpu 1 slow 0s");
    EVENTUALLY(is_common(&g));
    gx_stop(&g);
}

static void test_requested_pass_is_early_in_the_common_thread(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=2");
    uint64_t passes;

    o.period_ns = 5 * DH_NS;
    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 2);
    pthread_mutex_lock(&g.w->lock);
    g.w->is_common = true; /* sixteen passes would take more than a minute */
    g.w->common_ns = DH_NEVER;
    pthread_cond_broadcast(&g.w->changed);
    pthread_mutex_unlock(&g.w->lock);
    passes = gx_gpu(&g, 1)->slow_passes;
    gx_command(&g, "gpu 1 event 0x100");
    EVENTUALLY(gx_gpu(&g, 1)->slow_passes > passes);
    gx_stop(&g);
}

static void test_abandoned_common_thread_frees_the_watch(void)
{
    struct gx g = started("profile h100 gpus=2");

    gx_ready(&g, 2);
    EVENTUALLY(is_common(&g));
    gx_command(&g, "gpu 1 hang all");
    gx_await_hang(&g, 1);
    CHECK_INT(dh_gpus_stop(g.w, 700 * MS), -ETIMEDOUT);
    gx_command(&g, "gpu 1 release"); /* LeakSanitizer and ThreadSanitizer check the rest */
    gx_free(&g);
}

int main(void)
{
    fx_begin();
    test_short_passes_move_to_the_common_thread();
    test_single_gpu_stays_in_its_own_thread();
    test_hang_in_the_common_thread_delays_no_other_for_long();
    test_hang_of_the_last_gpu_of_a_round_affects_no_record();
    test_slow_gpu_leaves_the_common_thread();
    test_requested_pass_is_early_in_the_common_thread();
    test_abandoned_common_thread_frees_the_watch();
    return check_done("test_thread_gpu_schedule");
}

/*
 * gpu_schedule.c - which thread runs the passes over a GPU, and when.
 *
 * A wake of a thread costs more than a short pass. So while the passes over all GPUs are short, the common thread
 * runs them one after the other: 8 GPUs at 10 Hz take 10 wakes per second instead of 80. Each GPU also has a
 * thread of its own, which sleeps meanwhile. At the start and after a long pass, the GPUs' own threads run the
 * passes, so that a slow GPU delays no other. If a call hangs in the common thread, the deadline thread returns the
 * other GPUs to their own threads.
 */
#include "gpu/gpus.h"

#define SHORT_PASSES 16          /* short passes over each GPU, all in a row, before one thread runs them */
#define DELAY_MAX_NS DH_NS       /* longest delay of other GPUs by a call that hangs in the common thread */
#define DELAY_PER_DEADLINE 5     /* such delays per deadline of a call, if that is shorter */

/* Let each GPU's own thread run its passes. The caller holds the lock. */
void dh_gpus_split(struct dh_gpu_watch *w)
{
    w->short_passes = 0;
    if (!w->is_common)
        return;
    w->is_common = false;
    pthread_cond_broadcast(&w->changed);
}

/*
 * Check that no call hangs in the common thread. Return: when to check again; DH_NEVER if each GPU's own thread runs
 * its passes. The caller holds the lock.
 */
uint64_t dh_gpus_check_common(struct dh_gpu_watch *w, uint64_t now_ns)
{
    uint64_t delay_ns = w->opt.deadline_ns / DELAY_PER_DEADLINE;

    if (!w->is_common)
        return DH_NEVER;
    if (delay_ns > DELAY_MAX_NS)
        delay_ns = DELAY_MAX_NS;
    if (w->common_ns == DH_NEVER)
        return now_ns + delay_ns;
    if (w->common_ns + delay_ns > now_ns)
        return w->common_ns + delay_ns;
    dh_gpus_split(w);
    return DH_NEVER;
}

/*
 * Note the duration of a pass, and let one thread run the passes if they are short: all together take less than
 * half a period. The caller holds the lock.
 */
static void note_duration(struct dh_gpu_watch *w, uint64_t took_ns)
{
    uint32_t gpus = atomic_load(&w->gpus);

    if (took_ns > w->opt.period_ns / (2 * gpus)) {
        dh_gpus_split(w);
        return;
    }
    w->short_passes++;
    if (w->is_common || w->is_common_busy || gpus < 2 || w->short_passes < SHORT_PASSES * gpus)
        return;
    w->is_common = true;
    w->common_ns = DH_NEVER;
    pthread_cond_broadcast(&w->changed);
}

/*
 * Return when the pass after the one that was due at @due_ns is due: one period later as the record has it, so
 * that a longer period is published before the reader waits for it. After a pass longer than the period the
 * GPU rests for one period.
 */
uint64_t dh_gpu_next_pass_ns(const struct dh_gpu_slot *s, uint64_t due_ns, uint64_t now_ns)
{
    uint64_t next_ns = due_ns + s->pub.period_ns;

    return next_ns > now_ns ? next_ns : now_ns + s->pub.period_ns;
}

/*
 * Return when the next pass is due. Requested passes keep a minimum distance: for errors, which come in storms, the
 * configured period. The caller holds the lock.
 */
static uint64_t next_due_ns(const struct dh_gpu_slot *s)
{
    bool requested = s->pass_requested || s->mig_pass_requested || s->verify_requested;
    uint64_t distance_ns = requested ? s->w->opt.period_ns / 10 : s->w->opt.period_ns;
    uint64_t soon_ns = s->ended_ns + distance_ns;

    return (requested || s->error_pass_requested) && soon_ns < s->next_ns ? soon_ns : s->next_ns;
}

/* Run the pass that was due at @due_ns. The caller holds the lock. Return: the time of its end. */
static uint64_t run_pass(struct dh_gpu_slot *s, uint64_t due_ns, uint64_t now_ns)
{
    struct dh_gpu_watch *w = s->w;
    uint64_t set_id = atomic_load(&w->set_id);

    s->slow = s->mig_pass_requested;
    s->verify_due = s->verify_requested;
    s->pass_requested = s->mig_pass_requested = s->verify_requested = s->error_pass_requested = false;
    s->is_running = true;
    pthread_mutex_unlock(&w->lock);
    dh_gpu_pass_once(s);
    s->ended_ns = dh_now_ns();
    pthread_mutex_lock(&w->lock);
    s->is_running = false;
    s->passed_set_id = set_id;
    s->next_ns = dh_gpu_next_pass_ns(s, due_ns, s->ended_ns);
    note_duration(w, s->ended_ns - now_ns);
    return s->ended_ns;
}

/* Run the passes over one GPU, unless the common thread runs them. */
void *dh_gpu_main(void *arg)
{
    struct dh_gpu_slot *s = arg;
    struct dh_gpu_watch *w = s->w;
    struct dh_thread_usage used = { 0 };

    pthread_mutex_lock(&w->lock);
    while (!w->stopping) {
        uint64_t due_ns = w->is_common || s->is_running ? DH_NEVER : next_due_ns(s), now_ns = dh_now_ns();

        if (now_ns < due_ns) {
            dh_gpus_wait(w, due_ns);
            continue;
        }
        run_pass(s, due_ns, now_ns);
        dh_gpus_note_usage(w, 1ull << s->index, &used);
    }
    pthread_mutex_unlock(&w->lock);
    dh_gpus_thread_exit(w);
    return NULL;
}

/* Return when the first pass is due, DH_NEVER if none is. The caller holds the lock. */
static uint64_t first_due_ns(struct dh_gpu_watch *w)
{
    uint64_t first_ns = DH_NEVER;

    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        const struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);
        uint64_t due_ns = s->is_running ? DH_NEVER : next_due_ns(s);

        first_ns = due_ns < first_ns ? due_ns : first_ns;
    }
    return first_ns;
}

/*
 * Run the passes that are due at @due_ns, or at most half a period later: so all GPUs are soon due at the same
 * time. The caller holds the lock. Return: the bit set of GPUs with a pass.
 */
static uint64_t run_round(struct dh_gpu_watch *w, uint64_t due_ns, uint64_t now_ns)
{
    uint64_t done = 0, until_ns = due_ns + w->opt.period_ns / 2;

    due_ns -= due_ns % w->opt.period_ns; /* the next passes are due at a multiple, as those of the sampler */

    for (uint32_t i = 0; i < atomic_load(&w->gpus) && w->is_common && !w->stopping; i++) {
        struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);

        if (s->is_running || next_due_ns(s) > until_ns)
            continue;
        w->common_ns = now_ns;
        w->is_common_busy = true;
        now_ns = run_pass(s, due_ns, now_ns);
        w->is_common_busy = false;
        done |= 1ull << i;
    }
    return done;
}

void *dh_gpus_common_main(void *arg)
{
    struct dh_gpu_watch *w = arg;
    struct dh_thread_usage used = { 0 };

    pthread_mutex_lock(&w->lock);
    while (!w->stopping) {
        uint64_t due_ns = w->is_common ? first_due_ns(w) : DH_NEVER, now_ns = dh_now_ns();

        w->common_ns = due_ns;
        if (now_ns < due_ns) {
            dh_gpus_wait(w, due_ns);
            continue;
        }
        dh_gpus_note_usage(w, run_round(w, due_ns, now_ns), &used);
        if (!w->is_common)
            pthread_cond_broadcast(&w->changed); /* the thread of the GPU of the last pass may wait for its end */
    }
    pthread_mutex_unlock(&w->lock);
    dh_gpus_thread_exit(w);
    return NULL;
}

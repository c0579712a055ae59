/*
 * gpu_budget.c - CPU time of the threads that call NVML, and the period that keeps it within the budget.
 *
 * What a call of NVML costs depends on driver and GPU, and only a measurement on the machine shows it.
 */
#include <sys/resource.h>

#include "gpu/gpus.h"

#define AVERAGED_PASSES 16
#define AVERAGED_SLOW_PASSES 4
#define LEARNED_PASSES 8               /* the first passes read everything, and are not typical */
#define STRETCHED_MAX_NS (10 * DH_NS)  /* longest period because of the budget */
#define STEP_NS (DH_NS / 10)           /* a stretched period is a multiple */

static void add(uint64_t *to, uint64_t amount)
{
    __atomic_store_n(to, *to + amount, __ATOMIC_RELAXED); /* there is one writer */
}

static uint64_t load(const uint64_t *from)
{
    return __atomic_load_n(from, __ATOMIC_RELAXED);
}

static uint64_t ns_of(struct timeval t)
{
    return (uint64_t)t.tv_sec * DH_NS + (uint64_t)t.tv_usec * 1000;
}

/* Count the call that is_measured and now ends. */
void dh_call_measured(struct dh_caller *c, uint64_t call)
{
    struct dh_call_cost *cost = &c->cost[call < DH_CALL_NUM ? call : DH_CALL_NONE];

    add(&cost->cpu_ns, dh_clock_ns(CLOCK_THREAD_CPUTIME_ID) - c->began_cpu_ns);
    add(&cost->wall_ns, dh_now_ns() - c->began_ns);
    add(&cost->calls, 1);
}

/*
 * Return the mean CPU time of the last @weight passes over a GPU, from the mean before the last pass and the time
 * of that pass. One pass counts as at most what the budget has for the longest period, or for the time between
 * two slow passes: the driver may spin for seconds in a call to a GPU that hangs, and that one pass must not
 * stretch the period for a quarter of an hour.
 */
uint64_t dh_gpu_mean_ns(const struct dh_gpus_options *o, uint64_t mean_ns, uint64_t took_ns, uint64_t weight,
                        uint32_t gpus)
{
    uint64_t span_ns = o->slow_ns > STRETCHED_MAX_NS ? o->slow_ns : STRETCHED_MAX_NS;
    double most_ns = (double)span_ns / (double)DH_NS * (double)o->cpu_budget_ns / (gpus ? gpus : 1) + 1;

    if (o->cpu_budget_ns && (double)took_ns > most_ns)
        took_ns = (uint64_t)most_ns;
    return (mean_ns * (weight - 1) + took_ns) / weight;
}

/*
 * Return the time between two passes over a GPU at which the passes over all @gpus keep within the budget: the
 * configured one, or up to 10 s. @now_ns, the time in force, stays until it is wrong by a quarter, because a change
 * of it is published.
 *
 * A fast pass takes @fast_ns of CPU time, a slow one @slow_ns. Slow passes are due by time: a mean of both kinds would
 * rise with the period, because more of the passes are slow then, and so keep a period that is longer than needed.
 */
uint64_t dh_gpu_period_ns(const struct dh_gpus_options *o, uint64_t now_ns, uint64_t fast_ns, uint64_t slow_ns,
                          uint32_t gpus)
{
    double fast = (double)fast_ns, slow = slow_ns > fast_ns ? (double)slow_ns : fast, now = (double)now_ns;
    double budget = (double)o->cpu_budget_ns / (double)DH_NS / (gpus ? gpus : 1), left, needed_ns;

    if (!o->cpu_budget_ns || o->period_ns >= STRETCHED_MAX_NS)
        return o->period_ns;
    left = budget - (slow - fast) / (double)o->slow_ns;
    needed_ns = left > 0 ? fast / left : (double)DH_NEVER;
    if (needed_ns > (double)o->slow_ns) /* every pass is a slow one */
        needed_ns = slow / budget;
    if (needed_ns <= (double)o->period_ns)
        return o->period_ns;
    if (needed_ns > 0.75 * now && needed_ns <= 1.25 * now)
        return now_ns;
    if (needed_ns >= (double)STRETCHED_MAX_NS)
        return STRETCHED_MAX_NS;
    return ((uint64_t)needed_ns + STEP_NS - 1) / STEP_NS * STEP_NS;
}

/* Set the period of a GPU from the CPU time of its last pass. */
static void note_pass(struct dh_gpu_slot *s, uint64_t took_ns, uint32_t gpus)
{
    uint64_t weight, slow_weight = s->slow_cpu_ns ? AVERAGED_SLOW_PASSES : 1;

    add(&s->cpu_ns, took_ns);
    if (s->work.passes <= LEARNED_PASSES)
        return;
    weight = s->work.passes - LEARNED_PASSES < AVERAGED_PASSES ? s->work.passes - LEARNED_PASSES : AVERAGED_PASSES;
    if (s->slow)
        s->slow_cpu_ns = dh_gpu_mean_ns(&s->w->opt, s->slow_cpu_ns, took_ns, slow_weight, gpus);
    else
        s->fast_cpu_ns = dh_gpu_mean_ns(&s->w->opt, s->fast_cpu_ns, took_ns, weight, gpus);
    if (weight == AVERAGED_PASSES)
        s->work.period_ns =
            dh_gpu_period_ns(&s->w->opt, s->work.period_ns, s->fast_cpu_ns, s->slow_cpu_ns, gpus);
}

/*
 * Note what this thread used since @used for the passes over the GPUs in the bit set @done, and set their periods.
 * All passes count as equally expensive: one request to the kernel is enough for them. The caller holds the lock.
 */
void dh_gpus_note_usage(struct dh_gpu_watch *w, uint64_t done, struct dh_thread_usage *used)
{
    uint32_t passes = (uint32_t)__builtin_popcountll(done), gpus = atomic_load(&w->gpus);
    struct dh_thread_usage before = *used;
    struct rusage now;

    if (!passes || getrusage(RUSAGE_THREAD, &now))
        return;
    used->cpu_ns = ns_of(now.ru_utime) + ns_of(now.ru_stime);
    used->switches = (uint64_t)(now.ru_nvcsw + now.ru_nivcsw);
    add(&dh_gpu_slot_at(w, (uint32_t)__builtin_ctzll(done))->switches, used->switches - before.switches);
    for (; done; done &= done - 1) {
        struct dh_gpu_slot *s = dh_gpu_slot_at(w, (uint32_t)__builtin_ctzll(done));

        if (!s->is_running) /* else its own thread, which took it over while a later GPU hung, uses the record */
            note_pass(s, (used->cpu_ns - before.cpu_ns) / passes, gpus);
    }
}

static void costs_add(struct dh_gpu_costs *to, const struct dh_caller *c)
{
    for (int call = 0; call < DH_CALL_NUM; call++) {
        to->call[call].calls += load(&c->cost[call].calls);
        to->call[call].cpu_ns += load(&c->cost[call].cpu_ns);
        to->call[call].wall_ns += load(&c->cost[call].wall_ns);
    }
}

void dh_gpus_costs(struct dh_gpu_watch *w, struct dh_gpu_costs *out)
{
    uint32_t gpus = atomic_load_explicit(&w->gpus, memory_order_acquire);

    *out = (struct dh_gpu_costs){ 0 };
    costs_add(out, &w->opener);
    costs_add(out, &w->waiter);
    for (uint32_t i = 0; i < gpus && i < DH_GPU_MAX; i++) { /* the other process may have written any number */
        const struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);
        uint64_t period_ns = load(&s->work.period_ns);

        out->cpu_ns += load(&s->cpu_ns);
        out->switches += load(&s->switches);
        if (period_ns > out->period_ns)
            out->period_ns = period_ns;
        costs_add(out, &s->caller);
    }
}

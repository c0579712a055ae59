/* Tests of one GPU's record: stored results, the next pass's queries, and wakes of the reader. */
#include "check.h"
#include "gpu_fixture.h"

#define PCIE_REPLAY DH_GPU_PCIE_REPLAY /* a fast field */
#define PSTATE DH_GPU_PSTATE           /* a slow field */
#define FIXED DH_GPU_TEMP_SHUTDOWN
#define LAST (DH_GPU_FIELD_NUM - 1)

/* ---- codes ---- */

static void test_code_classifies_field_and_gpu(void)
{
    static const int unreachable[] = { 1, 9, 15, 18, 28 }, unsupported[] = { 2, 3, 13, 22, 25, 26 };

    for (int code = 0, d = 0, u = 0; code <= NVML_ERROR_UNKNOWN; code++) {
        bool is_dead = d < 5 && code == unreachable[d], is_unsupported = u < 6 && code == unsupported[u];

        CHECK_INT(dh_gpu_is_unreachable((nvmlReturn_t)code), is_dead);
        CHECK_INT(dh_gpu_is_unsupported(code), is_unsupported);
        d += is_dead, u += is_unsupported;
    }
}

static void test_gpu_status_is_its_worst_result(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    CHECK_INT(dh_gpu_note_status(s, NVML_SUCCESS), NVML_SUCCESS);
    CHECK_INT(dh_gpu_note_status(s, NVML_ERROR_UNKNOWN), NVML_ERROR_UNKNOWN);
    CHECK_INT(s->status, NVML_SUCCESS); /* the problem of one field */
    CHECK_INT(dh_gpu_note_status(s, NVML_ERROR_RESET_REQUIRED), NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(s->status, NVML_ERROR_RESET_REQUIRED);
    CHECK(!s->unreachable);
    dh_gpu_note_status(s, NVML_SUCCESS);
    CHECK_INT(s->status, NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(dh_gpu_note_status(s, NVML_ERROR_GPU_IS_LOST), NVML_ERROR_GPU_IS_LOST);
    CHECK(s->unreachable);
    dh_gpu_note_status(s, NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(s->status, NVML_ERROR_GPU_IS_LOST);
    gx_slot_free(s);
}

/* ---- queries ---- */

static bool is_planned(struct dh_gpu_slot *s, bool slow, enum dh_gpu_field field)
{
    s->slow = slow;
    dh_gpu_plan_fields(s);
    return dh_gpu_is_due(s, field);
}

static void test_field_is_read_at_its_pace(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        enum dh_gpu_pace pace = dh_gpu_rows[f].pace;

        check_row = dh_gpu_field_name(f);
        CHECK_INT(is_planned(s, false, f), pace == DH_PACE_FAST);
        CHECK(is_planned(s, true, f));
        dh_gpu_store(s, f, 0, 7);
        CHECK_INT(is_planned(s, true, f), pace != DH_PACE_FIXED);
    }
    check_row = "";
    gx_slot_free(s);
}

/* A field without a value is read although its event is awaited: the event announces changes only. */
static void test_field_with_an_awaited_event_is_left_out_of_fast_passes(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        uint64_t event = dh_gpu_rows[f].announced_by;

        check_row = dh_gpu_field_name(f);
        if (dh_gpu_rows[f].pace != DH_PACE_FAST)
            continue;
        CHECK((event & DH_KNOWN_EVENTS) == event);
        s->awaited = DH_KNOWN_EVENTS;
        CHECK(is_planned(s, false, f));
        dh_gpu_store(s, f, 0, 7);
        CHECK_INT(is_planned(s, false, f), !event);
        CHECK(is_planned(s, true, f));
        s->awaited = DH_KNOWN_EVENTS & ~event;
        CHECK(is_planned(s, false, f));
    }
    check_row = "";
    CHECK(dh_gpu_rows[DH_GPU_REMAP_CORRECTABLE].announced_by);
    gx_slot_free(s);
}

static void test_events_are_awaited_while_the_waiter_waits_and_no_event_is_recent(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    uint64_t late_ns = 2 * DH_EVENT_WAIT_NS, slow_ns = s->w->opt.slow_ns;

    atomic_store(&s->w->waited_ns, s->now_ns);
    CHECK_U64(dh_gpu_awaited_events(s), 0); /* not registered */
    atomic_store(&s->event_mask, 9);
    CHECK_U64(dh_gpu_awaited_events(s), 9);
    atomic_store(&s->w->waited_ns, s->now_ns + 1); /* the wait ended after this pass began */
    CHECK_U64(dh_gpu_awaited_events(s), 9);
    atomic_store(&s->w->waited_ns, s->now_ns - late_ns + 1);
    CHECK_U64(dh_gpu_awaited_events(s), 9);
    atomic_store(&s->w->waited_ns, s->now_ns - late_ns);
    CHECK_U64(dh_gpu_awaited_events(s), 0);
    atomic_store(&s->w->waited_ns, s->now_ns);
    atomic_store(&s->event_ns, s->now_ns + 1);
    CHECK_U64(dh_gpu_awaited_events(s), 0);
    atomic_store(&s->event_ns, s->now_ns - slow_ns + 1);
    CHECK_U64(dh_gpu_awaited_events(s), 0);
    atomic_store(&s->event_ns, s->now_ns - slow_ns);
    CHECK_U64(dh_gpu_awaited_events(s), 9);
    atomic_store(&s->event_ns, 0);
    s->now_ns = slow_ns - 1; /* soon after the boot of the node */
    CHECK_U64(dh_gpu_awaited_events(s), 9);
    gx_slot_free(s);
}

/* The GPU may be partitioned or reset later, and then support the field. */
static void test_unsupported_field_is_retried_after_thirty_slow_passes(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    uint64_t thirty_ns = 30 * s->w->opt.slow_ns;

    dh_gpu_store(s, PCIE_REPLAY, NVML_ERROR_NOT_SUPPORTED, 0);
    CHECK(!is_planned(s, true, PCIE_REPLAY));
    s->now_ns += thirty_ns - 1;
    CHECK(!is_planned(s, true, PCIE_REPLAY));
    s->now_ns++;
    CHECK(is_planned(s, false, PCIE_REPLAY));
    gx_slot_free(s);
}

static void test_failed_field_is_retried_in_the_next_pass(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    dh_gpu_store(s, PCIE_REPLAY, NVML_ERROR_UNKNOWN, 0);
    CHECK(is_planned(s, false, PCIE_REPLAY));
    dh_gpu_store(s, PCIE_REPLAY, 0, 7);
    dh_gpu_store(s, PCIE_REPLAY, NVML_ERROR_NOT_SUPPORTED, 0);
    CHECK(is_planned(s, false, PCIE_REPLAY));
    gx_slot_free(s);
}

static void test_field_supported_later_is_read_in_every_pass(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    dh_gpu_store(s, PCIE_REPLAY, NVML_ERROR_NOT_SUPPORTED, 0);
    dh_gpu_store(s, PCIE_REPLAY, 0, 7);
    CHECK(is_planned(s, false, PCIE_REPLAY));
    gx_slot_free(s);
}

/* ---- readings ---- */

static void test_result_changes_its_own_field_only(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    const struct dh_gpu *g = &s->work;

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        dh_gpu_store(s, f, 0, f + 1);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        CHECK(dh_gpu_is_valid(g, f) && dh_gpu_has_bit(g->seen, f));
        CHECK_U64(g->value[f], f + 1);
    }
    dh_gpu_store(s, LAST, NVML_ERROR_UNKNOWN, 42);
    CHECK(!dh_gpu_is_valid(g, LAST) && dh_gpu_has_bit(g->seen, LAST));
    CHECK_U64(g->value[LAST], 0); /* unknown: neither 42 nor the last value */
    CHECK_INT(g->code[LAST], NVML_ERROR_UNKNOWN);
    for (uint32_t f = 0; f < LAST; f++)
        CHECK(dh_gpu_is_valid(g, f) && !g->code[f]);
    dh_gpu_store(s, LAST, 0, 0);
    CHECK(dh_gpu_is_valid(g, LAST));
    CHECK_INT(g->code[LAST], 0);
    gx_slot_free(s);
}

static void test_pass_notes_whether_anything_changed_or_failed(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    dh_gpu_store(s, PCIE_REPLAY, 0, 0); /* 0 is a change if the value was unknown */
    CHECK(!s->unchanged && s->fast_ok);
    s->unchanged = true;
    dh_gpu_store(s, PCIE_REPLAY, 0, 0);
    CHECK(s->unchanged && s->fast_ok);
    dh_gpu_store(s, PCIE_REPLAY, 0, 1);
    CHECK(!s->unchanged && s->fast_ok);
    s->unchanged = true;
    dh_gpu_store(s, PCIE_REPLAY, NVML_ERROR_UNKNOWN, 1);
    CHECK(!s->unchanged && !s->fast_ok);
    dh_gpu_store(s, PSTATE, 0, 1);
    CHECK(!s->fast_ok);
    gx_slot_free(s);
}

static void test_invalidated_gpu_keeps_its_seen_bits(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    const struct dh_gpu *g = &s->work;

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        dh_gpu_store(s, f, 0, f + 1);
    dh_gpu_store(s, PSTATE, NVML_ERROR_UNKNOWN, 0);
    s->unchanged = true;
    s->status = NVML_ERROR_GPU_IS_LOST;
    dh_gpu_invalidate(s);
    CHECK(!s->unchanged);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        CHECK(!dh_gpu_is_valid(g, f) && dh_gpu_has_bit(g->seen, f));
        CHECK_U64(g->value[f], 0);
        CHECK_INT(g->code[f], f == PSTATE ? NVML_ERROR_UNKNOWN : NVML_ERROR_GPU_IS_LOST);
    }
    gx_slot_free(s);
}

/* ---- publishing ---- */

/* Publish. Return: whether the reader was woken. */
static bool publish_wakes(struct dh_gpu_slot *s)
{
    uint64_t before = atomic_load(&s->w->wakes_done);

    dh_gpu_publish(s);
    s->unchanged = false;
    return atomic_load(&s->w->wakes_done) > before;
}

static void test_pass_counters_are_published_without_a_wake(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    publish_wakes(s);
    s->work.passes = 3;
    s->work.heartbeat_ns = 4;
    s->caller.calls = 5;
    s->work.value[LAST] = 6;
    CHECK(!publish_wakes(s));
    CHECK_U64(s->pub.passes, 3);
    CHECK_U64(s->pub.heartbeat_ns, 4);
    CHECK_U64(s->pub.calls, 5);
    CHECK_U64(s->pub.value[LAST], 6);
    s->work.mig[DH_MIG_MAX - 1].gi = 7; /* the end of the part that a GPU's thread writes */
    CHECK(!publish_wakes(s));
    CHECK_U64(s->pub.mig[DH_MIG_MAX - 1].gi, 7);
    gx_slot_free(s);
}

/* This is the purpose: most passes over a healthy GPU write only their own counters. */
static void test_unchanged_record_is_not_compared(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    s->work.passes = 3;
    s->work.value[LAST] = 6;
    s->unchanged = true;
    CHECK(!publish_wakes(s));
    CHECK_U64(s->pub.passes, 3);
    CHECK_U64(s->pub.value[LAST], 0);
    gx_slot_free(s);
}

static void test_status_or_identity_change_always_wakes(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    CHECK(!publish_wakes(s));
    s->work.state = DH_STATE_FAILING;
    CHECK(publish_wakes(s));
    s->work.state = DH_STATE_OK;
    dh_gpu_store(s, PSTATE, 0, 5); /* a field without wake */
    CHECK(publish_wakes(s));
    s->work.status = NVML_ERROR_GPU_IS_LOST;
    CHECK(publish_wakes(s));
    s->work.handles++;
    CHECK(publish_wakes(s));
    atomic_store(&s->caller.overdue, 1);
    CHECK(publish_wakes(s));
    s->work.links = 18;
    CHECK(publish_wakes(s));
    s->work.mig_generation++;
    CHECK(publish_wakes(s));
    strcpy(s->work.uuid, "GPU-1");
    CHECK(publish_wakes(s));
    CHECK(!publish_wakes(s));
    gx_slot_free(s);
}

static void test_field_change_wakes_by_the_table_of_wakes(void)
{
    static const struct dh_gpu_wake wakes[] = {
        { .field = PCIE_REPLAY, .mode = DH_GPU_WAKE_CHANGE, .limit = PCIE_REPLAY },
        { .field = DH_GPU_TEMP, .mode = DH_GPU_WAKE_OVER, .limit = DH_GPU_TEMP_GPU_MAX },
    };
    struct dh_gpu_slot *s = gx_slot(wakes, 2);

    CHECK(!publish_wakes(s));
    dh_gpu_store(s, DH_GPU_RECOVERY_ACTION, 0, 5); /* a field without wake */
    CHECK(!publish_wakes(s));
    dh_gpu_store(s, PCIE_REPLAY, 0, 0);
    CHECK(publish_wakes(s));
    dh_gpu_store(s, PCIE_REPLAY, 0, 1);
    CHECK(publish_wakes(s));
    dh_gpu_store(s, DH_GPU_RECOVERY_ACTION, 0, 6);
    CHECK(!publish_wakes(s));
    dh_gpu_store(s, DH_GPU_TEMP, 0, 80);
    CHECK(publish_wakes(s)); /* for its validity */
    dh_gpu_store(s, DH_GPU_TEMP_GPU_MAX, 0, 90);
    CHECK(!publish_wakes(s));
    dh_gpu_store(s, DH_GPU_TEMP_GPU_MAX, 0, 80); /* the limit fell to the value */
    CHECK(publish_wakes(s));
    dh_gpu_store(s, DH_GPU_TEMP, NVML_ERROR_UNKNOWN, 0);
    CHECK(publish_wakes(s));
    gx_slot_free(s);
}

/* Each rise has its own window, whichever wakes; the window begins when the counter changes. */
static void test_every_rise_keeps_its_base(void)
{
    static const struct dh_gpu_wake wakes[] = {
        { .field = PCIE_REPLAY, .mode = DH_GPU_WAKE_RISE, .limit = PCIE_REPLAY, .threshold = 1,
          .window_ns = 60 * DH_NS },
        { .field = PSTATE, .mode = DH_GPU_WAKE_RISE, .limit = PSTATE, .threshold = 10,
          .window_ns = 60 * DH_NS },
    };
    struct dh_gpu_slot *s = gx_slot(wakes, 2);

    dh_gpu_store(s, PCIE_REPLAY, 0, 0);
    dh_gpu_store(s, PSTATE, 0, 0);
    CHECK(publish_wakes(s));
    dh_gpu_store(s, PCIE_REPLAY, 0, 1);
    dh_gpu_store(s, PSTATE, 0, 9);
    CHECK(publish_wakes(s)); /* for the first */
    dh_gpu_store(s, PSTATE, 0, 10);
    CHECK(publish_wakes(s)); /* 10 above its base */
    s->now_ns += 70 * DH_NS;
    dh_gpu_store(s, PCIE_REPLAY, 0, 2); /* the second counter does not change, and begins no window */
    CHECK(publish_wakes(s));
    s->now_ns += 30 * DH_NS;
    dh_gpu_store(s, PSTATE, 0, 15);
    CHECK(!publish_wakes(s));
    s->now_ns += 40 * DH_NS;
    dh_gpu_store(s, PSTATE, 0, 20);
    CHECK(publish_wakes(s));
    gx_slot_free(s);
}

/* ---- period within the CPU budget ---- */

static void test_period_keeps_the_passes_within_the_budget(void)
{
    struct dh_gpus_options o = { .period_ns = DH_NS, .slow_ns = 10 * DH_NS, .cpu_budget_ns = 2 * MS };

    CHECK_U64(dh_gpu_period_ns(&o, DH_NS, MS / 4, MS / 4, 8), DH_NS); /* 8 passes of 0.25 ms: 2 ms/s */
    CHECK_U64(dh_gpu_period_ns(&o, DH_NS, MS, MS, 8), 4 * DH_NS); /* 8 ms in 4 s */
    CHECK_U64(dh_gpu_period_ns(&o, DH_NS, MS + 1, MS + 1, 8), 4 * DH_NS + DH_NS / 10); /* a multiple of 0.1 s, above */
    /* wrong by less than a quarter */
    CHECK_U64(dh_gpu_period_ns(&o, 4 * DH_NS, MS * 12 / 10, MS * 12 / 10, 8), 4 * DH_NS);
    CHECK_U64(dh_gpu_period_ns(&o, 4 * DH_NS, MS * 13 / 10, MS * 13 / 10, 8), 52 * DH_NS / 10);
    CHECK_U64(dh_gpu_period_ns(&o, 4 * DH_NS, MS / 2, MS / 2, 8), 2 * DH_NS); /* cheaper: shorter again */
    CHECK_U64(dh_gpu_period_ns(&o, 4 * DH_NS, 0, 0, 8), DH_NS);
    CHECK_U64(dh_gpu_period_ns(&o, DH_NS, 1000 * DH_NS, 1000 * DH_NS, 64), 10 * DH_NS); /* at most 10 s */
    o.cpu_budget_ns = 0;
    CHECK_U64(dh_gpu_period_ns(&o, DH_NS, MS, MS, 8), DH_NS);
    o = (struct dh_gpus_options){ .period_ns = 60 * DH_NS, .slow_ns = 60 * DH_NS, .cpu_budget_ns = 1 };
    CHECK_U64(dh_gpu_period_ns(&o, 60 * DH_NS, MS, MS, 8), 60 * DH_NS); /* never shorter than configured */
}

/* The driver spun for half a minute in a call of one pass. */
static void test_one_expensive_pass_hardly_stretches_the_period(void)
{
    struct dh_gpus_options o = { .period_ns = DH_NS, .slow_ns = 10 * DH_NS, .cpu_budget_ns = 2 * MS };
    uint64_t mean_ns = dh_gpu_mean_ns(&o, MS / 10, 30 * DH_NS, 16, 8);

    CHECK(dh_gpu_period_ns(&o, DH_NS, mean_ns, mean_ns, 8) <= 2 * DH_NS);
    for (int i = 0; i < 16; i++)
        mean_ns = dh_gpu_mean_ns(&o, mean_ns, MS / 10, 16, 8);
    CHECK_U64(dh_gpu_period_ns(&o, 2 * DH_NS, mean_ns, mean_ns, 8), DH_NS);
    for (int i = 0; i < 100; i++)
        mean_ns = dh_gpu_mean_ns(&o, mean_ns, 30 * DH_NS, 16, 8);
    CHECK_U64(dh_gpu_period_ns(&o, DH_NS, mean_ns, mean_ns, 8), 10 * DH_NS); /* each pass is expensive */
    CHECK_U64(dh_gpu_mean_ns(&o, 0, 2 * MS, 1, 8), 2 * MS);         /* a slow pass every 10 s is in the budget */
    o.slow_ns = 60 * DH_NS;
    CHECK_U64(dh_gpu_mean_ns(&o, 0, 14 * MS, 1, 8), 14 * MS); /* and a longer one every minute, too */
    o.cpu_budget_ns = 0;
    CHECK_U64(dh_gpu_mean_ns(&o, 0, 30 * DH_NS, 1, 8), 30 * DH_NS);
    o.cpu_budget_ns = 1; /* the smallest budget, and most GPUs */
    CHECK_U64(dh_gpu_period_ns(&o, DH_NS, 0, dh_gpu_mean_ns(&o, 0, MS, 1, 64), 64), 10 * DH_NS);
}

/*
 * Return the period after four hours in which a slow pass takes @slow_ns of CPU time, and any pass ten times as long for
 * the minute from @expensive_ns on.
 */
static uint64_t period_after_hours(const struct dh_gpus_options *o, uint64_t slow_ns, uint64_t expensive_ns)
{
    uint64_t period_ns = o->period_ns, fast_mean_ns = MS / 20, slow_mean_ns = slow_ns, last_slow_ns = 0;

    for (uint64_t now_ns = DH_NS; now_ns < 4 * 3600 * DH_NS; now_ns += period_ns) {
        bool slow = dh_is_due(now_ns, last_slow_ns, o->slow_ns, period_ns);
        uint64_t took_ns = slow ? slow_ns : MS / 20;

        if (now_ns >= expensive_ns && now_ns < expensive_ns + 60 * DH_NS)
            took_ns *= 10;
        if (slow) {
            last_slow_ns = now_ns;
            slow_mean_ns = dh_gpu_mean_ns(o, slow_mean_ns, took_ns, 4, 8);
        } else {
            fast_mean_ns = dh_gpu_mean_ns(o, fast_mean_ns, took_ns, 16, 8);
        }
        period_ns = dh_gpu_period_ns(o, period_ns, fast_mean_ns, slow_mean_ns, 8);
    }
    return period_ns;
}

static void test_period_is_the_same_after_a_minute_of_expensive_passes(void)
{
    struct dh_gpus_options o = { .period_ns = DH_NS, .slow_ns = 10 * DH_NS, .cpu_budget_ns = 2 * MS };

    for (uint64_t slow_ns = MS / 2; slow_ns <= 19 * MS / 10; slow_ns += MS / 10) {
        CHECK_U64(period_after_hours(&o, slow_ns, DH_NEVER / 2), DH_NS);
        CHECK_U64(period_after_hours(&o, slow_ns, 600 * DH_NS), DH_NS);
    }
    /* slow passes alone exceed the budget */
    CHECK_U64(period_after_hours(&o, 5 * MS, 600 * DH_NS), 10 * DH_NS);
}

/* A reader that knows the shorter period only would take the GPU's thread for stalled. */
static void test_longer_period_is_published_before_a_pass_is_delayed_by_it(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    uint64_t due_ns = GX_NOW_NS;

    s->pub.period_ns = DH_NS;
    s->work.period_ns = 10 * DH_NS;
    CHECK_U64(dh_gpu_next_pass_ns(s, due_ns, due_ns), due_ns + DH_NS);
    dh_gpu_publish(s);
    CHECK_U64(dh_gpu_next_pass_ns(s, due_ns, due_ns), due_ns + 10 * DH_NS);
    CHECK_U64(dh_gpu_next_pass_ns(s, due_ns, due_ns + 10 * DH_NS), due_ns + 20 * DH_NS); /* it was too long */
    gx_slot_free(s);
}

int main(void)
{
    fx_begin();
    test_period_keeps_the_passes_within_the_budget();
    test_one_expensive_pass_hardly_stretches_the_period();
    test_period_is_the_same_after_a_minute_of_expensive_passes();
    test_longer_period_is_published_before_a_pass_is_delayed_by_it();
    test_code_classifies_field_and_gpu();
    test_gpu_status_is_its_worst_result();
    test_field_is_read_at_its_pace();
    test_field_with_an_awaited_event_is_left_out_of_fast_passes();
    test_events_are_awaited_while_the_waiter_waits_and_no_event_is_recent();
    test_unsupported_field_is_retried_after_thirty_slow_passes();
    test_failed_field_is_retried_in_the_next_pass();
    test_field_supported_later_is_read_in_every_pass();
    test_result_changes_its_own_field_only();
    test_pass_notes_whether_anything_changed_or_failed();
    test_invalidated_gpu_keeps_its_seen_bits();
    test_pass_counters_are_published_without_a_wake();
    test_unchanged_record_is_not_compared();
    test_status_or_identity_change_always_wakes();
    test_field_change_wakes_by_the_table_of_wakes();
    test_every_rise_keeps_its_base();
    return check_done("test_gpu_record");
}

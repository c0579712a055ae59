/* One GPU's record: what becomes of a reading, what is asked for next, and what of it wakes the reader. */
#include "check.h"
#include "gpu_fixture.h"

#define PCIE_REPLAY DH_GPU_PCIE_REPLAY /* a fast one */
#define PSTATE DH_GPU_PSTATE           /* a slow one */
#define FIXED DH_GPU_TEMP_SHUTDOWN
#define LAST (DH_GPU_FIELD_NUM - 1)

/* ---- codes ---- */

static void what_a_code_says_of_field_and_gpu(void)
{
    static const int dead[] = { 1, 9, 15, 18, 28 }, unsupported[] = { 2, 3, 13, 25 };

    for (int code = 0, d = 0, u = 0; code <= NVML_ERROR_UNKNOWN; code++) {
        bool is_dead = d < 5 && code == dead[d], is_unsupported = u < 4 && code == unsupported[u];

        CHECK_INT(dh_gpu_is_dead((nvmlReturn_t)code), is_dead);
        CHECK_INT(dh_gpu_is_unsupported(code), is_unsupported);
        d += is_dead, u += is_unsupported;
    }
}

static void a_gpu_is_as_the_worst_of_its_answers_says(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    CHECK_INT(dh_gpu_note(s, NVML_SUCCESS), NVML_SUCCESS);
    CHECK_INT(dh_gpu_note(s, NVML_ERROR_UNKNOWN), NVML_ERROR_UNKNOWN);
    CHECK_INT(s->status, NVML_SUCCESS); /* one field's trouble */
    CHECK_INT(dh_gpu_note(s, NVML_ERROR_RESET_REQUIRED), NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(s->status, NVML_ERROR_RESET_REQUIRED);
    CHECK(!s->dead);
    dh_gpu_note(s, NVML_SUCCESS);
    CHECK_INT(s->status, NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(dh_gpu_note(s, NVML_ERROR_GPU_IS_LOST), NVML_ERROR_GPU_IS_LOST);
    CHECK(s->dead);
    dh_gpu_note(s, NVML_ERROR_RESET_REQUIRED);
    CHECK_INT(s->status, NVML_ERROR_GPU_IS_LOST);
    gx_slot_free(s);
}

/* ---- what is asked for ---- */

static bool is_asked(struct dh_gpu_slot *s, bool slow, enum dh_gpu_field field)
{
    s->slow = slow;
    dh_gpu_plan(s);
    return dh_gpu_is_due(s, field);
}

static void every_field_has_its_pace(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        enum dh_gpu_pace pace = dh_gpu_rows[f].pace;

        check_row = dh_gpu_field_name(f);
        CHECK_INT(is_asked(s, false, f), pace == DH_PACE_FAST);
        CHECK(is_asked(s, true, f));
        dh_gpu_put(s, f, 0, 7);
        CHECK_INT(is_asked(s, true, f), pace != DH_PACE_FIXED);
    }
    check_row = "";
    gx_slot_free(s);
}

/* It may be partitioned or reset some day, and have it then. */
static void what_the_gpu_does_not_have_is_asked_for_again_after_thirty_slow_passes(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    uint64_t thirty_ns = 30 * s->w->opt.slow_ns;

    dh_gpu_put(s, PCIE_REPLAY, NVML_ERROR_NOT_SUPPORTED, 0);
    CHECK(!is_asked(s, true, PCIE_REPLAY));
    s->now_ns += thirty_ns - 1;
    CHECK(!is_asked(s, true, PCIE_REPLAY));
    s->now_ns++;
    CHECK(is_asked(s, false, PCIE_REPLAY));
    gx_slot_free(s);
}

static void what_it_had_once_and_what_only_failed_is_asked_for_in_the_next_pass(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    dh_gpu_put(s, PCIE_REPLAY, NVML_ERROR_UNKNOWN, 0);
    CHECK(is_asked(s, false, PCIE_REPLAY));
    dh_gpu_put(s, PCIE_REPLAY, 0, 7);
    dh_gpu_put(s, PCIE_REPLAY, NVML_ERROR_NOT_SUPPORTED, 0);
    CHECK(is_asked(s, false, PCIE_REPLAY));
    gx_slot_free(s);
}

static void a_field_that_comes_after_all_is_no_longer_asleep(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    dh_gpu_put(s, PCIE_REPLAY, NVML_ERROR_NOT_SUPPORTED, 0);
    dh_gpu_put(s, PCIE_REPLAY, 0, 7);
    CHECK(is_asked(s, false, PCIE_REPLAY));
    gx_slot_free(s);
}

/* ---- readings ---- */

static void a_reading_is_a_value_or_a_code_and_no_other_fields(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    const struct dh_gpu *g = &s->work;

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        dh_gpu_put(s, f, 0, f + 1);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        CHECK(dh_gpu_is_valid(g, f) && dh_gpu_has(g->seen, f));
        CHECK_U64(g->value[f], f + 1);
    }
    dh_gpu_put(s, LAST, NVML_ERROR_UNKNOWN, 42);
    CHECK(!dh_gpu_is_valid(g, LAST) && dh_gpu_has(g->seen, LAST));
    CHECK_U64(g->value[LAST], 0); /* unknown, and not 42 or what it was */
    CHECK_INT(g->code[LAST], NVML_ERROR_UNKNOWN);
    for (uint32_t f = 0; f < LAST; f++)
        CHECK(dh_gpu_is_valid(g, f) && !g->code[f]);
    dh_gpu_put(s, LAST, 0, 0);
    CHECK(dh_gpu_is_valid(g, LAST));
    CHECK_INT(g->code[LAST], 0);
    gx_slot_free(s);
}

static void a_pass_knows_whether_anything_is_new_and_whether_anything_failed(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    dh_gpu_put(s, PCIE_REPLAY, 0, 0); /* 0 is news where nothing was known */
    CHECK(!s->same && s->quiet);
    s->same = true;
    dh_gpu_put(s, PCIE_REPLAY, 0, 0);
    CHECK(s->same && s->quiet);
    dh_gpu_put(s, PCIE_REPLAY, 0, 1);
    CHECK(!s->same && s->quiet);
    s->same = true;
    dh_gpu_put(s, PCIE_REPLAY, NVML_ERROR_UNKNOWN, 1);
    CHECK(!s->same && !s->quiet);
    dh_gpu_put(s, PSTATE, 0, 1);
    CHECK(!s->quiet);
    gx_slot_free(s);
}

static void of_a_gpu_that_is_forgotten_it_is_known_what_it_had(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);
    const struct dh_gpu *g = &s->work;

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        dh_gpu_put(s, f, 0, f + 1);
    dh_gpu_put(s, PSTATE, NVML_ERROR_UNKNOWN, 0);
    s->same = true;
    s->status = NVML_ERROR_GPU_IS_LOST;
    dh_gpu_forget(s);
    CHECK(!s->same);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        CHECK(!dh_gpu_is_valid(g, f) && dh_gpu_has(g->seen, f));
        CHECK_U64(g->value[f], 0);
        CHECK_INT(g->code[f], f == PSTATE ? NVML_ERROR_UNKNOWN : NVML_ERROR_GPU_IS_LOST);
    }
    gx_slot_free(s);
}

/* ---- publishing ---- */

/* Publish; whether the reader was woken. */
static bool rings(struct dh_gpu_slot *s)
{
    uint64_t before = atomic_load(&s->w->wakes_done);

    dh_gpu_publish(s);
    s->same = false;
    return atomic_load(&s->w->wakes_done) > before;
}

static void what_every_pass_moves_is_published_and_wakes_nobody(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    rings(s);
    s->work.passes = 3;
    s->work.beat_ns = 4;
    s->caller.calls = 5;
    s->work.value[LAST] = 6;
    CHECK(!rings(s));
    CHECK_U64(s->pub.passes, 3);
    CHECK_U64(s->pub.beat_ns, 4);
    CHECK_U64(s->pub.calls, 5);
    CHECK_U64(s->pub.value[LAST], 6);
    s->work.mig[DH_MIG_MAX - 1].gi = 7; /* the last of what a GPU's thread writes */
    CHECK(!rings(s));
    CHECK_U64(s->pub.mig[DH_MIG_MAX - 1].gi, 7);
    gx_slot_free(s);
}

/* That is the use of it: of a healthy GPU most passes write down no more than that they were. */
static void where_nothing_was_written_nothing_is_compared(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    s->work.passes = 3;
    s->work.value[LAST] = 6;
    s->same = true;
    CHECK(!rings(s));
    CHECK_U64(s->pub.passes, 3);
    CHECK_U64(s->pub.value[LAST], 0);
    gx_slot_free(s);
}

static void how_a_gpu_is_and_who_it_is_always_wakes(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    CHECK(!rings(s));
    s->work.state = DH_STATE_FAILING;
    CHECK(rings(s));
    s->work.state = DH_STATE_OK;
    dh_gpu_put(s, PSTATE, 0, 5); /* which nobody looks at */
    CHECK(rings(s));
    s->work.status = NVML_ERROR_GPU_IS_LOST;
    CHECK(rings(s));
    s->work.handles++;
    CHECK(rings(s));
    atomic_store(&s->caller.overdue, 1);
    CHECK(rings(s));
    s->work.links = 18;
    CHECK(rings(s));
    s->work.mig_generation++;
    CHECK(rings(s));
    strcpy(s->work.uuid, "GPU-1");
    CHECK(rings(s));
    CHECK(!rings(s));
    gx_slot_free(s);
}

static void readings_wake_as_the_table_says(void)
{
    static const struct dh_gpu_wake wakes[] = {
        { .field = PCIE_REPLAY, .mode = DH_GPU_WAKE_CHANGE, .limit = PCIE_REPLAY },
        { .field = DH_GPU_TEMP, .mode = DH_GPU_WAKE_OVER, .limit = DH_GPU_TEMP_GPU_MAX },
    };
    struct dh_gpu_slot *s = gx_slot(wakes, 2);

    CHECK(!rings(s));
    dh_gpu_put(s, DH_GPU_RECOVERY_ACTION, 0, 5); /* nobody looks at it */
    CHECK(!rings(s));
    dh_gpu_put(s, PCIE_REPLAY, 0, 0);
    CHECK(rings(s));
    dh_gpu_put(s, PCIE_REPLAY, 0, 1);
    CHECK(rings(s));
    dh_gpu_put(s, DH_GPU_RECOVERY_ACTION, 0, 6);
    CHECK(!rings(s));
    dh_gpu_put(s, DH_GPU_TEMP, 0, 80);
    CHECK(rings(s)); /* to be readable */
    dh_gpu_put(s, DH_GPU_TEMP_GPU_MAX, 0, 90);
    CHECK(!rings(s));
    dh_gpu_put(s, DH_GPU_TEMP_GPU_MAX, 0, 80); /* the limit came down to it */
    CHECK(rings(s));
    dh_gpu_put(s, DH_GPU_TEMP, NVML_ERROR_UNKNOWN, 0);
    CHECK(rings(s));
    gx_slot_free(s);
}

/* Each rise has its own window, whichever of them wakes; and it begins when the counter moves. */
static void every_rise_keeps_its_base(void)
{
    static const struct dh_gpu_wake wakes[] = {
        { .field = PCIE_REPLAY, .mode = DH_GPU_WAKE_RISE, .limit = PCIE_REPLAY, .threshold = 1,
          .window_ns = 60 * DH_NS },
        { .field = PSTATE, .mode = DH_GPU_WAKE_RISE, .limit = PSTATE, .threshold = 10,
          .window_ns = 60 * DH_NS },
    };
    struct dh_gpu_slot *s = gx_slot(wakes, 2);

    dh_gpu_put(s, PCIE_REPLAY, 0, 0);
    dh_gpu_put(s, PSTATE, 0, 0);
    CHECK(rings(s));
    dh_gpu_put(s, PCIE_REPLAY, 0, 1);
    dh_gpu_put(s, PSTATE, 0, 9);
    CHECK(rings(s)); /* for the first */
    dh_gpu_put(s, PSTATE, 0, 10);
    CHECK(rings(s)); /* 10 since its base */
    s->now_ns += 70 * DH_NS;
    dh_gpu_put(s, PCIE_REPLAY, 0, 2); /* the second stands still, and begins no window */
    CHECK(rings(s));
    s->now_ns += 30 * DH_NS;
    dh_gpu_put(s, PSTATE, 0, 15);
    CHECK(!rings(s));
    s->now_ns += 40 * DH_NS;
    dh_gpu_put(s, PSTATE, 0, 20);
    CHECK(rings(s));
    gx_slot_free(s);
}

int main(void)
{
    fx_begin();
    what_a_code_says_of_field_and_gpu();
    a_gpu_is_as_the_worst_of_its_answers_says();
    every_field_has_its_pace();
    what_the_gpu_does_not_have_is_asked_for_again_after_thirty_slow_passes();
    what_it_had_once_and_what_only_failed_is_asked_for_in_the_next_pass();
    a_field_that_comes_after_all_is_no_longer_asleep();
    a_reading_is_a_value_or_a_code_and_no_other_fields();
    a_pass_knows_whether_anything_is_new_and_whether_anything_failed();
    of_a_gpu_that_is_forgotten_it_is_known_what_it_had();
    what_every_pass_moves_is_published_and_wakes_nobody();
    where_nothing_was_written_nothing_is_compared();
    how_a_gpu_is_and_who_it_is_always_wakes();
    readings_wake_as_the_table_says();
    every_rise_keeps_its_base();
    return check_done("test_gpu_record");
}

/*
 * nvmlDeviceGetFieldValues: what it is asked, and what is taken of its answers. The driver is a function of
 * ours, which writes wherever a driver may.
 */
#include "check.h"
#include "gpu_fixture.h"

#define FI_MAX 512 /* more than any id that is asked for */

static struct {
    nvmlReturn_t code;            /* of the whole call */
    nvmlReturn_t field_code[FI_MAX];
    uint64_t value[FI_MAX];       /* of the field, and of its link 0 */
    nvmlValueType_t type[FI_MAX]; /* NVML_VALUE_TYPE_UNSIGNED_LONG_LONG but where it is to be another */
    bool leaves[FI_MAX];          /* it does not touch the answer */
    nvmlFieldValue_t asked[DH_QUESTIONS];
    int questions, calls;
} driver;

static nvmlReturn_t field_values(nvmlDevice_t dev, int count, nvmlFieldValue_t *values)
{
    (void)dev;
    memcpy(driver.asked, values, (size_t)count * sizeof(*values));
    driver.questions = count;
    driver.calls++;
    for (int i = 0; i < count; i++) {
        unsigned int fi = values[i].fieldId;

        values[i].timestamp = values[i].latencyUsec = driver.calls; /* another one in each */
        values[i].fieldId = values[i].scopeId = 0xffff;
        if (driver.leaves[fi])
            continue;
        values[i].nvmlReturn = driver.field_code[fi];
        values[i].valueType = driver.type[fi];
        values[i].value.ullVal = driver.value[fi] + driver.asked[i].scopeId;
    }
    return driver.code;
}

/* The id of a field in a driver of branch 580. */
static uint32_t fi_of(enum dh_gpu_field field)
{
    return dh_gpu_fi(field, 580);
}

/* A GPU without links, of which the fast fields are due. */
static struct dh_gpu_slot *begin(void)
{
    struct dh_gpu_slot *s = gx_slot(NULL, 0);

    memset(&driver, 0, sizeof(driver));
    for (uint32_t fi = 0; fi < FI_MAX; fi++) {
        driver.type[fi] = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        driver.value[fi] = 1000 + fi;
    }
    s->w->nvml.nvmlDeviceGetFieldValues = field_values;
    atomic_store(&s->w->driver_major, 580);
    dh_gpu_plan(s);
    return s;
}

static bool is_of_a_gpu(enum dh_gpu_field field)
{
    return dh_gpu_rows[field].fi && !dh_gpu_rows[field].per_link;
}

/* Whether this question was the next of the last call; they stand in the order of the fields. */
static void check_next(int *at, uint32_t fi, uint32_t scope)
{
    const nvmlFieldValue_t *v = &driver.asked[(*at)++];

    CHECK_INT(v->fieldId, fi);
    CHECK_INT(v->scopeId, scope);
    CHECK(v->valueType > NVML_VALUE_TYPE_UNSIGNED_SHORT); /* what is left so is no answer */
}

/* ---- questions ---- */

static void all_that_is_due_is_asked_in_one_call(void)
{
    struct dh_gpu_slot *s = begin();

    for (int pass = 0; pass < 2; pass++) {
        int at = 0;

        s->slow = pass == 1;
        s->links = 5;
        s->links_ns = s->now_ns; /* which there are is known */
        dh_gpu_plan(s);
        dh_gpu_batch(s);
        CHECK_INT(driver.calls, pass + 1);
        for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
            check_row = dh_gpu_field_name(f);
            if (!dh_gpu_rows[f].fi || !dh_gpu_is_due(s, f))
                continue;
            check_next(&at, fi_of(f), 0);
            if (dh_gpu_rows[f].per_link)
                check_next(&at, fi_of(f), 2);
        }
        check_row = "";
        CHECK_INT(driver.questions, at);
    }
    gx_slot_free(s);
}

static void what_there_is_another_function_for_is_not_asked(void)
{
    struct dh_gpu_slot *s = begin();

    s->by_call[DH_GPU_LINKS_UP / 64] |= 1ull << (DH_GPU_LINKS_UP % 64);
    dh_gpu_batch(s);
    for (int i = 0; i < driver.questions; i++)
        CHECK(driver.asked[i].fieldId != fi_of(DH_GPU_LINKS_UP));
    CHECK(driver.questions > 0);
    gx_slot_free(s);
}

static void what_the_driver_has_no_number_for_is_not_supported(void)
{
    struct dh_gpu_slot *s = begin();

    atomic_store(&s->w->driver_major, 570);
    dh_gpu_batch(s);
    CHECK_INT(s->work.code[DH_GPU_SLOWED_SW_THERMAL], NVML_ERROR_NOT_SUPPORTED);
    CHECK(!dh_gpu_is_valid(&s->work, DH_GPU_SLOWED_SW_THERMAL));
    CHECK_U64(s->work.value[DH_GPU_PCIE_REPLAY], 1000 + fi_of(DH_GPU_PCIE_REPLAY));
    for (int i = 0; i < driver.questions; i++)
        CHECK(driver.asked[i].fieldId);
    gx_slot_free(s);
}

static void nothing_to_ask_is_no_call(void)
{
    struct dh_gpu_slot *s = begin();

    memset(s->due, 0, sizeof(s->due));
    dh_gpu_batch(s);
    CHECK_INT(driver.calls, 0);
    gx_slot_free(s);
}

/* ---- answers ---- */

static void each_answer_is_its_fields(void)
{
    struct dh_gpu_slot *s = begin();

    s->slow = true;
    dh_gpu_plan(s);
    dh_gpu_batch(s);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        check_row = dh_gpu_field_name(f);
        if (!dh_gpu_rows[f].per_link)
            CHECK_INT(dh_gpu_is_valid(&s->work, f), is_of_a_gpu(f));
        if (is_of_a_gpu(f))
            CHECK_U64(s->work.value[f], 1000 + fi_of(f));
    }
    check_row = "";
    for (int link = 0; link < DH_LINK_MAX; link++)
        CHECK_U64(s->work.link_errors[link], 0); /* it has none */
    gx_slot_free(s);
}

static void what_is_no_answer_is_unknown_and_not_zero(void)
{
    static const enum dh_gpu_field left = DH_GPU_PCIE_REPLAY, wild = DH_GPU_REMAP_PENDING,
                                   failed = DH_GPU_MEM_TEMP;
    struct dh_gpu_slot *s = begin();

    for (int pass = 0; pass < 2; pass++) { /* though the driver did answer in the first */
        dh_gpu_batch(s);
        CHECK_INT(dh_gpu_is_valid(&s->work, left), !pass);
        CHECK_INT(s->work.code[left], pass ? NVML_ERROR_UNKNOWN : 0);
        CHECK_INT(dh_gpu_is_valid(&s->work, wild), !pass);
        CHECK_INT(s->work.code[wild], pass ? NVML_ERROR_UNKNOWN : 0);
        CHECK_INT(s->work.code[failed], pass ? NVML_ERROR_NO_PERMISSION : 0);
        driver.leaves[fi_of(left)] = true;
        driver.type[fi_of(wild)] = (nvmlValueType_t)77;
        driver.field_code[fi_of(failed)] = NVML_ERROR_NO_PERMISSION;
    }
    CHECK_INT(s->status, NVML_SUCCESS);
    CHECK(!s->dead);
    gx_slot_free(s);
}

/* Where it says nothing this time, what it said last time is not said again. */
static void an_answer_that_failed_before_is_no_failure_when_it_is_left_out(void)
{
    struct dh_gpu_slot *s = begin();

    driver.field_code[fi_of(DH_GPU_MEM_TEMP)] = NVML_ERROR_GPU_IS_LOST;
    dh_gpu_batch(s);
    CHECK(s->dead);
    CHECK_INT(s->status, NVML_ERROR_GPU_IS_LOST);
    s->dead = false;
    s->status = NVML_SUCCESS;
    driver.leaves[fi_of(DH_GPU_MEM_TEMP)] = true;
    dh_gpu_batch(s);
    CHECK(!s->dead);
    CHECK_INT(s->work.code[DH_GPU_MEM_TEMP], NVML_ERROR_UNKNOWN);
    gx_slot_free(s);
}

static void a_call_that_fails_is_every_fields_failure(void)
{
    static const struct {
        nvmlReturn_t answered;
        int code;
        nvmlReturn_t status;
    } table[] = {
        { NVML_ERROR_UNKNOWN, NVML_ERROR_UNKNOWN, NVML_ERROR_UNKNOWN },
        { NVML_ERROR_GPU_IS_LOST, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_GPU_IS_LOST },
        { NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_SUCCESS }, /* an old driver */
        { NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS },
        { NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_UNKNOWN, NVML_ERROR_INVALID_ARGUMENT }, /* the handle's */
    };

    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
        struct dh_gpu_slot *s = begin();

        s->links = 5;
        driver.code = table[i].answered;
        dh_gpu_batch(s);
        for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
            bool is_hit = dh_gpu_rows[f].fi && dh_gpu_is_due(s, f);

            CHECK(!dh_gpu_is_valid(&s->work, f));
            CHECK_INT(s->work.code[f], is_hit ? table[i].code : 0);
        }
        CHECK_INT(s->status, table[i].status);
        CHECK_U64(s->work.probe_p50_ns, 0); /* it was not answered */
        gx_slot_free(s);
    }
}

/* ---- the same again ---- */

#define UNTOUCHED 42 /* where nothing was taken, this stays */

static void spoil(struct dh_gpu_slot *s)
{
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        s->work.value[f] = UNTOUCHED;
    memset(s->work.link_errors, 0, sizeof(s->work.link_errors));
}

static void a_settled_pass_asks_the_same_and_takes_what_is_another(void)
{
    struct dh_gpu_slot *s = begin();
    int questions;

    s->links = 5;
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) /* the counters of links as well */
        s->due[f / 64] |= (uint64_t)(dh_gpu_rows[f].fi != 0) << (f % 64);
    dh_gpu_batch(s);
    questions = driver.questions;
    s->settled = true;
    memset(s->due, 0, sizeof(s->due)); /* was laid out before */
    spoil(s);
    dh_gpu_batch(s);
    CHECK_INT(driver.questions, questions);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        CHECK_U64(s->work.value[f], UNTOUCHED);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        if (!is_of_a_gpu(f))
            continue;
        check_row = dh_gpu_field_name(f);
        driver.value[fi_of(f)] = 9;
        for (int pass = 0; pass < 2; pass++) {
            spoil(s);
            dh_gpu_batch(s);
            for (uint32_t other = 0; other < DH_GPU_FIELD_NUM; other++)
                CHECK_U64(s->work.value[other], other == f && !pass ? 9 : UNTOUCHED);
        }
    }
    check_row = "";
    gx_slot_free(s);
}

static void of_a_field_with_an_answer_for_each_link_one_is_enough_to_take_all(void)
{
    static const enum dh_gpu_field field = DH_GPU_LINK_REPLAY;
    struct dh_gpu_slot *s = begin();

    s->links = 5;
    s->due[field / 64] |= 1ull << (field % 64);
    driver.value[fi_of(field)] = 0;
    dh_gpu_batch(s);
    CHECK_U64(s->work.value[field], 2); /* 0 of link 0, 2 of link 2 */
    s->settled = true;
    driver.value[fi_of(field)] = 10;
    spoil(s);
    dh_gpu_batch(s);
    CHECK_U64(s->work.value[field], 22);
    CHECK_U64(s->work.link_errors[0], 10);
    CHECK_U64(s->work.link_errors[2], 12);
    CHECK_U64(s->work.value[DH_GPU_PCIE_REPLAY], UNTOUCHED);
    gx_slot_free(s);
}

static void a_pass_that_is_not_settled_takes_equal_answers_too_but_only_those_that_are_due(void)
{
    static const enum dh_gpu_field field = DH_GPU_PCIE_REPLAY;
    struct dh_gpu_slot *s = begin();

    dh_gpu_batch(s);
    spoil(s);
    memset(s->due, 0, sizeof(s->due));
    s->due[field / 64] = 1ull << (field % 64);
    dh_gpu_batch(s);
    CHECK_INT(driver.questions, 1);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        CHECK_U64(s->work.value[f], f == field ? 1000 + fi_of(f) : UNTOUCHED);
    gx_slot_free(s);
}

/* ---- how long it took ---- */

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* A call that began so many seconds ago or, of none, that ended before it began; how long it took. */
static uint64_t call_of(struct dh_gpu_slot *s, uint64_t seconds)
{
    uint64_t begun_ns = dh_tick_ns() - seconds * DH_NS + (seconds ? 0 : 3600 * DH_NS);

    s->called_ns = begun_ns;
    dh_gpu_batch(s);
    return seconds ? s->called_ns - begun_ns : 1; /* 0 would be that it was never answered */
}

static void the_median_is_of_the_last_fifteen_calls(void)
{
    struct dh_gpu_slot *s = begin();
    uint64_t took[8 * DH_PROBES];

    for (uint32_t i = 0; i < 8 * DH_PROBES; i++) {
        uint32_t n = i + 1 < DH_PROBES ? i + 1 : DH_PROBES;
        uint64_t last[DH_PROBES];

        took[i] = call_of(s, i * i * 7 % 23 % 13); /* up and down, and some twice */
        memcpy(last, &took[i + 1 - n], n * sizeof(*last));
        qsort(last, n, sizeof(*last), by_size);
        for (uint32_t at = 0; at < n; at++)
            CHECK_U64(s->sorted[at], last[at]);
        CHECK_U64(s->work.probe_p50_ns, last[n / 2]);
    }
    gx_slot_free(s);
}

/* As most do. No time at all would say that none was ever answered. */
static void a_call_within_a_tick_took_a_nanosecond(void)
{
    struct dh_gpu_slot *s = begin();
    uint64_t begun_ns;

    do {
        begun_ns = s->called_ns = dh_tick_ns();
        dh_gpu_batch(s);
    } while (s->called_ns != begun_ns);
    CHECK_U64(s->probe[(s->probes - 1) % DH_PROBES], 1);
    gx_slot_free(s);
}

int main(void)
{
    fx_begin();
    all_that_is_due_is_asked_in_one_call();
    what_there_is_another_function_for_is_not_asked();
    what_the_driver_has_no_number_for_is_not_supported();
    nothing_to_ask_is_no_call();
    each_answer_is_its_fields();
    what_is_no_answer_is_unknown_and_not_zero();
    an_answer_that_failed_before_is_no_failure_when_it_is_left_out();
    a_call_that_fails_is_every_fields_failure();
    a_settled_pass_asks_the_same_and_takes_what_is_another();
    of_a_field_with_an_answer_for_each_link_one_is_enough_to_take_all();
    a_pass_that_is_not_settled_takes_equal_answers_too_but_only_those_that_are_due();
    the_median_is_of_the_last_fifteen_calls();
    a_call_within_a_tick_took_a_nanosecond();
    return check_done("test_gpu_batch");
}

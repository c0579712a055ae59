/*
 * Tests of nvmlDeviceGetFieldValues: the queries, and the handling of results. The driver is a function of
 * this test, which writes wherever a driver may.
 */
#include "check.h"
#include "gpu_fixture.h"

#define FI_MAX 512 /* above every id that is queried */

static struct {
    nvmlReturn_t code;            /* of the whole call */
    nvmlReturn_t field_code[FI_MAX];
    uint64_t value[FI_MAX];       /* of the field, and of its link 0 */
    nvmlValueType_t type[FI_MAX]; /* NVML_VALUE_TYPE_UNSIGNED_LONG_LONG unless set otherwise */
    bool leaves[FI_MAX];          /* the driver does not write the result */
    nvmlFieldValue_t query_count[DH_QUERY_MAX];
    int queries, calls;
} driver;

static nvmlReturn_t field_values(nvmlDevice_t dev, int count, nvmlFieldValue_t *values)
{
    (void)dev;
    memcpy(driver.query_count, values, (size_t)count * sizeof(*values));
    driver.queries = count;
    driver.calls++;
    for (int i = 0; i < count; i++) {
        unsigned int fi = values[i].fieldId;

        values[i].timestamp = values[i].latencyUsec = driver.calls; /* different in each call */
        values[i].fieldId = values[i].scopeId = 0xffff;
        if (driver.leaves[fi])
            continue;
        values[i].nvmlReturn = driver.field_code[fi];
        values[i].valueType = driver.type[fi];
        if (driver.type[fi] == NVML_VALUE_TYPE_UNSIGNED_INT)
            values[i].value.uiVal = (unsigned int)driver.value[fi];
        else
            values[i].value.ullVal = driver.value[fi] + driver.query_count[i].scopeId;
    }
    return driver.code;
}

/*
 * Return the id of a field in a driver of branch 580.
 */
static uint32_t fi_of(enum dh_gpu_field field)
{
    return dh_gpu_field_id(field, 580);
}

/*
 * Return a GPU without links whose fast fields are due.
 */
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
    dh_gpu_plan_fields(s);
    return s;
}

static bool is_of_a_gpu(enum dh_gpu_field field)
{
    return dh_gpu_rows[field].field_id && !dh_gpu_rows[field].per_link;
}

/* Check the next query of the last call; queries are in the order of the fields. */
static void check_next(int *at, uint32_t fi, uint32_t scope)
{
    const nvmlFieldValue_t *v = &driver.query_count[(*at)++];

    CHECK_INT(v->fieldId, fi);
    CHECK_INT(v->scopeId, scope);
    CHECK(v->valueType > NVML_VALUE_TYPE_UNSIGNED_SHORT); /* an untouched result has no valid type */
}

/* ---- queries ---- */

static void test_due_fields_are_read_in_one_call(void)
{
    struct dh_gpu_slot *s = begin();

    for (int pass = 0; pass < 2; pass++) {
        int at = 0;

        s->slow = pass == 1;
        s->links = 5;
        s->links_ns = s->now_ns; /* the existing links are known */
        dh_gpu_plan_fields(s);
        dh_gpu_read_batch(s);
        CHECK_INT(driver.calls, pass + 1);
        for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
            check_row = dh_gpu_field_name(f);
            if (!dh_gpu_rows[f].field_id || !dh_gpu_is_due(s, f))
                continue;
            check_next(&at, fi_of(f), 0);
            if (dh_gpu_rows[f].per_link)
                check_next(&at, fi_of(f), 2);
        }
        check_row = "";
        CHECK_INT(driver.queries, at);
    }
    gx_slot_free(s);
}

static void test_field_with_its_own_function_is_not_in_the_batch(void)
{
    struct dh_gpu_slot *s = begin();

    s->via_function[DH_GPU_LINKS_UP / 64] |= 1ull << (DH_GPU_LINKS_UP % 64);
    dh_gpu_read_batch(s);
    for (int i = 0; i < driver.queries; i++)
        CHECK(driver.query_count[i].fieldId != fi_of(DH_GPU_LINKS_UP));
    CHECK(driver.queries > 0);
    gx_slot_free(s);
}

static void test_field_without_an_id_in_the_driver_is_unsupported(void)
{
    struct dh_gpu_slot *s = begin();

    atomic_store(&s->w->driver_major, 570);
    dh_gpu_read_batch(s);
    CHECK_INT(s->work.code[DH_GPU_SLOWED_SW_THERMAL], NVML_ERROR_NOT_SUPPORTED);
    CHECK(!dh_gpu_is_valid(&s->work, DH_GPU_SLOWED_SW_THERMAL));
    CHECK_U64(s->work.value[DH_GPU_PCIE_REPLAY], 1000 + fi_of(DH_GPU_PCIE_REPLAY));
    for (int i = 0; i < driver.queries; i++)
        CHECK(driver.query_count[i].fieldId);
    gx_slot_free(s);
}

static void test_batch_without_due_fields_makes_no_call(void)
{
    struct dh_gpu_slot *s = begin();

    memset(s->due, 0, sizeof(s->due));
    dh_gpu_read_batch(s);
    CHECK_INT(driver.calls, 0);
    gx_slot_free(s);
}

/* ---- results ---- */

static void test_each_result_is_stored_in_its_field(void)
{
    struct dh_gpu_slot *s = begin();

    s->slow = true;
    dh_gpu_plan_fields(s);
    dh_gpu_read_batch(s);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        check_row = dh_gpu_field_name(f);
        if (!dh_gpu_rows[f].per_link)
            CHECK_INT(dh_gpu_is_valid(&s->work, f), is_of_a_gpu(f));
        if (is_of_a_gpu(f))
            CHECK_U64(s->work.value[f], 1000 + fi_of(f));
    }
    check_row = "";
    for (int link = 0; link < DH_LINK_MAX; link++)
        CHECK_U64(s->work.link_errors[link], 0); /* there is no such link */
    gx_slot_free(s);
}

static void test_result_not_written_by_the_driver_is_unknown_not_zero(void)
{
    static const enum dh_gpu_field left = DH_GPU_PCIE_REPLAY, wild = DH_GPU_REMAP_PENDING,
                                   failed = DH_GPU_MEM_TEMP;
    struct dh_gpu_slot *s = begin();

    for (int pass = 0; pass < 2; pass++) { /* though the driver answered in the first */
        dh_gpu_read_batch(s);
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
    CHECK(!s->unreachable);
    gx_slot_free(s);
}

/* A result that the driver does not write in this call must not repeat the last one. */
static void test_result_left_out_after_a_failure_is_unknown(void)
{
    struct dh_gpu_slot *s = begin();

    driver.field_code[fi_of(DH_GPU_MEM_TEMP)] = NVML_ERROR_GPU_IS_LOST;
    dh_gpu_read_batch(s);
    CHECK(s->unreachable);
    CHECK_INT(s->status, NVML_ERROR_GPU_IS_LOST);
    s->unreachable = false;
    s->status = NVML_SUCCESS;
    driver.leaves[fi_of(DH_GPU_MEM_TEMP)] = true;
    dh_gpu_read_batch(s);
    CHECK(!s->unreachable);
    CHECK_INT(s->work.code[DH_GPU_MEM_TEMP], NVML_ERROR_UNKNOWN);
    gx_slot_free(s);
}

static void test_failed_call_is_stored_in_every_field(void)
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
        { NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_UNKNOWN, NVML_ERROR_INVALID_ARGUMENT }, /* caused by the
                                                                                             handle */
    };

    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
        struct dh_gpu_slot *s = begin();

        s->links = 5;
        driver.code = table[i].answered;
        dh_gpu_read_batch(s);
        for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
            bool is_hit = dh_gpu_rows[f].field_id && dh_gpu_is_due(s, f);

            CHECK(!dh_gpu_is_valid(&s->work, f));
            CHECK_INT(s->work.code[f], is_hit ? table[i].code : 0);
        }
        CHECK_INT(s->status, table[i].status);
        CHECK_U64(s->work.probe_p50_ns, 0); /* never answered */
        gx_slot_free(s);
    }
}

/* ---- repeated passes ---- */

#define UNTOUCHED 42 /* this value stays where nothing was stored */

static void spoil(struct dh_gpu_slot *s)
{
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        s->work.value[f] = UNTOUCHED;
    memset(s->work.link_errors, 0, sizeof(s->work.link_errors));
}

static void test_repeated_pass_reuses_queries_and_stores_changes(void)
{
    struct dh_gpu_slot *s = begin();
    int queries;

    s->links = 5;
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) /* also the error counters of links */
        s->due[f / 64] |= (uint64_t)(dh_gpu_rows[f].field_id != 0) << (f % 64);
    dh_gpu_read_batch(s);
    queries = driver.queries;
    s->plan_reusable = true;
    memset(s->due, 0, sizeof(s->due)); /* laid out before */
    spoil(s);
    dh_gpu_read_batch(s);
    CHECK_INT(driver.queries, queries);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        CHECK_U64(s->work.value[f], UNTOUCHED);
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        if (!is_of_a_gpu(f))
            continue;
        check_row = dh_gpu_field_name(f);
        driver.value[fi_of(f)] = 9;
        for (int pass = 0; pass < 2; pass++) {
            spoil(s);
            dh_gpu_read_batch(s);
            for (uint32_t other = 0; other < DH_GPU_FIELD_NUM; other++)
                CHECK_U64(s->work.value[other], other == f && !pass ? 9 : UNTOUCHED);
        }
    }
    check_row = "";
    gx_slot_free(s);
}

/* Overwrite the stack below, as a call in between does. */
__attribute__((noinline)) static void stack_fill(int byte)
{
    volatile unsigned char below[64 * 1024];

    for (size_t i = 0; i < sizeof(below); i++)
        below[i] = (unsigned char)byte;
}

static void test_half_of_a_value_that_the_driver_leaves_is_no_change(void)
{
    static const enum dh_gpu_field field = DH_GPU_LINK_REPLAY;
    struct dh_gpu_slot *s = begin();

    driver.type[fi_of(field)] = NVML_VALUE_TYPE_UNSIGNED_INT;
    driver.value[fi_of(field)] = 7;
    s->links = 5;
    s->due[field / 64] |= 1ull << (field % 64);
    stack_fill(0x55);
    dh_gpu_read_batch(s);
    CHECK_U64(s->work.value[field], 2 * 7);
    s->plan_reusable = true;
    spoil(s);
    stack_fill(0xaa);
    dh_gpu_read_batch(s);
    CHECK_U64(s->work.value[field], UNTOUCHED);
    gx_slot_free(s);
}

static void test_one_changed_link_result_stores_all_links_of_the_field(void)
{
    static const enum dh_gpu_field field = DH_GPU_LINK_REPLAY;
    struct dh_gpu_slot *s = begin();

    s->links = 5;
    s->due[field / 64] |= 1ull << (field % 64);
    driver.value[fi_of(field)] = 0;
    dh_gpu_read_batch(s);
    CHECK_U64(s->work.value[field], 2); /* 0 of link 0, 2 of link 2 */
    s->plan_reusable = true;
    driver.value[fi_of(field)] = 10;
    spoil(s);
    dh_gpu_read_batch(s);
    CHECK_U64(s->work.value[field], 22);
    CHECK_U64(s->work.link_errors[0], 10);
    CHECK_U64(s->work.link_errors[2], 12);
    CHECK_U64(s->work.value[DH_GPU_PCIE_REPLAY], UNTOUCHED);
    gx_slot_free(s);
}

static void test_replanned_pass_stores_equal_results_of_due_fields(void)
{
    static const enum dh_gpu_field field = DH_GPU_PCIE_REPLAY;
    struct dh_gpu_slot *s = begin();

    dh_gpu_read_batch(s);
    spoil(s);
    memset(s->due, 0, sizeof(s->due));
    s->due[field / 64] = 1ull << (field % 64);
    dh_gpu_read_batch(s);
    CHECK_INT(driver.queries, 1);
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

/* Make a call that began @seconds ago; 0: that ended before it began. Return: its duration. */
static uint64_t call_of(struct dh_gpu_slot *s, uint64_t seconds)
{
    uint64_t begun_ns = dh_tick_ns() - seconds * DH_NS + (seconds ? 0 : 3600 * DH_NS);

    s->call_end_ns = begun_ns;
    dh_gpu_read_batch(s);
    return seconds ? s->call_end_ns - begun_ns : 1; /* 0 would mean "never answered" */
}

static void test_latency_is_the_median_of_the_last_fifteen_calls(void)
{
    struct dh_gpu_slot *s = begin();
    uint64_t took[8 * DH_LATENCY_SAMPLES];

    for (uint32_t i = 0; i < 8 * DH_LATENCY_SAMPLES; i++) {
        uint32_t n = i + 1 < DH_LATENCY_SAMPLES ? i + 1 : DH_LATENCY_SAMPLES;
        uint64_t last[DH_LATENCY_SAMPLES];

        took[i] = call_of(s, i * i * 7 % 23 % 13); /* in mixed order, some twice */
        memcpy(last, &took[i + 1 - n], n * sizeof(*last));
        qsort(last, n, sizeof(*last), by_size);
        for (uint32_t at = 0; at < n; at++)
            CHECK_U64(s->sorted_latency[at], last[at]);
        CHECK_U64(s->work.probe_p50_ns, last[n / 2]);
    }
    gx_slot_free(s);
}

/* As most calls do. A duration of 0 would mean "never answered". */
static void test_call_within_one_tick_counts_as_one_nanosecond(void)
{
    struct dh_gpu_slot *s = begin();
    uint64_t begun_ns;

    do {
        begun_ns = s->call_end_ns = dh_tick_ns();
        dh_gpu_read_batch(s);
    } while (s->call_end_ns != begun_ns);
    CHECK_U64(s->latency[(s->latency_count - 1) % DH_LATENCY_SAMPLES], 1);
    gx_slot_free(s);
}

int main(void)
{
    fx_begin();
    test_due_fields_are_read_in_one_call();
    test_field_with_its_own_function_is_not_in_the_batch();
    test_field_without_an_id_in_the_driver_is_unsupported();
    test_batch_without_due_fields_makes_no_call();
    test_each_result_is_stored_in_its_field();
    test_result_not_written_by_the_driver_is_unknown_not_zero();
    test_result_left_out_after_a_failure_is_unknown();
    test_failed_call_is_stored_in_every_field();
    test_repeated_pass_reuses_queries_and_stores_changes();
    test_half_of_a_value_that_the_driver_leaves_is_no_change();
    test_one_changed_link_result_stores_all_links_of_the_field();
    test_replanned_pass_stores_equal_results_of_due_fields();
    test_latency_is_the_median_of_the_last_fifteen_calls();
    test_call_within_one_tick_counts_as_one_nanosecond();
    return check_done("test_gpu_batch");
}

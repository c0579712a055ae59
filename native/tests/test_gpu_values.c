/* Tests without threads: numbers in NVML's results, wakes, the table of fields, options. */
#include <limits.h>

#include "check.h"
#include "gpu_fixture.h"

static void test_numbers_of_every_type_are_decoded(void)
{
    static const struct {
        const char *row;
        nvmlValueType_t type;
        nvmlValue_t value;
        uint64_t want;
    } table[] = {
        { "double", NVML_VALUE_TYPE_DOUBLE, { .dVal = 12.75 }, 12 },
        { "double below 0", NVML_VALUE_TYPE_DOUBLE, { .dVal = -2.0 }, (uint64_t)-2 },
        { "uint", NVML_VALUE_TYPE_UNSIGNED_INT, { .uiVal = UINT_MAX }, UINT_MAX },
        { "ulong", NVML_VALUE_TYPE_UNSIGNED_LONG, { .ulVal = ULONG_MAX }, ULONG_MAX },
        { "ulonglong", NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, { .ullVal = ULLONG_MAX }, ULLONG_MAX },
        { "longlong", NVML_VALUE_TYPE_SIGNED_LONG_LONG, { .sllVal = -5 }, (uint64_t)-5 },
        { "int", NVML_VALUE_TYPE_SIGNED_INT, { .siVal = -5 }, (uint64_t)-5 },
        { "ushort", NVML_VALUE_TYPE_UNSIGNED_SHORT, { .usVal = 65535 }, 65535 },
    };

    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
        nvmlFieldValue_t answer = { .valueType = table[i].type, .value = table[i].value };
        uint64_t value = 0;

        check_row = table[i].row;
        CHECK(dh_nvml_decode(&answer, &value));
        CHECK_U64(value, table[i].want);
    }
    check_row = "";
}

static void test_unknown_value_type_is_rejected(void)
{
    static const double wild[] = { 1e300, -1e300, 0.0 / 0.0 };
    nvmlFieldValue_t answer = { .valueType = (nvmlValueType_t)7, .value.ullVal = 1 };
    uint64_t value = 42;

    CHECK(!dh_nvml_decode(&answer, &value));
    for (int i = 0; i < 3; i++) {
        answer = (nvmlFieldValue_t){ .valueType = NVML_VALUE_TYPE_DOUBLE, .value.dVal = wild[i] };
        CHECK(!dh_nvml_decode(&answer, &value));
    }
    CHECK_U64(value, 42);
}

/*
 * Return a record with one or two valid fields.
 */
static struct dh_gpu gpu_with(enum dh_gpu_field field, int64_t value, enum dh_gpu_field other,
                              int64_t other_value)
{
    struct dh_gpu g = { 0 };

    g.valid[field / 64] |= 1ull << (field % 64);
    g.value[field] = (uint64_t)value;
    g.valid[other / 64] |= 1ull << (other % 64);
    g.value[other] = (uint64_t)other_value;
    return g;
}

static bool wakes(const struct dh_gpu_wake *wake, int64_t before, int64_t now)
{
    struct dh_gpu b = gpu_with(wake->field, before, DH_GPU_TEMP_GPU_MAX, 87);
    struct dh_gpu n = gpu_with(wake->field, now, DH_GPU_TEMP_GPU_MAX, 87);
    struct dh_gpu_rise_base base = { 0 };

    return dh_gpu_wakes(wake, &base, &b, &n, DH_NS);
}

static void test_wake_mode_matches_its_own_changes(void)
{
    const struct dh_gpu_wake change = { .field = DH_GPU_REMAP_PENDING, .mode = DH_GPU_WAKE_CHANGE };
    const struct dh_gpu_wake over = {
        .field = DH_GPU_TEMP, .mode = DH_GPU_WAKE_OVER, .limit = DH_GPU_TEMP_GPU_MAX
    };
    const struct dh_gpu_wake below = { .field = DH_GPU_MARGIN, .mode = DH_GPU_WAKE_BELOW };
    const struct dh_gpu_wake bits = {
        .field = DH_GPU_CLOCK_REASONS, .mode = DH_GPU_WAKE_BITS, .threshold = 0xe8
    };

    CHECK(wakes(&change, 0, 1) && wakes(&change, 1, 0) && !wakes(&change, 1, 1));
    CHECK(wakes(&over, 86, 87) && wakes(&over, 87, 86) && !wakes(&over, 30, 86) && !wakes(&over, 87, 99));
    CHECK(wakes(&below, 0, -1) && wakes(&below, -1, 0) && !wakes(&below, -1, -9) && !wakes(&below, 50, 0));
    CHECK(wakes(&bits, 1, 9) && wakes(&bits, 0x80, 0) && !wakes(&bits, 1, 4));
}

static void test_unreadable_limit_is_not_reached(void)
{
    const struct dh_gpu_wake over = {
        .field = DH_GPU_TEMP, .mode = DH_GPU_WAKE_OVER, .limit = DH_GPU_TEMP_GPU_MAX
    };
    struct dh_gpu before = gpu_with(DH_GPU_TEMP, 50, DH_GPU_TEMP, 50);
    struct dh_gpu now = gpu_with(DH_GPU_TEMP, 99, DH_GPU_TEMP, 99);
    struct dh_gpu_rise_base base = { 0 };

    CHECK(!dh_gpu_wakes(&over, &base, &before, &now, DH_NS));
}

static void test_validity_change_always_wakes(void)
{
    for (uint32_t mode = DH_GPU_WAKE_CHANGE; mode <= DH_GPU_WAKE_BITS; mode++) {
        const struct dh_gpu_wake wake = { .field = DH_GPU_ECC_CORRECTABLE, .mode = mode, .threshold = 100,
                                          .window_ns = DH_NS };
        const struct dh_gpu none = { 0 };
        struct dh_gpu some = gpu_with(DH_GPU_ECC_CORRECTABLE, 0, DH_GPU_TEMP, 0);
        struct dh_gpu_rise_base base = { 0 };

        CHECK(dh_gpu_wakes(&wake, &base, &none, &some, DH_NS));
        CHECK(dh_gpu_wakes(&wake, &base, &some, &none, DH_NS));
        CHECK(!dh_gpu_wakes(&wake, &base, &some, &some, DH_NS));
    }
}

static void test_rise_counts_within_its_window_and_a_fall_wakes(void)
{
    const struct dh_gpu_wake rise = {
        .field = DH_GPU_ECC_CORRECTABLE, .mode = DH_GPU_WAKE_RISE, .threshold = 10, .window_ns = 60 * DH_NS
    };
    static const struct {
        int64_t value;
        uint64_t at_s;
        bool wakes;
    } table[] = {
        { 105, 10, false }, { 109, 20, false }, { 110, 30, true },  { 119, 40, false }, { 120, 50, true },
        { 125, 70, false }, { 129, 80, false }, /* a new window, with a base of 125 or less */
        { 3, 90, true },    { 12, 95, false },  { 13, 96, true },   /* it was reset to 3 */
        { 12, 97, true },   { 12, 98, false },  { 0, 160, true },   { 9, 161, false }, /* and again */
    };
    struct dh_gpu before = gpu_with(DH_GPU_ECC_CORRECTABLE, 100, DH_GPU_TEMP, 0), now;
    struct dh_gpu_rise_base base = { 100, 1 };

    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
        char row[32];

        snprintf(row, sizeof(row), "value %" PRId64, table[i].value);
        check_row = row;
        now = gpu_with(DH_GPU_ECC_CORRECTABLE, table[i].value, DH_GPU_TEMP, 0);
        CHECK_INT(dh_gpu_wakes(&rise, &base, &before, &now, table[i].at_s * DH_NS), table[i].wakes);
        before = now;
    }
    check_row = "";
}

static void test_every_field_and_call_has_a_name(void)
{
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        CHECK(dh_gpu_field_name(f) && *dh_gpu_field_name(f));
        for (uint32_t other = 0; other < f; other++)
            CHECK(strcmp(dh_gpu_field_name(f), dh_gpu_field_name(other)) != 0);
    }
    for (uint32_t c = 1; c < DH_CALL_NUM; c++)
        CHECK(dh_nvml_call_name(c) && *dh_nvml_call_name(c));
    CHECK(!dh_gpu_field_name(DH_GPU_FIELD_NUM) && !dh_nvml_call_name(DH_CALL_NUM));
}

/* The same ids mean power smoothing in other branches. */
static void test_throttle_times_have_an_id_only_in_drivers_with_them(void)
{
    CHECK_INT(dh_gpu_field_id(DH_GPU_SLOWED_SW_THERMAL, 580), 269);
    CHECK_INT(dh_gpu_field_id(DH_GPU_SLOWED_HW_BRAKE, 590), 271);
    CHECK_INT(dh_gpu_field_id(DH_GPU_SLOWED_SW_THERMAL, 575), 251);
    CHECK_INT(dh_gpu_field_id(DH_GPU_SLOWED_HW_BRAKE, 575), 253);
    CHECK_INT(dh_gpu_field_id(DH_GPU_SLOWED_HW_THERMAL, 570), 0);
    CHECK_INT(dh_gpu_field_id(DH_GPU_RECOVERY_ACTION, 535), 230);
}

static int opened(const struct dh_gpus_options *o, const char *library, const struct dh_gpu_wake *wake,
                  int fd)
{
    struct dh_gpu_watch *w = NULL;
    int err = dh_gpus_open(o, library, "/sys", wake, wake != NULL, fd, -1, &w);

    if (!err)
        CHECK_INT(dh_gpus_stop(w, 0), 0); /* never started: nothing to wait for */
    return err;
}

static void test_options_out_of_range_are_refused(void)
{
    static char long_path[DH_LIBRARY_MAX + 2];
    const struct dh_gpus_options good = gx_options();
    const struct dh_gpu_wake rise = { .field = DH_GPU_TEMP, .mode = DH_GPU_WAKE_RISE, .window_ns = 1 };
    const struct dh_gpu_wake no_mode = { .field = DH_GPU_TEMP };
    const struct dh_gpu_wake no_field = { .field = DH_GPU_FIELD_NUM, .mode = DH_GPU_WAKE_CHANGE };
    struct dh_gpus_options o;
    int fd = eventfd(0, EFD_CLOEXEC);

    CHECK_INT(opened(&good, "x", NULL, fd), 0);
    CHECK_INT(opened(&good, "x", NULL, -1), -EBADF);
    CHECK_INT(opened(&good, "x", &rise, fd), -EINVAL); /* no threshold */
    CHECK_INT(opened(&good, "x", &no_mode, fd), -EINVAL);
    CHECK_INT(opened(&good, "x", &no_field, fd), -EINVAL);
    memset(long_path, 'x', sizeof(long_path) - 1);
    CHECK_INT(opened(&good, long_path, NULL, fd), -ENAMETOOLONG);
    o = good, o.size--;
    CHECK_INT(opened(&o, "x", NULL, fd), DH_EABI);
    o = good, o.version++;
    CHECK_INT(opened(&o, "x", NULL, fd), DH_EABI);
    o = good, o.period_ns = 10 * MS - 1;
    CHECK_INT(opened(&o, "x", NULL, fd), -EINVAL);
    o = good, o.slow_ns = o.period_ns - 1;
    CHECK_INT(opened(&o, "x", NULL, fd), -EINVAL);
    o = good, o.deadline_ns = 601 * DH_NS;
    CHECK_INT(opened(&o, "x", NULL, fd), -EINVAL);
    o = good, o.open_deadline_ns = 0;
    CHECK_INT(opened(&o, "x", NULL, fd), -EINVAL);
    o = good, o.retry_ns = 99 * MS;
    CHECK_INT(opened(&o, "x", NULL, fd), -EINVAL);
    close(fd);
}

int main(void)
{
    test_numbers_of_every_type_are_decoded();
    test_unknown_value_type_is_rejected();
    test_wake_mode_matches_its_own_changes();
    test_unreadable_limit_is_not_reached();
    test_validity_change_always_wakes();
    test_rise_counts_within_its_window_and_a_fall_wakes();
    test_every_field_and_call_has_a_name();
    test_throttle_times_have_an_id_only_in_drivers_with_them();
    test_options_out_of_range_are_refused();
    return check_done("test_gpu_values");
}

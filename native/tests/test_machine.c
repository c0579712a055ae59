/* Tests of the machine watch as a whole: options, roots, paces, and wakes of the reader. */
#include "check.h"
#include "machine_fixture.h"

#define MC "sys/devices/system/edac/mc/mc0"

static void roots_make(void)
{
    fx_remove("sys");
    fx_remove("proc");
    fx_dir("sys");
    fx_dir("proc");
}

static void roots_take(void)
{
    fx_remove("sys");
    fx_remove("proc");
}

static void test_options_out_of_range_are_refused(void)
{
    static const struct {
        const char *name;
        uint64_t period_ns, slow_ns, rare_ns;
        int code;
    } rows[] = {
        { "too fast", DH_NS / 100 - 1, DH_NS, DH_NS, -EINVAL },
        { "too slow", 3600 * DH_NS + 1, 4000 * DH_NS, 4000 * DH_NS, -EINVAL },
        { "slow before period", DH_NS, DH_NS - 1, DH_NS, -EINVAL },
        { "rare before slow", DH_NS, 2 * DH_NS, DH_NS, -EINVAL },
        { "all the same", DH_NS / 100, DH_NS / 100, DH_NS / 100, 0 },
        { "for ever", DH_NS, UINT64_MAX, UINT64_MAX, 0 },
    };
    struct dh_machine *m = NULL;
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        const struct dh_machine_options o = { sizeof(o), DH_VERSION, rows[i].period_ns, rows[i].slow_ns,
                                              rows[i].rare_ns };

        check_row = rows[i].name;
        CHECK_INT(dh_machine_open(&o, "/sys", "/proc", wake_fd, &m), rows[i].code);
        if (!rows[i].code)
            CHECK_INT(dh_machine_stop(m, 0), 0);
    }
    check_row = "";
    close(wake_fd);
}

static void test_invalid_descriptor_or_path_is_refused(void)
{
    struct dh_machine_options o = mx_options();
    struct dh_machine *m = NULL;
    char root[DH_MACHINE_ROOT_LEN + 1];
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), descriptors = fx_count("/proc/self/fd");

    memset(root, '/', sizeof(root) - 1);
    root[sizeof(root) - 1] = '\0';
    CHECK_INT(dh_machine_open(&o, root, "/proc", wake_fd, &m), -ENAMETOOLONG);
    CHECK_INT(dh_machine_open(&o, "/sys", root, wake_fd, &m), -ENAMETOOLONG);
    CHECK_INT(dh_machine_open(&o, "/sys", "/proc", -1, &m), -EBADF);
    o.version++;
    CHECK_INT(dh_machine_open(&o, "/sys", "/proc", wake_fd, &m), DH_EABI);
    o = mx_options();
    o.size--;
    CHECK_INT(dh_machine_open(&o, "/sys", "/proc", wake_fd, &m), DH_EABI);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    close(wake_fd);
}

static void test_every_field_has_a_name(void)
{
    for (uint32_t i = 0; i < DH_MACHINE_FIELD_NUM; i++)
        CHECK(dh_machine_field_name(i) && *dh_machine_field_name(i));
    CHECK(!dh_machine_field_name(DH_MACHINE_FIELD_NUM));
}

static void test_nothing_is_published_before_the_start(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x;

    roots_make();
    x = mx_open(&o);
    CHECK_INT(dh_machine_read(x.m, x.head, x.cap), -ENODATA);
    CHECK_INT(dh_machine_read(x.m, x.head, sizeof(*x.head) - 1), -ENOSPC);
    fx_write("1\n", MC "/ce_count");
    mx_pass(&x);
    CHECK_INT(dh_machine_read(x.m, x.head, x.cap), sizeof(*x.head) + sizeof(struct dh_dimm));
    CHECK_INT(dh_machine_read(x.m, x.head, sizeof(*x.head)), -ENOSPC);
    CHECK_U64(x.head->size, sizeof(*x.head));
    CHECK_U64(x.head->version, DH_VERSION);
    mx_close(&x);
}

/* Also on a machine without any of the files: the reader learns that the first pass is complete. */
static void test_first_pass_wakes_once(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x;

    roots_make();
    x = mx_open(&o);
    mx_pass(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(x.head->wakes, 1);
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++) {
        CHECK_INT(mx_source(&x, i)->state, DH_STATE_ABSENT);
        CHECK_U64(mx_source(&x, i)->passes, 1);
        CHECK_U64(mx_source(&x, i)->failures, 0);
    }
    mx_pass(&x);
    CHECK(!mx_woken(&x));
    mx_close(&x);
}

static void test_each_source_is_read_at_its_pace(void)
{
    static const struct {
        uint64_t after_ns;
        uint64_t passes[DH_MACHINE_SOURCE_NUM]; /* edac, memory, cores, pressure */
    } rows[] = {
        { 0, { 1, 1, 1, 1 } },
        { DH_NS, { 2, 1, 1, 1 } },
        { 9 * DH_NS, { 3, 2, 1, 2 } },
        { DH_NS, { 4, 2, 1, 2 } },
        { 10 * DH_NS, { 5, 3, 1, 3 } },
        { 386 * DH_NS / 10, { 6, 4, 2, 4 } }, /* 59.6 s: up to half a period early is accepted */
        { DH_NS, { 7, 4, 2, 4 } },
    };
    struct dh_machine_options o = mx_options();
    struct mx x;

    roots_make();
    x = mx_open(&o);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        mx_later(&x, rows[i].after_ns);
        for (int k = 0; k < DH_MACHINE_SOURCE_NUM; k++)
            CHECK_U64(mx_source(&x, k)->passes, rows[i].passes[k]);
    }
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->period_ns, 10 * DH_NS); /* without controllers */
    CHECK_U64(mx_source(&x, DH_MACHINE_MEMORY)->period_ns, 10 * DH_NS);
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->period_ns, 60 * DH_NS);
    CHECK(mx_woken(&x)); /* by the first pass */
    mx_rescan(&x); /* this pass and the next two read everything */
    for (uint64_t i = 1; i <= 3; i++) {
        CHECK_INT(mx_woken(&x), i == 3); /* by the last one: then enough clean passes were made */
        for (int k = 0; k < DH_MACHINE_SOURCE_NUM; k++)
            CHECK_U64(mx_source(&x, k)->passes, rows[sizeof(rows) / sizeof(*rows) - 1].passes[k] + i);
        mx_later(&x, DH_NS);
    }
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->passes, rows[sizeof(rows) / sizeof(*rows) - 1].passes[2] + 3);
    mx_close(&x);
}

static void test_missing_root_is_absent_and_retried(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x;

    roots_make();
    roots_take();
    x = mx_open(&o);
    mx_pass(&x);
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++) {
        bool pressure = i == DH_MACHINE_PRESSURE;

        CHECK_INT(mx_source(&x, i)->state, DH_STATE_ABSENT);
        CHECK_INT(mx_source(&x, i)->err, ENOENT);
        CHECK_INT(mx_source(&x, i)->err_field, pressure ? DH_MACHINE_PROCFS : DH_MACHINE_SYSFS);
        CHECK_U64(mx_source(&x, i)->failures, 0);
    }
    fx_write("0\n", MC "/ce_count");
    fx_dir("proc");
    mx_pass(&x);
    CHECK_U64(x.head->dimms, 0); /* probed once per second */
    mx_later(&x, DH_NS);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_OK);
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++) {
        CHECK_INT(mx_source(&x, i)->err, 0);
        CHECK_U64(mx_source(&x, i)->passes, i == DH_MACHINE_EDAC ? 3 : 2); /* everything below it is new */
    }
    mx_close(&x);
}

static void test_unopenable_root_fails_its_sources(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x;

    roots_make();
    roots_take();
    fx_write("a file\n", "sys");
    fx_dir("proc");
    x = mx_open(&o);
    mx_pass(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_FAILING);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->err, ENOTDIR);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->err_field, DH_MACHINE_SYSFS);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_FAILING);
    CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->state, DH_STATE_ABSENT);
    fx_remove("sys");
    fx_dir("sys");
    mx_later(&x, DH_NS);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_ABSENT);
    mx_close(&x);
}

/* As when a file system is mounted over it: the open directory is another one. */
static void test_root_is_reopened_in_a_rare_pass(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x;

    roots_make();
    x = mx_open(&o);
    mx_pass(&x);
    fx_remove("sys");
    fx_write("5\n", MC "/ce_count");
    mx_pass(&x);
    CHECK_U64(x.head->dimms, 0);
    mx_later(&x, 60 * DH_NS);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, 5);
    roots_take();
    mx_later(&x, 60 * DH_NS);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_FAILING); /* it existed before */
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->valid, 0);
    mx_close(&x);
}

int main(void)
{
    fx_begin();
    test_options_out_of_range_are_refused();
    test_invalid_descriptor_or_path_is_refused();
    test_every_field_has_a_name();
    fx_dir("sys");
    fx_dir("proc");
    test_nothing_is_published_before_the_start();
    test_first_pass_wakes_once();
    test_each_source_is_read_at_its_pace();
    test_missing_root_is_absent_and_retried();
    test_unopenable_root_fails_its_sources();
    test_root_is_reopened_in_a_rare_pass();
    return check_done("test_machine");
}

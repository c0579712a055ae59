/*
 * Tests of pressure: failing and malformed files, triggers of the real kernel, and what remains where the
 * kernel grants none.
 */
#include "check.h"
#include "machine_fixture.h"

#define PSI "proc/pressure"
#define SLOW_NS (10 * DH_NS) /* as in mx_options() */
#define RARE_NS (60 * DH_NS)
#define LINE(kind, total) kind " avg10=0.10 avg60=0.20 avg300=0.30 total=" total "\n"

static const char memory[] = LINE("some", "700") LINE("full", "300");
static const uint64_t all =
    DH_MACHINE_BIT(DH_PSI_CPU) | DH_MACHINE_BIT(DH_PSI_MEMORY) | DH_MACHINE_BIT(DH_PSI_IO);

static void machine_make(void)
{
    fx_write(LINE("some", "9000") LINE("full", "0"), PSI "/cpu");
    fx_write(memory, PSI "/memory");
    fx_write(LINE("some", "50") LINE("full", "40"), PSI "/io");
}

static struct mx running(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x = mx_open(&o);

    mx_pass(&x);
    CHECK(mx_woken(&x));
    return x;
}

static void test_pressure_totals_are_read_slowly_without_a_wake(void)
{
    struct mx x = running();
    uint64_t reads;

    CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->state, DH_STATE_OK);
    CHECK_U64(x.head->valid & all, all);
    CHECK_U64(x.head->psi_cpu_some_us, 9000);
    CHECK_U64(x.head->psi_memory_full_us, 300);
    CHECK_U64(x.head->psi_io_full_us, 40);
    fx_write(LINE("some", "900000") LINE("full", "500000"), PSI "/memory");
    mx_later(&x, 2 * DH_NS);
    CHECK_U64(x.head->psi_memory_full_us, 300);
    reads = x.head->reads;
    mx_later(&x, 8 * DH_NS);
    CHECK_U64(x.head->psi_memory_full_us, 500000);
    CHECK_U64(mx_source(&x, DH_MACHINE_PRESSURE)->passes, 2);
    CHECK_U64(x.head->reads - reads, 3);
    CHECK(!mx_woken(&x));
    mx_close(&x);
    machine_make();
}

/*
 * Return the number of triggers.
 */
static int trigger_count(const struct mx *x)
{
    int n = 0;

    for (int i = 0; i < DH_MACHINE_TRIGGERS; i++)
        n += x->m->trigger[i] >= 0;
    return n;
}

/* A write to a plain file succeeds. It would overwrite the file, and no trigger would ever fire. */
static void test_file_outside_procfs_gets_no_trigger(void)
{
    struct mx x = running();
    char path[FX_PATH], text[256] = "";
    int fd;

    CHECK_INT(trigger_count(&x), 0);
    snprintf(path, sizeof(path), "%s/" PSI "/memory", fx_root);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK_INT(read(fd, text, sizeof(text) - 1), (int64_t)strlen(memory));
    CHECK_STR(text, memory);
    close(fd);
    mx_close(&x);
}

static void test_kernel_without_psi_is_absent(void)
{
    struct mx x;

    fx_remove(PSI);
    x = running();
    CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->state, DH_STATE_ABSENT);
    CHECK_U64(x.head->seen & all, 0);
    CHECK_U64(mx_source(&x, DH_MACHINE_PRESSURE)->failures, 0);
    mx_close(&x);
    machine_make();
}

static void test_cpu_pressure_without_line_full_is_read(void)
{
    struct mx x;

    fx_write(LINE("some", "8000"), PSI "/cpu"); /* before Linux 5.13 */
    x = running();
    CHECK_U64(x.head->psi_cpu_some_us, 8000);
    CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->state, DH_STATE_OK);
    mx_close(&x);
    machine_make();
}

static void test_unreadable_value_is_neither_zero_nor_absent(void)
{
    static const struct {
        const char *what, *text, *target;
        int32_t err;
    } rows[] = {
        { "EIO", NULL, "/proc/self/mem", EIO },
        { "removed", NULL, NULL, ENOENT },
        { "empty", "", NULL, DH_EPARSE },
        { "without full", LINE("some", "1"), NULL, DH_EPARSE },
        { "torn", "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.0", NULL, DH_EPARSE },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct mx x = running();

        check_row = rows[i].what;
        if (rows[i].text) {
            fx_write(rows[i].text, PSI "/memory");
        } else {
            fx_remove(PSI "/memory");
            if (rows[i].target)
                fx_symlink(rows[i].target, PSI "/memory");
        }
        mx_later(&x, SLOW_NS);
        CHECK(mx_woken(&x));
        CHECK_U64(x.head->valid & all, all & ~DH_MACHINE_BIT(DH_PSI_MEMORY));
        CHECK_U64(x.head->seen & all, all);
        CHECK_U64(x.head->psi_memory_full_us, 0);
        CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->state, DH_STATE_FAILING);
        CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->err, rows[i].err);
        CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->err_field, DH_PSI_MEMORY);
        CHECK_U64(mx_source(&x, DH_MACHINE_PRESSURE)->failures, 1);
        if (!rows[i].text && rows[i].target)
            fx_remove(PSI "/memory");
        machine_make();
        mx_later(&x, SLOW_NS);
        CHECK(mx_woken(&x));
        CHECK_U64(x.head->psi_memory_full_us, 300);
        CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->state, DH_STATE_OK);
        mx_close(&x);
    }
    check_row = "";
}

/* ---- triggers ---- */

/*
 * Return whether this kernel grants this process such a trigger, by trying.
 */
static bool is_granted(const char *path)
{
    static const char trigger[] = "full 100000 2000000";
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    bool granted = fd >= 0 && write(fd, trigger, sizeof(trigger)) > 0;

    if (fd >= 0)
        close(fd);
    return granted;
}

static void test_trigger_refusal_is_no_failure(void)
{
    int granted = is_granted("/proc/pressure/memory") + is_granted("/proc/pressure/io");
    int closed = fx_count("/proc/self/fd"), opened;
    struct mx x = running();

    opened = fx_count("/proc/self/fd");
    CHECK_INT(trigger_count(&x), granted);
    CHECK_INT(x.m->trigger[0], -1); /* there are no triggers for CPUs */
    mx_later(&x, RARE_NS);
    CHECK_INT(trigger_count(&x), granted); /* and no second one */
    CHECK_INT(fx_count("/proc/self/fd"), opened);
    mx_close(&x);
    CHECK_INT(fx_count("/proc/self/fd"), closed);
}

static void test_fired_trigger_is_a_pass_and_a_wake(void)
{
    struct mx x = running();

    fx_write(LINE("some", "800") LINE("full", "400"), PSI "/memory");
    fx_write(LINE("some", "60") LINE("full", "50"), PSI "/io");
    CHECK(dh_machine_pressure_fired(x.m, 1, POLLIN | POLLPRI));
    CHECK(x.m->wake);
    CHECK_INT(dh_machine_pass(x.m), 0);
    mx_read(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(x.head->psi_memory_full_us, 400);
    CHECK_U64(x.head->psi_io_full_us, 50); /* the heartbeat means that everything was read */
    mx_close(&x);
    machine_make();
}

/* The file is gone, as after an unmount. The trigger would be readable for ever. */
static void test_broken_trigger_is_closed_and_reopened(void)
{
    struct mx x = running();
    int granted = trigger_count(&x);

    if (x.m->trigger[1] >= 0) {
        CHECK(!dh_machine_pressure_fired(x.m, 1, POLLERR | POLLPRI));
        CHECK_INT(x.m->trigger[1], -1);
        mx_later(&x, SLOW_NS);
        CHECK_INT(trigger_count(&x), granted - 1);
        mx_later(&x, RARE_NS);
        CHECK_INT(trigger_count(&x), granted);
    }
    CHECK_INT(mx_source(&x, DH_MACHINE_PRESSURE)->state, DH_STATE_OK);
    mx_close(&x);
}

int main(void)
{
    fx_begin();
    machine_make();
    test_pressure_totals_are_read_slowly_without_a_wake();
    test_file_outside_procfs_gets_no_trigger();
    test_kernel_without_psi_is_absent();
    test_cpu_pressure_without_line_full_is_read();
    test_unreadable_value_is_neither_zero_nor_absent();
    test_fired_trigger_is_a_pass_and_a_wake();
    if (access("/proc/pressure/memory", F_OK)) {
        check_skip("test_machine_pressure", "this kernel has no pressure files for triggers");
    } else {
        fx_remove("proc");
        fx_symlink("/proc", "proc");
        test_trigger_refusal_is_no_failure();
        test_broken_trigger_is_closed_and_reopened();
    }
    return check_done("test_machine_pressure");
}

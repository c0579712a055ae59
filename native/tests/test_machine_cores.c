/*
 * Tests of each CPU's core and machine checks: CPUs that go offline, come back or come late, failing and
 * malformed files, and a /proc/interrupts of any size, cut anywhere.
 */
#include "check.h"
#include "machine_fixture.h"

#define CPU "sys/devices/system/cpu"
#define SLOW_NS (10 * DH_NS) /* as in mx_options() */
#define RARE_NS (60 * DH_NS)

static void cpu_write(int cpu, const char *sharing, const char *package)
{
    fx_write(sharing, CPU "/cpu%d/topology/core_cpus_list", cpu);
    fx_write(package, CPU "/cpu%d/topology/physical_package_id", cpu);
    fx_write("3500000\n", CPU "/cpu%d/cpufreq/cpuinfo_max_freq", cpu);
    fx_write("3000000\n", CPU "/cpu%d/cpufreq/scaling_max_freq", cpu);
}

static const char interrupts[] =
    "            CPU0       CPU1       CPU2       CPU3       \n"
    "   0:         36          0          0          0   IO-APIC    2-edge      timer\n"
    " 142:     250170      26131          0          0 PCI-MSIX-0000:00:02.0   1-edge      nvme0q1\n"
    " NMI:          9          9          9          9   Non-maskable interrupts\n"
    " MCE:          1          2          3          4   Machine check exceptions\n"
    " MCP:        800        800        800        800   Machine check polls\n"
    " ERR:          0\n";

/* Create two cores of two threads each, one per package. */
static void machine_make(void)
{
    fx_write("0-3\n", CPU "/online");
    fx_write("1\n", CPU "/smt/active");
    cpu_write(0, "0,2\n", "0\n");
    cpu_write(1, "1,3\n", "1\n");
    cpu_write(2, "0,2\n", "0\n");
    cpu_write(3, "1,3\n", "1\n");
    fx_write(interrupts, "proc/interrupts");
}

/* Do what the kernel does: siblings' lists shrink, columns and directories disappear. */
static void cpu_2_goes_offline(void)
{
    fx_write("0-1,3\n", CPU "/online");
    fx_remove(CPU "/cpu2/topology");
    fx_remove(CPU "/cpu2/cpufreq");
    fx_write("0\n", CPU "/cpu0/topology/core_cpus_list");
    fx_write("    CPU0       CPU1       CPU3       \n MCE:   1   2   5   Machine check exceptions\n",
             "proc/interrupts");
}

static struct mx running(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x = mx_open(&o);

    mx_pass(&x);
    CHECK(mx_woken(&x));
    return x;
}

#define ALL                                                                                            \
    (DH_MACHINE_BIT(DH_CORE_CORE) | DH_MACHINE_BIT(DH_CORE_PACKAGE) | DH_MACHINE_BIT(DH_CORE_MAX_KHZ) | \
     DH_MACHINE_BIT(DH_CORE_CAP_KHZ) | DH_MACHINE_BIT(DH_CORE_MCE))

static void test_existing_files_are_read(void)
{
    struct mx x = running();

    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_OK);
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->failures, 0);
    CHECK_INT(x.head->cores, 4);
    CHECK(HAS(x.head->valid, DH_SMT_ACTIVE));
    CHECK_U64(x.head->smt_active, 1);
    for (uint32_t cpu = 0; cpu < 4; cpu++) {
        const struct dh_core *core = mx_core(&x, cpu);

        CHECK_U64(core->valid, ALL);
        CHECK_U64(core->core, cpu % 2);
        CHECK_U64(core->package, cpu % 2);
        CHECK_U64(core->max_khz, 3500000);
        CHECK_U64(core->cap_khz, 3000000);
        CHECK_U64(core->mce, cpu + 1);
    }
    mx_close(&x);
}

static void test_cores_are_read_rarely_and_wake_only_on_change(void)
{
    struct mx x = running();
    uint64_t reads = x.head->reads;

    fx_write("0-3\n", CPU "/online");
    fx_write("2000000\n", CPU "/cpu3/cpufreq/scaling_max_freq");
    mx_later(&x, 50 * DH_NS);
    CHECK_U64(mx_core(&x, 3)->cap_khz, 3000000);
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->passes, 1);
    mx_later(&x, 10 * DH_NS);
    CHECK(mx_woken(&x));
    CHECK_U64(mx_core(&x, 3)->cap_khz, 2000000);
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->passes, 2);
    reads = x.head->reads;
    mx_later(&x, RARE_NS);
    CHECK(!mx_woken(&x));
    CHECK_U64(x.head->reads - reads, 1 + 1 + 4 * 4 + 1); /* online, smt, four files per CPU, interrupts */
    mx_close(&x);
    machine_make();
}

static void test_offline_cpu_keeps_its_last_values(void)
{
    struct mx x = running();

    cpu_2_goes_offline();
    mx_later(&x, RARE_NS);
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_OK);
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->failures, 0);
    CHECK_U64(mx_core(&x, 2)->valid, ALL);
    CHECK_U64(mx_core(&x, 2)->core, 0);
    CHECK_U64(mx_core(&x, 2)->mce, 3);
    CHECK_U64(mx_core(&x, 3)->mce, 5); /* its column moved */
    CHECK(mx_woken(&x));               /* for this change */
    machine_make();
    mx_later(&x, RARE_NS);
    CHECK_U64(mx_core(&x, 2)->valid, ALL);
    CHECK_U64(mx_core(&x, 3)->mce, 4); /* counts are published as read */
    mx_close(&x);
}

/* Its sibling's list names no other CPU then, but the core stays the same. */
static void test_core_number_survives_its_lowest_cpu_going_offline(void)
{
    struct mx x = running();

    fx_write("1-3\n", CPU "/online");
    fx_remove(CPU "/cpu0/topology");
    fx_write("2\n", CPU "/cpu2/topology/core_cpus_list");
    mx_later(&x, RARE_NS);
    CHECK_U64(mx_core(&x, 2)->core, 0);
    CHECK(!mx_woken(&x));
    mx_close(&x);

    x = running(); /* a watch that starts while it is offline learns of the sibling later */
    CHECK_U64(mx_core(&x, 2)->core, 2);
    CHECK_INT(x.head->cores, 3);
    machine_make();
    mx_later(&x, RARE_NS);
    CHECK(mx_woken(&x));
    CHECK_U64(mx_core(&x, 2)->core, 0);
    CHECK_INT(x.head->cores, 4);
    mx_close(&x);
}

/* They are sorted in all the same. */
static void test_cpus_that_come_online_later_are_sorted_in(void)
{
    static const char *const online[] = { "5\n", "5,7\n", "0,5,7\n", "0,5-7\n", "0,5-7,8191\n" };
    struct mx x;
    const struct dh_core *core;

    fx_write(online[0], CPU "/online");
    fx_write("8000 interrupts\n", "proc/interrupts");
    x = running();
    for (uint32_t i = 0; i < 5; i++) {
        fx_write(online[i], CPU "/online");
        mx_later(&x, RARE_NS);
        CHECK_INT(x.head->cores, i + 1);
    }
    core = mx_core(&x, 0);
    CHECK_INT(core[1].cpu, 5);
    CHECK_INT(core[2].cpu, 6);
    CHECK_INT(core[3].cpu, 7);
    CHECK_INT(core[4].cpu, 8191);
    mx_close(&x);
    machine_make();
}

/* A lack of descriptors at the first read of a file says nothing of it, also after another CPU is sorted in. */
static void test_absent_file_is_absent_again_after_a_cpu_is_sorted_in(void)
{
    struct mx x;
    struct dh_core *core;

    cpu_2_goes_offline();
    fx_remove(CPU "/cpu3/cpufreq");
    x = running();
    core = &x.m->work.core[2]; /* of CPU 3 */
    dh_machine_store(x.m,
                     &(struct dh_machine_record){ DH_MACHINE_CORES, &core->valid, &core->seen,
                                                  &x.m->core_assumed[2], &core->err, &x.m->cores_dirty },
                     DH_CORE_MAX_KHZ, &core->max_khz, EMFILE, 0);
    machine_make();
    fx_remove(CPU "/cpu3/cpufreq");
    mx_later(&x, RARE_NS);
    CHECK_INT(x.head->cores, 4);
    CHECK_U64(mx_core(&x, 2)->valid, ALL);
    CHECK(!HAS(mx_core(&x, 3)->seen, DH_CORE_MAX_KHZ));
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_OK);
    fx_remove(CPU "/cpu2/cpufreq");
    mx_later(&x, RARE_NS);
    CHECK(HAS(mx_core(&x, 2)->seen, DH_CORE_MAX_KHZ)); /* it existed, so it is unreadable now */
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_FAILING);
    mx_close(&x);
    machine_make();
}

static void test_missing_files_are_absent(void)
{
    struct mx x;

    fx_remove(CPU "/smt");
    for (int cpu = 0; cpu < 4; cpu++) {
        fx_remove(CPU "/cpu%d/cpufreq", cpu);
        fx_write("-1\n", CPU "/cpu%d/topology/physical_package_id", cpu); /* unknown to the firmware */
    }
    fx_write("    CPU0   CPU1   CPU2   CPU3\n ERR:   0\n", "proc/interrupts"); /* not x86 */
    x = running();
    CHECK_U64(mx_core(&x, 3)->seen, DH_MACHINE_BIT(DH_CORE_CORE));
    CHECK(!HAS(x.head->seen, DH_SMT_ACTIVE));
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_OK);
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->failures, 0);
    mx_close(&x);

    fx_write("", "proc/interrupts"); /* masked, in a container */
    x = running();
    CHECK_U64(mx_core(&x, 3)->seen, DH_MACHINE_BIT(DH_CORE_CORE));
    CHECK_U64(mx_source(&x, DH_MACHINE_CORES)->failures, 0);
    mx_close(&x);

    for (int cpu = 0; cpu < 4; cpu++)
        fx_remove(CPU "/cpu%d", cpu);
    fx_remove("proc/interrupts");
    x = running();
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_ABSENT);
    CHECK_INT(x.head->cores, 4);
    mx_close(&x);

    fx_remove(CPU);
    x = running();
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_ABSENT);
    CHECK_INT(x.head->cores, 0);
    mx_close(&x);
    machine_make();
}

static void test_old_kernel_siblings_file_is_read(void)
{
    struct mx x;

    for (int cpu = 0; cpu < 4; cpu++) {
        fx_remove(CPU "/cpu%d/topology/core_cpus_list", cpu);
        fx_write(cpu % 2 ? "1,3\n" : "0,2\n", CPU "/cpu%d/topology/thread_siblings_list", cpu);
    }
    x = running();
    for (uint32_t cpu = 0; cpu < 4; cpu++)
        CHECK_U64(mx_core(&x, cpu)->core, cpu % 2);
    mx_close(&x);
    for (int cpu = 0; cpu < 4; cpu++)
        fx_remove(CPU "/cpu%d/topology/thread_siblings_list", cpu);
    machine_make();
}

/* Each file of an online CPU in turn: the failure is reported, wakes, and ends when the file can be read. */
static void test_unreadable_value_is_neither_zero_nor_absent(void)
{
    static const struct {
        const char *file, *text;
        enum dh_machine_field field;
        int32_t err;
    } rows[] = {
        { "topology/core_cpus_list", "none\n", DH_CORE_CORE, DH_EPARSE },
        { "topology/core_cpus_list", "\n", DH_CORE_CORE, DH_EPARSE },
        { "topology/core_cpus_list", "0-1\n", DH_CORE_CORE, DH_EPARSE }, /* a list without this CPU */
        { "topology/core_cpus_list", NULL, DH_CORE_CORE, EIO },
        { "topology/physical_package_id", "-2\n", DH_CORE_PACKAGE, DH_EPARSE },
        { "topology/physical_package_id", NULL, DH_CORE_PACKAGE, EIO },
        { "cpufreq/cpuinfo_max_freq", "fast\n", DH_CORE_MAX_KHZ, DH_EPARSE },
        { "cpufreq/scaling_max_freq", NULL, DH_CORE_CAP_KHZ, EIO },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct mx x = running();

        check_row = rows[i].file;
        if (rows[i].text)
            fx_write(rows[i].text, CPU "/cpu2/%s", rows[i].file);
        else
            fx_symlink("/proc/self/mem", CPU "/cpu2/%s", rows[i].file);
        mx_later(&x, RARE_NS);
        CHECK(mx_woken(&x));
        CHECK_U64(mx_core(&x, 2)->valid, ALL & ~DH_MACHINE_BIT(rows[i].field));
        CHECK_U64(mx_core(&x, 2)->seen, ALL);
        CHECK_INT(mx_core(&x, 2)->err, rows[i].err);
        CHECK_U64(mx_core(&x, 0)->valid, ALL);
        CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_FAILING);
        CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->err, rows[i].err);
        CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->err_field, rows[i].field);
        fx_remove(CPU "/cpu2/%s", rows[i].file);
        machine_make();
        mx_later(&x, RARE_NS);
        CHECK(mx_woken(&x));
        CHECK_U64(mx_core(&x, 2)->valid, ALL);
        CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_OK);
        mx_close(&x);
    }
    check_row = "";
}

/* An online CPU has its files; a missing one is not "absent". */
static void test_file_removed_for_an_online_cpu_is_unreadable(void)
{
    struct mx x = running();

    fx_remove(CPU "/cpu1/cpufreq");
    mx_later(&x, RARE_NS);
    CHECK(mx_woken(&x));
    CHECK(!HAS(mx_core(&x, 1)->valid, DH_CORE_CAP_KHZ) && HAS(mx_core(&x, 1)->seen, DH_CORE_CAP_KHZ));
    CHECK_INT(mx_core(&x, 1)->err, ENOENT);
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_FAILING);
    mx_close(&x);
    machine_make();
}

static void test_unreadable_cpu_list_fails_the_source(void)
{
    struct mx x = running();

    fx_write("all\n", CPU "/online");
    fx_write("1000000\n", CPU "/cpu1/cpufreq/scaling_max_freq");
    mx_later(&x, RARE_NS);
    CHECK(mx_woken(&x));
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_FAILING);
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->err, DH_EPARSE);
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->err_field, DH_CORE_LIST);
    CHECK_U64(mx_core(&x, 1)->cap_khz, 3000000); /* the last value stays */
    machine_make();
    mx_later(&x, RARE_NS);
    CHECK(mx_woken(&x));
    CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_OK);
    mx_close(&x);
}

/* ---- machine checks ---- */

static void test_machine_checks_wake_at_once_then_rate_limited(void)
{
    static const char text[] = "  CPU0 CPU1 CPU2 CPU3\n MCE:  1  2  3  %d   Machine check exceptions\n";
    struct mx x = running();

    for (int checks = 5; checks < 8; checks++) {
        char now[sizeof(text) + 16];

        snprintf(now, sizeof(now), text, checks);
        fx_write(now, "proc/interrupts");
        mx_rescan(&x);
        CHECK_U64(mx_core(&x, 3)->mce, (uint64_t)checks);
        CHECK_INT(mx_woken(&x), checks == 5);
    }
    mx_later(&x, SLOW_NS);
    CHECK(mx_woken(&x)); /* for the errors in between */
    mx_later(&x, SLOW_NS);
    CHECK(mx_woken(&x)); /* the last pass of the rescan */
    mx_later(&x, SLOW_NS);
    CHECK(!mx_woken(&x));
    mx_close(&x);
    machine_make();
}

static void test_malformed_interrupts_are_unreadable(void)
{
    static const struct {
        const char *what, *text;
        int32_t err;
    } rows[] = {
        { "empty", "", ENOENT },
        { "no header", " MCE:  1  2  3  4   Machine check exceptions\n", DH_EPARSE },
        { "an empty header", "\n MCE:  1  2  3  4   Machine check exceptions\n", DH_EPARSE },
        { "a count too few", "  CPU0 CPU1 CPU2 CPU3\n MCE:  1  2  3   Machine\n", DH_EPARSE },
        { "a count too many", "  CPU0 CPU1 CPU2 CPU3\n MCE:  1  2  3  4  5   Machine\n", DH_EPARSE },
        { "no number", "  CPU0 CPU1 CPU2 CPU3\n MCE:  1  max  3  4   Machine\n", DH_EPARSE },
        { "2^64", "  CPU0 CPU1\n MCE:  1  18446744073709551616   Machine\n", DH_EPARSE },
        { "a CPU above all", "  CPU0 CPU8192\n MCE:  1  1   Machine\n", DH_EPARSE },
        { "cut in the row", "  CPU0 CPU1\n MCE:  1", DH_EPARSE },
        { "cut in a label", "  CPU0 CPU1\n MC", DH_EPARSE },
        { "the row is gone", "  CPU0 CPU1\n MCX:  1  1   no machine checks\n", ENOENT },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct mx x = running();

        check_row = rows[i].what;
        fx_write(rows[i].text, "proc/interrupts");
        mx_later(&x, RARE_NS);
        CHECK(mx_woken(&x));
        for (uint32_t cpu = 0; cpu < 4; cpu++) {
            CHECK(!HAS(mx_core(&x, cpu)->valid, DH_CORE_MCE) && HAS(mx_core(&x, cpu)->seen, DH_CORE_MCE));
            CHECK_U64(mx_core(&x, cpu)->mce, 0);
            CHECK_INT(mx_core(&x, cpu)->err, rows[i].err);
        }
        CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_FAILING);
        CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->err_field, DH_CORE_MCE);
        machine_make();
        mx_later(&x, RARE_NS);
        CHECK_U64(mx_core(&x, 3)->mce, 4);
        CHECK_INT(mx_source(&x, DH_MACHINE_CORES)->state, DH_STATE_OK);
        mx_close(&x);
    }
    check_row = "";
}

static int take(struct dh_interrupts *r, const char *text, size_t n, size_t piece)
{
    int done = 0;

    dh_interrupts_begin(r, "MCE:");
    for (size_t at = 0; at < n && !done; at += piece) {
        size_t len = n - at < piece ? n - at : piece;
        char *copy = check_copy(text + at, len);

        done = dh_interrupts_feed(r, copy, len);
        free(copy);
    }
    return done;
}

static void test_interrupts_fed_in_pieces_give_the_same_row(void)
{
    static struct dh_interrupts r;
    size_t n = sizeof(interrupts) - 1;
    size_t row = (size_t)(strstr(interrupts, "MCE:") - interrupts);

    for (size_t piece = 1; piece <= n; piece++) {
        CHECK_INT(take(&r, interrupts, n, piece), 1);
        CHECK_INT(r.columns, 4);
        CHECK_INT(r.cpu[3], 3);
        CHECK_U64(r.count[0], 1);
        CHECK_U64(r.count[3], 4);
    }
    for (size_t cut = 0; cut < row; cut++) { /* no answer before it, and none that is wrong */
        CHECK_INT(take(&r, interrupts, cut, 7), 0);
        CHECK_INT(dh_interrupts_end(&r) == 0, cut > 0 && interrupts[cut - 1] == '\n');
    }
}

/* The largest possible machine: lines of 90 KiB. */
static void test_interrupt_counts_are_assigned_by_column(void)
{
    static struct dh_interrupts r;
    size_t cap = (size_t)DH_CORE_MAX * 3 * 12 + 256, n = 0;
    char *text = malloc(cap);

    fx_must(text != NULL, "malloc");
    for (int cpu = 0; cpu < DH_CORE_MAX; cpu++)
        n += (size_t)snprintf(text + n, cap - n, " CPU%-7d", cpu);
    n += (size_t)snprintf(text + n, cap - n, "\n  0:");
    for (int cpu = 0; cpu < DH_CORE_MAX; cpu++)
        n += (size_t)snprintf(text + n, cap - n, " %10d", 7);
    n += (size_t)snprintf(text + n, cap - n, "  timer\nMCE:");
    for (int cpu = 0; cpu < DH_CORE_MAX; cpu++)
        n += (size_t)snprintf(text + n, cap - n, " %10d", cpu);
    n += (size_t)snprintf(text + n, cap - n, "  Machine check exceptions\n");
    CHECK_INT(take(&r, text, n, 16384), 1);
    CHECK_INT(r.counts, DH_CORE_MAX);
    for (uint32_t cpu = 0; cpu < DH_CORE_MAX; cpu++)
        CHECK(r.cpu[cpu] == cpu && r.count[cpu] == cpu);
    memcpy(strchr(text, '\n') - 8, " CPU8190", 8);
    CHECK_INT(take(&r, text, n, 16384), DH_EPARSE); /* one more than possible */
    free(text);
}

int main(void)
{
    fx_begin();
    machine_make();
    test_existing_files_are_read();
    test_cores_are_read_rarely_and_wake_only_on_change();
    test_offline_cpu_keeps_its_last_values();
    test_core_number_survives_its_lowest_cpu_going_offline();
    test_cpus_that_come_online_later_are_sorted_in();
    test_absent_file_is_absent_again_after_a_cpu_is_sorted_in();
    test_missing_files_are_absent();
    test_old_kernel_siblings_file_is_read();
    test_unreadable_value_is_neither_zero_nor_absent();
    test_file_removed_for_an_online_cpu_is_unreadable();
    test_unreadable_cpu_list_fails_the_source();
    test_machine_checks_wake_at_once_then_rate_limited();
    test_malformed_interrupts_are_unreadable();
    test_interrupts_fed_in_pieces_give_the_same_row();
    test_interrupt_counts_are_assigned_by_column();
    return check_done("test_machine_cores");
}

/* Tests of CPUs, throttle counters and hugepage pools with files that fail, lie, vanish and come back. */
#include "check.h"
#include "fixture.h"

#include "core/durations.h"

#define CPU "sys/devices/system/cpu"
#define NODE "sys/devices/system/node"
#define MM "sys/kernel/mm/hugepages"
#define KIB_2M "hugepages-2048kB"
#define NODE0_POOL NODE "/node0/hugepages/" KIB_2M
#define EIO_FILE "/proc/self/mem" /* opens, but cannot be read at offset 0 */

static const struct dh_wake wakes[] = {
    { .field = DH_CPU_ONLINE, .mode = DH_WAKE_CHANGE },
    { .field = DH_NODE_CPUS, .mode = DH_WAKE_CHANGE },
    { .field = DH_POOL_NR, .mode = DH_WAKE_CHANGE },
    { .field = DH_POOL_SURPLUS, .mode = DH_WAKE_CHANGE },
    { .field = DH_NODE_THROTTLE_CORE, .mode = DH_WAKE_RISE, .threshold = 10, .window_ns = 60 * DH_NS },
};

static void pool_write(const char *dir, int nr, bool machine)
{
    char text[16];

    snprintf(text, sizeof(text), "%d\n", nr);
    fx_write(text, "%s/nr_hugepages", dir);
    fx_write(text, "%s/free_hugepages", dir);
    fx_write("0\n", "%s/surplus_hugepages", dir);
    if (machine) {
        fx_write("3\n", "%s/resv_hugepages", dir);
        fx_write("8\n", "%s/nr_overcommit_hugepages", dir);
    }
}

/* Create two nodes of two CPUs and one hugepage size. */
static void machine_make(void)
{
    fx_write("0-3\n", CPU "/present");
    fx_write("0-3\n", CPU "/online");
    fx_write("3\n", CPU "/isolated");
    fx_write("0-1\n", NODE "/node0/cpulist");
    fx_write("2-3\n", NODE "/node1/cpulist");
    fx_write("0-1\n", NODE "/online"); /* not a node */
    pool_write(MM "/" KIB_2M, 512, true);
    pool_write(NODE "/node0/hugepages/" KIB_2M, 256, false);
    pool_write(NODE "/node1/hugepages/" KIB_2M, 256, false);
}

static struct fx machine(void)
{
    struct dh_options o = fx_options();

    return fx_open(&o, "/", wakes, sizeof(wakes) / sizeof(*wakes));
}

static struct fx running(void)
{
    struct fx f = machine();

    fx_pass(&f);
    CHECK(fx_woken(&f));
    return f;
}

static uint32_t state_of(const struct fx *f, enum dh_source_id id)
{
    return f->head->source[id].state;
}

static void test_existing_files_are_read(void)
{
    struct fx f = running();
    const struct dh_pool *p = fx_pool(&f, 2048, DH_MACHINE);

    CHECK_U64(f.head->cpu_present[0], 0xf);
    CHECK_U64(f.head->cpu_online[0], 0xf);
    CHECK_U64(f.head->cpu_isolated[0], 8);
    CHECK_INT(f.head->nodes, 2);
    CHECK_INT(f.head->pools, 3);
    CHECK_U64(p->nr, 512);
    CHECK_U64(p->reserved, 3);
    CHECK_U64(p->overcommit, 8);
    p = fx_pool(&f, 2048, 1);
    CHECK_U64(p->nr, 256);
    CHECK(HAS(p->valid, DH_POOL_NR) && !HAS(p->seen, DH_POOL_RESERVED)); /* nodes lack this file */
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_ABSENT);
    CHECK_INT(state_of(&f, DH_SOURCE_CGROUPS), DH_STATE_ABSENT);
    CHECK_U64(f.head->seq, 1);
    fx_close(&f);
}

static void test_unchanged_pass_neither_wakes_nor_opens(void)
{
    struct fx f = running();
    uint64_t opens = f.head->opens, reads = f.head->reads, passes = f.head->passes;

    fx_pass(&f);
    CHECK(!fx_woken(&f));
    CHECK_U64(f.head->reads - reads, 1 + 5 + 3 + 3);
    fx_write("100\n", MM "/" KIB_2M "/free_hugepages"); /* changes all the time: no rule waits for it */
    fx_pass(&f);
    CHECK(!fx_woken(&f));
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->free, 100);
    CHECK_U64(f.head->reads - reads, 2 * (1 + 5 + 3 + 3) + 5); /* a changed pool is read until it is stable */
    CHECK_U64(f.head->opens, opens);
    CHECK_U64(f.head->passes - passes, 2);
    pool_write(MM "/" KIB_2M, 512, true);
    fx_close(&f);
}

static void test_each_pass_is_counted_in_one_bucket_of_its_source(void)
{
    struct fx f = running();
    struct dh_durations durations[DH_SOURCE_NUM];

    fx_pass(&f);
    fx_pass(&f);
    dh_sampler_durations(f.s, durations);
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        uint64_t sum = 0;

        for (int bucket = 0; bucket < DH_DURATION_NUM; bucket++)
            sum += durations[i].count[bucket];
        CHECK_U64(sum, f.head->source[i].passes);
        CHECK(durations[i].sum_ns > 0 && durations[i].sum_ns < dh_now_ns());
    }
    fx_close(&f);
}

static void test_duration_is_counted_below_the_next_bound(void)
{
    struct dh_durations d = { 0 };

    for (uint32_t bucket = 0; bucket + 1 < DH_DURATION_NUM; bucket++) {
        uint64_t bound_ns = dh_duration_bound(bucket);

        CHECK(bound_ns < dh_duration_bound(bucket + 1));
        dh_durations_note(&d, bound_ns);
        CHECK_U64(d.count[bucket], bucket ? 2 : 1);
        dh_durations_note(&d, bound_ns + 1);
        CHECK_U64(d.count[bucket + 1], 1);
    }
    CHECK_U64(dh_duration_bound(DH_DURATION_NUM - 1), UINT64_MAX);
    CHECK_U64(dh_duration_bound(UINT32_MAX), UINT64_MAX);
}

/* Open with ten passes a second. */
static struct fx running_often(void)
{
    struct dh_options o = fx_options();
    struct fx f;

    o.period_ns = DH_NS / 10;
    f = fx_open(&o, "/", wakes, sizeof(wakes) / sizeof(*wakes));
    fx_pass(&f);
    CHECK(fx_woken(&f));
    return f;
}

static void test_pool_sizes_are_read_each_pass_and_usage_each_second(void)
{
    struct fx f = running_often();
    uint64_t reads = f.head->reads;

    fx_write("100\n", MM "/" KIB_2M "/free_hugepages");
    fx_write("100\n", NODE0_POOL "/free_hugepages");
    for (int pass = 1; pass < 10; pass++) {
        fx_pass(&f);
        CHECK_U64(f.head->reads - reads, (uint64_t)pass * (1 + 2 + 2));
    }
    CHECK_INT(dh_sampler_lower_bound(f.s, 0), 1 + 2 + 2); /* the lower bound makes the same reads */
    CHECK_U64(fx_pool(&f, 2048, 0)->free, 256);
    reads = f.head->reads;
    fx_pass(&f);
    CHECK_U64(f.head->reads - reads, 1 + (5 + 3 + 3) + (5 + 3)); /* a changed pool is read until it is stable */
    CHECK_U64(fx_pool(&f, 2048, 0)->free, 100);
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->free, 100);
    reads = f.head->reads;
    fx_pass(&f);
    CHECK_U64(f.head->reads - reads, 1 + 2 + 2);
    CHECK(!fx_woken(&f));
    machine_make();
    fx_close(&f);
}

/* Used pages that are removed from a pool become surplus: nr does not show it. */
static void test_changed_pool_size_reads_the_usage_of_all_pools(void)
{
    static const char *const files[] = { "nr_hugepages", "surplus_hugepages" };

    for (int i = 0; i < 2; i++) {
        struct fx f = running_often();

        check_row = files[i];
        fx_write("7\n", NODE0_POOL "/%s", files[i]);
        fx_write("8\n", MM "/" KIB_2M "/%s", files[i]);
        fx_write("9\n", MM "/" KIB_2M "/resv_hugepages");
        fx_pass(&f);
        CHECK(fx_woken(&f));
        CHECK_U64(i ? fx_pool(&f, 2048, 0)->surplus : fx_pool(&f, 2048, 0)->nr, 7);
        CHECK_U64(i ? fx_pool(&f, 2048, DH_MACHINE)->surplus : fx_pool(&f, 2048, DH_MACHINE)->nr, 8);
        CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->reserved, 9);
        CHECK_U64(f.head->seq, 2);
        machine_make();
        fx_close(&f);
    }
    check_row = "";
}

static void test_pool_without_pages_is_read_in_one_file(void)
{
    struct fx f;
    uint64_t reads;

    pool_write(NODE "/node1/hugepages/" KIB_2M, 0, false);
    f = running_often();
    CHECK_INT(dh_sampler_lower_bound(f.s, 0), 1 + 2 + 1);
    reads = f.head->reads;
    for (int pass = 1; pass <= 9; pass++) {
        fx_pass(&f);
        CHECK_U64(f.head->reads - reads, (uint64_t)pass * (1 + 2 + 1));
    }
    fx_pass(&f); /* once a second all files, but those of this pool */
    CHECK_U64(f.head->reads - reads, 9 * (1 + 2 + 1) + 1 + 5 + 3 + 1);
    pool_write(NODE "/node1/hugepages/" KIB_2M, 4, false);
    fx_write("3\n", NODE "/node1/hugepages/" KIB_2M "/surplus_hugepages");
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(fx_pool(&f, 2048, 1)->nr, 4);
    CHECK_U64(fx_pool(&f, 2048, 1)->surplus, 3);
    CHECK_U64(fx_pool(&f, 2048, 1)->free, 4);
    pool_write(NODE "/node1/hugepages/" KIB_2M, 0, false);
    fx_pass(&f);
    CHECK_U64(fx_pool(&f, 2048, 1)->nr + fx_pool(&f, 2048, 1)->surplus + fx_pool(&f, 2048, 1)->free, 0);
    fx_write("?\n", NODE "/node1/hugepages/" KIB_2M "/surplus_hugepages");
    fx_elapse(&f, 10 * DH_NS);
    fx_pass(&f);
    CHECK(!HAS(fx_pool(&f, 2048, 1)->valid, DH_POOL_SURPLUS));
    machine_make();
    fx_close(&f);
}

static void test_machine_pools_without_node_pools_are_read_each_pass(void)
{
    struct fx f;

    fx_remove(NODE "/node0/hugepages");
    fx_remove(NODE "/node1/hugepages");
    f = running_often();
    CHECK_INT(dh_sampler_lower_bound(f.s, 0), 1 + 2);
    pool_write(MM "/" KIB_2M, 511, true);
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->nr, 511);
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->free, 511);
    machine_make();
    fx_close(&f);
}

static void test_shrunk_pool_wakes(void)
{
    struct fx f = running();

    pool_write(NODE "/node1/hugepages/" KIB_2M, 255, false);
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(fx_pool(&f, 2048, 1)->nr, 255);
    CHECK_U64(f.head->seq, 2);
    pool_write(NODE "/node1/hugepages/" KIB_2M, 256, false);
    fx_close(&f);
}

/* The kernel drops an offline CPU from cpulist; the record keeps it. */
static void test_offline_cpu_stays_with_its_node(void)
{
    struct fx f = running();

    fx_write("0,2-4\n", CPU "/online"); /* and a CPU that did not exist before came online */
    fx_write("0,4\n", NODE "/node0/cpulist");
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(f.head->cpu_online[0], 0x1d);
    CHECK_U64(fx_node(&f, 0)->cpus[0], 0x13);
    CHECK_U64(fx_node(&f, 1)->cpus[0], 0xc);
    machine_make();
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(f.head->cpu_online[0], 0xf);
    fx_close(&f);
}

/* In sysfs a read through a descriptor of a removed file fails; a fixture's file stays readable. */
static void reopen(struct fx *f)
{
    for (uint32_t i = 0; i < f->s->work->head.pools; i++) {
        close(f->s->pool_file[i][0].fd);
        f->s->pool_file[i][0].fd = -1;
    }
    f->s->work->head.descriptors -= f->s->work->head.pools;
}

/* Different failures of the same file, through a link, so that each occurs at the open. */
static void test_unreadable_file_is_neither_zero_nor_absent(void)
{
    static const struct {
        const char *what, *text, *target;
        int32_t err;
    } rows[] = {
        { "EIO", NULL, EIO_FILE, EIO },
        { "removed", NULL, NULL, ENOENT },
        { "a directory", NULL, "/", EISDIR },
        { "nonsense", "many\n", NULL, DH_EPARSE },
        { "nothing", "", NULL, DH_EPARSE },
        { "two numbers", "5\n6\n", NULL, DH_EPARSE },
        { "longer than any number", "00000000000000000000000000000000"
                                    "00000000000000000000000000000001\n", NULL, EFBIG },
    };

    fx_symlink("nr.real", NODE0_POOL "/nr_hugepages");
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct fx f;
        const struct dh_pool *p;

        check_row = rows[i].what;
        fx_write("256\n", NODE0_POOL "/nr.real");
        f = running();
        CHECK_U64(fx_pool(&f, 2048, 0)->nr, 256);
        if (rows[i].text) {
            fx_write(rows[i].text, NODE0_POOL "/nr.real");
        } else {
            fx_remove(NODE0_POOL "/nr_hugepages");
            if (rows[i].target)
                fx_symlink(rows[i].target, NODE0_POOL "/nr_hugepages");
        }
        reopen(&f);
        fx_pass(&f);
        CHECK(fx_woken(&f));
        p = fx_pool(&f, 2048, 0);
        CHECK(!HAS(p->valid, DH_POOL_NR) && HAS(p->seen, DH_POOL_NR));
        CHECK_U64(p->nr, 0);
        CHECK_INT(p->err, rows[i].err);
        CHECK(HAS(p->valid, DH_POOL_FREE));
        CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_FAILING);
        CHECK_INT(f.head->source[DH_SOURCE_HUGEPAGES].err, rows[i].err);
        CHECK_INT(f.head->source[DH_SOURCE_HUGEPAGES].err_field, DH_POOL_NR);
        CHECK(f.head->source[DH_SOURCE_HUGEPAGES].failures > 0);
        fx_pass(&f);
        CHECK(!fx_woken(&f)); /* reported already */
        CHECK_INT(dh_sampler_lower_bound(f.s, 0), 1 + 2 + 2 - (rows[i].text ? 0 : 1));
        CHECK_U64(f.head->descriptors, 8 + 3 + 5 + 3 + 3 - (rows[i].text ? 0 : 1));

        fx_symlink("nr.real", NODE0_POOL "/nr_hugepages");
        fx_write("256\n", NODE0_POOL "/nr.real");
        fx_pass(&f);
        CHECK(fx_woken(&f));
        CHECK_U64(fx_pool(&f, 2048, 0)->nr, 256);
        CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_OK);
        fx_close(&f);
    }
    check_row = "";
    fx_remove(NODE0_POOL);
    machine_make();
}

static void test_file_never_seen_is_absent(void)
{
    struct fx f;
    const struct dh_pool *p;
    uint64_t opens;

    fx_remove(MM "/" KIB_2M "/resv_hugepages");
    fx_remove(CPU "/isolated");
    f = running();
    p = fx_pool(&f, 2048, DH_MACHINE);
    CHECK(!HAS(p->seen, DH_POOL_RESERVED) && !HAS(p->valid, DH_POOL_RESERVED));
    CHECK(!HAS(f.head->cpu_seen, DH_CPU_ISOLATED));
    CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    CHECK_U64(f.head->source[DH_SOURCE_HUGEPAGES].failures, 0);
    opens = f.head->opens;
    fx_pass(&f);
    CHECK_U64(f.head->opens, opens); /* probed at each resync only */
    machine_make();
    fx_resync(&f);
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->reserved, 3);
    CHECK_U64(f.head->cpu_isolated[0], 8);
    fx_close(&f);
}

static void test_unreadable_cpu_set_is_empty_and_invalid(void)
{
    struct fx f = running();

    fx_write("0-3,\n", CPU "/online");
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK(!HAS(f.head->cpu_valid, DH_CPU_ONLINE) && HAS(f.head->cpu_seen, DH_CPU_ONLINE));
    CHECK_U64(f.head->cpu_online[0], 0);
    CHECK_INT(f.head->cpu_err, DH_EPARSE);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_FAILING);
    CHECK_U64(fx_node(&f, 0)->cpus[0], 3);
    fx_write("0-3\n", CPU "/online");
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(f.head->cpu_online[0], 0xf);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    fx_close(&f);
}

/* Every machine has a CPU; an empty set of isolated CPUs is usual. */
static void test_empty_online_set_is_unreadable(void)
{
    struct fx f = running();

    fx_write("\n", CPU "/online");
    fx_write("", CPU "/present");
    fx_write("\n", CPU "/isolated");
    fx_resync(&f);
    CHECK(!HAS(f.head->cpu_valid, DH_CPU_ONLINE) && HAS(f.head->cpu_seen, DH_CPU_ONLINE));
    CHECK(!HAS(f.head->cpu_valid, DH_CPU_PRESENT) && HAS(f.head->cpu_seen, DH_CPU_PRESENT));
    CHECK(HAS(f.head->cpu_valid, DH_CPU_ISOLATED));
    CHECK_INT(f.head->cpu_err, DH_EPARSE);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_FAILING);
    machine_make();
    fx_pass(&f);
    CHECK_U64(f.head->cpu_present[0], 0xf);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    fx_close(&f);
}

/* Not only at each resync, which may be minutes away. */
static void test_absent_files_are_probed_every_ten_seconds(void)
{
    struct fx f;

    fx_remove(CPU "/isolated");
    f = running();
    CHECK(!HAS(f.head->cpu_seen, DH_CPU_ISOLATED));
    fx_write("3\n", CPU "/isolated");
    fx_write("7\n", CPU "/cpu1/thermal_throttle/core_throttle_count");
    fx_elapse(&f, 2 * DH_NS);
    fx_pass(&f);
    CHECK(!HAS(f.head->cpu_seen, DH_CPU_ISOLATED) && !HAS(fx_node(&f, 0)->seen, DH_NODE_THROTTLE_CORE));
    fx_elapse(&f, 8 * DH_NS - DH_NS / 100); /* a timer may be early */
    fx_pass(&f);
    CHECK(HAS(f.head->cpu_valid, DH_CPU_ISOLATED) && HAS(fx_node(&f, 0)->valid, DH_NODE_THROTTLE_CORE));
    fx_close(&f);
    fx_remove(CPU "/cpu1");
}

/* A mount point exists, and is opened, before a file system is mounted on it. */
static void test_root_mounted_over_is_reopened(void)
{
    char from[FX_PATH], to[FX_PATH];
    struct fx f;

    fx_remove("sys");
    fx_dir("sys");
    f = running();
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_ABSENT);
    snprintf(from, sizeof(from), "%s/sys", fx_root);
    snprintf(to, sizeof(to), "%s/below", fx_root);
    fx_must(!rename(from, to), to);
    machine_make();
    fx_elapse(&f, 10 * DH_NS);
    fx_pass(&f);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    CHECK_INT(f.head->nodes, 2);
    CHECK_INT(f.head->pools, 3);
    fx_close(&f);
    fx_remove("below");
}

static void test_early_timer_does_not_skip_a_resync(void)
{
    struct fx f = running();

    fx_write("2\n", CPU "/isolated");
    fx_elapse(&f, f.s->opt.resync_ns - DH_NS / 100);
    fx_pass(&f);
    CHECK_U64(f.head->cpu_isolated[0], 4);
    fx_close(&f);
    machine_make();
}

static void test_kernel_without_numa_has_one_node(void)
{
    struct fx f;

    fx_remove(NODE);
    f = running();
    CHECK_INT(f.head->nodes, 1);
    CHECK_INT(fx_nodes(&f)[0].node, 0);
    CHECK_U64(fx_nodes(&f)[0].cpus[0], 0xf);
    CHECK_INT(f.head->pools, 1);
    fx_write("all\n", CPU "/online");
    fx_pass(&f);
    CHECK(!HAS(fx_nodes(&f)[0].valid, DH_NODE_CPUS) && HAS(fx_nodes(&f)[0].seen, DH_NODE_CPUS));
    CHECK_INT(fx_nodes(&f)[0].err, DH_EPARSE);
    CHECK_INT(f.head->source[DH_SOURCE_CPUS].err_field, DH_CPU_ONLINE);
    CHECK_U64(f.head->source[DH_SOURCE_CPUS].failures, 1);
    fx_write("0-3\n", CPU "/online");
    fx_pass(&f);
    CHECK(HAS(fx_nodes(&f)[0].valid, DH_NODE_CPUS));
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    fx_close(&f);
    machine_make();
}

static void test_empty_sysfs_is_absent_until_mounted(void)
{
    struct fx f;

    fx_remove("sys");
    f = running();
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        CHECK_INT(state_of(&f, i), DH_STATE_ABSENT);
        CHECK_INT(f.head->source[i].err, ENOENT); /* the reason */
        CHECK_INT(f.head->source[i].err_field, i == DH_SOURCE_CGROUPS ? DH_CGROUPFS : DH_SYSFS);
        CHECK_U64(f.head->source[i].failures, 0);
    }
    CHECK_INT(f.head->nodes + f.head->pools + f.head->groups, 0);
    machine_make();
    fx_pass(&f);
    CHECK(!fx_woken(&f));
    fx_elapse(&f, DH_NS); /* opened again each second */
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_INT(f.head->source[DH_SOURCE_CPUS].err, 0);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_ABSENT);
    CHECK_INT(f.head->nodes, 2);
    CHECK_INT(f.head->pools, 3);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    fx_close(&f);
}

/* A path that exists and is no directory differs from a missing one. */
static void test_unopenable_root_fails_its_sources(void)
{
    struct fx f;

    fx_remove("sys");
    fx_write("", "sys");
    fx_write("", "cg");
    f = running();
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        CHECK_INT(state_of(&f, i), DH_STATE_FAILING);
        CHECK_INT(f.head->source[i].err, ENOTDIR);
        CHECK_INT(f.head->source[i].err_field, i == DH_SOURCE_CGROUPS ? DH_CGROUPFS : DH_SYSFS);
        CHECK_U64(f.head->source[i].failures, 1);
        CHECK_U64(f.head->source[i].passes, 1); /* it fails, but is not stalled */
    }
    fx_remove("sys");
    fx_remove("cg");
    fx_write("hugetlb memory cpu\n", "cg/cgroup.controllers");
    machine_make();
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_ABSENT);
    CHECK_INT(state_of(&f, DH_SOURCE_CGROUPS), DH_STATE_OK);
    fx_close(&f);
    fx_remove("cg");
}

/* A lack of descriptors says nothing of a file: what never existed is absent again afterwards. */
static void test_absent_files_are_absent_again_after_a_lack_of_descriptors(void)
{
    struct fx f;

    fx_remove(MM "/" KIB_2M "/resv_hugepages");
    fx_remove(CPU "/isolated");
    f = running();
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    fx_exhaust_descriptors(true);
    fx_resync(&f);
    fx_exhaust_descriptors(false);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_FAILING);
    CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_FAILING);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_FAILING);
    CHECK(HAS(f.head->cpu_valid, DH_CPU_ONLINE)); /* its file is open */
    CHECK(HAS(fx_node(&f, 0)->valid, DH_NODE_CPUS));
    fx_elapse(&f, 2 * DH_NS);
    fx_pass(&f);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_ABSENT);
    CHECK(!HAS(f.head->cpu_seen, DH_CPU_ISOLATED));
    CHECK(!HAS(fx_pool(&f, 2048, DH_MACHINE)->seen, DH_POOL_RESERVED));
    fx_close(&f);
    machine_make();
}

/* Never read, but existing: unreadable, not absent, and retried in every pass. */
static void test_file_unreadable_from_the_start_is_not_absent(void)
{
    static const char *const pod = "cg/kubepods/pod11111111-2222-3333-4444-555555555555";
    const struct dh_pool *p;
    const struct dh_group *g;
    struct fx f;

    fx_write("hugetlb memory cpu\n", "cg/cgroup.controllers");
    fx_symlink(EIO_FILE, "%s/cgroup.events", pod);
    fx_symlink(EIO_FILE, MM "/" KIB_2M "/nr_hugepages");
    fx_symlink(EIO_FILE, CPU "/isolated");
    fx_write("some\n", NODE "/node1/cpulist");
    fx_symlink(EIO_FILE, CPU "/cpu0/thermal_throttle/core_throttle_count");
    f = running();
    for (int i = 0; i < DH_SOURCE_NUM; i++)
        CHECK_INT(state_of(&f, i), DH_STATE_FAILING);
    p = fx_pool(&f, 2048, DH_MACHINE);
    CHECK(!HAS(p->valid, DH_POOL_NR) && HAS(p->seen, DH_POOL_NR));
    CHECK_INT(p->err, EIO);
    CHECK(!HAS(f.head->cpu_valid, DH_CPU_ISOLATED) && HAS(f.head->cpu_seen, DH_CPU_ISOLATED));
    CHECK_INT(f.head->cpu_err, EIO);
    CHECK(!HAS(fx_node(&f, 1)->valid, DH_NODE_CPUS) && HAS(fx_node(&f, 1)->seen, DH_NODE_CPUS));
    CHECK_INT(fx_node(&f, 1)->err, DH_EPARSE);
    CHECK(!HAS(fx_node(&f, 0)->valid, DH_NODE_THROTTLE_CORE));
    CHECK(HAS(fx_node(&f, 0)->seen, DH_NODE_THROTTLE_CORE));
    CHECK_INT(fx_node(&f, 0)->err, EIO);
    g = fx_group(&f, pod + 15, "");
    CHECK(!HAS(g->valid, DH_GROUP_FROZEN) && HAS(g->seen, DH_GROUP_FROZEN));
    CHECK(!HAS(g->seen, DH_GROUP_MEM_OOM)); /* this file does not exist */
    CHECK_INT(g->err, EIO);

    fx_remove("%s/cgroup.events", pod);
    fx_write("populated 1\n", "%s/cgroup.events", pod); /* of an older kernel */
    fx_remove(MM "/" KIB_2M "/nr_hugepages");
    fx_remove(CPU "/isolated");
    fx_remove(CPU "/cpu0");
    fx_write("7\n", CPU "/cpu0/thermal_throttle/core_throttle_count");
    machine_make();
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->nr, 512);
    CHECK_U64(f.head->cpu_isolated[0], 8);
    CHECK_U64(fx_node(&f, 1)->cpus[0], 0xc);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    CHECK_INT(state_of(&f, DH_SOURCE_HUGEPAGES), DH_STATE_OK);
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    dh_sampler_sweep(f.s);
    fx_pass(&f);
    CHECK(HAS(fx_node(&f, 0)->valid, DH_NODE_THROTTLE_CORE));
    CHECK_U64(fx_node(&f, 0)->throttle_core, 0);
    g = fx_group(&f, pod + 15, "");
    CHECK_U64(g->populated, 1);
    CHECK(!HAS(g->seen, DH_GROUP_FROZEN));
    for (int i = 0; i < DH_SOURCE_NUM; i++)
        CHECK_INT(state_of(&f, i), DH_STATE_OK);
    fx_close(&f);
    fx_remove("cg");
    fx_remove(CPU "/cpu0");
}

/* While a node's list cannot be read, its CPUs are unknown; the last ones are kept for later. */
static void test_unreadable_cpulist_is_invalid(void)
{
    struct fx f = running();

    fx_remove(NODE "/node1/cpulist");
    fx_symlink(EIO_FILE, NODE "/node1/cpulist");
    fx_resync(&f);
    CHECK(fx_woken(&f));
    CHECK(!HAS(fx_node(&f, 1)->valid, DH_NODE_CPUS) && HAS(fx_node(&f, 1)->seen, DH_NODE_CPUS));
    CHECK_INT(fx_node(&f, 1)->err, EIO);
    CHECK(HAS(fx_node(&f, 0)->valid, DH_NODE_CPUS));
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_FAILING);
    CHECK_INT(f.head->source[DH_SOURCE_CPUS].err_field, DH_NODE_CPUS);
    fx_remove(NODE "/node1/cpulist");
    fx_write("2\n", NODE "/node1/cpulist"); /* one of its CPUs is offline now */
    fx_pass(&f);
    CHECK(fx_woken(&f));
    CHECK(HAS(fx_node(&f, 1)->valid, DH_NODE_CPUS));
    CHECK_U64(fx_node(&f, 1)->cpus[0], 0xc);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_OK);
    fx_close(&f);
    machine_make();
}

static void test_nodes_beyond_the_table_fail_the_source(void)
{
    struct fx f;

    for (int i = 0; i < DH_NODE_MAX + 3; i++)
        fx_write("\n", NODE "/node%d/cpulist", i);
    f = running();
    CHECK_INT(f.head->nodes, DH_NODE_MAX);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_FAILING);
    CHECK_INT(f.head->source[DH_SOURCE_CPUS].err, DH_EFULL);
    CHECK_INT(f.head->source[DH_SOURCE_CPUS].err_field, DH_NODE_CPUS);
    CHECK_U64(f.head->source[DH_SOURCE_CPUS].failures, 3);
    fx_pass(&f);
    CHECK_INT(state_of(&f, DH_SOURCE_CPUS), DH_STATE_FAILING);
    CHECK_U64(f.head->source[DH_SOURCE_CPUS].failures, 3); /* not listed in vain in every pass */
    fx_close(&f);
    fx_remove(NODE);
    machine_make();
}

/* Only a cgroup's record is limited to six sizes. */
static void test_page_sizes_beyond_the_table_fail_the_source(void)
{
    static const char *const group = "cg/kubepods/pod11111111-2222-3333-4444-555555555555";
    struct fx f;

    for (int i = 0; i < 7; i++) /* one of them is 2 MiB */
        fx_write("1\n", MM "/hugepages-%dkB/nr_hugepages", 64 << i);
    fx_write("hugetlb memory cpu\n", "cg/cgroup.controllers");
    fx_write("populated 1\nfrozen 0\n", "%s/cgroup.events", group);
    f = running();
    CHECK_INT(fx_group(&f, group + 15, "")->sizes, DH_HP_MAX);
    CHECK_INT(state_of(&f, DH_SOURCE_CGROUPS), DH_STATE_FAILING);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err, DH_EFULL);
    CHECK_INT(f.head->pools, 7 + 2);
    fx_close(&f);
    fx_remove("cg");
    fx_remove(MM);
    machine_make();
}

static void throttle_write(int cpu, const char *core, const char *package)
{
    fx_write(core, CPU "/cpu%d/thermal_throttle/core_throttle_count", cpu);
    fx_write(package, CPU "/cpu%d/thermal_throttle/package_throttle_count", cpu);
}

static void throttle_remove(void)
{
    for (int cpu = 0; cpu < 4; cpu++) {
        fx_dir(CPU "/cpu%d", cpu);
        fx_remove(CPU "/cpu%d", cpu);
    }
}

static void throttle_pass(struct fx *f)
{
    fx_elapse(f, DH_NS);
    fx_pass(f);
}

static void test_throttle_count_is_the_growth_since_start(void)
{
    struct fx f;

    for (int cpu = 0; cpu < 4; cpu++)
        throttle_write(cpu, "100\n", "1000\n");
    f = running();
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_OK);
    CHECK(HAS(fx_nodes(&f)[0].valid, DH_NODE_THROTTLE_CORE));
    CHECK_U64(fx_nodes(&f)[0].throttle_core, 0);
    CHECK_U64(fx_nodes(&f)[0].throttle_package, 0);

    throttle_write(0, "105\n", "1007\n");
    throttle_write(1, "104\n", "1006\n"); /* the same package: not 13 */
    fx_pass(&f);
    CHECK_U64(fx_nodes(&f)[0].throttle_core, 0); /* read once a second */
    throttle_pass(&f);
    CHECK(!fx_woken(&f)); /* 9 of 10 */
    CHECK_U64(fx_nodes(&f)[0].throttle_core + fx_nodes(&f)[1].throttle_core, 9);
    CHECK_U64(fx_nodes(&f)[0].throttle_package + fx_nodes(&f)[1].throttle_package, 7);
    throttle_write(1, "105\n", "1006\n");
    throttle_pass(&f);
    CHECK(fx_woken(&f));
    fx_close(&f);
}

/* A CPU's counters restart when it comes back; the node's sum must neither fall nor jump. */
static void test_throttle_counter_restarts_with_its_cpu(void)
{
    struct fx f;
    const struct dh_node *n;

    for (int cpu = 0; cpu < 4; cpu++)
        throttle_write(cpu, "100\n", "1000\n");
    f = running();
    throttle_write(1, "103\n", "1003\n");
    throttle_pass(&f);
    fx_remove(CPU "/cpu1/thermal_throttle");
    throttle_pass(&f); /* it may be going offline: one failed read is no failure */
    n = fx_node(&f, 0);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_OK);
    CHECK_U64(n->throttle_core, 3);
    fx_write("0,2-3\n", CPU "/online");
    throttle_pass(&f);
    throttle_pass(&f);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_OK);
    CHECK_U64(n->throttle_core, 3);
    throttle_write(1, "2\n", "2\n"); /* 2 during startup, before the first read */
    fx_write("0-3\n", CPU "/online");
    throttle_pass(&f);
    CHECK_U64(n->throttle_core, 3);
    throttle_write(1, "6\n", "7\n");
    throttle_pass(&f);
    CHECK_U64(n->throttle_core, 7);
    CHECK_U64(n->throttle_package, 8);
    fx_close(&f);
}

static void test_missing_throttle_counter_fails_at_the_second_read(void)
{
    struct fx f;
    const struct dh_node *n;

    for (int cpu = 0; cpu < 4; cpu++)
        throttle_write(cpu, "100\n", "1000\n");
    f = running();
    n = fx_node(&f, 1);
    fx_remove(CPU "/cpu2/thermal_throttle/core_throttle_count");
    throttle_pass(&f);
    CHECK(!fx_woken(&f));
    CHECK(HAS(n->valid, DH_NODE_THROTTLE_CORE));
    throttle_pass(&f);
    CHECK(fx_woken(&f));
    CHECK(!HAS(n->valid, DH_NODE_THROTTLE_CORE) && HAS(n->seen, DH_NODE_THROTTLE_CORE));
    CHECK(HAS(n->valid, DH_NODE_THROTTLE_PACKAGE));
    CHECK_INT(n->err, ENOENT);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_FAILING);
    fx_write("hot\n", CPU "/cpu2/thermal_throttle/core_throttle_count");
    throttle_pass(&f);
    CHECK_INT(f.head->source[DH_SOURCE_THROTTLE].err, DH_EPARSE);
    fx_write("101\n", CPU "/cpu2/thermal_throttle/core_throttle_count");
    throttle_pass(&f);
    CHECK(fx_woken(&f));
    CHECK(HAS(n->valid, DH_NODE_THROTTLE_CORE));
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_OK);
    fx_close(&f);
}

static const struct dh_throttle *throttle_of(const struct fx *f, uint32_t cpu)
{
    static const struct dh_throttle none;

    for (uint32_t i = 0; i < f->head->throttles; i++)
        if (fx_throttles(f)[i].cpu == cpu)
            return &fx_throttles(f)[i];
    return &none;
}

/* A device may consist of two of a node's CPUs: the node's sum does not show which were throttled. */
static void test_throttle_counts_are_published_per_cpu(void)
{
    struct fx f;
    uint64_t reads;

    throttle_remove();
    for (int cpu = 0; cpu < 4; cpu += 2) /* 1 and 3 have no counters */
        throttle_write(cpu, "100\n", "1000\n");
    f = running();
    CHECK_INT(f.head->throttles, 2);
    CHECK_U64(throttle_of(&f, 2)->core, 0); /* growth since the start, as for the node */
    throttle_write(0, "103\n", "1007\n");
    throttle_write(2, "105\n", "1006\n");
    throttle_pass(&f);
    CHECK_INT(f.head->throttles, 2);
    for (uint32_t i = 0; i < 2; i++) {
        const struct dh_throttle *t = &fx_throttles(&f)[i];

        CHECK_INT(t->cpu, 2 * i); /* ascending */
        CHECK_U64(t->core, i ? 5 : 3);
        CHECK_U64(t->package, i ? 6 : 7);
        CHECK(HAS(t->valid, DH_NODE_THROTTLE_CORE) && HAS(t->valid, DH_NODE_THROTTLE_PACKAGE));
        CHECK_U64(t->valid, t->seen);
    }
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->nr, 512); /* the records behind them are in place */
    fx_write("0-1,3\n", CPU "/online");
    fx_remove(CPU "/cpu2/thermal_throttle");
    throttle_pass(&f);
    CHECK_U64(throttle_of(&f, 2)->core, 5); /* it keeps its count */
    CHECK(HAS(throttle_of(&f, 2)->valid, DH_NODE_THROTTLE_CORE));
    machine_make();
    throttle_write(1, "7\n", "7\n"); /* counters that come late are sorted in */
    throttle_write(2, "1\n", "1\n");
    fx_elapse(&f, 10 * DH_NS);
    fx_pass(&f);
    CHECK_INT(f.head->throttles, 3);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_INT(fx_throttles(&f)[i].cpu, i);
    CHECK_U64(throttle_of(&f, 0)->core, 3);
    CHECK_U64(throttle_of(&f, 1)->core, 0);
    CHECK_U64(throttle_of(&f, 2)->core, 5);
    reads = f.head->reads;
    fx_pass(&f);
    CHECK_U64(f.head->reads - reads, 1 + 5 + 3 + 3); /* not read before a second has passed */
    fx_close(&f);
    throttle_remove();
}

/* Neither of them means "no event". */
static void test_cpu_with_a_lost_counter_reports_its_error(void)
{
    struct fx f;
    const struct dh_throttle *t;

    for (int cpu = 0; cpu < 4; cpu++)
        throttle_write(cpu, "100\n", "1000\n");
    fx_remove(CPU "/cpu0/thermal_throttle/package_throttle_count");
    f = running();
    t = throttle_of(&f, 0);
    CHECK(HAS(t->valid, DH_NODE_THROTTLE_CORE) && !HAS(t->seen, DH_NODE_THROTTLE_PACKAGE));
    throttle_write(1, "104\n", "1000\n");
    throttle_pass(&f);
    CHECK_U64(throttle_of(&f, 1)->core, 4);
    fx_write("hot\n", CPU "/cpu1/thermal_throttle/core_throttle_count");
    throttle_pass(&f);
    t = throttle_of(&f, 1);
    CHECK(!HAS(t->valid, DH_NODE_THROTTLE_CORE) && HAS(t->seen, DH_NODE_THROTTLE_CORE));
    CHECK(HAS(t->valid, DH_NODE_THROTTLE_PACKAGE));
    CHECK_U64(t->core, 0);
    CHECK_INT(t->err, DH_EPARSE);
    CHECK_U64(throttle_of(&f, 3)->valid, throttle_of(&f, 3)->seen);
    throttle_write(1, "106\n", "1000\n");
    throttle_pass(&f);
    t = throttle_of(&f, 1);
    CHECK_U64(t->core, 6); /* it went on counting */
    CHECK_INT(t->err, 0);
    fx_close(&f);
    throttle_remove();
}

/* The CPUs count on while it is unknown which of them are online. */
static void test_throttle_counts_without_the_online_set_are_unreadable(void)
{
    struct fx f;
    const struct dh_node *n;

    for (int cpu = 0; cpu < 2; cpu++)
        throttle_write(cpu, "100\n", "1000\n");
    f = running();
    n = fx_node(&f, 0);
    throttle_write(0, "102\n", "1003\n");
    throttle_pass(&f);
    CHECK_U64(n->throttle_core, 2);
    fx_write("\n", CPU "/online");
    throttle_pass(&f);
    CHECK(!HAS(n->valid, DH_NODE_THROTTLE_CORE) && HAS(n->seen, DH_NODE_THROTTLE_CORE));
    CHECK(!HAS(n->valid, DH_NODE_THROTTLE_PACKAGE) && HAS(n->seen, DH_NODE_THROTTLE_PACKAGE));
    CHECK_INT(throttle_of(&f, 0)->err, DH_EPARSE);
    CHECK(!HAS(fx_node(&f, 1)->seen, DH_NODE_THROTTLE_CORE)); /* no counters, as before */
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_FAILING);
    throttle_write(0, "112\n", "1023\n");
    machine_make();
    throttle_pass(&f);
    CHECK_INT(state_of(&f, DH_SOURCE_THROTTLE), DH_STATE_OK);
    CHECK(HAS(n->valid, DH_NODE_THROTTLE_CORE));
    CHECK_U64(n->throttle_core, 12);
    CHECK_U64(n->throttle_package, 23);
    fx_close(&f);
    throttle_remove();
}

static void request_rescan(struct fx *f)
{
    uint64_t one = 1;

    fx_must(write(dh_sampler_rescan_fd(f->s), &one, sizeof(one)) == sizeof(one), "poke");
}

static uint64_t passes_of(struct fx *f)
{
    fx_read(f);
    return f->head->passes;
}

/* Open with an hour until the thread's next pass and listing. */
static struct fx slow_sampler(void)
{
    struct dh_options o = fx_options();
    struct fx f;

    o.period_ns = o.sweep_ns = o.resync_ns = 3600 * DH_NS;
    f = fx_open(&o, "/", wakes, sizeof(wakes) / sizeof(*wakes));
    CHECK_INT(dh_sampler_start(f.s), 0);
    EVENTUALLY(passes_of(&f) == 1);
    EVENTUALLY(fx_woken(&f));
    return f;
}

static void test_rescan_lists_nodes_and_pools_again(void)
{
    struct fx f;
    uint64_t opens, reads;

    fx_remove(NODE "/node1");
    fx_remove(CPU "/isolated");
    f = slow_sampler();
    CHECK_INT(f.head->nodes, 1);
    CHECK_INT(f.head->pools, 2);
    machine_make();
    fx_write("0-7\n", CPU "/present"); /* plugged in, but not online yet */
    fx_write("1\n", CPU "/cpu1/thermal_throttle/core_throttle_count");
    request_rescan(&f);
    EVENTUALLY(passes_of(&f) == 2);
    EVENTUALLY(fx_woken(&f));
    CHECK_INT(f.head->nodes, 2);
    CHECK_INT(f.head->pools, 3);
    CHECK_U64(f.head->cpu_present[0], 0xff);
    CHECK_U64(f.head->cpu_isolated[0], 8);
    CHECK_U64(fx_node(&f, 1)->cpus[0], 0xc);
    CHECK_INT(f.head->throttles, 1);
    for (int i = 0; i < DH_SOURCE_THROTTLE; i++)
        CHECK_INT(state_of(&f, i), DH_STATE_OK); /* a request to scan is no failure */
    request_rescan(&f);
    EVENTUALLY(passes_of(&f) == 3);
    CHECK(!fx_woken(&f)); /* nothing new */
    opens = f.head->opens;
    reads = f.head->reads;
    request_rescan(&f);
    EVENTUALLY(passes_of(&f) == 4);
    CHECK(f.head->opens > opens);
    CHECK(f.head->reads - reads > 1 + 5 + 3 + 3);
    fx_close(&f);
    fx_remove(CPU "/cpu1");
    machine_make();
}

/* Requests for each of 10,000 memory blocks cause a pass every 10 ms, and one after the last request. */
static void test_many_rescan_requests_make_few_passes(void)
{
    struct fx f = slow_sampler();
    uint64_t begun = dh_now_ns(), most, before = f.head->passes;

    for (int i = 0; i < 10000; i++)
        request_rescan(&f);
    fx_write("0-5\n", CPU "/present");
    request_rescan(&f);
    EVENTUALLY((fx_read(&f), f.head->cpu_present[0] == 0x3f));
    most = (dh_now_ns() - begun) / (DH_NS / 100) + 2;
    CHECK(f.head->passes - before <= most);
    fx_close(&f);
    machine_make();
}

static void test_invalid_options_are_refused(void)
{
    const struct dh_wake good = { .field = DH_POOL_NR, .mode = DH_WAKE_RISE, .threshold = 1, .window_ns = 1 };
    struct dh_wake wake;
    struct dh_options o;
    struct dh_sampler *s = NULL;
    int descriptors = fx_count("/proc/self/fd");

#define REFUSED(code, change)                                                                          \
    do {                                                                                               \
        check_row = #change;                                                                           \
        o = fx_options();                                                                              \
        wake = good;                                                                                   \
        change;                                                                                        \
        CHECK_INT(dh_sampler_open(&o, "/", "/", "/", &wake, 1, &s), code);                             \
    } while (0)
    REFUSED(DH_EABI, o.size--);
    REFUSED(DH_EABI, o.version++);
    REFUSED(-EINVAL, o.period_ns = DH_NS / 100 - 1);
    REFUSED(-EINVAL, o.period_ns = o.sweep_ns = o.resync_ns = 3600 * DH_NS + 1);
    REFUSED(-EINVAL, o.sweep_ns = o.period_ns - 1);
    REFUSED(-EINVAL, o.resync_ns = o.sweep_ns - 1);
    REFUSED(-EINVAL, o.group_max = 0);
    REFUSED(-EINVAL, o.group_max = 65537);
    REFUSED(-EINVAL, o.reserved = 1);
    REFUSED(-EINVAL, wake.field = DH_FIELD_NUM);
    REFUSED(-EINVAL, wake.mode = 0);
    REFUSED(-EINVAL, wake.mode = 3);
    REFUSED(-EINVAL, wake.threshold = 0);
    REFUSED(-EINVAL, wake.window_ns = 0);
    REFUSED(-EINVAL, wake.field = DH_CPU_ONLINE); /* a set cannot rise */
    REFUSED(-EINVAL, wake.field = DH_GROUP_SET);
#undef REFUSED
    check_row = "";
    o = fx_options();
    o.period_ns = o.sweep_ns = o.resync_ns = 3600 * DH_NS;
    o.group_max = 65536;
    CHECK_INT(dh_sampler_open(&o, "/", "/", "/", &good, 1, &s), 0);
    CHECK_INT(dh_sampler_stop(s, 0), 0); /* never started */
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

static void test_roots_longer_than_200_bytes_are_refused(void)
{
    struct dh_options o = fx_options();
    char most[201], more[202];
    struct dh_sampler *s;
    int descriptors = fx_count("/proc/self/fd");

    memset(most, 'r', 200);
    memset(more, 'r', 201);
    most[200] = more[201] = '\0';
    CHECK_INT(dh_sampler_open(&o, more, "/", "/", NULL, 0, &s), -ENAMETOOLONG);
    CHECK_INT(dh_sampler_open(&o, "/", more, "/", NULL, 0, &s), -ENAMETOOLONG);
    CHECK_INT(dh_sampler_open(&o, "/", "/", more, NULL, 0, &s), -ENAMETOOLONG);
    CHECK_INT(dh_sampler_open(&o, most, most, most, NULL, 0, &s), 0);
    CHECK_INT(dh_sampler_pass(s), 0);
    CHECK_INT(dh_sampler_stop(s, 0), 0);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

static void test_stop_closes_all_descriptors(void)
{
    int descriptors = fx_count("/proc/self/fd");
    struct fx f = running();

    CHECK_INT(fx_count("/proc/self/fd") - descriptors, (int)f.head->descriptors);
    fx_close(&f);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

int main(void)
{
    fx_begin();
    machine_make();
    test_existing_files_are_read();
    test_unchanged_pass_neither_wakes_nor_opens();
    test_each_pass_is_counted_in_one_bucket_of_its_source();
    test_duration_is_counted_below_the_next_bound();
    test_pool_sizes_are_read_each_pass_and_usage_each_second();
    test_changed_pool_size_reads_the_usage_of_all_pools();
    test_pool_without_pages_is_read_in_one_file();
    test_machine_pools_without_node_pools_are_read_each_pass();
    test_shrunk_pool_wakes();
    test_offline_cpu_stays_with_its_node();
    test_unreadable_file_is_neither_zero_nor_absent();
    test_file_never_seen_is_absent();
    test_unreadable_cpu_set_is_empty_and_invalid();
    test_empty_online_set_is_unreadable();
    test_absent_files_are_probed_every_ten_seconds();
    test_root_mounted_over_is_reopened();
    test_early_timer_does_not_skip_a_resync();
    test_kernel_without_numa_has_one_node();
    test_empty_sysfs_is_absent_until_mounted();
    test_unopenable_root_fails_its_sources();
    test_absent_files_are_absent_again_after_a_lack_of_descriptors();
    test_file_unreadable_from_the_start_is_not_absent();
    test_unreadable_cpulist_is_invalid();
    test_nodes_beyond_the_table_fail_the_source();
    test_page_sizes_beyond_the_table_fail_the_source();
    test_stop_closes_all_descriptors();
    test_throttle_count_is_the_growth_since_start();
    test_throttle_counter_restarts_with_its_cpu();
    test_missing_throttle_counter_fails_at_the_second_read();
    test_throttle_counts_are_published_per_cpu();
    test_cpu_with_a_lost_counter_reports_its_error();
    test_throttle_counts_without_the_online_set_are_unreadable();
    test_rescan_lists_nodes_and_pools_again();
    test_many_rescan_requests_make_few_passes();
    test_invalid_options_are_refused();
    test_roots_longer_than_200_bytes_are_refused();
    return check_done("test_sampler");
}

/* Tests of cgroup settings, read on demand: v1, v2 and both; files missing, cut, or being removed. */
#include <pthread.h>

#include "check.h"
#include "fixture.h"

#define POD "kubepods/burstable/pod1"
#define MIB (1024 * 1024)

static const uint64_t sizes_kib[] = { 2048, 1048576 };
static struct dh_knobs knobs;

static struct dh_knob_reader *reader(void)
{
    struct dh_knob_reader *r = NULL;

    fx_must(!dh_knobs_open(fx_root, sizes_kib, 2, &r), "dh_knobs_open");
    return r;
}

static void tree_end(void)
{
    fx_end();
    fx_must(!mkdir(fx_root, 0755), fx_root);
}

static int knobs_read(const struct dh_knob_reader *r, const char *path)
{
    knobs.size = sizeof(knobs);
    knobs.version = DH_VERSION;
    return dh_knobs_read(r, path, 1, &knobs);
}

static int knobs_read_once(const char *path)
{
    struct dh_knob_reader *r = reader();
    int code = knobs_read(r, path);

    dh_knobs_close(r);
    return code;
}

#define CHECK_KNOB(knob, want)                                                                         \
    do {                                                                                               \
        CHECK_INT((knob).err, 0);                                                                      \
        CHECK_U64((knob).value, want);                                                                 \
    } while (0)
#define CHECK_NO_KNOB(knob, want)                                                                      \
    do {                                                                                               \
        CHECK_INT((knob).err, want);                                                                   \
        CHECK_U64((knob).value, 0);                                                                    \
    } while (0)

static void v2_group(const char *path)
{
    fx_write("cpuset cpu io memory hugetlb pids\n", "%s/cgroup.controllers", path);
    fx_write("59\n", "%s/cpu.weight", path);
    fx_write("150000 100000\n", "%s/cpu.max", path);
    fx_write("usage_usec 7\nnr_periods 9\nnr_throttled 3\nthrottled_usec 1\n", "%s/cpu.stat", path);
    fx_write("536870912\n", "%s/memory.max", path);
    fx_write("\n", "%s/cpuset.cpus", path);
    fx_write("0-1,64\n", "%s/cpuset.cpus.effective", path);
    fx_write("67108864\n", "%s/hugetlb.2MB.max", path);
    fx_write("max\n", "%s/hugetlb.2MB.rsvd.max", path);
    fx_write("0\n", "%s/hugetlb.1GB.max", path);
    fx_write("9223372036854771712\n", "%s/hugetlb.1GB.rsvd.max", path);
}

static void v2_tree(void)
{
    fx_write("cpuset cpu memory hugetlb\n", "cgroup.controllers");
    v2_group(POD);
}

static void test_v2_settings_are_read(void)
{
    struct dh_knob_reader *r;

    v2_tree();
    r = reader();
    CHECK_INT(dh_knobs_version(r), 2);
    CHECK_INT(knobs_read(r, "/" POD), 0);
    CHECK_U64(knobs.attempts, 1);
    CHECK_INT(knobs.controllers_err, 0);
    CHECK_U64(knobs.controllers, DH_CG_CPU | DH_CG_MEMORY | DH_CG_HUGETLB | DH_CG_CPUSET);
    CHECK_KNOB(knobs.weight, 59);
    CHECK_KNOB(knobs.quota, 150000);
    CHECK_KNOB(knobs.period, 100000);
    CHECK_KNOB(knobs.throttled, 3);
    CHECK_KNOB(knobs.memory, 512 * MIB);
    CHECK_INT(knobs.cpus_err, 0);
    CHECK_U64(knobs.cpus[0], 0);
    CHECK_INT(knobs.effective_err, 0);
    CHECK_U64(knobs.effective[0], 3);
    CHECK_U64(knobs.effective[1], 1);
    CHECK_U64(knobs.sizes, 2);
    CHECK_U64(knobs.pages[0].size_kib, 2048);
    CHECK_KNOB(knobs.pages[0].max, 64 * MIB);
    CHECK_KNOB(knobs.pages[0].rsvd_max, UINT64_MAX);
    CHECK_KNOB(knobs.pages[1].max, 0);
    CHECK_KNOB(knobs.pages[1].rsvd_max, UINT64_MAX);
    CHECK_INT(knobs_read(r, "///" POD), 0);
    CHECK_INT(knobs_read(r, ""), 0);
    CHECK_NO_KNOB(knobs.weight, ENOENT); /* the root lacks it */
    dh_knobs_close(r);
    tree_end();
}

static void test_cpu_sets_are_read_on_request_only(void)
{
    struct dh_knob_reader *r;

    v2_tree();
    fx_remove(POD "/cpu.stat");
    r = reader();
    knobs.size = sizeof(knobs);
    knobs.version = DH_VERSION;
    CHECK_INT(dh_knobs_read(r, POD, 0, &knobs), 0);
    CHECK_NO_KNOB(knobs.throttled, ENOENT);
    CHECK_INT(knobs.cpus_err, ENOENT);
    CHECK_INT(knobs.effective_err, ENOENT);
    CHECK_KNOB(knobs.weight, 59);
    CHECK_KNOB(knobs.pages[0].max, 64 * MIB);
    CHECK_U64(knobs.controllers, DH_CG_CPU | DH_CG_MEMORY | DH_CG_HUGETLB);
    dh_knobs_close(r);
    tree_end();
}

static void test_v1_settings_are_read_in_their_hierarchy(void)
{
    struct dh_knob_reader *r;

    fx_write("1740\n", "cpu/" POD "/cpu.shares");
    fx_write("-1\n", "cpu/" POD "/cpu.cfs_quota_us");
    fx_write("100000\n", "cpu/" POD "/cpu.cfs_period_us");
    fx_write("nr_periods 0\nnr_throttled 0\nthrottled_time 0\n", "cpu/" POD "/cpu.stat");
    fx_write("9223372036854771712\n", "memory/" POD "/memory.limit_in_bytes");
    fx_write("0\n", "cpuset/" POD "/cpuset.cpus");
    fx_write("1\n", "cpuset/" POD "/cpuset.effective_cpus");
    fx_write("9223372036852678656\n", "hugetlb/" POD "/hugetlb.2MB.limit_in_bytes");
    fx_write("0\n", "hugetlb/" POD "/hugetlb.2MB.rsvd.limit_in_bytes");
    fx_dir("freezer/" POD);
    r = reader();
    CHECK_INT(dh_knobs_version(r), 1);
    CHECK_INT(knobs_read(r, POD), 0);
    CHECK_U64(knobs.controllers, DH_CG_CPU | DH_CG_MEMORY | DH_CG_HUGETLB | DH_CG_CPUSET);
    CHECK_INT(knobs.controllers_err, 0);
    CHECK_KNOB(knobs.weight, 1740);
    CHECK_KNOB(knobs.quota, UINT64_MAX);
    CHECK_KNOB(knobs.period, 100000);
    CHECK_KNOB(knobs.throttled, 0);
    CHECK_KNOB(knobs.memory, UINT64_MAX);
    CHECK_U64(knobs.cpus[0], 1);
    CHECK_U64(knobs.effective[0], 2);
    CHECK_KNOB(knobs.pages[0].max, UINT64_MAX);
    CHECK_KNOB(knobs.pages[0].rsvd_max, 0);
    CHECK_NO_KNOB(knobs.pages[1].max, ENOENT);
    dh_knobs_close(r);
    tree_end();
}

static void test_v2_next_to_v1_supplies_the_missing_settings(void)
{
    fx_write("2\n", "cpu/" POD "/cpu.shares");
    fx_dir("memory");
    fx_write("hugetlb\n", "unified/cgroup.controllers");
    v2_group("unified/" POD);
    CHECK_INT(knobs_read_once(POD), 0);
    CHECK_U64(knobs.controllers, DH_CG_CPU | DH_CG_HUGETLB | DH_CG_CPUSET);
    CHECK_KNOB(knobs.weight, 2);
    CHECK_NO_KNOB(knobs.memory, ENOENT); /* v1 has memory, but not this cgroup */
    CHECK_KNOB(knobs.pages[0].max, 64 * MIB);
    tree_end();
}

static void test_missing_file_is_absent_and_others_are_read(void)
{
    v2_tree();
    fx_remove(POD "/cpu.max");
    fx_remove(POD "/hugetlb.2MB.rsvd.max");
    fx_remove(POD "/cpuset.cpus.effective");
    fx_write("usage_usec 7\n", POD "/cpu.stat");
    fx_write("memory\n", POD "/cgroup.controllers");
    CHECK_INT(knobs_read_once(POD), 0);
    CHECK_U64(knobs.attempts, 1);
    CHECK_U64(knobs.controllers, DH_CG_MEMORY);
    CHECK_NO_KNOB(knobs.quota, ENOENT);
    CHECK_NO_KNOB(knobs.period, ENOENT);
    CHECK_NO_KNOB(knobs.throttled, ENOENT);
    CHECK_NO_KNOB(knobs.pages[0].rsvd_max, ENOENT);
    CHECK_INT(knobs.effective_err, ENOENT);
    CHECK_KNOB(knobs.weight, 59);
    fx_remove(POD "/cgroup.controllers");
    CHECK_INT(knobs_read_once(POD), 0);
    CHECK_INT(knobs.controllers_err, ENOENT);
    v2_group(POD);
    fx_remove(POD "/cgroup.controllers");
    CHECK_INT(knobs_read_once(POD), 0);
    CHECK_INT(knobs.controllers_err, 0); /* no file is missing, so the list is not read */
    tree_end();
}

static void test_malformed_text_is_an_error(void)
{
    static char fills[24576 + 1];
    static const struct {
        const char *file, *text;
    } rows[] = {
        { "cpu.weight", "" }, { "cpu.weight", "-1\n" }, { "cpu.weight", "59 60\n" },
        { "cpu.max", "150000\n" }, { "cpu.max", "150000 1000" }, { "cpu.max", "max max\n" },
        { "cpu.max", "-1 100000\n" }, { "cpu.max", "" }, { "cpu.max", "max  100000\n" },
        { "memory.max", "18446744073709551616\n" }, { "memory.max", "\xff\xfe\n" },
        { "cpu.stat", "nr_throttled 3" }, { "cpu.stat", "nr_throttled -3\n" },
        { "cpuset.cpus", "1-0\n" }, { "cpuset.cpus", "8192\n" }, { "hugetlb.2MB.max", "64M\n" },
    };

    v2_tree();
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        check_row = rows[i].text;
        v2_group(POD);
        fx_write(rows[i].text, POD "/%s", rows[i].file);
        CHECK_INT(knobs_read_once(POD), 0);
        CHECK_INT((knobs.weight.err != 0) + (knobs.quota.err != 0) + (knobs.memory.err != 0) +
                  (knobs.throttled.err != 0) + (knobs.cpus_err != 0) + (knobs.pages[0].max.err != 0), 1);
        CHECK_INT(knobs.quota.err, knobs.period.err);
        CHECK_INT(knobs.weight.err + knobs.quota.err + knobs.memory.err + knobs.throttled.err +
                  knobs.cpus_err + knobs.pages[0].max.err, DH_EPARSE);
    }
    check_row = "";
    v2_group(POD);
    memset(fills, '1', sizeof(fills) - 1);
    fx_write(fills, POD "/cpuset.cpus"); /* a cut text could be another list */
    CHECK_INT(knobs_read_once(POD), 0);
    CHECK_INT(knobs.cpus_err, EFBIG);
    CHECK_U64(knobs.cpus[0], 0);
    tree_end();
}

static void test_unreadable_file_has_its_errno(void)
{
    v2_tree();
    fx_remove(POD "/memory.max");
    fx_dir(POD "/memory.max");
    fx_remove(POD "/cpu.weight");
    fx_symlink("cpu.weight", POD "/cpu.weight");
    CHECK_INT(knobs_read_once(POD), 0);
    CHECK_NO_KNOB(knobs.memory, EISDIR);
    CHECK_NO_KNOB(knobs.weight, ELOOP);
    tree_end();
}

static void test_unopenable_directory_is_not_absent(void)
{
    fx_write("2\n", "cpu/" POD "/cpu.shares");
    fx_dir("memory/kubepods/burstable");
    fx_symlink("pod1", "memory/" POD);
    CHECK_INT(knobs_read_once(POD), 0);
    CHECK_NO_KNOB(knobs.memory, ELOOP);
    fx_remove("cpu");
    CHECK_INT(knobs_read_once(POD), -ELOOP);
    tree_end();
}

static void test_missing_cgroup_is_tried_twice(void)
{
    struct dh_knob_reader *r;

    v2_tree();
    r = reader();
    CHECK_INT(knobs_read(r, POD "/c1"), -ENOENT);
    CHECK_U64(knobs.attempts, 2);
    CHECK_INT(knobs_read(r, POD "/cpu.max"), -ENOENT); /* this is a file */
    CHECK_INT(knobs_read(r, POD), 0);
    dh_knobs_close(r);
    tree_end();
}

/* ---- removal during the read: the reader blocks in a FIFO in place of cpu.weight ---- */

static bool comes_back;

static void *remover(void *unused)
{
    char path[FX_PATH];
    int fd;

    (void)unused;
    snprintf(path, sizeof(path), "%s/%s/cpu.weight", fx_root, POD);
    fd = open(path, O_WRONLY | O_CLOEXEC); /* succeeds when the reader has opened it */
    fx_must(fd >= 0, path);
    fx_remove(POD);
    if (comes_back)
        v2_group(POD);
    close(fd);
    return NULL;
}

static int knobs_read_while_removed(bool back)
{
    pthread_t thread;
    int code;

    comes_back = back;
    v2_tree();
    fx_remove(POD "/cpu.weight");
    fx_fifo(POD "/cpu.weight");
    fx_must(!pthread_create(&thread, NULL, remover, NULL), "pthread_create");
    code = knobs_read_once(POD);
    pthread_join(thread, NULL);
    tree_end();
    return code;
}

static void test_cgroup_removed_during_the_read_is_gone(void)
{
    CHECK_INT(knobs_read_while_removed(false), -ENOENT);
    CHECK_U64(knobs.attempts, 2);
}

static void test_read_never_mixes_a_cgroup_with_its_successor(void)
{
    /* The open directory is the old one; that the path leads to a new one does not make it valid. */
    CHECK_INT(knobs_read_while_removed(true), 0);
    CHECK_U64(knobs.attempts, 2);
    CHECK_KNOB(knobs.weight, 59);
    CHECK_KNOB(knobs.memory, 512 * MIB);
}

/* ---- the reader ---- */

static void test_reader_needs_a_hierarchy_and_valid_sizes(void)
{
    const uint64_t many[DH_HP_MAX + 1] = { 0 };
    struct dh_knob_reader *r = NULL;
    int descriptors = fx_count("/proc/self/fd");

    fx_dir("nothing");
    CHECK_INT(dh_knobs_open(fx_root, sizes_kib, 2, &r), -ENOENT);
    CHECK_INT(dh_knobs_open("/nonexistent", sizes_kib, 2, &r), -ENOENT);
    fx_symlink("loop", "loop");
    CHECK_INT(dh_knobs_open("/dev/null", sizes_kib, 2, &r), -ENOTDIR);
    v2_tree();
    CHECK_INT(dh_knobs_open(fx_root, many, DH_HP_MAX + 1, &r), -EINVAL);
    CHECK(r == NULL);
    r = reader();
    knobs.size = sizeof(knobs) - 8;
    knobs.version = DH_VERSION;
    CHECK_INT(dh_knobs_read(r, POD, 1, &knobs), DH_EABI);
    knobs.size = sizeof(knobs);
    knobs.version = DH_VERSION + 1;
    CHECK_INT(dh_knobs_read(r, POD, 1, &knobs), DH_EABI);
    CHECK_INT(knobs_read(r, POD), 0);
    dh_knobs_close(r);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    tree_end();
}

int main(void)
{
    fx_begin();
    test_v2_settings_are_read();
    test_cpu_sets_are_read_on_request_only();
    test_v1_settings_are_read_in_their_hierarchy();
    test_v2_next_to_v1_supplies_the_missing_settings();
    test_missing_file_is_absent_and_others_are_read();
    test_malformed_text_is_an_error();
    test_unreadable_file_has_its_errno();
    test_unopenable_directory_is_not_absent();
    test_missing_cgroup_is_tried_twice();
    test_cgroup_removed_during_the_read_is_gone();
    test_read_never_mixes_a_cgroup_with_its_successor();
    test_reader_needs_a_hierarchy_and_valid_sizes();
    return check_done("test_knobs");
}

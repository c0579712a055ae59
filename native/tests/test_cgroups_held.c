/*
 * Tests of descriptors that stay open between two reads of a group's file: which files have one, how many there
 * are, and what happens to them when a file changes, fails or vanishes.
 */
#include "check.h"
#include "fixture.h"

#define UID "0000000%d-2222-3333-4444-555555555555"
#define POD "kubepods/burstable/pod" UID
#define PODS 8

static void stat_write(int pod, int throttled)
{
    char text[96];

    snprintf(text, sizeof(text), "nr_periods %d\nnr_throttled %d\n", 10 * throttled, throttled);
    fx_write(text, "cg/" POD "/cpu.stat", pod);
}

static void pod_make(int pod)
{
    fx_write("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "cg/" POD "/memory.events", pod);
    fx_write("max\n", "cg/" POD "/memory.max", pod);
    stat_write(pod, 0);
}

static struct fx running(uint32_t held)
{
    static const struct dh_wake wake = { DH_GROUP_MEM_MAX, DH_WAKE_CHANGE, 0, 0 };
    struct dh_options o = fx_options();
    struct fx f;

    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("cpu memory\n", "cg/cgroup.controllers");
    for (int pod = 0; pod < PODS; pod++)
        pod_make(pod);
    o.held_bytes = held * dh_open_file_bytes();
    f = fx_open(&o, "/", &wake, 1);
    fx_pass(&f);
    return f;
}

static void done(struct fx *f)
{
    fx_close(f);
    fx_remove("cg");
}

static const struct dh_group *group(struct fx *f, int pod)
{
    char uid[DH_UID_LEN];

    fx_read(f);
    snprintf(uid, sizeof(uid), UID, pod);
    return fx_group(f, uid, "");
}

static uint32_t slot_of(struct fx *f, int pod)
{
    return (uint32_t)(group(f, pod) - fx_groups(f));
}

static uint32_t file_of(const struct fx *f, const char *name)
{
    uint32_t file = 0;

    while (strcmp(f->s->cgroups->file[file].name, name))
        file++;
    return file;
}

static bool is_held(struct fx *f, int pod, const char *name)
{
    return dh_cg_held_find(f->s->cgroups, slot_of(f, pod), file_of(f, name)) != NULL;
}

static uint32_t held(const struct fx *f)
{
    return f->s->cgroups->held_num;
}

/* Sweep all pods. Return: the number of files and directories that were opened. */
static uint64_t sweep(struct fx *f)
{
    uint64_t before = f->s->opens;

    dh_sampler_sweep(f->s);
    fx_read(f);
    return f->s->opens - before;
}

/* Let a pod's counters be unchanged for so long that only whole sweeps read them, or changed just now. */
static void set_active(struct fx *f, int pod, bool active)
{
    struct dh_cg_group *p = &f->s->cgroups->group[slot_of(f, pod)];

    p->active = p->was_active = active ? ~0ull : 0;
}

static void test_held_files_are_read_without_opens(void)
{
    struct fx f = running(PODS);
    uint64_t reads;

    CHECK_U64(sweep(&f), PODS);
    CHECK_INT(held(&f), PODS);
    reads = f.s->reads;
    CHECK_U64(sweep(&f), 0);
    CHECK_U64(f.s->reads - reads, PODS);
    for (int pod = 0; pod < PODS; pod++)
        stat_write(pod, pod + 1);
    CHECK_U64(sweep(&f), 0);
    for (int pod = 0; pod < PODS; pod++)
        CHECK_U64(group(&f, pod)->cpu_throttled, (uint64_t)pod + 1);
    done(&f);
}

static void test_held_memory_limits_the_descriptors(void)
{
    struct fx f = running(3);
    uint64_t bytes = f.head->kernel_bytes, descriptors = f.head->descriptors;
    int open_now = fx_count("/proc/self/fd");

    for (int i = 0; i < 3; i++) {
        sweep(&f);
        CHECK_INT(held(&f), 3);
        CHECK_INT(fx_count("/proc/self/fd"), open_now + 3);
        CHECK_U64(f.head->descriptors, descriptors + 3);
        CHECK_U64(f.head->kernel_bytes, bytes + 3 * dh_open_file_bytes());
    }
    CHECK_U64(sweep(&f), PODS - 3);
    for (int pod = 0; pod < PODS; pod++)
        stat_write(pod, 7);
    sweep(&f);
    for (int pod = 0; pod < PODS; pod++)
        CHECK_U64(group(&f, pod)->cpu_throttled, 7);
    done(&f);
}

static void test_no_memory_for_descriptors_holds_none(void)
{
    struct fx f = running(0);
    int open_now = fx_count("/proc/self/fd");

    CHECK_U64(sweep(&f), PODS);
    CHECK_U64(sweep(&f), PODS);
    CHECK_INT(fx_count("/proc/self/fd"), open_now);
    done(&f);
}

static void test_low_descriptor_limit_holds_fewer(void)
{
    static const struct { rlim_t limit; uint32_t held; } rows[] = {
        { 2 * (DH_CG_OTHER_FDS + 3), 3 }, { 2 * DH_CG_OTHER_FDS, 0 }, { 64, 0 },
    };
    struct rlimit before, low;

    fx_must(!getrlimit(RLIMIT_NOFILE, &before), "getrlimit");
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct fx f;

        low = before;
        low.rlim_cur = rows[i].limit;
        fx_must(!setrlimit(RLIMIT_NOFILE, &low), "setrlimit");
        f = running(PODS);
        sweep(&f);
        CHECK_INT(held(&f), rows[i].held);
        fx_must(!setrlimit(RLIMIT_NOFILE, &before), "setrlimit");
        done(&f);
    }
}

static void test_changing_file_takes_the_descriptor_of_an_unchanged_one(void)
{
    struct fx f = running(2);

    for (int pod = 0; pod < PODS; pod++)
        set_active(&f, pod, false);
    sweep(&f);
    CHECK_INT(held(&f), 2);
    for (int pod = 0; pod < PODS; pod++)
        set_active(&f, pod, pod == 3 || pod == 6);
    sweep(&f);
    CHECK_INT(held(&f), 2);
    for (int pod = 0; pod < PODS; pod++)
        CHECK(is_held(&f, pod, "cpu.stat") == (pod == 3 || pod == 6));
    CHECK_U64(sweep(&f), PODS - 2); /* the unchanged ones take none back */
    CHECK(is_held(&f, 3, "cpu.stat") && is_held(&f, 6, "cpu.stat"));
    done(&f);
}

static void test_files_of_equal_rank_never_replace_each_other(void)
{
    for (int changing = 0; changing < 2; changing++) {
        struct fx f = running(3);
        bool first[PODS];

        for (int i = 0; i < 10; i++) {
            for (int pod = 0; pod < PODS; pod++) {
                set_active(&f, pod, changing);
                stat_write(pod, changing * i);
            }
            CHECK_U64(sweep(&f), i ? PODS - 3 : PODS);
            for (int pod = 0; pod < PODS; pod++) {
                first[pod] = i ? first[pod] : is_held(&f, pod, "cpu.stat");
                CHECK(is_held(&f, pod, "cpu.stat") == first[pod]);
            }
        }
        done(&f);
    }
}

static void test_removed_group_closes_its_descriptors_at_once(void)
{
    struct fx f = running(PODS);
    int open_now = fx_count("/proc/self/fd");

    sweep(&f);
    fx_remove("cg/" POD, 2);
    fx_events(&f);
    CHECK_INT(held(&f), PODS - 1);
    CHECK_INT(fx_count("/proc/self/fd"), open_now + PODS - 1);
    fx_remove("cg/kubepods");
    fx_events(&f);
    CHECK_INT(held(&f), 0);
    CHECK_INT(fx_count("/proc/self/fd"), open_now);
    for (int pod = 0; pod < PODS; pod++)
        pod_make(pod);
    fx_events(&f);
    fx_resync(&f);
    sweep(&f);
    CHECK_INT(held(&f), PODS); /* the entries are used again */
    CHECK_INT(f.s->cgroups->held_used, PODS);
    done(&f);
}

/* The group was removed and created again, and its events were not read yet. */
static void test_failed_descriptor_is_replaced_by_the_file_of_its_name(void)
{
    struct fx f = running(PODS);

    sweep(&f);
    fx_remove("cg/" POD, 2);
    pod_make(2);
    stat_write(2, 5);
    fx_fail_removed(&f);
    CHECK_U64(sweep(&f), 1);
    CHECK_U64(group(&f, 2)->cpu_throttled, 5);
    CHECK_INT(held(&f), PODS);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
    CHECK_U64(f.head->source[DH_SOURCE_CGROUPS].failures, 0);
    CHECK_U64(sweep(&f), 0);
    done(&f);
}

/* Files that are not removed with their group: another controller set is enabled. */
static void test_resync_opens_files_whose_descriptors_fail(void)
{
    struct fx f = running(PODS);

    sweep(&f);
    fx_remove("cg/" POD "/cpu.stat", 2);
    stat_write(2, 5);
    fx_fail_removed(&f);
    fx_resync(&f);
    CHECK_U64(group(&f, 2)->cpu_throttled, 5);
    CHECK_INT(held(&f), PODS);
    CHECK_U64(sweep(&f), 0);
    done(&f);
}

/* Equal text is not parsed again, but text that is equal to the one before a failure is. */
static void test_text_after_a_failure_is_parsed_although_it_is_equal(void)
{
    struct fx f = running(PODS);

    stat_write(0, 3);
    sweep(&f);
    sweep(&f);
    sweep(&f);
    fx_write("?\n", "cg/" POD "/cpu.stat", 0);
    CHECK_U64(sweep(&f), 0);
    CHECK(!HAS(group(&f, 0)->valid, DH_GROUP_CPU_THROTTLED));
    sweep(&f);
    CHECK_U64(f.head->source[DH_SOURCE_CGROUPS].failures, 2);
    stat_write(0, 3);
    sweep(&f);
    CHECK(HAS(group(&f, 0)->valid, DH_GROUP_CPU_THROTTLED));
    CHECK_U64(group(&f, 0)->cpu_throttled, 3);
    done(&f);
}

/* A pod at its memory limit causes an event every 10 ms. */
static void test_file_of_many_events_is_held(void)
{
    struct fx f = running(PODS);
    uint64_t opens;
    char text[64];

    for (int i = 1; i < 10; i++) {
        snprintf(text, sizeof(text), "low 0\nhigh 0\nmax %d\noom 0\noom_kill 0\n", i);
        opens = f.s->opens;
        fx_write(text, "cg/" POD "/memory.events", 1);
        fx_events(&f);
        CHECK_U64(group(&f, 1)->mem_max, (uint64_t)i);
        CHECK_U64(f.s->opens - opens, i == 1 ? 2 : 1); /* and the limit, which is evidence */
    }
    CHECK(is_held(&f, 1, "memory.events"));
    CHECK(!is_held(&f, 1, "memory.max"));
    fx_resync(&f);
    CHECK(!is_held(&f, 1, "memory.events")); /* until the next event */
    done(&f);
}

/* The bare system calls are those of the sweep: pread for what is held, openat for the rest. */
static void test_lower_bound_reads_held_files_through_their_descriptors(void)
{
    struct fx f = running(3);
    uint64_t opens;

    sweep(&f);
    CHECK_INT(dh_sampler_lower_bound(f.s, DH_BARE_SWEEP) - dh_sampler_lower_bound(f.s, DH_BARE_PASS), PODS);
    opens = f.s->opens;
    dh_sampler_lower_bound(f.s, DH_BARE_SWEEP);
    CHECK_U64(f.s->opens - opens, PODS - 3);
    opens = f.s->opens;
    dh_sampler_lower_bound(f.s, DH_BARE_OPENS);
    CHECK_U64(f.s->opens - opens, PODS);
    CHECK_INT(dh_sampler_lower_bound(f.s, DH_BARE_NUM), -EINVAL);
    done(&f);
}

int main(void)
{
    fx_begin();
    test_held_files_are_read_without_opens();
    test_held_memory_limits_the_descriptors();
    test_no_memory_for_descriptors_holds_none();
    test_low_descriptor_limit_holds_fewer();
    test_changing_file_takes_the_descriptor_of_an_unchanged_one();
    test_files_of_equal_rank_never_replace_each_other();
    test_removed_group_closes_its_descriptors_at_once();
    test_failed_descriptor_is_replaced_by_the_file_of_its_name();
    test_resync_opens_files_whose_descriptors_fail();
    test_text_after_a_failure_is_parsed_although_it_is_equal();
    test_file_of_many_events_is_held();
    test_lower_bound_reads_held_files_through_their_descriptors();
    return check_done("test_cgroups_held");
}

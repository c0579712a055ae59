/*
 * Tests of counters that do not change: read in one sweep of six, and in every sweep after a change, after a
 * notification about their pod, and while a notification is missing.
 *
 * Ten passes are a sweep here, and a pass stands for a second. No clock is involved: the tests count reads.
 */
#include "check.h"
#include "fixture.h"

#define PODS 6 /* one for each phase of a pod's whole sweep */
#define UID "0000000%d-2222-3333-4444-555555555555"
#define POD "kubepods/burstable/pod" UID
#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define SWEEP 10            /* passes */
#define MINUTE (6 * SWEEP)  /* in this time each file is read at least once */
#define UNCHANGED_LIMIT (2 * MINUTE)   /* after this time an unchanged file is read at most once per MINUTE */

static void stat_write(int pod, int throttled)
{
    char text[96];

    snprintf(text, sizeof(text), "nr_periods %d\nnr_throttled %d\n", 10 * throttled, throttled);
    fx_write(text, "cg/" POD "/cpu.stat", pod);
}

static void machine_make(int pods)
{
    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("cpu memory\n", "cg/cgroup.controllers");
    for (int pod = 0; pod < pods; pod++) {
        fx_write("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "cg/" POD "/memory.events", pod);
        stat_write(pod, 0);
    }
}

static struct fx running_with(uint64_t resync_ns)
{
    struct dh_options o = fx_options();
    struct fx f;

    o.resync_ns = resync_ns;
    f = fx_open(&o, "/", NULL, 0);
    fx_pass(&f);
    return f;
}

static struct fx running(void)
{
    return running_with(100000 * DH_NS);
}

static void done(struct fx *f)
{
    fx_close(f);
    fx_remove("cg");
}

static const struct dh_group *group(const struct fx *f, int pod, const char *container)
{
    char uid[DH_UID_LEN];

    snprintf(uid, sizeof(uid), UID, pod);
    return fx_group(f, uid, container);
}

static uint64_t throttled(const struct fx *f, int pod)
{
    return group(f, pod, "")->cpu_throttled;
}

/* Run @number passes. Return: the reads of group files. */
static uint64_t passes(struct fx *f, int number)
{
    uint64_t before = f->s->reads;

    for (int i = 0; i < number; i++)
        fx_pass(f);
    return f->s->reads - before - (uint64_t)number * (uint64_t)dh_sampler_lower_bound(f->s, 0);
}

static void test_unchanged_file_is_read_in_one_sweep_of_six(void)
{
    struct fx f;

    machine_make(PODS);
    f = running();
    CHECK_U64(passes(&f, MINUTE), 6 * PODS); /* new files: read in every sweep */
    passes(&f, UNCHANGED_LIMIT - MINUTE);
    for (int i = 0; i < 3 * 6; i++)
        CHECK_U64(passes(&f, SWEEP), PODS / 6); /* not all in the same sweep */
    done(&f);
}

static void test_changed_file_is_found_in_six_sweeps_then_read_in_each(void)
{
    struct fx f;

    machine_make(PODS);
    f = running();
    passes(&f, UNCHANGED_LIMIT + 3 * MINUTE);
    for (int pod = 0; pod < PODS; pod++)
        stat_write(pod, 1);
    passes(&f, MINUTE);
    for (int grown = 2; grown < 20; grown++) {
        for (int pod = 0; pod < PODS; pod++) {
            CHECK_U64(throttled(&f, pod), (uint64_t)grown - 1);
            stat_write(pod, grown);
        }
        CHECK_U64(passes(&f, SWEEP), PODS);
    }
    CHECK_U64(passes(&f, SWEEP), PODS); /* it may change again */
    passes(&f, UNCHANGED_LIMIT);
    CHECK_U64(passes(&f, MINUTE), PODS); /* it did not change */
    done(&f);
}

/* A resync between two whole sweeps reads everything: that must not make later reads rarer. */
static void test_changed_file_stays_active_for_six_sweeps_across_resyncs(void)
{
    static const int still[] = { 5, 5, 0 }; /* with one change each: 13 sweeps, so changes fall into every
                                               phase */
    struct fx f;

    machine_make(1);
    f = running_with(7 * SWEEP * DH_NS);
    for (int move = 1; move < 3 * 6 * 7; move++) {
        stat_write(0, move);
        passes(&f, SWEEP);
        CHECK_U64(throttled(&f, 0), (uint64_t)move);
        passes(&f, still[move % 3] * SWEEP);
    }
    done(&f);
}

static void test_pod_notification_makes_its_groups_active(void)
{
    struct fx f;

    machine_make(2);
    fx_write("nr_periods 0\nnr_throttled 0\n", "cg/" POD "/" ID "/cpu.stat", 1);
    f = running();
    passes(&f, UNCHANGED_LIMIT);
    CHECK_U64(passes(&f, MINUTE), 3);
    fx_write("low 0\nhigh 0\nmax 1\noom 0\noom_kill 0\n", "cg/" POD "/memory.events", 1);
    fx_events(&f);
    fx_write("nr_periods 9\nnr_throttled 9\n", "cg/" POD "/" ID "/cpu.stat", 1);
    passes(&f, SWEEP);
    CHECK_U64(group(&f, 1, ID)->cpu_throttled, 9);
    CHECK(passes(&f, MINUTE - SWEEP) >= 2 * 5); /* the pod and its container in each sweep; not the other pod */
    CHECK(passes(&f, MINUTE) <= 2 * 6 + 1);
    done(&f);
}

static void test_group_recreated_under_its_name_starts_inactive(void)
{
    struct fx f;

    machine_make(1);
    f = running();
    passes(&f, UNCHANGED_LIMIT);
    fx_remove("cg/" POD, 0);
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 0);
    machine_make(1);
    fx_events(&f);
    for (int grown = 1; grown < 6; grown++) {
        stat_write(0, grown);
        passes(&f, SWEEP);
        CHECK_U64(throttled(&f, 0), (uint64_t)grown);
    }
    done(&f);
}

static void test_unreadable_file_is_retried_in_every_sweep(void)
{
    struct fx f;

    machine_make(1);
    f = running();
    fx_write("?\n", "cg/" POD "/cpu.stat", 0);
    passes(&f, UNCHANGED_LIMIT);
    CHECK(!HAS(group(&f, 0, "")->valid, DH_GROUP_CPU_THROTTLED));
    CHECK_U64(passes(&f, MINUTE), 6);
    stat_write(0, 3);
    passes(&f, SWEEP);
    CHECK_U64(throttled(&f, 0), 3);
    done(&f);
}

/* A read may fall between the removal of a group's files and of its directory: the next read decides. */
static void test_missing_file_is_checked_in_the_next_sweep(void)
{
    struct fx f;

    machine_make(1);
    f = running();
    passes(&f, UNCHANGED_LIMIT);
    fx_remove("cg/" POD "/cpu.stat", 0);
    fx_fail_removed(&f);
    passes(&f, MINUTE + SWEEP);
    CHECK(HAS(group(&f, 0, "")->seen & ~group(&f, 0, "")->valid, DH_GROUP_CPU_THROTTLED));
    stat_write(0, 3);
    passes(&f, SWEEP);
    CHECK_U64(throttled(&f, 0), 3);
    done(&f);
}

/* v1 with two pods: the kernel notifies about the OOM of one, and cannot for the other. */
static void test_file_without_its_watch_is_read_in_every_sweep(void)
{
    struct fx f;

    fx_write("0-1\n", "sys/devices/system/cpu/online");
    for (int pod = 0; pod < 2; pod++)
        fx_write("under_oom 0\noom_kill 0\n", "cg/memory/" POD "/memory.oom_control", pod);
    fx_write("", "cg/memory/" POD "/cgroup.event_control", 0);
    f = running();
    CHECK_U64(f.head->unwatched, 1);
    passes(&f, UNCHANGED_LIMIT);
    CHECK_U64(passes(&f, MINUTE), 1 + 6);
    for (int pod = 0; pod < 2; pod++)
        fx_write("under_oom 0\noom_kill 1\n", "cg/memory/" POD "/memory.oom_control", pod);
    passes(&f, SWEEP);
    CHECK_U64(group(&f, 1, "")->mem_oom_kill, 1);
    passes(&f, MINUTE - SWEEP);
    CHECK_U64(group(&f, 0, "")->mem_oom_kill, 1);
    done(&f);
}

int main(void)
{
    fx_begin();
    test_unchanged_file_is_read_in_one_sweep_of_six();
    test_changed_file_is_found_in_six_sweeps_then_read_in_each();
    test_changed_file_stays_active_for_six_sweeps_across_resyncs();
    test_pod_notification_makes_its_groups_active();
    test_group_recreated_under_its_name_starts_inactive();
    test_unreadable_file_is_retried_in_every_sweep();
    test_missing_file_is_checked_in_the_next_sweep();
    test_file_without_its_watch_is_read_in_every_sweep();
    return check_done("test_cgroups_unchanged");
}

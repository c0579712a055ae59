/*
 * Counters that stand still: read in one sweep of six, and in each again when they grew, when the kernel told
 * of their pod, and while they stand in for what the kernel would not tell.
 *
 * Ten passes are a sweep here, and each is a second. So there is no clock in it: what is done is counted.
 */
#include "check.h"
#include "fixture.h"

#define PODS 6 /* one for each turn that a pod's whole sweep may have */
#define UID "0000000%d-2222-3333-4444-555555555555"
#define POD "kubepods/burstable/pod" UID
#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define SWEEP 10            /* passes */
#define MINUTE (6 * SWEEP)  /* in which each file is read once at least */
#define CALM (2 * MINUTE)   /* after which one that did not change is read once at most */

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

/* So many passes; returns the reads of files of groups in them. */
static uint64_t passes(struct fx *f, int number)
{
    uint64_t before = f->s->reads;

    for (int i = 0; i < number; i++)
        fx_pass(f);
    return f->s->reads - before - (uint64_t)number * (uint64_t)dh_sampler_floor(f->s, 0);
}

static void what_stands_still_is_read_in_one_sweep_of_six(void)
{
    struct fx f;

    machine_make(PODS);
    f = running();
    CHECK_U64(passes(&f, MINUTE), 6 * PODS); /* new: each in every sweep */
    passes(&f, CALM - MINUTE);
    for (int i = 0; i < 3 * 6; i++)
        CHECK_U64(passes(&f, SWEEP), PODS / 6); /* not all in the same */
    done(&f);
}

static void what_grows_after_a_long_time_is_seen_within_six_sweeps_and_then_in_each(void)
{
    struct fx f;

    machine_make(PODS);
    f = running();
    passes(&f, CALM + 3 * MINUTE);
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
    CHECK_U64(passes(&f, SWEEP), PODS); /* it may go on */
    passes(&f, CALM);
    CHECK_U64(passes(&f, MINUTE), PODS); /* it did not */
    done(&f);
}

/* A resync reads everything, and may come between two whole sweeps: that is no reason to read less later. */
static void what_moved_is_swept_six_times_more_wherever_resyncs_lie(void)
{
    static const int still[] = { 5, 5, 0 }; /* and a move each: 13 sweeps, so moves lie everywhere */
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

static void what_the_kernel_tells_of_a_pod_makes_its_groups_restless(void)
{
    struct fx f;

    machine_make(2);
    fx_write("nr_periods 0\nnr_throttled 0\n", "cg/" POD "/" ID "/cpu.stat", 1);
    f = running();
    passes(&f, CALM);
    CHECK_U64(passes(&f, MINUTE), 3);
    fx_write("low 0\nhigh 0\nmax 1\noom 0\noom_kill 0\n", "cg/" POD "/memory.events", 1);
    fx_events(&f);
    fx_write("nr_periods 9\nnr_throttled 9\n", "cg/" POD "/" ID "/cpu.stat", 1);
    passes(&f, SWEEP);
    CHECK_U64(group(&f, 1, ID)->cpu_throttled, 9);
    CHECK(passes(&f, MINUTE - SWEEP) >= 2 * 5); /* the pod and its container, in each; not the other pod */
    CHECK(passes(&f, MINUTE) <= 2 * 6 + 1);
    done(&f);
}

static void a_group_of_the_same_name_begins_anew(void)
{
    struct fx f;

    machine_make(1);
    f = running();
    passes(&f, CALM);
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

static void what_cannot_be_read_is_tried_in_every_sweep(void)
{
    struct fx f;

    machine_make(1);
    f = running();
    fx_write("?\n", "cg/" POD "/cpu.stat", 0);
    passes(&f, CALM);
    CHECK(!HAS(group(&f, 0, "")->valid, DH_GROUP_CPU_THROTTLED));
    CHECK_U64(passes(&f, MINUTE), 6);
    stat_write(0, 3);
    passes(&f, SWEEP);
    CHECK_U64(throttled(&f, 0), 3);
    done(&f);
}

/* One look may come between the kernel's removing a group's files and its directory: the next one decides. */
static void a_file_that_is_gone_is_looked_for_again_in_the_next_sweep(void)
{
    struct fx f;

    machine_make(1);
    f = running();
    passes(&f, CALM);
    fx_remove("cg/" POD "/cpu.stat", 0);
    passes(&f, MINUTE + SWEEP);
    CHECK(HAS(group(&f, 0, "")->seen & ~group(&f, 0, "")->valid, DH_GROUP_CPU_THROTTLED));
    stat_write(0, 3);
    passes(&f, SWEEP);
    CHECK_U64(throttled(&f, 0), 3);
    done(&f);
}

/* v1, two pods: of one the kernel tells when it runs out of memory, of the other it cannot. */
static void what_stands_in_for_an_event_is_read_in_every_sweep(void)
{
    struct fx f;

    fx_write("0-1\n", "sys/devices/system/cpu/online");
    for (int pod = 0; pod < 2; pod++)
        fx_write("under_oom 0\noom_kill 0\n", "cg/memory/" POD "/memory.oom_control", pod);
    fx_write("", "cg/memory/" POD "/cgroup.event_control", 0);
    f = running();
    CHECK_U64(f.head->unwatched, 1);
    passes(&f, CALM);
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
    what_stands_still_is_read_in_one_sweep_of_six();
    what_grows_after_a_long_time_is_seen_within_six_sweeps_and_then_in_each();
    what_moved_is_swept_six_times_more_wherever_resyncs_lie();
    what_the_kernel_tells_of_a_pod_makes_its_groups_restless();
    a_group_of_the_same_name_begins_anew();
    what_cannot_be_read_is_tried_in_every_sweep();
    a_file_that_is_gone_is_looked_for_again_in_the_next_sweep();
    what_stands_in_for_an_event_is_read_in_every_sweep();
    return check_done("test_cgroups_still");
}

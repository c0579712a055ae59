/*
 * Tests of cgroup v1 only: hierarchies of the freezer and of cpusets, and the eventfd that reports a pod out
 * of memory. The eventfds are the kernel's own; the test writes to them in the kernel's place.
 */
#include <sys/timerfd.h>

#include "check.h"
#include "fixture.h"

#define UID "11111111-2222-3333-4444-555555555555"
#define UID_2 "22222222-2222-3333-4444-555555555555"
#define OTHER "22222222-2222-3333-4444-555555555555"
#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define POD "kubepods/burstable/pod" UID
#define POD_2 "kubepods/burstable/pod" UID_2
#define MM "sys/kernel/mm/hugepages/hugepages-2048kB"
#define NO_LIMIT "9223372036854771712\n"

static const struct dh_wake wakes[] = {
    { .field = DH_GROUP_SET, .mode = DH_WAKE_CHANGE },
    { .field = DH_GROUP_FROZEN, .mode = DH_WAKE_CHANGE },
    { .field = DH_GROUP_CPUS, .mode = DH_WAKE_CHANGE },
    { .field = DH_GROUP_MEM_OOM_KILL, .mode = DH_WAKE_CHANGE },
};

static void oom_control(const char *group, int kills)
{
    char text[64];

    snprintf(text, sizeof(text), "oom_kill_disable 0\nunder_oom 0\noom_kill %d\n", kills);
    fx_write(text, "cg/memory/%s/memory.oom_control", group);
}

static void memory_make(const char *group)
{
    fx_write("0\n", "cg/memory/%s/memory.failcnt", group);
    fx_write(NO_LIMIT, "cg/memory/%s/memory.limit_in_bytes", group);
    fx_write("", "cg/memory/%s/cgroup.event_control", group);
    oom_control(group, 0);
}

static struct fx machine(uint32_t group_max)
{
    struct dh_options o = fx_options();
    struct fx f;

    o.group_max = group_max;
    f = fx_open(&o, "/", wakes, sizeof(wakes) / sizeof(*wakes));
    fx_pass(&f);
    fx_woken(&f);
    return f;
}

static struct fx running(void)
{
    return machine(64);
}

static void done(struct fx *f)
{
    fx_close(f);
    fx_remove("cg");
    fx_dir("cg");
}

static void sweep(struct fx *f)
{
    dh_sampler_sweep(f->s);
    fx_pass(f);
}

/* Run a pass that reads every file of every group. */
static void reread(struct fx *f)
{
    f->s->cgroups->rescan = true;
    fx_pass(f);
}

/* ---- freezer and cpuset ---- */

static void test_frozen_container_is_found_by_the_sweep(void)
{
    static const struct {
        const char *text;
        uint64_t frozen;
    } rows[] = { { "FREEZING\n", 0 }, { "FROZEN\n", 1 }, { "THAWED\n", 0 } };
    struct fx f;

    fx_write("THAWED\n", "cg/freezer/" POD "/freezer.state");
    fx_write("THAWED\n", "cg/freezer/" POD "/" ID "/freezer.state");
    f = running();
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        bool was = fx_group(&f, UID, ID)->frozen;

        check_row = rows[i].text;
        fx_write(rows[i].text, "cg/freezer/" POD "/" ID "/freezer.state");
        sweep(&f);
        CHECK(HAS(fx_group(&f, UID, ID)->valid, DH_GROUP_FROZEN));
        CHECK_U64(fx_group(&f, UID, ID)->frozen, rows[i].frozen);
        CHECK_INT(fx_woken(&f), was != rows[i].frozen);
    }
    check_row = "";
    CHECK_U64(fx_group(&f, UID, "")->frozen, 0);
    done(&f);
}

static void test_freezer_state_unknown_is_unreadable(void)
{
    static const char *const texts[] = { "", "\n", "FROZEN", "frozen\n", "1\n", "FROZEN\nFROZEN\n" };
    struct fx f;

    fx_write("THAWED\n", "cg/freezer/" POD "/freezer.state");
    f = running();
    for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); i++) {
        check_row = texts[i];
        fx_write(texts[i], "cg/freezer/" POD "/freezer.state");
        sweep(&f);
        CHECK(HAS(fx_group(&f, UID, "")->seen, DH_GROUP_FROZEN));
        CHECK(!HAS(fx_group(&f, UID, "")->valid, DH_GROUP_FROZEN));
        CHECK_INT(fx_group(&f, UID, "")->err, DH_EPARSE);
    }
    check_row = "";
    done(&f);
}

/* Check that v1's freezer decides whether the container is frozen, and v2 whether it has processes. */
static void check_freezer_of_v1_decides(struct fx *f)
{
    CHECK_U64(fx_group(f, UID, "")->frozen, 1);
    CHECK_U64(fx_group(f, UID, "")->populated, 1);
    fx_write("populated 0\nfrozen 0\n", "cg/unified/" POD "/cgroup.events");
    fx_events(f);
    reread(f);
    CHECK_U64(fx_group(f, UID, "")->frozen, 1);
    CHECK_U64(fx_group(f, UID, "")->populated, 0);
}

/* Runtimes freeze containers through v1's freezer if there is one: v2's state does not count then. */
static void test_v1_freezer_takes_precedence_over_v2(void)
{
    struct fx f;

    fx_write("hugetlb\n", "cg/unified/cgroup.controllers");
    fx_write("populated 1\nfrozen 0\n", "cg/unified/" POD "/cgroup.events");
    fx_write("FROZEN\n", "cg/freezer/" POD "/freezer.state");
    f = running();
    check_freezer_of_v1_decides(&f);
    done(&f);
}

/* Runtimes may mount it after the agent's start. */
static void test_v1_freezer_that_appears_later_takes_precedence_over_v2(void)
{
    struct fx f;

    fx_write("0\n", "cg/memory/" POD "/memory.failcnt");
    fx_write("hugetlb\n", "cg/unified/cgroup.controllers");
    fx_write("populated 1\nfrozen 0\n", "cg/unified/" POD "/cgroup.events");
    f = running();
    CHECK_U64(fx_group(&f, UID, "")->frozen, 0);
    fx_write("FROZEN\n", "cg/freezer/" POD "/freezer.state");
    fx_resync(&f);
    sweep(&f);
    CHECK_U64(fx_group(&f, UID, "")->frozen, 1);
    reread(&f);
    check_freezer_of_v1_decides(&f);
    done(&f);
}

static void test_cpusets_are_read_at_resync_in_v1_and_v2(void)
{
    static const struct {
        const char *root, *file;
    } rows[] = { { "cg/cpuset", "cpuset.effective_cpus" }, { "cg", "cpuset.cpus.effective" } };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        const struct dh_group *g;
        struct fx f;

        check_row = rows[i].file;
        if (!strcmp(rows[i].root, "cg"))
            fx_write("cpuset\n", "cg/cgroup.controllers");
        fx_write("0-1,64,2047\n", "%s/" POD "/%s", rows[i].root, rows[i].file);
        f = running();
        g = fx_group(&f, UID, "");
        CHECK(HAS(g->valid, DH_GROUP_CPUS));
        CHECK_U64(g->cpus[0], 3);
        CHECK_U64(g->cpus[1], 1);
        CHECK_U64(g->cpus[31], 1ull << 63);
        fx_write("5\n", "%s/" POD "/%s", rows[i].root, rows[i].file);
        dh_sampler_sweep(f.s);
        fx_read(&f);
        CHECK_U64(fx_group(&f, UID, "")->cpus[0], 3); /* read at resync only */
        reread(&f);
        CHECK_U64(fx_group(&f, UID, "")->cpus[0], 1 << 5);
        CHECK_U64(fx_group(&f, UID, "")->cpus[31], 0);
        CHECK(fx_woken(&f));
        fx_write("\n", "%s/" POD "/%s", rows[i].root, rows[i].file);
        reread(&f);
        CHECK(HAS(fx_group(&f, UID, "")->valid, DH_GROUP_CPUS)); /* the empty set is valid too */
        CHECK_U64(fx_group(&f, UID, "")->cpus[0], 0);
        CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
        done(&f);
    }
    check_row = "";
}

/* The longest list that occurs: a big machine without its SMT siblings. */
static void test_cpuset_of_every_second_cpu_is_read_in_full(void)
{
    char text[8192] = "";
    struct fx f;

    for (int cpu = 0, n = 0; cpu < 64 * DH_GROUP_CPU_WORDS; cpu += 2)
        n += snprintf(text + n, sizeof(text) - (size_t)n, "%s%d", cpu ? "," : "", cpu);
    fx_write(text, "cg/cpuset/" POD "/cpuset.effective_cpus");
    f = running();
    for (int i = 0; i < DH_GROUP_CPU_WORDS; i++)
        CHECK_U64(fx_group(&f, UID, "")->cpus[i], 0x5555555555555555);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
    done(&f);
}

static void test_cpuset_beyond_the_record_is_unreadable(void)
{
    const struct dh_group *g;
    struct fx f;

    fx_write("0-3\n", "cg/cpuset/" POD "/cpuset.effective_cpus");
    f = running();
    fx_write("0-2048\n", "cg/cpuset/" POD "/cpuset.effective_cpus");
    reread(&f);
    g = fx_group(&f, UID, "");
    CHECK(HAS(g->seen, DH_GROUP_CPUS) && !HAS(g->valid, DH_GROUP_CPUS));
    CHECK_U64(g->cpus[0], 0);
    CHECK_INT(g->err, DH_EFULL);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err, DH_EFULL);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err_field, DH_GROUP_CPUS);
    fx_write("0-3,\n", "cg/cpuset/" POD "/cpuset.effective_cpus");
    reread(&f);
    CHECK_INT(fx_group(&f, UID, "")->err, DH_EPARSE);
    fx_write("0-3\n", "cg/cpuset/" POD "/cpuset.effective_cpus");
    reread(&f);
    CHECK_U64(fx_group(&f, UID, "")->cpus[0], 15);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
    fx_remove("cg/cpuset/" POD);
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 0);
    done(&f);
}

/* ---- limits and failures ---- */

static void test_limits_and_failed_reservations_belong_to_their_group(void)
{
    const struct dh_group *g;
    struct fx f;

    fx_write("64\n", MM "/nr_hugepages");
    memory_make(POD);
    memory_make(POD "/" ID);
    fx_write("33554432\n", "cg/memory/" POD "/" ID "/memory.limit_in_bytes");
    fx_write("3\n", "cg/hugetlb/" POD "/" ID "/hugetlb.2MB.rsvd.failcnt");
    f = running();
    g = fx_group(&f, UID, ID);
    CHECK_U64(g->mem_limit, 33554432);
    CHECK_U64(fx_group(&f, UID, "")->mem_limit, UINT64_MAX);
    CHECK(HAS(g->hugetlb[0].valid, DH_GROUP_HT_RSVD_FAILED));
    CHECK_U64(g->hugetlb[0].rsvd_failed, 3);
    fx_write("4\n", "cg/hugetlb/" POD "/" ID "/hugetlb.2MB.rsvd.failcnt");
    dh_sampler_sweep(f.s);
    fx_read(&f);
    CHECK_U64(fx_group(&f, UID, ID)->hugetlb[0].rsvd_failed, 4);
    fx_remove("sys/kernel/mm");
    done(&f);
}

/* Not for every event: a group that reclaims at its limit causes a hundred per second. */
static void test_v2_limit_is_read_with_an_oom_kill(void)
{
    struct fx f;
    uint64_t reads;

    fx_write("memory\n", "cg/cgroup.controllers");
    fx_write("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "cg/" POD "/memory.events");
    fx_write("max\n", "cg/" POD "/memory.max");
    f = running();
    CHECK_U64(fx_group(&f, UID, "")->mem_limit, UINT64_MAX);
    fx_write("4096\n", "cg/" POD "/memory.max");
    fx_write("low 0\nhigh 0\nmax 1\noom 0\noom_kill 0\n", "cg/" POD "/memory.events");
    reads = f.s->reads;
    fx_events(&f);
    CHECK_U64(f.s->reads - reads, 1);
    CHECK_U64(fx_group(&f, UID, "")->mem_max, 1);
    CHECK_U64(fx_group(&f, UID, "")->mem_limit, UINT64_MAX);
    fx_write("low 0\nhigh 0\nmax 2\noom 1\noom_kill 1\n", "cg/" POD "/memory.events");
    fx_events(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(f.s->reads - reads, 3);
    CHECK_U64(fx_group(&f, UID, "")->mem_limit, 4096); /* evidence */
    fx_write("8192\n", "cg/" POD "/memory.max");
    reread(&f);
    CHECK_U64(fx_group(&f, UID, "")->mem_limit, 8192);
    done(&f);
}

/* Where the kernel does not notify. */
static void test_limit_is_read_with_a_counter_found_by_the_sweep(void)
{
    struct fx f;

    memory_make(POD);
    memory_make(POD "/" ID);
    f = running();
    fx_write("4096\n", "cg/memory/" POD "/memory.limit_in_bytes");
    fx_write("4096\n", "cg/memory/" POD "/" ID "/memory.limit_in_bytes");
    fx_write("8\n", "cg/memory/" POD "/memory.failcnt"); /* no rule reads it here */
    oom_control(POD "/" ID, 1);
    dh_sampler_sweep(f.s);
    fx_read(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(fx_group(&f, UID, ID)->mem_limit, 4096);
    CHECK_U64(fx_group(&f, UID, "")->mem_failcnt, 8);
    CHECK_U64(fx_group(&f, UID, "")->mem_limit, UINT64_MAX);
    done(&f);
}

/* ---- out of memory ---- */

static struct dh_cg_group *pod(struct fx *f, const char *uid)
{
    return &f->s->cgroups->group[fx_group(f, uid, "") - fx_groups(f)];
}

/* Do what the kernel does when a group of the pod runs out of memory. */
static void notify(struct fx *f, const char *uid)
{
    const uint64_t one = 1;

    fx_must(write(pod(f, uid)->oom_fd - 1, &one, sizeof(one)) == sizeof(one), "eventfd");
}

/* Do what the thread does when an eventfd is readable. */
static void handle_notifications(struct fx *f)
{
    f->s->now_ns = dh_now_ns();
    dh_cgroups_oom_events(f->s);
    dh_sampler_publish(f->s);
    dh_sampler_notify(f->s);
    fx_read(f);
}

static uint64_t kills(struct fx *f, const char *name)
{
    return fx_group(f, UID, name)->mem_oom_kill;
}

static void test_oom_kill_is_read_at_once_and_a_late_one_in_the_next_pass(void)
{
    struct fx f;
    uint64_t reads;

    memory_make(POD);
    memory_make(POD "/" ID);
    f = running();
    CHECK_U64(f.head->unwatched, 0);
    oom_control(POD "/" ID, 1);
    fx_write("4096\n", "cg/memory/" POD "/" ID "/memory.limit_in_bytes");
    fx_pass(&f);
    CHECK_U64(kills(&f, ID), 0);
    notify(&f, UID);
    reads = f.s->reads;
    handle_notifications(&f);
    CHECK_U64(f.s->reads - reads, 2 + 1);
    CHECK(fx_woken(&f));
    CHECK_U64(kills(&f, ID), 1);
    CHECK_U64(fx_group(&f, UID, ID)->mem_limit, 4096); /* evidence */
    oom_control(POD, 1);
    fx_pass(&f);
    CHECK_U64(kills(&f, ""), 1);
    oom_control(POD, 2);
    fx_pass(&f); /* nothing further */
    CHECK_U64(kills(&f, ""), 1);
    CHECK_U64(f.s->cgroups->oom_pods_due, 0);
    dh_sampler_sweep(f.s); /* a kill without notification */
    fx_read(&f);
    CHECK_U64(kills(&f, ""), 2);
    done(&f);
}

static void test_oom_loop_costs_a_limited_number_of_reads_per_pass(void)
{
    uint64_t reads;
    struct fx f;

    memory_make(POD);
    f = running();
    reads = f.s->reads;
    for (int i = 1; i <= 100; i++) {
        oom_control(POD, i);
        notify(&f, UID);
        handle_notifications(&f);
    }
    CHECK(f.s->reads - reads <= (1 + DH_CG_OOM_READS) * 2); /* with the limit: at once, and by the timer */
    fx_pass(&f);
    CHECK_U64(kills(&f, ""), 100);
    oom_control(POD, 101); /* the last notification comes right before the pass */
    fx_pass(&f);
    CHECK_U64(kills(&f, ""), 101);
    CHECK_U64(f.s->cgroups->oom_pods_due, 0);
    done(&f);
}

/* The kernel notifies before it kills, and does not notify about the kill itself. */
static void test_oom_kill_after_its_notification_is_read_by_the_timer(void)
{
    struct itimerspec timer;
    struct fx f;

    memory_make(POD);
    memory_make(POD "/" ID);
    f = running();
    notify(&f, UID);
    handle_notifications(&f);
    CHECK_U64(kills(&f, ID), 0);
    for (int kill = 1; kill <= DH_CG_OOM_READS; kill++) {
        oom_control(POD "/" ID, kill);
        fx_must(poll(&(struct pollfd){ .fd = f.s->oom_fd, .events = POLLIN }, 1, 10000) == 1, "the timer");
        handle_notifications(&f);
        CHECK_U64(kills(&f, ID), (uint64_t)kill);
        CHECK(fx_woken(&f));
    }
    fx_must(!timerfd_gettime(f.s->cgroups->oom_timer_fd, &timer), "the timer");
    CHECK_INT(timer.it_value.tv_nsec, 0); /* no further read is due */
    oom_control(POD "/" ID, DH_CG_OOM_READS + 1);
    fx_pass(&f);
    CHECK_U64(kills(&f, ID), DH_CG_OOM_READS + 1); /* the timer did not reduce the reads of the next pass */
    done(&f);
}

static void test_oom_kill_after_a_pass_is_read_by_the_timer(void)
{
    struct fx f;

    memory_make(POD);
    f = running();
    notify(&f, UID);
    handle_notifications(&f);
    fx_pass(&f); /* between the notification and the kill */
    CHECK_U64(f.s->cgroups->oom_pods_due, 0);
    oom_control(POD, 1);
    fx_must(poll(&(struct pollfd){ .fd = f.s->oom_fd, .events = POLLIN }, 1, 10000) == 1, "the timer");
    handle_notifications(&f);
    CHECK_U64(kills(&f, ""), 1);
    done(&f);
}

/* Pods that run out of memory one after the other share the timer. */
static void test_oom_timer_reads_each_pod_a_limited_number_of_times(void)
{
    uint64_t reads;
    struct fx f;

    memory_make(POD);
    memory_make(POD_2);
    f = running();
    reads = f.s->reads;
    for (int i = 0; i < 2; i++) {
        notify(&f, i ? UID_2 : UID);
        handle_notifications(&f);
        for (int expiry = 0; expiry < DH_CG_OOM_READS; expiry++) {
            fx_must(poll(&(struct pollfd){ .fd = f.s->oom_fd, .events = POLLIN }, 1, 10000) == 1, "the timer");
            handle_notifications(&f);
        }
    }
    CHECK_U64(f.s->reads - reads, 2 * (1 + DH_CG_OOM_READS)); /* at once, and by the timer */
    done(&f);
}

static uint64_t registrations(const char *path)
{
    char full[FX_PATH], text[64] = "";
    FILE *file;

    snprintf(full, sizeof(full), "%s/cg/memory/%s/cgroup.event_control", fx_root, path);
    file = fopen(full, "r");
    fx_must(file && fgets(text, sizeof(text), file), full);
    fclose(file);
    return (uint64_t)strtoul(text, NULL, 10) + 1;
}

/* A second registration would notify twice, and cost the kernel more each time. */
static void test_group_is_registered_once_with_its_pods_eventfd(void)
{
    int descriptors = fx_count("/proc/self/fd");
    struct fx f;

    memory_make(POD);
    memory_make(POD "/" ID);
    f = running();
    CHECK_U64(registrations(POD), (uint64_t)pod(&f, UID)->oom_fd);
    CHECK_U64(registrations(POD "/" ID), (uint64_t)pod(&f, UID)->oom_fd);
    CHECK_INT(f.s->oom_fds, 1);
    fx_write("", "cg/memory/" POD "/cgroup.event_control");
    reread(&f);
    CHECK_INT(fx_count("/proc/self/fd") - descriptors, (int)f.head->descriptors); /* no memory.oom_control
                                                                                     stays open */
    memory_make(POD "/second-container");
    fx_events(&f);
    CHECK_U64(registrations(POD "/second-container"), (uint64_t)pod(&f, UID)->oom_fd);
    fx_write("-", "cg/memory/" POD "/cgroup.event_control");
    reread(&f);
    CHECK_U64(registrations(POD), 1); /* no number: nothing was written */
    fx_remove("cg/memory/" POD "/" ID);
    fx_events(&f);
    CHECK_INT(f.s->oom_fds, 1);
    notify(&f, UID); /* the kernel does so when a group is removed */
    handle_notifications(&f);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
    fx_remove("cg/memory/" POD);
    fx_events(&f);
    CHECK_INT(f.s->oom_fds, 0);
    CHECK_U64(f.s->cgroups->oom_pods_due, 0);
    CHECK_INT(fx_count("/proc/self/fd") - descriptors, (int)f.head->descriptors);
    done(&f);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

/* The pod is removed before its notification is handled, and another pod takes its slot. */
static void test_notification_of_a_removed_pod_reaches_no_other_pod(void)
{
    struct fx f;

    memory_make(POD);
    f = running();
    notify(&f, UID);
    fx_remove("cg/memory/" POD);
    fx_events(&f);
    memory_make("kubepods/burstable/pod" OTHER);
    fx_events(&f);
    CHECK_INT(pod(&f, OTHER) - f.s->cgroups->group, 0);
    handle_notifications(&f);
    CHECK_U64(f.s->cgroups->oom_pods_due, 0);
    notify(&f, OTHER);
    fx_remove("cg/memory/kubepods/burstable/pod" OTHER);
    handle_notifications(&f); /* the read itself finds the removal */
    CHECK_INT(fx_group_count(&f), 0);
    CHECK_U64(f.s->cgroups->oom_pods_due, 0);
    CHECK_INT(f.s->oom_fds, 0);
    done(&f);
}

static void test_oom_without_registration_is_found_by_the_sweep(void)
{
    struct fx f;

    memory_make(POD);
    memory_make(POD "/" ID);
    fx_remove("cg/memory/" POD "/" ID "/cgroup.event_control");
    f = running();
    CHECK_U64(f.head->unwatched, 1);
    reread(&f);
    CHECK_U64(f.head->unwatched, 1); /* requested again, refused again, and not counted twice */
    oom_control(POD "/" ID, 1);
    dh_sampler_sweep(f.s);
    fx_read(&f);
    CHECK_U64(kills(&f, ID), 1);
    fx_write("", "cg/memory/" POD "/" ID "/cgroup.event_control");
    reread(&f);
    CHECK_U64(f.head->unwatched, 0);
    CHECK_U64(registrations(POD "/" ID), (uint64_t)pod(&f, UID)->oom_fd);
    fx_remove("cg/memory/" POD "/" ID);
    fx_events(&f);
    CHECK_U64(f.head->unwatched, 0);
    done(&f);
}

static void test_pods_without_an_eventfd_are_swept(void)
{
    char path[FX_PATH];
    struct fx f;

    for (int i = 0; i < DH_CG_OOM_FDS + 3; i++) {
        snprintf(path, sizeof(path), "kubepods/pod%08d-2222-3333-4444-555555555555", i);
        memory_make(path);
    }
    f = machine(1024);
    CHECK_INT(f.s->oom_fds, DH_CG_OOM_FDS);
    CHECK_U64(f.head->unwatched, 3);
    for (int i = 0; i < 8; i++) {
        char uid[DH_UID_LEN];

        snprintf(uid, sizeof(uid), "%s", fx_groups(&f)[i].uid);
        fx_remove("cg/memory/kubepods/pod%s", uid);
    }
    fx_events(&f);
    reread(&f); /* there is room again */
    CHECK_U64(f.head->unwatched, 0);
    CHECK_INT(f.s->oom_fds, DH_CG_OOM_FDS + 3 - 8);
    done(&f);
}

int main(void)
{
    fx_begin();
    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_dir("cg");
    test_frozen_container_is_found_by_the_sweep();
    test_freezer_state_unknown_is_unreadable();
    test_v1_freezer_takes_precedence_over_v2();
    test_v1_freezer_that_appears_later_takes_precedence_over_v2();
    test_cpusets_are_read_at_resync_in_v1_and_v2();
    test_cpuset_of_every_second_cpu_is_read_in_full();
    test_cpuset_beyond_the_record_is_unreadable();
    test_limits_and_failed_reservations_belong_to_their_group();
    test_v2_limit_is_read_with_an_oom_kill();
    test_limit_is_read_with_a_counter_found_by_the_sweep();
    test_oom_kill_is_read_at_once_and_a_late_one_in_the_next_pass();
    test_oom_kill_after_its_notification_is_read_by_the_timer();
    test_oom_kill_after_a_pass_is_read_by_the_timer();
    test_oom_timer_reads_each_pod_a_limited_number_of_times();
    test_oom_loop_costs_a_limited_number_of_reads_per_pass();
    test_group_is_registered_once_with_its_pods_eventfd();
    test_notification_of_a_removed_pod_reaches_no_other_pod();
    test_oom_without_registration_is_found_by_the_sweep();
    test_pods_without_an_eventfd_are_swept();
    return check_done("test_cgroups_v1");
}

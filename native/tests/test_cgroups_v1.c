/*
 * What only cgroup v1 has, as directories of a fixture: hierarchies for the freezer and for cpusets, and
 * an eventfd that tells of a pod that ran out of memory. The eventfds are the kernel's own, and the test
 * writes to them in its place.
 */
#include "check.h"
#include "fixture.h"

#define UID "11111111-2222-3333-4444-555555555555"
#define OTHER "22222222-2222-3333-4444-555555555555"
#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define POD "kubepods/burstable/pod" UID
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

/* A pass that reads every file of every group. */
static void reread(struct fx *f)
{
    f->s->cgroups->rescan = true;
    fx_pass(f);
}

/* ---- freezer and cpuset ---- */

static void a_frozen_container_is_found_by_the_sweep(void)
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

static void a_state_of_no_known_name_is_unreadable_and_not_thawed(void)
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

/* A container is frozen through v1's freezer where there is one: what v2 says beside it is not of it. */
static void the_freezer_of_v1_outranks_that_of_v2_beside_it(void)
{
    struct fx f;

    fx_write("hugetlb\n", "cg/unified/cgroup.controllers");
    fx_write("populated 1\nfrozen 0\n", "cg/unified/" POD "/cgroup.events");
    fx_write("FROZEN\n", "cg/freezer/" POD "/freezer.state");
    f = running();
    CHECK_U64(fx_group(&f, UID, "")->frozen, 1);
    CHECK_U64(fx_group(&f, UID, "")->populated, 1);
    fx_write("populated 0\nfrozen 0\n", "cg/unified/" POD "/cgroup.events");
    fx_events(&f);
    reread(&f);
    CHECK_U64(fx_group(&f, UID, "")->frozen, 1);
    CHECK_U64(fx_group(&f, UID, "")->populated, 0);
    done(&f);
}

static void cpusets_are_read_rarely_and_from_both_versions(void)
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
        CHECK_U64(fx_group(&f, UID, "")->cpus[0], 3); /* they change by configuration only */
        reread(&f);
        CHECK_U64(fx_group(&f, UID, "")->cpus[0], 1 << 5);
        CHECK_U64(fx_group(&f, UID, "")->cpus[31], 0);
        CHECK(fx_woken(&f));
        fx_write("\n", "%s/" POD "/%s", rows[i].root, rows[i].file);
        reread(&f);
        CHECK(HAS(fx_group(&f, UID, "")->valid, DH_GROUP_CPUS)); /* none is a set, too */
        CHECK_U64(fx_group(&f, UID, "")->cpus[0], 0);
        CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
        done(&f);
    }
    check_row = "";
}

/* What is left of a big machine without its SMT siblings: the longest list that there is. */
static void a_set_of_every_second_cpu_is_read_whole(void)
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

static void more_cpus_than_there_is_room_for_are_not_known(void)
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

static void limits_and_failed_reservations_are_those_of_the_group(void)
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

/* Not with every event: who reclaims at its limit makes a hundred of them in a second. */
static void the_limit_of_v2_is_read_with_a_kill(void)
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

/* Where the kernel tells nobody. */
static void a_limit_is_read_with_what_the_sweep_found(void)
{
    struct fx f;

    memory_make(POD);
    memory_make(POD "/" ID);
    f = running();
    fx_write("4096\n", "cg/memory/" POD "/memory.limit_in_bytes");
    fx_write("4096\n", "cg/memory/" POD "/" ID "/memory.limit_in_bytes");
    fx_write("8\n", "cg/memory/" POD "/memory.failcnt"); /* no rule looks at it here */
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

/* What the kernel does when a group of the pod runs out of memory. */
static void tell(struct fx *f, const char *uid)
{
    const uint64_t one = 1;

    fx_must(write(pod(f, uid)->oom_fd - 1, &one, sizeof(one)) == sizeof(one), "eventfd");
}

/* What the thread does when an eventfd has something to say. */
static void hear(struct fx *f)
{
    f->s->now_ns = dh_now_ns();
    dh_cgroups_ooms(f->s);
    dh_publish(f->s);
    dh_ring(f->s);
    fx_read(f);
}

static uint64_t kills(struct fx *f, const char *name)
{
    return fx_group(f, UID, name)->mem_oom_kill;
}

static void a_kill_is_heard_of_at_once_and_one_that_comes_late_in_the_next_pass(void)
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
    tell(&f, UID);
    reads = f.s->reads;
    hear(&f);
    CHECK_U64(f.s->reads - reads, 2 + 1);
    CHECK(fx_woken(&f));
    CHECK_U64(kills(&f, ID), 1);
    CHECK_U64(fx_group(&f, UID, ID)->mem_limit, 4096); /* evidence */
    oom_control(POD, 1);
    fx_pass(&f);
    CHECK_U64(kills(&f, ""), 1);
    oom_control(POD, 2);
    fx_pass(&f); /* and that was that */
    CHECK_U64(kills(&f, ""), 1);
    CHECK_U64(f.s->cgroups->oom_owed, 0);
    dh_sampler_sweep(f.s); /* one that nobody was told of */
    fx_read(&f);
    CHECK_U64(kills(&f, ""), 2);
    done(&f);
}

static void a_pod_that_dies_in_a_loop_is_read_thrice_from_pass_to_pass_at_most(void)
{
    uint64_t reads;
    struct fx f;

    memory_make(POD);
    f = running();
    reads = f.s->reads;
    for (int i = 1; i <= 100; i++) {
        oom_control(POD, i);
        tell(&f, UID);
        hear(&f);
    }
    CHECK(f.s->reads - reads <= 2 * 2); /* with the limit: at once, and by the timer if that went off */
    fx_pass(&f);
    CHECK_U64(kills(&f, ""), 100);
    oom_control(POD, 101); /* the last was told of right before the pass */
    fx_pass(&f);
    CHECK_U64(kills(&f, ""), 101);
    CHECK_U64(f.s->cgroups->oom_owed, 0);
    done(&f);
}

/* The kernel tells before it kills, and nothing tells of the kill itself. */
static void a_kill_right_after_it_was_told_of_waits_for_no_pass(void)
{
    struct fx f;

    memory_make(POD);
    memory_make(POD "/" ID);
    f = running();
    tell(&f, UID);
    hear(&f);
    CHECK_U64(kills(&f, ID), 0);
    oom_control(POD "/" ID, 1);
    fx_must(poll(&(struct pollfd){ .fd = f.s->oom_fd, .events = POLLIN }, 1, 10000) == 1, "the timer");
    hear(&f);
    CHECK_U64(kills(&f, ID), 1);
    CHECK(fx_woken(&f));
    CHECK_INT(poll(&(struct pollfd){ .fd = f.s->oom_fd, .events = POLLIN }, 1, 0), 0); /* it goes off once */
    oom_control(POD "/" ID, 2);
    fx_pass(&f);
    CHECK_U64(kills(&f, ID), 2); /* of the next pass the timer took nothing away */
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

/* To register again would be to be told twice, and cost the kernel more each time. */
static void each_group_is_registered_once_with_its_pods_eventfd(void)
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
    CHECK_INT(fx_count("/proc/self/fd") - descriptors, (int)f.head->descriptors); /* no control is held */
    memory_make(POD "/second-container");
    fx_events(&f);
    CHECK_U64(registrations(POD "/second-container"), (uint64_t)pod(&f, UID)->oom_fd);
    fx_write("-", "cg/memory/" POD "/cgroup.event_control");
    reread(&f);
    CHECK_U64(registrations(POD), 1); /* no number: nobody wrote one */
    fx_remove("cg/memory/" POD "/" ID);
    fx_events(&f);
    CHECK_INT(f.s->oom_fds, 1);
    tell(&f, UID); /* the kernel does so when a group is removed */
    hear(&f);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
    fx_remove("cg/memory/" POD);
    fx_events(&f);
    CHECK_INT(f.s->oom_fds, 0);
    CHECK_U64(f.s->cgroups->oom_owed, 0);
    CHECK_INT(fx_count("/proc/self/fd") - descriptors, (int)f.head->descriptors);
    done(&f);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

/* The pod is gone before what was told of it is heard, and another has its place in the table. */
static void what_is_told_of_a_pod_that_is_gone_is_of_no_other(void)
{
    struct fx f;

    memory_make(POD);
    f = running();
    tell(&f, UID);
    fx_remove("cg/memory/" POD);
    fx_events(&f);
    memory_make("kubepods/burstable/pod" OTHER);
    fx_events(&f);
    CHECK_INT(pod(&f, OTHER) - f.s->cgroups->group, 0);
    hear(&f);
    CHECK_U64(f.s->cgroups->oom_owed, 0);
    tell(&f, OTHER);
    fx_remove("cg/memory/kubepods/burstable/pod" OTHER);
    hear(&f); /* the look itself finds that it is gone */
    CHECK_INT(fx_group_count(&f), 0);
    CHECK_U64(f.s->cgroups->oom_owed, 0);
    CHECK_INT(f.s->oom_fds, 0);
    done(&f);
}

static void where_nothing_can_be_registered_the_sweep_finds_it(void)
{
    struct fx f;

    memory_make(POD);
    memory_make(POD "/" ID);
    fx_remove("cg/memory/" POD "/" ID "/cgroup.event_control");
    f = running();
    CHECK_U64(f.head->unwatched, 1);
    reread(&f);
    CHECK_U64(f.head->unwatched, 1); /* asked for again, refused again, and not counted again */
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

static void more_pods_than_there_are_eventfds_are_swept(void)
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
    reread(&f); /* there is room */
    CHECK_U64(f.head->unwatched, 0);
    CHECK_INT(f.s->oom_fds, DH_CG_OOM_FDS + 3 - 8);
    done(&f);
}

int main(void)
{
    fx_begin();
    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_dir("cg");
    a_frozen_container_is_found_by_the_sweep();
    a_state_of_no_known_name_is_unreadable_and_not_thawed();
    the_freezer_of_v1_outranks_that_of_v2_beside_it();
    cpusets_are_read_rarely_and_from_both_versions();
    a_set_of_every_second_cpu_is_read_whole();
    more_cpus_than_there_is_room_for_are_not_known();
    limits_and_failed_reservations_are_those_of_the_group();
    the_limit_of_v2_is_read_with_a_kill();
    a_limit_is_read_with_what_the_sweep_found();
    a_kill_is_heard_of_at_once_and_one_that_comes_late_in_the_next_pass();
    a_kill_right_after_it_was_told_of_waits_for_no_pass();
    a_pod_that_dies_in_a_loop_is_read_thrice_from_pass_to_pass_at_most();
    each_group_is_registered_once_with_its_pods_eventfd();
    what_is_told_of_a_pod_that_is_gone_is_of_no_other();
    where_nothing_can_be_registered_the_sweep_finds_it();
    more_pods_than_there_are_eventfds_are_swept();
    return check_done("test_cgroups_v1");
}

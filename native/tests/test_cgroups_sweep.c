/*
 * Tests of the sweep: pod by pod, with each pod's directory opened once for all files below it. What happens
 * if that directory is removed, replaced or missing?
 */
#include "check.h"
#include "fixture.h"

#define UID "11111111-2222-3333-4444-555555555555"
#define POD "kubepods/burstable/pod" UID
#define ID "%064d"

static void v2_make(const char *at)
{
    fx_write("populated 1\nfrozen 0\n", "%s/cgroup.events", at);
    fx_write("nr_periods 30\nnr_throttled 3\nthrottled_usec 500\n", "%s/cpu.stat", at);
}

static void containers_make(int from, int to)
{
    for (int i = from; i < to; i++) {
        char at[FX_PATH];

        snprintf(at, sizeof(at), "cg/" POD "/" ID, i);
        v2_make(at);
    }
}

static void machine_make(int containers)
{
    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("cpu memory hugetlb\n", "cg/cgroup.controllers");
    v2_make("cg/" POD);
    containers_make(0, containers);
}

static struct fx running(void)
{
    struct dh_options o = fx_options();
    struct fx f = fx_open(&o, "/", NULL, 0);

    fx_pass(&f);
    fx_woken(&f);
    return f;
}

static const struct dh_group *container(const struct fx *f, int number)
{
    char name[DH_NAME_LEN];

    snprintf(name, sizeof(name), ID, number);
    return fx_group(f, UID, name);
}

static uint32_t slot_of(const struct fx *f, const struct dh_group *g)
{
    return (uint32_t)(g - fx_groups(f));
}

static void all_is_well(const struct fx *f, uint32_t groups)
{
    CHECK_INT(fx_group_count(f), groups);
    CHECK_INT(f->head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
    CHECK_U64(f->head->source[DH_SOURCE_CGROUPS].failures, 0);
}

static void test_lower_bound_equals_the_reads_of_a_sweep(void)
{
    int descriptors;
    uint64_t reads, opens;
    struct fx f;

    machine_make(3);
    f = running();
    descriptors = fx_count("/proc/self/fd");
    reads = f.s->reads;
    opens = f.s->opens;
    CHECK_INT(dh_sampler_sweep(f.s), 4);
    CHECK_U64(f.s->reads - reads, 4); /* cpu.stat: the other file is watched */
    CHECK_U64(f.s->opens - opens, 4 + 1); /* and the pod's directory */
    CHECK_INT(dh_sampler_lower_bound(f.s, 1) - dh_sampler_lower_bound(f.s, 0), 4);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors + 4); /* the files are held, the directory is not */
    CHECK_INT(f.s->cgroups->base_pod, 0);
    fx_close(&f);
    fx_remove("cg");
}

static void test_sweep_assigns_values_to_their_group(void)
{
    struct fx f;

    machine_make(2);
    f = running();
    fx_write("nr_periods 40\nnr_throttled 4\nthrottled_usec 600\n", "cg/" POD "/cpu.stat");
    fx_write("nr_periods 50\nnr_throttled 5\nthrottled_usec 700\n", "cg/" POD "/" ID "/cpu.stat", 1);
    dh_sampler_sweep(f.s);
    fx_read(&f);
    CHECK_U64(fx_group(&f, UID, "")->cpu_periods, 40);
    CHECK_U64(container(&f, 0)->cpu_periods, 30);
    CHECK_U64(container(&f, 1)->cpu_periods, 50);
    all_is_well(&f, 3);
    fx_close(&f);
    fx_remove("cg");
}

/* The open directory is removed, and then recreated, before the last file is read. */
static void test_pod_removed_in_the_middle_of_a_sweep(void)
{
    struct dh_cgroups *c;
    uint32_t slot, file = 0;
    size_t skip;
    struct fx f;

    machine_make(2);
    f = running();
    c = f.s->cgroups;
    while (strcmp(c->file[file].name, "cpu.stat"))
        file++;
    slot = slot_of(&f, container(&f, 0));
    c->base_pod = c->group[slot].parent;
    memset(c->base_fd, -1, sizeof(c->base_fd));
    CHECK(dh_cg_base_dir(f.s, slot, 0, &skip) == c->base_fd[0] && skip == strlen(POD) + 1);
    CHECK(dh_cg_file_read(f.s, slot, file, true));
    fx_remove("cg/" POD);
    fx_fail_removed(&f);
    CHECK(!dh_cg_file_read(f.s, slot, file, true)); /* the group is gone */
    machine_make(2);
    CHECK(dh_cg_file_read(f.s, slot, file, true)); /* the new directory is not below the open one: a first failed
                                                read */
    close(c->base_fd[0]);
    c->base_pod = 0;
    dh_sampler_sweep(f.s);
    fx_read(&f);
    all_is_well(&f, 3);
    fx_events(&f); /* events of the parents report the replacement */
    all_is_well(&f, 3);
    fx_remove("cg/" POD);
    CHECK_INT(dh_sampler_sweep(f.s), 1); /* its containers are removed with it, unread */
    fx_read(&f);
    all_is_well(&f, 0);
    fx_close(&f);
    fx_remove("cg");
}

/*
 * The pod is removed from one of two hierarchies: its containers are opened from the root there, and removed
 * too.
 */
static void test_pod_missing_in_one_hierarchy_is_swept_in_the_others(void)
{
    struct fx f;

    fx_write("0-1\n", "sys/devices/system/cpu/online");
    for (int i = 0; i < 2; i++) {
        fx_write("7\n", "cg/memory/" POD "/" ID "/memory.failcnt", i);
        fx_write("nr_periods 21\n", "cg/cpu/" POD "/" ID "/cpu.stat", i);
    }
    fx_write("7\n", "cg/memory/" POD "/memory.failcnt");
    fx_write("nr_periods 21\n", "cg/cpu/" POD "/cpu.stat");
    f = running();
    CHECK_U64(container(&f, 1)->cpu_periods, 21);
    fx_remove("cg/cpu/" POD);
    fx_write("9\n", "cg/memory/" POD "/" ID "/memory.failcnt", 1);
    dh_sampler_sweep(f.s);
    dh_sampler_sweep(f.s);
    fx_read(&f);
    all_is_well(&f, 3);
    CHECK_U64(container(&f, 1)->mem_failcnt, 9);
    CHECK(!HAS(container(&f, 1)->seen, DH_GROUP_CPU_PERIODS));
    CHECK(!HAS(fx_group(&f, UID, "")->seen, DH_GROUP_CPU_PERIODS));
    fx_close(&f);
    fx_remove("cg");
}

/*
 * A pod with many containers is swept ahead of time; after its removal the credit must not delay other
 * groups.
 */
static void test_sweep_credit_of_removed_groups_is_dropped(void)
{
    struct fx f;
    uint32_t sweeps, slot;

    machine_make(300);
    f = running();
    for (int i = 0; i < 10; i++)
        fx_pass(&f);
    CHECK_INT(f.s->cgroups->group[slot_of(&f, fx_group(&f, UID, ""))].sweeps, 1);
    fx_remove("cg/" POD);
    fx_events(&f);
    machine_make(0);
    fx_events(&f);
    slot = slot_of(&f, fx_group(&f, UID, ""));
    sweeps = f.s->cgroups->group[slot].sweeps;
    for (int i = 0; i < 2 * 10; i++) /* two sweeps */
        fx_pass(&f);
    CHECK(f.s->cgroups->group[slot].sweeps > sweeps);
    fx_close(&f);
    fx_remove("cg");
}

int main(void)
{
    fx_begin();
    test_lower_bound_equals_the_reads_of_a_sweep();
    test_sweep_assigns_values_to_their_group();
    test_pod_removed_in_the_middle_of_a_sweep();
    test_pod_missing_in_one_hierarchy_is_swept_in_the_others();
    test_sweep_credit_of_removed_groups_is_dropped();
    return check_done("test_cgroups_sweep");
}

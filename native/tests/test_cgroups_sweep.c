/*
 * The sweep: pod by pod, each pod's own directory opened once for all the files below it. What if that
 * directory goes, is another one, or never was?
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

static void the_floor_is_the_reads_of_a_sweep(void)
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
    CHECK_U64(f.s->reads - reads, 4); /* cpu.stat: the other is watched */
    CHECK_U64(f.s->opens - opens, 4 + 1); /* and the pod's directory */
    CHECK_INT(dh_sampler_floor(f.s, 1) - dh_sampler_floor(f.s, 0), 4);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors); /* the directory is not held */
    CHECK_INT(f.s->cgroups->near, 0);
    fx_close(&f);
    fx_remove("cg");
}

static void what_was_read_is_of_the_right_group(void)
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

/* The directory that is open is removed, and then one of its name is made, before the last file is read. */
static void a_pod_may_vanish_in_the_middle(void)
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
    c->near = c->group[slot].parent;
    memset(c->near_fd, -1, sizeof(c->near_fd));
    CHECK(dh_cg_base(f.s, slot, 0, &skip) == c->near_fd[0] && skip == strlen(POD) + 1);
    CHECK(dh_cg_file_read(f.s, slot, file));
    fx_remove("cg/" POD);
    CHECK(!dh_cg_file_read(f.s, slot, file)); /* it is gone */
    machine_make(2);
    CHECK(dh_cg_file_read(f.s, slot, file)); /* the one of that name is not below what is open: a first miss */
    close(c->near_fd[0]);
    c->near = 0;
    dh_sampler_sweep(f.s);
    fx_read(&f);
    all_is_well(&f, 3);
    fx_events(&f); /* that they are others is told by their parents */
    all_is_well(&f, 3);
    fx_remove("cg/" POD);
    CHECK_INT(dh_sampler_sweep(f.s), 1); /* its containers go with it, unread */
    fx_read(&f);
    all_is_well(&f, 0);
    fx_close(&f);
    fx_remove("cg");
}

/* In one of two hierarchies the pod is gone: its containers are looked for from the root, and are too. */
static void a_pod_without_its_directory_in_one_hierarchy(void)
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

/* A pod of many containers is swept whole, ahead of time: nobody else pays for it once it is gone. */
static void what_was_swept_ahead_is_not_owed_by_others(void)
{
    struct fx f;
    uint32_t visits, slot;

    machine_make(300);
    f = running();
    for (int i = 0; i < 10; i++)
        fx_pass(&f);
    CHECK_INT(f.s->cgroups->group[slot_of(&f, fx_group(&f, UID, ""))].visits, 1);
    fx_remove("cg/" POD);
    fx_events(&f);
    machine_make(0);
    fx_events(&f);
    slot = slot_of(&f, fx_group(&f, UID, ""));
    visits = f.s->cgroups->group[slot].visits;
    for (int i = 0; i < 2 * 10; i++) /* two sweeps */
        fx_pass(&f);
    CHECK(f.s->cgroups->group[slot].visits > visits);
    fx_close(&f);
    fx_remove("cg");
}

int main(void)
{
    fx_begin();
    the_floor_is_the_reads_of_a_sweep();
    what_was_read_is_of_the_right_group();
    a_pod_may_vanish_in_the_middle();
    a_pod_without_its_directory_in_one_hierarchy();
    what_was_swept_ahead_is_not_owed_by_others();
    return check_done("test_cgroups_sweep");
}

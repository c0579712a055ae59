/*
 * Tests of the kubepods tree, made of directories: discovery under every name that the kubelet uses, creation
 * and removal of groups, and recovery after lost events.
 *
 * inotify is the kernel's own. Difference to cgroupfs: here every write to a file notifies.
 */
#include <sys/inotify.h>

#include "check.h"
#include "fixture.h"

#define UID "11111111-2222-3333-4444-555555555555"
#define UID_2 "22222222-2222-3333-4444-555555555555"
#define UID_SYSTEMD "11111111_2222_3333_4444_555555555555"
#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define DEEP "a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/q/r/s/t/u/v/w/x/y/z" /* as slices the path is too long */
#define POD "kubepods/burstable/pod" UID
#define PODS "kubepods/pod%08d-2222-3333-4444-555555555555"
#define MM "sys/kernel/mm/hugepages/hugepages-2048kB"

static const struct dh_wake wakes[] = {
    { .field = DH_GROUP_SET, .mode = DH_WAKE_CHANGE },
    { .field = DH_GROUP_HT_EVENTS, .mode = DH_WAKE_CHANGE },
};

static void v2_make(const char *at)
{
    fx_write("populated 1\nfrozen 0\n", "%s/cgroup.events", at);
    fx_write("low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\noom_group_kill 0\n", "%s/memory.events", at);
    fx_write("usage_usec 9\nuser_usec 9\nsystem_usec 0\nnr_periods 30\nnr_throttled 3\nthrottled_usec 500\n",
             "%s/cpu.stat", at);
    fx_write("8388608\n", "%s/hugetlb.2MB.max", at);
    fx_write("9223372036854771712\n", "%s/hugetlb.2MB.rsvd.max", at);
    fx_write("max 0\n", "%s/hugetlb.2MB.events", at);
}

static void machine_make(void)
{
    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("64\n", MM "/nr_hugepages");
    fx_write("0\n", MM "/nr_overcommit_hugepages");
    fx_write("cpu memory hugetlb\n", "cg/cgroup.controllers");
}

static void machine_clear(void)
{
    fx_remove("cg");
    machine_make();
}

static struct fx machine(uint32_t group_max, const char *kubelet_root)
{
    struct dh_options o = fx_options();

    o.group_max = group_max;
    return fx_open(&o, kubelet_root, wakes, 2);
}

static struct fx running(void)
{
    struct fx f = machine(4096, "/");

    fx_pass(&f);
    fx_woken(&f);
    return f;
}

static uint32_t state_of(const struct fx *f)
{
    return f->head->source[DH_SOURCE_CGROUPS].state;
}

/* ---- hierarchies and names ---- */

static void test_v2_alone_reads_every_file(void)
{
    const struct dh_group *g;
    struct fx f;

    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    f = running();
    CHECK_INT(fx_group_count(&f), 2);
    CHECK_INT(state_of(&f), DH_STATE_OK);
    CHECK_INT(fx_group(&f, UID, "")->kind, DH_GROUP_POD);
    g = fx_group(&f, UID, ID);
    CHECK_INT(g->kind, DH_GROUP_CONTAINER);
    CHECK_U64(g->populated, 1);
    CHECK(HAS(g->valid, DH_GROUP_FROZEN) && g->frozen == 0);
    CHECK_U64(g->mem_high, 1);
    CHECK_U64(g->mem_max, 2);
    CHECK_U64(g->mem_oom, 3);
    CHECK_U64(g->mem_oom_kill, 4);
    CHECK(!HAS(g->seen, DH_GROUP_MEM_FAILCNT));
    CHECK_U64(g->cpu_periods, 30);
    CHECK_U64(g->cpu_throttled, 3);
    CHECK_INT(g->sizes, 1);
    CHECK_U64(g->hugetlb[0].size_kib, 2048);
    CHECK_U64(g->hugetlb[0].max, 8388608);
    CHECK_U64(g->hugetlb[0].rsvd_max, UINT64_MAX); /* this value means no limit */
    CHECK(HAS(g->hugetlb[0].valid, DH_GROUP_HT_EVENTS) && g->hugetlb[0].events == 0);
    CHECK_U64(f.head->watches, 3 + 1 + 3 + 1); /* three directories; the pod's directory and three files; one
                                                  file of the container */
    CHECK_U64(f.head->unwatched, 0);
    fx_close(&f);
    machine_clear();
}

static void v1_make(const char *memory, const char *cpu, const char *hugetlb, const char *group)
{
    fx_write("7\n", "cg/%s/%s/memory.failcnt", memory, group);
    fx_write("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", "cg/%s/%s/memory.oom_control", memory, group);
    fx_write("nr_periods 21\nnr_throttled 20\nthrottled_time 1240000000\n", "cg/%s/%s/cpu.stat", cpu, group);
    fx_write("9\n", "cg/%s/%s/hugetlb.2MB.failcnt", hugetlb, group);
    fx_write("4194304\n", "cg/%s/%s/hugetlb.2MB.limit_in_bytes", hugetlb, group);
}

static void v1_check(const struct fx *f)
{
    const struct dh_group *g = fx_group(f, UID, ID);

    CHECK_INT(fx_group_count(f), 2); /* one record, however many hierarchies */
    CHECK_U64(g->mem_failcnt, 7);
    CHECK_U64(g->mem_oom_kill, 5);
    CHECK(!HAS(g->seen, DH_GROUP_MEM_OOM) && !HAS(g->seen, DH_GROUP_POPULATED));
    CHECK_U64(g->cpu_throttled, 20);
    CHECK_U64(g->hugetlb[0].events, 9);
    CHECK_U64(g->hugetlb[0].max, 4194304);
    CHECK(!HAS(g->hugetlb[0].seen, DH_GROUP_HT_RSVD_MAX));
    CHECK_INT(state_of(f), DH_STATE_OK);
}

static void test_v1_hierarchies_share_one_record(void)
{
    struct fx f;

    fx_remove("cg");
    v1_make("memory", "cpu", "hugetlb", POD "/" ID);
    f = running();
    v1_check(&f);
    fx_close(&f);
    machine_clear();
}

static void test_v1_hierarchy_mounted_later_is_found_at_a_resync(void)
{
    struct fx f;

    fx_remove("cg");
    v1_make("memory", "cpu", "later", POD "/" ID);
    f = running();
    CHECK_U64(fx_group(&f, UID, ID)->mem_failcnt, 7);
    CHECK_U64(fx_group(&f, UID, ID)->hugetlb[0].seen, 0);
    v1_make("memory", "cpu", "hugetlb", POD "/" ID);
    fx_resync(&f);
    v1_check(&f);
    CHECK_INT(f.s->cgroups->hiers, 3);
    fx_resync(&f);
    CHECK_INT(f.s->cgroups->hiers, 3);
    fx_close(&f);
    machine_clear();
}

static void test_v1_controllers_mounted_together_are_read_once(void)
{
    struct fx f;

    fx_remove("cg");
    v1_make("cpu,cpuacct", "cpu,cpuacct", "cpu,cpuacct", POD "/" ID);
    fx_symlink("cpu,cpuacct", "cg/cpu");
    fx_symlink("cpu,cpuacct", "cg/memory");
    fx_symlink("cpu,cpuacct", "cg/hugetlb");
    f = running();
    v1_check(&f);
    CHECK_U64(f.head->watches, 3 + 1);
    fx_close(&f);

    fx_remove("cg/cpu"); /* a host without the links */
    fx_remove("cg/memory");
    fx_remove("cg/hugetlb");
    f = running();
    CHECK_U64(fx_group(&f, UID, ID)->cpu_periods, 21);
    CHECK(!HAS(fx_group(&f, UID, ID)->seen, DH_GROUP_MEM_FAILCNT));
    fx_close(&f);
    machine_clear();
}

/* An additional hierarchy cannot be opened: the others are read, and the source fails. */
static void test_hierarchy_unopenable_fails_the_source(void)
{
    struct fx f;

    fx_remove("cg");
    v1_make("memory", "elsewhere", "hugetlb", POD "/" ID);
    fx_symlink("cpu", "cg/cpu"); /* to itself: ELOOP */
    f = running();
    CHECK_INT(state_of(&f), DH_STATE_FAILING);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err, ELOOP);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err_field, DH_CGROUPFS);
    CHECK_U64(fx_group(&f, UID, ID)->mem_failcnt, 7);
    CHECK(!HAS(fx_group(&f, UID, ID)->seen, DH_GROUP_CPU_PERIODS));
    fx_symlink("elsewhere", "cg/cpu");
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    v1_check(&f);
    fx_close(&f);
    machine_clear();
}

static void test_v2_next_to_v1_supplies_the_missing_controllers(void)
{
    const struct dh_group *g;
    struct fx f;

    fx_remove("cg");
    fx_write("7\n", "cg/memory/" POD "/memory.failcnt");
    fx_write("nr_periods 21\nnr_throttled 20\nthrottled_time 1240000000\n", "cg/cpu/" POD "/cpu.stat");
    fx_write("hugetlb\n", "cg/unified/cgroup.controllers");
    v2_make("cg/unified/" POD);
    f = running();
    g = fx_group(&f, UID, "");
    CHECK_INT(fx_group_count(&f), 1);
    CHECK_U64(g->mem_failcnt, 7);
    CHECK(!HAS(g->seen, DH_GROUP_MEM_OOM)); /* not read from v2, which lacks the controller */
    CHECK_U64(g->cpu_throttled, 20);
    CHECK_U64(g->populated, 1);
    CHECK_U64(g->hugetlb[0].max, 8388608);
    fx_close(&f);
    machine_clear();
}

/* In a hierarchy that a group left, its values are absent, and no failure. */
static void test_group_may_leave_one_hierarchy_and_return(void)
{
    const struct dh_group *g;
    uint64_t watches;
    struct fx f;

    fx_remove("cg");
    fx_write("7\n", "cg/memory/" POD "/memory.failcnt");
    fx_write("hugetlb\n", "cg/unified/cgroup.controllers");
    v2_make("cg/unified/" POD);
    f = running();
    watches = f.head->watches;
    fx_remove("cg/unified/" POD);
    fx_events(&f);
    g = fx_group(&f, UID, "");
    CHECK(g->id && HAS(g->valid, DH_GROUP_MEM_FAILCNT));
    CHECK(!HAS(g->seen, DH_GROUP_POPULATED) && !HAS(g->hugetlb[0].seen, DH_GROUP_HT_MAX));
    CHECK_INT(state_of(&f), DH_STATE_OK);
    CHECK(f.head->watches < watches);
    v2_make("cg/unified/" POD);
    fx_events(&f);
    g = fx_group(&f, UID, "");
    CHECK_U64(g->hugetlb[0].max, 8388608);
    CHECK_U64(f.head->watches, watches);
    fx_write("max 1\n", "cg/unified/" POD "/hugetlb.2MB.events");
    fx_events(&f); /* its files are watched again */
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 1);
    fx_remove("cg/unified/" POD);
    fx_remove("cg/memory/" POD);
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 0);
    fx_close(&f);
    machine_clear();
}

static void test_kubelet_cgroup_names_are_all_recognized(void)
{
    static const struct {
        const char *root, *pod, *container;
    } rows[] = {
        { "/", "kubepods/pod" UID, ID },
        { "/", "kubepods/burstable/pod" UID, ID },
        { "", "kubepods/besteffort/pod" UID, ID },
        { "/", "kubepods.slice/kubepods-pod" UID_SYSTEMD ".slice", "cri-containerd-" ID ".scope" },
        { "/", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" UID_SYSTEMD ".slice",
          "crio-" ID ".scope" },
        { "/", "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" UID_SYSTEMD ".slice",
          "docker-" ID ".scope" },
        { "/kubelet", "kubelet/kubepods/burstable/pod" UID, ID },
        { "kubelet/", "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
                      "kubelet-kubepods-burstable-pod" UID_SYSTEMD ".slice",
          "cri-containerd-" ID ".scope" },
        { "/a/b", "a/b/kubepods/pod" UID, ID },
        { "//a//b/", "a.slice/a-b.slice/a-b-kubepods.slice/a-b-kubepods-pod" UID_SYSTEMD ".slice",
          "cri-containerd-" ID ".scope" },
        { "/my-root", "my-root/kubepods/pod" UID, ID },
        /* systemd nests at each dash, so the kubelet replaces dashes in a name by underscores */
        { "/my-root/x-y", "my_root.slice/my_root-x_y.slice/my_root-x_y-kubepods.slice/"
                          "my_root-x_y-kubepods-burstable.slice/"
                          "my_root-x_y-kubepods-burstable-pod" UID_SYSTEMD ".slice",
          "cri-containerd-" ID ".scope" },
        { "/a-kubelet-root-of-thirty-two-bytes",
          "a_kubelet_root_of_thirty_two_bytes.slice/a_kubelet_root_of_thirty_two_bytes-kubepods.slice/"
          "a_kubelet_root_of_thirty_two_bytes-kubepods-besteffort.slice/"
          "a_kubelet_root_of_thirty_two_bytes-kubepods-besteffort-pod" UID_SYSTEMD ".slice",
          "cri-containerd-" ID ".scope" },
        { "/" DEEP "/" DEEP "/" DEEP, DEEP "/" DEEP "/" DEEP "/kubepods/pod" UID, ID },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        char pod[FX_PATH / 2], container[FX_PATH];
        struct fx f;

        check_row = rows[i].pod;
        snprintf(pod, sizeof(pod), "cg/%s", rows[i].pod);
        snprintf(container, sizeof(container), "%s/%s", pod, rows[i].container);
        v2_make(pod);
        v2_make(container);
        f = machine(16, rows[i].root);
        fx_pass(&f);
        CHECK_INT(fx_group_count(&f), 2);
        CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 8388608);
        CHECK_U64(fx_group(&f, UID, ID)->hugetlb[0].max, 8388608);
        CHECK_INT(state_of(&f), DH_STATE_OK);
        fx_close(&f);
        machine_clear();

        f = machine(16, rows[i].root); /* the same when everything is created later */
        fx_pass(&f);
        CHECK_INT(fx_group_count(&f), 0);
        v2_make(pod);
        v2_make(container);
        fx_events(&f);
        fx_elapse(&f, DH_NS);
        fx_pass(&f);
        CHECK_INT(fx_group_count(&f), 2);
        fx_close(&f);
        machine_clear();
    }
    check_row = "";
}

/* A group that is too deep is not read; the source reports it. */
static void test_group_path_too_long_fails_the_source(void)
{
    char root[181];
    struct fx f;

    memset(root, 'r', 180);
    root[180] = '\0';
    v2_make("cg/kubepods/pod" UID);
    fx_dir("cg/%s.slice/%s-kubepods.slice/%s-kubepods-burstable.slice", root, root, root);
    f = machine(16, root);
    fx_pass(&f);
    CHECK_INT(state_of(&f), DH_STATE_FAILING);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err, DH_EFULL);
    CHECK_U64(f.head->source[DH_SOURCE_CGROUPS].failures, 1);
    CHECK_INT(fx_group_count(&f), 0);
    fx_close(&f);
    machine_clear();
}

static void test_groups_outside_kubepods_are_ignored(void)
{
    struct fx f;

    v2_make("cg/system.slice/docker.service");
    v2_make("cg/kubepods/burstable/pod" UID "/crio-conmon-" ID);
    v2_make("cg/kubepods/init.scope");
    v2_make("cg/other/kubepods/pod" UID);
    f = running();
    CHECK_INT(fx_group_count(&f), 1);
    CHECK(fx_group(&f, UID, "")->id);
    fx_close(&f);
    machine_clear();
}

/* ---- creation and removal ---- */

static void test_kubepods_created_later_is_found(void)
{
    struct fx f = running();

    CHECK_INT(state_of(&f), DH_STATE_OK);
    v2_make("cg/kubepods/burstable");
    fx_events(&f);
    CHECK(!fx_woken(&f));
    v2_make("cg/" POD);
    fx_events(&f);
    CHECK(fx_woken(&f));
    v2_make("cg/" POD "/" ID);
    fx_events(&f);
    CHECK(fx_woken(&f));
    CHECK_INT(fx_group_count(&f), 2);
    fx_remove("cg/kubepods");
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 0);
    CHECK_INT(f.head->groups, 0);
    CHECK_U64(f.head->watches, 1);
    v2_make("cg/" POD "/" ID); /* the node was drained and is back */
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 2);
    fx_close(&f);
    machine_clear();
}

/* kubepods, a QoS class or a pod appears during a lack of descriptors. */
static void test_directory_that_cannot_be_listed_is_listed_again(void)
{
    static const char *const existing[] = { "cg", "cg/kubepods", "cg/kubepods/burstable" };
    struct fx f;

    for (int i = 0; i < 3; i++) {
        check_row = existing[i];
        fx_dir("%s", existing[i]);
        f = running();
        v2_make("cg/" POD "/" ID);
        v2_make("cg/" POD);
        fx_exhaust_descriptors(true);
        fx_events(&f);
        fx_elapse(&f, 2 * DH_NS);
        fx_pass(&f);
        CHECK_INT(state_of(&f), DH_STATE_FAILING);
        CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err, EMFILE);
        CHECK(f.s->cgroups->unlisted);
        fx_exhaust_descriptors(false);
        fx_elapse(&f, 2 * DH_NS);
        fx_pass(&f);
        CHECK_INT(fx_group_count(&f), 2);
        CHECK_INT(f.s->cgroups->unlisted, 0);
        dh_sampler_sweep(f.s);
        fx_pass(&f);
        CHECK_INT(state_of(&f), DH_STATE_OK);
        fx_close(&f);
        machine_clear();
    }
    check_row = "";
}

/* What cannot be listed and is removed then fails no more. */
static void test_directory_that_cannot_be_listed_may_be_removed(void)
{
    static const char *const made[] = { "cg/kubepods/besteffort", "cg/" POD };
    struct fx f;

    for (int i = 0; i < 2; i++) {
        check_row = made[i];
        fx_dir("cg/kubepods/burstable");
        f = running();
        fx_dir("%s", made[i]);
        fx_exhaust_descriptors(true);
        fx_events(&f);
        fx_exhaust_descriptors(false);
        CHECK_INT(state_of(&f), DH_STATE_FAILING);
        CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err, EMFILE);
        fx_remove("%s", made[i]);
        fx_events(&f);
        CHECK_INT(fx_group_count(&f), 0);
        CHECK_INT(state_of(&f), DH_STATE_OK);
        fx_close(&f);
        machine_clear();
    }
    check_row = "";
}

static void test_group_recreated_under_its_name_gets_a_new_id(void)
{
    struct fx f;
    uint32_t pod, container;

    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    f = running();
    pod = fx_group(&f, UID, "")->id;
    container = fx_group(&f, UID, ID)->id;
    fx_remove("cg/" POD "/" ID);
    v2_make("cg/" POD "/" ID);
    fx_events(&f); /* both events are in one batch */
    CHECK(fx_group(&f, UID, ID)->id > container);
    CHECK_INT(fx_group(&f, UID, "")->id, pod);
    fx_remove("cg/" POD);
    v2_make("cg/" POD);
    fx_events(&f);
    CHECK(fx_group(&f, UID, "")->id > pod);
    CHECK_INT(fx_group_count(&f), 1);
    fx_write("max 3\n", "cg/" POD "/hugetlb.2MB.events");
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 3);
    fx_close(&f);
    machine_clear();
}

/* A read finds the removal before the event is handled: ENOENT means removed, and is no failure. */
static void test_group_removed_during_a_read_is_no_failure(void)
{
    struct fx f;

    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    f = running();
    fx_remove("cg/" POD);
    CHECK(dh_sampler_sweep(f.s) >= 1);
    fx_read(&f);
    CHECK_INT(fx_group_count(&f), 0);
    CHECK_INT(state_of(&f), DH_STATE_OK);
    CHECK_U64(f.head->source[DH_SOURCE_CGROUPS].failures, 0);
    CHECK(fx_woken(&f));
    fx_events(&f);
    CHECK_U64(f.head->watches, 3);
    fx_close(&f);
    machine_clear();
}

static void pods_make(int pods, int containers)
{
    for (int p = 0; p < pods; p++) {
        fx_write("populated 1\nfrozen 0\n", "cg/" PODS "/cgroup.events", p);
        for (int c = 0; c < containers; c++)
            fx_write("populated 1\nfrozen 0\n", "cg/" PODS "/%064d/cgroup.events", p, c);
    }
}

static void test_thousand_groups_created_and_removed_at_once(void)
{
    uint32_t lost = 0;
    struct fx f = running();

    pods_make(250, 3);
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 1000);
    for (uint32_t i = 0; i < f.head->groups; i++)
        lost += !HAS(fx_groups(&f)[i].valid, DH_GROUP_POPULATED);
    CHECK_INT(lost, 0);
    CHECK_U64(f.head->overflows, 0);
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    fx_remove("cg/kubepods");
    for (int i = 0; i < 4; i++) /* each call handles a limited number of events */
        fx_events(&f);
    CHECK_INT(fx_group_count(&f), 0);
    CHECK_INT(f.head->groups, 0);
    CHECK_U64(f.head->watches, 1);
    CHECK_INT(f.s->cgroups->by_path.used, 0);
    fx_close(&f);
    machine_clear();
}

static void test_full_table_counts_dropped_groups_and_refills(void)
{
    struct fx f = machine(4, "/");

    fx_pass(&f);
    pods_make(7, 0);
    fx_events(&f);
    fx_elapse(&f, DH_NS);
    fx_pass(&f); /* groups both listed and reported by events are counted once */
    CHECK_INT(fx_group_count(&f), 4);
    CHECK_INT(f.head->dropped, 3);
    CHECK_INT(state_of(&f), DH_STATE_OK); /* group_max is a configured limit, not a failure */
    fx_resync(&f);
    fx_resync(&f);
    CHECK_INT(f.head->dropped, 3); /* groups, not attempts */
    fx_remove("cg/kubepods/pod%s", fx_groups(&f)[1].uid);
    fx_remove("cg/kubepods/pod%s", fx_groups(&f)[2].uid);
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 2);
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    CHECK_INT(fx_group_count(&f), 4); /* groups without room are found when there is room */
    CHECK_INT(f.head->dropped, 1);
    fx_remove("cg/kubepods");
    fx_events(&f);
    CHECK_INT(f.head->dropped, 0);
    CHECK_INT(fx_group_count(&f), 0);
    fx_close(&f);
    machine_clear();
}

/*
 * Two hierarchies contain the same groups: a container without room counts once, and not after its removal.
 */
static void test_containers_without_room_are_counted_once(void)
{
    struct fx f;

    fx_remove("cg");
    for (int c = 0; c < 4; c++) {
        fx_write("7\n", "cg/memory/" POD "/%064d/memory.failcnt", c);
        fx_write("nr_periods 21\n", "cg/cpu/" POD "/%064d/cpu.stat", c);
    }
    f = machine(3, "/");
    fx_pass(&f);
    CHECK_INT(fx_group_count(&f), 3);
    CHECK_INT(f.head->dropped, 2);
    for (int c = 0; c < 4; c++) { /* containers with room and containers without */
        fx_remove("cg/memory/" POD "/%064d", c);
        fx_remove("cg/cpu/" POD "/%064d", c);
        fx_events(&f);
        fx_elapse(&f, DH_NS);
        fx_pass(&f);
        CHECK_INT(fx_group_count(&f), c < 2 ? 3 : 4 - c);
        CHECK_INT(f.head->dropped, c < 2 ? 1 - c : 0);
        for (uint32_t i = 0; i < f.head->groups; i++) /* read in both hierarchies, also the groups added
                                                         later */
            CHECK(!*fx_groups(&f)[i].name || (HAS(fx_groups(&f)[i].valid, DH_GROUP_MEM_FAILCNT) &&
                                              HAS(fx_groups(&f)[i].valid, DH_GROUP_CPU_PERIODS)));
    }
    fx_close(&f);
    machine_clear();
}

/* Files without a watch are read in the sweep, and directories without a watch are listed in it. */
static void test_watches_beyond_the_limit_are_swept_instead(void)
{
    char uid[DH_UID_LEN];
    uint64_t unwatched, most;
    struct fx f;
    int pods = 15;

    for (int p = 0; p < pods; p++) {
        char at[FX_PATH];

        snprintf(at, sizeof(at), "cg/" PODS, p);
        v2_make(at);
    }
    f = machine(64, "/");
    most = f.s->cgroups->by_wd.mask - f.s->cgroups->by_wd.mask / 4;
    for (uint64_t k = 1; k + 26 <= most; k++) /* room for 26 */
        dh_map_put(&f.s->cgroups->by_wd, k << 40, 0);
    fx_pass(&f);
    unwatched = f.head->unwatched;
    CHECK_INT(fx_group_count(&f), pods);
    CHECK_U64(f.head->watches, most);
    CHECK_U64(unwatched, (uint64_t)(2 + 4 * pods) - 26);
    fx_resync(&f); /* requested again, refused again, and not counted twice */
    CHECK_U64(f.head->unwatched, unwatched);

    for (int p = 0; p < pods; p++) {
        fx_write("max 2\n", "cg/" PODS "/hugetlb.2MB.events", p);
        fx_write("populated 1\nfrozen 0\n", "cg/" PODS "/%064d/cgroup.events", p, p);
    }
    fx_events(&f);
    dh_sampler_sweep(f.s);
    fx_read(&f);
    for (int p = 0; p < pods; p++) {
        snprintf(uid, sizeof(uid), "%08d-2222-3333-4444-555555555555", p);
        CHECK_U64(fx_group(&f, uid, "")->hugetlb[0].events, 2);
    }
    CHECK_INT(fx_group_count(&f), 2 * pods);
    fx_remove("cg/kubepods");
    fx_events(&f);
    dh_sampler_sweep(f.s);
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 0);
    CHECK(f.head->unwatched <= 1); /* kubepods' own directory, until it is checked again */
    fx_close(&f);
    machine_clear();
}

/* ---- events, sweep, resync ---- */

static void test_pod_event_reads_its_containers(void)
{
    struct fx f;
    uint64_t reads;

    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    f = running();
    fx_write("max 1\n", "cg/" POD "/" ID "/hugetlb.2MB.events"); /* not watched itself */
    fx_write("16777216\n", "cg/" POD "/" ID "/hugetlb.2MB.max");
    fx_events(&f);
    CHECK(!fx_woken(&f));
    fx_write("max 1\n", "cg/" POD "/hugetlb.2MB.events"); /* as the kernel does for every ancestor */
    reads = f.s->reads;
    fx_events(&f);
    CHECK(fx_woken(&f));
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 1);
    CHECK_U64(fx_group(&f, UID, ID)->hugetlb[0].events, 1);
    CHECK_U64(fx_group(&f, UID, ID)->hugetlb[0].max, 16777216); /* evidence: the limit that was hit */
    CHECK_U64(f.s->reads - reads, 2 * 3);
    fx_close(&f);
    machine_clear();
}

static int access_watch(int fd, const char *name)
{
    char path[FX_PATH];

    snprintf(path, sizeof(path), "%s/%s", fx_root, name);
    return inotify_add_watch(fd, path, IN_ACCESS);
}

/* Check that the queued accesses are of @first, then of @second; either may be read several times. */
static void accesses_check(int fd, int first, int second)
{
    _Alignas(struct inotify_event) char buf[4096];
    ssize_t n = read(fd, buf, sizeof(buf)), at = 0;
    int changes = 0, last = first;

    for (; at < n; at += (ssize_t)sizeof(struct inotify_event)) {
        int wd = ((const struct inotify_event *)(const void *)(buf + at))->wd;

        changes += wd != last;
        last = wd;
    }
    CHECK_INT(changes, 1);
    CHECK_INT(last, second);
}

/*
 * The kernel counts a kill for the container before it counts it for the pod. So a kill that was read of the
 * pod is also read of its container.
 */
static void test_pod_is_read_before_its_containers(void)
{
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC), pod, container;
    struct fx f;

    CHECK(fd >= 0);
    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    f = running();
    pod = access_watch(fd, "cg/" POD "/memory.events");
    container = access_watch(fd, "cg/" POD "/" ID "/memory.events");
    fx_write("max 1\noom_kill 5\n", "cg/" POD "/memory.events");
    fx_events(&f);
    accesses_check(fd, pod, container);
    f.s->cgroups->rescan = true;
    fx_pass(&f);
    accesses_check(fd, pod, container);
    close(fd);
    fx_close(&f);
    machine_clear();
}

static void test_limits_are_read_at_resync(void)
{
    struct fx f;

    v2_make("cg/" POD);
    f = running();
    fx_elapse(&f, DH_NS);
    fx_pass(&f); /* its second read */
    fx_write("4194304\n", "cg/" POD "/hugetlb.2MB.max");
    fx_write("nr_periods 31\nnr_throttled 3\n", "cg/" POD "/cpu.stat");
    dh_sampler_sweep(f.s);
    fx_read(&f);
    CHECK_U64(fx_group(&f, UID, "")->cpu_periods, 31);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 8388608);
    f.s->cgroups->rescan = true;
    fx_pass(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 4194304);
    CHECK(!fx_woken(&f)); /* no rule reads either */
    fx_close(&f);
    machine_clear();
}

/* A runtime writes the limits after it created the group. */
static void test_new_group_is_read_again_after_a_second(void)
{
    struct fx f = running();

    v2_make("cg/" POD);
    fx_events(&f);
    fx_write("4194304\n", "cg/" POD "/hugetlb.2MB.max");
    fx_pass(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 8388608);
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 4194304);
    fx_close(&f);
    machine_clear();
}

/*
 * The kernel notifies a pod about memory and hugetlb events of its containers, but not about a frozen
 * container.
 */
static void test_frozen_container_is_found_by_its_own_watch(void)
{
    struct fx f;

    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    f = running();
    fx_write("populated 1\nfrozen 1\n", "cg/" POD "/" ID "/cgroup.events");
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, ID)->frozen, 1);
    fx_close(&f);
    machine_clear();
}

/* For any period and sweep time, each group is swept once per sweep and fully read once per resync. */
static void test_sweep_reads_every_group_once(void)
{
    static const struct {
        uint64_t period_ns, sweep_ns;
    } rows[] = { { DH_NS, 10 * DH_NS }, { DH_NS / 100, DH_NS }, { DH_NS, DH_NS }, { 7 * DH_NS, 100 * DH_NS },
                 { 3600 * DH_NS, 36000 * DH_NS } };

    pods_make(60, 1);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        uint64_t passes = rows[i].sweep_ns / rows[i].period_ns, most = 0, before, slice_ns;
        struct dh_options o = fx_options();
        uint32_t fewest = UINT32_MAX, most_often = 0;
        struct fx f;

        o.period_ns = rows[i].period_ns;
        o.sweep_ns = rows[i].sweep_ns;
        o.resync_ns = 1000000 * DH_NS;
        f = fx_open(&o, "/", wakes, 2);
        fx_pass(&f);
        CHECK_INT(fx_group_count(&f), 120);
        for (uint64_t p = 0; p < 10 * passes; p++) {
            uint32_t sweeps = 0;

            before = 0;
            for (uint32_t k = 0; k < 120; k++)
                before += f.s->cgroups->group[k].sweeps;
            fx_pass(&f);
            for (uint32_t k = 0; k < 120; k++)
                sweeps += f.s->cgroups->group[k].sweeps;
            most = sweeps - before > most ? sweeps - before : most;
        }
        for (uint32_t k = 0; k < 120; k++) {
            uint32_t sweeps = f.s->cgroups->group[k].sweeps;

            fewest = sweeps < fewest ? sweeps : fewest;
            most_often = sweeps > most_often ? sweeps : most_often;
        }
        CHECK(fewest >= 9 && most_often <= 10);
        slice_ns = o.sweep_ns / 10 < DH_NS ? o.sweep_ns / 10 : DH_NS;
        slice_ns = slice_ns < o.period_ns ? o.period_ns : slice_ns;
        CHECK(most <= 120 * slice_ns / o.sweep_ns + 2); /* evenly distributed, in whole pods of two groups */
        fx_close(&f);
    }
    machine_clear();
}

static void test_page_sizes_without_pages_are_not_swept(void)
{
    struct fx f;
    uint64_t with, without;

    fx_remove("cg");
    v1_make("memory", "cpu", "hugetlb", POD);
    f = running();
    with = (uint64_t)dh_sampler_lower_bound(f.s, 1);
    fx_write("0\n", MM "/nr_hugepages");
    fx_pass(&f);
    without = (uint64_t)dh_sampler_lower_bound(f.s, 1);
    CHECK_U64(with - without, 1); /* failcnt */
    fx_write("1\n", MM "/nr_overcommit_hugepages"); /* there may be pages at any time */
    fx_pass(&f);
    CHECK_U64((uint64_t)dh_sampler_lower_bound(f.s, 1), with);
    fx_close(&f);
    machine_clear();
}

/* The pools are unknown at first: sysfs is mounted after cgroupfs, or a listing fails. */
static void test_page_size_found_later_is_read_in_existing_groups(void)
{
    const struct dh_group *g;
    struct fx f;

    fx_remove("sys");
    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    f = running();
    CHECK_INT(fx_group(&f, UID, ID)->sizes, 0);
    machine_make();
    fx_elapse(&f, 10 * DH_NS);
    fx_pass(&f);
    CHECK(fx_woken(&f));
    g = fx_group(&f, UID, ID);
    CHECK_INT(g->sizes, 1);
    CHECK_U64(g->hugetlb[0].size_kib, 2048);
    CHECK_U64(g->hugetlb[0].max, 8388608);
    CHECK(HAS(g->hugetlb[0].valid, DH_GROUP_HT_EVENTS) && !g->hugetlb[0].events);
    fx_write("max 1\n", "cg/" POD "/hugetlb.2MB.events");
    fx_write("max 1\n", "cg/" POD "/" ID "/hugetlb.2MB.events");
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 1);
    CHECK_U64(fx_group(&f, UID, ID)->hugetlb[0].events, 1);
    fx_write("0\n", "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages");
    v2_make("cg/kubepods/pod" UID_2);
    fx_write("max 3\n", "cg/kubepods/pod" UID_2 "/hugetlb.1GB.events");
    fx_resync(&f);
    CHECK_INT(fx_group(&f, UID, ID)->sizes, 2);
    g = fx_group(&f, UID_2, "");
    CHECK_U64(g->hugetlb[0].max, 8388608);
    CHECK_U64(g->hugetlb[1].events, 3);
    CHECK_INT(state_of(&f), DH_STATE_OK);
    fx_close(&f);
    fx_remove("sys");
    machine_clear();
}

static void test_missing_file_of_a_live_group_is_unreadable(void)
{
    const struct dh_group *g;
    struct fx f;

    v2_make("cg/" POD);
    f = running();
    fx_remove("cg/" POD "/cpu.stat");
    dh_sampler_sweep(f.s); /* when a group is removed, its files go first: one failed read is no failure */
    fx_read(&f);
    CHECK(HAS(fx_group(&f, UID, "")->valid, DH_GROUP_CPU_PERIODS));
    CHECK_U64(f.head->source[DH_SOURCE_CGROUPS].failures, 0);
    dh_sampler_sweep(f.s);
    fx_pass(&f);
    g = fx_group(&f, UID, "");
    CHECK(g->id);
    CHECK(!HAS(g->valid, DH_GROUP_CPU_PERIODS) && HAS(g->seen, DH_GROUP_CPU_PERIODS));
    CHECK_U64(g->cpu_periods, 0);
    CHECK_INT(g->err, ENOENT);
    CHECK_INT(state_of(&f), DH_STATE_FAILING);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].err_field, DH_GROUP_CPU_PERIODS);
    CHECK(fx_woken(&f));
    fx_symlink("/proc/self/mem", "cg/" POD "/cpu.stat");
    dh_sampler_sweep(f.s);
    fx_pass(&f);
    CHECK_INT(fx_group(&f, UID, "")->err, EIO); /* the current error */
    CHECK(!fx_woken(&f));
    fx_remove("cg/" POD "/cpu.stat");
    fx_write("nr_periods 30\nnr_throttled 3\n", "cg/" POD "/cpu.stat");
    dh_sampler_sweep(f.s);
    fx_pass(&f);
    CHECK(HAS(fx_group(&f, UID, "")->valid, DH_GROUP_CPU_PERIODS));
    CHECK_INT(state_of(&f), DH_STATE_OK);
    CHECK(fx_woken(&f));

    fx_remove("cg/" POD "/cpu.stat"); /* the failure of a removed group is gone too */
    fx_fail_removed(&f);
    dh_sampler_sweep(f.s);
    dh_sampler_sweep(f.s);
    fx_pass(&f);
    CHECK_INT(state_of(&f), DH_STATE_FAILING);
    fx_remove("cg/" POD);
    fx_events(&f);
    CHECK_INT(state_of(&f), DH_STATE_OK);
    fx_close(&f);
    machine_clear();
}

/* A pod without the hugetlb, cpu and cpuset controllers. */
static void pod_of_few_files_make(void)
{
    fx_write("populated 1\nfrozen 0\n", "cg/" POD "/cgroup.events");
    fx_write("low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\n", "cg/" POD "/memory.events");
    fx_write("4096\n", "cg/" POD "/memory.max");
    fx_write("usage_usec 9\nuser_usec 9\nsystem_usec 0\n", "cg/" POD "/cpu.stat");
}

static void few_files_check(const struct fx *f)
{
    const struct dh_group *g = fx_group(f, UID, "");

    CHECK_INT(state_of(f), DH_STATE_OK);
    CHECK(HAS(g->valid, DH_GROUP_POPULATED) && HAS(g->valid, DH_GROUP_MEM_OOM_KILL));
    CHECK_U64(g->mem_limit, 4096);
    CHECK(!HAS(g->seen, DH_GROUP_CPU_PERIODS) && !HAS(g->seen, DH_GROUP_CPUS));
    CHECK_U64(g->hugetlb[0].seen, 0);
}

/* A lack of descriptors says nothing of a file: what never existed is absent again afterwards. */
static void test_absent_files_are_absent_again_after_a_lack_of_descriptors(void)
{
    const struct dh_group *g;
    struct fx f;

    fx_dir("cg/kubepods/burstable");
    for (int lasts = 0; lasts < 2; lasts++) {
        f = running();
        pod_of_few_files_make();
        fx_exhaust_descriptors(true);
        fx_events(&f);
        CHECK_INT(state_of(&f), DH_STATE_FAILING);
        g = fx_group(&f, UID, "");
        CHECK(HAS(g->seen, DH_GROUP_CPUS) && !HAS(g->valid, DH_GROUP_CPUS));
        CHECK_INT(g->err, EMFILE);
        if (!lasts)
            fx_exhaust_descriptors(false);
        fx_elapse(&f, 2 * DH_NS);
        fx_pass(&f); /* reads the new group a second time */
        if (lasts) {
            CHECK_INT(state_of(&f), DH_STATE_FAILING);
            fx_exhaust_descriptors(false);
            dh_sampler_sweep(f.s);
            fx_elapse(&f, 2 * DH_NS);
            fx_pass(&f);
        }
        few_files_check(&f);
        fx_close(&f);
        fx_remove("cg/" POD);
    }
    machine_clear();
}

/* Limits and files with a notification are read again in the next sweep, not at the next resync. */
static void test_files_of_a_live_group_are_read_after_a_lack_of_descriptors(void)
{
    struct fx f;

    pod_of_few_files_make();
    f = running();
    few_files_check(&f);
    fx_exhaust_descriptors(true);
    fx_resync(&f);
    for (int i = 0; i < 10; i++)
        fx_pass(&f);
    fx_exhaust_descriptors(false);
    CHECK_INT(state_of(&f), DH_STATE_FAILING);
    CHECK(!HAS(fx_group(&f, UID, "")->valid, DH_GROUP_MEM_OOM_KILL));
    CHECK(!HAS(fx_group(&f, UID, "")->valid, DH_GROUP_MEM_LIMIT));
    dh_sampler_sweep(f.s);
    fx_elapse(&f, 2 * DH_NS);
    fx_pass(&f);
    few_files_check(&f);
    fx_close(&f);
    machine_clear();
}

/*
 * A controller that is disabled and enabled creates its files again; the old watch reports nothing for them.
 */
static void test_watched_file_recreated_is_watched_again(void)
{
    struct fx f;

    v2_make("cg/" POD);
    f = running();
    fx_remove("cg/" POD "/hugetlb.2MB.events");
    fx_write("max 1\n", "cg/" POD "/hugetlb.2MB.events");
    fx_events(&f);
    dh_sampler_sweep(f.s); /* not watched any more, so swept */
    fx_read(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 1);
    f.s->cgroups->rescan = true;
    fx_pass(&f);
    fx_write("max 2\n", "cg/" POD "/hugetlb.2MB.events");
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 2);
    fx_close(&f);
    machine_clear();
}

/* A stale watch must be dropped, or the pod's table would fill up. */
static void test_watched_file_may_be_recreated_often(void)
{
    uint64_t watches;
    struct fx f;

    v2_make("cg/" POD);
    f = running();
    watches = f.head->watches;
    for (int i = 0; i < 3 * DH_CG_WATCHES; i++) {
        fx_remove("cg/" POD "/hugetlb.2MB.events");
        fx_write("max 1\n", "cg/" POD "/hugetlb.2MB.events");
        if (i % 2)
            fx_events(&f); /* otherwise the new watch would be set before the end of the old one is handled */
        f.s->cgroups->rescan = true;
        fx_pass(&f);
        fx_events(&f);
        CHECK_U64(f.head->watches, watches);
        CHECK_U64(f.head->unwatched, 0);
        CHECK(f.s->cgroups->group[0].watches <= 4);
    }
    fx_write("max 2\n", "cg/" POD "/hugetlb.2MB.events");
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 2);
    fx_close(&f);
    machine_clear();
}

/* The timer must not starve: events and lost events take at most half a period at a time. */
static void test_event_storm_does_not_delay_the_pass(void)
{
    struct dh_options o = fx_options();
    int handled = 0;
    struct fx f;

    o.period_ns = DH_NS / 100;
    fx_dir("cg/kubepods");
    f = fx_open(&o, "/", NULL, 0);
    fx_pass(&f);
    pods_make(1500, 0);
    fx_events(&f);
    CHECK(fx_group_count(&f) > 0 && fx_group_count(&f) < 1500);
    while (fx_group_count(&f) < 1500 && handled++ < 1500)
        fx_events(&f);
    CHECK_INT(fx_group_count(&f), 1500);
    f.s->cgroups->rescan = true;
    fx_pass(&f);
    CHECK(f.s->cgroups->reread > 0);
    for (handled = 0; f.s->cgroups->reread && handled < 1500; handled++)
        fx_pass(&f);
    CHECK_U64(f.s->cgroups->reread, 0);
    CHECK_INT(fx_group_count(&f), 1500);
    fx_close(&f);
    machine_clear();
}

static long most_queued(void)
{
    char text[32] = "";
    int fd = open("/proc/sys/fs/inotify/max_queued_events", O_RDONLY | O_CLOEXEC);

    fx_must(fd >= 0 && read(fd, text, sizeof(text) - 1) > 0, "max_queued_events");
    close(fd);
    return atol(text);
}

/* More events than the kernel queues, followed by changes without an event. */
static void test_lost_events_cause_a_full_read(void)
{
    uint32_t id;
    struct fx f;
    int handled = 0;

    v2_make("cg/" POD);
    v2_make("cg/" POD "/" ID);
    v2_make("cg/kubepods/pod99999999-2222-3333-4444-555555555555");
    f = running();
    id = fx_group(&f, UID, "")->id;
    for (long i = most_queued() / 2; i >= 0; i--) { /* equal adjacent events in the queue are merged */
        fx_write("low 0\nhigh 1\nmax 2\noom 3\noom_kill 4\n", "cg/" POD "/memory.events");
        fx_write("populated 1\nfrozen 0\n", "cg/" POD "/cgroup.events");
    }
    fx_write("max 7\n", "cg/" POD "/hugetlb.2MB.events");
    fx_write("max 7\n", "cg/" POD "/" ID "/hugetlb.2MB.events");
    fx_remove("cg/kubepods/pod99999999-2222-3333-4444-555555555555");
    fx_remove("cg/kubepods/burstable");
    v2_make("cg/" POD);
    fx_write("max 7\n", "cg/" POD "/hugetlb.2MB.events");
    v2_make("cg/" POD "/second");
    v2_make("cg/kubepods/besteffort/pod88888888-2222-3333-4444-555555555555");
    while (!f.head->overflows && handled++ < 100)
        fx_events(&f);
    CHECK_U64(f.head->overflows, 1);
    fx_pass(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 7);
    CHECK(!fx_group(&f, UID, ID)->id);
    CHECK(!fx_group(&f, "99999999-2222-3333-4444-555555555555", "")->id);
    CHECK(fx_group(&f, "88888888-2222-3333-4444-555555555555", "")->id);
    CHECK(fx_group(&f, UID, "")->id >= id);

    fx_write("max 8\n", "cg/" POD "/hugetlb.2MB.events"); /* everything is watched again */
    v2_make("cg/kubepods/burstable/pod77777777-2222-3333-4444-555555555555");
    v2_make("cg/" POD "/" ID);
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].events, 8);
    CHECK(fx_group(&f, "77777777-2222-3333-4444-555555555555", "")->id);
    CHECK(fx_group(&f, UID, ID)->id);
    fx_close(&f);
    machine_clear();
}

/* The two lowest levels of the last root have no watched parent: they are searched for every second. */
static void test_directories_above_kubepods_may_be_recreated(void)
{
    static const struct { const char *root, *top, *kubepods; bool is_polled; } rows[] = {
        { "/kubelet", "cg/kubelet", "cg/kubelet/kubepods", false },
        { "/a/b/c", "cg/a", "cg/a/b/c/kubepods", false },
        { "/a/b-c", "cg/a.slice", "cg/a.slice/a-b_c.slice/kubepods.slice", false },
        { "/a/b/c/d/e", "cg/a", "cg/a/b/c/d/e/kubepods", true },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        bool slices = strstr(rows[i].top, ".slice") != NULL;
        struct fx f;

        fx_dir("%s", rows[i].kubepods);
        v2_make("cg/other");
        f = machine(16, rows[i].root);
        fx_pass(&f);
        for (int times = 0; times < 2; times++) {
            char pod[FX_PATH];

            snprintf(pod, sizeof(pod), slices ? "%s/kubepods-pod%.8s_2222_3333_4444_555555555555.slice" : "%s/pod%s",
                     rows[i].kubepods, UID);
            v2_make(pod);
            fx_events(&f);
            if (rows[i].is_polled) {
                fx_elapse(&f, DH_NS);
                fx_pass(&f);
            }
            CHECK_INT(fx_group_count(&f), 1);
            fx_remove("%s", rows[i].top);
            fx_events(&f);
            CHECK_INT(fx_group_count(&f), 0);
        }
        fx_close(&f);
        machine_clear();
    }
}

int main(void)
{
    fx_begin();
    machine_make();
    test_v2_alone_reads_every_file();
    test_v1_hierarchies_share_one_record();
    test_v1_hierarchy_mounted_later_is_found_at_a_resync();
    test_v1_controllers_mounted_together_are_read_once();
    test_hierarchy_unopenable_fails_the_source();
    test_v2_next_to_v1_supplies_the_missing_controllers();
    test_group_may_leave_one_hierarchy_and_return();
    test_kubelet_cgroup_names_are_all_recognized();
    test_group_path_too_long_fails_the_source();
    test_groups_outside_kubepods_are_ignored();
    test_kubepods_created_later_is_found();
    test_directory_that_cannot_be_listed_is_listed_again();
    test_directory_that_cannot_be_listed_may_be_removed();
    test_group_recreated_under_its_name_gets_a_new_id();
    test_group_removed_during_a_read_is_no_failure();
    test_thousand_groups_created_and_removed_at_once();
    test_full_table_counts_dropped_groups_and_refills();
    test_containers_without_room_are_counted_once();
    test_watches_beyond_the_limit_are_swept_instead();
    test_pod_event_reads_its_containers();
    test_pod_is_read_before_its_containers();
    test_limits_are_read_at_resync();
    test_new_group_is_read_again_after_a_second();
    test_frozen_container_is_found_by_its_own_watch();
    test_sweep_reads_every_group_once();
    test_page_sizes_without_pages_are_not_swept();
    test_page_size_found_later_is_read_in_existing_groups();
    test_missing_file_of_a_live_group_is_unreadable();
    test_absent_files_are_absent_again_after_a_lack_of_descriptors();
    test_files_of_a_live_group_are_read_after_a_lack_of_descriptors();
    test_watched_file_recreated_is_watched_again();
    test_watched_file_may_be_recreated_often();
    test_event_storm_does_not_delay_the_pass();
    test_lost_events_cause_a_full_read();
    test_directories_above_kubepods_may_be_recreated();
    return check_done("test_cgroups");
}

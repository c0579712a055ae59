/*
 * Tests without inotify: changes are found by reading. In a private user namespace the kernel grants as many
 * instances as the test sets, without affecting other processes.
 */
#include <sched.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.h"
#include "fixture.h"

#define UID "11111111-2222-3333-4444-555555555555"
#define UID_2 "22222222-2222-3333-4444-555555555555"
#define POD "kubepods/burstable/pod" UID
#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

/* Set the limit of inotify instances or watches. */
static bool allow(const char *what, uint64_t number)
{
    char path[64], text[24];
    int fd;
    bool ok;

    snprintf(path, sizeof(path), "/proc/sys/user/max_inotify_%s", what);
    snprintf(text, sizeof(text), "%" PRIu64, number);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    ok = fd >= 0 && write(fd, text, strlen(text)) > 0;
    close(fd);
    return ok;
}

static void group_make(const char *at)
{
    fx_write("populated 1\nfrozen 0\n", "%s/cgroup.events", at);
    fx_write("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "%s/memory.events", at);
}

static void test_without_inotify_everything_is_swept(void)
{
    struct dh_options o = fx_options();
    int descriptors;
    struct fx f;

    CHECK_INT(inotify_init1(IN_CLOEXEC), -1);
    CHECK_INT(errno, EMFILE);
    descriptors = fx_count("/proc/self/fd");
    group_make("cg/" POD);
    f = fx_open(&o, "/", NULL, 0);
    fx_pass(&f);
    CHECK_INT(fx_group_count(&f), 1);
    CHECK_INT(f.head->source[DH_SOURCE_CGROUPS].state, DH_STATE_OK);
    CHECK_U64(f.head->watches, 0);
    CHECK_U64(f.head->unwatched, 3 + 1 + 2); /* three directories; the pod's directory, and its files */
    CHECK_U64((uint64_t)(fx_count("/proc/self/fd") - descriptors), f.head->descriptors);

    fx_write("low 0\nhigh 0\nmax 0\noom 1\noom_kill 0\n", "cg/" POD "/memory.events");
    group_make("cg/" POD "/" ID);
    dh_sampler_sweep(f.s);
    fx_read(&f);
    CHECK_U64(fx_group(&f, UID, "")->mem_oom, 1);
    CHECK_U64(fx_group(&f, UID, ID)->populated, 1);
    fx_remove("cg/" POD "/" ID);
    dh_sampler_sweep(f.s);
    group_make("cg/kubepods/pod99999999-2222-3333-4444-555555555555");
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    CHECK_INT(fx_group_count(&f), 2);
    CHECK(!fx_group(&f, UID, ID)->id);
    CHECK_U64(f.head->source[DH_SOURCE_CGROUPS].failures, 0);
    fx_resync(&f); /* requested again, and refused again */
    CHECK_U64(f.head->unwatched, 3 + 2 * (1 + 2));

    fx_write("nr_periods 0\nnr_throttled 0\n", "cg/" POD "/cpu.stat");
    fx_resync(&f);
    for (int i = 0; i < 200; i++) /* its counter does not change, and is read in every sweep */
        fx_pass(&f);
    fx_write("nr_periods 9\nnr_throttled 9\n", "cg/" POD "/cpu.stat");
    for (int i = 0; i < 10; i++)
        fx_pass(&f);
    CHECK_U64(fx_group(&f, UID, "")->cpu_throttled, 9);

    fx_must(allow("instances", 16), "max_inotify_instances");
    fx_resync(&f);
    CHECK_U64(f.head->unwatched, 0);
    CHECK_U64(f.head->watches, 3 + 2 * (1 + 2));
    CHECK_U64((uint64_t)(fx_count("/proc/self/fd") - descriptors), f.head->descriptors);
    fx_write("low 0\nhigh 0\nmax 0\noom 2\noom_kill 0\n", "cg/" POD "/memory.events");
    fx_events(&f); /* watched from now on */
    CHECK_U64(fx_group(&f, UID, "")->mem_oom, 2);
    fx_close(&f);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

/* Its own directory is watched, but no watch reports its removal: the parent's would. */
static void test_pod_removed_below_an_unwatched_directory_is_found_by_sweep(void)
{
    struct dh_options o = fx_options();
    struct fx f;

    fx_dir("cg/kubepods");
    f = fx_open(&o, "/", NULL, 0);
    fx_pass(&f);
    fx_must(allow("watches", f.head->watches), "max_inotify_watches");
    group_make("cg/" POD);
    fx_write("nr_periods 0\nnr_throttled 0\n", "cg/" POD "/cpu.stat");
    fx_events(&f);
    CHECK_U64(f.head->unwatched, 1 + 1 + 2);
    fx_must(allow("watches", f.head->watches + 1 + 2), "max_inotify_watches");
    for (int i = 0; i < 3 * 60; i++)
        fx_pass(&f); /* including resyncs; its counter does not change */
    CHECK_U64(f.head->unwatched, 1);
    fx_remove("cg/" POD);
    fx_fail_removed(&f);
    for (int i = 0; i < 10; i++)
        fx_pass(&f);
    CHECK_INT(fx_group_count(&f), 0);
    fx_close(&f);
}

/* No watch reports its creation, but the directory is listed every second. */
static void test_pod_created_below_an_unwatched_directory_is_found(void)
{
    struct dh_options o = fx_options();
    struct fx f;

    fx_dir("cg/kubepods");
    f = fx_open(&o, "/", NULL, 0);
    fx_pass(&f);
    fx_must(allow("watches", f.head->watches), "max_inotify_watches");
    group_make("cg/" POD);
    fx_events(&f);
    CHECK_INT(fx_group_count(&f), 1);
    group_make("cg/kubepods/burstable/pod" UID_2);
    fx_elapse(&f, DH_NS);
    fx_pass(&f);
    CHECK_INT(fx_group_count(&f), 2);
    fx_close(&f);
}

/* Watches are set through /proc/self/fd. In a child, whose mount namespace ends with it. */
static int groups_without_proc(void)
{
    struct dh_options o = fx_options();
    struct fx f;

    if (unshare(CLONE_NEWNS) || mount("tmpfs", "/proc", "tmpfs", 0, NULL))
        return 100;
    f = fx_open(&o, "/", NULL, 0);
    fx_pass(&f);
    return f.head->unwatched ? (int)fx_group_count(&f) : 101;
}

static void test_groups_without_proc_are_found_and_unwatched(void)
{
    pid_t child;
    int status = 0;

    group_make("cg/" POD);
    child = fork();
    if (!child)
        _exit(groups_without_proc());
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), 1);
}

int main(void)
{
    if (unshare(CLONE_NEWUSER) || !allow("instances", 0))
        return check_skip("test_cgroups_unwatched", "no user namespace of its own");
    prctl(PR_SET_DUMPABLE, 1); /* LeakSanitizer inspects its own process */
    fx_begin();
    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("cpu memory\n", "cg/cgroup.controllers");
    test_without_inotify_everything_is_swept();
    fx_remove("cg/kubepods");
    test_pod_removed_below_an_unwatched_directory_is_found_by_sweep();
    fx_remove("cg/kubepods");
    fx_must(allow("watches", 1000), "max_inotify_watches");
    test_pod_created_below_an_unwatched_directory_is_found();
    fx_remove("cg/kubepods");
    test_groups_without_proc_are_found_and_unwatched();
    return check_done("test_cgroups_unwatched");
}

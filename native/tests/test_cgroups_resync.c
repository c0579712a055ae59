/*
 * Tests of the resync of groups: all files are read, also without events. What a live watch reports is not looked for.
 */
#include <sys/syscall.h>

#include "check.h"
#include "fixture.h"

#define UID "11111111-2222-3333-4444-555555555555"
#define POD "kubepods/burstable/pod" UID
#define ID "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define ID_2 "2222222222222222222222222222222222222222222222222222222222222222"
#define MM "sys/kernel/mm/hugepages/hugepages-2048kB"

static int faccessat_errno; /* of every faccessat(2); 0: it is the kernel's */

int faccessat(int fd, const char *path, int mode, int flags)
{
    (void)flags;
    if (!faccessat_errno)
        return (int)syscall(SYS_faccessat, fd, path, mode);
    errno = faccessat_errno;
    return -1;
}

static void group_make(const char *at)
{
    fx_write("populated 1\nfrozen 0\n", "%s/cgroup.events", at);
    fx_write("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "%s/memory.events", at);
    fx_write("max\n", "%s/memory.max", at);
    fx_write("nr_periods 30\nnr_throttled 3\n", "%s/cpu.stat", at);
    fx_write("0-1\n", "%s/cpuset.cpus.effective", at);
    fx_write("0\n", "%s/hugetlb.2MB.max", at);
    fx_write("0\n", "%s/hugetlb.2MB.rsvd.max", at);
    fx_write("max 0\n", "%s/hugetlb.2MB.events", at);
}

/* Remove a file as the kernel does: its watch lives on, without an event. */
static void file_set_aside(const char *file)
{
    char path[FX_PATH], aside[FX_PATH];

    snprintf(path, sizeof(path), "%s/%s", fx_root, file);
    snprintf(aside, sizeof(aside), "%s/aside", fx_root);
    fx_must(!rename(path, aside), aside);
}

/* Every sweep of the sampler is a resync. */
static struct fx running(void)
{
    struct dh_options o = fx_options();
    struct fx f;

    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("0\n", MM "/nr_hugepages");
    fx_write("0\n", MM "/nr_overcommit_hugepages");
    fx_write("cpu memory hugetlb\n", "cg/cgroup.controllers");
    group_make("cg/" POD);
    group_make("cg/" POD "/" ID);
    o.resync_ns = o.sweep_ns;
    f = fx_open(&o, "/", NULL, 0);
    fx_pass(&f);
    fx_elapse(&f, DH_NS);
    fx_pass(&f); /* the second read of new groups */
    return f;
}

/* Run one sweep, which is a resync. Return: the number of files and directories that were opened. */
static uint64_t resync(struct fx *f)
{
    uint64_t before = f->s->opens;

    for (int i = 0; i < 10; i++)
        fx_pass(f);
    return f->s->opens - before;
}

static void done(struct fx *f)
{
    fx_close(f);
    fx_remove("cg");
}

static void discard_events(struct fx *f)
{
    char events[4096];

    while (read(f->s->inotify_fd, events, sizeof(events)) > 0)
        ;
}

static void test_resync_reads_all_files_and_opens_those_not_held(void)
{
    struct fx f = running();

    resync(&f);
    /* of two groups: all files but cpu.stat; and the pod's directory */
    fx_write("1\n", MM "/nr_hugepages");
    resync(&f);
    discard_events(&f);
    CHECK_U64(resync(&f), 2 * 7 + 1);
    fx_write("4096\n", "cg/" POD "/memory.max");
    fx_write("low 0\nhigh 0\nmax 5\noom 0\noom_kill 0\n", "cg/" POD "/memory.events");
    fx_write("populated 0\nfrozen 0\n", "cg/" POD "/" ID "/cgroup.events");
    fx_write("nr_periods 40\nnr_throttled 4\n", "cg/" POD "/" ID "/cpu.stat");
    discard_events(&f);
    resync(&f);
    CHECK_U64(fx_group(&f, UID, "")->mem_limit, 4096);
    CHECK_U64(fx_group(&f, UID, "")->mem_max, 5);
    CHECK_U64(fx_group(&f, UID, ID)->populated, 0);
    CHECK_U64(fx_group(&f, UID, ID)->cpu_throttled, 4);
    done(&f);
}

/* The pod was removed and created again, and the events about that are lost. Here the old files could still be read. */
static void test_replaced_pod_is_listed_and_read_by_its_names(void)
{
    struct fx f = running();

    resync(&f);
    fx_remove("cg/" POD);
    group_make("cg/" POD);
    group_make("cg/" POD "/" ID_2);
    fx_write("nr_periods 50\nnr_throttled 5\n", "cg/" POD "/cpu.stat");
    discard_events(&f);
    resync(&f);
    CHECK_U64(fx_group(&f, UID, "")->cpu_throttled, 5);
    CHECK(fx_group(&f, UID, ID_2)->id);
    CHECK(!fx_group(&f, UID, ID)->id);
    fx_write("populated 0\nfrozen 0\n", "cg/" POD "/cgroup.events"); /* it is watched again */
    group_make("cg/" POD "/" ID);
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, "")->populated, 0);
    CHECK(fx_group(&f, UID, ID)->id);
    done(&f);
}

/* A group that counted as removed would be found again as a new one, and its old OOM kills would be new. */
static void test_group_whose_directory_cannot_be_looked_up_is_kept(void)
{
    struct fx f = running();
    uint64_t id = fx_group(&f, UID, "")->id;

    file_set_aside("cg/" POD "/memory.events");
    faccessat_errno = ENOMEM;
    resync(&f);
    CHECK_U64(fx_group(&f, UID, "")->id, id);
    faccessat_errno = 0;
    fx_write("low 0\nhigh 0\nmax 0\noom 0\noom_kill 7\n", "cg/" POD "/memory.events");
    resync(&f);
    CHECK_U64(fx_group(&f, UID, "")->id, id);
    CHECK_U64(fx_group(&f, UID, "")->mem_oom_kill, 7);
    done(&f);
}

/* A controller was disabled and enabled again: the kernel creates its files again, and says nothing to their watches. */
static void test_file_that_was_created_again_is_watched_after_a_resync(void)
{
    struct fx f = running();

    resync(&f);
    file_set_aside("cg/" POD "/memory.events");
    fx_write("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n", "cg/" POD "/memory.events");
    resync(&f);
    fx_write("low 0\nhigh 0\nmax 5\noom 0\noom_kill 0\n", "cg/" POD "/memory.events");
    fx_events(&f);
    CHECK_U64(fx_group(&f, UID, "")->mem_max, 5);
    done(&f);
}

/* Limits of a page size without pages matter to nothing; they are read when there can be pages. */
static void test_limits_of_a_size_are_read_when_it_has_pages(void)
{
    struct fx f = running();
    uint64_t opens = resync(&f);

    CHECK_U64(opens, 2 * 4 + 1);
    fx_write("2097152\n", "cg/" POD "/hugetlb.2MB.max");
    resync(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 0);
    fx_write("8\n", MM "/nr_hugepages");
    fx_pass(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 2097152);
    fx_write("4194304\n", "cg/" POD "/hugetlb.2MB.max");
    resync(&f);
    CHECK_U64(fx_group(&f, UID, "")->hugetlb[0].max, 4194304);
    done(&f);
}

int main(void)
{
    fx_begin();
    test_resync_reads_all_files_and_opens_those_not_held();
    test_replaced_pod_is_listed_and_read_by_its_names();
    test_group_whose_directory_cannot_be_looked_up_is_kept();
    test_file_that_was_created_again_is_watched_after_a_resync();
    test_limits_of_a_size_are_read_when_it_has_pages();
    return check_done("test_cgroups_resync");
}

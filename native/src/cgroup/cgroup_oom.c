/*
 * cgroup_oom.c - notifications of cgroup v1 about pods that ran out of memory.
 *
 * A pod has one eventfd. It is registered with memory.oom_control of the pod and of each of its containers,
 * because the kernel notifies the group that ran out of memory and the groups below it, but none above. v2
 * has memory.events instead, which is watched like any other file.
 *
 * A notification only means that the counters must be read. The kernel notifies before it kills a process, so
 * the pod is read at once, again after each of PAUSES_NS, and in the next pass: the kill follows after 0.03 to
 * 0.2 ms, or up to tens of milliseconds if the kernel must search for memory or prints to a slow console. The kernel also notifies about removed groups. It does not notify
 * about a process that it kills because the whole machine is out of memory, though oom_kill counts it: so the
 * sweep reads memory.oom_control as well. If the registration fails, for example in a container with a
 * read-only cgroupfs, only the sweep remains.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "cgroup/cgroups.h"

#define BATCH 16
#define TIMER_SLOT UINT32_MAX          /* above the slots of all pods */
#define MS 1000000l

/*
 * Pauses before the reads after a notification, in which the kernel chooses a process and kills it: the pod is
 * read after 0.25, 0.5, 1, 2, 3, 4, 5, 6, 8, 12, 16 and 24 ms.
 */
static const long PAUSES_NS[] = { MS / 4, MS / 4, MS / 2, MS, MS, MS, MS, MS, 2 * MS, 4 * MS, 4 * MS, 8 * MS };

_Static_assert(sizeof(PAUSES_NS) / sizeof(*PAUSES_NS) == DH_CG_OOM_READS, "one pause before each read");

static uint32_t pod_of(const struct dh_cgroups *c, uint32_t slot)
{
    return c->group[slot].parent ? c->group[slot].parent - 1 : slot;
}

static bool epoll_add(int epoll_fd, int fd, epoll_data_t data)
{
    struct epoll_event on = { .events = EPOLLIN, .data = data };

    return !epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &on);
}

/*
 * Create a separate epoll with the timer of the second read: the sampler then waits for few descriptors,
 * however many pods there are.
 */
static int epoll_make(struct dh_sampler *s)
{
    int fd, timer_fd, err;

    if (s->oom_fd >= 0)
        return 0;
    fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = fd < 0 ? -1 : timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (timer_fd >= 0 && epoll_add(fd, timer_fd, (epoll_data_t){ .u32 = TIMER_SLOT }) &&
        epoll_add(s->epoll_fd, fd, (epoll_data_t){ .fd = fd })) {
        s->oom_fd = fd;
        s->cgroups->oom_timer_fd = timer_fd;
        s->work->head.descriptors += 2;
        s->head_dirty = true;
        return 0;
    }
    err = -errno;
    if (timer_fd >= 0)
        close(timer_fd);
    if (fd >= 0)
        close(fd);
    return err;
}

/*
 * Return the pod's eventfd, or -errno. It is created when first needed.
 */
static int eventfd_of(struct dh_sampler *s, uint32_t pod)
{
    struct dh_cg_group *p = &s->cgroups->group[pod];
    int fd, err;

    if (p->oom_fd)
        return p->oom_fd - 1;
    if (s->oom_fds == DH_CG_OOM_FDS)
        return -EMFILE;
    err = epoll_make(s);
    if (err)
        return err;
    fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (!epoll_add(s->oom_fd, fd, (epoll_data_t){ .u32 = pod })) {
        err = -errno;
        close(fd);
        return err;
    }
    p->oom_fd = fd + 1;
    s->oom_fds++;
    s->work->head.descriptors++;
    s->head_dirty = true;
    return fd;
}

/* Register the pod's eventfd with a memory.oom_control. */
static int control_write(struct dh_sampler *s, uint32_t slot, uint8_t hier, int control)
{
    struct dh_cgroups *c = s->cgroups;
    int fd, event = eventfd_of(s, pod_of(c, slot));
    char path[DH_CG_PATH + 64];
    int err = 0;

    if (event < 0)
        return event;
    snprintf(path, sizeof(path), "%s/cgroup.event_control", c->group[slot].path);
    fd = openat(c->hier[hier].fd, path, O_WRONLY | O_CLOEXEC);
    s->opens++;
    if (fd < 0)
        return -errno;
    if (dprintf(fd, "%d %d", event, control) < 0)
        err = -errno;
    close(fd);
    return err;
}

/* Register a group's memory.oom_control, if it exists and is not registered yet. */
void dh_cg_oom_watch(struct dh_sampler *s, uint32_t slot, uint32_t file)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];
    uint8_t hier = c->file[file].hier;
    char path[DH_CG_PATH + 64];
    int fd, err;

    if (p->oom_registered)
        return; /* a second registration would notify twice */
    dh_cg_path(s, slot, file, path);
    fd = openat(c->hier[hier].fd, path, O_RDONLY | O_CLOEXEC);
    s->opens++;
    if (fd < 0)
        return; /* the read of the file reports the error */
    err = control_write(s, slot, hier, fd);
    close(fd);
    p->oom_registered = !err;
    dh_cg_mark_unwatched(s, slot, DH_CG_FILE_BIT(file), err != 0);
}

/* Forget the registrations of a group that left a hierarchy. Closing the eventfd ends all of them. */
void dh_cg_oom_unwatch(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];

    if (c->hier[hier].version != 1 || !(c->hier[hier].controllers & DH_CG_MEMORY))
        return;
    p->oom_registered = false;
    c->oom_pods_due -= p->oom_reads_due > 0;
    p->oom_reads_due = 0;
    p->oom_timed_reads = 0;
    if (!p->oom_fd)
        return;
    close(p->oom_fd - 1);
    p->oom_fd = 0;
    s->oom_fds--;
    s->work->head.descriptors--;
    s->head_dirty = true;
    for (uint32_t child = p->child; child; child = c->group[child - 1].next)
        c->group[child - 1].oom_registered = false;
}

static void mark_oom_file(struct dh_sampler *s, uint32_t pod)
{
    const struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->files; i++)
        if (c->file[i].spec->read == DH_CG_OOM)
            dh_cg_mark_due(s, pod, i);
}

/* Set the timer to the next of PAUSES_NS, if there is one. If that fails, the next pass reads the pods. */
static void timer_set(struct dh_cgroups *c)
{
    struct itimerspec soon = { 0 };

    if (c->oom_pauses == DH_CG_OOM_READS)
        return;
    soon.it_value.tv_nsec = PAUSES_NS[c->oom_pauses++];
    (void)timerfd_settime(c->oom_timer_fd, 0, &soon, NULL);
}

/* A pod ran out of memory: read it now and after PAUSES_NS, unless that was done since the last pass. */
static void oom_notified(struct dh_sampler *s, uint32_t pod)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[pod];

    if (p->oom_reads_due) {
        p->oom_reads_due = 2;
        return;
    }
    p->oom_reads_due = 1;
    c->oom_pods_due++;
    mark_oom_file(s, pod);
    p->oom_timed_reads = DH_CG_OOM_READS;
    c->oom_pauses = 0;
    timer_set(c);
}

static void mark_pods_due(struct dh_sampler *s)
{
    for (uint32_t slot = 0; slot < s->work->head.groups; slot++)
        if (s->cgroups->group[slot].oom_reads_due)
            mark_oom_file(s, slot);
}

/*
 * Read the pods that the timer is for, also if a pass has read them since: the kill may follow that pass.
 * Return whether any of them is to be read again.
 */
static bool mark_timed_pods(struct dh_sampler *s)
{
    bool again = false;

    for (uint32_t slot = 0; slot < s->work->head.groups; slot++) {
        struct dh_cg_group *p = &s->cgroups->group[slot];

        if (p->oom_timed_reads) {
            again |= --p->oom_timed_reads > 0;
            mark_oom_file(s, slot);
        }
    }
    return again;
}

/*
 * Handle eventfds and the timer. A pod in which processes are killed in a loop costs at most DH_CG_OOM_READS + 2
 * reads between two passes, whatever other pods do with the timer.
 */
void dh_cg_oom_take_events(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    struct epoll_event events[BATCH];
    int n = epoll_wait(s->oom_fd, events, BATCH, 0);

    for (int i = 0; i < n; i++) {
        uint32_t slot = events[i].data.u32;
        uint64_t count;

        if (slot == TIMER_SLOT) {
            if (read(c->oom_timer_fd, &count, sizeof(count)) > 0) {
                if (mark_timed_pods(s))
                    timer_set(c);
            }
        } else if (c->group[slot].oom_fd && read(c->group[slot].oom_fd - 1, &count, sizeof(count)) > 0) {
            oom_notified(s, slot);
        }
    }
}

/* Read the pods that ran out of memory once more, in a pass: by now their killed processes are counted. */
void dh_cg_oom_reread(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    mark_pods_due(s);
    for (uint32_t slot = 0; slot < s->work->head.groups; slot++)
        if (c->group[slot].oom_reads_due)
            c->oom_pods_due -= --c->group[slot].oom_reads_due == 0;
}

void dh_cg_oom_free(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t slot = 0; s->oom_fds && slot < s->work->head.groups; slot++)
        if (c->group[slot].oom_fd)
            close(c->group[slot].oom_fd - 1);
    if (s->oom_fd < 0)
        return;
    close(c->oom_timer_fd);
    close(s->oom_fd);
}

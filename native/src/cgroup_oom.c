/*
 * cgroup_oom.c - how cgroup v1 tells of a pod that ran out of memory.
 *
 * A pod has one eventfd. It is registered with the pod's own memory.oom_control and with that of each of
 * its containers, since the kernel tells of a group that ran out of memory the group itself and those
 * below it, and none above. v2 has memory.events for all of this, which is watched like any other file.
 *
 * What an eventfd tells is only that it is time to look. The kernel tells before it kills, so the pod is
 * looked at now, again when a kill has had its time, and in the next pass. It tells of a group that was
 * removed, too. And it tells nobody of a process that it killed because the whole machine was out of
 * memory, though that counts in oom_kill as well: so the sweep reads memory.oom_control whatever was
 * registered. Where nothing can be, in a container that has cgroupfs read-only for one, the sweep is all
 * there is.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "cgroups.h"

#define BATCH 16
#define TIMER UINT32_MAX          /* among slots: a pod has a lower one */
#define KILL_NS (20 * 1000000l)   /* to choose a process, and to kill it */

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
 * An epoll of their own, with the timer of a second look: what the sampler waits for stays few descriptors,
 * however many pods there are.
 */
static int epoll_make(struct dh_sampler *s)
{
    int fd, timer_fd, err;

    if (s->oom_fd >= 0)
        return 0;
    fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = fd < 0 ? -1 : timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (timer_fd >= 0 && epoll_add(fd, timer_fd, (epoll_data_t){ .u32 = TIMER }) &&
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

/* The pod's eventfd, made when it is first needed; -errno if it cannot be had. */
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

/* Have the kernel write to the pod's eventfd when the group with that memory.oom_control runs out. */
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

/* Ask to be told of a group's memory.oom_control, if that is there and was not asked for before. */
void dh_cg_oom_watch(struct dh_sampler *s, uint32_t slot, uint32_t file)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];
    uint8_t hier = c->file[file].hier;
    char path[DH_CG_PATH + 64];
    int fd, err;

    if (p->oom_heard)
        return; /* to ask twice is to be told twice */
    dh_cg_path(s, slot, file, path);
    fd = openat(c->hier[hier].fd, path, O_RDONLY | O_CLOEXEC);
    s->opens++;
    if (fd < 0)
        return; /* whoever reads it says why */
    err = control_write(s, slot, hier, fd);
    close(fd);
    p->oom_heard = !err;
    dh_cg_refused(s, slot, DH_CG_FILE_BIT(file), err != 0);
}

/* A group left a hierarchy. To close an eventfd ends all that it was registered for. */
void dh_cg_oom_leave(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];

    if (c->hier[hier].version != 1 || !(c->hier[hier].controllers & DH_CG_MEMORY))
        return;
    p->oom_heard = false;
    c->oom_owed -= p->oom_looks > 0;
    p->oom_looks = 0;
    if (!p->oom_fd)
        return;
    close(p->oom_fd - 1);
    p->oom_fd = 0;
    s->oom_fds--;
    s->work->head.descriptors--;
    s->head_dirty = true;
    for (uint32_t child = p->child; child; child = c->group[child - 1].next)
        c->group[child - 1].oom_heard = false;
}

static void look(struct dh_sampler *s, uint32_t pod)
{
    const struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->files; i++)
        if (c->file[i].spec->read == DH_CG_OOM)
            dh_cg_notified(s, pod, i);
}

/* The kernel told of a pod: it is looked at now and soon, unless it was since the last pass. */
static void told(struct dh_sampler *s, uint32_t pod)
{
    const struct itimerspec soon = { .it_value.tv_nsec = KILL_NS };
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[pod];

    if (p->oom_looks) {
        p->oom_looks = 2;
        return;
    }
    p->oom_looks = 1;
    c->oom_owed++;
    look(s, pod);
    (void)timerfd_settime(c->oom_timer_fd, 0, &soon, NULL); /* if it fails there is the next pass */
}

static void look_at_owed(struct dh_sampler *s)
{
    for (uint32_t slot = 0; slot < s->work->head.groups; slot++)
        if (s->cgroups->group[slot].oom_looks)
            look(s, slot);
}

/*
 * Hear which pods ran out of memory, or that it is time to look at them again. A pod in which processes die
 * in a loop costs three looks from pass to pass at most: a pass, and not the timer, ends what it is owed.
 */
void dh_cg_oom_hear(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    struct epoll_event events[BATCH];
    int n = epoll_wait(s->oom_fd, events, BATCH, 0);

    for (int i = 0; i < n; i++) {
        uint32_t slot = events[i].data.u32;
        uint64_t count;

        if (slot == TIMER) {
            if (read(c->oom_timer_fd, &count, sizeof(count)) > 0)
                look_at_owed(s);
        } else if (c->group[slot].oom_fd && read(c->group[slot].oom_fd - 1, &count, sizeof(count)) > 0) {
            told(s, slot);
        }
    }
}

/* Look once more at the pods that ran out of memory, in a pass: what was killed then is counted by now. */
void dh_cg_oom_again(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    look_at_owed(s);
    for (uint32_t slot = 0; slot < s->work->head.groups; slot++)
        if (c->group[slot].oom_looks)
            c->oom_owed -= --c->group[slot].oom_looks == 0;
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

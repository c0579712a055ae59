/*
 * hung_fixture.h - a file whose open(2) does not return: a FIFO without a writer, created by fx_fifo() and
 * released here. Include once per program, after fixture.h.
 */
#ifndef DH_HUNG_FIXTURE_H
#define DH_HUNG_FIXTURE_H

#include <sys/syscall.h>

/* Count this process's threads with a name prefix or, with @hung, those of them that sleep in openat(2). */
static inline int fx_threads(const char *prefix, bool asleep)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;

    for (struct dirent *d; (d = readdir(tasks));) {
        char path[64], name[32] = "", call[64] = "";
        int fd;

        snprintf(path, sizeof(path), "/proc/self/task/%.16s/comm", d->d_name);
        if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            continue;
        if (read(fd, name, sizeof(name) - 1) < 0)
            *name = '\0'; /* the thread just ended */
        close(fd);
        snprintf(path, sizeof(path), "/proc/self/task/%.16s/syscall", d->d_name);
        if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            continue;
        if (read(fd, call, sizeof(call) - 1) < 0)
            *call = '\0';
        close(fd);
        /* "257 0x..." in a call, otherwise "running" */
        n += !strncmp(name, prefix, strlen(prefix)) &&
             (!asleep || (*call != 'r' && atoi(call) == SYS_openat));
    }
    closedir(tasks);
    return n;
}

/*
 * Let an open(2) return: a writer comes and goes. The FIFO is renamed first, so that the next open finds
 * none.
 */
static inline void fx_release(const char *fifo)
{
    char path[FX_PATH], aside[FX_PATH];
    int fd = -1;

    snprintf(path, sizeof(path), "%s/%s", fx_root, fifo);
    snprintf(aside, sizeof(aside), "%s/aside", fx_root);
    fx_must(!rename(path, aside), aside);
    EVENTUALLY(fd >= 0 || (fd = open(aside, O_WRONLY | O_NONBLOCK | O_CLOEXEC)) >= 0);
    close(fd);
}

#endif

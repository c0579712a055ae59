/*
 * hung_fixture.h - a file whose open(2) does not return: a FIFO without a writer. Made by fx_fifo(), and let
 * go of here. Include once per program, after fixture.h.
 */
#ifndef DH_HUNG_FIXTURE_H
#define DH_HUNG_FIXTURE_H

#include <sys/syscall.h>

/* How many threads whose name begins so this process has, or how many of these sleep in openat(2). */
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
            *name = '\0'; /* it just ended */
        close(fd);
        snprintf(path, sizeof(path), "/proc/self/task/%.16s/syscall", d->d_name);
        if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            continue;
        if (read(fd, call, sizeof(call) - 1) < 0)
            *call = '\0';
        close(fd);
        /* "257 0x..." in a call, "running" else */
        n += !strncmp(name, prefix, strlen(prefix)) &&
             (!asleep || (*call != 'r' && atoi(call) == SYS_openat));
    }
    closedir(tasks);
    return n;
}

/* Let an open(2) return: a writer comes, and goes at once. The FIFO is moved out of the next one's way. */
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

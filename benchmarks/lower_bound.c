/*
 * lower_bound.c - the lower bound of an agent: one thread and one wait, without decisions and clients.
 *
 *   lower_bound inotify FILE...   a line of JSON for each event on one of the files: read time and file
 *   lower_bound uevents           the same for each of the kernel's device events of a CPU
 *   lower_bound timer MS          reads a timerfd at multiples of that period, and prints nothing more
 *
 * Times are CLOCK_MONOTONIC in nanoseconds. The first line reports that it listens. For
 * agent/bench/processes.py.
 */
#include <errno.h>
#include <inttypes.h>
#include <linux/netlink.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what)
{
    fprintf(stderr, "lower_bound: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void ready(void)
{
    printf("{\"ready\": true}\n");
    fflush(stdout);
}

static void inotify(char **files, int n)
{
    _Alignas(struct inotify_event) char buf[4096];
    int fd = inotify_init1(IN_CLOEXEC);

    for (int i = 0; i < n; i++) /* watches count from 1 */
        if (fd < 0 || inotify_add_watch(fd, files[i], IN_MODIFY) != i + 1)
            fail(files[i]);
    ready();
    for (;;) {
        ssize_t used = read(fd, buf, sizeof(buf));
        uint64_t t_ns = now_ns();

        if (used < 0)
            fail("inotify");
        for (char *at = buf; at < buf + used;) {
            const struct inotify_event *event = (const struct inotify_event *)(void *)at;

            printf("{\"t_ns\": %" PRIu64 ", \"file\": %d}\n", t_ns, event->wd - 1);
            at += sizeof(*event) + event->len;
        }
        fflush(stdout);
    }
}

static void uevents(void)
{
    struct sockaddr_nl kernel = { .nl_family = AF_NETLINK, .nl_groups = 1 };
    int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT);
    char buf[8192];

    if (fd < 0 || bind(fd, (struct sockaddr *)&kernel, sizeof(kernel)))
        fail("netlink");
    ready();
    for (;;) {
        ssize_t used = recv(fd, buf, sizeof(buf) - 1, 0);
        uint64_t t_ns = now_ns();

        if (used < 0)
            fail("netlink");
        buf[used] = '\0';
        if (strstr(buf, "@/devices/system/cpu/cpu"))
            printf("{\"t_ns\": %" PRIu64 ", \"action\": \"%.*s\"}\n", t_ns, (int)strcspn(buf, "@"), buf);
        fflush(stdout);
    }
}

static void timer(const char *ms)
{
    long period = strtol(ms, NULL, 10);
    struct itimerspec every = { .it_interval = { period / 1000, period % 1000 * 1000000 } };
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    uint64_t period_ns = (uint64_t)period * 1000000u, first_ns;

    if (period < 1 || fd < 0)
        fail("timer");
    first_ns = (now_ns() / period_ns + 1) * period_ns; /* as the agent: its threads wake together */
    every.it_value = (struct timespec){ (time_t)(first_ns / 1000000000u), (long)(first_ns % 1000000000u) };
    if (timerfd_settime(fd, TFD_TIMER_ABSTIME, &every, NULL))
        fail("timer");
    ready();
    for (;;) {
        uint64_t count;

        if (read(fd, &count, sizeof(count)) != sizeof(count))
            fail("timer");
    }
}

int main(int argc, char **argv)
{
    if (argc > 2 && !strcmp(argv[1], "inotify"))
        inotify(argv + 2, argc - 2);
    if (argc == 2 && !strcmp(argv[1], "uevents"))
        uevents();
    if (argc == 3 && !strcmp(argv[1], "timer"))
        timer(argv[2]);
    fprintf(stderr, "usage: lower_bound inotify FILE... | uevents | timer MS\n");
    return 2;
}

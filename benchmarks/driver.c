/*
 * driver.c - runs one part of the core a given number of times, for tools that count.
 *
 *   driver pass    SYSFS CGROUPFS N   passes while the clock does not advance
 *   driver second  SYSFS CGROUPFS N   seconds of ten passes each, as an agent at 10 Hz has them
 *   driver still   SYSFS CGROUPFS N   minutes of them, after three in which nothing changed
 *   driver resync  SYSFS CGROUPFS N   the same below a --cgroup-root, with a resync of each group per minute
 *   driver sweep   SYSFS CGROUPFS N   sweeps over all groups, whose files were opened before and are held
 *   driver opens   SYSFS CGROUPFS N   the same, if no file may be held
 *   driver machine SYSFS PROCFS N     passes over the machine while the clock does not advance
 *   driver minute  SYSFS PROCFS N     minutes of sixty such passes each
 *   driver uevent  X X N              device events of other subsystems, each received by itself
 *   driver knobs   CGROUPFS PATH N    settings of one cgroup, read as an audit does
 *   driver gpus    LIBRARY SCENARIO N passes over the GPUs of a fake NVML while the clock does not advance
 *   driver gpu_minute LIBRARY SCENARIO N   minutes of sixty such passes each
 *   driver encode  DEVICES X N        encodings of DEVICES devices
 *
 * To count instructions, run it with N and with 2N: the difference is N times the part, without the start. In
 * its system calls a getppid() marks the start and the end of the N, and occurs nowhere else. Prints the
 * core's allocations during the N.
 *
 * The clock is the driver's own (linked with --wrap=clock_gettime), so that work done once a second is done
 * as often under a tool that slows everything down.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "drahealth.h"
#include "uevent/uevents.h"

#define NS DH_NS
#define HELD_BYTES (4ull << 20) /* the agent's default */

static uint64_t now_ns = 1000 * NS;
static uint64_t allocations;

int __wrap_clock_gettime(clockid_t id, struct timespec *t);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t each);
void *__wrap_realloc(void *p, size_t n);
void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t each);
void *__real_realloc(void *p, size_t n);

int __wrap_clock_gettime(clockid_t id, struct timespec *t)
{
    (void)id;
    t->tv_sec = (time_t)(now_ns / NS);
    t->tv_nsec = (long)(now_ns % NS);
    return 0;
}

void *__wrap_malloc(size_t n)
{
    allocations++;
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t each)
{
    allocations++;
    return __real_calloc(n, each);
}

void *__wrap_realloc(void *p, size_t n)
{
    allocations++;
    return __real_realloc(p, n);
}

_Noreturn static void fail(const char *what, int64_t code)
{
    fprintf(stderr, "driver: %s: %" PRId64 "\n", what, code);
    exit(1);
}

/* Begin the counted part, or begin it again. */
static void begin(void)
{
    allocations = 0;
    (void)getppid();
}

static void end(void)
{
    (void)getppid();
}

static struct dh_sampler *sampler_open(const char *sysfs, const char *cgroupfs, const char *kubelet_root,
                                       uint64_t resync_ns, uint64_t held_bytes)
{
    struct dh_options options = {
        .size = sizeof(options),
        .version = DH_VERSION,
        .period_ns = NS / 10,
        .sweep_ns = 10 * NS,
        .resync_ns = resync_ns,
        .group_max = 1024,
        .held_bytes = held_bytes,
    };
    struct dh_sampler *s;
    int err = dh_sampler_open(&options, sysfs, cgroupfs, kubelet_root, NULL, 0, &s);

    if (err)
        fail("open", err);
    /* thirteen seconds: all is found, read again when it is a second old, and swept once */
    for (int i = 0; i < 130; i++, now_ns += NS / 10)
        if ((err = dh_sampler_pass(s)))
            fail("pass", err);
    begin();
    return s;
}

static struct dh_sampler *sampler_make(const char *sysfs, const char *cgroupfs, uint64_t held_bytes)
{
    return sampler_open(sysfs, cgroupfs, "/", 3600 * NS, held_bytes);
}

static void passes(struct dh_sampler *s, long n, uint64_t step_ns)
{
    for (; n; n--, now_ns += step_ns)
        if (dh_sampler_pass(s))
            fail("pass", n);
    end();
    dh_sampler_stop(s, 0);
}

static void pass(const char *sysfs, const char *cgroupfs, long n)
{
    passes(sampler_make(sysfs, cgroupfs, HELD_BYTES), n, 0);
}

static void second(const char *sysfs, const char *cgroupfs, long n)
{
    passes(sampler_make(sysfs, cgroupfs, HELD_BYTES), 10 * n, NS / 10);
}

static void minutes(struct dh_sampler *s, long n)
{
    for (int i = 0; i < 1800; i++, now_ns += NS / 10)
        if (dh_sampler_pass(s))
            fail("pass", i);
    begin();
    passes(s, 600 * n, NS / 10);
}

static void still(const char *sysfs, const char *cgroupfs, long n)
{
    minutes(sampler_make(sysfs, cgroupfs, HELD_BYTES), n);
}

static void resync(const char *sysfs, const char *cgroupfs, long n)
{
    minutes(sampler_open(sysfs, cgroupfs, "/kubelet", 60 * NS, HELD_BYTES), n);
}

static void sweeps(struct dh_sampler *s, long n)
{
    for (; n; n--) {
        int64_t groups = dh_sampler_sweep(s);

        if (groups <= 0)
            fail("sweep", groups);
    }
    end();
    dh_sampler_stop(s, 0);
}

static void sweep(const char *sysfs, const char *cgroupfs, long n)
{
    sweeps(sampler_make(sysfs, cgroupfs, HELD_BYTES), n);
}

static void opens(const char *sysfs, const char *cgroupfs, long n)
{
    sweeps(sampler_make(sysfs, cgroupfs, 0), n);
}

/* Open a watch with the periods of an agent: a second, ten, a minute. */
static struct dh_machine *machine_make(const char *sysfs, const char *procfs, int wake_fd)
{
    struct dh_machine_options options = {
        .size = sizeof(options),
        .version = DH_VERSION,
        .period_ns = NS,
        .slow_ns = 10 * NS,
        .rare_ns = 60 * NS,
    };
    struct dh_machine *m;
    int err = dh_machine_open(&options, sysfs, procfs, wake_fd, &m);

    if (!err)
        err = dh_machine_pass(m);
    if (err)
        fail("machine", err);
    begin();
    return m;
}

static void machine_passes(const char *sysfs, const char *procfs, long n, uint64_t step_ns)
{
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct dh_machine *m = machine_make(sysfs, procfs, wake_fd);

    for (; n; n--) {
        now_ns += step_ns;
        if (dh_machine_pass(m))
            fail("machine pass", n);
    }
    end();
    dh_machine_stop(m, 0);
    close(wake_fd);
}

static void machine(const char *sysfs, const char *procfs, long n)
{
    machine_passes(sysfs, procfs, n, 0);
}

static void minute(const char *sysfs, const char *procfs, long n)
{
    machine_passes(sysfs, procfs, 60 * n, NS);
}

/* A socket pair stands for the kernel's socket: it names no sender, which counts as the kernel's port 0. */
static void uevent(const char *x, const char *y, long n)
{
    static const char text[] = "add@/devices/virtual/net/veth0\0ACTION=add\0"
                               "DEVPATH=/devices/virtual/net/veth0\0SUBSYSTEM=net\0INTERFACE=veth0\0"
                               "IFINDEX=12\0SEQNUM=4711";
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), pair[2];
    struct dh_uevents *u;

    (void)x, (void)y;
    if (dh_uevents_open(wake_fd, NULL, 0, &u) ||
        socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair))
        fail("uevents", wake_fd);
    u->fd = pair[0];
    dh_uevents_run_once(u);
    begin();
    for (; n; n--) {
        if (send(pair[1], text, sizeof(text), 0) != sizeof(text))
            fail("send", n);
        dh_uevents_run_once(u);
    }
    end();
    dh_uevents_stop(u, 0);
    close(pair[1]);
    close(wake_fd);
}

static void knobs(const char *cgroupfs, const char *path, long n)
{
    const uint64_t size_kib[] = { 2048 };
    struct dh_knobs read = { .size = sizeof(read), .version = DH_VERSION };
    struct dh_knob_reader *r;
    int err = dh_knobs_open(cgroupfs, size_kib, 1, &r);

    if (err)
        fail("knobs", err);
    begin();
    for (; n; n--)
        if ((err = dh_knobs_read(r, path, 0, &read)))
            fail("knobs of a cgroup", err);
    end();
    dh_knobs_close(r);
}

/* Open a watch without threads. "-" is a sysfs in which no device counts PCIe errors. */
static struct dh_gpu_watch *gpus_make(const char *library, const char *scenario, int wake_fd)
{
    struct dh_gpus_options options = {
        .size = sizeof(options),
        .version = DH_VERSION,
        .period_ns = NS,
        .slow_ns = 10 * NS,
        .deadline_ns = 5 * NS,
        .open_deadline_ns = 30 * NS,
        .retry_ns = 10 * NS,
    };
    struct dh_gpu_watch *w;
    int err = setenv("FAKE_NVML", scenario, 1);

    if (!err)
        err = dh_gpus_open(&options, library, "-", NULL, 0, wake_fd, -1, &w);
    if (err)
        fail("GPU watch", err);
    /* half a minute: all is found, and missing values are not queried any more; the next pass is not a slow one */
    for (int i = 0; i <= 30; i++, now_ns += NS)
        if (dh_gpus_pass(w) <= 0)
            fail("first passes over GPUs", i);
    begin();
    return w;
}

static void gpu_passes(const char *library, const char *scenario, long n, uint64_t step_ns)
{
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct dh_gpu_watch *w = gpus_make(library, scenario, wake_fd);

    for (; n; n--, now_ns += step_ns)
        if (dh_gpus_pass(w) <= 0)
            fail("pass over GPUs", n);
    end();
    dh_gpus_stop(w, 0);
    close(wake_fd);
}

static void gpus(const char *library, const char *scenario, long n)
{
    gpu_passes(library, scenario, n, 0);
}

static void gpu_minute(const char *library, const char *scenario, long n)
{
    gpu_passes(library, scenario, 60 * n, NS);
}

static void encode(const char *number, const char *x, long n)
{
    static const char text[] = "node-a.example.com" "gpu-0000" "mem.hugepages.pool_shrunk: 6 pages, 8 at start";
    uint32_t devices = (uint32_t)strtoul(number, NULL, 10), taken;
    struct dh_health *list = calloc(devices, sizeof(*list));
    size_t cap = devices * (sizeof(text) + 64);
    uint8_t *out = malloc(cap);

    (void)x;
    if (!list || !out)
        fail("memory for devices", devices);
    begin();
    for (uint32_t i = 0; i < devices; i++)
        list[i] = (struct dh_health){
            .pool_len = 18, .device_off = 18, .device_len = 8, .message_off = 26,
            .message_len = i % 8 == 7 ? (uint32_t)sizeof(text) - 1 - 26 : 0,
            .health = i % 8 == 7 ? 2 : 1, .last_updated_s = 1700000000, .timeout_s = 30,
        };
    for (; n; n--)
        if (dh_health_encode(list, devices, (const uint8_t *)text, sizeof(text) - 1, out, cap, &taken) < 0)
            fail("encode", devices);
    end();
    free(list);
    free(out);
}

static const struct {
    const char *name;
    void (*run)(const char *a, const char *b, long n);
} parts[] = {
    { "pass", pass },       { "second", second }, { "still", still },   { "resync", resync },
    { "sweep", sweep },     { "opens", opens },
    { "machine", machine }, { "minute", minute }, { "uevent", uevent }, { "knobs", knobs },
    { "gpus", gpus },       { "gpu_minute", gpu_minute },               { "encode", encode },
};

int main(int argc, char **argv)
{
    long n = argc == 5 ? strtol(argv[4], NULL, 10) : 0;

    for (size_t i = 0; n > 0 && i < sizeof(parts) / sizeof(*parts); i++) {
        if (strcmp(argv[1], parts[i].name))
            continue;
        parts[i].run(argv[2], argv[3], n);
        printf("allocations %" PRIu64 "\n", allocations);
        return 0;
    }
    fail("usage: driver PART A B N; the parts are in driver.c", argc);
}

/*
 * driver.c - runs one part of the core a given number of times, for tools that count.
 *
 *   driver pass   SYSFS CGROUPFS N   passes in which the clock stands still
 *   driver second SYSFS CGROUPFS N   seconds of ten passes each, as an agent at 10 Hz has them
 *   driver sweep  SYSFS CGROUPFS N   sweeps over all groups
 *   driver encode DEVICES X N        encodings of so many devices
 *
 * Whoever counts runs it with N and with 2N: the difference is N times the part, without the start.
 * Prints what the C library's allocator was asked for by the core during the N.
 *
 * The clock is the driver's own (linked with --wrap=clock_gettime), so that what the core does once
 * a second is done as often under a tool that slows everything down.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "drahealth.h"

#define NS 1000000000ull

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

static void fail(const char *what, int64_t code)
{
    fprintf(stderr, "driver: %s: %" PRId64 "\n", what, code);
    exit(1);
}

static struct dh_sampler *sampler_make(const char *sysfs, const char *cgroupfs)
{
    struct dh_options options = {
        .size = sizeof(options),
        .version = DH_VERSION,
        .period_ns = NS / 10,
        .sweep_ns = 10 * NS,
        .resync_ns = 3600 * NS,
        .group_max = 1024,
    };
    struct dh_sampler *s;
    int err = dh_sampler_open(&options, sysfs, cgroupfs, "/", NULL, 0, &s);

    if (err)
        fail("open", err);
    /* three seconds: all is found, and read again when it is a second old */
    for (int i = 0; i < 30; i++, now_ns += NS / 10)
        if ((err = dh_sampler_pass(s)))
            fail("pass", err);
    return s;
}

static void passes(struct dh_sampler *s, long n, uint64_t step_ns)
{
    for (; n; n--, now_ns += step_ns)
        if (dh_sampler_pass(s))
            fail("pass", n);
}

static void sweeps(struct dh_sampler *s, long n)
{
    for (; n; n--) {
        int64_t groups = dh_sampler_sweep(s);

        if (groups <= 0)
            fail("sweep", groups);
    }
}

static void encode(uint32_t devices, long n)
{
    static const char text[] = "node-a.example.com" "gpu-0000" "mem.hugepages.pool_shrunk: 6 pages, 8 at start";
    struct dh_health *list = __real_calloc(devices, sizeof(*list));
    size_t cap = devices * (sizeof(text) + 64);
    uint8_t *out = __real_malloc(cap);
    uint32_t taken;

    if (!list || !out)
        fail("memory for devices", devices);
    for (uint32_t i = 0; i < devices; i++)
        list[i] = (struct dh_health){
            .pool_len = 18, .device_off = 18, .device_len = 8, .message_off = 26,
            .message_len = i % 8 == 7 ? (uint32_t)sizeof(text) - 1 - 26 : 0,
            .health = i % 8 == 7 ? 2 : 1, .last_updated_s = 1700000000, .timeout_s = 30,
        };
    for (; n; n--)
        if (dh_health_encode(list, devices, (const uint8_t *)text, sizeof(text) - 1, out, cap, &taken) < 0)
            fail("encode", devices);
    free(list);
    free(out);
}

int main(int argc, char **argv)
{
    long n = argc == 5 ? strtol(argv[4], NULL, 10) : 0;
    struct dh_sampler *s;
    uint64_t before;

    if (n <= 0)
        fail("usage: driver pass|second|sweep|encode SYSFS|DEVICES CGROUPFS N", argc);
    if (!strcmp(argv[1], "encode")) {
        encode((uint32_t)strtoul(argv[2], NULL, 10), n);
        printf("allocations %" PRIu64 "\n", allocations);
        return 0;
    }
    s = sampler_make(argv[2], argv[3]);
    before = allocations;
    if (!strcmp(argv[1], "pass"))
        passes(s, n, 0);
    else if (!strcmp(argv[1], "second"))
        passes(s, 10 * n, NS / 10);
    else if (!strcmp(argv[1], "sweep"))
        sweeps(s, n);
    else
        fail("pass, second, sweep or encode", 0);
    printf("allocations %" PRIu64 "\n", allocations - before);
    return dh_sampler_stop(s, 0);
}

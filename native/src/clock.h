/* clock.h - the one clock of the core: CLOCK_MONOTONIC in nanoseconds, as of now or of the last tick. */
#ifndef DH_CLOCK_H
#define DH_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define DH_NS 1000000000ull

static inline uint64_t dh_clock_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * DH_NS + (uint64_t)t.tv_nsec;
}

static inline uint64_t dh_now_ns(void)
{
    return dh_clock_ns(CLOCK_MONOTONIC);
}

/* As of the kernel's last tick, some ms ago: for a fifth of the price, without the processor's counter. */
static inline uint64_t dh_tick_ns(void)
{
    return dh_clock_ns(CLOCK_MONOTONIC_COARSE);
}

/* From one tick to the next, where none is late. */
static inline uint64_t dh_tick_length_ns(void)
{
    struct timespec t;

    clock_getres(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * DH_NS + (uint64_t)t.tv_nsec;
}

/*
 * Whether what is done every so often, in passes, is due in this one. With half a period of slack: a timer
 * that fires a little early must not skip a whole one.
 */
static inline bool dh_is_due(uint64_t now_ns, uint64_t last_ns, uint64_t every_ns, uint64_t period_ns)
{
    uint64_t slack_ns = (period_ns < every_ns ? period_ns : every_ns) / 2;

    return now_ns - last_ns + slack_ns >= every_ns;
}

#endif

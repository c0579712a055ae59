/* clock.h - the core's clock: CLOCK_MONOTONIC in nanoseconds, exact or as of the last kernel tick. */
#ifndef DH_CLOCK_H
#define DH_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define DH_NS 1000000000ull

static inline struct timespec dh_timespec(uint64_t ns)
{
    return (struct timespec){ .tv_sec = (time_t)(ns / DH_NS), .tv_nsec = (long)(ns % DH_NS) };
}

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

/*
 * Return the time of the kernel's last tick, a few ms ago. Costs a fifth of dh_now_ns(): it reads no hardware
 * counter.
 */
static inline uint64_t dh_tick_ns(void)
{
    return dh_clock_ns(CLOCK_MONOTONIC_COARSE);
}

/*
 * Return the length of a tick.
 */
static inline uint64_t dh_tick_length_ns(void)
{
    struct timespec t;

    clock_getres(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * DH_NS + (uint64_t)t.tv_nsec;
}

/*
 * Whether periodic work is due in this pass. Half a period of tolerance: a timer that fires a little early
 * must not skip a whole period.
 */
static inline bool dh_is_due(uint64_t now_ns, uint64_t last_ns, uint64_t every_ns, uint64_t period_ns)
{
    uint64_t slack_ns = (period_ns < every_ns ? period_ns : every_ns) / 2;

    return now_ns - last_ns + slack_ns >= every_ns;
}

#endif

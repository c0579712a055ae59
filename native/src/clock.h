/* clock.h - the one clock of the core: CLOCK_MONOTONIC in nanoseconds. */
#ifndef DH_CLOCK_H
#define DH_CLOCK_H

#include <stdint.h>
#include <time.h>

#define DH_NS 1000000000ull

static inline uint64_t dh_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * DH_NS + (uint64_t)t.tv_nsec;
}

#endif

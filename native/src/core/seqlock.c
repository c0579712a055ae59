/* seqlock.c - the reader's side: repeats a copy until the writer did not disturb it. */
#include <errno.h>
#include <sched.h>
#include <time.h>

#include "drahealth.h"
#include "core/seqlock.h"

/* Number of attempts: for about 1 ms with sched_yield(), then for 10 ms with sleeps of 100 us. */
#define READ_YIELDS 1000
#define READ_NAPS 100

/* Let the writer finish: it may have been preempted in the middle of its copy. */
static void writer_wait(int tries)
{
    const struct timespec nap = { .tv_nsec = 100000 };

    if (tries < READ_YIELDS)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

int64_t dh_seqlock_read(struct dh_seqlock *l, int64_t (*copy)(void *arg), void *arg)
{
    for (int tries = 0; tries < READ_YIELDS + READ_NAPS; tries++) {
        uint64_t seq = atomic_load_explicit(&l->seq, memory_order_acquire);
        int64_t used;

        if (!seq)
            return -ENODATA;
        used = seq & 1 ? DH_ETORN : copy(arg);
        if (used != DH_ETORN && atomic_load_explicit(&l->seq, memory_order_acquire) == seq)
            return used;
        writer_wait(tries);
    }
    return DH_ETORN;
}

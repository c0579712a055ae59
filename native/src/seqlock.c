/* seqlock.c - the reader's patience. */
#include <errno.h>
#include <sched.h>
#include <time.h>

#include "drahealth.h"
#include "seqlock.h"

/* How often a reader tries for a whole copy: about 1 ms, and then 10 ms of naps of 100 us. */
#define READ_YIELDS 1000
#define READ_NAPS 100

/* The writer may have been preempted in the middle of its copy. */
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

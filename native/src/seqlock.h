/*
 * seqlock.h - records that one thread writes and any number of others copy whole.
 *
 * `seq` is odd while a copy is being written, and 0 before the first. A double buffer would spare
 * readers the retry and cost the writer a copy of every record each time; here a writer that changed
 * three counters copies three records. Several writers need a lock among themselves.
 *
 * Copies go word by word: release stores against acquire loads, no fence, so that ThreadSanitizer can
 * follow. On x86-64 these are plain moves. So records are aligned to 8, and so is their size.
 */
#ifndef DH_SEQLOCK_H
#define DH_SEQLOCK_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct dh_seqlock {
    _Atomic uint64_t seq;
};

static inline void dh_words_store(void *dst, const void *src, size_t bytes)
{
    _Atomic uint64_t *d = dst;
    const uint64_t *w = src;

    for (size_t i = 0; i < bytes / 8; i++)
        atomic_store_explicit(&d[i], w[i], memory_order_release);
}

static inline void dh_words_load(void *dst, void *src, size_t bytes)
{
    uint64_t *d = dst;
    _Atomic uint64_t *w = src;

    for (size_t i = 0; i < bytes / 8; i++)
        d[i] = atomic_load_explicit(&w[i], memory_order_acquire);
}

/* The writer's, before and after its dh_words_store(). */
static inline void dh_seqlock_begin(struct dh_seqlock *l)
{
    atomic_store_explicit(&l->seq, atomic_load_explicit(&l->seq, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

static inline void dh_seqlock_end(struct dh_seqlock *l)
{
    /* pairs with the acquire loads in dh_seqlock_read(): an even number means whole records */
    atomic_store_explicit(&l->seq, atomic_load_explicit(&l->seq, memory_order_relaxed) + 1,
                          memory_order_release);
}

/*
 * dh_seqlock_read() - have @copy(@arg) copy until it was not disturbed.
 * @copy: dh_words_load() of what it wants. What it sees may be torn, so it trusts no count in it; for
 *        one that makes no sense it returns DH_ETORN and is called again.
 *
 * Return: what @copy returned; -ENODATA before the first publication; DH_ETORN if the writer was never
 *         quiet for long enough.
 * Blocks: some 10 ms at most, and only while the writer is preempted in the middle of a copy.
 */
int64_t dh_seqlock_read(struct dh_seqlock *l, int64_t (*copy)(void *arg), void *arg);

#endif

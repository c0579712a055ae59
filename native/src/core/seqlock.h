/*
 * seqlock.h - records that one thread writes, and that any number of other threads copy consistently.
 *
 * `seq` is odd while the writer writes, and 0 before the first publication. A double buffer would save
 * readers the repetition, but the writer would have to copy every record each time; here a writer that
 * changed three counters copies three records. Several writers need a lock of their own.
 *
 * Copies go by 64-bit words with release stores and acquire loads and without fences, so that ThreadSanitizer
 * can follow. On x86-64 these are plain moves. So records are aligned to 8, and their sizes are multiples of
 * 8.
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

/* For the writer, before and after dh_words_store(). */
static inline void dh_seqlock_begin(struct dh_seqlock *l)
{
    atomic_store_explicit(&l->seq, atomic_load_explicit(&l->seq, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

static inline void dh_seqlock_end(struct dh_seqlock *l)
{
    /* pairs with the acquire loads in dh_seqlock_read(): an even number means complete records */
    atomic_store_explicit(&l->seq, atomic_load_explicit(&l->seq, memory_order_relaxed) + 1,
                          memory_order_release);
}

/*
 * dh_seqlock_read() - repeat @copy(@arg) until the writer did not disturb it.
 * @copy: copies with dh_words_load(). Its input may be inconsistent, so it checks all counts; for an
 *        impossible count it returns DH_ETORN and is called again.
 *
 * Return: the result of @copy; -ENODATA before the first publication; DH_ETORN if the writer never paused
 *         long enough.
 * Blocks: about 10 ms at most, and only while the writer is preempted in the middle of a copy.
 */
int64_t dh_seqlock_read(struct dh_seqlock *l, int64_t (*copy)(void *arg), void *arg);

#endif

/*
 * worker.h - a thread that can be left behind.
 *
 * A read of the kernel or a call of a driver can hang for ever, and no thread can be ended from
 * outside. So a thread that does such things is asked to end, awaited for a while, and abandoned if it
 * must be: with everything it uses, which is freed by whoever of the two comes second, the thread that
 * returns after all or the one that stops it. What to do in the thread is its owner's business.
 */
#ifndef DH_WORKER_H
#define DH_WORKER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A member of what it is the thread of: the owner. */
struct dh_worker {
    void (*run)(void *owner);     /* the thread: to return soon after stop_fd has become readable */
    void (*release)(void *owner); /* the end of it: frees the owner, and calls dh_worker_close() */
    void *owner;
    int stop_fd;                  /* for the thread to poll; it stays readable */
    int done_fd;
    pthread_t thread;
    bool running;
    _Atomic uint32_t ending;
};

/*
 * dh_worker_open() - prepare a thread that calls @run(@owner). No thread yet.
 *
 * The first thing to be done with a worker: from here on dh_worker_close() may be called, even if this
 * failed. Nothing calls @release before dh_worker_stop().
 *
 * Return: 0; -EMFILE, -ENFILE, -ENOMEM as eventfd(2).
 */
int dh_worker_open(struct dh_worker *w, void (*run)(void *owner), void (*release)(void *owner), void *owner);

/* dh_worker_close() - close its descriptors; for @release. */
void dh_worker_close(struct dh_worker *w);

/*
 * dh_worker_start() - start the thread, with all signals blocked: they are the main thread's business.
 * @name:  as /proc shows it, at most 15 bytes
 * @stack: bytes; 0 is the default, which is only reserved, but counts where memory is locked
 *
 * Return: 0; -EBUSY if started before; -EAGAIN, -EINVAL as pthread_create(3).
 */
int dh_worker_start(struct dh_worker *w, const char *name, size_t stack);

/*
 * dh_worker_rest() - for the thread: sleep, unless it is asked to end.
 *
 * Return: whether it is asked to end, at once or during @ns.
 */
bool dh_worker_rest(struct dh_worker *w, uint64_t ns);

/* dh_worker_ask() - ask the thread to end and do not wait: with several, ask all before the first wait. */
void dh_worker_ask(struct dh_worker *w);

/*
 * dh_worker_stop() - ask the thread to end, wait, and release the owner. @w is the thread's afterwards.
 *
 * Return: 0, and the owner is released; a worker that was never started is no other. -ETIMEDOUT: it is
 *         left behind, and released by the thread if that ever returns.
 * Blocks: at most @timeout_ns.
 */
int dh_worker_stop(struct dh_worker *w, uint64_t timeout_ns);

#endif

/*
 * worker.h - a thread that can be abandoned.
 *
 * A read of the kernel or a call of a driver can hang for ever, and no thread can be ended from outside. So
 * such a thread is requested to stop, waited for, and abandoned after a timeout together with everything it
 * uses. The last of the two sides frees that: the thread if it returns after all, or the stopping thread. The
 * owner decides what runs in the thread.
 */
#ifndef DH_WORKER_H
#define DH_WORKER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * dh_eventfd_notify() - wake the reader of an eventfd. Fails only if 2^64-2 wakes are unread, and then the
 * reader is about to wake anyway.
 */
void dh_eventfd_notify(int fd);

/* A worker is a member of its owner. */
struct dh_worker {
    void (*run)(void *owner);     /* the thread's function; must return soon after stop_fd became readable */
    void (*release)(void *owner); /* end of the owner: frees it, and calls dh_worker_close() */
    void *owner;
    int stop_fd;                  /* polled by the thread; stays readable */
    int done_fd;
    pthread_t thread;
    bool running;
    _Atomic uint32_t ending;
};

/*
 * dh_worker_open() - prepare a thread that calls @run(@owner), without starting it.
 *
 * Must be the first call for a worker; afterwards dh_worker_close() may be called, even if this call failed.
 * Only dh_worker_stop() calls @release.
 *
 * Return: 0; -EMFILE, -ENFILE, -ENOMEM as eventfd(2).
 */
int dh_worker_open(struct dh_worker *w, void (*run)(void *owner), void (*release)(void *owner), void *owner);

/* dh_worker_close() - close the descriptors; called by @release. */
void dh_worker_close(struct dh_worker *w);

/*
 * dh_worker_start() - start the thread with all signals blocked: the main thread handles signals.
 * @name:  as /proc shows it, at most 15 bytes
 * @stack: bytes; 0 is the default, which is only reserved, but counts if memory is locked
 *
 * Return: 0; -EBUSY if started before; -EAGAIN, -EINVAL as pthread_create(3).
 */
int dh_worker_start(struct dh_worker *w, const char *name, size_t stack);

/*
 * dh_worker_wait() - wait until @fd is readable, or @until_ns, or the thread is requested to stop. For the
 * thread itself.
 * @fd: -1 is none
 *
 * Return: whether it is requested to stop.
 */
bool dh_worker_wait(struct dh_worker *w, int fd, uint64_t until_ns);

/*
 * dh_worker_request_stop() - request the thread to stop without waiting. With several workers, request all
 * before waiting for the first.
 */
void dh_worker_request_stop(struct dh_worker *w);

/*
 * dh_worker_stop() - request the thread to stop, wait, and release the owner. @w must not be used afterwards.
 *
 * Return: 0, and the owner is released, also if the worker was never started. -ETIMEDOUT: the thread is
 *         abandoned, and releases the owner if it ever returns.
 * Blocks: at most @timeout_ns.
 */
int dh_worker_stop(struct dh_worker *w, uint64_t timeout_ns);

#endif

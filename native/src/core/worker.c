/* worker.c - start, stop and abandonment of a thread that may hang. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/worker.h"

#define POLL_MAX_MS 3600000

/* Values of dh_worker.ending: the second side to set one releases the owner. */
enum { ENDING_NO, ENDING_THREAD_GONE, ENDING_ABANDONED };

int dh_worker_open(struct dh_worker *w, void (*run)(void *owner), void (*release)(void *owner), void *owner)
{
    *w = (struct dh_worker){ .run = run, .release = release, .owner = owner, .done_fd = -1 };
    w->stop_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (w->stop_fd >= 0)
        w->done_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return w->done_fd < 0 ? -errno : 0;
}

void dh_worker_close(struct dh_worker *w)
{
    if (w->stop_fd >= 0)
        close(w->stop_fd);
    if (w->done_fd >= 0)
        close(w->done_fd);
}

void dh_eventfd_notify(int fd)
{
    uint64_t one = 1;

    (void)!write(fd, &one, sizeof(one));
}

static void *thread_main(void *arg)
{
    struct dh_worker *w = arg;

    w->run(w->owner);
    dh_eventfd_notify(w->done_fd);
    if (atomic_exchange(&w->ending, ENDING_THREAD_GONE) == ENDING_ABANDONED)
        w->release(w->owner);
    return NULL;
}

static int thread_make(struct dh_worker *w, size_t stack)
{
    pthread_attr_t attr;
    sigset_t all, before;
    int err = pthread_attr_init(&attr);

    if (err)
        return err;
    if (stack)
        err = pthread_attr_setstacksize(&attr, stack);
    if (!err) {
        sigfillset(&all); /* a new thread inherits the mask */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        err = pthread_create(&w->thread, &attr, thread_main, w);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attr);
    return err;
}

int dh_worker_start(struct dh_worker *w, const char *name, size_t stack)
{
    int err;

    if (w->running)
        return -EBUSY;
    err = thread_make(w, stack);
    if (err)
        return -err;
    pthread_setname_np(w->thread, name);
    w->running = true;
    return 0;
}

bool dh_worker_wait(struct dh_worker *w, int fd, uint64_t until_ns)
{
    struct pollfd fds[] = { { .fd = w->stop_fd, .events = POLLIN }, { .fd = fd, .events = POLLIN } };
    uint64_t now_ns = dh_now_ns();
    struct timespec t = dh_timespec(until_ns > now_ns ? until_ns - now_ns : 0);

    return ppoll(fds, 2, &t, NULL) > 0 && fds[0].revents;
}

void dh_worker_request_stop(struct dh_worker *w)
{
    dh_eventfd_notify(w->stop_fd);
}

static bool is_done(const struct dh_worker *w, uint64_t timeout_ns)
{
    struct pollfd done = { .fd = w->done_fd, .events = POLLIN };
    uint64_t begun = dh_now_ns(), waited = 0;

    do {
        uint64_t left_ms = (timeout_ns - waited) / 1000000 + 1;

        if (poll(&done, 1, left_ms < POLL_MAX_MS ? (int)left_ms : POLL_MAX_MS) > 0)
            return true;
        waited = dh_now_ns() - begun;
    } while (waited < timeout_ns);
    return false;
}

int dh_worker_stop(struct dh_worker *w, uint64_t timeout_ns)
{
    if (!w->running) {
        w->release(w->owner);
        return 0;
    }
    dh_worker_request_stop(w);
    if (is_done(w, timeout_ns)) {
        pthread_join(w->thread, NULL);
        w->release(w->owner);
        return 0;
    }
    pthread_detach(w->thread);
    if (atomic_exchange(&w->ending, ENDING_ABANDONED) == ENDING_THREAD_GONE)
        w->release(w->owner);
    return -ETIMEDOUT;
}

/* Tests of a thread that can be abandoned: its owner is always released, and exactly once. */
#include <signal.h>

#include "check.h"
#include "fixture.h"
#include "core/worker.h"

static _Atomic int released; /* owners released since the program began */

struct owner {
    struct dh_worker worker;
    int hang_fd; /* -1: cooperative; otherwise the thread reads it before it checks for the stop */
    _Atomic bool runs, blocked;
    size_t stack;
};

static void run(void *arg)
{
    struct owner *o = arg;
    pthread_attr_t attr;
    sigset_t mask;
    char byte;

    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    o->blocked = sigismember(&mask, SIGTERM) && sigismember(&mask, SIGINT) && sigismember(&mask, SIGPROF);
    pthread_getattr_np(pthread_self(), &attr);
    pthread_attr_getstacksize(&attr, &o->stack);
    pthread_attr_destroy(&attr);
    o->runs = true;
    if (o->hang_fd >= 0)
        (void)!read(o->hang_fd, &byte, 1);
    while (!dh_worker_wait(&o->worker, -1, dh_now_ns() + DH_NS / 1000))
        ;
}

static void release(void *arg)
{
    struct owner *o = arg;

    dh_worker_close(&o->worker);
    free(o);
    atomic_fetch_add(&released, 1);
}

static struct owner *owner(int hang_fd)
{
    struct owner *o = calloc(1, sizeof(*o));

    o->hang_fd = hang_fd;
    CHECK_INT(dh_worker_open(&o->worker, run, release, o), 0);
    return o;
}

static void test_cooperative_thread_is_waited_for(void)
{
    struct owner *o = owner(-1);
    char name[16] = "";

    CHECK_INT(dh_worker_start(&o->worker, "dh-test", 256 * 1024), 0);
    CHECK_INT(dh_worker_start(&o->worker, "dh-test", 0), -EBUSY);
    EVENTUALLY(o->runs);
    CHECK(o->blocked);
    CHECK(o->stack >= 256 * 1024 && o->stack < 1024 * 1024);
    pthread_getname_np(o->worker.thread, name, sizeof(name));
    CHECK_STR(name, "dh-test");
    CHECK_INT(dh_worker_stop(&o->worker, UINT64_MAX), 0);
    CHECK_INT(released, 1);
}

static void test_worker_never_started_is_released(void)
{
    struct owner *o = owner(-1);

    CHECK_INT(dh_worker_start(&o->worker, "dh-test", 1), -EINVAL); /* no valid stack size */
    CHECK_INT(dh_worker_stop(&o->worker, 0), 0);
    CHECK_INT(released, 2);
}

static void test_hung_worker_is_released_when_it_returns(void)
{
    uint64_t begun = dh_now_ns();
    struct owner *o;
    int fds[2];

    fx_must(!pipe(fds), "pipe");
    o = owner(fds[0]);
    CHECK_INT(dh_worker_start(&o->worker, "dh-test", 0), 0);
    EVENTUALLY(o->runs);
    CHECK_INT(dh_worker_stop(&o->worker, DH_NS / 50), -ETIMEDOUT);
    CHECK(dh_now_ns() - begun >= DH_NS / 50);
    CHECK_INT(released, 2);
    CHECK(write(fds[1], "", 1) == 1);
    EVENTUALLY(released == 3);
    close(fds[0]);
    close(fds[1]);
}

static void test_several_workers_stop_in_parallel(void)
{
    struct owner *o[2] = { owner(-1), owner(-1) };

    for (int i = 0; i < 2; i++)
        CHECK_INT(dh_worker_start(&o[i]->worker, "dh-test", 0), 0);
    for (int i = 0; i < 2; i++)
        dh_worker_request_stop(&o[i]->worker);
    CHECK(dh_worker_wait(&o[1]->worker, -1, dh_now_ns() + 3600 * DH_NS)); /* one request reaches all */
    for (int i = 0; i < 2; i++)
        CHECK_INT(dh_worker_stop(&o[i]->worker, FX_PATIENCE_NS), 0);
    CHECK_INT(released, 5);
}

/* Without time to wait: sometimes the thread is first, sometimes the stopping side. */
static void test_last_side_releases_the_owner(void)
{
    for (int i = 1; i <= 300; i++) {
        struct owner *o = owner(-1);

        CHECK_INT(dh_worker_start(&o->worker, "dh-test", 0), 0);
        dh_worker_request_stop(&o->worker);
        if (i % 3)
            usleep(50);
        dh_worker_stop(&o->worker, 0);
        EVENTUALLY(released == 5 + i);
    }
}

int main(void)
{
    int descriptors;

    fx_begin();
    descriptors = fx_count("/proc/self/fd");
    test_cooperative_thread_is_waited_for();
    test_worker_never_started_is_released();
    test_hung_worker_is_released_when_it_returns();
    test_several_workers_stop_in_parallel();
    test_last_side_releases_the_owner();
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    return check_done("test_thread_worker");
}

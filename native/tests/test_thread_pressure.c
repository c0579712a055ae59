/*
 * Tests of the machine watch's thread and its triggers: handled between passes, and a broken one causes no
 * busy loop. A socket with urgent data stands for a trigger that fires, a pipe without a reader for a broken
 * one.
 */
#include "check.h"
#include "machine_fixture.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#define LINE(kind, total) kind " avg10=0.10 avg60=0.20 avg300=0.30 total=" total "\n"

static void machine_make(const char *memory)
{
    fx_write(LINE("some", "9000"), "proc/pressure/cpu");
    fx_write(memory, "proc/pressure/memory");
    fx_write(LINE("some", "50") LINE("full", "40"), "proc/pressure/io");
}

/* Make a connection over the loopback device: only there is data urgent. */
static void connection(int fd[2])
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof(at);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    fx_must(listener >= 0 && !bind(listener, (struct sockaddr *)&at, len) && !listen(listener, 1) &&
            !getsockname(listener, (struct sockaddr *)&at, &len), "listen");
    fd[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fx_must(fd[0] >= 0 && !connect(fd[0], (struct sockaddr *)&at, len), "connect");
    fd[1] = accept(listener, NULL, NULL);
    fx_must(fd[1] >= 0, "accept");
    close(listener);
}

static const struct dh_source *pressure(struct mx *x)
{
    mx_read(x);
    return mx_source(x, DH_MACHINE_PRESSURE);
}

/* Start a watch with passes an hour apart; it owns @trigger from now on. */
static struct mx started(int trigger)
{
    struct dh_machine_options o = mx_options();
    struct mx x;

    o.period_ns = o.slow_ns = o.rare_ns = 3600 * DH_NS;
    x = mx_open(&o);
    x.m->trigger[1] = trigger;
    CHECK_INT(dh_machine_start(x.m), 0);
    EVENTUALLY(pressure(&x)->passes == 1);
    EVENTUALLY(mx_woken(&x));
    return x;
}

static void test_trigger_is_handled_between_passes(void)
{
    struct dh_durations before[DH_MACHINE_SOURCE_NUM], after[DH_MACHINE_SOURCE_NUM];
    uint64_t heartbeat_ns, fired_ns;
    struct mx x;
    int fd[2];
    char urgent;

    machine_make(LINE("some", "700") LINE("full", "300"));
    connection(fd);
    x = started(fcntl(fd[1], F_DUPFD_CLOEXEC, 0));
    heartbeat_ns = pressure(&x)->heartbeat_ns;
    CHECK_U64(x.head->psi_memory_full_us, 300);
    machine_make(LINE("some", "800") LINE("full", "400"));
    dh_machine_durations(x.m, before);
    poll(NULL, 0, 50); /* no part of the reading */
    fired_ns = dh_now_ns();
    CHECK_INT(send(fd[0], "!", 1, MSG_OOB), 1);
    EVENTUALLY(mx_woken(&x)); /* after its reading was published */
    dh_machine_durations(x.m, after);
    CHECK(after[DH_MACHINE_PRESSURE].sum_ns > before[DH_MACHINE_PRESSURE].sum_ns);
    CHECK(after[DH_MACHINE_PRESSURE].sum_ns - before[DH_MACHINE_PRESSURE].sum_ns <= dh_now_ns() - fired_ns);
    CHECK(pressure(&x)->heartbeat_ns > heartbeat_ns);
    CHECK(pressure(&x)->passes > 1);
    CHECK_U64(x.head->psi_memory_full_us, 400);
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->passes, 1);
    EVENTUALLY(recv(fd[1], &urgent, 1, MSG_OOB) == 1); /* as the kernel does when the trigger is polled */
    mx_close(&x);
    close(fd[0]);
    close(fd[1]);
}

static void test_broken_trigger_is_no_busy_loop(void)
{
    struct mx x;
    int fd[2];

    machine_make(LINE("some", "700") LINE("full", "300"));
    fx_must(!pipe2(fd, O_CLOEXEC), "pipe2");
    x = started(fd[1]);
    close(fd[0]);
    EVENTUALLY(fcntl(fd[1], F_GETFD) < 0); /* it is closed */
    CHECK_U64(pressure(&x)->passes, 1);
    CHECK(!mx_woken(&x));
    fx_must(!eventfd_write(dh_machine_rescan_fd(x.m), 1), "eventfd_write");
    EVENTUALLY(pressure(&x)->passes == 2);
    mx_close(&x);
}

int main(void)
{
    int descriptors;

    fx_begin();
    descriptors = fx_count("/proc/self/fd");
    test_trigger_is_handled_between_passes();
    test_broken_trigger_is_no_busy_loop();
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    return check_done("test_thread_pressure");
}

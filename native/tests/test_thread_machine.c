/* Tests of the machine watch's thread: a hanging file, rescan requests, reading, and the stop. */
#include <pthread.h>

#include "check.h"
#include "machine_fixture.h"
#include "hung_fixture.h"
#include "readers_fixture.h"

#define MC "sys/devices/system/edac/mc/mc0"
#define ONLINE "sys/devices/system/node/online"
#define READERS 2
#define HANG_NS (DH_NS / 2)

static struct mx started(uint64_t period_ns)
{
    struct dh_machine_options o = mx_options();
    struct mx x;

    o.period_ns = o.slow_ns = o.rare_ns = period_ns;
    x = mx_open(&o);
    CHECK_INT(dh_machine_start(x.m), 0);
    return x;
}

static bool has_passed(struct mx *x, enum dh_machine_source source, uint64_t passes)
{
    return dh_machine_read(x->m, x->head, x->cap) > 0 && mx_source(x, source)->passes >= passes;
}

static int hung_threads(void)
{
    return fx_threads("dh-machine", true);
}

static void test_healthy_thread_ends_at_once(void)
{
    int descriptors = fx_count("/proc/self/fd");
    struct mx x = started(3600 * DH_NS);

    EVENTUALLY(has_passed(&x, DH_MACHINE_PRESSURE, 1));
    CHECK_INT(dh_machine_start(x.m), -EBUSY);
    CHECK_INT(dh_machine_pass(x.m), -EBUSY);
    mx_close(&x);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    EVENTUALLY(fx_threads("dh-machine", false) == 0);
}

static void test_thread_hung_at_start_is_abandoned(void)
{
    int descriptors = fx_count("/proc/self/fd");
    uint64_t begun_ns = dh_now_ns();
    struct mx x;

    fx_fifo(MC "/ce_count");
    x = started(DH_NS / 100);
    EVENTUALLY(hung_threads() == 1);
    mx_read(&x);
    CHECK(!mx_woken(&x));
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++) {
        CHECK_INT(mx_source(&x, i)->state, DH_STATE_STARTING);
        CHECK_U64(mx_source(&x, i)->passes, 0);
        CHECK(mx_source(&x, i)->heartbeat_ns >= begun_ns); /* the reader sees since when */
    }
    CHECK_INT(dh_machine_stop(x.m, DH_NS / 20), -ETIMEDOUT);
    close(x.wake_fd);
    free(x.head);
    CHECK(hung_threads() == 1);

    fx_release(MC "/ce_count"); /* now it ends by itself and frees everything, which LeakSanitizer checks */
    EVENTUALLY(fx_threads("dh-machine", false) == 0);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

static void test_hung_source_stalls_its_heartbeat_and_keeps_values(void)
{
    struct mx x;
    uint64_t heartbeat_ns;

    fx_write("7\n", MC "/ce_count");
    x = started(DH_NS / 100);
    EVENTUALLY(has_passed(&x, DH_MACHINE_PRESSURE, 2));
    fx_fifo(ONLINE); /* of memory; EDAC comes before it */
    EVENTUALLY(hung_threads() == 1);
    mx_read(&x);
    heartbeat_ns = mx_source(&x, DH_MACHINE_MEMORY)->heartbeat_ns;
    CHECK(mx_source(&x, DH_MACHINE_EDAC)->heartbeat_ns > heartbeat_ns);
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->passes, mx_source(&x, DH_MACHINE_MEMORY)->passes + 1);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, 7);
    CHECK_U64(x.head->nodes_online, 1);

    fx_release(ONLINE);
    fx_write("0\n", ONLINE);
    EVENTUALLY(has_passed(&x, DH_MACHINE_MEMORY, 1) && mx_source(&x, DH_MACHINE_MEMORY)->heartbeat_ns > heartbeat_ns);
    EVENTUALLY(has_passed(&x, DH_MACHINE_MEMORY, 1) && x.head->nodes_online == 1);
    mx_close(&x);
}

/* One pass per hour and rescan requests as fast as possible: the state at the last request is read. */
static void test_no_rescan_request_is_lost(void)
{
    struct mx x = started(3600 * DH_NS);
    char text[16];

    EVENTUALLY(has_passed(&x, DH_MACHINE_PRESSURE, 1));
    for (int i = 1; i <= 1000; i++) {
        snprintf(text, sizeof(text), "%d\n", i);
        fx_write(text, MC "/ce_count");
        fx_must(!eventfd_write(dh_machine_rescan_fd(x.m), 1), "eventfd_write");
    }
    EVENTUALLY(has_passed(&x, DH_MACHINE_EDAC, 2) && mx_dimm(&x, 0, DH_CONTROLLER)->ce == 1000);
    mx_close(&x);
}

static void *one_pass(void *machine)
{
    int err = dh_machine_pass(machine);

    dh_machine_pause_rescans(machine);
    return err ? machine : NULL;
}

/* The pause after a rescan is a multiple of the CPU time that it took, not of the time for which a file hung. */
static void test_rescan_after_a_hang_is_not_delayed_by_its_length(void)
{
    struct dh_machine_options o = mx_options();
    struct mx x = mx_open(&o);
    pthread_t reader;
    void *failed;

    fx_fifo(MC "/ce_count");
    fx_must(!pthread_create(&reader, NULL, one_pass, x.m), "pthread_create");
    EVENTUALLY(fx_threads("test_thread_mac", true) == 1); /* it has opened the FIFO */
    usleep(HANG_NS / 1000);
    fx_release(MC "/ce_count");
    fx_must(!pthread_join(reader, &failed), "pthread_join");
    CHECK(!failed);
    CHECK(x.m->rescan_after_ns > 0);
    CHECK(x.m->rescan_after_ns < dh_now_ns() + HANG_NS);
    fx_write("0\n", MC "/ce_count");
    mx_close(&x);
}

/* Also during the time in which requests are ignored. */
static void test_stop_during_rescan_requests_ends_the_thread(void)
{
    struct mx x = started(3600 * DH_NS);

    for (int i = 0; i < 100; i++)
        fx_must(!eventfd_write(dh_machine_rescan_fd(x.m), 1), "eventfd_write");
    mx_close(&x);
    EVENTUALLY(fx_threads("dh-machine", false) == 0);
}

static const char *check_copy_of(const void *was_before, const void *is_now)
{
    const struct dh_machine_head *before = was_before, *now = is_now;
    const struct dh_dimm *was = (const struct dh_dimm *)(const void *)(before + 1);
    const struct dh_dimm *is = (const struct dh_dimm *)(const void *)(now + 1);

    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++)
        if (now->source[i].passes < before->source[i].passes ||
            now->source[i].heartbeat_ns < before->source[i].heartbeat_ns)
            return "time went back";
    if (now->dimms > 1 || now->numas > 1 || now->cores || now->reads < before->reads)
        return "the head has a wrong size";
    return before->dimms && is->ce < was->ce ? "a count fell" : NULL;
}

static int64_t copy(void *from, void *buf, size_t cap)
{
    return dh_machine_read(from, buf, cap);
}

static uint64_t moves(const void *now)
{
    return ((const struct dh_machine_head *)now)->reads;
}

static void errors_write(const char *text)
{
    fx_write(text, MC "/ce_count");
}

static void test_reader_never_gets_a_torn_copy(void)
{
    struct rx_source source = { .copy = copy, .check_copy_of = check_copy_of, .moves = moves, .changes = RX_CHANGES };
    struct rx readers;
    struct mx x;

    errors_write(RX_NUMBER);
    x = started(DH_NS / 100);
    source.from = x.m;
    source.bytes = x.cap;
    rx_start(&readers, &source, READERS);
    rx_grow(&readers, errors_write);
    rx_end(&readers);
    mx_close(&x);
}

int main(void)
{
    fx_begin();
    fx_dir("proc");
    fx_write("0\n", MC "/ce_count");
    fx_write("0\n", ONLINE);
    test_healthy_thread_ends_at_once();
    test_thread_hung_at_start_is_abandoned();
    test_hung_source_stalls_its_heartbeat_and_keeps_values();
    test_no_rescan_request_is_lost();
    test_rescan_after_a_hang_is_not_delayed_by_its_length();
    test_stop_during_rescan_requests_ends_the_thread();
    test_reader_never_gets_a_torn_copy();
    return check_done("test_thread_machine");
}

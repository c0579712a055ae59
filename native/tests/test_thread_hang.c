/* Tests of a source of the sampler that never returns. */
#include "check.h"
#include "fixture.h"
#include "hung_fixture.h"

#define CPUS "sys/devices/system/cpu/online"
#define POOL "sys/kernel/mm/hugepages/hugepages-2048kB"

/* Start a thread that probes missing files every 20 ms. */
static struct fx started(void)
{
    struct dh_options o = fx_options();
    struct fx f;

    o.period_ns = o.sweep_ns = DH_NS / 100;
    o.resync_ns = DH_NS / 50;
    o.held_bytes = 0; /* an open file does not hang when another one gets its name */
    f = fx_open(&o, "/", NULL, 0);
    CHECK_INT(dh_sampler_start(f.s), 0);
    return f;
}

static int samplers(bool asleep)
{
    return fx_threads("dh-sampler", asleep);
}

static void test_healthy_thread_ends_at_once(void)
{
    int descriptors = fx_count("/proc/self/fd");
    struct fx f = started();

    EVENTUALLY(dh_sampler_read(f.s, 0, f.head, f.cap) > 0 && f.head->passes > 2);
    CHECK_INT(dh_sampler_start(f.s), -EBUSY);
    CHECK_INT(dh_sampler_pass(f.s), -EBUSY);
    CHECK_INT(dh_sampler_lower_bound(f.s, 0), -EBUSY);
    CHECK_INT(dh_sampler_sweep(f.s), -EBUSY);
    CHECK_INT(dh_sampler_stop(f.s, UINT64_MAX), 0); /* unlimited, but only as long as necessary */
    free(f.head);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    EVENTUALLY(samplers(false) == 0);
}

static void test_hung_thread_is_abandoned(void)
{
    int descriptors = fx_count("/proc/self/fd");
    uint64_t begun = dh_now_ns(), waited;
    struct fx f;

    fx_fifo(POOL "/free_hugepages");
    f = started();
    EVENTUALLY(samplers(true) == 1);
    CHECK(!fx_woken(&f));
    fx_read(&f); /* the reader sees since when */
    CHECK_U64(f.head->seq + f.head->passes + f.head->heartbeat_ns, 0);
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        CHECK_INT(f.head->source[i].state, DH_STATE_STARTING);
        CHECK_U64(f.head->source[i].passes, i == DH_SOURCE_CPUS); /* done before it */
        CHECK(f.head->source[i].heartbeat_ns >= begun);
    }
    CHECK(f.head->source[DH_SOURCE_CPUS].heartbeat_ns > f.head->source[DH_SOURCE_HUGEPAGES].heartbeat_ns);
    begun = dh_now_ns();
    CHECK_INT(dh_sampler_stop(f.s, DH_NS / 20), -ETIMEDOUT);
    waited = dh_now_ns() - begun;
    CHECK(waited >= DH_NS / 20);
    free(f.head);
    CHECK(samplers(true) == 1);

    fx_release(POOL "/free_hugepages"); /* now it ends by itself and frees everything, which LeakSanitizer
                                           checks */
    EVENTUALLY(samplers(false) == 0);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

static void test_hung_source_stalls_its_heartbeat_and_keeps_values(void)
{
    int descriptors = fx_count("/proc/self/fd");
    struct fx f = started();
    uint64_t heartbeat;

    EVENTUALLY(dh_sampler_read(f.s, 0, f.head, f.cap) > 0 && f.head->passes > 2);
    fx_fifo(POOL "/free_hugepages");
    EVENTUALLY(samplers(true) == 1);
    fx_read(&f);
    heartbeat = f.head->source[DH_SOURCE_HUGEPAGES].heartbeat_ns;
    CHECK(heartbeat > 0);
    CHECK(f.head->source[DH_SOURCE_CPUS].heartbeat_ns > heartbeat);
    CHECK_U64(f.head->source[DH_SOURCE_CPUS].passes, f.head->passes + 1);
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->nr, 512);
    poll(NULL, 0, 50); /* five periods */
    fx_read(&f);
    CHECK_U64(f.head->source[DH_SOURCE_HUGEPAGES].heartbeat_ns, heartbeat);

    fx_release(POOL "/free_hugepages");
    EVENTUALLY(dh_sampler_read(f.s, 0, f.head, f.cap) > 0 && f.head->source[DH_SOURCE_HUGEPAGES].heartbeat_ns > heartbeat);
    fx_close(&f);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    EVENTUALLY(samplers(false) == 0);
}

/* Values behind a source's heartbeat are published, though a later part of the same pass hangs. */
static void test_values_read_before_the_hang_are_published(void)
{
    static const char pod[] = "cg/kubepods/pod0b2c8a51-6c4c-4b0e-9d2f-2d0a3a9c1e11";
    struct fx f;
    uint64_t heartbeat;

    fx_write("512\n", POOL "/nr_hugepages");
    fx_write("cpu\n", "cg/cgroup.controllers");
    fx_write("nr_periods 1\nnr_throttled 0\nthrottled_usec 0\n", "%s/cpu.stat", pod);
    f = started();
    EVENTUALLY(dh_sampler_read(f.s, 0, f.head, f.cap) > 0 && f.head->passes > 2);
    fx_fifo("sys/devices/system/cpu/isolated"); /* blocks the thread before the pools are read */
    EVENTUALLY(samplers(true) == 1);
    fx_read(&f);
    heartbeat = f.head->source[DH_SOURCE_HUGEPAGES].heartbeat_ns;
    while (fx_woken(&f))
        ;
    fx_write("510\n", POOL "/nr_hugepages");
    fx_fifo("%s/cpu.stat", pod);
    fx_release("sys/devices/system/cpu/isolated");
    EVENTUALLY(dh_sampler_read(f.s, 0, f.head, f.cap) > 0 && f.head->source[DH_SOURCE_HUGEPAGES].heartbeat_ns > heartbeat);
    CHECK_U64(fx_pool(&f, 2048, DH_MACHINE)->nr, 510);
    EVENTUALLY(samplers(true) == 1);
    fx_read(&f);
    CHECK(f.head->source[DH_SOURCE_CGROUPS].heartbeat_ns < f.head->source[DH_SOURCE_HUGEPAGES].heartbeat_ns);
    fx_release("cg/kubepods/pod0b2c8a51-6c4c-4b0e-9d2f-2d0a3a9c1e11/cpu.stat");
    fx_close(&f);
    fx_remove("cg");
    EVENTUALLY(samplers(false) == 0);
}

int main(void)
{
    fx_begin();
    fx_write("0\n", CPUS);
    fx_write("512\n", POOL "/nr_hugepages");
    test_healthy_thread_ends_at_once();
    test_hung_thread_is_abandoned();
    test_hung_source_stalls_its_heartbeat_and_keeps_values();
    test_values_read_before_the_hang_are_published();
    return check_done("test_thread_hang");
}

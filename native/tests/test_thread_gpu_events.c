/* Tests of events: none is lost, none is assigned to another GPU, and no storm keeps the reader busy. */
#include "check.h"
#include "gpu_fixture.h"

static const struct dh_xid *xid_of(struct gx *g, uint32_t index, uint32_t code)
{
    static const struct dh_xid none;
    const struct dh_gpu *gpu = gx_gpu(g, index);

    for (uint32_t i = 0; i < gpu->xids; i++)
        if (gpu->xid[i].code == code)
            return &gpu->xid[i];
    return &none;
}

static void test_xid_is_latched_in_its_gpu_and_instance(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    uint64_t first;

    gx_ready(&g, 2);
    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_OK);
    CHECK_U64(gx_gpu(&g, 1)->event_mask, 0xff0b);
    while (gx_woken(&g))
        ;
    gx_command(&g, "gpu 1 xid 79");
    EVENTUALLY(xid_of(&g, 1, 79)->count == 1);
    EVENTUALLY(gx_woken(&g));
    first = xid_of(&g, 1, 79)->first_ns;
    CHECK_U64(xid_of(&g, 1, 79)->last_ns, first);
    CHECK_U64(xid_of(&g, 1, 79)->gi, DH_NO_INSTANCE);
    gx_command(&g, "gpu 1 xid 48 gi=2 ci=0");
    gx_command(&g, "gpu 1 xid 79");
    EVENTUALLY(xid_of(&g, 1, 79)->count == 2);
    CHECK_U64(xid_of(&g, 1, 79)->first_ns, first);
    CHECK(xid_of(&g, 1, 79)->last_ns > first);
    CHECK_U64(xid_of(&g, 1, 48)->gi, 2);
    CHECK_U64(xid_of(&g, 1, 48)->ci, 0);
    CHECK_U64(gx_gpu(&g, 1)->event_count[3], 3);
    CHECK_U64(gx_gpu(&g, 1)->event_last_data[3], 79);
    CHECK_U64(gx_gpu(&g, 0)->event_count[3], 0);
    gx_stop(&g);
}

/* An event before the registration would be lost: the start ends when each GPU is registered, or after 2 s. */
static void test_start_of_events_ends_when_the_last_gpu_is_registered(void)
{
    uint64_t begun_ns = dh_now_ns();
    struct gx g = gx_start(580, "profile h100 gpus=2\ngpu 1 hang nvmlDeviceRegisterEvents 500ms");

    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_OK);
    CHECK(gx_gpu(&g, 1)->event_mask || dh_now_ns() - begun_ns >= 2 * DH_NS);
    gx_stop(&g);
}

/* From the reload on, no GPU is registered: the events are not OK until each GPU is registered again, or for 2 s. */
static void test_events_after_a_reload_are_ok_when_the_last_gpu_is_registered(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    uint64_t begun_ns;

    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_OK);
    gx_command(&g, "gpu 1 hang nvmlDeviceRegisterEvents 1s");
    begun_ns = dh_now_ns();
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->generation == 2 && g.head->wait_state == DH_STATE_OK);
    CHECK(gx_gpu(&g, 1)->event_mask || dh_now_ns() - begun_ns >= 2 * DH_NS);
    gx_stop(&g);
}

/* The event is counted for its GPU, though the lost GPU cannot be queried. */
static void test_event_of_a_lost_gpu_is_counted_there(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_command(&g, "gpu 1 lost");
    gx_command(&g, "gpu 1 xid 79");
    EVENTUALLY(xid_of(&g, 1, 79)->count == 1);
    CHECK_U64(gx_gpu(&g, 1)->event_count[14], 1);
    CHECK_U64(gx_gpu(&g, 0)->event_count[14] + gx_gpu(&g, 0)->event_count[3], 0);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    gx_stop(&g);
}

/* The recovery action is read before the next regular pass. */
static void test_event_with_details_causes_a_pass(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");
    uint64_t passes;

    o.period_ns = o.slow_ns = 10 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    EVENTUALLY(gx_gpu(&g, 0)->passes >= 2); /* the second pass, when the event set existed */
    passes = gx_gpu(&g, 0)->passes;
    gx_command(&g, "gpu 0 set recovery_action=1");
    gx_command(&g, "gpu 0 event 0x8000 data=1");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_RECOVERY_ACTION) == 1);
    CHECK_U64(gx_gpu(&g, 0)->passes, passes + 1);
    gx_stop(&g);
}

/* Start a watch over GPUs whose slow fields are read once. */
static struct gx started_slow(const char *scenario)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, scenario);

    o.slow_ns = 3600 * DH_NS;
    gx_watch(&g, &o, NULL, 0);
    return g;
}

#define ROUNDS 10

/* Let the fake count remapped rows and errors, and wait until a pass has read the errors. */
static void count_errors(struct gx *g, int64_t errors)
{
    gx_command(g, "gpu 0 set remap.correctable=%d ecc.dram.uncorrectable.volatile=%d", (int)errors, (int)errors);
    EVENTUALLY(gx_value(g, 0, DH_GPU_ECC_UNCORRECTABLE) == errors);
}

/*
 * Count until the passes leave out the remapped rows, several times in a row: without a wait for events in
 * time, as on a busy machine, they are read. Return: the count.
 */
static int64_t await_pace_of_events(struct gx *g, int64_t errors)
{
    int left_out = 0;

    for (int i = 0; i < 50 * ROUNDS && left_out < ROUNDS; i++) {
        count_errors(g, ++errors);
        left_out = gx_value(g, 0, DH_GPU_REMAP_CORRECTABLE) < errors ? left_out + 1 : 0;
    }
    CHECK_INT(left_out, ROUNDS);
    return errors;
}

static void test_announced_field_is_read_after_an_event_only(void)
{
    struct gx g = started_slow("profile h100 gpus=2");
    int64_t errors;

    gx_ready(&g, 2);
    await_pace_of_events(&g, 0);
    gx_command(&g, "gpu 1 event 0x400");
    EVENTUALLY(gx_gpu(&g, 1)->event_count[10] == 1);
    errors = await_pace_of_events(&g, 1000); /* the event is another GPU's */
    gx_command(&g, "gpu 0 event 0x400");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_REMAP_CORRECTABLE) == errors);
    for (int i = 0; i < ROUNDS; i++) { /* a driver may count rows after it announced them */
        count_errors(&g, ++errors);
        EVENTUALLY(gx_value(&g, 0, DH_GPU_REMAP_CORRECTABLE) == errors);
    }
    gx_stop(&g);
}

static void test_announced_field_is_read_in_each_pass_while_waits_fail(void)
{
    struct gx g = started_slow("profile h100 gpus=1");
    int64_t errors;

    gx_ready(&g, 1);
    errors = await_pace_of_events(&g, 0);
    gx_command(&g, "wait 15");
    EVENTUALLY(gx_value(&g, 0, DH_GPU_REMAP_CORRECTABLE) == errors);
    gx_stop(&g);
}

static void test_announced_field_without_registration_is_read_in_each_pass(void)
{
    struct gx g = started_slow("profile h100 gpus=2\ngpu 0 fail nvmlDeviceRegisterEvents 999");

    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_OK && gx_gpu(&g, 1)->event_mask);
    for (int errors = 1; errors <= ROUNDS; errors++) {
        count_errors(&g, errors);
        EVENTUALLY(gx_value(&g, 0, DH_GPU_REMAP_CORRECTABLE) == errors);
    }
    gx_stop(&g);
}

/* The budget stretches the period to 10 s; an uncorrectable error is read within the configured one. */
static void test_uncorrectable_error_is_read_within_the_configured_period(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1");
    uint64_t passes, begun_ns, due_ns;

    o.slow_ns = 3600 * DH_NS;
    o.cpu_budget_ns = 1;
    gx_watch(&g, &o, NULL, 0);
    gx_ready(&g, 1);
    EVENTUALLY(gx_gpu(&g, 0)->period_ns == 10 * DH_NS);
    begun_ns = dh_now_ns();
    passes = gx_gpu(&g, 0)->passes;
    due_ns = gx_gpu(&g, 0)->heartbeat_ns + 10 * DH_NS;
    gx_command(&g, "gpu 0 set ecc.dram.uncorrectable.volatile=1");
    for (int i = 0; i < 50; i++)
        gx_command(&g, "gpu 0 event 0x2");
    EVENTUALLY(gx_gpu(&g, 0)->event_count[1] == 50);
    EVENTUALLY(gx_value(&g, 0, DH_GPU_ECC_UNCORRECTABLE) == 1);
    CHECK(gx_gpu(&g, 0)->heartbeat_ns < due_ns);
    CHECK(gx_gpu(&g, 0)->passes - passes <= (dh_now_ns() - begun_ns) / o.period_ns + 2);
    gx_stop(&g);
}

/* In bursts that fit into the fake's set while no wait is under way. */
static void test_event_storm_is_counted_and_wakes_rate_limited(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    uint64_t wakes, begun = dh_now_ns();

    gx_ready(&g, 2);
    wakes = gx_head(&g)->wakes;
    for (uint64_t gust = 1; gust <= 10; gust++) {
        gx_command(&g, "storm gpu 0 xid 31 rate=10000 for=100ms");
        gx_command(&g, "gpu 1 xid 79");
        EVENTUALLY(xid_of(&g, 1, 79)->count == gust);
        EVENTUALLY(xid_of(&g, 0, 31)->count == 1000 * gust);
    }
    CHECK_U64(gx_gpu(&g, 0)->event_count[3], 10000);
    CHECK(gx_head(&g)->wakes - wakes < (dh_now_ns() - begun) / (10 * MS) + 20);
    CHECK_U64(gx_gpu(&g, 0)->xids, 1);
    gx_stop(&g);
}

static void test_xids_beyond_the_table_evict_the_oldest(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");

    gx_ready(&g, 1);
    for (int code = 1; code <= DH_XID_MAX + 2; code++)
        gx_command(&g, "gpu 0 xid %d", code);
    EVENTUALLY(gx_gpu(&g, 0)->xid_evicted == 2);
    CHECK_U64(gx_gpu(&g, 0)->xids, DH_XID_MAX);
    CHECK_U64(xid_of(&g, 0, 1)->count + xid_of(&g, 0, 2)->count, 0);
    CHECK_U64(xid_of(&g, 0, 3)->count, 1);
    CHECK_U64(xid_of(&g, 0, DH_XID_MAX + 2)->count, 1);
    CHECK_U64(gx_gpu(&g, 0)->event_count[3], DH_XID_MAX + 2);
    gx_stop(&g);
}

/* A failing wait backs off, changes no GPU's status, and then everything is registered again. */
static void test_failed_wait_backs_off_and_registers_again(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    uint64_t waits, latched_ns;

    gx_ready(&g, 2);
    latched_ns = dh_now_ns();
    gx_command(&g, "wait 15");
    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_FAILING);
    CHECK_INT(g.head->wait_err, 15);
    CHECK(g.head->wait_failures > 0);
    waits = g.head->wait_passes - g.head->wait_failures; /* those before */
    CHECK_INT(gx_gpu(&g, 0)->status | gx_gpu(&g, 1)->status, 0);
    EVENTUALLY(gx_head(&g)->wait_failures >= 2); /* after 1 s, and then not before another 2 s */
    CHECK(dh_now_ns() - latched_ns >= DH_NS);
    CHECK_U64(g.head->wait_passes - g.head->wait_failures, waits); /* one wait for each */
    EVENTUALLY(!gx_gpu(&g, 0)->event_mask); /* until the next failure */
    gx_command(&g, "wait 0");
    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_OK);
    EVENTUALLY(gx_gpu(&g, 0)->event_mask && gx_gpu(&g, 1)->event_mask);
    gx_command(&g, "gpu 1 xid 95");
    EVENTUALLY(xid_of(&g, 1, 95)->count == 1);
    gx_stop(&g);
}

/* The GPU is lost for good, so that nothing is waited for again. How many of the events arrive before is open. */
static void test_last_events_before_a_failed_wait_are_published(void)
{
    static const char lines[] = "gpu 0 xid 94\ngpu 0 xid 94\ngpu 0 xid 94\ngpu 0 lost\nwait 15\n";
    struct gx g = gx_start(535, "profile h100 gpus=1");

    gx_ready(&g, 1);
    EVENTUALLY(gx_gpu(&g, 0)->event_mask);
    gx_command(&g, "gpu 0 xid 94");
    EVENTUALLY(xid_of(&g, 0, 94)->count == 1);
    fx_must(write(g.control, lines, sizeof(lines) - 1) > 0, "control");
    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_FAILING);
    EVENTUALLY(xid_of(&g, 0, 94)->last_ns == atomic_load(&dh_gpu_slot_at(g.w, 0)->event_ns));
    gx_stop(&g);
}

/* A library whose wait returns at once must not cost a core. */
static void test_wait_that_returns_at_once_is_no_busy_loop(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1");
    uint64_t waits, begun;

    gx_ready(&g, 1);
    gx_command(&g, "wait 10");
    begun = dh_now_ns();
    waits = gx_head(&g)->wait_passes;
    EVENTUALLY(gx_head(&g)->wait_passes >= waits + 3);
    CHECK(dh_now_ns() - begun >= DH_EVENT_WAIT_NS); /* two waits; half a wait is not "at once" either */
    gx_stop(&g);
}

static void test_gpu_that_cannot_register_does_not_affect_others(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2\ngpu 0 fail nvmlDeviceRegisterEvents 999");

    EVENTUALLY(gx_gpu(&g, 1)->event_mask);
    gx_command(&g, "gpu 1 xid 13");
    EVENTUALLY(xid_of(&g, 1, 13)->count == 1);
    CHECK_U64(gx_gpu(&g, 0)->event_mask, 0);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    gx_command(&g, "gpu 0 fail nvmlDeviceRegisterEvents 0");
    EVENTUALLY(gx_gpu(&g, 0)->event_mask);
    gx_command(&g, "gpu 0 xid 13");
    EVENTUALLY(xid_of(&g, 0, 13)->count == 1);
    gx_stop(&g);
}

static void test_gpu_hung_in_registration_does_not_affect_others(void)
{
    struct gx g = gx_start_short_deadlines(580, "profile h100 gpus=2\ngpu 0 hang nvmlDeviceRegisterEvents");

    gx_await_hang(&g, 0);
    CHECK_INT(gx_gpu(&g, 0)->call, DH_CALL_REGISTER);
    EVENTUALLY(gx_gpu(&g, 1)->event_mask);
    gx_command(&g, "gpu 1 xid 13");
    EVENTUALLY(xid_of(&g, 1, 13)->count == 1);
    gx_command(&g, "wait 999"); /* the set is given up while a thread hangs in its registration */
    EVENTUALLY(gx_head(&g)->wait_failures >= 1);
    gx_command(&g, "wait 0");
    gx_command(&g, "gpu 0 release");
    EVENTUALLY(gx_gpu(&g, 0)->event_mask && gx_gpu(&g, 1)->event_mask);
    gx_command(&g, "gpu 0 xid 13");
    EVENTUALLY(xid_of(&g, 0, 13)->count == 1);
    gx_stop(&g);
}

static void test_failed_registration_of_all_gpus_fails_the_waiter(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1\ngpu 0 fail nvmlDeviceRegisterEvents 4");

    /* the waiter may fail before the GPU tries to register, and then only reports that */
    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_FAILING && g.head->wait_err == NVML_ERROR_NO_PERMISSION);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    gx_command(&g, "gpu 0 fail nvmlDeviceRegisterEvents 0");
    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_OK);
    gx_stop(&g);
}

static void test_gpus_without_events_have_an_absent_waiter(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=1\ngpu 0 fail nvmlDeviceGetSupportedEventTypes 3");

    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_ABSENT);
    CHECK_U64(gx_gpu(&g, 0)->event_mask, 0);
    CHECK_INT(gx_gpu(&g, 0)->status, 0);
    gx_stop(&g);
}

int main(void)
{
    fx_begin();
    test_xid_is_latched_in_its_gpu_and_instance();
    test_start_of_events_ends_when_the_last_gpu_is_registered();
    test_events_after_a_reload_are_ok_when_the_last_gpu_is_registered();
    test_event_of_a_lost_gpu_is_counted_there();
    test_event_with_details_causes_a_pass();
    test_announced_field_is_read_after_an_event_only();
    test_announced_field_is_read_in_each_pass_while_waits_fail();
    test_announced_field_without_registration_is_read_in_each_pass();
    test_uncorrectable_error_is_read_within_the_configured_period();
    test_event_storm_is_counted_and_wakes_rate_limited();
    test_xids_beyond_the_table_evict_the_oldest();
    test_failed_wait_backs_off_and_registers_again();
    test_last_events_before_a_failed_wait_are_published();
    test_wait_that_returns_at_once_is_no_busy_loop();
    test_gpu_that_cannot_register_does_not_affect_others();
    test_gpu_hung_in_registration_does_not_affect_others();
    test_failed_registration_of_all_gpus_fails_the_waiter();
    test_gpus_without_events_have_an_absent_waiter();
    return check_done("test_thread_gpu_events");
}

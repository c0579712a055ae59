/* Tests of records: which changes wake the reader, and what a reader gets. */
#include <sys/mman.h>

#include "check.h"
#include "fixture.h"

#define EVENTS DH_GROUP_HT_EVENTS
#define WINDOW (60 * DH_NS)

static const struct dh_wake wakes[] = {
    { .field = DH_POOL_NR, .mode = DH_WAKE_CHANGE },
    { .field = DH_NODE_THROTTLE_CORE, .mode = DH_WAKE_RISE, .threshold = 10, .window_ns = WINDOW },
    { .field = DH_NODE_THROTTLE_PACKAGE, .mode = DH_WAKE_RISE, .threshold = 10, .window_ns = WINDOW / 6 },
    { .field = DH_POOL_SURPLUS, .mode = DH_WAKE_RISE, .threshold = 5, .window_ns = WINDOW },
    { .field = DH_GROUP_MEM_OOM, .mode = DH_WAKE_RISE, .threshold = 5, .window_ns = WINDOW },
    { .field = EVENTS, .mode = DH_WAKE_RISE, .threshold = 5, .window_ns = WINDOW },
};

/*
 * Return a sampler without roots, whose records the test writes.
 */
static struct fx bare(void)
{
    struct dh_options o = fx_options();
    struct fx f = fx_open(&o, "/", wakes, sizeof(wakes) / sizeof(*wakes));

    fx_pass(&f);
    CHECK(fx_woken(&f));
    f.s->work->head.nodes = f.s->work->head.pools = f.s->work->head.groups = 2;
    for (int i = 0; i < 2; i++)
        f.s->work->group[i].sizes = 2;
    return f;
}

/*
 * Return whether one reading wakes; its publication is discarded.
 */
static bool wakes_at(struct fx *f, enum dh_field field, uint64_t *valid, uint64_t *slot, int err,
                     uint64_t value)
{
    static uint64_t seen;
    bool woke;

    dh_store_reading(f->s, valid, &seen, field, slot, err, value);
    woke = f->s->wake;
    f->s->wake = false;
    return woke;
}

static void test_change_wakes_for_fields_with_wake_change(void)
{
    struct fx f = bare();
    struct dh_pool *p = &f.s->work->pool[0];

    CHECK(wakes_at(&f, DH_POOL_NR, &p->valid, &p->nr, 0, 512));
    CHECK(!wakes_at(&f, DH_POOL_NR, &p->valid, &p->nr, 0, 512));
    CHECK(wakes_at(&f, DH_POOL_NR, &p->valid, &p->nr, 0, 511));
    CHECK(wakes_at(&f, DH_POOL_NR, &p->valid, &p->nr, EIO, 0)); /* not readable any more */
    CHECK(!HAS(p->valid, DH_POOL_NR));
    CHECK_U64(p->nr, 0);
    CHECK(!wakes_at(&f, DH_POOL_NR, &p->valid, &p->nr, EIO, 0));
    CHECK(wakes_at(&f, DH_POOL_NR, &p->valid, &p->nr, 0, 0)); /* 0 pages differs from "unreadable" */
    CHECK(!wakes_at(&f, DH_POOL_FREE, &p->valid, &p->free, 0, 7)); /* no rule reads it */
    CHECK_U64(p->free, 7);
    fx_close(&f);
}

static void test_rise_wakes_at_its_threshold(void)
{
    struct fx f = bare();
    struct dh_hugetlb *h = &f.s->work->group[1].hugetlb[1];

    CHECK(wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 1000)); /* it became readable */
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 1004)); /* the base is 1000, not 0 */
    CHECK(wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 1005));
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 1000000)); /* once per window, however it grows */
    fx_elapse(&f, WINDOW);
    f.s->now_ns = dh_now_ns();
    dh_rise_bases_renew(f.s);
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 1000004));
    CHECK(wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 1000005));
    fx_close(&f);
}

static void test_falling_counter_takes_a_new_base(void)
{
    struct fx f = bare();
    struct dh_hugetlb *h = &f.s->work->group[0].hugetlb[0];

    wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 100);
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 104));
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 3)); /* below its base */
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 7));
    CHECK(wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 8));
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 12));
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 10)); /* fell, and is above its base of 8 */
    CHECK(!wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 14));
    CHECK(wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 15));
    fx_close(&f);
}

static void test_new_window_takes_a_new_base(void)
{
    struct fx f = bare();
    struct dh_tables *t = f.s->work;
    struct {
        enum dh_field field;
        uint64_t *valid, *slot, step;
    } counters[] = {
        { DH_NODE_THROTTLE_CORE, &t->node[1].valid, &t->node[1].throttle_core, 9 },
        { DH_POOL_SURPLUS, &t->pool[1].valid, &t->pool[1].surplus, 4 },
        { DH_GROUP_MEM_OOM, &t->group[1].valid, &t->group[1].mem_oom, 4 },
        { EVENTS, &t->group[1].hugetlb[1].valid, &t->group[1].hugetlb[1].events, 4 },
    };

    for (size_t i = 0; i < sizeof(counters) / sizeof(*counters); i++) {
        check_row = dh_field_name((uint32_t)counters[i].field);
        wakes_at(&f, counters[i].field, counters[i].valid, counters[i].slot, 0, 100);
        for (uint64_t windows = 1; windows < 4; windows++) {
            CHECK(!wakes_at(&f, counters[i].field, counters[i].valid, counters[i].slot, 0,
                            100 + windows * counters[i].step));
            fx_elapse(&f, WINDOW);
            f.s->now_ns = dh_now_ns();
            dh_rise_bases_renew(f.s);
        }
    }
    check_row = "";
    fx_close(&f);
}

/* Two counters of one record: the shorter window of one must not reset the base of the other. */
static void test_windows_of_two_fields_are_independent(void)
{
    struct fx f = bare();
    struct dh_node *n = &f.s->work->node[0];

    f.s->now_ns = dh_now_ns();
    dh_rise_bases_renew(f.s);
    wakes_at(&f, DH_NODE_THROTTLE_CORE, &n->valid, &n->throttle_core, 0, 0);
    wakes_at(&f, DH_NODE_THROTTLE_PACKAGE, &n->valid, &n->throttle_package, 0, 0);
    for (uint64_t k = 1; k < 4; k++) {
        CHECK(!wakes_at(&f, DH_NODE_THROTTLE_CORE, &n->valid, &n->throttle_core, 0, k * 3));
        CHECK(!wakes_at(&f, DH_NODE_THROTTLE_PACKAGE, &n->valid, &n->throttle_package, 0, k * 3));
        fx_elapse(&f, WINDOW / 6);
        f.s->now_ns = dh_now_ns();
        dh_rise_bases_renew(f.s);
    }
    CHECK(wakes_at(&f, DH_NODE_THROTTLE_CORE, &n->valid, &n->throttle_core, 0, 12)); /* 12 in 60 s */
    CHECK(!wakes_at(&f, DH_NODE_THROTTLE_PACKAGE, &n->valid, &n->throttle_package, 0, 12)); /* 3 in 10 s */
    fx_close(&f);
}

/* Most groups never count anything. A write to their base is a SIGSEGV in this test. */
static void test_zero_counter_needs_no_memory_for_its_base(void)
{
    struct fx f = bare();
    struct dh_group *g = &f.s->work->group[0];
    struct dh_hugetlb *h = &g->hugetlb[0];

    fx_must(!mprotect(f.s->base, f.s->table_bytes, PROT_READ), "mprotect");
    for (int window = 0; window < 2; window++) {
        CHECK_INT(wakes_at(&f, DH_GROUP_MEM_OOM, &g->valid, &g->mem_oom, 0, 0), !window);
        CHECK_INT(wakes_at(&f, EVENTS, &h->valid, &h->events, 0, 0), !window);
        fx_elapse(&f, WINDOW);
        f.s->now_ns = dh_now_ns();
        dh_rise_bases_renew(f.s);
    }
    fx_close(&f);
}

static void test_reader_gets_what_was_published(void)
{
    struct fx f = bare();
    struct dh_tables *t = f.s->work;

    t->node[1].throttle_core = 11;
    t->throttle[1].package = 55;
    t->head.throttles = 2;
    t->pool[1].nr = 22;
    t->group[0].mem_oom = 33;
    t->group[1].hugetlb[1].events = 44;
    dh_node_mark_dirty(f.s, 1);
    dh_pool_mark_dirty(f.s, 1);
    dh_group_mark_dirty(f.s, 0);
    dh_group_mark_dirty(f.s, 1);
    dh_group_mark_dirty(f.s, 1); /* marking twice counts once */
    f.s->throttle_dirty = f.s->head_dirty = true;
    dh_sampler_publish(f.s);
    CHECK_INT(f.s->group_dirty_num, 0);
    fx_read(&f);
    CHECK_U64(fx_nodes(&f)[1].throttle_core, 11);
    CHECK_U64(fx_throttles(&f)[1].package, 55);
    CHECK_U64(fx_pools(&f)[1].nr, 22);
    CHECK_U64(fx_groups(&f)[0].mem_oom, 33);
    CHECK_U64(fx_groups(&f)[1].hugetlb[1].events, 44);
    CHECK(!fx_woken(&f)); /* no change that wakes the reader */
    CHECK_U64(f.head->seq, 1);
    f.s->wake = true;
    dh_sampler_publish(f.s);
    CHECK(!fx_woken(&f)); /* the heartbeat comes before the wake */
    dh_sampler_notify(f.s);
    fx_read(&f);
    CHECK(fx_woken(&f));
    CHECK(!fx_woken(&f));
    CHECK_U64(f.head->seq, 2);
    fx_close(&f);
}

/* Groups can be many: a reader gets only those newer than its newest. */
static void test_known_groups_are_copied_as_stamps_only(void)
{
    struct fx f = bare();
    uint64_t both[2], newest;
    int64_t none;

    f.s->work->group[0].id = 7;
    f.s->work->group[1].id = 8;
    dh_group_mark_dirty(f.s, 0);
    dh_group_mark_dirty(f.s, 1);
    f.s->head_dirty = true;
    dh_sampler_publish(f.s);
    fx_read(&f);
    memcpy(both, fx_stamps(&f), sizeof(both));
    CHECK(both[0] != both[1] && both[0] && both[1]);
    CHECK_U64(fx_groups(&f)[0].stamp, both[0]);
    CHECK_U64(fx_groups(&f)[1].stamp, both[1]);
    newest = both[0] > both[1] ? both[0] : both[1];
    none = dh_sampler_read(f.s, newest, f.head, f.cap);
    CHECK_INT(none, (const char *)fx_groups(&f) - (const char *)f.head);
    CHECK_INT(dh_sampler_read(f.s, newest, f.head, (size_t)none), none); /* and no more room is needed */
    CHECK_U64(fx_stamps(&f)[0], both[0]);
    CHECK_U64(fx_stamps(&f)[1], both[1]);

    f.s->work->group[1].mem_oom = 1;
    dh_group_mark_dirty(f.s, 1);
    dh_sampler_publish(f.s);
    CHECK_INT(dh_sampler_read(f.s, newest, f.head, f.cap), none + (int64_t)sizeof(struct dh_group));
    CHECK_U64(fx_stamps(&f)[0], both[0]);
    CHECK(fx_stamps(&f)[1] > newest);
    CHECK_U64(fx_groups(&f)[0].stamp, fx_stamps(&f)[1]);
    CHECK_U64(fx_groups(&f)[0].id, 8);
    CHECK_U64(fx_groups(&f)[0].mem_oom, 1);
    fx_close(&f);
}

static void test_buffer_too_small_is_reported(void)
{
    struct fx f = bare();
    const size_t stamps = 2 * sizeof(uint64_t), both = 2 * sizeof(struct dh_group);
    const size_t others = sizeof(struct dh_snapshot) + 2 * (sizeof(struct dh_node) + sizeof(struct dh_pool));
    const size_t whole = others + stamps + both;

    dh_group_mark_dirty(f.s, 0);
    dh_group_mark_dirty(f.s, 1);
    f.s->head_dirty = true;
    dh_sampler_publish(f.s);
    CHECK_INT(dh_sampler_read(f.s, 0, f.head, sizeof(*f.head) - 8), -ENOSPC);
    CHECK_INT(dh_sampler_read(f.s, 0, f.head, others - 8), -ENOSPC);
    CHECK_INT(dh_sampler_read(f.s, 0, f.head, others + stamps - 8), -ENOSPC);
    CHECK_INT(dh_sampler_read(f.s, 0, f.head, whole - 8), -ENOSPC);
    CHECK_INT(dh_sampler_read(f.s, 0, f.head, whole), (int64_t)whole);
    CHECK(dh_sampler_size(f.s) >= whole);
    fx_close(&f);
}

/* The writer was preempted in the middle of its copy, and does not continue. */
static void test_unfinished_publication_is_not_read(void)
{
    struct fx f = bare();

    f.s->pub_lock.seq++;
    CHECK_INT(dh_sampler_read(f.s, 0, f.head, f.cap), DH_ETORN);
    f.s->pub_lock.seq++;
    fx_read(&f);
    fx_close(&f);
}

static void test_read_before_the_first_pass_has_no_data(void)
{
    struct dh_options o = fx_options();
    struct fx f = fx_open(&o, "/", NULL, 0);

    CHECK_INT(dh_sampler_read(f.s, 0, f.head, f.cap), -ENODATA);
    for (int i = 0; i < DH_SOURCE_NUM; i++)
        CHECK_INT(f.s->work->head.source[i].state, DH_STATE_STARTING);
    CHECK(!fx_woken(&f));
    fx_pass(&f);
    CHECK_INT(f.head->size, sizeof(*f.head));
    CHECK_INT(f.head->version, DH_VERSION);
    CHECK(f.head->heartbeat_ns > 0);
    CHECK(fx_woken(&f));
    fx_close(&f);
}

static void test_every_field_has_a_name(void)
{
    for (uint32_t i = 0; i < DH_FIELD_NUM; i++)
        CHECK(dh_field_name(i) && *dh_field_name(i));
    CHECK(!dh_field_name(DH_FIELD_NUM));
}

int main(void)
{
    fx_begin();
    test_read_before_the_first_pass_has_no_data();
    test_change_wakes_for_fields_with_wake_change();
    test_rise_wakes_at_its_threshold();
    test_falling_counter_takes_a_new_base();
    test_new_window_takes_a_new_base();
    test_windows_of_two_fields_are_independent();
    test_zero_counter_needs_no_memory_for_its_base();
    test_reader_gets_what_was_published();
    test_known_groups_are_copied_as_stamps_only();
    test_buffer_too_small_is_reported();
    test_unfinished_publication_is_not_read();
    test_every_field_has_a_name();
    return check_done("test_records");
}

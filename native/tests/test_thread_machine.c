/* The thread of the watch over the machine: it hangs with a file, is poked, is read, and ends. */
#include <pthread.h>

#include "check.h"
#include "machine_fixture.h"
#include "hung_fixture.h"

#define MC "sys/devices/system/edac/mc/mc0"
#define ONLINE "sys/devices/system/node/online"
#define READERS 2
#define CHANGES 20

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

static int hung(void)
{
    return fx_threads("dh-machine", true);
}

static void a_healthy_thread_ends_at_once(void)
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

static void a_thread_that_hangs_at_start_is_left_behind(void)
{
    int descriptors = fx_count("/proc/self/fd");
    uint64_t begun_ns = dh_now_ns();
    struct mx x;

    fx_fifo(MC "/ce_count");
    x = started(DH_NS / 100);
    EVENTUALLY(hung() == 1);
    mx_read(&x);
    CHECK(!mx_woken(&x));
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++) {
        CHECK_INT(mx_source(&x, i)->state, DH_STATE_STARTING);
        CHECK_U64(mx_source(&x, i)->passes, 0);
        CHECK(mx_source(&x, i)->beat_ns >= begun_ns); /* whoever looks is told since when */
    }
    CHECK_INT(dh_machine_stop(x.m, DH_NS / 20), -ETIMEDOUT);
    close(x.wake_fd);
    free(x.head);
    CHECK(hung() == 1);

    fx_release(MC "/ce_count"); /* now it ends by itself and frees all; LeakSanitizer sees to that */
    EVENTUALLY(fx_threads("dh-machine", false) == 0);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

static void the_beat_stands_still_and_what_was_read_stays(void)
{
    struct mx x;
    uint64_t beat_ns;

    fx_write("7\n", MC "/ce_count");
    x = started(DH_NS / 100);
    EVENTUALLY(has_passed(&x, DH_MACHINE_PRESSURE, 2));
    fx_fifo(ONLINE); /* of memory; EDAC comes before it */
    EVENTUALLY(hung() == 1);
    mx_read(&x);
    beat_ns = mx_source(&x, DH_MACHINE_MEMORY)->beat_ns;
    CHECK(mx_source(&x, DH_MACHINE_EDAC)->beat_ns > beat_ns);
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->passes, mx_source(&x, DH_MACHINE_MEMORY)->passes + 1);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, 7);
    CHECK_U64(x.head->nodes_online, 1);

    fx_release(ONLINE);
    fx_write("0\n", ONLINE);
    EVENTUALLY(has_passed(&x, DH_MACHINE_MEMORY, 1) && mx_source(&x, DH_MACHINE_MEMORY)->beat_ns > beat_ns);
    EVENTUALLY(has_passed(&x, DH_MACHINE_MEMORY, 1) && x.head->nodes_online == 1);
    mx_close(&x);
}

/* A pass every hour, and pokes as fast as they can be written: what was true at the last one is seen. */
static void no_poke_is_lost(void)
{
    struct mx x = started(3600 * DH_NS);
    char text[16];

    EVENTUALLY(has_passed(&x, DH_MACHINE_PRESSURE, 1));
    for (int i = 1; i <= 1000; i++) {
        snprintf(text, sizeof(text), "%d\n", i);
        fx_write(text, MC "/ce_count");
        fx_must(!eventfd_write(dh_machine_pokefd(x.m), 1), "eventfd_write");
    }
    EVENTUALLY(has_passed(&x, DH_MACHINE_EDAC, 2) && mx_dimm(&x, 0, DH_CONTROLLER)->ce == 1000);
    mx_close(&x);
}

/* Also in the middle of the time in which pokes are not heard. */
static void it_ends_while_it_is_poked(void)
{
    struct mx x = started(3600 * DH_NS);

    for (int i = 0; i < 100; i++)
        fx_must(!eventfd_write(dh_machine_pokefd(x.m), 1), "eventfd_write");
    mx_close(&x);
    EVENTUALLY(fx_threads("dh-machine", false) == 0);
}

struct reader {
    pthread_t thread;
    struct dh_machine *m;
    const char *_Atomic broken;
    _Atomic uint64_t changes;
};

static _Atomic bool over;

static const char *look(const struct dh_machine_head *before, const struct dh_machine_head *now)
{
    const struct dh_dimm *was = (const struct dh_dimm *)(const void *)(before + 1);
    const struct dh_dimm *is = (const struct dh_dimm *)(const void *)(now + 1);

    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++)
        if (now->source[i].passes < before->source[i].passes ||
            now->source[i].beat_ns < before->source[i].beat_ns)
            return "time went back";
    if (now->dimms > 1 || now->numas > 1 || now->cores || now->reads < before->reads)
        return "the head is no head";
    return before->dimms && is->ce < was->ce ? "a count fell" : NULL;
}

static void *reader_main(void *arg)
{
    struct reader *r = arg;
    size_t cap = dh_machine_size(r->m);
    struct dh_machine_head *now = aligned_alloc(8, cap), *before = aligned_alloc(8, cap), *spare;

    memset(before, 0, sizeof(*before));
    while (!atomic_load(&over) && !r->broken) {
        int64_t used = dh_machine_read(r->m, now, cap);

        if (used == DH_ETORN)
            continue;
        r->broken = used < 0 ? "an error" : look(before, now);
        r->changes += now->reads != before->reads;
        spare = before;
        before = now;
        now = spare;
    }
    free(now);
    free(before);
    return NULL;
}

static bool seen_enough(const struct reader *reader)
{
    for (int i = 0; i < READERS; i++)
        if (reader[i].changes < CHANGES && !reader[i].broken)
            return false;
    return true;
}

static void no_copy_is_torn(void)
{
    struct reader reader[READERS] = { 0 };
    struct mx x = started(DH_NS / 100);
    char text[16];

    for (int i = 0; i < READERS; i++) {
        reader[i].m = x.m;
        fx_must(!pthread_create(&reader[i].thread, NULL, reader_main, &reader[i]), "pthread_create");
    }
    for (int i = 1001; !seen_enough(reader) && i < 100000; i++) {
        snprintf(text, sizeof(text), "%d\n", i);
        fx_write(text, MC "/ce_count");
        poll(NULL, 0, 1);
    }
    over = true;
    for (int i = 0; i < READERS; i++) {
        pthread_join(reader[i].thread, NULL);
        CHECK_STR(reader[i].broken ? reader[i].broken : "", "");
        CHECK(reader[i].changes >= CHANGES);
    }
    mx_close(&x);
}

int main(void)
{
    fx_begin();
    fx_dir("proc");
    fx_write("0\n", MC "/ce_count");
    fx_write("0\n", ONLINE);
    a_healthy_thread_ends_at_once();
    a_thread_that_hangs_at_start_is_left_behind();
    the_beat_stands_still_and_what_was_read_stays();
    no_poke_is_lost();
    it_ends_while_it_is_poked();
    no_copy_is_torn();
    return check_done("test_thread_machine");
}

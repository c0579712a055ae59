/*
 * readers_fixture.h - threads that copy as fast as they can while a thread publishes, and check each copy.
 *
 * Include once per program, after check.h and fixture.h.
 */
#ifndef DH_READERS_FIXTURE_H
#define DH_READERS_FIXTURE_H

#include <pthread.h>

#include "fixture.h"

#define RX_MOST 3

struct rx_source {
    void *from;
    size_t bytes; /* of a copy, at most */
    int64_t (*copy)(void *from, void *buf, size_t cap);
    const char *(*check_copy_of)(const void *before, const void *now); /* returns what is wrong with a copy, or NULL */
    uint64_t (*moves)(const void *now); /* differs between copies of different publications */
    uint64_t changes;                   /* that each reader must see */
};

struct rx_reader {
    pthread_t thread;
    const struct rx_source *source;
    _Atomic uint64_t changes;
    const char *_Atomic broken;
};

struct rx {
    struct rx_reader reader[RX_MOST];
    int readers;
};

static _Atomic bool rx_over; /* the readers must end */

static void *rx_main(void *arg)
{
    struct rx_reader *r = arg;
    const struct rx_source *s = r->source;
    void *now = aligned_alloc(8, s->bytes), *before = aligned_alloc(8, s->bytes), *spare;

    memset(before, 0, s->bytes);
    while (!atomic_load(&rx_over) && !r->broken) {
        int64_t used = s->copy(s->from, now, s->bytes);

        if (used == DH_ETORN)
            continue;
        r->broken = used < 0 ? "an error" : s->check_copy_of(before, now);
        r->changes += s->moves(now) != s->moves(before);
        spare = before;
        before = now;
        now = spare;
    }
    free(now);
    free(before);
    return NULL;
}

static inline void rx_start(struct rx *x, const struct rx_source *source, int readers)
{
    *x = (struct rx){ .readers = readers };
    for (int i = 0; i < readers; i++) {
        x->reader[i].source = source;
        fx_must(!pthread_create(&x->reader[i].thread, NULL, rx_main, &x->reader[i]), "pthread_create");
    }
}

/*
 * Whether each reader saw enough changes, or an error. The test waits for that from time to time: while
 * nothing new is published, no reader can miss the last change.
 */
static inline bool rx_have_seen(const struct rx *x, uint64_t changes)
{
    for (int i = 0; i < x->readers; i++)
        if (x->reader[i].changes < changes && !x->reader[i].broken)
            return false;
    return true;
}

#define RX_NUMBER "100000000000000000\n" /* initial value for rx_grow() */
#define RX_CHANGES 20

/*
 * Make a number grow by changing one byte at a time, so that no partial value can be read. Of every eight
 * changes the test waits until each reader has seen one.
 */
static inline void rx_grow(const struct rx *x, void (*write)(const char *text))
{
    char text[] = RX_NUMBER;
    uint64_t steps = 0;

    for (char *digit = text; *digit != '\n'; digit += *digit == '9') {
        ++*digit;
        write(text);
        poll(NULL, 0, 4); /* two or three changes per pass of 10 ms */
        if (++steps % 8 == 0)
            EVENTUALLY(rx_have_seen(x, steps / 8));
    }
}

/* End the readers; check that none found an error, and that each saw enough changes. */
static inline void rx_end(struct rx *x)
{
    atomic_store(&rx_over, true);
    for (int i = 0; i < x->readers; i++) {
        struct rx_reader *r = &x->reader[i];

        pthread_join(r->thread, NULL);
        CHECK_STR(r->broken ? r->broken : "", "");
        CHECK(r->changes >= r->source->changes);
    }
}

#endif

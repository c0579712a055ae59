#include "core/map.h"

#include <errno.h>
#include <stdlib.h>

/* Adjacent places: a page of keys. */
#define RUN_BITS 9

/*
 * Consecutive keys, as of watch descriptors, get consecutive places: the map has room for the maximum, and
 * most of its pages are never touched. Runs of keys are spread, so that one run does not displace the next.
 */
static uint32_t home(const struct dh_map *m, uint64_t key)
{
    uint64_t run = (key >> RUN_BITS) * 0x9e3779b97f4a7c15ull >> 32;

    return (uint32_t)(run << RUN_BITS | (key & ((1u << RUN_BITS) - 1))) & m->mask;
}

int dh_map_make(struct dh_map *m, uint32_t capacity)
{
    uint32_t size = 16;

    while (size - size / 4 < capacity)
        size *= 2;
    m->key = calloc(size, sizeof(*m->key));
    m->value = calloc(size, sizeof(*m->value));
    m->mask = size - 1;
    m->used = 0;
    return m->key && m->value ? 0 : -ENOMEM;
}

void dh_map_free(struct dh_map *m)
{
    free(m->key);
    free(m->value);
}

static uint32_t find(const struct dh_map *m, uint64_t key)
{
    uint32_t i = home(m, key);

    while (m->key[i] && m->key[i] != key)
        i = (i + 1) & m->mask;
    return i;
}

bool dh_map_put(struct dh_map *m, uint64_t key, uint64_t value)
{
    uint32_t i = find(m, key);

    if (!m->key[i]) {
        if (m->used >= m->mask - m->mask / 4)
            return false; /* a quarter stays empty, or probing would not end */
        m->used++;
        m->key[i] = key;
    }
    m->value[i] = value;
    return true;
}

bool dh_map_get(const struct dh_map *m, uint64_t key, uint64_t *value)
{
    uint32_t i = find(m, key);

    if (!m->key[i])
        return false;
    *value = m->value[i];
    return true;
}

void dh_map_drop(struct dh_map *m, uint64_t key)
{
    uint32_t gap = find(m, key);

    if (!m->key[gap])
        return;
    m->used--;
    for (uint32_t i = (gap + 1) & m->mask; m->key[i]; i = (i + 1) & m->mask) {
        /* an entry may move into the gap unless its home lies between the gap and the entry */
        if (((i - home(m, m->key[i])) & m->mask) < ((i - gap) & m->mask))
            continue;
        m->key[gap] = m->key[i];
        m->value[gap] = m->value[i];
        gap = i;
    }
    m->key[gap] = 0;
}

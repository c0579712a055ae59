/* Tests of the map against a trivial model: an array that is searched from end to end. */
#include "core/map.h"

#include "check.h"

#define KEYS 64

static uint64_t seed = 0x5eed;

static uint32_t any(uint32_t below)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(seed >> 33) % below;
}

static void check_against(const struct dh_map *m, const uint64_t *key, const uint64_t *value,
                          const bool *there)
{
    uint32_t used = 0;
    bool same = true;

    for (int i = 0; i < KEYS; i++) {
        uint64_t got = 0;

        used += there[i];
        same &= dh_map_get(m, key[i], &got) == there[i] && got == (there[i] ? value[i] : 0);
    }
    CHECK(same && m->used == used);
}

/* A map this small is always nearly full, so runs of entries collide and wrap around its end. */
static void test_map_behaves_as_an_array(uint64_t stride)
{
    uint64_t key[KEYS], value[KEYS] = { 0 };
    bool there[KEYS] = { false };
    struct dh_map m;
    uint32_t room;

    CHECK_INT(dh_map_make(&m, 12), 0);
    room = 12;
    for (int i = 0; i < KEYS; i++)
        key[i] = 1 + (uint64_t)i * stride;
    for (int step = 0; step < 4000; step++) {
        uint32_t i = any(KEYS);

        if (any(2)) {
            bool fits = there[i] || m.used < room;

            CHECK(dh_map_put(&m, key[i], (uint64_t)step + 1) == fits);
            if (fits) {
                there[i] = true;
                value[i] = (uint64_t)step + 1;
            }
        } else {
            dh_map_drop(&m, key[i]);
            there[i] = false;
        }
        check_against(&m, key, value, there);
    }
    dh_map_free(&m);
}

/*
 * Return the place that an otherwise empty map gives a key.
 */
static uint32_t home_of(struct dh_map *m, uint64_t key)
{
    uint32_t at = 0;

    dh_map_put(m, key, 1);
    while (!m->key[at])
        at++;
    dh_map_drop(m, key);
    return at;
}

/* Four keys that all want the last place fill it and the first three; each is dropped in turn. */
static void test_run_of_keys_wraps_around_the_end(void)
{
    for (int dropped = 0; dropped < 4; dropped++) {
        uint64_t key[4], got;
        struct dh_map m;
        int keys = 0;

        CHECK_INT(dh_map_make(&m, 12), 0);
        for (uint64_t k = 1; keys < 4; k++)
            if (home_of(&m, k) == m.mask)
                key[keys++] = k;
        for (int i = 0; i < 4; i++)
            CHECK(dh_map_put(&m, key[i], key[i] * 10));
        CHECK_U64(m.key[m.mask], key[0]);
        CHECK_U64(m.key[2], key[3]);
        dh_map_drop(&m, key[dropped]);
        for (int i = 0; i < 4; i++)
            CHECK(dh_map_get(&m, key[i], &got) == (i != dropped) && (i == dropped || got == key[i] * 10));
        dh_map_free(&m);
    }
}

static void test_map_holds_its_capacity(void)
{
    for (uint32_t capacity = 1; capacity < 300; capacity += 7) {
        struct dh_map m;
        uint64_t got;

        CHECK_INT(dh_map_make(&m, capacity), 0);
        for (uint64_t k = 1; k <= capacity; k++)
            CHECK(dh_map_put(&m, k << 32, k));
        for (uint64_t k = capacity + 1; dh_map_put(&m, k << 32, k); k++)
            ;
        CHECK(m.used < m.mask + 1); /* full, and yet a search for a missing key ends */
        CHECK(!dh_map_get(&m, 5, &got));
        CHECK(dh_map_put(&m, 1ull << 32, 99)); /* replacing needs no room */
        CHECK(dh_map_get(&m, 1ull << 32, &got) && got == 99);
        dh_map_free(&m);
    }
}

/* A map for the largest machine costs memory only for the keys that it has. */
static void test_consecutive_keys_share_pages(void)
{
    const uint32_t page = 4096 / sizeof(uint64_t);
    uint32_t pages = 0;
    struct dh_map m;

    CHECK_INT(dh_map_make(&m, 20000), 0);
    for (uint64_t k = 1000; k < 1000 + 3 * page; k++)
        CHECK(dh_map_put(&m, k, k));
    for (uint32_t at = 0; at <= m.mask; at += page) {
        bool touched = false;

        for (uint32_t i = at; i < at + page; i++)
            touched |= m.key[i] != 0;
        pages += touched;
    }
    CHECK(pages <= 2 * 4); /* four runs, the first and the last partly; one may overflow into the next */
    dh_map_free(&m);
}

int main(void)
{
    test_map_behaves_as_an_array(1);
    test_map_behaves_as_an_array(1ull << 32);
    test_map_behaves_as_an_array(0x9e3779b97f4a7c15ull);
    test_run_of_keys_wraps_around_the_end();
    test_map_holds_its_capacity();
    test_consecutive_keys_share_pages();
    return check_done("test_map");
}

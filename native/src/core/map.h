/*
 * map.h - a hash map of fixed capacity from non-zero 64-bit keys to 64-bit values.
 *
 * For watch descriptors and hashed paths: the lowest bits of the keys must differ. Linear probing; deletion
 * moves entries back, so there are no tombstones.
 */
#ifndef DH_MAP_H
#define DH_MAP_H

#include <stdbool.h>
#include <stdint.h>

struct dh_map {
    uint64_t *key; /* 0 = empty */
    uint64_t *value;
    uint32_t mask;
    uint32_t used;
};

/* Make a map for @capacity keys. Return: 0 or -ENOMEM. */
int dh_map_make(struct dh_map *m, uint32_t capacity);
void dh_map_free(struct dh_map *m);

/* Insert or replace a value. Return: false if the map is full. */
bool dh_map_put(struct dh_map *m, uint64_t key, uint64_t value);
bool dh_map_get(const struct dh_map *m, uint64_t key, uint64_t *value);
void dh_map_drop(struct dh_map *m, uint64_t key);

#endif

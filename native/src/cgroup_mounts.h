/*
 * cgroup_mounts.h - where which controllers of which cgroup version are mounted.
 *
 * Nothing is allocated; the descriptors are the caller's.
 */
#ifndef DH_CGROUP_MOUNTS_H
#define DH_CGROUP_MOUNTS_H

#include <stdint.h>

#include "drahealth.h"

#define DH_CG_HIERS 6 /* v1 memory, cpu, hugetlb, cpuset and freezer, and v2 */

struct dh_cg_hier {
    int fd; /* O_PATH */
    uint64_t dev, ino;
    uint8_t version;
    uint8_t controllers; /* bits of enum dh_cg_controller */
};

/*
 * dh_cg_mounts_find() - look for hierarchies: v2 alone, or v1 with or without a v2 beside it.
 * @cgroupfs: the root
 * @hier:     DH_CG_HIERS entries, of which @hiers are known; what else is found is put behind them
 *
 * Return: 0; or the errno of the root, or of the last hierarchy that is there and cannot be opened.
 */
int dh_cg_mounts_find(const char *cgroupfs, struct dh_cg_hier hier[DH_CG_HIERS], uint32_t *hiers);

#endif

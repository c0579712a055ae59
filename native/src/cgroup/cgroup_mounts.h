/*
 * cgroup_mounts.h - mount points of cgroup v1 and v2 with their controllers.
 *
 * Nothing is allocated; the caller owns the descriptors.
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
 * dh_cg_mounts_find() - find hierarchies: v2 alone, or v1 with or without an additional v2.
 * @cgroupfs: the root
 * @hier:     DH_CG_HIERS entries, of which @hiers are known; new ones are appended
 *
 * Return: 0; or the errno of the root, or of the last existing hierarchy that cannot be opened.
 */
int dh_cg_mounts_find(const char *cgroupfs, struct dh_cg_hier hier[DH_CG_HIERS], uint32_t *hiers);

#endif

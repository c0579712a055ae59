/* cgroup_mounts.c - finds the mounted hierarchies; cgroup_mounts.h documents the function. */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroup/cgroup_mounts.h"
#include "core/kernfile.h"

#define CONTROLLERS ((unsigned)(DH_CG_MEMORY | DH_CG_CPU | DH_CG_HUGETLB | DH_CG_CPUSET | DH_CG_FREEZER))

struct search {
    struct dh_cg_hier *hier;
    uint32_t *hiers;
    int root;
    int err;
};

static void note_failure(struct search *in, int err)
{
    if (!dh_is_absence(err))
        in->err = err;
}

static void hier_add(struct search *in, const char *path, uint8_t version, unsigned controllers)
{
    struct dh_cg_hier *hier = in->hier;
    int fd = openat(in->root, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st)) {
        note_failure(in, errno);
        if (fd >= 0)
            close(fd);
        return;
    }
    if (*in->hiers == DH_CG_HIERS) {
        close(fd);
        return;
    }
    for (uint32_t i = 0; version == 1 && i < *in->hiers; i++)
        if (hier[i].version == 2 && hier[i].controllers & controllers) /* found before that of v1 was mounted */
            hier[i].controllers = (uint8_t)((hier[i].controllers & ~controllers) | DH_CG_CORE);
    for (uint32_t i = 0; i < *in->hiers; i++) {
        if (hier[i].dev != (uint64_t)st.st_dev || hier[i].ino != (uint64_t)st.st_ino)
            continue;
        hier[i].controllers |= (uint8_t)controllers; /* several controllers are mounted together */
        close(fd);
        return;
    }
    hier[(*in->hiers)++] = (struct dh_cg_hier){
        .fd = fd,
        .dev = (uint64_t)st.st_dev,
        .ino = (uint64_t)st.st_ino,
        .version = version,
        .controllers = (uint8_t)controllers,
    };
}

static unsigned controllers_of_v1(const struct search *in)
{
    unsigned all = 0;

    for (uint32_t i = 0; i < *in->hiers; i++)
        if (in->hier[i].version == 1)
            all |= in->hier[i].controllers;
    return all;
}

static bool is_v2(struct search *in, const char *controllers)
{
    if (!faccessat(in->root, controllers, F_OK, 0))
        return true;
    note_failure(in, errno);
    return false;
}

/*
 * Controllers of a v2 hierarchy next to v1: those that v1 lacks. Runtimes use v1's freezer if there is one.
 */
static unsigned controllers_without(unsigned v1)
{
    return (v1 & DH_CG_FREEZER ? DH_CG_CORE : 0) | (CONTROLLERS & ~v1);
}

int dh_cg_mounts_find(const char *cgroupfs, struct dh_cg_hier hier[DH_CG_HIERS], uint32_t *hiers)
{
    struct search in = { .hier = hier, .hiers = hiers };

    in.root = open(cgroupfs, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (in.root < 0)
        return errno;
    if (is_v2(&in, "cgroup.controllers")) {
        hier_add(&in, ".", 2, CONTROLLERS);
    } else {
        hier_add(&in, "memory", 1, DH_CG_MEMORY);
        hier_add(&in, "cpu", 1, DH_CG_CPU);
        if (!(controllers_of_v1(&in) & DH_CG_CPU))
            hier_add(&in, "cpu,cpuacct", 1, DH_CG_CPU);
        hier_add(&in, "hugetlb", 1, DH_CG_HUGETLB);
        hier_add(&in, "cpuset", 1, DH_CG_CPUSET);
        hier_add(&in, "freezer", 1, DH_CG_FREEZER);
        if (is_v2(&in, "unified/cgroup.controllers"))
            hier_add(&in, "unified", 2, controllers_without(controllers_of_v1(&in)));
    }
    close(in.root);
    return in.err;
}

/* cgroup_mounts.c - the mounted hierarchies; cgroup_mounts.h has the contract. */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroup_mounts.h"
#include "kernfile.h"

#define CONTROLLERS ((unsigned)(DH_CG_MEMORY | DH_CG_CPU | DH_CG_HUGETLB | DH_CG_CPUSET | DH_CG_FREEZER))

struct finding {
    struct dh_cg_hier *hier;
    uint32_t *hiers;
    int root;
    int err;
};

static void failed(struct finding *in, int err)
{
    if (!dh_is_absence(err))
        in->err = err;
}

static void hier_add(struct finding *in, const char *path, uint8_t version, unsigned controllers)
{
    struct dh_cg_hier *hier = in->hier;
    int fd = openat(in->root, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st)) {
        failed(in, errno);
        if (fd >= 0)
            close(fd);
        return;
    }
    if (*in->hiers == DH_CG_HIERS) {
        close(fd);
        return;
    }
    for (uint32_t i = 0; i < *in->hiers; i++) {
        if (hier[i].dev != (uint64_t)st.st_dev || hier[i].ino != (uint64_t)st.st_ino)
            continue;
        hier[i].controllers |= (uint8_t)controllers; /* controllers mounted together */
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

static unsigned controllers_of_v1(const struct finding *in)
{
    unsigned all = 0;

    for (uint32_t i = 0; i < *in->hiers; i++)
        if (in->hier[i].version == 1)
            all |= in->hier[i].controllers;
    return all;
}

static bool is_v2(struct finding *in, const char *controllers)
{
    if (!faccessat(in->root, controllers, F_OK, 0))
        return true;
    failed(in, errno);
    return false;
}

/* Of a v2 beside v1: what v1 does not have. Runtimes freeze with v1's freezer if there is one. */
static unsigned controllers_beside(unsigned v1)
{
    return (v1 & DH_CG_FREEZER ? DH_CG_CORE : 0) | (CONTROLLERS & ~v1);
}

int dh_cg_mounts_find(const char *cgroupfs, struct dh_cg_hier hier[DH_CG_HIERS], uint32_t *hiers)
{
    struct finding in = { .hier = hier, .hiers = hiers };

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
            hier_add(&in, "unified", 2, controllers_beside(controllers_of_v1(&in)));
    }
    close(in.root);
    return in.err;
}

/*
 * cgroup_hiers.c - the mounted hierarchies, and where in each of them kubepods will be.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroups.h"

#define CONTROLLERS ((unsigned)(DH_CG_MEMORY | DH_CG_CPU | DH_CG_HUGETLB | DH_CG_CPUSET | DH_CG_FREEZER))

/* That it cannot be opened though it is there is kept in dh_cgroups.root_err. */
static void hier_add(struct dh_sampler *s, int root, const char *path, uint8_t version, unsigned controllers)
{
    struct dh_cgroups *c = s->cgroups;
    int fd = openat(root, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st)) {
        if (!dh_is_absence(errno))
            c->root_err = errno;
        if (fd >= 0)
            close(fd);
        return;
    }
    if (c->hiers == DH_CG_HIERS) {
        close(fd);
        return;
    }
    for (uint32_t i = 0; i < c->hiers; i++) {
        if (c->hier[i].dev != (uint64_t)st.st_dev || c->hier[i].ino != (uint64_t)st.st_ino)
            continue;
        c->hier[i].controllers |= (uint8_t)controllers; /* controllers mounted together */
        close(fd);
        return;
    }
    c->hier[c->hiers].fd = fd;
    c->hier[c->hiers].dev = (uint64_t)st.st_dev;
    c->hier[c->hiers].ino = (uint64_t)st.st_ino;
    c->hier[c->hiers].version = version;
    c->hier[c->hiers].controllers = (uint8_t)controllers;
    c->hiers++;
    s->work->head.descriptors++;
    s->head_dirty = true;
}

static unsigned controllers_of_v1(const struct dh_cgroups *c)
{
    unsigned all = 0;

    for (uint32_t i = 0; i < c->hiers; i++)
        if (c->hier[i].version == 1)
            all |= c->hier[i].controllers;
    return all;
}

static bool is_v2(struct dh_cgroups *c, int root, const char *controllers)
{
    if (!faccessat(root, controllers, F_OK, 0))
        return true;
    if (!dh_is_absence(errno))
        c->root_err = errno;
    return false;
}

/* Of a v2 beside v1: what v1 does not have. Runtimes freeze with v1's freezer if there is one. */
static unsigned controllers_beside(unsigned v1)
{
    return (v1 & DH_CG_FREEZER ? DH_CG_CORE : 0) | (CONTROLLERS & ~v1);
}

/* v2 alone, or v1 with or without a v2 beside it that holds the controllers v1 does not. */
static void hiers_find(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    int root = open(s->cgroupfs, O_PATH | O_DIRECTORY | O_CLOEXEC);

    c->root_err = root < 0 ? errno : 0;
    if (root < 0)
        return;
    if (is_v2(c, root, "cgroup.controllers")) {
        hier_add(s, root, ".", 2, CONTROLLERS);
    } else {
        hier_add(s, root, "memory", 1, DH_CG_MEMORY);
        hier_add(s, root, "cpu", 1, DH_CG_CPU);
        if (!(controllers_of_v1(c) & DH_CG_CPU))
            hier_add(s, root, "cpu,cpuacct", 1, DH_CG_CPU);
        hier_add(s, root, "hugetlb", 1, DH_CG_HUGETLB);
        hier_add(s, root, "cpuset", 1, DH_CG_CPUSET);
        hier_add(s, root, "freezer", 1, DH_CG_FREEZER);
        if (is_v2(c, root, "unified/cgroup.controllers"))
            hier_add(s, root, "unified", 2, controllers_beside(controllers_of_v1(c)));
    }
    close(root);
}

/*
 * The directories that will hold kubepods: the kubelet's --cgroup-root as the cgroupfs driver
 * writes it ("a/b-c") and as the systemd driver does ("a.slice/a-b_c.slice").
 */
static void parents_enter(struct dh_sampler *s, uint8_t hier)
{
    char plain[DH_ROOT_MAX + 1] = "", dashed[DH_ROOT_MAX + 1] = "", slices[DH_CG_PATH] = "";
    size_t length = 0, listed = 0, n;

    for (const char *at = s->kubelet_root; *at; at += n ? n : 1) {
        n = strcspn(at, "/");
        if (!n)
            continue;
        if (length) {
            plain[length] = '/';
            dashed[length++] = '-';
        }
        for (size_t i = 0; i < n; i++, length++) {
            plain[length] = at[i];
            dashed[length] = at[i] == '-' ? '_' : at[i];
        }
        if (listed < sizeof(slices))
            listed += (size_t)snprintf(slices + listed, sizeof(slices) - listed, "%s%s.slice",
                                       listed ? "/" : "", dashed);
    }
    dh_cg_dir_enter(s, hier, DH_CG_PARENT, plain);
    if (listed < sizeof(slices))
        dh_cg_dir_enter(s, hier, DH_CG_PARENT, slices);
}

/*
 * Find the hierarchies, and list all that is in them. Later ones than the first find are taken in
 * too: one may have been there from the start, and only now can be opened.
 */
void dh_cg_hiers_find(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    uint32_t had = c->hiers;

    hiers_find(s);
    dh_source_root(s, DH_SOURCE_CGROUPS, DH_CGROUPFS, c->root_err);
    dh_cg_files_make(s, had);
    for (uint32_t h = had; h < c->hiers; h++)
        parents_enter(s, (uint8_t)h);
}


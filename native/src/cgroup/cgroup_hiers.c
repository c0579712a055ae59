/* cgroup_hiers.c - finds the mounted hierarchies, and the directories that will contain kubepods. */
#include <stdio.h>
#include <string.h>

#include "cgroup/cgroups.h"

/* Add a directory that will contain kubepods, and those above it, whose watches report that it is created. */
static void parent_add(struct dh_sampler *s, uint8_t hier, const char *path)
{
    char above[DH_CG_PATH];
    const char *end = path;

    for (int i = 0; *end && i < DH_CG_ABOVE_MAX; i++) {
        snprintf(above, sizeof(above), "%.*s", (int)(end - path), path);
        dh_cg_dir_add(s, hier, DH_CG_ABOVE, above);
        end += 1 + strcspn(end + 1, "/");
    }
    dh_cg_dir_add(s, hier, DH_CG_PARENT, path);
}

/*
 * Add the directories that will contain kubepods: the kubelet's --cgroup-root as the cgroupfs driver writes
 * it ("a/b-c") and as the systemd driver does ("a.slice/a-b_c.slice").
 */
static void parents_add(struct dh_sampler *s, uint8_t hier)
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
    parent_add(s, hier, plain);
    if (listed && listed < sizeof(slices))
        parent_add(s, hier, slices);
}

/*
 * Find the hierarchies and list their groups. Hierarchies that are found later are added too: one may have
 * existed from the start without permission to open it, or is mounted later.
 */
void dh_cg_hiers_find(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    uint32_t had = c->hiers;

    c->root_err = dh_cg_mounts_find(s->cgroupfs, c->hier, &c->hiers);
    s->work->head.descriptors += c->hiers - had;
    s->head_dirty |= c->hiers != had;
    dh_source_root(s, DH_SOURCE_CGROUPS, DH_CGROUPFS, c->root_err);
    dh_cg_files_make(s, had);
    for (uint32_t h = had; h < c->hiers; h++)
        parents_add(s, (uint8_t)h);
}


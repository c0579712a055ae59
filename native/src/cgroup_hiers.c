/*
 * cgroup_hiers.c - the mounted hierarchies, and where in each of them kubepods will be.
 */
#include <stdio.h>
#include <string.h>

#include "cgroups.h"

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

    c->root_err = dh_cg_mounts_find(s->cgroupfs, c->hier, &c->hiers);
    s->work->head.descriptors += c->hiers - had;
    s->head_dirty |= c->hiers != had;
    dh_source_root(s, DH_SOURCE_CGROUPS, DH_CGROUPFS, c->root_err);
    dh_cg_files_make(s, had);
    for (uint32_t h = had; h < c->hiers; h++)
        parents_enter(s, (uint8_t)h);
}


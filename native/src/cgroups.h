/*
 * cgroups.h - what the five files of the cgroup source share.
 *
 *   cgroup_files.c  which files a group has, and how their text becomes members of its record
 *   cgroup_hiers.c  the hierarchies of cgroup_mounts.h, and where in each of them kubepods will be
 *   cgroup_tree.c   the pods and containers, as they come and go
 *   cgroup_oom.c    how cgroup v1 tells of a pod that ran out of memory
 *   cgroups.c       when what is read: events, sweep, resync
 *
 * A pod's group has one slot however many v1 hierarchies hold it: its path below each is the same.
 */
#ifndef DH_CGROUPS_H
#define DH_CGROUPS_H

#include "cgroup_mounts.h"
#include "map.h"
#include "sampler.h"

#define DH_CG_PATH 512     /* kubepods' longest is 195 and four times the --cgroup-root: slices and a scope */
#define DH_CG_FILES 58     /* 6 and 6 for each hugepage size of v1, v2's own, and some that both have */
#define DH_CG_DIRS 60      /* for each hierarchy and naming: parent, kubepods, two QoS classes */
#define DH_CG_WATCHES 16   /* of one pod: its directory in each hierarchy, its notified files */
#define DH_CG_VALUES 4
#define DH_CG_OOM_FDS 256  /* eventfds; a process may have 1,024 descriptors, and others need them more */

enum dh_cg_read {
    DH_CG_SWEPT,    /* the kernel never notifies: read in every sweep, while it changes */
    DH_CG_OOM,      /* so is this, and when the pod's eventfd tells of it */
    DH_CG_NOTIFIED, /* read when the kernel notifies, and at each resync */
    DH_CG_RARE      /* changes by configuration only: read at each resync, and as evidence of a count */
};

struct dh_cg_value {
    enum dh_field field;
    const char *key; /* NULL: the file is one number */
    size_t offset;   /* in struct dh_group, or in struct dh_hugetlb */
    enum { DH_CG_PLAIN, DH_CG_LIMIT, DH_CG_STATE, DH_CG_CPUS } unit;
};

struct dh_cg_spec {
    const char *name; /* a printf format with the page size for hugetlb files */
    uint8_t version;
    enum dh_cg_controller controller;
    enum dh_cg_read read;
    struct dh_cg_value values[DH_CG_VALUES];
};

/* A spec, made concrete for this machine's hierarchies and page sizes. */
struct dh_cg_file {
    const struct dh_cg_spec *spec;
    uint8_t hier;
    int8_t size; /* index into dh_group.hugetlb, -1 for other files */
    char name[48];
};

/* A bit in dh_cg_group.watched and .refused: a file's index, or above them a directory's hierarchy. */
#define DH_CG_FILE_BIT(file) (1ull << (file))
#define DH_CG_DIR_BIT(hier) (1ull << (DH_CG_FILES + (hier)))
_Static_assert(DH_CG_FILES + DH_CG_HIERS <= 64, "a bit for each file and each directory");

enum dh_cg_level { DH_CG_PARENT, DH_CG_KUBEPODS, DH_CG_QOS, DH_CG_POD };

struct dh_cg_dir {
    uint8_t hier;
    uint8_t level;
    bool refused; /* it is there, and the kernel would not watch it */
    int wd;       /* -1: not there yet */
    uint32_t dropped; /* pods in it that have no room */
    char path[DH_CG_PATH];
};

/* Links are slots plus one; 0 is none. */
struct dh_cg_group {
    uint64_t has;     /* files that were there */
    uint64_t watched; /* a pod's files and directories with a watch */
    uint64_t refused; /* those that are there, and the kernel would not watch */
    uint64_t missed;  /* files that were gone at the last look, and their directory was not */
    uint64_t pending; /* notified, not yet read */
    uint64_t stirred; /* files that changed, or could not be read, since the last whole sweep */
    uint64_t lively;  /* those that had between that one and the one before */
    uint64_t key;     /* of the path, in dh_cgroups.by_path */
    uint64_t born_ns;
    uint32_t parent, child, next;
    uint32_t visits;
    uint32_t dropped; /* of a pod: its containers that have no room */
    uint8_t hiers; /* bit per hierarchy that has it; 0 = free slot */
    uint8_t watches;
    bool settled; /* was read again after its first second */
    bool lost;    /* something that is there cannot be read */
    bool oom_heard;    /* its memory.oom_control is registered with the pod's eventfd */
    uint8_t oom_looks; /* of a pod: looks that it is still owed, one in a pass */
    int oom_fd;        /* of a pod: its eventfd plus one; 0 = none */
    int wd[DH_CG_WATCHES];
    char path[DH_CG_PATH]; /* below the hierarchy's root */
};

struct dh_cgroups {
    struct dh_cg_hier hier[DH_CG_HIERS];
    uint32_t hiers;
    struct dh_cg_file file[DH_CG_FILES];
    uint32_t files;
    uint64_t local; /* files whose events the kernel does not pass on to the ancestors */
    uint64_t swept, oom; /* files in DH_CG_SWEPT and DH_CG_OOM */
    uint64_t size_kib[DH_HP_MAX];
    uint32_t sizes;
    struct dh_cg_dir dir[DH_CG_DIRS];
    uint32_t dirs, dirs_refused;
    struct dh_cg_group *group; /* group_max, mapped */
    uint32_t *pending;         /* slots with pending != 0, each once */
    uint32_t pending_num;
    uint32_t next_id, free_hint, lost;
    uint32_t cursor;   /* of the sweep */
    int64_t owed;      /* what the sweep is behind, or ahead of, in groups times sweep_ns */
    uint32_t near;     /* slot + 1 of the pod that is being swept; 0 = none */
    int near_fd[DH_CG_HIERS]; /* its directories, O_PATH, opened when first needed; -1 = not yet */
    uint64_t slice_ns; /* periods since the last slice of the sweep */
    uint64_t retry_ns; /* when missing directories were last looked for */
    int oom_timer_fd;  /* of the second look at a pod; there while dh_sampler.oom_fd is */
    uint32_t oom_owed; /* pods with oom_looks */
    int root_err;      /* why the root, or a hierarchy, could not be opened */
    bool rescan;       /* the next pass lists and reads everything */
    uint32_t reread;   /* slots below this one are still to be read whole */
    bool relist;       /* groups that have no room may find some */
    struct dh_map by_path, by_wd;
};

/* cgroup_files.c */
void dh_cg_files_make(struct dh_sampler *s, uint32_t hiers_before);
void dh_cg_sizes_init(struct dh_sampler *s, struct dh_group *g);
bool dh_cg_file_read(struct dh_sampler *s, uint32_t slot, uint32_t file); /* false: the group is gone */
bool dh_cg_dir_there(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_hier_forget(struct dh_sampler *s, uint32_t slot, uint8_t hier);
int dh_cg_base(struct dh_sampler *s, uint32_t slot, uint8_t hier, size_t *skip);
size_t dh_cg_path(const struct dh_sampler *s, uint32_t slot, uint32_t file, char out[DH_CG_PATH + 64]);

/* cgroup_hiers.c */
void dh_cg_hiers_find(struct dh_sampler *s);

/* cgroup_tree.c */
void dh_cg_dir_enter(struct dh_sampler *s, uint8_t hier, uint8_t level, const char *path);
void dh_cg_tree_list(struct dh_sampler *s, bool missing_only);
void dh_cg_pod_list(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_leave(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_entry(struct dh_sampler *s, uint64_t watch, const char *name, bool gone);
bool dh_cg_watch_is_file(uint64_t watch, uint32_t *slot, uint32_t *file);
void dh_cg_watch_ended(struct dh_sampler *s, uint64_t watch);
void dh_cg_watch(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_refused(struct dh_sampler *s, uint32_t slot, uint64_t bit, bool is);

/* cgroup_oom.c */
void dh_cg_oom_watch(struct dh_sampler *s, uint32_t slot, uint32_t file);
void dh_cg_oom_leave(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_oom_hear(struct dh_sampler *s);
void dh_cg_oom_again(struct dh_sampler *s);
void dh_cg_oom_free(struct dh_sampler *s);

/* cgroups.c */
void dh_cg_visit(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_notified(struct dh_sampler *s, uint32_t slot, uint32_t file);

#endif

/*
 * cgroup_state.h - state of the cgroup source.
 *
 *   cgroup_files.c  the files of a group, and how their text becomes members of its record
 *   cgroup_hiers.c  the hierarchies of cgroup_mounts.h, and the directories that will contain kubepods
 *   cgroup_held.c   descriptors that stay open between two reads
 *   cgroup_tree.c   pods and containers, their creation and removal
 *   cgroup_marks.c  marks on a group's files: due, without a watch
 *   cgroup_oom.c    notifications of cgroup v1 about pods that ran out of memory
 *   cgroups.c       schedule of the reads: events, sweep, resync
 *
 * A pod has one slot, however many v1 hierarchies contain it: its path is the same below each.
 */
#ifndef DH_CGROUP_STATE_H
#define DH_CGROUP_STATE_H

#include "cgroup/cgroup_mounts.h"
#include "core/map.h"
#include "core/sampler_state.h"

#define DH_CG_PATH 512     /* the longest path of kubepods has 195 bytes plus four times the --cgroup-root:
                              slices and a scope */
#define DH_CG_FILES 58     /* 6 plus 6 per hugepage size in v1, v2's own files, and some that both have */
#define DH_CG_ABOVE_MAX 3  /* watched directories above the one that contains kubepods */
#define DH_CG_DIRS 80      /* for each hierarchy its root; for each naming two more above, parent, kubepods, two QoS
                              classes */
#define DH_CG_WATCHES 16   /* of one pod: its directory in each hierarchy, its notified files */
#define DH_CG_VALUES 4
#define DH_CG_OOM_READS 12 /* reads of a pod by the timer after an OOM notification */
#define DH_CG_OOM_FDS 256  /* eventfds; a process may have 1,024 descriptors and needs the others for
                              connections */
#define DH_CG_OTHER_FDS (DH_CG_OOM_FDS + 128) /* descriptors for what is no connection and no held file */
#define DH_CG_HELD_MAX 65536

enum dh_cg_read {
    DH_CG_SWEPT,    /* without notification: read in every sweep while it changes */
    DH_CG_OOM,      /* read in every sweep while it changes, and when the pod's eventfd fires */
    DH_CG_NOTIFIED, /* read when the kernel notifies, and at each resync */
    DH_CG_RARE      /* changes by configuration only: read at each resync, and as evidence when a counter
                       wakes the reader */
};

struct dh_cg_value {
    enum dh_field field;
    const char *key; /* NULL: the file holds one number */
    size_t offset;   /* in struct dh_group or struct dh_hugetlb */
    enum { DH_CG_PLAIN, DH_CG_LIMIT, DH_CG_STATE, DH_CG_CPUS } unit;
};

struct dh_cg_spec {
    const char *name; /* a printf format; hugetlb files insert the page size */
    uint8_t version;
    enum dh_cg_controller controller;
    enum dh_cg_read read;
    struct dh_cg_value values[DH_CG_VALUES];
};

/* A spec for one hierarchy and page size of this machine. */
struct dh_cg_file {
    const struct dh_cg_spec *spec;
    uint8_t hier;
    int8_t size; /* index into dh_group.hugetlb, -1 for other files */
    char name[48];
};

/* Bits in dh_cg_group.watched and .unwatched: a file's index and, above them, a directory's hierarchy. */
#define DH_CG_FILE_BIT(file) (1ull << (file))
#define DH_CG_DIR_BIT(hier) (1ull << (DH_CG_FILES + (hier)))
_Static_assert(DH_CG_FILES + DH_CG_HIERS <= 64, "a bit for each file and each directory");

enum dh_cg_level { DH_CG_ABOVE, DH_CG_PARENT, DH_CG_KUBEPODS, DH_CG_QOS, DH_CG_POD };

struct dh_cg_dir {
    uint8_t hier;
    uint8_t level;
    bool unwatched; /* it exists, and the kernel refused a watch */
    bool unlisted;  /* it exists, and its last listing failed */
    int wd;       /* -1: does not exist yet */
    uint32_t above; /* index plus one of the directory that contains it; 0 = not known */
    uint32_t dropped; /* pods in it without room in the table */
    char path[DH_CG_PATH];
};

/* A descriptor that stays open. Links are indices plus one; 0 is none. */
struct dh_cg_held {
    int fd; /* -1: unused */
    uint32_t slot;
    uint32_t file;
    uint32_t next;   /* of the same group, or unused */
    uint64_t digest; /* of the text that was parsed last; 0 = none. Equal text needs no parsing */
};

/* Links are slots plus one; 0 is none. */
struct dh_cg_group {
    uint64_t present;    /* files that exist or existed */
    uint64_t watched;    /* a pod's files and directories with a watch */
    uint64_t unwatched;  /* existing files and directories for which the kernel refused a watch */
    uint64_t missed;     /* files that were gone in the last read, while their directory existed */
    uint64_t failed;     /* files whose last read failed; one that is not in `present` is only assumed to
                            exist: every read so far failed for lack of descriptors or memory */
    uint64_t pending;    /* notified, not yet read */
    uint64_t active;     /* files that changed, or could not be read, since the last whole sweep */
    uint64_t was_active; /* `active` of the sweep period before */
    uint64_t held;       /* files with an open descriptor */
    uint64_t key;        /* hash of the path, in dh_cgroups.by_path */
    uint64_t born_ns;
    uint32_t parent, child, next;
    uint32_t held_first; /* index plus one in dh_cgroups.held; 0 = none */
    uint32_t sweeps;
    uint32_t dropped; /* of a pod: its containers without room in the table */
    uint8_t hiers;    /* bit per hierarchy that contains it; 0 = free slot */
    uint8_t unlisted; /* of a pod: bit per hierarchy in which the last listing of its containers failed */
    uint8_t same_dirs; /* of a pod: bit per hierarchy in which the last resync found its watch alive */
    uint8_t watches;
    bool settled; /* was read again when it was one second old */
    bool unreadable;    /* something that exists cannot be read */
    bool oom_registered;    /* memory.oom_control is registered with the pod's eventfd */
    uint8_t oom_reads_due; /* of a pod: reads still to be made after an OOM notification, one per pass */
    uint8_t oom_timed_reads; /* of a pod: reads still to be made by the timer after an OOM notification */
    int oom_fd;        /* of a pod: its eventfd plus one; 0 = none */
    int wd[DH_CG_WATCHES];
    char path[DH_CG_PATH]; /* below the hierarchy's root */
};

struct dh_cgroups {
    struct dh_cg_hier hier[DH_CG_HIERS];
    uint32_t hiers;
    struct dh_cg_file file[DH_CG_FILES];
    uint32_t files;
    uint64_t local;      /* files whose events the kernel does not report to ancestors */
    uint64_t swept, oom, rare; /* files of DH_CG_SWEPT, of DH_CG_OOM and of DH_CG_RARE */
    uint64_t idle;       /* files of page sizes of which no page can be in use */
    uint64_t size_kib[DH_HP_MAX];
    uint32_t sizes;
    uint32_t pools;      /* pools whose page sizes are in size_kib */
    struct dh_cg_dir dir[DH_CG_DIRS];
    uint32_t dirs, dirs_unwatched;
    struct dh_cg_group *group; /* group_max entries, mapped */
    uint32_t *pending;         /* slots with pending != 0, each once */
    uint32_t pending_num;
    uint32_t next_id, free_hint, unreadable;
    uint32_t unlisted;        /* directories, of pods too, whose last listing failed; the next retry lists them */
    uint32_t cursor;          /* position of the sweep */
    int64_t sweep_debt;       /* groups by which the sweep is late (or, if negative, early), times sweep_ns */
    uint32_t base_pod;        /* slot + 1 of the pod that is being swept; 0 = none */
    int base_fd[DH_CG_HIERS]; /* the pod's directories, O_PATH, opened when first needed; -1 = not yet */
    struct dh_cg_held *held;  /* held_max entries, of which the first held_used were used */
    uint32_t held_max, held_used, held_num;
    uint32_t held_free;       /* first unused entry below held_used, plus one */
    uint32_t held_hand;       /* where the next search for a file of lower rank begins */
    uint64_t slice_ns;        /* time since the last slice of the sweep */
    uint64_t retry_ns;        /* when missing directories were last checked */
    int oom_timer_fd;         /* timer of the later reads after an OOM; exists with dh_sampler.oom_fd */
    uint8_t oom_pauses;       /* of the reads after the last OOM: how often the timer was set */
    uint32_t oom_pods_due;    /* pods with oom_reads_due */
    int root_err;             /* why the root, or a hierarchy, could not be opened */
    bool has_new;             /* a group may not be settled */
    bool rescan;              /* the next pass lists and reads everything */
    uint32_t reread;          /* slots below this one are still to be read in full */
    bool relist;              /* list again: groups without a record may get one */
    struct dh_map by_path, by_wd;
};

#endif

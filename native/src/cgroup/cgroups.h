/* cgroups.h - functions of the cgroup source. Not seen by Python. */
#ifndef DH_CGROUPS_H
#define DH_CGROUPS_H

#include "cgroup/cgroup_state.h"
#include "core/sampler.h"

/* cgroup_files.c */
void dh_cg_files_make(struct dh_sampler *s, uint32_t hiers_before);
void dh_cg_sizes_init(struct dh_sampler *s, struct dh_group *g);
bool dh_cg_file_read(struct dh_sampler *s, uint32_t slot, uint32_t file, bool hold); /* false: the group is
                                                                                         gone */
bool dh_cg_missing(const struct dh_cgroups *c, uint8_t hier, const char *path);
bool dh_cg_dir_exists(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_hier_clear(struct dh_sampler *s, uint32_t slot, uint8_t hier);
int dh_cg_base_dir(struct dh_sampler *s, uint32_t slot, uint8_t hier, size_t *skip);
size_t dh_cg_path(const struct dh_sampler *s, uint32_t slot, uint32_t file, char out[DH_CG_PATH + 64]);

/* cgroup_held.c */
int dh_cg_held_make(struct dh_sampler *s);
void dh_cg_held_free(struct dh_sampler *s);
struct dh_cg_held *dh_cg_held_find(const struct dh_cgroups *c, uint32_t slot, uint32_t file); /* or NULL */
void dh_cg_held_note(struct dh_cgroups *c, uint32_t slot, uint32_t file, const char *text, size_t n);
void dh_cg_held_drop(struct dh_sampler *s, uint32_t slot, uint64_t files);
void dh_cg_held_offer(struct dh_sampler *s, uint32_t slot, uint32_t file, int fd);

/* cgroup_hiers.c */
void dh_cg_hiers_find(struct dh_sampler *s);

/* cgroup_tree.c */
void dh_cg_dir_add(struct dh_sampler *s, uint8_t hier, uint8_t level, const char *path);
void dh_cg_tree_list(struct dh_sampler *s, bool missing_only);
void dh_cg_pod_list(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_group_leave(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_entry_changed(struct dh_sampler *s, uint64_t watch, const char *name, bool gone);
bool dh_cg_watch_is_file(uint64_t watch, uint32_t *slot, uint32_t *file);
void dh_cg_watch_ended(struct dh_sampler *s, uint64_t watch);
bool dh_cg_watch_dir(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_watch_files(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_group_read(struct dh_sampler *s, uint32_t slot, uint8_t hier, bool same);

/* cgroup_marks.c */
uint64_t dh_cg_watched(const struct dh_cgroups *c, uint32_t slot);
uint64_t dh_cg_still(const struct dh_cgroups *c, uint32_t slot);
uint64_t dh_cg_swept(const struct dh_cgroups *c, uint32_t slot);
bool dh_cg_note_idle_sizes(struct dh_sampler *s);
void dh_cg_mark_due(struct dh_sampler *s, uint32_t slot, uint32_t file);
bool dh_cg_count_unwatched(struct dh_sampler *s, bool was, bool is);
void dh_cg_mark_unwatched(struct dh_sampler *s, uint32_t slot, uint64_t bit, bool is);

/* cgroup_oom.c */
void dh_cg_oom_watch(struct dh_sampler *s, uint32_t slot, uint32_t file);
void dh_cg_oom_unwatch(struct dh_sampler *s, uint32_t slot, uint8_t hier);
void dh_cg_oom_take_events(struct dh_sampler *s);
void dh_cg_oom_reread(struct dh_sampler *s);
void dh_cg_oom_free(struct dh_sampler *s);

/* cgroups.c: called by the sampler's thread */
int dh_cgroups_make(struct dh_sampler *s);
void dh_cgroups_pass(struct dh_sampler *s);
void dh_cgroups_events(struct dh_sampler *s);
void dh_cgroups_oom_events(struct dh_sampler *s);
int64_t dh_cgroups_sweep(struct dh_sampler *s);
int64_t dh_cgroups_lower_bound(struct dh_sampler *s, bool opens);
void dh_cgroups_free(struct dh_sampler *s);

#endif

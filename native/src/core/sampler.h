/* sampler.h - functions shared by the sampler's thread and its sources. Not seen by Python. */
#ifndef DH_SAMPLER_H
#define DH_SAMPLER_H

#include "core/sampler_state.h"

/* records.c: writing records, waking, publishing */
int dh_tables_map(struct dh_sampler *s);
void dh_tables_unmap(struct dh_sampler *s);
bool dh_store(struct dh_sampler *s, uint64_t *slot, enum dh_field field, uint64_t value);
bool dh_store_reading(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field,
                      uint64_t *slot, int err, uint64_t value);
bool dh_store_validity(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field, bool ok);
bool dh_store_absence(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field);
void dh_wake_if_watched(struct dh_sampler *s, enum dh_field field);
bool dh_field_rises(uint32_t field);
void dh_rise_bases_renew(struct dh_sampler *s);
void dh_node_mark_dirty(struct dh_sampler *s, uint32_t index);
void dh_pool_mark_dirty(struct dh_sampler *s, uint32_t index);
void dh_group_mark_dirty(struct dh_sampler *s, uint32_t slot);
void dh_source_failed(struct dh_sampler *s, enum dh_source_id id, enum dh_field field, int err);
void dh_source_full(struct dh_sampler *s, enum dh_source_id id, enum dh_field field);
void dh_source_root(struct dh_sampler *s, enum dh_source_id id, enum dh_field root, int err);
void dh_source_state(struct dh_sampler *s, enum dh_source_id id, enum dh_source_state state);
void dh_sampler_publish(struct dh_sampler *s);
void dh_sampler_notify(struct dh_sampler *s);

/* files.c: reading files and directories */
bool dh_sampler_is_due(const struct dh_sampler *s, uint64_t last_ns, uint64_t every_ns);
enum dh_read_result dh_cached_file_read(struct dh_sampler *s, struct dh_cached_file *f);
__attribute__((format(printf, 3, 4)))
int dh_cached_file_init(struct dh_cached_file *f, uint32_t cap, const char *format, ...);
void dh_cached_file_close(struct dh_cached_file *f);
bool dh_cached_file_read_bare(const struct dh_cached_file *f);
int64_t dh_sampler_read_file(struct dh_sampler *s, int dir_fd, const char *path, char *buf, size_t cap);
int dh_sampler_list_dir(struct dh_sampler *s, int dir_fd, const char *path,
                        void (*each)(struct dh_sampler *s, void *arg, const char *name, size_t len), void *arg);

/* cpus.c, hugepages.c, throttle.c: one source each */
void dh_cpus_pass(struct dh_sampler *s);
bool dh_throttle_pass(struct dh_sampler *s); /* false: not due yet */
void dh_hugepages_pass(struct dh_sampler *s);
int64_t dh_hugepages_lower_bound(const struct dh_sampler *s);

#endif

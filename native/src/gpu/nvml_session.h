/* nvml_session.h - threads that use the open library, and their start and exit. */
#ifndef DH_NVML_SESSION_H
#define DH_NVML_SESSION_H

#include "gpu/gpu_state.h"

enum dh_session_entry { DH_ENTRY_OPEN, DH_ENTRY_CLOSED, DH_ENTRY_STOPPING };

int dh_nvml_session_init(struct dh_gpu_watch *w);
void dh_nvml_session_destroy(struct dh_gpu_watch *w);
enum dh_session_entry dh_nvml_session_enter(struct dh_gpu_watch *w, struct dh_caller *c);
void dh_nvml_session_exit(struct dh_gpu_watch *w, struct dh_caller *c);
bool dh_gpus_is_stopping(struct dh_gpu_watch *w);
bool dh_nvml_session_is_stale(struct dh_gpu_watch *w, const struct dh_caller *c);
void dh_gpus_wait(struct dh_gpu_watch *w, uint64_t until_ns); /* under the lock */
bool dh_gpus_sleep_until(struct dh_gpu_watch *w, uint64_t until_ns);
bool dh_nvml_session_drain(struct dh_gpu_watch *w);
void dh_nvml_session_open(struct dh_gpu_watch *w);
void dh_nvml_session_close(struct dh_gpu_watch *w, int32_t err, bool absent);
bool dh_nvml_session_is_current(struct dh_gpu_watch *w);
void dh_nvml_session_request_reinit(struct dh_gpu_watch *w);
int dh_gpus_thread_start(struct dh_gpu_watch *w, const char *name, void *(*run)(void *), void *arg);
void dh_gpus_thread_exit(struct dh_gpu_watch *w); /* last call of a thread */

#endif

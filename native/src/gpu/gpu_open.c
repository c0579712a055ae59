/* gpu_open.c - the thread that loads and initializes the library, and does so again after a driver reload. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "gpu/gpus.h"

#define COUNT_NS DH_NS /* shortest time between two counts of the GPUs */

static void head_publish(struct dh_gpu_watch *w)
{
    const struct dh_gpus *before = &w->head_pub, *after = &w->head;
    bool notify = before->state != after->state || before->err != after->err ||
                  before->generation != after->generation || before->count != after->count;

    w->head.heartbeat_ns = dh_now_ns();
    dh_seqlock_begin(&w->head_seq);
    dh_words_store(&w->head_pub, &w->head, sizeof(w->head));
    dh_seqlock_end(&w->head_seq);
    if (notify)
        dh_gpus_notify(w);
}

/* Keep a version; an empty answer keeps the last one. Return: whether an earlier version was another. */
static bool version_keep(char to[DH_VERSION_LEN], const struct dh_text *answer)
{
    char version[DH_VERSION_LEN];
    bool changed;

    if (!dh_text_keep(version, sizeof(version), answer))
        return false;
    changed = *to && strcmp(version, to) != 0;
    memcpy(to, version, sizeof(version));
    return changed;
}

/* Read versions and GPU count, and note a driver of another version than at the last initialization. */
static nvmlReturn_t check_library(struct dh_gpu_watch *w)
{
    struct dh_text driver = { 0 }, library = { 0 };
    unsigned int count = 0;
    nvmlReturn_t code = OPENER_NVML(w, DH_CALL_SYSTEM, nvmlDeviceGetCount_v2, &count);

    if (code)
        return code;
    OPENER_NVML(w, DH_CALL_SYSTEM, nvmlSystemGetDriverVersion, driver.bytes, DH_VERSION_LEN);
    OPENER_NVML(w, DH_CALL_SYSTEM, nvmlSystemGetNVMLVersion, library.bytes, DH_VERSION_LEN);
    w->head.count = count;
    w->version_changed |= version_keep(w->head.driver, &driver);
    version_keep(w->head.nvml, &library);
    atomic_store(&w->driver_major, (uint32_t)strtoul(w->head.driver, NULL, 10));
    return NVML_SUCCESS;
}

/*
 * Read the inode of the kernel module in sysfs, 0 if there is none. The kernel does not reuse it soon. Return:
 * whether it could be read.
 */
static bool module_read(const struct dh_gpu_watch *w, uint64_t *inode)
{
    char path[DH_SYSFS_MAX + 16];
    struct stat module;

    snprintf(path, sizeof(path), "%s/module/nvidia", w->sysfs);
    *inode = stat(path, &module) ? 0 : (uint64_t)module.st_ino;
    return *inode || errno == ENOENT || errno == ENOTDIR;
}

/*
 * Count an initialization of the library as a load of the driver, unless module and version are those of the
 * last one: NVML is also initialized again after a failed call, which resets nothing. A module that could not be
 * read then or now counts as the same one.
 */
static void count_load(struct dh_gpu_watch *w)
{
    uint64_t module;
    bool is_read = module_read(w, &module);
    bool is_other = is_read && !w->module_unread && (!module || module != w->head.module);

    if (!w->head.generation || is_other || w->version_changed)
        w->head.generation++;
    if (is_read)
        w->head.module = module;
    w->module_unread = !is_read && !w->head.module;
    w->version_changed = false;
}

/* Return whether a code means, for all GPUs, that the driver is unloaded or does not match the library. */
static bool is_void(nvmlReturn_t code)
{
    return code == NVML_ERROR_UNINITIALIZED || code == NVML_ERROR_DRIVER_NOT_LOADED ||
           code == NVML_ERROR_LIB_RM_VERSION_MISMATCH;
}

/* Undo what reopen() did last. No thread may be in the session. */
void dh_opener_shutdown(struct dh_gpu_watch *w)
{
    for (; w->inits; w->inits--)
        OPENER_NVML(w, DH_CALL_SHUTDOWN, nvmlShutdown);
    if (!w->nvml.library || !dh_call_begin(w, &w->opener, DH_CALL_OPEN, dh_now_ns()))
        return;
    dh_nvml_unload(&w->nvml);
    dh_call_end(w, &w->opener, NVML_SUCCESS);
}

/*
 * Load the library unless it is loaded. NVML_ERROR_LIBRARY_NOT_FOUND, and @absent if the file does not exist.
 */
static nvmlReturn_t load(struct dh_gpu_watch *w, bool *absent)
{
    struct dh_nvml fresh = { 0 };
    int err;

    if (w->nvml.library)
        return NVML_SUCCESS;
    dh_call_begin(w, &w->opener, DH_CALL_OPEN, dh_now_ns());
    err = dh_nvml_load(&fresh, w->library, w->head.err_text, sizeof(w->head.err_text));
    dh_call_end(w, &w->opener, NVML_SUCCESS);
    *absent = err == -ENOENT;
    w->nvml = fresh;
    return err ? NVML_ERROR_LIBRARY_NOT_FOUND : NVML_SUCCESS;
}

/*
 * Close the library and open it again. While a thread hangs in the session, the library can only be
 * initialized once more; the rest follows when the thread has left.
 */
static void reopen(struct dh_gpu_watch *w)
{
    bool empty = dh_nvml_session_drain(w), absent = false;
    nvmlReturn_t code;

    if (dh_gpus_is_stopping(w))
        return;
    w->reopen_ns = dh_now_ns();
    memset(w->head.err_text, 0, sizeof(w->head.err_text));
    if (empty)
        dh_opener_shutdown(w);
    code = load(w, &absent);
    if (!code) {
        code = OPENER_NVML(w, DH_CALL_INIT, nvmlInit_v2);
        w->inits += !code;
    }
    if (!code)
        code = check_library(w);
    w->head.err = (int32_t)code;
    if (code) {
        w->head.state = absent ? DH_STATE_ABSENT : DH_STATE_FAILING;
        w->head.failures += !absent;
        if (empty)
            dh_opener_shutdown(w); /* its file may be replaced before the next attempt */
        if (code == NVML_ERROR_GPU_IS_LOST || code == NVML_ERROR_RESET_REQUIRED)
            code = NVML_ERROR_UNKNOWN; /* an error of one unnamed GPU; it must not be reported for all */
        dh_nvml_session_close(w, (int32_t)code, absent);
        return;
    }
    w->head.state = DH_STATE_OK;
    count_load(w);
    w->reinit_pending = !empty;
    w->check_failed = false;
    w->scanned = 0;
    dh_nvml_session_open(w);
}

/*
 * Whether the open library must be opened again. That interrupts all GPUs, so one failed check is not enough.
 */
static bool needs_reopen(struct dh_gpu_watch *w)
{
    bool check_failed = w->check_failed;
    nvmlReturn_t code = check_library(w);

    w->check_failed = code != NVML_SUCCESS;
    w->head.failures += w->check_failed;
    return w->version_changed || is_void(code) || (w->check_failed && check_failed) ||
           (w->reinit_pending && dh_nvml_session_is_current(w));
}

/* If NVML counts fewer GPUs than are known, let each GPU's thread check that NVML still lists its GPU. */
static void verify_handles(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    if (w->head.count < atomic_load(&w->gpus)) {
        for (uint32_t i = 0; i < atomic_load(&w->gpus); i++)
            dh_gpu_slot_at(w, i)->verify_requested = true;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
}

void dh_opener_pass(struct dh_gpu_watch *w, bool reinit_requested)
{
    if (w->head.state != DH_STATE_OK || reinit_requested || needs_reopen(w))
        reopen(w);
    w->head.passes++;
    pthread_mutex_lock(&w->lock);
    if (w->scan_requested)
        w->scanned = 0;
    w->scan_requested = false;
    pthread_mutex_unlock(&w->lock);
    if (w->head.state == DH_STATE_OK && w->scanned != w->head.count) {
        /*
         * A GPU that hangs while it is identified must not delay the others. A head that still reports "no
         * library" must not be published with records.
         */
        if (atomic_load(&w->gpus) || w->head_pub.state != DH_STATE_STARTING)
            head_publish(w);
        dh_slots_update(w);
    }
    if (w->head.state == DH_STATE_OK)
        verify_handles(w);
    head_publish(w);
}

/*
 * Sleep until the next pass, until a GPU's thread finds another driver, or until the owner requests a count.
 * However often that happens, the library is initialized at most once per retry_ns, and the GPUs are counted
 * at most once per COUNT_NS.
 */
static bool sleep_until_due(struct dh_gpu_watch *w, uint64_t next_ns, bool *reinit_requested)
{
    uint64_t count_ns = dh_now_ns() + (w->opt.retry_ns < COUNT_NS ? w->opt.retry_ns : COUNT_NS);
    bool go_on;

    pthread_mutex_lock(&w->lock);
    w->opener_active = false;
    while (!w->stopping) {
        uint64_t soon_ns = w->reopen_ns + w->opt.retry_ns;
        uint64_t until_ns = w->reinit_requested && soon_ns < next_ns ? soon_ns : next_ns;

        if (w->check_requested && count_ns < until_ns)
            until_ns = count_ns;

        if (dh_now_ns() >= until_ns)
            break;
        dh_gpus_wait(w, until_ns);
    }
    *reinit_requested = w->reinit_requested;
    w->reinit_requested = w->check_requested = false;
    w->opener_active = true;
    go_on = !w->stopping;
    if (w->phase == DH_PHASE_CLOSED)
        pthread_cond_broadcast(&w->changed); /* the deadline thread sleeps while no thread calls NVML */
    pthread_mutex_unlock(&w->lock);
    return go_on;
}

/* End of the watch: shut the library down after all other threads have ended, unless one hangs. */
static void finish(struct dh_gpu_watch *w)
{
    bool is_last;

    pthread_mutex_lock(&w->lock);
    while (w->threads > 1 && !w->abandoned)
        dh_gpus_wait(w, DH_NEVER);
    is_last = !w->abandoned;
    pthread_mutex_unlock(&w->lock);
    if (is_last)
        dh_opener_shutdown(w);
}

void *dh_opener_main(void *arg)
{
    struct dh_gpu_watch *w = arg;
    uint64_t next_ns = dh_now_ns();
    bool reinit_requested;

    while (sleep_until_due(w, next_ns, &reinit_requested)) {
        dh_opener_pass(w, reinit_requested);
        next_ns = dh_now_ns() + w->opt.retry_ns;
    }
    finish(w);
    dh_gpus_thread_exit(w);
    return NULL;
}

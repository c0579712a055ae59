/* gpu_open.c - the thread that loads and initialises the library, and does so again when the driver was. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpus.h"

static void head_publish(struct dh_gpu_watch *w)
{
    const struct dh_gpus *was = &w->head_pub, *is = &w->head;
    bool news = was->state != is->state || was->err != is->err || was->generation != is->generation ||
                was->count != is->count;

    w->head.beat_ns = dh_now_ns();
    dh_seqlock_begin(&w->head_seq);
    dh_words_store(&w->head_pub, &w->head, sizeof(w->head));
    dh_seqlock_end(&w->head_seq);
    if (news)
        dh_gpus_ring(w);
}

/* One that is not answered for once is still what it was. Equal records have equal bytes. */
static void version_keep(char to[DH_VERSION_LEN], const char *answer)
{
    if (!*answer)
        return;
    memset(to, 0, DH_VERSION_LEN);
    snprintf(to, DH_VERSION_LEN, "%s", answer);
}

/* Versions and count; whether the driver is another one than before. */
static nvmlReturn_t look(struct dh_gpu_watch *w, bool *changed)
{
    char driver[DH_VERSION_LEN] = "", library[DH_VERSION_LEN] = "";
    unsigned int count = 0;
    nvmlReturn_t code = OPENER_NVML(w, DH_CALL_SYSTEM, nvmlDeviceGetCount_v2, &count);

    if (code)
        return code;
    OPENER_NVML(w, DH_CALL_SYSTEM, nvmlSystemGetDriverVersion, driver, sizeof(driver));
    OPENER_NVML(w, DH_CALL_SYSTEM, nvmlSystemGetNVMLVersion, library, sizeof(library));
    *changed = *driver && *w->head.driver && strcmp(driver, w->head.driver) != 0;
    w->head.count = count;
    version_keep(w->head.driver, driver);
    version_keep(w->head.nvml, library);
    atomic_store(&w->driver_major, (uint32_t)strtoul(w->head.driver, NULL, 10));
    return NVML_SUCCESS;
}

/* Whatever is asked, of whichever GPU: the driver is gone, or not the one that the library was made for. */
static bool is_void(nvmlReturn_t code)
{
    return code == NVML_ERROR_UNINITIALIZED || code == NVML_ERROR_DRIVER_NOT_LOADED ||
           code == NVML_ERROR_LIB_RM_VERSION_MISMATCH;
}

/* The contrary of what reopen() did last. Nobody may be inside. */
void dh_opener_shut(struct dh_gpu_watch *w)
{
    for (; w->inits; w->inits--)
        OPENER_NVML(w, DH_CALL_SHUTDOWN, nvmlShutdown);
    if (!w->nvml.library || !dh_call_begin(w, &w->opener, DH_CALL_OPEN, dh_now_ns()))
        return;
    dh_nvml_unload(&w->nvml);
    dh_call_end(w, &w->opener, NVML_SUCCESS);
}

/* Load the library, unless it is. NVML_ERROR_LIBRARY_NOT_FOUND, and whether there is none at all. */
static nvmlReturn_t load(struct dh_gpu_watch *w, bool *absent)
{
    struct dh_nvml fresh = { 0 };
    int err;

    if (w->nvml.library)
        return NVML_SUCCESS;
    dh_call_begin(w, &w->opener, DH_CALL_OPEN, dh_now_ns());
    err = dh_nvml_load(&fresh, w->library, w->head.why, sizeof(w->head.why));
    dh_call_end(w, &w->opener, NVML_SUCCESS);
    *absent = err == -ENOENT;
    w->nvml = fresh;
    return err ? NVML_ERROR_LIBRARY_NOT_FOUND : NVML_SUCCESS;
}

/*
 * Close the library and open it anew. While somebody hangs inside it can only be initialised once more, and
 * the rest is done when he is out.
 */
static void reopen(struct dh_gpu_watch *w)
{
    bool empty = dh_gate_park(w), absent = false, changed;
    nvmlReturn_t code;

    if (dh_gate_is_stopping(w))
        return;
    w->reopen_ns = dh_now_ns();
    memset(w->head.why, 0, sizeof(w->head.why));
    if (empty)
        dh_opener_shut(w);
    code = load(w, &absent);
    if (!code) {
        code = OPENER_NVML(w, DH_CALL_INIT, nvmlInit_v2);
        w->inits += !code;
    }
    if (!code)
        code = look(w, &changed);
    w->head.err = (int32_t)code;
    if (code) {
        w->head.state = absent ? DH_STATE_ABSENT : DH_STATE_FAILING;
        w->head.failures += !absent;
        if (empty)
            dh_opener_shut(w); /* its file may be replaced before the next try */
        if (code == NVML_ERROR_GPU_IS_LOST || code == NVML_ERROR_RESET_REQUIRED)
            code = NVML_ERROR_UNKNOWN; /* of one GPU, which it does not name; never of all */
        dh_gate_close(w, (int32_t)code, absent);
        return;
    }
    w->head.state = DH_STATE_OK;
    w->head.generation++;
    w->unclean = !empty;
    w->missed = false;
    w->scanned = 0;
    dh_gate_open(w);
}

/*
 * Whether the library that is open has to be opened anew. All GPUs suffer from that: one look without an
 * answer of use is no reason yet.
 */
static bool is_worn(struct dh_gpu_watch *w)
{
    bool changed = false, missed = w->missed;
    nvmlReturn_t code = look(w, &changed);

    w->missed = code != NVML_SUCCESS;
    w->head.failures += w->missed;
    return changed || is_void(code) || (w->missed && missed) || (w->unclean && dh_gate_is_clean(w));
}

void dh_opener_pass(struct dh_gpu_watch *w, bool renew)
{
    if (w->head.state != DH_STATE_OK || renew || is_worn(w))
        reopen(w);
    w->head.passes++;
    if (w->head.state == DH_STATE_OK && w->scanned != w->head.count) {
        /* One that hangs when it is asked who it is keeps nobody from being read. And no record is seen
         * below a head that still says that there is no library. */
        if (atomic_load(&w->gpus) || w->head_pub.state != DH_STATE_STARTING)
            head_publish(w);
        dh_slots_find(w);
    }
    head_publish(w);
}

/*
 * Sleep until the next pass, or until a GPU finds that the driver is another one. But however often they do,
 * the library is not initialised more often than every retry_ns.
 */
static bool rest(struct dh_gpu_watch *w, uint64_t next_ns, bool *renew)
{
    bool go_on;

    pthread_mutex_lock(&w->lock);
    w->opening = false;
    while (!w->stopping) {
        uint64_t soon_ns = w->reopen_ns + w->opt.retry_ns;
        uint64_t until_ns = w->renew && soon_ns < next_ns ? soon_ns : next_ns;

        if (dh_now_ns() >= until_ns)
            break;
        dh_gate_wait(w, until_ns);
    }
    *renew = w->renew;
    w->renew = false;
    w->opening = true;
    go_on = !w->stopping;
    pthread_cond_broadcast(&w->changed); /* the deadline watch sleeps while nobody calls anything */
    pthread_mutex_unlock(&w->lock);
    return go_on;
}

/* The watch is being stopped: shut the library down when all others are gone, unless somebody hangs. */
static void end(struct dh_gpu_watch *w)
{
    bool alone;

    pthread_mutex_lock(&w->lock);
    while (w->threads > 1 && !w->abandoned)
        dh_gate_wait(w, DH_NEVER);
    alone = !w->abandoned;
    pthread_mutex_unlock(&w->lock);
    if (alone)
        dh_opener_shut(w);
}

void *dh_opener_main(void *arg)
{
    struct dh_gpu_watch *w = arg;
    uint64_t next_ns = dh_now_ns();
    bool renew;

    while (rest(w, next_ns, &renew)) {
        dh_opener_pass(w, renew);
        next_ns = dh_now_ns() + w->opt.retry_ns;
    }
    end(w);
    dh_gpus_leave(w);
    return NULL;
}

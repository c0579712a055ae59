/*
 * gpus.c - the watch over all GPUs for its owner: open, start, read and stop.
 *
 * Nothing here calls NVML. A process that abandoned threads in a call of the driver should end with _exit(2):
 * exit(3) would run the library's destructors during that call.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/durations.h"
#include "gpu/gpus.h"

#define MS 1000000ull
#define PERIOD_MIN_NS (10 * MS)
#define PERIOD_MAX_NS (3600 * DH_NS)
#define DEADLINE_MAX_NS (600 * DH_NS)
#define RETRY_MIN_NS (100 * MS)

static bool is_within(uint64_t value, uint64_t min, uint64_t max)
{
    return value >= min && value <= max;
}

static int options_check(const struct dh_gpus_options *o)
{
    if (o->size != sizeof(*o) || o->version != DH_VERSION)
        return DH_EABI;
    if (!is_within(o->period_ns, PERIOD_MIN_NS, PERIOD_MAX_NS) ||
        !is_within(o->slow_ns, o->period_ns, PERIOD_MAX_NS) ||
        !is_within(o->deadline_ns, PERIOD_MIN_NS, DEADLINE_MAX_NS) ||
        !is_within(o->open_deadline_ns, PERIOD_MIN_NS, DEADLINE_MAX_NS) ||
        !is_within(o->retry_ns, RETRY_MIN_NS, PERIOD_MAX_NS))
        return -EINVAL;
    return 0;
}

static int wakes_check(const struct dh_gpu_wake *wakes, uint32_t nwakes)
{
    if (nwakes > DH_GPU_WAKES_MAX)
        return -EINVAL;
    for (uint32_t i = 0; i < nwakes; i++) {
        const struct dh_gpu_wake *wake = &wakes[i];

        if (wake->field >= DH_GPU_FIELD_NUM || wake->limit >= DH_GPU_FIELD_NUM || wake->reserved)
            return -EINVAL;
        if (wake->mode < DH_GPU_WAKE_CHANGE || wake->mode > DH_GPU_WAKE_BITS)
            return -EINVAL;
        if (wake->mode == DH_GPU_WAKE_RISE && (!wake->threshold || !wake->window_ns))
            return -EINVAL;
    }
    return 0;
}

static int text_copy(char *to, const char *from, size_t max)
{
    size_t n = strlen(from);

    if (n > max)
        return -ENAMETOOLONG;
    memcpy(to, from, n + 1);
    return 0;
}

static void watch_free(struct dh_gpu_watch *w)
{
    close(w->wake_fd);
    dh_nvml_session_destroy(w);
    munmap(w, sizeof(*w));
}

size_t dh_gpus_memory_size(void)
{
    return sizeof(struct dh_gpu_watch);
}

/*
 * Map the memory of a watch: that of @fd, or private memory if @fd is negative. A file that can shrink is
 * refused, because an access behind its end would end this process.
 */
static int watch_map(int fd, int protection, struct dh_gpu_watch **out)
{
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    struct stat st;
    void *memory;

    if (fd >= 0) {
        int seals = fcntl(fd, F_GET_SEALS);

        if (seals < 0 || fstat(fd, &st) < 0)
            return -errno;
        if (!(seals & F_SEAL_SHRINK) || st.st_size != (off_t)sizeof(**out)) /* else: of another build */
            return -EINVAL;
    }
    memory = mmap(NULL, sizeof(**out), protection, flags, fd, 0);
    if (memory == MAP_FAILED)
        return -errno;
    *out = memory;
    return 0;
}

int dh_gpus_attach(int memory_fd, struct dh_gpu_watch **out)
{
    return memory_fd < 0 ? -EBADF : watch_map(memory_fd, PROT_READ, out);
}

void dh_gpus_detach(struct dh_gpu_watch *w)
{
    munmap(w, sizeof(*w));
}

int dh_gpus_open(const struct dh_gpus_options *o, const char *library, const char *sysfs,
                 const struct dh_gpu_wake *wakes, uint32_t nwakes, int wake_fd, int memory_fd,
                 struct dh_gpu_watch **out)
{
    struct dh_gpu_watch *w;
    int err = options_check(o);

    if (!err)
        err = wakes_check(wakes, nwakes);
    if (!err)
        err = watch_map(memory_fd, PROT_READ | PROT_WRITE, &w);
    if (err)
        return err;
    w->opt = *o;
    w->event_wait_ns = memory_fd < 0 ? DH_EVENT_WAIT_NS : DH_EVENT_WAIT_OWN_PROCESS_NS;
    w->tick_ns = dh_tick_length_ns();
    w->nwakes = nwakes;
    if (nwakes)
        memcpy(w->wakes, wakes, nwakes * sizeof(*wakes));
    err = text_copy(w->library, library, DH_LIBRARY_MAX);
    if (!err)
        err = text_copy(w->sysfs, sysfs, DH_SYSFS_MAX);
    if (!err) {
        w->wake_fd = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
        err = w->wake_fd < 0 ? -errno : dh_nvml_session_init(w);
        if (err && w->wake_fd >= 0)
            close(w->wake_fd);
    }
    if (err) {
        munmap(w, sizeof(*w));
        return err;
    }
    w->opener.is_measured = w->waiter.is_measured = true; /* their calls are few */
    w->wait.state = w->head.state = DH_STATE_STARTING;
    w->head.size = sizeof(w->head);
    w->head.version = DH_VERSION;
    w->head.period_ns = o->retry_ns;
    w->head.wait_period_ns = w->event_wait_ns;
    w->phase = DH_PHASE_CHANGING;
    w->release = watch_free;
    *out = w;
    return 0;
}

static const struct {
    const char *name;
    void *(*run)(void *arg);
} threads[] = {
    { "dh-gpu-watch", dh_deadline_main }, /* first: it checks the others */
    { "dh-gpu-events", dh_waiter_main },
    { "dh-gpu-all", dh_gpus_common_main },
    { "dh-gpu-open", dh_opener_main },
};

/* Publish a first copy: dh_gpus_read() succeeds from here on. */
void dh_gpus_publish_start(struct dh_gpu_watch *w)
{
    w->head.heartbeat_ns = w->wait.heartbeat_ns = dh_now_ns();
    w->head_pub = w->head;
    w->wait_pub = w->wait;
    atomic_store(&w->wait_seq.seq, 2);
    atomic_store(&w->head_seq.seq, 2);
}

int dh_gpus_start(struct dh_gpu_watch *w)
{
    int err = 0;

    pthread_mutex_lock(&w->lock);
    if (w->started)
        err = -EBUSY;
    w->started = true;
    if (!err) {
        dh_gpus_publish_start(w);
        for (size_t i = 0; !err && i < sizeof(threads) / sizeof(*threads); i++)
            err = dh_gpus_thread_start(w, threads[i].name, threads[i].run, w);
        if (err) { /* the threads that did start end again */
            w->stopping = true;
            pthread_cond_broadcast(&w->changed);
        }
    }
    pthread_mutex_unlock(&w->lock);
    return err;
}

void dh_gpus_request_stop(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->stopping = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

int dh_gpus_stop(struct dh_gpu_watch *w, uint64_t timeout_ns)
{
    uint64_t now_ns = dh_now_ns(), until_ns = timeout_ns < DH_NEVER - now_ns ? now_ns + timeout_ns : DH_NEVER;
    bool gone;

    dh_gpus_request_stop(w);
    pthread_mutex_lock(&w->lock);
    while (w->threads && dh_now_ns() < until_ns)
        dh_gpus_wait(w, until_ns);
    gone = !w->threads;
    w->abandoned = !gone; /* the last thread frees the watch, if it ever returns */
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (!gone)
        return -ETIMEDOUT;
    if (!w->started) /* no thread has shut the library down */
        dh_opener_shutdown(w);
    watch_free(w);
    return 0;
}

void dh_gpus_check_count(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->check_requested = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

size_t dh_gpus_size(const struct dh_gpu_watch *w)
{
    (void)w;
    return sizeof(struct dh_gpus) + DH_GPU_MAX * sizeof(struct dh_gpu);
}

/* ---- reading ---- */

void dh_gpus_durations(struct dh_gpu_watch *w, struct dh_durations *out)
{
    uint32_t gpus = atomic_load_explicit(&w->gpus, memory_order_acquire);

    memset(out, 0, sizeof(*out));
    for (uint32_t i = 0; i < gpus && i < DH_GPU_MAX; i++) { /* the other process may have written any number */
        struct dh_durations one = dh_durations_read(&dh_gpu_slot_at(w, i)->durations);

        for (int bucket = 0; bucket < DH_DURATION_NUM; bucket++)
            out->count[bucket] += one.count[bucket];
        out->sum_ns += one.sum_ns;
    }
}

struct copy {
    void *to, *from;
    size_t bytes;
};

static int64_t copy_words(void *arg)
{
    const struct copy *c = arg;

    dh_words_load(c->to, c->from, c->bytes);
    return 0;
}

static int64_t copy_consistent(struct dh_seqlock *lock, void *to, void *from, size_t bytes)
{
    struct copy c = { to, from, bytes };

    return dh_seqlock_read(lock, copy_words, &c);
}

static void call_split(struct dh_caller *c, uint32_t *call, uint64_t *call_ns)
{
    uint64_t packed = atomic_load(&c->current_call);

    *call = (uint32_t)(packed & DH_CALL_MASK);
    *call_ns = packed & ~DH_CALL_MASK;
}

static int64_t gpu_read(struct dh_gpu_slot *s, struct dh_gpu *to)
{
    int64_t err = copy_consistent(&s->gpu_seq, to, &s->pub, DH_GPU_THREAD_BYTES);

    if (!err)
        err = copy_consistent(&s->event_seq, to->event_count, s->pub.event_count, DH_GPU_WAITER_BYTES);
    call_split(&s->caller, &to->call, &to->call_ns);
    to->overdue = atomic_load(&s->caller.overdue);
    to->event_mask = atomic_load(&s->event_mask);
    return err;
}

static int64_t head_read(struct dh_gpu_watch *w, struct dh_gpus *to)
{
    struct dh_waiter_state wait;
    int64_t err = copy_consistent(&w->head_seq, to, &w->head_pub, sizeof(*to));

    if (!err)
        err = copy_consistent(&w->wait_seq, &wait, &w->wait_pub, sizeof(wait));
    if (err)
        return err;
    call_split(&w->opener, &to->call, &to->call_ns);
    to->gpus = atomic_load(&w->gpus);
    to->wait_state = wait.state;
    to->wait_err = wait.err;
    to->wait_passes = wait.passes;
    to->wait_heartbeat_ns = wait.heartbeat_ns;
    to->wait_failures = wait.failures;
    to->wakes = atomic_load(&w->wakes_done);
    return 0;
}

int64_t dh_gpus_read(struct dh_gpu_watch *w, void *buf, size_t cap)
{
    struct dh_gpus *head = buf;
    struct dh_gpu *gpu = (struct dh_gpu *)(void *)(head + 1);
    int64_t err;

    if (cap < sizeof(*head))
        return -ENOSPC;
    err = head_read(w, head);
    if (err)
        return err;
    if (head->gpus > DH_GPU_MAX)
        return -EBADMSG;
    if (cap < sizeof(*head) + head->gpus * sizeof(*gpu))
        return -ENOSPC;
    for (uint32_t i = 0; i < head->gpus; i++) {
        err = gpu_read(dh_gpu_slot_at(w, i), &gpu[i]);
        if (err)
            return err;
    }
    return (int64_t)(sizeof(*head) + head->gpus * sizeof(*gpu));
}

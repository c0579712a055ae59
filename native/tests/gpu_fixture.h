/*
 * gpu_fixture.h - GPUs for a watch: a fake libnvidia-ml.so.1 with a scenario, the watch, and its records.
 *
 * The fake keeps its state while its file is loaded, and is never unloaded: each scenario uses a copy of the
 * file. Built by `make fake`; docs/fake-nvml.md documents the commands. Include once, after check.h.
 */
#ifndef DH_GPU_FIXTURE_H
#define DH_GPU_FIXTURE_H

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "fixture.h"
#include "gpu/gpus.h"

#define MS 1000000ull

struct gx {
    struct dh_gpu_watch *w;
    struct dh_gpus *head;
    size_t cap;
    int wake_fd;
    int control; /* the fake's socket */
    char library[FX_PATH];
    char socket[FX_PATH];
};

/* ---- the fake ---- */

static inline void gx_copy(const char *from, const char *to)
{
    static char bytes[1 << 20];
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_CLOEXEC, 0755);
    ssize_t n;

    fx_must(in >= 0, from);
    fx_must(out >= 0, to);
    n = read(in, bytes, sizeof(bytes));
    fx_must(n > 0 && n < (ssize_t)sizeof(bytes) && write(out, bytes, (size_t)n) == n, to);
    close(in);
    close(out);
}

/* Copy the library of a driver branch, with its own scenario. It is not installed yet. */
static inline struct gx gx_fake(int branch, const char *scenario)
{
    static int number;
    struct gx g = { .wake_fd = -1, .control = -1 };
    char from[FX_PATH], path[FX_PATH], text[4096];

    number++;
    snprintf(from, sizeof(from), "build/fake/%d/libnvidia-ml.so.1", branch);
    snprintf(g.library, sizeof(g.library), "%s/%d.so", fx_root, number);
    snprintf(g.socket, sizeof(g.socket), "%s/%d.sock", fx_root, number);
    snprintf(text, sizeof(text), "%s\nsocket %s\n", scenario, g.socket);
    fx_write(text, "%d.txt", number);
    snprintf(path, sizeof(path), "%s/%d.txt", fx_root, number);
    fx_must(!setenv("FAKE_NVML", path, 1), "setenv");
    gx_copy(from, g.library);
    return g;
}

static inline void gx_connect(struct gx *g)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };

    snprintf(at.sun_path, sizeof(at.sun_path), "%.100s", g->socket);
    g->control = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EVENTUALLY(!connect(g->control, (struct sockaddr *)(void *)&at, sizeof(at)));
}

/* Send a command to the fake. Return: the number in its answer. */
FX_PRINTF(2) static inline uint64_t gx_command(struct gx *g, const char *format, ...)
{
    char line[512];
    size_t n = 0;
    va_list args;

    if (g->control < 0)
        gx_connect(g);
    va_start(args, format);
    vsnprintf(line, sizeof(line) - 1, format, args);
    va_end(args);
    strcat(line, "\n");
    fx_must(write(g->control, line, strlen(line)) == (ssize_t)strlen(line), line);
    do {
        ssize_t got = read(g->control, line + n, sizeof(line) - 1 - n);

        fx_must(got > 0, "the fake's socket");
        n += (size_t)got;
    } while (line[n - 1] != '\n');
    line[n] = '\0';
    if (strncmp(line, "ok", 2) != 0)
        CHECK_STR(line, "ok\n");
    return strtoull(line + 2, NULL, 10);
}

/* ---- the watch ---- */

/* Deadlines as long as the test's patience, so that a slow thread does not count as hung. */
static inline struct dh_gpus_options gx_options(void)
{
    return (struct dh_gpus_options){
        .size = sizeof(struct dh_gpus_options),
        .version = DH_VERSION,
        .period_ns = 20 * MS,
        .slow_ns = 60 * MS,
        .deadline_ns = FX_PATIENCE_NS,
        .open_deadline_ns = FX_PATIENCE_NS,
        .retry_ns = 100 * MS,
    };
}

static inline void gx_watch(struct gx *g, const struct dh_gpus_options *o, const struct dh_gpu_wake *wakes,
                            uint32_t nwakes)
{
    char sysfs[FX_PATH];

    snprintf(sysfs, sizeof(sysfs), "%s/sys", fx_root);
    g->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fx_must(g->wake_fd >= 0, "eventfd");
    fx_must(!dh_gpus_open(o, g->library, sysfs, wakes, nwakes, g->wake_fd, -1, &g->w), "dh_gpus_open");
    g->cap = dh_gpus_size(g->w);
    g->head = aligned_alloc(8, g->cap);
    fx_must(g->head != NULL, "aligned_alloc");
    CHECK_INT(dh_gpus_read(g->w, g->head, g->cap), -ENODATA);
    CHECK_INT(dh_gpus_start(g->w), 0);
}

static inline struct gx gx_start(int branch, const char *scenario)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(branch, scenario);

    gx_watch(&g, &o, NULL, 0);
    return g;
}

/* Short deadlines, for tests of hangs: on a busy machine other calls may be overdue for a while, too. */
static inline struct gx gx_start_short_deadlines(int branch, const char *scenario)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(branch, scenario);

    o.deadline_ns = 200 * MS;
    o.open_deadline_ns = 400 * MS;
    gx_watch(&g, &o, NULL, 0);
    return g;
}

static inline void gx_free(struct gx *g)
{
    close(g->wake_fd);
    if (g->control >= 0)
        close(g->control);
    free(g->head);
}

static inline void gx_stop(struct gx *g)
{
    CHECK_INT(dh_gpus_stop(g->w, FX_PATIENCE_NS), 0);
    gx_free(g);
}

/* ---- one record on its own: no library, no thread ---- */

#define GX_NOW_NS (100000 * DH_NS)

/*
 * A slot as its GPU's thread has it in the middle of a fast pass. A wake shows in the watch's count of wakes.
 */
static inline struct dh_gpu_slot *gx_slot(const struct dh_gpu_wake *wakes, uint32_t nwakes)
{
    struct dh_gpus_options o = gx_options();
    struct dh_gpu_slot *s = calloc(1, sizeof(*s));
    int fd = eventfd(0, EFD_CLOEXEC);

    fx_must(s && fd >= 0, "gx_slot");
    fx_must(!dh_gpus_open(&o, "libnone.so.1", fx_root, wakes, nwakes, fd, -1, &s->w), "dh_gpus_open");
    close(fd);
    s->now_ns = s->call_end_ns = GX_NOW_NS;
    s->fast_ok = s->unchanged = true;
    return s;
}

static inline void gx_slot_free(struct dh_gpu_slot *s)
{
    CHECK_INT(dh_gpus_stop(s->w, 0), 0);
    free(s);
}

/* ---- records, copied again by each function ---- */

static inline const struct dh_gpus *gx_head(struct gx *g)
{
    EVENTUALLY(dh_gpus_read(g->w, g->head, g->cap) > 0); /* repeated as in fx_read() */
    return g->head;
}

static inline const struct dh_gpu *gx_gpu(struct gx *g, uint32_t index)
{
    static const struct dh_gpu none;
    const struct dh_gpus *head = gx_head(g);

    return index < head->gpus ? (const struct dh_gpu *)(const void *)(head + 1) + index : &none;
}

/*
 * Return a field's value, or -1 if it is not valid.
 */
static inline int64_t gx_value(struct gx *g, uint32_t index, enum dh_gpu_field field)
{
    const struct dh_gpu *gpu = gx_gpu(g, index);

    return dh_gpu_is_valid(gpu, field) ? (int64_t)gpu->value[field] : -1;
}

/* Wait until @n GPUs have been read completely and are registered for events. */
static inline void gx_ready(struct gx *g, uint32_t gpus)
{
    EVENTUALLY(gx_head(g)->gpus == gpus && g->head->state == DH_STATE_OK);
    for (uint32_t i = 0; i < gpus; i++)
        EVENTUALLY(gx_gpu(g, i)->slow_passes > 0 && gx_gpu(g, i)->event_mask);
}

static inline bool gx_woken(struct gx *g)
{
    uint64_t n;

    return read(g->wake_fd, &n, sizeof(n)) == sizeof(n);
}

/* ---- hangs ---- */

static inline struct dh_caller *gx_caller(struct gx *g, uint32_t index)
{
    return &dh_gpu_slot_at(g->w, index)->caller;
}

/* Return whether a thread is in a call that was counted as overdue. Under the lock. */
static inline bool gx_is_overdue(struct gx *g, struct dh_caller *c)
{
    bool is_overdue;

    pthread_mutex_lock(&g->w->lock);
    is_overdue = atomic_load(&c->current_call) && atomic_load(&c->reported_call) == atomic_load(&c->current_call);
    pthread_mutex_unlock(&g->w->lock);
    return is_overdue;
}

/* Wait until the fake reports that a GPU's thread hangs, and that call is overdue. */
static inline void gx_await_hang(struct gx *g, uint32_t index)
{
    EVENTUALLY(gx_command(g, "gpu %u hung", index) > 0);
    EVENTUALLY(gx_is_overdue(g, gx_caller(g, index)));
}

#endif

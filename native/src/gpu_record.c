/*
 * gpu_record.c - one GPU's record: its thread writes it, publishes it, and learns whether to wake the reader.
 */
#include <string.h>

#include "gpus.h"

#define RETRY_PASSES 30 /* slow ones, until an unsupported field is asked for again */

/* The GPU does not have it, or this driver cannot tell. */
bool dh_gpu_is_unsupported(int code)
{
    return code == NVML_ERROR_NOT_SUPPORTED || code == NVML_ERROR_FUNCTION_NOT_FOUND ||
           code == NVML_ERROR_INVALID_ARGUMENT || code == NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}

/* Whatever is asked next would be answered the same: the GPU or the driver fails, not the field. */
bool dh_gpu_is_dead(nvmlReturn_t code)
{
    return code == NVML_ERROR_GPU_IS_LOST || code == NVML_ERROR_UNINITIALIZED ||
           code == NVML_ERROR_DRIVER_NOT_LOADED || code == NVML_ERROR_LIB_RM_VERSION_MISMATCH ||
           code == NVML_ERROR_GPU_NOT_FOUND;
}

/* What any answer says of the GPU as a whole. Passes it on. */
nvmlReturn_t dh_gpu_note(struct dh_gpu_slot *s, nvmlReturn_t code)
{
    if (dh_gpu_is_dead(code)) {
        s->dead = true;
        s->status = code;
    } else if (code == NVML_ERROR_RESET_REQUIRED && !s->dead) {
        s->status = code;
    }
    return code;
}

static bool is_wanted(const struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    enum dh_gpu_pace pace = dh_gpu_rows[field].pace;
    uint64_t asleep_ns = s->asleep_ns[field];

    if (asleep_ns && s->now_ns - asleep_ns < RETRY_PASSES * s->w->opt.slow_ns)
        return false;
    if (pace == DH_PACE_FIXED)
        return s->slow && !dh_gpu_is_valid(&s->work, field);
    return pace == DH_PACE_FAST || s->slow;
}

/* What this pass asks for. After a quiet pass, a quiet one asks for the same. */
void dh_gpu_plan(struct dh_gpu_slot *s)
{
    memset(s->due, 0, sizeof(s->due));
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        s->due[f / 64] |= (uint64_t)is_wanted(s, f) << (f % 64);
}

/*
 * The outcome of one reading. What the GPU once had is asked for again in the next pass. What is as it was,
 * valid, leaves nothing to write.
 */
void dh_gpu_put(struct dh_gpu_slot *s, enum dh_gpu_field field, int code, uint64_t value)
{
    uint64_t bit = 1ull << (field % 64);
    struct dh_gpu *g = &s->work;
    bool is_seen = g->seen[field / 64] & bit;

    if (!code && dh_gpu_is_valid(g, field) && g->value[field] == value)
        return;
    s->same = false;
    s->quiet &= !code;
    g->code[field] = (uint16_t)code;
    s->asleep_ns[field] = !is_seen && dh_gpu_is_unsupported(code) ? s->now_ns : 0;
    if (code) {
        g->valid[field / 64] &= ~bit;
        g->value[field] = 0;
        return;
    }
    g->valid[field / 64] |= bit;
    g->seen[field / 64] |= bit;
    g->value[field] = value;
}

/* No call of this pass told anything: nothing is known of the GPU but who it is. */
void dh_gpu_forget(struct dh_gpu_slot *s)
{
    struct dh_gpu *g = &s->work;

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        if (dh_gpu_is_valid(g, f))
            g->code[f] = (uint16_t)s->status;
    memset(g->valid, 0, sizeof(g->valid));
    memset(g->value, 0, sizeof(g->value));
    s->same = false;
}

/* What a rule may look at whatever the table of wakes says. */
static bool has_turned(const struct dh_gpu *before, const struct dh_gpu *now)
{
    return before->state != now->state || before->status != now->status || before->handles != now->handles ||
           before->overdue != now->overdue;
}

/* The same among what is compared as a whole. */
static bool has_turned_within(const struct dh_gpu *before, const struct dh_gpu *now)
{
    return before->links != now->links || before->mig_generation != now->mig_generation ||
           strcmp(before->uuid, now->uuid) != 0;
}

static bool is_same(const struct dh_gpu *before, const struct dh_gpu *now, uint32_t field)
{
    return before->value[field] == now->value[field] &&
           dh_gpu_is_valid(before, field) == dh_gpu_is_valid(now, field);
}

/* Whether a wake can be seen in what changed. All of them are asked: each keeps its base. */
static bool has_woken(struct dh_gpu_slot *s)
{
    const struct dh_gpu *before = &s->pub, *now = &s->work;
    bool woken = false;

    for (uint32_t i = 0; i < s->w->nwakes; i++) {
        const struct dh_gpu_wake *wake = &s->w->wakes[i];

        if (!is_same(before, now, wake->field) || !is_same(before, now, wake->limit))
            woken |= dh_gpu_wakes(wake, &s->base[i], before, now, s->now_ns);
    }
    return woken;
}

/*
 * What every pass changes is copied by every pass, the readings and all that follows only if they are others:
 * after a pass that asked what the last one did, and was answered the same, they are not. `pub` is written by
 * this thread alone, so it reads there what it published last.
 */
void dh_gpu_publish(struct dh_gpu_slot *s)
{
    const size_t head = offsetof(struct dh_gpu, valid), rest = DH_GPU_PART - head;
    bool changed = !s->same && memcmp(s->pub.valid, s->work.valid, rest) != 0, news;

    s->work.overdue = atomic_load(&s->caller.overdue);
    s->work.calls = s->caller.calls;
    news = has_turned(&s->pub, &s->work);
    if (changed) {
        news |= has_woken(s);
        news |= has_turned_within(&s->pub, &s->work);
    }
    dh_seqlock_begin(&s->gpu_seq);
    dh_words_store(&s->pub, &s->work, changed ? DH_GPU_PART : head);
    dh_seqlock_end(&s->gpu_seq);
    if (news)
        dh_gpus_ring(s->w);
}

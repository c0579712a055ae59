/*
 * gpu_record.c - the record of one GPU: its thread writes and publishes it, and decides whether to wake the
 * reader.
 */
#include <string.h>

#include "gpu/gpus.h"

#define RETRY_PASSES 30 /* slow passes until an unsupported field is read again */

/* Return whether the GPU or this driver lacks the field. */
bool dh_gpu_is_unsupported(int code)
{
    return code == NVML_ERROR_NOT_SUPPORTED || code == NVML_ERROR_FUNCTION_NOT_FOUND ||
           code == NVML_ERROR_INVALID_ARGUMENT || code == NVML_ERROR_ARGUMENT_VERSION_MISMATCH ||
           code == NVML_ERROR_VGPU_ECC_NOT_SUPPORTED || code == NVML_ERROR_DEPRECATED;
}

/* Return whether a code means that the GPU or the driver fails, so that further calls would fail as well. */
bool dh_gpu_is_unreachable(nvmlReturn_t code)
{
    return code == NVML_ERROR_GPU_IS_LOST || code == NVML_ERROR_UNINITIALIZED ||
           code == NVML_ERROR_DRIVER_NOT_LOADED || code == NVML_ERROR_LIB_RM_VERSION_MISMATCH ||
           code == NVML_ERROR_GPU_NOT_FOUND;
}

/* Note what a result means for the GPU as a whole. Return: @code. */
nvmlReturn_t dh_gpu_note_status(struct dh_gpu_slot *s, nvmlReturn_t code)
{
    if (dh_gpu_is_unreachable(code)) {
        s->unreachable = true;
        s->status = code;
    } else if (code == NVML_ERROR_RESET_REQUIRED && !s->unreachable) {
        s->status = code;
    }
    return code;
}

/* Return whether a change of the field's value will be announced. */
static bool is_awaited(const struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    return (dh_gpu_rows[field].announced_by & s->awaited) && dh_gpu_is_valid(&s->work, field);
}

static bool is_wanted(const struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    enum dh_gpu_pace pace = dh_gpu_rows[field].pace;
    uint64_t unsupported_ns = s->unsupported_ns[field];

    if (unsupported_ns && s->now_ns - unsupported_ns < RETRY_PASSES * s->w->opt.slow_ns)
        return false;
    if (pace == DH_PACE_FIXED)
        return s->slow && !dh_gpu_is_valid(&s->work, field);
    return s->slow || (pace == DH_PACE_FAST && !is_awaited(s, field));
}

/* Choose the fields of this pass. A fast pass after a fast_ok pass that awaits the same events reuses the choice. */
void dh_gpu_plan_fields(struct dh_gpu_slot *s)
{
    memset(s->due, 0, sizeof(s->due));
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        s->due[f / 64] |= (uint64_t)is_wanted(s, f) << (f % 64);
}

/*
 * Store the result of one field. A field that was valid once is read again in the next pass, unless the GPU
 * may lack it since a mode or the driver changed. An unchanged valid value is not written.
 */
void dh_gpu_store(struct dh_gpu_slot *s, enum dh_gpu_field field, int code, uint64_t value)
{
    uint64_t bit = 1ull << (field % 64);
    struct dh_gpu *g = &s->work;
    bool unsupported = dh_gpu_is_unsupported(code);

    if (!code && dh_gpu_is_valid(g, field) && g->value[field] == value)
        return;
    s->unchanged = false;
    s->fast_ok &= !code;
    if (unsupported) {
        s->lost_field |= dh_gpu_is_valid(g, field);
        g->seen[field / 64] &= ~(s->may_lack[field / 64] & bit);
    }
    g->code[field] = (uint16_t)code;
    s->unsupported_ns[field] = unsupported && !(g->seen[field / 64] & bit) ? s->now_ns : 0;
    if (code) {
        g->valid[field / 64] &= ~bit;
        g->value[field] = 0;
        return;
    }
    g->valid[field / 64] |= bit;
    g->seen[field / 64] |= bit;
    g->value[field] = value;
}

/* No call of this pass succeeded: keep the identity of the GPU and drop all values. */
void dh_gpu_invalidate(struct dh_gpu_slot *s)
{
    struct dh_gpu *g = &s->work;

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        if (dh_gpu_is_valid(g, f))
            g->code[f] = (uint16_t)s->status;
    memset(g->valid, 0, sizeof(g->valid));
    memset(g->value, 0, sizeof(g->value));
    s->unchanged = false;
}

/* Return whether a value changed that rules evaluate with any table of wakes. */
static bool status_changed(const struct dh_gpu *before, const struct dh_gpu *now)
{
    return before->state != now->state || before->status != now->status || before->handles != now->handles ||
           before->overdue != now->overdue;
}

/* Return whether the part of the record changed that is compared as a whole. */
static bool identity_changed(const struct dh_gpu *before, const struct dh_gpu *now)
{
    return before->links != now->links || before->mig_generation != now->mig_generation ||
           strcmp(before->uuid, now->uuid) != 0;
}

static bool is_same(const struct dh_gpu *before, const struct dh_gpu *now, uint32_t field)
{
    return before->value[field] == now->value[field] &&
           dh_gpu_is_valid(before, field) == dh_gpu_is_valid(now, field);
}

/* Return whether a wake matches the changes. All wakes are evaluated: each keeps its own base. */
static bool is_wake_due(struct dh_gpu_slot *s)
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
 * Publish the record. The head changes in every pass and is always copied; the readings are copied only if
 * they differ, which needs no comparison after a pass with the same queries and the same results. Only this
 * thread writes `pub`, so it can compare with it.
 */
void dh_gpu_publish(struct dh_gpu_slot *s)
{
    const size_t head_bytes = offsetof(struct dh_gpu, valid), rest_bytes = DH_GPU_THREAD_BYTES - head_bytes;
    bool changed = !s->unchanged && memcmp(s->pub.valid, s->work.valid, rest_bytes) != 0, notify;

    s->work.overdue = atomic_load(&s->caller.overdue);
    s->work.calls = s->caller.calls;
    notify = status_changed(&s->pub, &s->work);
    if (changed) {
        notify |= is_wake_due(s);
        notify |= identity_changed(&s->pub, &s->work);
    }
    s->work.changes += notify;
    dh_seqlock_begin(&s->gpu_seq);
    dh_words_store(&s->pub, &s->work, changed ? DH_GPU_THREAD_BYTES : head_bytes);
    dh_seqlock_end(&s->gpu_seq);
    if (notify)
        dh_gpus_notify(s->w);
}

/* gpu_batch.c - the fields that one nvmlDeviceGetFieldValues reads: all that are due, the links' included. */
#include <stdlib.h>
#include <string.h>

#include "gpus.h"

#define NO_TYPE ((nvmlValueType_t)0xff) /* what the driver does not touch is no answer of 0 */

static bool by_call(const struct dh_gpu_slot *s, uint32_t field)
{
    return s->by_call[field / 64] >> (field % 64) & 1;
}

static void append(struct dh_gpu_slot *s, int *n, uint16_t fi, uint32_t scope)
{
    s->batch[(*n)++] = (nvmlFieldValue_t){
        .fieldId = fi,
        .scopeId = scope,
        .valueType = NO_TYPE,
    };
}

/* Lay out the call: the questions of each field follow each other, in the order of the table. */
static int ask(struct dh_gpu_slot *s, uint16_t count[DH_GPU_FIELD_NUM])
{
    uint32_t major = atomic_load(&s->w->driver_major);
    int n = 0;

    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        uint16_t fi = dh_gpu_fi(f, major);
        int begun = n;

        count[f] = 0;
        if (!dh_gpu_rows[f].fi || !dh_gpu_is_due(s, f) || by_call(s, f))
            continue;
        if (!fi) {
            dh_gpu_put(s, f, NVML_ERROR_NOT_SUPPORTED, 0);
        } else if (!dh_gpu_rows[f].per_link) {
            append(s, &n, fi, 0);
        } else {
            for (uint64_t m = dh_gpu_links_asked(s, f); m; m &= m - 1)
                append(s, &n, fi, (uint32_t)__builtin_ctzll(m));
        }
        count[f] = (uint16_t)(n - begun);
    }
    return n;
}

static void take(struct dh_gpu_slot *s, enum dh_gpu_field field, const nvmlFieldValue_t *answer)
{
    uint64_t value = 0;
    int code = (int)dh_gpu_note(s, answer->nvmlReturn);

    if (!code && !dh_nvml_decode(answer, &value))
        code = NVML_ERROR_UNKNOWN;
    dh_gpu_put(s, field, code, value);
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static void probe(struct dh_gpu_slot *s, uint64_t took_ns)
{
    uint64_t sorted[DH_PROBES];
    uint32_t n;

    s->probe[s->probes++ % DH_PROBES] = took_ns;
    n = s->probes < DH_PROBES ? s->probes : DH_PROBES;
    memcpy(sorted, s->probe, n * sizeof(*sorted));
    qsort(sorted, n, sizeof(*sorted), compare);
    s->work.probe_ns = took_ns;
    s->work.probe_p50_ns = sorted[n / 2];
}

void dh_gpu_batch(struct dh_gpu_slot *s)
{
    uint16_t count[DH_GPU_FIELD_NUM];
    const nvmlFieldValue_t *answer = s->batch;
    int n = ask(s, count);
    uint64_t begun_ns = dh_now_ns();
    nvmlReturn_t code;

    if (!n)
        return;
    code = DH_GPU_NVML(s, DH_CALL_FIELDS, nvmlDeviceGetFieldValues, s->dev, n, s->batch);
    if (!code)
        probe(s, dh_now_ns() - begun_ns);
    else if (!dh_gpu_is_unsupported((int)code) || code == NVML_ERROR_INVALID_ARGUMENT)
        s->status = code;
    if (code == NVML_ERROR_INVALID_ARGUMENT)
        code = NVML_ERROR_UNKNOWN; /* the handle's fault: of no field does it say that there is none */
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; answer += count[f], f++) {
        if (!count[f])
            continue;
        if (code)
            dh_gpu_put(s, f, (int)code, 0);
        else if (dh_gpu_rows[f].per_link)
            dh_gpu_link_sums(s, f, count[f], answer);
        else
            take(s, f, answer);
    }
}

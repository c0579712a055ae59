/* gpu_batch.c - the fields that one nvmlDeviceGetFieldValues reads: all that are due, the links' included. */
#include "gpus.h"

#define NO_TYPE ((nvmlValueType_t)0xff) /* what the driver does not touch is no answer of 0 */

static void append(struct dh_gpu_slot *s, uint16_t fi, uint32_t scope)
{
    s->known[s->asked++] = (nvmlFieldValue_t){
        .fieldId = fi,
        .scopeId = scope,
        .valueType = NO_TYPE,
    };
}

/* Lay out the call. */
static void lay_out(struct dh_gpu_slot *s)
{
    uint32_t major = atomic_load(&s->w->driver_major);

    s->asked = 0;
    s->parts = 0;
    for (uint16_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        uint16_t fi = dh_gpu_fi(f, major);
        int begun = s->asked;

        if (!dh_gpu_rows[f].fi || !dh_gpu_is_due(s, f) || dh_gpu_has(s->by_call, f))
            continue;
        if (!fi) {
            dh_gpu_put(s, f, NVML_ERROR_NOT_SUPPORTED, 0);
        } else if (!dh_gpu_rows[f].per_link) {
            append(s, fi, 0);
        } else {
            for (uint64_t m = dh_gpu_links_asked(s, f); m; m &= m - 1)
                append(s, fi, (uint32_t)__builtin_ctzll(m));
        }
        if (s->asked > begun)
            s->part[s->parts++] = (struct dh_gpu_part){ f, (uint16_t)(s->asked - begun) };
    }
}

static void copy_questions(struct dh_gpu_slot *s)
{
    for (int i = 0; i < s->asked; i++)
        s->batch[i] = (nvmlFieldValue_t){
            .fieldId = s->known[i].fieldId,
            .scopeId = s->known[i].scopeId,
            .valueType = NO_TYPE,
        };
}

/* Whether the driver answered as before. */
static bool is_known(const nvmlFieldValue_t *known, const nvmlFieldValue_t *answers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (known[i].nvmlReturn != answers[i].nvmlReturn || known[i].valueType != answers[i].valueType ||
            known[i].value.ullVal != answers[i].value.ullVal)
            return false;
    return true;
}

/* Take over what the driver answered, not what it made of the questions. */
static void copy_answers(nvmlFieldValue_t *known, const nvmlFieldValue_t *answers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        known[i].nvmlReturn = answers[i].nvmlReturn;
        known[i].valueType = answers[i].valueType;
        known[i].value = answers[i].value;
    }
}

static void take(struct dh_gpu_slot *s, enum dh_gpu_field field, const nvmlFieldValue_t *answer)
{
    uint64_t value = 0;
    int code = (int)dh_gpu_note(s, answer->nvmlReturn);

    if (!code && !dh_nvml_decode(answer, &value))
        code = NVML_ERROR_UNKNOWN;
    dh_gpu_put(s, field, code, value);
}

/* The answers to all questions; those that the record holds since the last pass are not taken again. */
static void take_all(struct dh_gpu_slot *s)
{
    nvmlFieldValue_t *known = s->known;
    const nvmlFieldValue_t *answers = s->batch;

    for (uint32_t i = 0, n; i < s->parts; i++, known += n, answers += n) {
        enum dh_gpu_field field = s->part[i].field;

        n = s->part[i].questions;
        if (s->settled && is_known(known, answers, n))
            continue;
        copy_answers(known, answers, n);
        if (dh_gpu_rows[field].per_link)
            dh_gpu_link_sums(s, field, n, known);
        else
            take(s, field, known);
    }
}

/* Note how long a call took, and the median of those not long ago. */
static void probe(struct dh_gpu_slot *s, uint64_t took_ns)
{
    uint64_t *oldest = &s->probe[s->probes++ % DH_PROBES], *sorted = s->sorted;
    uint32_t n = s->probes < DH_PROBES ? s->probes : DH_PROBES, i = 0;

    while (sorted[i] != *oldest) /* a place of none is 0, like those that follow the last */
        i++;
    sorted[i] = *oldest = took_ns;
    for (; i && sorted[i - 1] > took_ns; i--)
        sorted[i] = sorted[i - 1], sorted[i - 1] = took_ns;
    for (; i + 1 < n && sorted[i + 1] < took_ns; i++)
        sorted[i] = sorted[i + 1], sorted[i + 1] = took_ns;
    s->work.probe_ns = took_ns;
    s->work.probe_p50_ns = sorted[n / 2];
}

void dh_gpu_batch(struct dh_gpu_slot *s)
{
    uint64_t begun_ns = s->called_ns;
    nvmlReturn_t code;

    if (!s->settled)
        lay_out(s);
    if (!s->asked)
        return;
    copy_questions(s);
    code = DH_GPU_NVML(s, DH_CALL_FIELDS, nvmlDeviceGetFieldValues, s->dev, s->asked, s->batch);
    if (!code) {
        probe(s, s->called_ns - begun_ns);
        take_all(s);
        return;
    }
    if (!dh_gpu_is_unsupported((int)code) || code == NVML_ERROR_INVALID_ARGUMENT)
        s->status = code;
    if (code == NVML_ERROR_INVALID_ARGUMENT)
        code = NVML_ERROR_UNKNOWN; /* the handle's fault: of no field does it say that there is none */
    for (uint32_t i = 0; i < s->parts; i++)
        dh_gpu_put(s, s->part[i].field, (int)code, 0);
}

/* gpu_batch.c - the fields that one nvmlDeviceGetFieldValues reads: all that are due, the links' included. */
#include <string.h>

#include "gpus.h"

#define NO_TYPE ((nvmlValueType_t)0xff) /* what the driver does not touch is no answer of 0 */

/* The answer stands at the end of NVML's own structure, behind times that differ in each. */
#define ANSWER offsetof(nvmlFieldValue_t, valueType)
_Static_assert(sizeof(struct dh_answer) == sizeof(nvmlFieldValue_t) - ANSWER &&
                   offsetof(struct dh_answer, code) == offsetof(nvmlFieldValue_t, nvmlReturn) - ANSWER &&
                   offsetof(struct dh_answer, value) == offsetof(nvmlFieldValue_t, value) - ANSWER,
               "struct dh_answer is the end of nvmlFieldValue_t");

static void append(struct dh_gpu_slot *s, uint16_t fi, uint32_t scope)
{
    s->question[s->asked++] = (struct dh_question){ fi, scope };
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

/* What the driver made of the questions last time is no question. */
static void put_questions(struct dh_gpu_slot *s)
{
    for (int i = 0, n = s->asked; i < n; i++) {
        memcpy(&s->batch[i], &s->question[i], sizeof(s->question[i]));
        s->batch[i].valueType = NO_TYPE;
        s->batch[i].nvmlReturn = NVML_SUCCESS;
    }
}

static const void *answer_in(const nvmlFieldValue_t *v)
{
    return (const char *)v + ANSWER;
}

/* Whether the driver answered as before: bytes that are equal are not looked at again. */
static bool is_known(const struct dh_answer *known, const nvmlFieldValue_t *answers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(&known[i], answer_in(&answers[i]), sizeof(*known)) != 0)
            return false;
    return true;
}

static void keep(struct dh_answer *known, const nvmlFieldValue_t *answers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        memcpy(&known[i], answer_in(&answers[i]), sizeof(*known));
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
    const nvmlFieldValue_t *answers = s->batch;

    if (s->settled && is_known(s->known, answers, (uint32_t)s->asked))
        return;
    for (uint32_t i = 0, at = 0, n; i < s->parts; i++, at += n) {
        enum dh_gpu_field field = s->part[i].field;

        n = s->part[i].questions;
        if (s->settled && is_known(&s->known[at], &answers[at], n))
            continue;
        keep(&s->known[at], &answers[at], n);
        if (dh_gpu_rows[field].per_link)
            dh_gpu_link_sums(s, field, n, &s->question[at], &answers[at]);
        else
            take(s, field, &answers[at]);
    }
}

/* Put another number in the place of one of @n, in order of size. */
static void resort(uint64_t *sorted, uint32_t n, uint64_t was, uint64_t is)
{
    uint32_t i = 0;

    while (sorted[i] != was) /* a place of none is 0, like those that follow the last */
        i++;
    sorted[i] = is;
    for (; i && sorted[i - 1] > is; i--)
        sorted[i] = sorted[i - 1], sorted[i - 1] = is;
    for (; i + 1 < n && sorted[i + 1] < is; i++)
        sorted[i] = sorted[i + 1], sorted[i + 1] = is;
}

/* Note how long a call took, at least 1, and the median of those not long ago. */
static void probe(struct dh_gpu_slot *s, uint64_t took_ns)
{
    uint64_t *oldest = &s->probe[s->probes++ % DH_PROBES];
    uint32_t n = s->probes < DH_PROBES ? s->probes : DH_PROBES;

    resort(s->sorted, n, *oldest, took_ns);
    *oldest = took_ns;
    s->work.probe_p50_ns = s->sorted[n / 2];
}

void dh_gpu_batch(struct dh_gpu_slot *s)
{
    uint64_t begun_ns = s->called_ns;
    nvmlReturn_t code;

    if (!s->settled)
        lay_out(s);
    if (!s->asked)
        return;
    put_questions(s);
    code = DH_GPU_NVML(s, DH_CALL_FIELDS, nvmlDeviceGetFieldValues, s->dev, s->asked, s->batch);
    if (!code) {
        probe(s, s->called_ns > begun_ns ? s->called_ns - begun_ns : 1);
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

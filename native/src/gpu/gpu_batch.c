/*
 * gpu_batch.c - the fields of one nvmlDeviceGetFieldValues call: all that are due, per-link fields included.
 */
#include <string.h>

#include "gpu/gpus.h"

#define NO_TYPE ((nvmlValueType_t)0xff) /* marks a result that the driver did not write; it is not a 0 */

/* The result is the end of nvmlFieldValue_t, after timestamps that differ in each call. */
#define RESULT_OFFSET offsetof(nvmlFieldValue_t, valueType)
_Static_assert(sizeof(struct dh_field_result) == sizeof(nvmlFieldValue_t) - RESULT_OFFSET &&
                   offsetof(struct dh_field_result, code) ==
                       offsetof(nvmlFieldValue_t, nvmlReturn) - RESULT_OFFSET &&
                   offsetof(struct dh_field_result, value) ==
                       offsetof(nvmlFieldValue_t, value) - RESULT_OFFSET,
               "struct dh_field_result is the end of nvmlFieldValue_t");

static void append(struct dh_gpu_slot *s, uint16_t fi, uint16_t scope)
{
    s->query[s->query_count++] = (struct dh_field_query){ fi, scope };
}

/* Lay out the queries of the call. */
static void plan_batch(struct dh_gpu_slot *s)
{
    uint32_t major = atomic_load(&s->w->driver_major);

    s->query_count = 0;
    s->spans = 0;
    for (uint16_t f = 0; f < DH_GPU_FIELD_NUM; f++) {
        uint16_t fi = dh_gpu_field_id(f, major);
        int begun = s->query_count;

        if (!dh_gpu_rows[f].field_id || !dh_gpu_is_due(s, f) || dh_gpu_has_bit(s->via_function, f))
            continue;
        if (!fi) {
            dh_gpu_store(s, f, NVML_ERROR_NOT_SUPPORTED, 0);
        } else if (!dh_gpu_rows[f].per_link) {
            append(s, fi, 0);
        } else {
            for (uint64_t m = dh_gpu_links_to_query(s, f); m; m &= m - 1)
                append(s, fi, (uint16_t)__builtin_ctzll(m));
        }
        if (s->query_count > begun)
            s->span[s->spans++] = (struct dh_gpu_query_span){ f, (uint16_t)(s->query_count - begun) };
    }
}

/* Write the queries of a pass into a batch. A driver may write a part of a value only: its other bytes are 0. */
void dh_gpu_put_queries(const struct dh_gpu_slot *s, nvmlFieldValue_t batch[DH_QUERY_MAX])
{
    for (int i = 0, n = s->query_count; i < n; i++) {
        batch[i].fieldId = s->query[i].field;
        batch[i].scopeId = s->query[i].scope;
        batch[i].valueType = NO_TYPE;
        batch[i].nvmlReturn = NVML_SUCCESS;
        batch[i].value.ullVal = 0;
    }
}

static const void *result_in(const nvmlFieldValue_t *v)
{
    return (const char *)v + RESULT_OFFSET;
}

static uint64_t mix(uint64_t digest, uint64_t word)
{
    digest = (digest ^ word) * 0xff51afd7ed558ccdull;
    return digest ^ digest >> 32;
}

/* Return a number that differs for different results with a chance of 1 - 2^-64. */
static uint64_t digest_of(const nvmlFieldValue_t *results, int n)
{
    uint64_t digest = (uint64_t)n, word[sizeof(struct dh_field_result) / 8];

    for (int i = 0; i < n; i++) {
        memcpy(word, result_in(&results[i]), sizeof(word));
        digest = mix(mix(digest, word[0]), word[1]);
    }
    return digest;
}

/* Return whether the driver answered as before: equal bytes need no decoding. */
static bool is_unchanged(const struct dh_field_result *last_result, const nvmlFieldValue_t *results, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(&last_result[i], result_in(&results[i]), sizeof(*last_result)) != 0)
            return false;
    return true;
}

static void remember_results(struct dh_field_result *last_result, const nvmlFieldValue_t *results, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        memcpy(&last_result[i], result_in(&results[i]), sizeof(*last_result));
}

static void store_result(struct dh_gpu_slot *s, enum dh_gpu_field field, const nvmlFieldValue_t *result)
{
    uint64_t value = 0;
    int code = (int)dh_gpu_note_status(s, result->nvmlReturn);

    if (!code && !dh_nvml_decode(result, &value))
        code = NVML_ERROR_UNKNOWN;
    dh_gpu_store(s, field, code, value);
}

/* Store all results, except those that equal the last ones and are in the record already. */
static void store_results(struct dh_gpu_slot *s, const nvmlFieldValue_t *results)
{
    uint64_t digest = digest_of(results, s->query_count);

    if (s->plan_reusable && digest == s->results_digest)
        return;
    s->results_digest = digest;
    for (uint32_t i = 0, at = 0, n; i < s->spans; i++, at += n) {
        enum dh_gpu_field field = s->span[i].field;

        n = s->span[i].queries;
        if (s->plan_reusable && is_unchanged(&s->last_result[at], &results[at], n))
            continue;
        remember_results(&s->last_result[at], &results[at], n);
        if (dh_gpu_rows[field].per_link)
            dh_gpu_link_sums(s, field, n, &s->query[at], &results[at]);
        else
            store_result(s, field, &results[at]);
    }
}

/* Replace @was by @is among the first @n of an ascending list. */
static void resort(uint64_t *sorted, uint32_t n, uint64_t was, uint64_t is)
{
    uint32_t i = 0;

    while (sorted[i] != was) /* unused places are 0, as those behind the last */
        i++;
    sorted[i] = is;
    for (; i && sorted[i - 1] > is; i--)
        sorted[i] = sorted[i - 1], sorted[i - 1] = is;
    for (; i + 1 < n && sorted[i + 1] < is; i++)
        sorted[i] = sorted[i + 1], sorted[i + 1] = is;
}

/* Note the duration of a call, at least 1 ns, and update the median of the last calls. */
static void note_latency(struct dh_gpu_slot *s, uint64_t took_ns)
{
    uint64_t *oldest = &s->latency[s->latency_count++ % DH_LATENCY_SAMPLES];
    uint32_t n = s->latency_count < DH_LATENCY_SAMPLES ? s->latency_count : DH_LATENCY_SAMPLES;

    if (*oldest == took_ns)
        return; /* the same values: most calls take less than a tick */
    resort(s->sorted_latency, n, *oldest, took_ns);
    *oldest = took_ns;
    s->work.probe_p50_ns = s->sorted_latency[n / 2];
}

void dh_gpu_read_batch(struct dh_gpu_slot *s)
{
    nvmlFieldValue_t batch[DH_QUERY_MAX]; /* on the stack, as that of all GPUs */
    uint64_t begun_ns = s->call_end_ns;
    nvmlReturn_t code;

    if (!s->plan_reusable)
        plan_batch(s);
    if (!s->query_count)
        return;
    dh_gpu_put_queries(s, batch);
    code = DH_GPU_NVML(s, DH_CALL_FIELDS, nvmlDeviceGetFieldValues, s->dev, s->query_count, batch);
    if (!code) {
        note_latency(s, s->call_end_ns > begun_ns ? s->call_end_ns - begun_ns : 1);
        store_results(s, batch);
        return;
    }
    if (!dh_gpu_is_unsupported((int)code) || code == NVML_ERROR_INVALID_ARGUMENT)
        s->status = code;
    if (code == NVML_ERROR_INVALID_ARGUMENT)
        code = NVML_ERROR_UNKNOWN; /* caused by the handle; it does not mean that a field is missing */
    for (uint32_t i = 0; i < s->spans; i++)
        dh_gpu_store(s, s->span[i].field, (int)code, 0);
}

/*
 * gpu_links.c - NVLinks: which links exist, which are up, and their error counts.
 *
 * A driver reports links through nvmlDeviceGetFieldValues with the link as scope, an older driver through
 * separate functions. A link that never answered does not belong to the GPU.
 */
#include "gpu/gpus.h"

#define ALL_LINKS ((1ull << DH_LINK_MAX) - 1)
#define LEARN_PASSES 30 /* slow passes until links that did not answer are queried again */

/*
 * Whether this pass queries all possible links. Slow passes only: a link with permanently invalid answers
 * must not cost every pass.
 */
static bool queries_all_links(const struct dh_gpu_slot *s)
{
    return s->slow && (!s->links_ns || s->now_ns - s->links_ns >= LEARN_PASSES * s->w->opt.slow_ns);
}

/*
 * Return the links to query in this pass: all possible links at first and from time to time, else the known
 * ones.
 */
uint64_t dh_gpu_links_to_query(struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    return field == DH_GPU_LINKS_UP && queries_all_links(s) ? ALL_LINKS : s->links;
}

/* The results of all links for one field. */
struct tally {
    enum dh_gpu_field field;
    uint64_t answering; /* bit set */
    uint64_t up;        /* answering links with a value other than 0: a sleeping link is up */
    uint64_t sum;
    int code; /* of the first known link that failed */
    bool undetermined; /* a link neither answered nor reported that it does not exist */
};

/*
 * Note the links that answered. The next slow pass queries all links again if one of them gave no definite
 * answer.
 */
static void note_links(struct dh_gpu_slot *s, const struct tally *t)
{
    uint32_t n;

    if (queries_all_links(s) && !t->undetermined)
        s->links_ns = s->now_ns;
    s->links |= t->answering;
    n = (uint32_t)__builtin_popcountll(s->links);
    if (n > s->work.links)
        s->work.links = n;
}

static void count(struct dh_gpu_slot *s, struct tally *t, uint32_t link, int code, uint64_t value)
{
    uint64_t bit = 1ull << link;

    if (code) {
        if (!t->code && (s->links & bit || !s->links))
            t->code = code;
        t->undetermined |= !dh_gpu_is_unsupported(code);
        return;
    }
    t->answering |= bit;
    t->up |= value ? bit : 0;
    t->sum += value;
    if (t->field != DH_GPU_LINKS_UP)
        s->work.link_errors[link] += value;
}

static void put(struct dh_gpu_slot *s, struct tally *t)
{
    if (t->field == DH_GPU_LINKS_UP && !s->unreachable) {
        if (!s->links && t->answering)
            t->code = 0; /* failures of numbers above the last link */
        note_links(s, t);
    }
    if (!t->answering && !t->code)
        t->code = NVML_ERROR_NOT_SUPPORTED; /* no links */
    dh_gpu_store(s, t->field, t->code, t->field == DH_GPU_LINKS_UP ? t->up : t->sum);
}

static bool has_function(enum dh_gpu_field field)
{
    return field == DH_GPU_LINKS_UP || field == DH_GPU_LINK_REPLAY || field == DH_GPU_LINK_RECOVERY ||
           field == DH_GPU_LINK_CRC;
}

void dh_gpu_link_sums(struct dh_gpu_slot *s, enum dh_gpu_field field, uint32_t n,
                      const struct dh_field_query *queries, const nvmlFieldValue_t *answers)
{
    struct tally t = { .field = field };

    for (uint32_t i = 0; i < n; i++) {
        uint64_t value = 0;
        int code = (int)dh_gpu_note_status(s, answers[i].nvmlReturn);

        if (!code && !dh_nvml_decode(&answers[i], &value))
            code = NVML_ERROR_UNKNOWN;
        count(s, &t, queries[i].scope, code, value);
    }
    if (!t.answering && dh_gpu_is_unsupported(t.code) && has_function(field)) {
        s->via_function[field / 64] |= 1ull << (field % 64); /* dh_gpu_read_links() reads the field, in this
                                                                same pass */
        s->fast_ok = false;
    } else {
        put(s, &t);
    }
}

static nvmlReturn_t read_link(struct dh_gpu_slot *s, enum dh_gpu_field field, uint32_t link, uint64_t *value)
{
    unsigned long long errors = 0;
    nvmlEnableState_t state = 0;
    nvmlReturn_t code;

    if (field == DH_GPU_LINKS_UP) {
        code = DH_GPU_NVML(s, DH_CALL_LINKS, nvmlDeviceGetNvLinkState, s->dev, link, &state);
        *value = state;
        return code;
    }
    code = DH_GPU_NVML(s, DH_CALL_LINKS, nvmlDeviceGetNvLinkErrorCounter, s->dev, link,
                       field == DH_GPU_LINK_REPLAY     ? NVML_NVLINK_ERROR_DL_REPLAY
                       : field == DH_GPU_LINK_RECOVERY ? NVML_NVLINK_ERROR_DL_RECOVERY
                                                       : NVML_NVLINK_ERROR_DL_CRC_FLIT,
                       &errors);
    *value = errors;
    return code;
}

static void read_links_of(struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    struct tally t = { .field = field };

    for (uint64_t m = dh_gpu_links_to_query(s, field); m && !s->unreachable; m &= m - 1) {
        uint32_t link = (uint32_t)__builtin_ctzll(m);
        uint64_t value = 0;
        int code = (int)read_link(s, field, link, &value);

        count(s, &t, link, code, value);
        if (code == NVML_ERROR_INVALID_ARGUMENT || (!link && dh_gpu_is_unsupported(code)))
            break; /* there are no further links, or none at all */
    }
    put(s, &t);
}

/* Read the fields for which this driver offers functions only. */
void dh_gpu_read_links(struct dh_gpu_slot *s)
{
    for (uint32_t word = 0; word < DH_GPU_WORDS; word++)
        for (uint64_t m = s->via_function[word] & s->due[word]; m; m &= m - 1)
            read_links_of(s, word * 64 + (uint32_t)__builtin_ctzll(m));
}

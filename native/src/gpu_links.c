/*
 * gpu_links.c - NVLinks: which there are, which are up, and what went wrong on each.
 *
 * A driver answers for them through nvmlDeviceGetFieldValues with the link as scope, or, if it is older,
 * through functions of their own. A link that never answered is none of the GPU's.
 */
#include "gpus.h"

#define ALL_LINKS ((1ull << DH_LINK_MAX) - 1)
#define LEARN_PASSES 30 /* slow ones, until links that there were not are asked for again */

/* Slow passes only: of a link that answers nonsense for ever, every other pass need not know. */
static bool learns(const struct dh_gpu_slot *s)
{
    return s->slow && (!s->links_ns || s->now_ns - s->links_ns >= LEARN_PASSES * s->w->opt.slow_ns);
}

/* The links to ask in this pass; the state of all that there might be, at first and now and then. */
uint64_t dh_gpu_links_asked(struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    return field == DH_GPU_LINKS_UP && learns(s) ? ALL_LINKS : s->links;
}

/* The answers of all links to one question. */
struct tally {
    enum dh_gpu_field field;
    uint64_t answering; /* bit set */
    uint64_t up;        /* those of them with a value that is not 0: a link that sleeps is up */
    uint64_t sum;
    int code; /* of the first that should have answered and did not */
    bool unsure; /* one said neither how it is nor that there is none */
};

/* The next slow pass asks all again, if this one did and some link may be there after all. */
static void learned(struct dh_gpu_slot *s, const struct tally *t)
{
    uint32_t n;

    if (learns(s) && !t->unsure)
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
        t->unsure |= !dh_gpu_is_unsupported(code);
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
    if (t->field == DH_GPU_LINKS_UP && !s->dead) {
        if (!s->links && t->answering)
            t->code = 0; /* of the numbers above the last link */
        learned(s, t);
    }
    if (!t->answering && !t->code)
        t->code = NVML_ERROR_NOT_SUPPORTED; /* no links */
    dh_gpu_put(s, t->field, t->code, t->field == DH_GPU_LINKS_UP ? t->up : t->sum);
}

static bool has_call(enum dh_gpu_field field)
{
    return field == DH_GPU_LINKS_UP || field == DH_GPU_LINK_REPLAY || field == DH_GPU_LINK_RECOVERY ||
           field == DH_GPU_LINK_CRC;
}

void dh_gpu_link_sums(struct dh_gpu_slot *s, enum dh_gpu_field field, uint32_t n,
                      const struct dh_question *questions, const nvmlFieldValue_t *answers)
{
    struct tally t = { .field = field };

    for (uint32_t i = 0; i < n; i++) {
        uint64_t value = 0;
        int code = (int)dh_gpu_note(s, answers[i].nvmlReturn);

        if (!code && !dh_nvml_decode(&answers[i], &value))
            code = NVML_ERROR_UNKNOWN;
        count(s, &t, questions[i].scope, code, value);
    }
    if (!t.answering && dh_gpu_is_unsupported(t.code) && has_call(field)) {
        s->by_call[field / 64] |= 1ull << (field % 64); /* dh_gpu_links() asks, in this same pass */
        s->quiet = false;
    } else {
        put(s, &t);
    }
}

static nvmlReturn_t ask(struct dh_gpu_slot *s, enum dh_gpu_field field, uint32_t link, uint64_t *value)
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

static void ask_all(struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    struct tally t = { .field = field };

    for (uint64_t m = dh_gpu_links_asked(s, field); m && !s->dead; m &= m - 1) {
        uint32_t link = (uint32_t)__builtin_ctzll(m);
        uint64_t value = 0;
        int code = (int)ask(s, field, link, &value);

        count(s, &t, link, code, value);
        if (code == NVML_ERROR_INVALID_ARGUMENT || (!link && dh_gpu_is_unsupported(code)))
            break; /* there are no more of them, or none at all */
    }
    put(s, &t);
}

/* The fields that this driver has only functions for. */
void dh_gpu_links(struct dh_gpu_slot *s)
{
    for (uint32_t word = 0; word < DH_GPU_WORDS; word++)
        for (uint64_t m = s->by_call[word] & s->due[word]; m; m &= m - 1)
            ask_all(s, word * 64 + (uint32_t)__builtin_ctzll(m));
}

/* interrupts.c - tokenizer and parser of /proc/interrupts. */
#include <stdbool.h>
#include <string.h>

#include "machine/interrupts.h"
#include "core/text.h"

enum { HEADER, LABEL, SKIP_LINE, COUNTS, DONE, BROKEN };

void dh_interrupts_begin(struct dh_interrupts *r, const char *label)
{
    r->label = label;
    r->state = HEADER;
    r->columns = r->counts = r->token_len = 0;
    r->last = '\0';
}

static bool number(const struct dh_interrupts *r, uint32_t from, uint64_t *value)
{
    return r->token_len > from && r->token_len < sizeof(r->token) && r->token[from] <= '9' && /* rejects
                                                                                                 "max" */
           !dh_text_u64(r->token + from, r->token_len - from, value);
}

static int header_token(struct dh_interrupts *r)
{
    uint64_t cpu;

    if (!number(r, 3, &cpu) || memcmp(r->token, "CPU", 3) || cpu >= DH_CORE_MAX || r->columns == DH_CORE_MAX)
        return BROKEN;
    r->cpu[r->columns++] = (uint16_t)cpu;
    return HEADER;
}

/* A word of the row: a count or, after the counts, the beginning of the description. */
static int count_token(struct dh_interrupts *r)
{
    uint64_t count;
    bool counts = number(r, 0, &count);

    if (counts == (r->counts == r->columns))
        return BROKEN;
    if (!counts)
        return DONE;
    r->count[r->counts++] = count;
    return COUNTS;
}

static int token_end(struct dh_interrupts *r)
{
    size_t label = strlen(r->label);

    if (r->state == HEADER)
        return header_token(r);
    if (r->state == LABEL)
        return r->token_len == label && !memcmp(r->token, r->label, label) ? COUNTS : SKIP_LINE;
    return count_token(r);
}

static int line_end(const struct dh_interrupts *r)
{
    if (r->state == HEADER)
        return r->columns ? LABEL : BROKEN;
    if (r->state == COUNTS)
        return r->counts == r->columns ? DONE : BROKEN;
    return LABEL;
}

int dh_interrupts_feed(struct dh_interrupts *r, const char *s, size_t n)
{
    const char *end = s + n;

    if (n)
        r->last = s[n - 1];
    for (; s < end && r->state < DONE; s++) {
        if (r->state == SKIP_LINE) {
            s = memchr(s, '\n', (size_t)(end - s));
            if (!s)
                return 0;
        } else if (*s != ' ' && *s != '\n') {
            if (r->token_len < sizeof(r->token))
                r->token[r->token_len++] = *s;
            continue;
        }
        if (r->token_len) {
            r->state = token_end(r);
            r->token_len = 0;
        }
        if (*s == '\n' && r->state < DONE)
            r->state = line_end(r);
    }
    return r->state == BROKEN ? DH_EPARSE : r->state == DONE;
}

int dh_interrupts_end(const struct dh_interrupts *r)
{
    return r->state == LABEL && r->last == '\n' ? 0 : DH_EPARSE;
}

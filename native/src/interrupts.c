/* interrupts.c - the words of /proc/interrupts, and what they mean where they stand. */
#include <stdbool.h>
#include <string.h>

#include "interrupts.h"
#include "text.h"

enum { HEADER, LABEL, REST, COUNTS, DONE, BROKEN };

void dh_interrupts_begin(struct dh_interrupts *r, const char *label)
{
    r->label = label;
    r->state = HEADER;
    r->columns = r->counts = r->have = 0;
    r->last = '\0';
}

static bool number(const struct dh_interrupts *r, uint32_t from, uint64_t *value)
{
    return r->have > from && r->have < sizeof(r->token) && r->token[from] <= '9' && /* "max" is none */
           !dh_text_u64(r->token + from, r->have - from, value);
}

static int header_word(struct dh_interrupts *r)
{
    uint64_t cpu;

    if (!number(r, 3, &cpu) || memcmp(r->token, "CPU", 3) || cpu >= DH_CORE_MAX || r->columns == DH_CORE_MAX)
        return BROKEN;
    r->cpu[r->columns++] = (uint16_t)cpu;
    return HEADER;
}

/* Behind the counts stands what the row is, in words. */
static int count_word(struct dh_interrupts *r)
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

static int word(struct dh_interrupts *r)
{
    size_t label = strlen(r->label);

    if (r->state == HEADER)
        return header_word(r);
    if (r->state == LABEL)
        return r->have == label && !memcmp(r->token, r->label, label) ? COUNTS : REST;
    return count_word(r);
}

static int line_end(const struct dh_interrupts *r)
{
    if (r->state == HEADER)
        return r->columns ? LABEL : BROKEN;
    if (r->state == COUNTS)
        return r->counts == r->columns ? DONE : BROKEN;
    return LABEL;
}

int dh_interrupts_take(struct dh_interrupts *r, const char *s, size_t n)
{
    const char *end = s + n;

    if (n)
        r->last = s[n - 1];
    for (; s < end && r->state < DONE; s++) {
        if (r->state == REST) {
            s = memchr(s, '\n', (size_t)(end - s));
            if (!s)
                return 0;
        } else if (*s != ' ' && *s != '\n') {
            if (r->have < sizeof(r->token))
                r->token[r->have++] = *s;
            continue;
        }
        if (r->have) {
            r->state = word(r);
            r->have = 0;
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

/*
 * kmsg_lines.c - turns bytes of the kernel log into entries. No I/O, no clock.
 *
 * A record of /dev/kmsg is "6,1234,5678901,-;text\n", possibly followed by lines " KEY=value\n": priority and
 * facility, sequence number, microseconds, flags (Documentation/ABI/testing/dev-kmsg). In the text, newlines,
 * backslashes and bytes other than printable ASCII appear as \xNN, so that a record's text is one line. A
 * read of the device returns a whole record; a read of a FIFO or file returns any part of any number of
 * lines.
 */
#include <string.h>

#include "kmsg/kmsg.h"

#define FACILITY_SHIFT 3
#define ESCAPE_LEN 4 /* \xNN */

struct record {
    uint64_t priority;
    uint64_t seq;
    uint64_t us;
    const char *text;
    size_t len;
};

/* Parse a decimal number followed by a comma. */
static bool parse_number_and_comma(const char **at, const char *end, uint64_t *out)
{
    const char *s = *at;
    uint64_t value = 0;

    for (; s < end && *s >= '0' && *s <= '9'; s++)
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *s - '0', &value))
            return false;
    if (s == *at || s == end || *s != ',')
        return false;
    *at = s + 1;
    *out = value;
    return true;
}

static bool record_parse(struct record *r, const char *s, const char *end)
{
    if (!parse_number_and_comma(&s, end, &r->priority) || !parse_number_and_comma(&s, end, &r->seq) || !parse_number_and_comma(&s, end, &r->us))
        return false;
    s = memchr(s, ';', (size_t)(end - s));
    if (!s)
        return false;
    r->text = s + 1;
    r->len = (size_t)(end - r->text);
    return true;
}

/* FNV-1a */
static uint64_t hash_of(uint32_t pattern, const char *key, size_t n)
{
    uint64_t h = 0xcbf29ce484222325 ^ pattern;

    for (size_t i = 0; i < n; i++)
        h = (h ^ (uint8_t)key[i]) * 0x100000001b3;
    return h;
}

/*
 * Copy a text, cut if necessary, but not inside \xNN. Unprintable bytes occur only in files that are no
 * kernel log.
 */
static void text_put(char to[DH_LOG_TEXT], const char *text, size_t n)
{
    if (n > DH_LOG_TEXT - 1) {
        const char *escape;

        n = DH_LOG_TEXT - 1;
        escape = memrchr(text + n - (ESCAPE_LEN - 1), '\\', ESCAPE_LEN - 1);
        if (escape)
            n = (size_t)(escape - text);
    }
    for (size_t i = 0; i < n; i++)
        to[i] = text[i] >= ' ' && text[i] < 0x7f ? text[i] : '?';
    memset(to + n, 0, DH_LOG_TEXT - n);
}

/*
 * Return the slot to reuse: of the pattern with most lines, so that a flood displaces only itself, the slot whose
 * line was seen last the longest time ago.
 */
static uint32_t least_needed_slot(const struct dh_lines *l)
{
    uint16_t lines[DH_PATTERN_MAX] = { 0 };
    uint32_t slot = 0;

    for (uint32_t i = 0; i < DH_LOG_MAX; i++)
        lines[l->work.line[i].pattern]++;
    for (uint32_t i = 1; i < DH_LOG_MAX; i++) {
        uint16_t count = lines[l->work.line[i].pattern], most = lines[l->work.line[slot].pattern];

        if (count > most || (count == most && l->key[i].seen < l->key[slot].seen))
            slot = i;
    }
    return slot;
}

static uint32_t slot_find(const struct dh_lines *l, uint64_t hash, uint32_t pattern, const char *key,
                          size_t n)
{
    uint32_t i;

    for (i = 0; i < l->work.head.entries; i++)
        if (l->hash[i] == hash && l->work.line[i].pattern == pattern && l->key[i].len == n &&
            !memcmp(l->key[i].key, key, n))
            break;
    return i;
}

static uint32_t slot_make(struct dh_lines *l, uint64_t hash, uint32_t pattern, const char *key, size_t n)
{
    uint32_t slot = l->work.head.entries;

    if (slot < DH_LOG_MAX) {
        l->work.head.entries++;
    } else {
        slot = least_needed_slot(l);
        l->work.head.evicted++;
    }
    l->hash[slot] = hash;
    l->key[slot].len = (uint32_t)n;
    memcpy(l->key[slot].key, key, n);
    l->work.line[slot] = (struct dh_log_line){ .pattern = pattern };
    l->new_entry = true;
    return slot;
}

static void latch(struct dh_lines *l, const struct record *r, uint32_t pattern, const char *key, size_t n)
{
    uint64_t hash = hash_of(pattern, key, n);
    uint32_t slot = slot_find(l, hash, pattern, key, n);
    struct dh_log_line *line;

    if (slot == l->work.head.entries)
        slot = slot_make(l, hash, pattern, key, n);
    line = &l->work.line[slot];
    if (!line->count++) {
        line->first_us = r->us;
        text_put(line->first, r->text, r->len);
    }
    line->last_us = r->us;
    line->seq = r->seq;
    text_put(line->last, r->text, r->len);
    l->key[slot].seen = ++l->work.head.matched;
    l->dirty[slot / 64] |= 1ull << (slot % 64);
    l->changed = true;
}

static void match(struct dh_lines *l, const struct record *r)
{
    char key[DH_LOG_KEY];

    for (uint32_t i = 0; i < l->patterns; i++) {
        int64_t n = dh_pattern_match(l->pattern[i], r->text, r->len, key, sizeof(key));

        if (n >= 0) {
            latch(l, r, i, key, (size_t)n);
            return;
        }
    }
}

static void count_malformed(struct dh_lines *l)
{
    l->malformed = true;
    l->work.head.failures++;
    l->work.head.err = DH_EPARSE;
}

static void line_take(struct dh_lines *l, const char *s, const char *end)
{
    struct dh_log *head = &l->work.head;
    struct record r;

    if (s < end && *s == ' ')
        return; /* KEY=value of the record before */
    if (!record_parse(&r, s, end)) {
        count_malformed(l);
        return;
    }
    l->malformed = false;
    if (!l->any_record) {
        l->any_record = true;
        head->next_seq = r.seq;
    }
    if (r.seq < head->next_seq)
        return; /* it was read before the log was opened again */
    head->lost += r.seq - head->next_seq;
    head->next_seq = r.seq + 1;
    head->lines++;
    if (l->any_facility || !(r.priority >> FACILITY_SHIFT))
        match(l, &r);
}

void dh_lines_feed(struct dh_lines *l, size_t n)
{
    const char *line = l->buf, *end = l->buf + l->buffered + n, *newline;

    while ((newline = memchr(line, '\n', (size_t)(end - line)))) {
        if (!l->overlong)
            line_take(l, line, newline);
        l->overlong = false;
        line = newline + 1;
    }
    l->buffered = (size_t)(end - line);
    if (l->buffered == DH_LOG_BUF) {
        if (!l->overlong)
            count_malformed(l);
        l->overlong = true;
        l->buffered = 0;
    }
    memmove(l->buf, line, l->buffered);
}

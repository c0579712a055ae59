/*
 * Any pattern on any line, and any bytes as a log: checks the documented contract.
 *
 * The input is a pattern, up to the first newline, followed by a log.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kmsg/kmsg.h"

#define REQUIRE(what)                                                                                  \
    do {                                                                                               \
        if (!(what)) {                                                                                 \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #what);                 \
            abort();                                                                                   \
        }                                                                                              \
    } while (0)

/* A key consists of pieces of the line in their order, and does not depend on the room for it. */
static void fuzz_match(const char *pattern, const char *text, size_t n)
{
    char key[DH_LOG_KEY + 1], cut[DH_LOG_KEY + 1];
    const char *at = text;
    int64_t len;
    size_t cap = n % DH_LOG_KEY;

    key[DH_LOG_KEY] = cut[cap] = '#';
    len = dh_pattern_match(pattern, text, n, key, DH_LOG_KEY);
    REQUIRE(key[DH_LOG_KEY] == '#' && len <= DH_LOG_KEY);
    REQUIRE((dh_pattern_match(pattern, text, n, cut, cap) < 0) == (len < 0) && cut[cap] == '#');
    if (len < 0)
        return;
    REQUIRE(!memcmp(key, cut, (size_t)len < cap ? (size_t)len : cap));
    for (size_t i = 0; i < (size_t)len;) {
        const char *end = memchr(key + i, '\n', (size_t)len - i);
        size_t field = (size_t)(end ? end - key : len) - i;

        at = field ? memmem(at, (size_t)(text + n - at), key + i, field) : at;
        REQUIRE(at);
        at += field;
        i += field + 1;
    }
}

static struct dh_lines *lines_make(const char *pattern)
{
    struct dh_lines *l = calloc(1, sizeof(*l));

    if (!l)
        exit(2);
    l->pattern[l->patterns++] = pattern;
    l->any_facility = true;
    return l;
}

static void feed(struct dh_lines *l, const char *s, size_t n, size_t piece)
{
    while (n) {
        size_t room = sizeof(l->buf) - l->buffered, now = n < piece ? n : piece;

        REQUIRE(room > 0);
        now = now < room ? now : room;
        memcpy(l->buf + l->buffered, s, now);
        dh_lines_feed(l, now);
        s += now;
        n -= now;
    }
}

/* Entries are consistent, and do not depend on how the log was cut into pieces. */
static void fuzz_lines(const char *pattern, const char *s, size_t n)
{
    struct dh_lines *whole = lines_make(pattern), *pieces = lines_make(pattern);
    const struct dh_log *head = &whole->work.head;
    uint64_t sum = 0;

    feed(whole, s, n, sizeof(whole->buf));
    feed(pieces, s, n, 1 + n % 7);
    REQUIRE(!memcmp(&whole->work, &pieces->work, sizeof(whole->work)));
    REQUIRE(head->entries <= DH_LOG_MAX && head->matched <= head->lines);
    for (uint32_t i = 0; i < head->entries; i++) {
        const struct dh_log_line *line = &whole->work.line[i];
        const char *texts[] = { line->first, line->last };

        sum += line->count;
        REQUIRE(line->count && line->seq < head->next_seq);
        for (int t = 0; t < 2; t++) {
            size_t len = strnlen(texts[t], DH_LOG_TEXT);

            REQUIRE(len < DH_LOG_TEXT);
            for (size_t k = 0; k < DH_LOG_TEXT; k++)
                REQUIRE(k < len ? texts[t][k] >= ' ' && texts[t][k] < 0x7f : !texts[t][k]);
        }
    }
    REQUIRE(head->evicted || sum == head->matched);
    free(whole);
    free(pieces);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *s = (const char *)data, *newline = memchr(s, '\n', size);
    char *pattern;
    size_t n;

    if (!newline)
        return 0;
    pattern = strndup(s, (size_t)(newline - s));
    n = size - (size_t)(newline + 1 - s);
    if (pattern && !dh_pattern_check(pattern)) {
        const char *end = memchr(newline + 1, '\n', n);

        fuzz_match(pattern, newline + 1, end ? (size_t)(end - newline - 1) : n);
        fuzz_lines(pattern, newline + 1, n);
    }
    free(pattern);
    return 0;
}

/*
 * words.c - what a line of a scenario is made of: words, numbers, times.
 */
#include "words.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool word_wrong(struct words *w, const char *what, const char *word)
{
    snprintf(w->error, FAKE_ERROR, "%s: '%s'", what, word ? word : "end of line");
    return false;
}

char *word_next(struct words *w)
{
    return w->next < w->num ? w->word[w->next++] : NULL;
}

bool word_is(const char *word, const char *wanted)
{
    return word && strcmp(word, wanted) == 0;
}

const char *word_value(const char *word, const char *key)
{
    size_t n = strlen(key);

    return word && strncmp(word, key, n) == 0 && word[n] == '=' ? word + n + 1 : NULL;
}

bool word_integer(const char *word, int64_t *out)
{
    char *end;

    if (!word || !*word)
        return false;
    errno = 0;
    *out = strtoll(word, &end, 0);
    return *end == '\0' && errno == 0 && *out != FAKE_NONE;
}

bool word_number(struct words *w, const char *what, const char *word, uint64_t max, uint64_t *out)
{
    int64_t n;

    if (!word_integer(word, &n) || n < 0 || (uint64_t)n > max) {
        snprintf(w->error, FAKE_ERROR, "%s is a number from 0 to %llu, not '%s'", what,
                 (unsigned long long)max, word ? word : "end of line");
        return false;
    }
    *out = (uint64_t)n;
    return true;
}

bool word_small(struct words *w, const char *what, const char *word, uint32_t max, uint32_t *out)
{
    uint64_t n = 0;
    bool right = word_number(w, what, word, max, &n);

    *out = (uint32_t)n;
    return right;
}

bool word_duration(struct words *w, const char *word, uint64_t *ns)
{
    static const struct {
        const char *unit;
        double ns;
    } units[] = { { "s", 1e9 }, { "ms", 1e6 }, { "us", 1e3 } };
    char *end = NULL;
    double n = word ? strtod(word, &end) : -1;

    if (end != word && n >= 0 && n <= 1e6)
        for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
            if (strcmp(end, units[i].unit) == 0) {
                *ns = (uint64_t)(n * units[i].ns);
                return true;
            }
    return word_wrong(w, "a time is written 2.5s, 200ms or 50us", word);
}

/* tokens.c - tokens of a scenario's line: words, numbers, times. */
#include "tokens.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool token_wrong(struct line_tokens *w, const char *what, const char *token)
{
    snprintf(w->error, FAKE_ERROR, "%s: '%s'", what, token ? token : "end of line");
    return false;
}

char *token_next(struct line_tokens *w)
{
    return w->next < w->num ? w->token[w->next++] : NULL;
}

bool token_is(const char *token, const char *wanted)
{
    return token && strcmp(token, wanted) == 0;
}

const char *token_value(const char *token, const char *key)
{
    size_t n = strlen(key);

    return token && strncmp(token, key, n) == 0 && token[n] == '=' ? token + n + 1 : NULL;
}

bool token_integer(const char *token, int64_t *out)
{
    char *end;

    if (!token || !*token)
        return false;
    errno = 0;
    *out = strtoll(token, &end, 0);
    return *end == '\0' && errno == 0 && *out != FAKE_NONE;
}

bool token_number(struct line_tokens *w, const char *what, const char *token, uint64_t max, uint64_t *out)
{
    int64_t n;

    if (!token_integer(token, &n) || n < 0 || (uint64_t)n > max) {
        snprintf(w->error, FAKE_ERROR, "%s is a number from 0 to %llu, not '%s'", what,
                 (unsigned long long)max, token ? token : "end of line");
        return false;
    }
    *out = (uint64_t)n;
    return true;
}

bool token_small(struct line_tokens *w, const char *what, const char *token, uint32_t max, uint32_t *out)
{
    uint64_t n = 0;
    bool right = token_number(w, what, token, max, &n);

    *out = (uint32_t)n;
    return right;
}

bool token_duration(struct line_tokens *w, const char *token, uint64_t *ns)
{
    static const struct {
        const char *unit;
        double ns;
    } units[] = { { "s", 1e9 }, { "ms", 1e6 }, { "us", 1e3 } };
    char *end = NULL;
    double n = token ? strtod(token, &end) : -1;

    if (end != token && n >= 0 && n <= 1e6)
        for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
            if (strcmp(end, units[i].unit) == 0) {
                *ns = (uint64_t)(n * units[i].ns);
                return true;
            }
    return token_wrong(w, "a time is written 2.5s, 200ms or 50us", token);
}

/* tokens.h - tokens of a scenario's line. On an error functions return false, with the reason in @error. */
#ifndef FAKE_TOKENS_H
#define FAKE_TOKENS_H

#include "command.h"

#define TOKENS 24

struct line_tokens {
    char *token[TOKENS];
    uint32_t num, next;
    char *error; /* FAKE_ERROR bytes */
};

bool token_wrong(struct line_tokens *w, const char *what, const char *token);
char *token_next(struct line_tokens *w); /* NULL at the end of the line */
bool token_is(const char *token, const char *wanted);

/*
 * Return the text after @key in "key=value"; NULL for another word.
 */
const char *token_value(const char *token, const char *key);

/* Parse a decimal number, or a hexadecimal one with 0x; a sign may precede it. */
bool token_integer(const char *token, int64_t *out);

/* Parse a number from 0 to @max; @what names it in the error. */
bool token_number(struct line_tokens *w, const char *what, const char *token, uint64_t max, uint64_t *out);
bool token_small(struct line_tokens *w, const char *what, const char *token, uint32_t max, uint32_t *out);

/* Parse 2.5s, 200ms, 50us. */
bool token_duration(struct line_tokens *w, const char *token, uint64_t *ns);

#endif

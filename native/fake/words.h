/*
 * words.h - what a line of a scenario is made of. What is wrong is said in @error, and is false.
 */
#ifndef FAKE_WORDS_H
#define FAKE_WORDS_H

#include "command.h"

#define WORDS 24

struct words {
    char *word[WORDS];
    uint32_t num, next;
    char *error; /* FAKE_ERROR bytes */
};

bool word_wrong(struct words *w, const char *what, const char *word);
char *word_next(struct words *w); /* NULL at the end of the line */
bool word_is(const char *word, const char *wanted);

/* What stands behind @key in "key=value"; NULL if it is something else. */
const char *word_value(const char *word, const char *key);

/* Decimal, or hexadecimal with 0x; a sign in front. */
bool word_integer(const char *word, int64_t *out);

/* From 0 to @max; @what it is, for the error. */
bool word_number(struct words *w, const char *what, const char *word, uint64_t max, uint64_t *out);
bool word_small(struct words *w, const char *what, const char *word, uint32_t max, uint32_t *out);

/* 2.5s, 200ms, 50us */
bool word_duration(struct words *w, const char *word, uint64_t *ns);

#endif

/*
 * check.h - checks for test programs: they count, report failures, and continue.
 *
 *     int main(void)
 *     {
 *         CHECK_INT(dh_text_u64("1", 1, &value), 0);
 *         return check_done("test_text");
 *     }
 *
 * Only one thread checks; other threads pass their findings to it. Include once per program.
 */
#ifndef DH_CHECK_H
#define DH_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned long check_count;
static unsigned long check_failures;
static const char *check_row = ""; /* names the current row of a table-driven test */

static inline void check_that(bool ok, const char *file, int line, const char *what)
{
    check_count++;
    if (ok)
        return;
    check_failures++;
    fprintf(stderr, "%s:%d: %s%s%s\n", file, line, check_row, *check_row ? ": " : "", what);
}

#define CHECK(cond) check_that((cond), __FILE__, __LINE__, #cond)

#define CHECK_AS(type, format, got, want)                                                              \
    do {                                                                                               \
        const type got_ = (got), want_ = (want);                                                       \
        char what_[256];                                                                               \
        snprintf(what_, sizeof(what_), "%s is %" format ", not %" format, #got, got_, want_);          \
        check_that(got_ == want_, __FILE__, __LINE__, what_);                                          \
    } while (0)

#define CHECK_INT(got, want) CHECK_AS(int64_t, PRId64, got, want)
#define CHECK_U64(got, want) CHECK_AS(uint64_t, PRIu64, got, want)

#define CHECK_STR(got, want)                                                                           \
    do {                                                                                               \
        const char *got_ = (got), *want_ = (want);                                                     \
        char what_[2048];                                                                              \
        snprintf(what_, sizeof(what_), "%s is \"%s\", not \"%s\"", #got, got_, want_);                 \
        check_that(strcmp(got_, want_) == 0, __FILE__, __LINE__, what_);                               \
    } while (0)

/* Copy @bytes into a block of exactly @n bytes, so that AddressSanitizer detects a read behind the end. */
static inline void *check_copy(const void *bytes, size_t n)
{
    void *copy = malloc(n);

    if (!copy && n > 0) {
        perror("malloc");
        exit(2);
    }
    if (n > 0)
        memcpy(copy, bytes, n);
    return copy;
}

/* Print the summary. Return: the program's exit status; a program without any check fails. */
static inline int check_done(const char *program)
{
    printf("%s: %lu checks, %lu failed\n", program, check_count, check_failures);
    return check_count > 0 && check_failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Print what this machine cannot test, in the form that make native-test reads. Return: success. */
static inline int check_skip(const char *program, const char *reason)
{
    printf("%s: skipped: %s\n", program, reason);
    return EXIT_SUCCESS;
}

#endif

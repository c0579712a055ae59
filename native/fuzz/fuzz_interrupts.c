/*
 * fuzz_interrupts.c - any bytes as /proc/interrupts, whole and in pieces.
 *
 * The first byte is the length of the pieces. Also checks the contract of interrupts.h: the result does not
 * depend on the pieces, and a complete row has a count for every column.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/interrupts.h"

#define REQUIRE(cond)                                                                                  \
    do {                                                                                               \
        if (!(cond)) {                                                                                 \
            fprintf(stderr, "fuzz_interrupts.c:%d: %s\n", __LINE__, #cond);                            \
            abort();                                                                                   \
        }                                                                                              \
    } while (0)

/*
 * Return the parser's result, or for a file without the row: 2 if it is complete, 3 if it is cut.
 */
static int take(struct dh_interrupts *r, const char *s, size_t n, size_t piece)
{
    int found = 0;

    dh_interrupts_begin(r, "MCE:");
    for (size_t at = 0; at < n && !found; at += piece)
        found = dh_interrupts_feed(r, s + at, n - at < piece ? n - at : piece);
    return found ? found : dh_interrupts_end(r) ? 3 : 2;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct dh_interrupts whole, pieces;
    const char *s = (const char *)data + 1;
    int found;

    if (!size)
        return 0;
    found = take(&whole, s, size - 1, size);
    REQUIRE(take(&pieces, s, size - 1, data[0] + 1u) == found);
    REQUIRE(pieces.columns == whole.columns && pieces.counts == whole.counts);
    REQUIRE(!memcmp(pieces.cpu, whole.cpu, whole.columns * sizeof(*whole.cpu)));
    REQUIRE(!memcmp(pieces.count, whole.count, whole.counts * sizeof(*whole.count)));
    REQUIRE(found != 1 || (whole.columns && whole.counts == whole.columns));
    return 0;
}

/*
 * fuzz_interrupts.c - /proc/interrupts of any bytes, whole and in pieces.
 *
 * The first byte says how long the pieces are. Beside crashes, what interrupts.h promises is checked: how the
 * file was cut does not matter, and a row that is whole has a count for every column.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interrupts.h"

#define PROMISE(cond)                                                                                  \
    do {                                                                                               \
        if (!(cond)) {                                                                                 \
            fprintf(stderr, "fuzz_interrupts.c:%d: %s\n", __LINE__, #cond);                            \
            abort();                                                                                   \
        }                                                                                              \
    } while (0)

/* What is found, or 2 and more for a file without the row: 2 that is whole, 3 cut short. */
static int take(struct dh_interrupts *r, const char *s, size_t n, size_t piece)
{
    int found = 0;

    dh_interrupts_begin(r, "MCE:");
    for (size_t at = 0; at < n && !found; at += piece)
        found = dh_interrupts_take(r, s + at, n - at < piece ? n - at : piece);
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
    PROMISE(take(&pieces, s, size - 1, data[0] + 1u) == found);
    PROMISE(pieces.columns == whole.columns && pieces.counts == whole.counts);
    PROMISE(!memcmp(pieces.cpu, whole.cpu, whole.columns * sizeof(*whole.cpu)));
    PROMISE(!memcmp(pieces.count, whole.count, whole.counts * sizeof(*whole.count)));
    PROMISE(found != 1 || (whole.columns && whole.counts == whole.columns));
    return 0;
}

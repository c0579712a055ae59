/*
 * Any bytes as messages of the kernel: checks the documented contract.
 *
 * The input consists of messages separated by newlines.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "uevent/uevents.h"

#define REQUIRE(what)                                                                                  \
    do {                                                                                               \
        if (!(what)) {                                                                                 \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #what);                 \
            abort();                                                                                   \
        }                                                                                              \
    } while (0)

/* Each message counts at most once, for one subsystem or as malformed, and requests the right wakes. */
static void check_copy_of(const struct dh_uevent_counts *h, uint64_t messages)
{
    uint64_t changes = 0;

    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        changes += h->sample.changes[i];
    REQUIRE(changes + h->sample.malformed <= messages);
    REQUIRE(h->is_new == (changes > 0));
    REQUIRE(h->rescan == (changes > h->sample.changes[DH_SUBSYSTEM_PCI]));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dh_uevent_counts counts = { 0 };
    const char *s = (const char *)data, *end = s + size;
    uint64_t messages = 0;

    while (s < end) {
        const char *newline = memchr(s, '\n', (size_t)(end - s));
        size_t n = (size_t)((newline ? newline : end) - s);
        char *copy = malloc(n); /* so that a read behind its end is detected */

        if (n)
            memcpy(copy, s, n);
        dh_uevent_count(&counts, copy, n);
        messages++;
        free(copy);
        s += n + 1;
    }
    check_copy_of(&counts, messages);
    return 0;
}

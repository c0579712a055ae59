/*
 * Any bytes as messages of the kernel: what is promised holds.
 *
 * The input is messages with a newline between them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "uevents.h"

#define PROMISE(what)                                                                                  \
    do {                                                                                               \
        if (!(what)) {                                                                                 \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #what);                 \
            abort();                                                                                   \
        }                                                                                              \
    } while (0)

/* Each message counts once at most, for one subsystem or as malformed, and makes whom it should look. */
static void look(const struct dh_heard *h, uint64_t messages)
{
    uint64_t changes = 0;

    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        changes += h->sample.changes[i];
    PROMISE(changes + h->sample.malformed <= messages);
    PROMISE(h->news == (changes > 0));
    PROMISE(h->poke == (changes > h->sample.changes[DH_SUBSYSTEM_PCI]));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dh_heard heard = { 0 };
    const char *s = (const char *)data, *end = s + size;
    uint64_t messages = 0;

    while (s < end) {
        const char *newline = memchr(s, '\n', (size_t)(end - s));
        size_t n = (size_t)((newline ? newline : end) - s);
        char *copy = malloc(n); /* so that a read behind its end is seen */

        if (n)
            memcpy(copy, s, n);
        dh_heard_take(&heard, copy, n);
        messages++;
        free(copy);
        s += n + 1;
    }
    look(&heard, messages);
    return 0;
}

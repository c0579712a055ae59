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

/* What is told of a message lies inside it. */
static void fuzz_parse(const char *s, size_t n)
{
    struct dh_uevent_text text;

    if (dh_uevent_parse(s, n, &text))
        return;
    PROMISE(text.subsystem <= DH_SUBSYSTEM_NUM && text.action <= DH_ACTION_NUM);
    PROMISE(text.path > s && text.path + strlen(text.path) < s + n);
    PROMISE(!*text.driver || (text.driver > text.path && text.driver + strlen(text.driver) < s + n));
}

static void printable(const char *text, size_t cap)
{
    size_t len = strnlen(text, cap);

    PROMISE(len < cap);
    for (size_t i = 0; i < cap; i++)
        PROMISE(i < len ? text[i] >= ' ' && text[i] < 0x7f : !text[i]);
}

static void look(const struct dh_uevent_table *t, uint64_t messages)
{
    uint64_t changes = 0, count = 0;

    PROMISE(t->head.messages == messages && t->head.malformed <= messages);
    PROMISE(t->head.entries <= DH_UEVENT_MAX);
    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        changes += t->head.changes[i];
    PROMISE(changes + t->head.malformed <= messages);
    for (uint32_t i = 0; i < t->head.entries; i++) {
        const struct dh_uevent *entry = &t->entry[i];

        PROMISE(entry->subsystem < DH_SUBSYSTEM_NUM && entry->action < DH_ACTION_NUM && entry->count);
        PROMISE(entry->last_ns < messages);
        printable(entry->path, sizeof(entry->path));
        printable(entry->driver, sizeof(entry->driver));
        for (uint32_t k = 0; k < i; k++)
            PROMISE(strcmp(entry->path, t->entry[k].path));
        count += entry->count;
    }
    PROMISE(t->head.evicted || count <= changes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dh_heard *heard = calloc(1, sizeof(*heard));
    const char *s = (const char *)data, *end = s + size;
    uint64_t messages = 0;

    if (!heard)
        exit(2);
    while (s < end) {
        const char *newline = memchr(s, '\n', (size_t)(end - s));
        size_t n = (size_t)((newline ? newline : end) - s);
        char *copy = malloc(n); /* so that a read behind its end is seen */

        if (n)
            memcpy(copy, s, n);
        fuzz_parse(copy, n);
        dh_heard_take(heard, copy, n, messages++);
        free(copy);
        s += n + 1;
    }
    look(&heard->work, messages);
    free(heard);
    return 0;
}

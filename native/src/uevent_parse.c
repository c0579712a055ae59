/*
 * uevent_parse.c - messages of the kernel to entries. No I/O, no clock.
 *
 * A message is strings, each with its NUL: "change@/devices/system/cpu/cpu1", then "KEY=value" of which
 * ACTION, DEVPATH, SUBSYSTEM and SEQNUM never lack (lib/kobject_uevent.c). The first string has the action
 * and the path already.
 */
#include <stdio.h>
#include <string.h>

#include "text.h"
#include "uevents.h"

#define ESCAPE_LEN 4 /* \xNN */

static const char *const subsystems[DH_SUBSYSTEM_NUM] = {
    [DH_SUBSYSTEM_CPU] = "cpu",   [DH_SUBSYSTEM_MEMORY] = "memory",
    [DH_SUBSYSTEM_NODE] = "node", [DH_SUBSYSTEM_PCI] = "pci",
    [DH_SUBSYSTEM_EDAC] = "edac", [DH_SUBSYSTEM_MACHINECHECK] = "machinecheck",
};

static const char *const actions[DH_ACTION_NUM] = {
    [DH_ACTION_ADD] = "add",       [DH_ACTION_REMOVE] = "remove",
    [DH_ACTION_CHANGE] = "change", [DH_ACTION_MOVE] = "move",
    [DH_ACTION_ONLINE] = "online", [DH_ACTION_OFFLINE] = "offline",
    [DH_ACTION_BIND] = "bind",     [DH_ACTION_UNBIND] = "unbind",
};

/* Where in @names the first @n bytes of @s are; @count if nowhere. */
static uint32_t find(const char *const *names, uint32_t count, const char *s, size_t n)
{
    uint32_t i;

    for (i = 0; i < count; i++)
        if (strlen(names[i]) == n && !memcmp(names[i], s, n))
            break;
    return i;
}

/* The value in "KEY=value"; NULL if it is another key's. */
static const char *value_of(const char *key, const char *s)
{
    size_t n = strlen(key);

    return !strncmp(s, key, n) && s[n] == '=' ? s + n + 1 : NULL;
}

int dh_uevent_parse(const char *s, size_t n, struct dh_uevent_text *out)
{
    const char *end = s + n, *at, *value;
    struct dh_uevent_text text = { .driver = "" };
    bool subsystem = false, seqnum = false;

    if (!n || end[-1])
        return DH_EPARSE;
    at = strchr(s, '@');
    if (!at || at[1] != '/')
        return DH_EPARSE;
    text.action = find(actions, DH_ACTION_NUM, s, (size_t)(at - s));
    text.path = at + 2;
    for (s += strlen(s) + 1; s < end; s += strlen(s) + 1) {
        if ((value = value_of("SUBSYSTEM", s))) {
            text.subsystem = find(subsystems, DH_SUBSYSTEM_NUM, value, strlen(value));
            subsystem = true;
        } else if ((value = value_of("SEQNUM", s))) {
            seqnum = !dh_text_u64(value, strlen(value), &text.seqnum);
        } else if ((value = value_of("DRIVER", s))) {
            text.driver = value;
        }
    }
    if (!subsystem || !seqnum)
        return DH_EPARSE;
    *out = text;
    return 0;
}

/* Cut where it must be, but not inside \xNN; what is left of @cap bytes is NULs. */
static void text_put(char *to, size_t cap, const char *text)
{
    size_t used = 0;

    memset(to, 0, cap);
    for (; *text; text++) {
        bool plain = *text >= ' ' && *text < 0x7f;
        size_t need = plain ? 1 : ESCAPE_LEN;

        if (used + need >= cap)
            break;
        if (plain)
            to[used] = *text;
        else
            snprintf(to + used, ESCAPE_LEN + 1, "\\x%02x", (unsigned char)*text);
        used += need;
    }
}

static uint32_t oldest(const struct dh_uevent_table *t)
{
    uint32_t slot = 0;

    for (uint32_t i = 1; i < DH_UEVENT_MAX; i++)
        if (t->entry[i].last_ns < t->entry[slot].last_ns)
            slot = i;
    return slot;
}

static uint32_t slot_make(struct dh_uevent_table *t)
{
    uint32_t slot = t->head.entries;

    if (slot < DH_UEVENT_MAX) {
        t->head.entries++;
    } else {
        slot = oldest(t);
        t->head.evicted++;
    }
    t->entry[slot] = (struct dh_uevent){ 0 };
    return slot;
}

static void latch(struct dh_heard *h, const struct dh_uevent_text *text, uint64_t now_ns)
{
    struct dh_uevent_table *t = &h->work;
    char path[DH_UEVENT_PATH];
    struct dh_uevent *entry;
    uint32_t slot;

    text_put(path, sizeof(path), text->path);
    for (slot = 0; slot < t->head.entries; slot++)
        if (!strcmp(t->entry[slot].path, path))
            break;
    if (slot == t->head.entries)
        slot = slot_make(t);
    entry = &t->entry[slot];
    entry->subsystem = text->subsystem;
    entry->action = text->action;
    entry->count++;
    entry->last_ns = now_ns;
    entry->seqnum = text->seqnum;
    memcpy(entry->path, path, sizeof(path));
    text_put(entry->driver, sizeof(entry->driver), text->driver);
    h->dirty[slot / 64] |= 1ull << (slot % 64);
}

void dh_heard_take(struct dh_heard *h, const char *s, size_t n, uint64_t now_ns)
{
    struct dh_uevents_head *head = &h->work.head;
    struct dh_uevent_text text;

    head->messages++;
    if (dh_uevent_parse(s, n, &text)) {
        head->malformed++;
        return;
    }
    if (text.subsystem == DH_SUBSYSTEM_NUM)
        return;
    head->changes[text.subsystem]++;
    h->news = true;
    h->poke |= text.subsystem != DH_SUBSYSTEM_PCI;
    if (text.action != DH_ACTION_NUM)
        latch(h, &text, now_ns);
}

void dh_heard_missed(struct dh_heard *h)
{
    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        h->work.head.changes[i]++;
    h->news = h->poke = true;
}

/*
 * kmsg_pattern.c - matches patterns of the kernel log; drahealth.h documents them.
 *
 * Patterns are interpreted directly. Nearly every line differs in the first byte from each of the some thirty
 * literal beginnings such as "NVRM: Xid (PCI:", so compiling the patterns would save nothing.
 */
#include <errno.h>
#include <string.h>

#include "drahealth.h"
#include "kmsg/kmsg.h"

#define DOMAIN_MIN 4 /* hex digits; domains from 0x10000 up have more */
#define DOMAIN_MAX 8

/*
 * Return the length of the literal at @p, up to the next field.
 */
static size_t literal(const char *p)
{
    return strcspn(p, "%");
}

int dh_pattern_check(const char *pattern)
{
    const char *p = pattern + literal(pattern);

    if (!*pattern)
        return 1;
    for (; *p; p += literal(p)) {
        if (!p[1] || !strchr("bdxwk*", p[1]))
            return (int)(p - pattern) + 1;
        if ((p[1] == 'k' && p[2]) || (p[1] == '*' && p[2] == '%'))
            return (int)(p - pattern) + 3;
        p += 2;
    }
    return 0;
}

static size_t decimals(const char *s, size_t n)
{
    size_t i = 0;

    while (i < n && s[i] >= '0' && s[i] <= '9')
        i++;
    return i;
}

static size_t hex_digits(const char *s, size_t n, size_t most)
{
    size_t i = 0;

    for (; i < n && i < most; i++) {
        char lower = (char)(s[i] | 0x20);

        if (!(s[i] >= '0' && s[i] <= '9') && !(lower >= 'a' && lower <= 'f'))
            break;
    }
    return i;
}

static size_t pci_address(const char *s, size_t n)
{
    size_t at = hex_digits(s, n, DOMAIN_MAX);

    if (at < DOMAIN_MIN)
        return 0;
    for (int part = 0; part < 2; part++) { /* bus, device */
        if (at == n || s[at] != ':' || hex_digits(s + at + 1, n - at - 1, 2) != 2)
            return 0;
        at += 3;
    }
    if (n - at >= 2 && s[at] == '.' && s[at + 1] >= '0' && s[at + 1] <= '7')
        at += 2;
    return at;
}

static size_t nonblank_run(const char *s, size_t n)
{
    size_t i = 0;

    while (i < n && s[i] != ' ' && s[i] != '\t' && s[i] != ',' && s[i] != '(' && s[i] != ')')
        i++;
    return i;
}

/*
 * Return how many of the @n bytes at @s the field matches; 0 if it does not match.
 */
static size_t field(char kind, const char *s, size_t n)
{
    size_t len;

    switch (kind) {
    case 'b':
        return pci_address(s, n);
    case 'd':
        return decimals(s, n);
    case 'x':
        if (n < 2 || s[0] != '0' || s[1] != 'x')
            return 0;
        len = hex_digits(s + 2, n - 2, n);
        return len ? len + 2 : 0;
    case 'w':
        return nonblank_run(s, n);
    default:
        return n; /* %k */
    }
}

static size_t append(char *key, size_t used, size_t cap, const char *s, size_t n)
{
    size_t room = cap - used;

    memcpy(key + used, s, n < room ? n : room);
    if (n >= room)
        return cap;
    key[used + n] = '\n'; /* a newline occurs in no line, so the key of "1", "23" differs from that of "12",
                             "3" */
    return used + n + 1;
}

/*
 * Return the end of the literal @p in the @n bytes at @s, at their beginning or, with @anywhere, further on;
 * or NULL.
 */
static const char *literal_find(const char *p, size_t len, const char *s, size_t n, bool anywhere)
{
    const char *at = s;

    if (anywhere)
        at = memmem(s, n, p, len);
    else if (n < len || memcmp(s, p, len))
        return NULL;
    return at ? at + len : NULL;
}

int64_t dh_pattern_match(const char *pattern, const char *text, size_t n, char *key, size_t cap)
{
    const char *p = pattern, *s = text, *end = text + n;
    bool anywhere = false; /* after %* */
    size_t used = 0;

    if (*p != '%' && (!n || *p != *s))
        return -ENOENT; /* the usual case; three times as fast as the loop below */
    for (;;) {
        size_t len = literal(p);

        if (len) {
            s = literal_find(p, len, s, (size_t)(end - s), anywhere);
            if (!s)
                return -ENOENT;
            p += len;
        }
        anywhere = false;
        if (!*p)
            return (int64_t)used;
        p += 2;
        if (p[-1] == '*') {
            anywhere = true;
            continue;
        }
        len = field(p[-1], s, (size_t)(end - s));
        if (!len && p[-1] != 'k')
            return -ENOENT;
        used = append(key, used, cap, s, len);
        s += len;
    }
}

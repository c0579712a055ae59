/*
 * text.c - parsers for the kernel's small text files and for names of cgroups; text.h documents the
 * functions.
 *
 * Byte loops instead of strtoull(3) and sscanf(3), which need a terminating NUL, depend on the locale and
 * accept what the kernel never writes: signs, leading blanks, "0x".
 */
#include "core/text.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define CPU_MAX (64 * DH_CPU_WORDS)
#define ID_MIN 12 /* runtimes shorten ids to this length; names of cgroup files without "." and "_" are
                     shorter */
#define ID_HEX 64

/* Bytes of a name with a length, cut from both ends during parsing. */
struct span {
    const char *s;
    size_t n;
};

/* Parse a number. Return: its count of digits, 0 without digits or for a value above 2^64-1. */
static size_t digits(const char *s, size_t n, uint64_t *out)
{
    uint64_t value = 0;
    size_t i;

    for (i = 0; i < n; i++) {
        unsigned int digit = (unsigned int)(unsigned char)s[i] - '0';

        if (digit > 9)
            break;
        if (__builtin_mul_overflow(value, 10u, &value) || __builtin_add_overflow(value, digit, &value))
            return 0;
    }
    *out = value;
    return i;
}

static size_t without_newline(const char *s, size_t n)
{
    return n > 0 && s[n - 1] == '\n' ? n - 1 : n;
}

static bool is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
}

static bool is_name(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-';
}

static bool all(struct span name, bool (*is)(char))
{
    for (size_t i = 0; i < name.n; i++)
        if (!is(name.s[i]))
            return false;
    return true;
}

static bool begins(struct span name, const char *with)
{
    size_t len = strlen(with);

    return name.n >= len && memcmp(name.s, with, len) == 0;
}

static bool ends(struct span name, const char *with)
{
    size_t len = strlen(with);

    return name.n >= len && memcmp(name.s + name.n - len, with, len) == 0;
}

static bool cut_front(struct span *name, const char *with)
{
    if (!begins(*name, with))
        return false;
    name->s += strlen(with);
    name->n -= strlen(with);
    return true;
}

static bool cut_back(struct span *name, const char *with)
{
    if (!ends(*name, with))
        return false;
    name->n -= strlen(with);
    return true;
}

int dh_text_u64(const char *s, size_t n, uint64_t *out)
{
    uint64_t value;

    n = without_newline(s, n);
    if (n == 3 && memcmp(s, "max", 3) == 0) {
        *out = UINT64_MAX;
        return 0;
    }
    if (n == 0 || digits(s, n, &value) != n)
        return DH_EPARSE;
    *out = value;
    return 0;
}

int dh_text_quota(const char *s, size_t n, uint64_t *us)
{
    uint64_t value = UINT64_MAX;

    n = without_newline(s, n);
    if (n == 0 || ((n != 2 || memcmp(s, "-1", 2) != 0) && digits(s, n, &value) != n))
        return DH_EPARSE;
    *us = value;
    return 0;
}

int dh_text_cpu_max(const char *s, size_t n, uint64_t *quota_us, uint64_t *period_us)
{
    uint64_t quota = UINT64_MAX, period;
    size_t at = n > 3 && memcmp(s, "max", 3) == 0 ? 3 : digits(s, n, &quota), len;

    if (at == 0 || at == n || s[at] != ' ')
        return DH_EPARSE;
    at++;
    len = digits(s + at, n - at, &period);
    if (len == 0 || at + len + 1 != n || s[n - 1] != '\n')
        return DH_EPARSE;
    *quota_us = quota;
    *period_us = period;
    return 0;
}

uint64_t dh_text_limit(uint64_t value)
{
    const uint64_t none = (UINT64_C(1) << 63) - (UINT64_C(1) << 34);

    return value >= none ? UINT64_MAX : value;
}

static void set_range(uint64_t *words, uint64_t first, uint64_t last)
{
    uint64_t head = UINT64_MAX << (first % 64);
    uint64_t tail = UINT64_MAX >> (63 - last % 64);

    if (first / 64 == last / 64) {
        words[first / 64] |= head & tail;
        return;
    }
    words[first / 64] |= head;
    for (uint64_t w = first / 64 + 1; w < last / 64; w++)
        words[w] = UINT64_MAX;
    words[last / 64] |= tail;
}

int dh_text_cpus(const char *s, size_t n, uint64_t words[DH_CPU_WORDS])
{
    uint64_t set[DH_CPU_WORDS] = {0};
    uint64_t lowest = 0; /* least CPU that the next range may begin with */
    size_t i;

    n = without_newline(s, n);
    for (i = 0; n > 0; i++) {
        uint64_t first, last;
        size_t len = digits(s + i, n - i, &first);

        if (len == 0)
            return DH_EPARSE;
        i += len;
        last = first;
        if (i < n && s[i] == '-') {
            len = digits(s + i + 1, n - i - 1, &last);
            if (len == 0)
                return DH_EPARSE;
            i += len + 1;
        }
        if (first < lowest || last < first || last >= CPU_MAX)
            return DH_EPARSE;
        set_range(set, first, last);
        lowest = last + 1;
        if (i == n)
            break;
        if (s[i] != ',')
            return DH_EPARSE;
    }
    memcpy(words, set, sizeof(set));
    return 0;
}

/* Parse the number after " total=" at the end of a line. */
static bool total_cut(struct span line, uint64_t *total)
{
    size_t at = line.n;

    while (at > 0 && line.s[at - 1] >= '0' && line.s[at - 1] <= '9')
        at--;
    return at < line.n && digits(line.s + at, line.n - at, total) == line.n - at &&
           ends((struct span){line.s, at}, " total=");
}

int dh_text_pressure(const char *s, size_t n, uint64_t us[2])
{
    static const char *const begin[2] = {"some avg10=", "full avg10="};
    uint64_t total[2] = {0, 0};
    int lines = 0;

    while (n > 0) {
        const char *end = memchr(s, '\n', n);
        struct span line = {s, end ? (size_t)(end - s) : 0};

        if (!end || lines == 2 || !cut_front(&line, begin[lines]) || !total_cut(line, &total[lines]))
            return DH_EPARSE;
        lines++;
        n -= (size_t)(end + 1 - s);
        s = end + 1;
    }
    if (!lines)
        return DH_EPARSE;
    memcpy(us, total, sizeof(total));
    return lines;
}

/*
 * Return the wanted key at the beginning of the line that was not found before. @from is the most likely one.
 */
static struct dh_text_key *find_wanted(struct dh_text_key *keys, uint32_t nkeys, uint32_t from,
                                       const char *line, size_t n)
{
    for (uint32_t tried = 0; tried < nkeys; tried++) {
        struct dh_text_key *k = &keys[from];

        if (!k->found && n > k->len && line[k->len] == ' ' && memcmp(line, k->key, k->len) == 0)
            return k;
        from = from + 1 < nkeys ? from + 1 : 0;
    }
    return NULL;
}

/*
 * Return the length of a line with its newline, 0 if the line is not "key value".
 */
static size_t line_length(const char *line, size_t n)
{
    const char *end = memchr(line, '\n', n);
    const char *space = end ? memchr(line, ' ', (size_t)(end - line)) : NULL;

    if (!space || space == line || space + 1 == end)
        return 0;
    return (size_t)(end - line) + 1;
}

static int find_keys(const char *s, size_t n, struct dh_text_key *keys, uint32_t nkeys)
{
    uint32_t found = 0, next = 0;

    for (size_t i = 0; i < n && found < nkeys;) {
        struct dh_text_key *k = find_wanted(keys, nkeys, next, s + i, n - i);
        size_t len;

        if (!k) {
            len = line_length(s + i, n - i);
            if (len == 0)
                return DH_EPARSE;
            i += len;
            continue;
        }
        i += k->len + 1;
        len = digits(s + i, n - i, &k->value);
        if (len == 0 || i + len == n || s[i + len] != '\n')
            return DH_EPARSE;
        i += len + 1;
        k->found = 1;
        found++;
        next = k + 1 < keys + nkeys ? (uint32_t)(k + 1 - keys) : 0;
    }
    return (int)found;
}

int dh_text_keys(const char *s, size_t n, struct dh_text_key *keys, uint32_t nkeys)
{
    int found;

    for (uint32_t k = 0; k < nkeys; k++)
        keys[k].found = 0, keys[k].value = 0;
    found = find_keys(s, n, keys, nkeys);
    for (uint32_t k = 0; found < 0 && k < nkeys; k++)
        keys[k].found = 0, keys[k].value = 0;
    return found;
}

/*
 * Cut "@key:" from the beginning of a line, with "Node 0 " before it or without. Return: whether it was
 * there.
 */
static bool row_begins(struct span *line, const char *key)
{
    size_t len = strlen(key);
    uint64_t node;

    if (line->n > 5 && !memcmp(line->s, "Node ", 5)) {
        size_t skip = 5 + digits(line->s + 5, line->n - 5, &node);

        if (skip == 5 || skip == line->n || line->s[skip] != ' ')
            return false;
        *line = (struct span){ line->s + skip + 1, line->n - skip - 1 };
    }
    if (line->n <= len || memcmp(line->s, key, len) || line->s[len] != ':')
        return false;
    *line = (struct span){ line->s + len + 1, line->n - len - 1 };
    return true;
}

int dh_text_kib(const char *s, size_t n, const char *key, uint64_t *kib)
{
    for (size_t at = 0; at < n;) {
        const char *end = memchr(s + at, '\n', n - at);
        struct span line = { s + at, end ? (size_t)(end - s) - at : n - at };
        uint64_t value;
        size_t len;

        at += line.n + 1;
        if (!row_begins(&line, key))
            continue;
        while (line.n && *line.s == ' ')
            line = (struct span){ line.s + 1, line.n - 1 };
        len = digits(line.s, line.n, &value);
        if (!end || !len || line.n - len != 3 || memcmp(line.s + len, " kB", 3))
            return DH_EPARSE;
        *kib = value;
        return 0;
    }
    return -ENOENT;
}

int dh_text_numbered(const char *name, size_t n, const char *prefix, uint32_t *number)
{
    size_t len = strlen(prefix);
    uint64_t value;

    if (n <= len || memcmp(name, prefix, len) || digits(name + len, n - len, &value) != n - len)
        return -ENOENT;
    if (value > UINT32_MAX || (name[len] == '0' && n > len + 1))
        return -ENOENT;
    *number = (uint32_t)value;
    return 0;
}

int dh_text_hugepage_dir(const char *name, size_t n, uint64_t *kib)
{
    struct span size = {name, n};
    uint64_t value;

    if (!cut_front(&size, "hugepages-") || !cut_back(&size, "kB"))
        return -ENOENT;
    if (digits(size.s, size.n, &value) != size.n || value == 0) /* value 0 includes "no digits" */
        return -ENOENT;
    *kib = value;
    return 0;
}

int dh_text_hugetlb(uint64_t kib, char *out, size_t cap)
{
    const uint64_t m = 1024, g = 1024 * m;
    char text[32];
    int len;

    if (kib >= g)
        len = snprintf(text, sizeof(text), "%" PRIu64 "GB", kib / g);
    else if (kib >= m)
        len = snprintf(text, sizeof(text), "%" PRIu64 "MB", kib / m);
    else
        len = snprintf(text, sizeof(text), "%" PRIu64 "KB", kib);
    if ((size_t)len >= cap)
        return -ENOSPC;
    memcpy(out, text, (size_t)len + 1);
    return len;
}

/* Return whether the part of a slice's name before the pod is the kubelet's: "kubelet-kubepods-". */
static bool is_qos_slice(struct span slice)
{
    static const char *const qos[] = {"kubepods-", "kubepods-burstable-", "kubepods-besteffort-"};

    for (size_t i = 0; i < sizeof(qos) / sizeof(qos[0]); i++) {
        struct span root = slice;

        if (cut_back(&root, qos[i]) && (root.n == 0 || root.s[root.n - 1] == '-'))
            return true;
    }
    return false;
}

int dh_text_pod(const char *name, size_t n, char uid[DH_UID_LEN])
{
    struct span pod = {name, n};
    char text[DH_UID_LEN] = {0};
    bool systemd = cut_back(&pod, ".slice");

    if (systemd) { /* "<slice>-pod<uid>"; the uid has no dash in this form */
        struct span slice = pod;

        while (slice.n > 0 && slice.s[slice.n - 1] != '-')
            slice.n--;
        pod.s += slice.n;
        pod.n -= slice.n;
        if (!is_qos_slice(slice))
            return -ENOENT;
    }
    if (!cut_front(&pod, "pod") || pod.n == 0 || pod.n >= DH_UID_LEN)
        return -ENOENT;
    for (size_t i = 0; i < pod.n; i++) {
        text[i] = systemd && pod.s[i] == '_' ? '-' : pod.s[i];
        if (!is_name(text[i]))
            return -ENOENT;
    }
    memcpy(uid, text, sizeof(text));
    return 0;
}

/* Return whether the name consists of a prefix, a dash and 64 hex digits. */
static bool ends_in_hex_id(struct span name)
{
    if (name.n < ID_HEX + 2 || name.s[name.n - ID_HEX - 1] != '-')
        return false;
    return all((struct span){name.s + name.n - ID_HEX, ID_HEX}, is_hex);
}

int dh_text_container(const char *name, size_t n, char id[DH_NAME_LEN])
{
    struct span text = {name, n};
    bool scope = cut_back(&text, ".scope");

    if (begins(text, "crio-conmon-") || begins(text, "libpod-conmon-"))
        return -ENOENT;

    if (ends_in_hex_id(text)) {
        text.s += text.n - ID_HEX;
        text.n = ID_HEX;
    } else if (scope && !cut_front(&text, "cri-containerd-") && !cut_front(&text, "crio-") &&
               !cut_front(&text, "docker-")) {
        return -ENOENT;
    }
    if (text.n < ID_MIN || text.n > ID_HEX || !all(text, is_name))
        return -ENOENT;
    memset(id, 0, DH_NAME_LEN);
    memcpy(id, text.s, text.n);
    return 0;
}

static uint64_t mix(uint64_t digest, uint64_t word)
{
    digest = (digest ^ word) * 0xff51afd7ed558ccdull;
    return digest ^ digest >> 32;
}

uint64_t dh_text_digest(const char *text, size_t n)
{
    uint64_t digest = n, word;
    size_t at = 0;

    for (; n - at >= sizeof(word); at += sizeof(word)) {
        memcpy(&word, text + at, sizeof(word));
        digest = mix(digest, word);
    }
    for (word = 1; at < n; at++)
        word = word << 8 | (unsigned char)text[at];
    digest = mix(digest, word);
    return digest ? digest : 1;
}

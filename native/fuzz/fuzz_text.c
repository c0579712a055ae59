/*
 * fuzz_text.c - every parser on the same bytes.
 *
 * Also checks the contract of text.h: a result formatted as the kernel does parses to the same result, and a
 * failure leaves the caller's memory unchanged.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/text.h"

#define REQUIRE(cond)                                                                                  \
    do {                                                                                               \
        if (!(cond)) {                                                                                 \
            fprintf(stderr, "fuzz_text.c:%d: %s\n", __LINE__, #cond);                                  \
            abort();                                                                                   \
        }                                                                                              \
    } while (0)

static void fuzz_u64(const char *s, size_t n)
{
    uint64_t value = 77, again;
    char text[32];

    if (dh_text_u64(s, n, &value) < 0) {
        REQUIRE(value == 77);
        return;
    }
    snprintf(text, sizeof(text), "%" PRIu64 "\n", value);
    REQUIRE(dh_text_u64(text, strlen(text), &again) == 0 && again == value);
    REQUIRE(dh_text_limit(value) >= value);
}

static void fuzz_quota(const char *s, size_t n)
{
    uint64_t us = 77, again;
    char text[32];

    if (dh_text_quota(s, n, &us) < 0) {
        REQUIRE(us == 77);
        return;
    }
    snprintf(text, sizeof(text), us == UINT64_MAX ? "-1\n" : "%" PRIu64 "\n", us);
    REQUIRE(dh_text_quota(text, strlen(text), &again) == 0 && again == us);
}

static void fuzz_cpu_max(const char *s, size_t n)
{
    uint64_t quota = 77, period = 77, again[2];
    char text[64];

    if (dh_text_cpu_max(s, n, &quota, &period) < 0) {
        REQUIRE(quota == 77 && period == 77);
        return;
    }
    snprintf(text, sizeof(text), "%" PRIu64 " %" PRIu64 "\n", quota, period);
    REQUIRE(dh_text_cpu_max(text, strlen(text), &again[0], &again[1]) == 0);
    REQUIRE(again[0] == quota && again[1] == period);
}

static void fuzz_cpus(const char *s, size_t n)
{
    static char text[64 * DH_CPU_WORDS * 5]; /* every CPU as four digits and a comma, or less */
    uint64_t words[DH_CPU_WORDS], again[DH_CPU_WORDS];
    size_t len = 0;

    memset(words, 0xa5, sizeof(words));
    if (dh_text_cpus(s, n, words) < 0) {
        for (size_t w = 0; w < DH_CPU_WORDS; w++)
            REQUIRE(words[w] == UINT64_C(0xa5a5a5a5a5a5a5a5));
        return;
    }
    for (unsigned int cpu = 0; cpu < 64 * DH_CPU_WORDS; cpu++)
        if (words[cpu / 64] >> cpu % 64 & 1)
            len += (size_t)snprintf(text + len, sizeof(text) - len, "%s%u", len > 0 ? "," : "", cpu);
    REQUIRE(dh_text_cpus(text, len, again) == 0 && memcmp(words, again, sizeof(words)) == 0);
}

static void fuzz_keys(const char *s, size_t n)
{
    struct dh_text_key keys[] = {
        {.key = "nr_periods", .len = 10},
        {.key = "nr_throttled", .len = 12},
        {.key = "max", .len = 3},
        {.key = "oom", .len = 3},
        {.key = "oom_kill", .len = 8},
    };
    const uint32_t nkeys = sizeof(keys) / sizeof(keys[0]);
    int code = dh_text_keys(s, n, keys, nkeys), found = 0;

    for (uint32_t k = 0; k < nkeys; k++) {
        REQUIRE(keys[k].found || keys[k].value == 0);
        found += keys[k].found;
    }
    REQUIRE(code == found || (code == DH_EPARSE && found == 0));

    /* The result does not depend on the other wanted keys. */
    for (uint32_t k = 0; code >= 0 && k < nkeys; k++) {
        struct dh_text_key alone = {.key = keys[k].key, .len = keys[k].len};

        REQUIRE(dh_text_keys(s, n, &alone, 1) == keys[k].found && alone.value == keys[k].value);
    }
}

static void fuzz_kib(const char *s, size_t n)
{
    uint64_t kib = 77, again;
    char text[64];

    if (dh_text_kib(s, n, "MemTotal", &kib) < 0) {
        REQUIRE(kib == 77);
        return;
    }
    snprintf(text, sizeof(text), "Node 0 MemTotal: %" PRIu64 " kB\n", kib);
    REQUIRE(dh_text_kib(text, strlen(text), "MemTotal", &again) == 0 && again == kib);
}

static void fuzz_numbered(const char *s, size_t n)
{
    uint32_t number = 77;
    char text[32];

    if (dh_text_numbered(s, n, "cpu", &number) < 0) {
        REQUIRE(number == 77);
        return;
    }
    snprintf(text, sizeof(text), "cpu%" PRIu32, number);
    REQUIRE(strlen(text) == n && memcmp(text, s, n) == 0);
}

static void fuzz_pressure(const char *s, size_t n)
{
    static const char *const format[] = {
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=%" PRIu64 "\n",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=%" PRIu64 "\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=%" PRIu64 "\n",
    };
    uint64_t us[2] = {77, 77}, again[2];
    char text[160];
    int lines = dh_text_pressure(s, n, us);

    if (lines < 0) {
        REQUIRE(us[0] == 77 && us[1] == 77);
        return;
    }
    REQUIRE(lines == 2 || (lines == 1 && us[1] == 0));
    snprintf(text, sizeof(text), format[lines - 1], us[0], us[1]);
    REQUIRE(dh_text_pressure(text, strlen(text), again) == lines && memcmp(us, again, sizeof(us)) == 0);
}

static void fuzz_hugepages(const char *s, size_t n)
{
    uint64_t kib = 77, again;
    char text[48];

    if (dh_text_hugepage_dir(s, n, &kib) < 0) {
        REQUIRE(kib == 77);
        return;
    }
    snprintf(text, sizeof(text), "hugepages-%" PRIu64 "kB", kib);
    REQUIRE(dh_text_hugepage_dir(text, strlen(text), &again) == 0 && again == kib);
    REQUIRE(dh_text_hugetlb(kib, text, 32) == (int)strlen(text));
    REQUIRE(dh_text_hugetlb(kib, text, strlen(text)) == -ENOSPC);
}

/* An id consists of letters, digits and dashes, padded with NUL to the end of its field. */
static void check_name(const char *name, size_t cap, size_t longest)
{
    size_t len = strspn(name, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-");

    REQUIRE(len >= 1 && len <= longest);
    for (; len < cap; len++)
        REQUIRE(name[len] == '\0');
}

static void fuzz_names(const char *s, size_t n)
{
    char uid[DH_UID_LEN + 4], id[DH_NAME_LEN], again[DH_NAME_LEN];

    memset(uid, '#', sizeof(uid));
    if (dh_text_pod(s, n, uid) < 0) {
        REQUIRE(uid[0] == '#' && uid[DH_UID_LEN - 1] == '#');
    } else {
        char name[DH_UID_LEN + 3] = "pod";

        check_name(uid, DH_UID_LEN, DH_UID_LEN - 1);
        memcpy(name + 3, uid, DH_UID_LEN);
        REQUIRE(dh_text_pod(name, strlen(name), again) == 0 && strcmp(again, uid) == 0);
    }
    REQUIRE(uid[DH_UID_LEN] == '#');

    memset(id, '#', sizeof(id));
    if (dh_text_container(s, n, id) < 0) {
        REQUIRE(id[0] == '#' && id[DH_NAME_LEN - 1] == '#');
        return;
    }
    check_name(id, DH_NAME_LEN, 64);
    REQUIRE(strlen(id) >= 12);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *s = (const char *)data;

    fuzz_u64(s, size);
    fuzz_quota(s, size);
    fuzz_cpu_max(s, size);
    fuzz_cpus(s, size);
    fuzz_keys(s, size);
    fuzz_pressure(s, size);
    fuzz_kib(s, size);
    fuzz_numbered(s, size);
    fuzz_hugepages(s, size);
    fuzz_names(s, size);
    return 0;
}

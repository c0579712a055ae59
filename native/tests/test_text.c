/*
 * test_text.c - tests of the text parsers: real texts of kernels and runtimes, limits, and junk.
 *
 * Every text is parsed from a block of exactly its length, so a read behind the end is a crash.
 */
#include "check.h"

#include <errno.h>

#include "core/text.h"

#define ROWS(table) (sizeof(table) / sizeof((table)[0]))
#define TEXT(literal) (literal), sizeof(literal) - 1
#define HEX63 "f4a9c0d7be1825566aa77bb88cc99dd00ee11ff22003344556677889900aabb"
#define HEX64 "3" HEX63

static void test_u64_is_parsed_or_refused(void)
{
    static const struct {
        const char *text;
        size_t n;
        int code;
        uint64_t value;
    } rows[] = {
        {TEXT("0\n"), 0, 0},
        {TEXT("512\n"), 0, 512},
        {TEXT("512"), 0, 512},
        {TEXT("9223372036854771712\n"), 0, 9223372036854771712u}, /* memory.limit_in_bytes, 6.18 */
        {TEXT("18446744073709551615\n"), 0, UINT64_MAX},
        {TEXT("00000000000000000000000007"), 0, 7},
        {TEXT("max\n"), 0, UINT64_MAX},
        {TEXT("max"), 0, UINT64_MAX},
        {TEXT(""), DH_EPARSE, 0},
        {TEXT("\n"), DH_EPARSE, 0},
        {TEXT("1\n\n"), DH_EPARSE, 0},
        {TEXT("1\n2\n"), DH_EPARSE, 0},
        {TEXT("18446744073709551616\n"), DH_EPARSE, 0}, /* 2^64 */
        {TEXT("99999999999999999999\n"), DH_EPARSE, 0},
        {TEXT("-1\n"), DH_EPARSE, 0},
        {TEXT("+1\n"), DH_EPARSE, 0},
        {TEXT(" 1\n"), DH_EPARSE, 0},
        {TEXT("1 \n"), DH_EPARSE, 0},
        {TEXT("0x10\n"), DH_EPARSE, 0},
        {TEXT("1\0\n"), DH_EPARSE, 0},
        {TEXT("\0"), DH_EPARSE, 0},
        {TEXT("ma\n"), DH_EPARSE, 0},
        {TEXT("maximum\n"), DH_EPARSE, 0},
        {TEXT("Max\n"), DH_EPARSE, 0},
        {TEXT("/0"), DH_EPARSE, 0},
        {TEXT(":0"), DH_EPARSE, 0},
        {TEXT("\xff\xfe"), DH_EPARSE, 0},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *text = check_copy(rows[i].text, rows[i].n);
        uint64_t value = 77;

        check_row = rows[i].text;
        CHECK_INT(dh_text_u64(text, rows[i].n, &value), rows[i].code);
        CHECK_U64(value, rows[i].code ? 77 : rows[i].value);
        free(text);
    }
    check_row = "";
}

static void test_limit_of_whole_pages_is_no_limit(void)
{
    const uint64_t top = UINT64_C(1) << 63, gib = UINT64_C(1) << 30;

    CHECK_U64(dh_text_limit(0), 0);
    CHECK_U64(dh_text_limit(268435456), 268435456);
    CHECK_U64(dh_text_limit(UINT64_MAX), UINT64_MAX);
    CHECK_U64(dh_text_limit(9223372036854771712u), UINT64_MAX); /* 4 KiB pages; a new hugetlb group */
    CHECK_U64(dh_text_limit(top - 65536), UINT64_MAX);          /* 64 KiB pages */
    CHECK_U64(dh_text_limit(top - 2 * 1024 * 1024), UINT64_MAX); /* hugetlb.2MB.limit_in_bytes */
    CHECK_U64(dh_text_limit(top - gib), UINT64_MAX);
    CHECK_U64(dh_text_limit(top - 16 * gib), UINT64_MAX);
    CHECK_U64(dh_text_limit(top - 16 * gib - 1), top - 16 * gib - 1);
}

static void test_quota_is_parsed_or_refused(void)
{
    static const struct {
        const char *text;
        size_t n;
        int code;
        uint64_t us;
    } rows[] = {
        {TEXT("-1\n"), 0, UINT64_MAX},      {TEXT("-1"), 0, UINT64_MAX},
        {TEXT("150000\n"), 0, 150000},      {TEXT("18446744073709551615\n"), 0, UINT64_MAX},
        {TEXT(""), DH_EPARSE, 0},           {TEXT("\n"), DH_EPARSE, 0},
        {TEXT("-"), DH_EPARSE, 0},          {TEXT("-2\n"), DH_EPARSE, 0},
        {TEXT("-10\n"), DH_EPARSE, 0},      {TEXT("-1\n\n"), DH_EPARSE, 0},
        {TEXT("max\n"), DH_EPARSE, 0},      {TEXT("1 \n"), DH_EPARSE, 0},
        {TEXT("18446744073709551616\n"), DH_EPARSE, 0},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *text = check_copy(rows[i].text, rows[i].n);
        uint64_t us = 77;

        check_row = rows[i].text;
        CHECK_INT(dh_text_quota(text, rows[i].n, &us), rows[i].code);
        CHECK_U64(us, rows[i].code ? 77 : rows[i].us);
        free(text);
    }
    check_row = "";
}

static void test_cpu_max_is_parsed_or_refused(void)
{
    static const struct {
        const char *text;
        size_t n;
        int code;
        uint64_t quota, period;
    } rows[] = {
        {TEXT("max 100000\n"), 0, UINT64_MAX, 100000}, {TEXT("150000 100000\n"), 0, 150000, 100000},
        {TEXT("0 0\n"), 0, 0, 0},                      {TEXT("max 100000"), DH_EPARSE, 0, 0},
        {TEXT("150000 1000"), DH_EPARSE, 0, 0},        {TEXT("150000 \n"), DH_EPARSE, 0, 0},
        {TEXT("150000\n"), DH_EPARSE, 0, 0},           {TEXT(" 100000\n"), DH_EPARSE, 0, 0},
        {TEXT(""), DH_EPARSE, 0, 0},                   {TEXT("max"), DH_EPARSE, 0, 0},
        {TEXT("max \n"), DH_EPARSE, 0, 0},             {TEXT("maxx 1\n"), DH_EPARSE, 0, 0},
        {TEXT("max max\n"), DH_EPARSE, 0, 0},          {TEXT("max  1\n"), DH_EPARSE, 0, 0},
        {TEXT("-1 100000\n"), DH_EPARSE, 0, 0},        {TEXT("1 2 3\n"), DH_EPARSE, 0, 0},
        {TEXT("1 2\n\n"), DH_EPARSE, 0, 0},            {TEXT("1\n2\n"), DH_EPARSE, 0, 0},
        {TEXT("1 18446744073709551616\n"), DH_EPARSE, 0, 0},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *text = check_copy(rows[i].text, rows[i].n);
        uint64_t quota = 77, period = 77;

        check_row = rows[i].text;
        CHECK_INT(dh_text_cpu_max(text, rows[i].n, &quota, &period), rows[i].code);
        CHECK_U64(quota, rows[i].code ? 77 : rows[i].quota);
        CHECK_U64(period, rows[i].code ? 77 : rows[i].period);
        free(text);
    }
    check_row = "";
}

static void test_cpu_list_is_parsed_or_refused(void)
{
    static const struct {
        const char *text;
        size_t n;
        uint64_t count; /* CPUs in the set; members of `words` that are not given are 0 */
        uint64_t words[3];
        uint64_t last; /* word 127 */
    } good[] = {
        {TEXT(""), 0, {0}, 0},
        {TEXT("\n"), 0, {0}, 0},
        {TEXT("0\n"), 1, {1}, 0},
        {TEXT("0-1\n"), 2, {3}, 0},
        {TEXT("0-3,8"), 5, {0x10f}, 0},
        {TEXT("0,2,4,6\n"), 4, {0x55}, 0},
        {TEXT("5-5\n"), 1, {0x20}, 0},
        {TEXT("0-1,2-3\n"), 4, {0xf}, 0},
        {TEXT("63-64\n"), 2, {UINT64_C(1) << 63, 1}, 0},
        {TEXT("0-63\n"), 64, {UINT64_MAX}, 0},
        {TEXT("1-190\n"), 190, {~UINT64_C(1), UINT64_MAX, UINT64_MAX >> 1}, 0},
        {TEXT("2-15,8191\n"), 15, {0xfffc}, UINT64_C(1) << 63},
    };
    static const struct {
        const char *text;
        size_t n;
    } bad[] = {
        {TEXT(",")}, {TEXT(",\n")}, {TEXT("0,\n")}, {TEXT("0,,1\n")}, {TEXT(",1\n")}, {TEXT("-1\n")},
        {TEXT("0-\n")}, {TEXT("0--1\n")}, {TEXT("3-1\n")}, {TEXT("4,2\n")}, {TEXT("0-3,3\n")},
        {TEXT("1,1\n")}, {TEXT("0-3:1\n")}, {TEXT("0 1\n")}, {TEXT(" 0\n")}, {TEXT("0-1\n\n")},
        {TEXT("0x3\n")}, {TEXT("8192\n")}, {TEXT("0-8192\n")}, {TEXT("0-18446744073709551616\n")},
        {TEXT("18446744073709551615\n")}, {TEXT("0\0\n")}, {TEXT("ff\n")}, {TEXT("\xff")},
        {TEXT("0-3\n4\n")},
    };
    uint64_t words[DH_CPU_WORDS];

    for (size_t i = 0; i < ROWS(good); i++) {
        char *text = check_copy(good[i].text, good[i].n);
        uint64_t count = 0;

        check_row = good[i].text;
        memset(words, 0xa5, sizeof(words));
        CHECK_INT(dh_text_cpus(text, good[i].n, words), 0);
        for (size_t w = 0; w < DH_CPU_WORDS; w++)
            count += (uint64_t)__builtin_popcountll(words[w]);
        CHECK_U64(count, good[i].count);
        for (size_t w = 0; w < ROWS(good[i].words); w++)
            CHECK_U64(words[w], good[i].words[w]);
        CHECK_U64(words[DH_CPU_WORDS - 1], good[i].last);
        free(text);
    }
    check_row = "0-8191";
    CHECK_INT(dh_text_cpus(TEXT("0-8191\n"), words), 0);
    for (size_t w = 0; w < DH_CPU_WORDS; w++)
        CHECK_U64(words[w], UINT64_MAX);

    for (size_t i = 0; i < ROWS(bad); i++) {
        char *text = check_copy(bad[i].text, bad[i].n);
        size_t touched = 0;

        check_row = bad[i].text;
        memset(words, 0xa5, sizeof(words));
        CHECK_INT(dh_text_cpus(text, bad[i].n, words), DH_EPARSE);
        for (size_t w = 0; w < DH_CPU_WORDS; w++)
            touched += words[w] != UINT64_C(0xa5a5a5a5a5a5a5a5);
        CHECK_U64(touched, 0);
        free(text);
    }
    check_row = "";
}

static const char cpu_stat_v1[] = "nr_periods 21\nnr_throttled 20\nthrottled_time 1240000000\n";
static const char cpu_stat_v2[] = "usage_usec 61617986\nuser_usec 38811121\nsystem_usec 22806864\n"
                                  "nice_usec 0\n"
                                  "core_sched.force_idle_usec 0\nnr_periods 33\nnr_throttled 32\n"
                                  "throttled_usec 2571000\nnr_bursts 0\nburst_usec 0\n";
static const char cgroup_events[] = "populated 1\nfrozen 0\n";
static const char memory_events[] = "low 0\nhigh 7\nmax 131\noom 2\noom_kill 1\noom_group_kill 0\n";
static const char hugetlb_events[] = "max 3\n";
static const char oom_control[] = "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n";

#define KEY(name) {.key = (name), .len = sizeof(name) - 1, .value = 99, .found = 9}
#define KEYS_MAX 4

struct key_row {
    const char *text;
    size_t n;
    int code;
    struct dh_text_key keys[KEYS_MAX];
    uint64_t want[KEYS_MAX];
    int found[KEYS_MAX];
};

static void check_keys(const struct key_row *row)
{
    char *text = check_copy(row->text, row->n);
    struct dh_text_key keys[KEYS_MAX];
    uint32_t nkeys = 0;

    while (nkeys < KEYS_MAX && row->keys[nkeys].key)
        nkeys++;
    memcpy(keys, row->keys, sizeof(keys));
    check_row = row->text;
    CHECK_INT(dh_text_keys(text, row->n, keys, nkeys), row->code);
    for (uint32_t k = 0; k < nkeys; k++) {
        CHECK_U64(keys[k].value, row->want[k]);
        CHECK_INT(keys[k].found, row->found[k]);
    }
    check_row = "";
    free(text);
}

static void test_values_of_keys_are_found(void)
{
    static const struct key_row rows[] = {
        {TEXT(cpu_stat_v1), 3, {KEY("nr_periods"), KEY("nr_throttled"), KEY("throttled_time")},
         {21, 20, 1240000000}, {1, 1, 1}},
        {TEXT(cpu_stat_v2), 3, {KEY("nr_periods"), KEY("nr_throttled"), KEY("throttled_usec")},
         {33, 32, 2571000}, {1, 1, 1}},
        {TEXT(cpu_stat_v2), 3, {KEY("throttled_usec"), KEY("nr_periods"), KEY("usage_usec")}, /* any order */
         {2571000, 33, 61617986}, {1, 1, 1}},
        {TEXT(cpu_stat_v2), 1, {KEY("throttled_time"), KEY("burst_usec")}, {0, 0}, {0, 1}},
        {TEXT(cgroup_events), 2, {KEY("populated"), KEY("frozen")}, {1, 0}, {1, 1}},
        {TEXT(memory_events), 4, {KEY("high"), KEY("max"), KEY("oom"), KEY("oom_kill")},
         {7, 131, 2, 1}, {1, 1, 1, 1}},
        {TEXT(memory_events), 1, {KEY("oom_kill")}, {1}, {1}}, /* not its prefix "oom" */
        {TEXT(hugetlb_events), 1, {KEY("max")}, {3}, {1}},
        {TEXT(oom_control), 1, {KEY("oom_kill")}, {4}, {1}},
        {TEXT(""), 0, {KEY("max")}, {0}, {0}},
        {TEXT("max 3\n"), 0, {{0}}, {0}, {0}}, /* no wanted key */
        {TEXT("max 18446744073709551615\n"), 1, {KEY("max")}, {UINT64_MAX}, {1}},
        {TEXT("max 1\nmax 2\n"), 1, {KEY("max"), KEY("none")}, {1, 0}, {1, 0}}, /* the first counts */
        {TEXT("a b c\nmax 1\n"), 1, {KEY("max")}, {1}, {1}}, /* of other keys any value is accepted */
        {TEXT("max 1\n\0\xff no line"), 1, {KEY("max")}, {1}, {1}}, /* not read any more */

        {TEXT("max 3"), DH_EPARSE, {KEY("max")}, {0}, {0}}, /* cut: could be 31 */
        {TEXT("max "), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max \n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max  3\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max 3 \n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max -3\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max 3\0\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("max 18446744073709551616\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("low 1\nmax x\n"), DH_EPARSE, {KEY("low"), KEY("max")}, {0, 0}, {0, 0}}, /* nothing is kept */
        {TEXT("\nmax 3\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT(" 3\nmax 3\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("word\nmax 3\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("other \nmax 3\n"), DH_EPARSE, {KEY("max")}, {0}, {0}},
        {TEXT("other 3"), DH_EPARSE, {KEY("max")}, {0}, {0}},
    };

    for (size_t i = 0; i < ROWS(rows); i++)
        check_keys(&rows[i]);
}

#define SOME "some avg10=0.61 avg60=0.96 avg300=0.91 total=1589741918\n"
#define FULL "full avg10=0.00 avg60=0.00 avg300=0.00 total=42\n"

static void test_digest_differs_for_each_change_of_a_byte(void)
{
    static const char text[] = "nr_periods 30\nnr_throttled 3\nthrottled_usec 500\n";
    uint64_t digests[sizeof(text)];

    for (size_t n = 0; n < sizeof(text); n++) { /* every length has its own */
        char *copy = check_copy(text, n);

        digests[n] = dh_text_digest(copy, n);
        CHECK(digests[n] != 0 && digests[n] == dh_text_digest(text, n));
        for (size_t i = 0; i < n; i++) {
            CHECK(digests[i] != digests[n]);
            copy[i] ^= 1;
            CHECK(dh_text_digest(copy, n) != digests[n]);
            copy[i] ^= 1;
        }
        free(copy);
    }
    CHECK(dh_text_digest("\0\0", 2) != dh_text_digest("\0", 1));
}

static void test_pressure_is_parsed_or_refused(void)
{
    static const struct {
        const char *text;
        size_t n;
        int code;
        uint64_t some, full;
    } rows[] = {
        {TEXT(SOME FULL), 2, 1589741918, 42},
        {TEXT(SOME), 1, 1589741918, 0}, /* cpu, before Linux 5.13 */
        {TEXT("some avg10=100.00 avg60=99.99 avg300=7.12 total=18446744073709551615\n"), 1, UINT64_MAX, 0},
        {TEXT("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n" FULL), 2, 0, 42},
        {TEXT(""), DH_EPARSE, 0, 0},
        {TEXT("\n"), DH_EPARSE, 0, 0},
        {TEXT(FULL), DH_EPARSE, 0, 0},
        {TEXT(FULL SOME), DH_EPARSE, 0, 0},
        {TEXT(SOME SOME), DH_EPARSE, 0, 0},
        {TEXT(SOME FULL FULL), DH_EPARSE, 0, 0},
        {TEXT(SOME "\n"), DH_EPARSE, 0, 0},
        {TEXT(SOME "full avg10=0.00 avg60=0.00 avg300=0.00 total=42"), DH_EPARSE, 0, 0}, /* cut */
        {TEXT("some avg10=0.00 avg60=0.00 avg300=0.00 total=\n"), DH_EPARSE, 0, 0},
        {TEXT("some avg10=0.00 avg60=0.00 avg300=0.00 total=1 \n"), DH_EPARSE, 0, 0},
        {TEXT("some avg10=0.00 avg60=0.00 avg300=0.00 total=-1\n"), DH_EPARSE, 0, 0},
        {TEXT("some avg10=0.00 avg60=0.00 avg300=0.00 stall=1\n"), DH_EPARSE, 0, 0},
        {TEXT("some avg10=0.00 avg60=0.00 avg300=0.00 total=18446744073709551616\n"), DH_EPARSE, 0, 0},
        {TEXT("some avg10= total=\n"), DH_EPARSE, 0, 0},
        {TEXT("some total=1\n"), DH_EPARSE, 0, 0},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *text = check_copy(rows[i].text, rows[i].n);
        uint64_t us[2] = {77, 77};

        check_row = rows[i].text;
        CHECK_INT(dh_text_pressure(text, rows[i].n, us), rows[i].code);
        CHECK_U64(us[0], rows[i].code < 0 ? 77 : rows[i].some);
        CHECK_U64(us[1], rows[i].code < 0 ? 77 : rows[i].full);
        free(text);
    }
    check_row = "";
}

static void test_kib_is_parsed_or_refused(void)
{
    static const struct {
        const char *text;
        size_t n;
        int code;
        uint64_t kib;
    } rows[] = {
        {TEXT("MemTotal:       32614536 kB\n"), 0, 32614536},
        {TEXT("Node 0 MemTotal:       32614536 kB\n"), 0, 32614536},
        {TEXT("Node 63 MemFree: 1 kB\nNode 63 MemTotal: 2 kB\nNode 63 MemTotal: 3 kB\n"), 0, 2},
        {TEXT("HugePages_Total:       0\nMemTotal:0 kB\n"), 0, 0},
        {TEXT("\n\nMemTotal: 18446744073709551615 kB\n"), 0, UINT64_MAX},
        {TEXT("MemTotal: 18446744073709551616 kB\n"), DH_EPARSE, 0},
        {TEXT("MemTotal: 32614536 kB"), DH_EPARSE, 0},
        {TEXT("MemTotal: 3261"), DH_EPARSE, 0},
        {TEXT("MemTotal: 3261\n"), DH_EPARSE, 0},
        {TEXT("MemTotal: 3261 KB\n"), DH_EPARSE, 0},
        {TEXT("MemTotal: 3261 kB \n"), DH_EPARSE, 0},
        {TEXT("MemTotal: -1 kB\n"), DH_EPARSE, 0},
        {TEXT("MemTotal:\n"), DH_EPARSE, 0},
        {TEXT("MemTotal\n"), -ENOENT, 0},
        {TEXT("MemTotals: 1 kB\n"), -ENOENT, 0},
        {TEXT("XMemTotal: 1 kB\n"), -ENOENT, 0},
        {TEXT("Node MemTotal: 1 kB\n"), -ENOENT, 0},
        {TEXT("Node 0MemTotal: 1 kB\n"), -ENOENT, 0},
        {TEXT("Node 0"), -ENOENT, 0},
        {TEXT("Node 99999999999999999999 MemTotal: 1 kB\n"), -ENOENT, 0},
        {TEXT(""), -ENOENT, 0},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *text = check_copy(rows[i].text, rows[i].n);
        uint64_t kib = 77;

        check_row = rows[i].text;
        CHECK_INT(dh_text_kib(text, rows[i].n, "MemTotal", &kib), rows[i].code);
        CHECK_U64(kib, rows[i].code ? 77 : rows[i].kib);
        free(text);
    }
    check_row = "";
}

static void test_numbered_name_is_parsed_or_refused(void)
{
    static const struct {
        const char *name;
        size_t n;
        int code;
        uint32_t number;
    } rows[] = {
        {TEXT("cpu0"), 0, 0},
        {TEXT("cpu8191"), 0, 8191},
        {TEXT("cpu4294967295"), 0, UINT32_MAX},
        {TEXT("cpu4294967296"), -ENOENT, 0},
        {TEXT("cpu18446744073709551616"), -ENOENT, 0},
        {TEXT("cpu00"), -ENOENT, 0},
        {TEXT("cpu012"), -ENOENT, 0},
        {TEXT("cpu"), -ENOENT, 0},
        {TEXT("cpu1\n"), -ENOENT, 0},
        {TEXT("cpu1\0"), -ENOENT, 0},
        {TEXT("cpu+1"), -ENOENT, 0},
        {TEXT("cpufreq"), -ENOENT, 0},
        {TEXT("xcpu1"), -ENOENT, 0},
        {TEXT("cp"), -ENOENT, 0},
        {TEXT(""), -ENOENT, 0},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *name = check_copy(rows[i].name, rows[i].n);
        uint32_t number = 77;

        check_row = rows[i].name;
        CHECK_INT(dh_text_numbered(name, rows[i].n, "cpu", &number), rows[i].code);
        CHECK_U64(number, rows[i].code ? 77 : rows[i].number);
        free(name);
    }
    check_row = "";
}

static void test_hugepage_directory_has_its_page_size(void)
{
    static const struct {
        const char *name;
        size_t n;
        uint64_t kib; /* 0: not such a name */
    } rows[] = {
        {TEXT("hugepages-2048kB"), 2048},
        {TEXT("hugepages-64kB"), 64},
        {TEXT("hugepages-1048576kB"), 1048576},
        {TEXT("hugepages-16777216kB"), 16777216},
        {TEXT("hugepages-18446744073709551615kB"), UINT64_MAX},
        {TEXT("hugepages-18446744073709551616kB"), 0},
        {TEXT("hugepages-0kB"), 0},
        {TEXT("hugepages-kB"), 0},
        {TEXT("hugepages-"), 0},
        {TEXT("hugepages-2048"), 0},
        {TEXT("hugepages-2048KB"), 0},
        {TEXT("hugepages-2048kB\0"), 0},
        {TEXT("hugepages-2048kB "), 0},
        {TEXT("hugepages--2048kB"), 0},
        {TEXT("hugepages-20 48kB"), 0},
        {TEXT("hugepages2048kB"), 0},
        {TEXT("kB"), 0},
        {TEXT("."), 0},
        {TEXT(""), 0},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *name = check_copy(rows[i].name, rows[i].n);
        uint64_t kib = 77;

        check_row = rows[i].name;
        CHECK_INT(dh_text_hugepage_dir(name, rows[i].n, &kib), rows[i].kib ? 0 : -ENOENT);
        CHECK_U64(kib, rows[i].kib ? rows[i].kib : 77);
        free(name);
    }
    check_row = "";
}

static void test_page_size_has_the_name_of_hugetlb_files(void)
{
    static const struct {
        uint64_t kib;
        const char *text;
    } rows[] = {
        {0, "0KB"},        {64, "64KB"},         {1023, "1023KB"}, {1024, "1MB"},
        {2048, "2MB"},     {16384, "16MB"},      {32768, "32MB"},  {524288, "512MB"},
        {1048575, "1023MB"}, {1048576, "1GB"},   {2097152, "2GB"}, {16777216, "16GB"},
        {UINT64_MAX, "17592186044415GB"},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        size_t len = strlen(rows[i].text);
        char out[32];
        char *tight = check_copy("##################", len + 1);
        char *short_by_one = check_copy("##################", len);

        check_row = rows[i].text;
        CHECK_INT(dh_text_hugetlb(rows[i].kib, out, sizeof(out)), (int64_t)len);
        CHECK_STR(out, rows[i].text);
        CHECK_INT(dh_text_hugetlb(rows[i].kib, tight, len + 1), (int64_t)len);
        CHECK_STR(tight, rows[i].text);
        CHECK_INT(dh_text_hugetlb(rows[i].kib, short_by_one, len), -ENOSPC);
        CHECK(short_by_one[0] == '#');
        CHECK_INT(dh_text_hugetlb(rows[i].kib, NULL, 0), -ENOSPC);
        free(tight);
        free(short_by_one);
    }
    check_row = "";
}

#define UID "3a6f1c9e-52d4-4b7a-9c11-0d5e8f7a2b46"
#define UID_ "3a6f1c9e_52d4_4b7a_9c11_0d5e8f7a2b46"
#define HASH "9f86d081884c7d659a2feaa0c55ad015"
#define A39 "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

struct name_row {
    const char *name;
    size_t n;
    const char *want; /* NULL: not such a name */
};

static void test_pod_is_recognized_by_its_cgroup_name(void)
{
    static const struct name_row rows[] = {
        {TEXT("pod" UID), UID},
        {TEXT("pod" HASH), HASH},
        {TEXT("kubepods-pod" UID_ ".slice"), UID},
        {TEXT("kubepods-burstable-pod" UID_ ".slice"), UID},
        {TEXT("kubepods-besteffort-pod" UID_ ".slice"), UID},
        {TEXT("kubepods-burstable-pod" HASH ".slice"), HASH},
        {TEXT("kubelet-kubepods-pod" UID_ ".slice"), UID},
        {TEXT("kubelet-kubepods-burstable-pod" UID_ ".slice"), UID},
        {TEXT("a-b-kubepods-besteffort-pod" UID_ ".slice"), UID},
        {TEXT("pod1"), "1"},
        {TEXT("podA-z"), "A-z"},
        {TEXT("pod" A39), A39},
        {TEXT("pod" A39 "a"), NULL},
        {TEXT("kubepods-pod" A39 ".slice"), A39},
        {TEXT("kubepods-pod" A39 "a.slice"), NULL},
        {TEXT(""), NULL},
        {TEXT("pod"), NULL},
        {TEXT("kubepods"), NULL},
        {TEXT("burstable"), NULL},
        {TEXT("kubepods.slice"), NULL},
        {TEXT("kubepods-burstable.slice"), NULL},
        {TEXT("kubepods-pod.slice"), NULL},
        {TEXT("-pod" UID_ ".slice"), NULL},
        {TEXT("pod" UID_ ".slice"), NULL},
        {TEXT(".slice"), NULL},
        {TEXT("-.slice"), NULL},
        {TEXT("kubepods-guaranteed-pod" UID_ ".slice"), NULL},
        {TEXT("xkubepods-pod" UID_ ".slice"), NULL},
        {TEXT("burstable-pod" UID_ ".slice"), NULL},
        {TEXT("machine-pod" UID_ ".slice"), NULL},
        {TEXT("kubepods-pod" UID ".slice"), NULL}, /* systemd would have nested these */
        {TEXT("kubepods-pod" UID_), NULL},
        {TEXT("pod" UID_), NULL},
        {TEXT("pod" UID ".slice"), NULL},
        {TEXT("pod" UID ".scope"), NULL},
        {TEXT("pod" UID "\n"), NULL},
        {TEXT("pod1\0"), NULL},
        {TEXT("pod\xc3\xa4"), NULL},
        {TEXT("pod/1"), NULL},
        {TEXT("Pod1"), NULL},
        {TEXT("user.slice"), NULL},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *name = check_copy(rows[i].name, rows[i].n);
        char uid[DH_UID_LEN];
        size_t len = rows[i].want ? strlen(rows[i].want) : 0, padding = 0;

        check_row = rows[i].name;
        memset(uid, '#', sizeof(uid));
        CHECK_INT(dh_text_pod(name, rows[i].n, uid), rows[i].want ? 0 : -ENOENT);
        CHECK(memcmp(uid, rows[i].want ? rows[i].want : "", len) == 0);
        while (len + padding < sizeof(uid) && uid[len + padding] == (rows[i].want ? '\0' : '#'))
            padding++;
        CHECK_U64(len + padding, DH_UID_LEN);
        free(name);
    }
    check_row = "";
}

static void test_container_is_recognized_by_its_cgroup_name(void)
{
    static const struct name_row rows[] = {
        {TEXT(HEX64), HEX64},
        {TEXT("crio-" HEX64), HEX64}, /* CRI-O on cgroupfs */
        {TEXT("cri-containerd-" HEX64 ".scope"), HEX64},
        {TEXT("crio-" HEX64 ".scope"), HEX64},
        {TEXT("docker-" HEX64 ".scope"), HEX64},
        {TEXT("libpod-" HEX64 ".scope"), HEX64},
        {TEXT("a-runtime-of-tomorrow-" HEX64 ".scope"), HEX64},
        {TEXT("0123456789ab"), "0123456789ab"},
        {TEXT("web-container-1"), "web-container-1"},
        {TEXT("crio-0123456789ab.scope"), "0123456789ab"},
        {TEXT("docker-0123456789ab.scope"), "0123456789ab"},
        {TEXT("cri-containerd-Web-Container-1.scope"), "Web-Container-1"},
        {TEXT(HEX64 "a"), NULL},
        {TEXT("0123456789a"), NULL},
        {TEXT("crio-0123456789a.scope"), NULL},
        {TEXT("crio-" HEX64 "a.scope"), NULL},
        {TEXT("tomorrow-0123456789ab.scope"), NULL},
        {TEXT("tomorrow-" HEX64 "a.scope"), NULL},
        {TEXT("tomorrow-g" HEX63 ".scope"), NULL},
        {TEXT("tomorrow-/" HEX63 ".scope"), NULL},
        {TEXT("tomorrow-A" HEX63 ".scope"), NULL},
        {TEXT(HEX64 ".scope"), NULL},
        {TEXT("-" HEX64 ".scope"), NULL},
        {TEXT("-" HEX64), NULL},
        {TEXT("crio-.scope"), NULL},
        {TEXT(".scope"), NULL},
        {TEXT("init.scope"), NULL},
        {TEXT("crio-conmon-" HEX64 ".scope"), NULL},
        {TEXT("crio-conmon-" HEX64), NULL},
        {TEXT("crio-conmon-0123456789ab.scope"), NULL},
        {TEXT("libpod-conmon-" HEX64 ".scope"), NULL},
        {TEXT("kubepods-pod" UID_ ".slice"), NULL},
        {TEXT("cri-containerd-" HEX64 ".service"), NULL},
        {TEXT("var-lib-containers.mount"), NULL},
        {TEXT("cgroup.procs"), NULL},
        {TEXT("memory.events.local"), NULL},
        {TEXT("hugetlb.2MB.rsvd.current"), NULL},
        {TEXT("tasks"), NULL},
        {TEXT("notify_on_release"), NULL},
        {TEXT("release_agent"), NULL},
        {TEXT("container"), NULL}, /* crun's sub-cgroup */
        {TEXT(""), NULL},
        {TEXT("0123456789ab\n"), NULL},
        {TEXT("0123456789ab\0"), NULL},
        {TEXT("crio-0123456789\xff.scope"), NULL},
        {TEXT("0123456789/ab"), NULL},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        char *name = check_copy(rows[i].name, rows[i].n);
        char id[DH_NAME_LEN];
        size_t len = rows[i].want ? strlen(rows[i].want) : 0, padding = 0;

        check_row = rows[i].name;
        memset(id, '#', sizeof(id));
        CHECK_INT(dh_text_container(name, rows[i].n, id), rows[i].want ? 0 : -ENOENT);
        CHECK(memcmp(id, rows[i].want ? rows[i].want : "", len) == 0);
        while (len + padding < sizeof(id) && id[len + padding] == (rows[i].want ? '\0' : '#'))
            padding++;
        CHECK_U64(len + padding, DH_NAME_LEN);
        free(name);
    }
    check_row = "";
}

/* Each parser gets each prefix of a text: it returns a result or an error, and reads no byte behind the end. */
static void test_parsers_never_read_behind_a_prefix(void)
{
    static const struct {
        const char *text;
        size_t n;
    } rows[] = {
        {TEXT(cpu_stat_v2)},
        {TEXT(memory_events)},
        {TEXT("0-3,8,100-2000\n")},
        {TEXT("18446744073709551615\n")},
        {TEXT(SOME FULL)},
        {TEXT("Node 0 MemFree: 1 kB\nNode 0 MemTotal:       32614536 kB\n")},
        {TEXT("cpu4294967295")},
        {TEXT("hugepages-1048576kB")},
        {TEXT("kubelet-kubepods-besteffort-pod" UID_ ".slice")},
        {TEXT("cri-containerd-" HEX64 ".scope")},
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        for (size_t n = 0; n <= rows[i].n; n++) {
            char *text = check_copy(rows[i].text, n);
            struct dh_text_key key = KEY("burst_usec");
            uint64_t value, us[2], words[DH_CPU_WORDS];
            uint32_t number;
            char uid[DH_UID_LEN], id[DH_NAME_LEN];
            int code;

            code = dh_text_u64(text, n, &value);
            CHECK(code == 0 || code == DH_EPARSE);
            code = dh_text_cpus(text, n, words);
            CHECK(code == 0 || code == DH_EPARSE);
            code = dh_text_keys(text, n, &key, 1);
            CHECK(code == key.found || code == DH_EPARSE);
            code = dh_text_pressure(text, n, us);
            CHECK(code == 1 || code == 2 || code == DH_EPARSE);
            code = dh_text_kib(text, n, "MemTotal", &value);
            CHECK(code == 0 || code == -ENOENT || code == DH_EPARSE);
            code = dh_text_numbered(text, n, "cpu", &number);
            CHECK(code == 0 || code == -ENOENT);
            code = dh_text_hugepage_dir(text, n, &value);
            CHECK(code == 0 || code == -ENOENT);
            code = dh_text_pod(text, n, uid);
            CHECK(code == 0 || code == -ENOENT);
            code = dh_text_container(text, n, id);
            CHECK(code == 0 || code == -ENOENT);
            free(text);
        }
    }
}

int main(void)
{
    test_u64_is_parsed_or_refused();
    test_limit_of_whole_pages_is_no_limit();
    test_quota_is_parsed_or_refused();
    test_cpu_max_is_parsed_or_refused();
    test_cpu_list_is_parsed_or_refused();
    test_values_of_keys_are_found();
    test_digest_differs_for_each_change_of_a_byte();
    test_pressure_is_parsed_or_refused();
    test_kib_is_parsed_or_refused();
    test_numbered_name_is_parsed_or_refused();
    test_hugepage_directory_has_its_page_size();
    test_page_size_has_the_name_of_hugetlb_files();
    test_pod_is_recognized_by_its_cgroup_name();
    test_container_is_recognized_by_its_cgroup_name();
    test_parsers_never_read_behind_a_prefix();
    return check_done("test_text");
}

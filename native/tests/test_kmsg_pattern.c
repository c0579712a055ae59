/* Tests of the kernel log's patterns: the lines that they match, and the keys of the lines. */
#include <errno.h>

#include "check.h"
#include "kmsg/kmsg.h"

#define XID "NVRM: Xid (PCI:%b): %d, %*"

/*
 * @key: as written by dh_pattern_match(), NULL if the line does not match.
 */
static const struct {
    const char *pattern, *text, *key;
} rows[] = {
    /* literals, at the beginning only */
    { "oom", "oom", "" },
    { "oom", "oom-kill: constraint", "" },
    { "oom", " oom", NULL },
    { "oom", "oo", NULL },
    { "oom", "", NULL },
    /* %b */
    { "%b", "0000:3b:00", "0000:3b:00\n" },
    { "%b", "0000:3B:00.0", "0000:3B:00.0\n" },
    { "%b", "00000018:01:00.0 rest", "00000018:01:00.0\n" },
    { "%b", "10000:e1:00.0", "10000:e1:00.0\n" },
    { "%b.", "0000:3b:00.", "0000:3b:00\n" }, /* a full stop begins no PCI function */
    { "%b", "0000:3b:00.8", "0000:3b:00\n" },
    { "%b", "3b:00.0", NULL },
    { "%b", "000:3b:00", NULL },
    { "%b", "000000000:3b:00", NULL },
    { "%b", "0000:3b:0", NULL },
    { "%b", "0000:3b", NULL },
    { "%b", "0000-3b-00", NULL },
    { "%b", "0000:3b:0g", NULL },
    /* %d, %x */
    { "%d", "079x", "079\n" },
    { "%d", "-1", NULL },
    { "%d", "123456789012345678901234567890", "123456789012345678901234567890\n" },
    { "%d0", "10", NULL }, /* no backtracking */
    { "%x", "0x1fG", "0x1f\n" },
    { "%x", "0x", NULL },
    { "%x", "1f", NULL },
    { "%x", "0X1f", NULL },
    /* %w */
    { "%w %w", "RLW_SRC Nonfatal,", "RLW_SRC\nNonfatal\n" },
    { "%w(", "name(", "name\n" },
    { "%w)", "it)", "it\n" },
    { "%w", "\tx", NULL },
    { "%w", ",", NULL },
    { "%w:", "switch3:", NULL }, /* the colon belongs to the word */
    /* %k */
    { "154, %k", "154, GPU recovery action changed", "GPU recovery action changed\n" },
    { "154, %k", "154, ", "\n" },
    { "%d%k", "1", "1\n\n" },
    /* %* */
    { "%*", "", "" },
    { "a%*", "a", "" },
    { "%*link %d", "x link 4", "4\n" },
    { "%*link %d", "link x link 4", NULL }, /* the first link counts */
    { "%*link", "lin", NULL },
    { "%d, %*, Link %d", "20034, Fatal, Link 30", "20034\n30\n" },
    { "%*x%*x%d", "axbx9", "9\n" },
    /* real lines */
    { XID, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen", "0000:3b:00\n79\n" },
    { XID, "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU", "0000:3b:00\n79\n" },
    { XID, "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 79, pid=1", NULL },
    { XID, "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed!", NULL },
    { "%d%d", "123", NULL },
    { "%d,%d", "1,23", "1\n23\n" },
    { "%d,%d", "12,3", "12\n3\n" },
};

static void test_pattern_matches_expected_lines(void)
{
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        size_t n = strlen(rows[i].text);
        char *text = check_copy(rows[i].text, n), name[64];
        char key[65] = "";
        int64_t len;

        snprintf(name, sizeof(name), "row %zu, %.40s", i, rows[i].pattern);
        check_row = name;
        CHECK_INT(dh_pattern_check(rows[i].pattern), 0);
        len = dh_pattern_match(rows[i].pattern, text, n, key, sizeof(key) - 1);
        CHECK_INT(len, rows[i].key ? (int64_t)strlen(rows[i].key) : -ENOENT);
        if (len >= 0 && rows[i].key) {
            key[len] = '\0';
            CHECK_STR(key, rows[i].key);
        }
        free(text);
    }
    check_row = "";
}

static void test_key_too_long_is_cut(void)
{
    for (size_t cap = 0; cap <= 6; cap++) {
        char *key = malloc(cap + 1); /* one more byte, to check that it is not written */

        key[cap] = '#';
        CHECK_INT(dh_pattern_match("%d,%d", "12,3", 4, key, cap), (int64_t)(cap < 5 ? cap : 5));
        CHECK(!memcmp(key, "12\n3\n", cap < 5 ? cap : 5));
        CHECK(key[cap] == '#');
        free(key);
    }
}

static void test_invalid_pattern_is_reported_with_its_position(void)
{
    CHECK_INT(dh_pattern_check(""), 1);
    CHECK_INT(dh_pattern_check("%"), 1);
    CHECK_INT(dh_pattern_check("ab%"), 3);
    CHECK_INT(dh_pattern_check("ab%q"), 3);
    CHECK_INT(dh_pattern_check("%d%%"), 3);
    CHECK_INT(dh_pattern_check("%k"), 0);
    CHECK_INT(dh_pattern_check("%k "), 3); /* nothing may follow the rest */
    CHECK_INT(dh_pattern_check("%*"), 0);
    CHECK_INT(dh_pattern_check("%*%d"), 3); /* %* needs a literal or the end behind it */
}

int main(void)
{
    test_pattern_matches_expected_lines();
    test_key_too_long_is_cut();
    test_invalid_pattern_is_reported_with_its_position();
    return check_done("test_kmsg_pattern");
}

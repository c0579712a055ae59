/*
 * Tests of the kernel log reader with a file of records, on the caller's thread: its entries, and its wakes.
 */
#include <sys/eventfd.h>

#include "check.h"
#include "fixture.h"
#include "kmsg/kmsg.h"

#define LOG "kmsg"
#define XID "NVRM: Xid (PCI:%b): %d, %*"

static const char patterns[] = XID "\0lost %w%*\0note %*"; /* and the NUL of the literal */

struct log {
    struct dh_kmsg *k;
    int wake_fd;
    uint64_t run_ns; /* start of the last run */
    struct dh_log *head;
    const struct dh_log_line *line;
};

static struct dh_kmsg_options options(void)
{
    return (struct dh_kmsg_options){ .size = sizeof(struct dh_kmsg_options), .version = DH_VERSION };
}

static int open_as(struct log *g, const struct dh_kmsg_options *o, const char *text, size_t len)
{
    char path[FX_PATH];

    snprintf(path, sizeof(path), "%s/%s", fx_root, LOG);
    g->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return dh_kmsg_open(o, path, text, len, g->wake_fd, &g->k);
}

/* Run once, even if the reader pauses, and copy. */
static void run_once(struct log *g)
{
    g->k->paused_until_ns = 0;
    g->run_ns = dh_now_ns();
    dh_kmsg_run_once(g->k);
    CHECK(dh_kmsg_read(g->k, g->head, dh_kmsg_size(g->k)) >= (int64_t)sizeof(*g->head));
}

static struct log opened(const char *text)
{
    struct dh_kmsg_options o = options();
    struct log g = { 0 };

    fx_write(text, LOG);
    fx_must(!open_as(&g, &o, patterns, sizeof(patterns)), "dh_kmsg_open");
    g.head = aligned_alloc(8, dh_kmsg_size(g.k));
    g.line = (const struct dh_log_line *)(const void *)(g.head + 1);
    return g;
}

static struct log reading(const char *text)
{
    struct log g = opened(text);

    run_once(&g);
    return g;
}

static void closed(struct log *g)
{
    CHECK_INT(dh_kmsg_stop(g->k, 0), 0);
    close(g->wake_fd);
    free(g->head);
    fx_remove(LOG);
}

FX_PRINTF(1) static void append_lines(const char *format, ...)
{
    char path[FX_PATH], text[16384];
    va_list args;
    int fd, n;

    va_start(args, format);
    n = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    snprintf(path, sizeof(path), "%s/%s", fx_root, LOG);
    fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    fx_must(n < (int)sizeof(text) && write(fd, text, (size_t)n) == n, path);
    close(fd);
}

/*
 * Return the wakes since the last call; dh_log.wakes has the sum.
 */
static uint64_t wakes(struct log *g)
{
    uint64_t n;

    return read(g->wake_fd, &n, sizeof(n)) == sizeof(n) ? n : 0;
}

static void test_lines_with_one_key_share_an_entry(void)
{
    struct log g = reading("4,0,100,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=a, Ch 8\n"
                           "4,1,200,-,caller=T1;NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=b, Ch 9\n"
                           " SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"
                           "4,2,300,-;NVRM: Xid (PCI:0000:86:00): 31, pid=7, name=a, Ch 8\n"
                           "6,3,400,-;nothing that any pattern matches\n"
                           "4,4,500,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=7\n");

    CHECK_U64(g.head->entries, 3);
    CHECK_U64(g.head->lines, 5);
    CHECK_U64(g.head->matched, 4);
    CHECK_U64(g.head->lost + g.head->evicted + g.head->failures, 0);
    CHECK_U64(g.line[0].count, 2);
    CHECK_U64(g.line[0].first_us, 100);
    CHECK_U64(g.line[0].last_us, 200);
    CHECK_U64(g.line[0].seq, 1);
    CHECK_STR(g.line[0].first, "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=a, Ch 8");
    CHECK_STR(g.line[0].last, "NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=b, Ch 9");
    CHECK_U64(g.line[1].count, 1);
    CHECK_STR(g.line[1].first, g.line[1].last);
    CHECK_U64(g.line[2].count, 1);
    closed(&g);
}

static void test_first_matching_pattern_counts(void)
{
    struct log g = opened("4,0,0,-;lost and found\n4,1,0,-;note lost\n");

    g.k->lines.pattern[1] = "note %w"; /* before "note %*" */
    run_once(&g);
    CHECK_U64(g.head->entries, 1);
    CHECK_U64(g.line[0].pattern, 1);
    closed(&g);
}

static void test_user_space_messages_are_ignored(void)
{
    static const char text[] = "12,0,0,-;lost it\n7,1,0,-;lost all\n2147483647,2,0,-;lost us\n";
    struct log g = reading(text);

    CHECK_U64(g.head->lines, 3);
    CHECK_U64(g.head->entries, 1);
    CHECK_STR(g.line[0].first, "lost all");
    closed(&g);
    g = opened(text);
    g.k->lines.any_facility = true;
    run_once(&g);
    CHECK_U64(g.head->entries, 3);
    closed(&g);
}

static void test_gap_in_sequence_numbers_counts_lost_records(void)
{
    struct log g = reading("6,10,0,-;a\n6,11,0,-;b\n");

    CHECK_U64(g.head->lost, 0); /* records overwritten before the start are no loss */
    append_lines("6,15,0,-;c\n");
    run_once(&g);
    CHECK_U64(g.head->lost, 3);
    CHECK_U64(g.head->next_seq, 16);
    closed(&g);
}

static void test_reopened_log_is_not_counted_twice(void)
{
    struct log g = reading("6,0,1,-;lost a\n6,1,2,-;lost b\n");

    close(g.k->fd);
    g.k->fd = -1;
    append_lines("6,2,3,-;lost a\n");
    run_once(&g);
    CHECK_U64(g.head->lines, 3);
    CHECK_U64(g.line[0].count, 2);
    CHECK_U64(g.line[1].count, 1);
    closed(&g);
}

static void test_malformed_record_is_reported(void)
{
    static const char *const bad[] = {
        "", "plain text", "6,1,2,-no semicolon", "6,1;x", "-6,1,2,-;x", ",1,2,-;x",
        "6,99999999999999999999,2,-;x", "6, 1,2,-;x",
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        struct log g = reading("6,0,0,-;x\n");

        check_row = bad[i];
        CHECK_INT(g.head->state, DH_STATE_OK);
        append_lines("%s\n", bad[i]);
        run_once(&g);
        CHECK_INT(g.head->state, DH_STATE_FAILING);
        CHECK_INT(g.head->err, DH_EPARSE);
        CHECK_U64(g.head->failures, 1);
        append_lines("6,1,0,-;x\n");
        run_once(&g);
        CHECK_INT(g.head->state, DH_STATE_OK);
        CHECK_U64(g.head->lines, 2);
        closed(&g);
    }
    check_row = "";
}

static void test_line_longer_than_the_buffer_is_dropped(void)
{
    struct log g = reading("6,0,0,-;lost a\n");

    for (int i = 0; i < 3; i++)
        append_lines("%09000d", 0);
    run_once(&g);
    CHECK_U64(g.head->failures, 1);
    append_lines("\n6,1,0,-;lost a\n");
    run_once(&g);
    CHECK_U64(g.head->failures, 1);
    CHECK_U64(g.line[0].count, 2);
    closed(&g);
}

static void test_long_text_is_cut_outside_escapes(void)
{
    for (int at = DH_LOG_TEXT - 8; at <= DH_LOG_TEXT; at++) {
        struct log g = reading("");
        char want[DH_LOG_TEXT];

        append_lines("6,0,0,-;lost %0*d\\x0arest\n", at - 5, 0);
        run_once(&g);
        snprintf(want, sizeof(want), "lost %0*d%s", at - 5, 0, at <= DH_LOG_TEXT - 5 ? "\\x0arest" : "");
        CHECK_STR(g.line[0].first + DH_LOG_TEXT - 16, want + DH_LOG_TEXT - 16);
        CHECK(g.line[0].first[DH_LOG_TEXT - 1] == '\0');
        closed(&g);
    }
}

static void test_shorter_text_leaves_no_rest_of_a_longer_one(void)
{
    static const char zeros[DH_LOG_TEXT];
    struct log g = reading("6,0,0,-;lost it, and much more\n6,1,0,-;lost it\n");

    CHECK_STR(g.line[0].last, "lost it");
    CHECK(!memcmp(g.line[0].last + 7, zeros, DH_LOG_TEXT - 7));
    closed(&g);
    g = reading("6,0,0,-;lost \x01\xff\n"); /* no kernel writes these bytes */
    CHECK_STR(g.line[0].last, "lost ??");
    closed(&g);
}

static void test_full_table_evicts_the_least_recently_seen_entry(void)
{
    struct log g = reading("");

    for (int i = 0; i < DH_LOG_MAX; i++)
        append_lines("6,%d,9,-;lost w%d\n", i, i);
    append_lines("6,%d,0,-;lost w0\n", DH_LOG_MAX); /* seen again, though its clock went back */
    run_once(&g);
    CHECK_U64(g.head->entries, DH_LOG_MAX);
    CHECK_U64(g.head->evicted, 0);
    append_lines("6,%d,9,-;lost new\n", DH_LOG_MAX + 1);
    run_once(&g);
    CHECK_U64(g.head->entries, DH_LOG_MAX);
    CHECK_U64(g.head->evicted, 1);
    CHECK_STR(g.line[0].first, "lost w0");
    CHECK_U64(g.line[0].count, 2);
    CHECK_STR(g.line[1].first, "lost new");
    CHECK_U64(g.line[1].count, 1);
    closed(&g);
}

/* A FIFO delivers pieces: the entries must not depend on them. */
static void test_flood_of_lines_evicts_no_line_of_another_pattern(void)
{
    struct log g = reading("6,0,9,-;note w0\n");

    for (int i = 1; i < 2 * DH_LOG_MAX; i++)
        append_lines("6,%d,9,-;lost w%d\n", i, i);
    run_once(&g);
    CHECK_U64(g.head->entries, DH_LOG_MAX);
    CHECK_U64(g.head->evicted, DH_LOG_MAX);
    CHECK_STR(g.line[0].first, "note w0");
    closed(&g);
}

static void test_lines_fed_in_pieces_give_the_same_entries(void)
{
    static const char text[] = "6,0,1,-;lost a\n KEY=value\n6,1,2,-;lost b, c\n6,2,3,-;lost a (x)\n";
    struct log whole = reading(text);

    for (size_t piece = 1; piece < sizeof(text) - 1; piece++) {
        struct log g = opened("");

        for (size_t at = 0; at < sizeof(text) - 1; at += piece) {
            size_t n = sizeof(text) - 1 - at < piece ? sizeof(text) - 1 - at : piece;

            memcpy(g.k->lines.buf + g.k->lines.buffered, text + at, n);
            dh_lines_feed(&g.k->lines, n);
        }
        CHECK(!memcmp(g.k->lines.work.line, whole.k->lines.work.line, sizeof(g.k->lines.work.line)));
        CHECK_INT(dh_kmsg_stop(g.k, 0), 0);
        close(g.wake_fd);
        free(g.head);
    }
    closed(&whole);
}

static void test_log_contents_at_start_wake_once_at_the_end(void)
{
    struct log g = opened("");

    for (int i = 0; i < 300; i++) /* more than a run reads of a file: 2 MiB */
        append_lines("6,%d,0,-;lost w%d %08000d\n", i, i % 50, 0);
    CHECK_INT(dh_kmsg_read(g.k, g.head, dh_kmsg_size(g.k)), -ENODATA);
    run_once(&g);
    CHECK_INT(g.head->state, DH_STATE_STARTING);
    CHECK(g.head->lines > 200 && g.head->lines < 300);
    CHECK_U64(wakes(&g), 0);
    run_once(&g);
    CHECK_INT(g.head->state, DH_STATE_OK);
    CHECK_U64(g.head->lines, 300);
    CHECK_U64(g.head->entries, 50);
    CHECK_U64(g.head->passes, 2);
    CHECK_U64(wakes(&g), 1);
    CHECK_U64(g.head->wakes, 1);
    CHECK_INT(dh_kmsg_read(g.k, g.head, sizeof(*g.head)), -ENOSPC);
    CHECK_INT(dh_kmsg_read(g.k, g.head, sizeof(*g.head) - 1), -ENOSPC);
    closed(&g);
}

static void test_new_entry_wakes_at_once_and_repeats_later(void)
{
    struct log g = reading("6,0,0,-;lost a\n");

    wakes(&g);
    g.k->notified_ns = dh_now_ns() - DH_NS / 100;
    append_lines("6,1,0,-;lost b\n");
    run_once(&g);
    CHECK_U64(wakes(&g), 1);
    append_lines("6,2,0,-;nothing\n");
    run_once(&g);
    CHECK_U64(wakes(&g), 0);
    g.k->notified_ns = dh_now_ns() + 3600 * DH_NS; /* not long ago, however long the test takes */
    append_lines("6,3,0,-;lost b\n");
    run_once(&g);
    CHECK_U64(wakes(&g), 0); /* known already */
    g.k->notified_ns = dh_now_ns() - DH_NS / 10;
    run_once(&g);
    CHECK_U64(wakes(&g), 1); /* reported later */
    CHECK_U64(g.line[1].count, 2);
    run_once(&g);
    CHECK_U64(wakes(&g), 0);
    g.k->notified_ns = dh_now_ns() + 3600 * DH_NS; /* many new entries wait, too */
    append_lines("6,4,0,-;lost c\n");
    run_once(&g);
    CHECK_U64(wakes(&g), 0);
    CHECK_U64(g.head->entries, 3);
    closed(&g);
}

static void test_missing_log_is_absent_and_retried(void)
{
    struct log g = opened("");

    fx_remove(LOG);
    run_once(&g);
    CHECK_INT(g.head->state, DH_STATE_ABSENT);
    CHECK_INT(g.head->err, ENOENT);
    CHECK_U64(g.head->failures, 0);
    CHECK_U64(wakes(&g), 1);
    CHECK(g.k->paused_until_ns >= g.run_ns + DH_NS);
    for (int i = 0; i < 10; i++)
        run_once(&g);
    CHECK_U64(g.k->retry_ns, 60 * DH_NS);
    CHECK_U64(wakes(&g), 0); /* nothing new */
    fx_write("6,0,0,-;lost a\n", LOG);
    run_once(&g);
    CHECK_INT(g.head->state, DH_STATE_OK);
    CHECK_INT(g.head->err, 0);
    CHECK_U64(g.head->entries, 1);
    CHECK_U64(g.k->retry_ns, DH_NS);
    CHECK_U64(wakes(&g), 1);
    closed(&g);
}

static void test_unreadable_log_fails(void)
{
    struct log g = opened("");

    fx_remove(LOG);
    fx_dir(LOG); /* can be opened, but not read */
    run_once(&g);
    CHECK_INT(g.head->state, DH_STATE_FAILING);
    CHECK_INT(g.head->err, EISDIR);
    CHECK_U64(g.head->failures, 1);
    CHECK_INT(g.k->fd, -1);
    closed(&g);
}

static void test_invalid_arguments_are_refused(void)
{
    struct dh_kmsg_options o = options();
    char many[2 * DH_PATTERN_MAX + 2];
    int descriptors = fx_count("/proc/self/fd");
    struct log g;

#define REFUSED(code, text, len)                                                                       \
    do {                                                                                               \
        CHECK_INT(open_as(&g, &o, text, len), code);                                                   \
        close(g.wake_fd);                                                                              \
    } while (0)
    REFUSED(-EINVAL, "%q", 3);
    REFUSED(-EINVAL, "a\0", 3); /* an empty pattern */
    REFUSED(-EINVAL, "ab", 2);  /* no NUL at the end */
    for (size_t i = 0; i < sizeof(many); i++)
        many[i] = i % 2 ? '\0' : 'x';
    REFUSED(-EINVAL, many, sizeof(many));
    o.size--;
    REFUSED(DH_EABI, "a", 2);
    o = options();
    o.version++;
    REFUSED(DH_EABI, "a", 2);
    o = options();
    o.any_facility = 2;
    REFUSED(-EINVAL, "a", 2);
    o = options();
    o.reserved = 1;
    REFUSED(-EINVAL, "a", 2);
    o = options();
    CHECK_INT(dh_kmsg_open(&o, "/dev/kmsg", "a", 2, -1, &g.k), -EBADF);
    CHECK_INT(open_as(&g, &o, many, sizeof(many) - 2), 0);
    CHECK_INT(dh_kmsg_stop(g.k, 0), 0);
    close(g.wake_fd);
    CHECK_INT(open_as(&g, &o, "", 0), 0); /* no patterns: no entries */
    CHECK_INT(dh_kmsg_stop(g.k, 0), 0);
    close(g.wake_fd);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

/* poll(2) always reports a file at its end as readable, and a FIFO without writer as hung up. */
static void test_reader_pauses_at_the_end_of_a_file(void)
{
    struct log g = reading("6,0,0,-;lost a\n");
    char path[FX_PATH];
    int fd;

    CHECK(g.k->paused_until_ns >= g.run_ns + DH_NS / 10);
    closed(&g);
    g = opened("");
    fx_fifo(LOG);
    run_once(&g);
    CHECK(g.k->paused_until_ns > g.run_ns);
    snprintf(path, sizeof(path), "%s/%s", fx_root, LOG);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    run_once(&g);
    CHECK_U64(g.k->paused_until_ns, 0); /* poll(2) reports new data */
    close(fd);
    run_once(&g);
    CHECK(g.k->paused_until_ns > g.run_ns);
    closed(&g);
}

int main(void)
{
    fx_begin();
    test_lines_with_one_key_share_an_entry();
    test_first_matching_pattern_counts();
    test_user_space_messages_are_ignored();
    test_gap_in_sequence_numbers_counts_lost_records();
    test_reopened_log_is_not_counted_twice();
    test_malformed_record_is_reported();
    test_line_longer_than_the_buffer_is_dropped();
    test_long_text_is_cut_outside_escapes();
    test_shorter_text_leaves_no_rest_of_a_longer_one();
    test_full_table_evicts_the_least_recently_seen_entry();
    test_flood_of_lines_evicts_no_line_of_another_pattern();
    test_lines_fed_in_pieces_give_the_same_entries();
    test_log_contents_at_start_wake_once_at_the_end();
    test_new_entry_wakes_at_once_and_repeats_later();
    test_missing_log_is_absent_and_retried();
    test_unreadable_log_fails();
    test_reader_pauses_at_the_end_of_a_file();
    test_invalid_arguments_are_refused();
    return check_done("test_kmsg");
}

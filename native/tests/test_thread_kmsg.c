/*
 * Tests of the kernel log's thread with a FIFO: fast readers get no torn copy, a flood does not delay the
 * stop, and without lines the heartbeat continues.
 */
#include <signal.h>
#include <sys/eventfd.h>

#include "check.h"
#include "fixture.h"
#include "kmsg/kmsg.h"
#include "readers_fixture.h"

#define READERS 3
#define KINDS 40
#define LINES 20000
#define CHANGES 10 /* that each reader must see */

static _Atomic bool over;

static struct dh_kmsg *opened(void)
{
    const struct dh_kmsg_options o = { .size = sizeof(o), .version = DH_VERSION };
    char path[FX_PATH];
    struct dh_kmsg *k;
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

    snprintf(path, sizeof(path), "%s/kmsg", fx_root);
    fx_fifo("kmsg");
    fx_must(!dh_kmsg_open(&o, path, "kind %d: %*", sizeof("kind %d: %*"), wake_fd, &k), "dh_kmsg_open");
    close(wake_fd); /* the reader has a duplicate */
    return k;
}

/* Open the blocking write end of a FIFO that has a reader. */
static int writer(void)
{
    char path[FX_PATH];

    snprintf(path, sizeof(path), "%s/kmsg", fx_root);
    return open(path, O_WRONLY | O_CLOEXEC);
}

static void line_write(int fd, uint64_t seq)
{
    char text[128];
    int n = snprintf(text, sizeof(text), "6,%" PRIu64 ",%" PRIu64 ",-;kind %" PRIu64 ": %" PRIu64 "\n",
                     seq, seq, seq % KINDS, seq);

    fx_must(write(fd, text, (size_t)n) == n, "write");
}

/*
 * Each line contains its number, and those of one kind are KINDS apart: that must hold for all members of an
 * entry.
 */
static const char *check_copy_of(const void *was_before, const void *is_now)
{
    const struct dh_log *before = was_before, *now = is_now;
    const struct dh_log_line *line = (const struct dh_log_line *)(const void *)(now + 1);
    uint64_t sum = 0;

    if (now->matched < before->matched || now->passes < before->passes || now->heartbeat_ns < before->heartbeat_ns)
        return "time went back";
    if (now->lost || now->failures || now->entries > KINDS || now->next_seq != now->lines)
        return "the head has a wrong size";
    for (uint32_t i = 0; i < now->entries; i++) {
        char first[DH_LOG_TEXT], last[DH_LOG_TEXT];

        snprintf(first, sizeof(first), "kind %u: %u", i, i);
        snprintf(last, sizeof(last), "kind %u: %" PRIu64, i, line[i].seq);
        if (strcmp(line[i].first, first) || strcmp(line[i].last, last) || line[i].first_us != i ||
            line[i].last_us != line[i].seq || line[i].seq != i + (line[i].count - 1) * KINDS)
            return "an entry is torn";
        sum += line[i].count;
    }
    return sum == now->matched ? NULL : "entries of another time";
}

static int64_t copy(void *from, void *buf, size_t cap)
{
    return dh_kmsg_read(from, buf, cap);
}

static uint64_t moves(const void *now)
{
    return ((const struct dh_log *)now)->matched;
}

static void test_reader_never_gets_a_torn_copy(void)
{
    struct dh_kmsg *k = opened();
    const struct rx_source source = { k, dh_kmsg_size(k), copy, check_copy_of, moves, CHANGES };
    struct rx readers;
    struct dh_log *head = aligned_alloc(8, dh_kmsg_size(k));
    uint64_t seq = 0;
    int fd;

    CHECK_INT(dh_kmsg_start(k), 0);
    CHECK_INT(dh_kmsg_start(k), -EBUSY);
    fd = writer();
    rx_start(&readers, &source, READERS);
    while (seq < LINES) {
        line_write(fd, seq++);
        if (seq % (LINES / CHANGES) == 0)
            EVENTUALLY(rx_have_seen(&readers, seq / (LINES / CHANGES)));
    }
    EVENTUALLY(dh_kmsg_read(k, head, dh_kmsg_size(k)) > 0 && head->matched == seq);
    rx_end(&readers);
    CHECK_INT(dh_kmsg_stop(k, FX_PATIENCE_NS), 0);
    close(fd);
    free(head);
}

static void *flood_main(void *arg)
{
    int fd = writer();

    (void)arg;
    for (uint64_t seq = 0; !atomic_load(&over); seq++) {
        char text[64];
        int n = snprintf(text, sizeof(text), "6,%" PRIu64 ",0,-;kind 1: \n", seq);

        (void)!write(fd, text, (size_t)n); /* EPIPE when the reader is gone */
    }
    close(fd);
    return NULL;
}

static void test_flood_does_not_delay_the_stop(void)
{
    struct dh_kmsg *k = opened();
    struct dh_log *head = aligned_alloc(8, dh_kmsg_size(k));
    pthread_t flood;

    atomic_store(&over, false);
    CHECK_INT(dh_kmsg_start(k), 0);
    fx_must(!pthread_create(&flood, NULL, flood_main, NULL), "pthread_create");
    EVENTUALLY(dh_kmsg_read(k, head, dh_kmsg_size(k)) > 0 && head->matched > 100);
    CHECK_INT(dh_kmsg_stop(k, FX_PATIENCE_NS), 0);
    atomic_store(&over, true);
    pthread_join(flood, NULL);
    free(head);
}

static void test_idle_thread_keeps_its_heartbeat(void)
{
    struct dh_kmsg *k = opened();
    struct dh_log *head = aligned_alloc(8, dh_kmsg_size(k));
    uint64_t begun = dh_now_ns();
    int fd;

    k->lines.work.head.period_ns = DH_NS / 100;
    CHECK_INT(dh_kmsg_start(k), 0);
    EVENTUALLY(dh_kmsg_read(k, head, dh_kmsg_size(k)) > 0);
    CHECK(head->heartbeat_ns >= begun);
    fd = writer();
    EVENTUALLY(dh_kmsg_read(k, head, dh_kmsg_size(k)) > 0 && head->passes > 20);
    CHECK_U64(head->lines, 0);
    CHECK_INT(head->state, DH_STATE_OK);
    CHECK(head->wakes <= 1);
    CHECK_INT(dh_kmsg_stop(k, FX_PATIENCE_NS), 0);
    close(fd);
    free(head);
}

int main(void)
{
    int descriptors;

    signal(SIGPIPE, SIG_IGN);
    fx_begin();
    descriptors = fx_count("/proc/self/fd");
    test_reader_never_gets_a_torn_copy();
    test_flood_does_not_delay_the_stop();
    test_idle_thread_keeps_its_heartbeat();
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    return check_done("test_thread_kmsg");
}

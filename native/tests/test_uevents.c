/*
 * The listener to device events, on this thread: what it makes of messages, and when it wakes whom. The
 * messages of the second half come from the kernel, into a network namespace of this program's own.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "check.h"
#include "fixture.h"
#include "uevent_fixture.h"

#define MESSAGE(text) text, sizeof(text)
#define LONG 200

/* ---- messages ---- */

static struct dh_heard heard; /* by the claims of this half, each from nothing */

static const struct dh_uevents_head *hear(const char *s, size_t n, uint64_t now_ns)
{
    char *copy = check_copy(s, n);

    dh_heard_take(&heard, copy, n, now_ns);
    free(copy);
    return &heard.work.head;
}

static void forget(void)
{
    memset(&heard, 0, sizeof(heard));
}

/* An event of the kernel's making, with a number behind. */
static const struct dh_uevents_head *happens(const char *action, const char *path, const char *subsystem,
                                             uint64_t now_ns)
{
    char text[2048];
    size_t n = ue_format(text, sizeof(text), action, path, subsystem, "");

    n += (size_t)snprintf(text + n, sizeof(text) - n, "SEQNUM=%" PRIu64, now_ns) + 1;
    return hear(text, n, now_ns);
}

static void a_message_says_what_happened_to_what(void)
{
    const struct dh_uevents_head *head;

    forget();
    head = hear(MESSAGE("unbind@" GPU "\0ACTION=unbind\0DEVPATH=" GPU "\0SUBSYSTEM=pci\0PCI_CLASS=30200\0"
                        "PCI_SLOT_NAME=0000:3b:00.0\0DRIVER=nvidia\0SEQNUM=4711"), 99);
    CHECK_U64(head->messages, 1);
    CHECK_U64(head->entries, 1);
    CHECK_U64(head->changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(heard.work.entry[0].subsystem, DH_SUBSYSTEM_PCI);
    CHECK_U64(heard.work.entry[0].action, DH_ACTION_UNBIND);
    CHECK_U64(heard.work.entry[0].count, 1);
    CHECK_U64(heard.work.entry[0].last_ns, 99);
    CHECK_U64(heard.work.entry[0].seqnum, 4711);
    CHECK_STR(heard.work.entry[0].path, GPU + 1);
    CHECK_STR(heard.work.entry[0].driver, "nvidia");
    CHECK(heard.news && !heard.poke);
}

static void of_one_device_the_newest_counts(void)
{
    forget();
    hear(MESSAGE("bind@" GPU "\0SUBSYSTEM=pci\0DRIVER=nvidia\0SEQNUM=1"), 1);
    happens("add", "/devices/system/cpu/cpu1", "cpu", 2);
    happens("remove", GPU, "pci", 3);
    CHECK_U64(heard.work.head.entries, 2);
    CHECK_U64(heard.work.entry[0].action, DH_ACTION_REMOVE);
    CHECK_U64(heard.work.entry[0].count, 2);
    CHECK_U64(heard.work.entry[0].seqnum, 3);
    CHECK_STR(heard.work.entry[0].driver, "");
    CHECK_U64(heard.work.entry[1].count, 1);
}

static void what_the_kernel_does_not_write_is_malformed(void)
{
    static const struct {
        const char *text;
        size_t n;
    } bad[] = {
        { "", 0 },
        { MESSAGE("") },
        { MESSAGE("libudev") },
        { MESSAGE("add\0at@/x\0SUBSYSTEM=pci\0SEQNUM=1") },
        { MESSAGE("add@x\0SUBSYSTEM=pci\0SEQNUM=1") },
        { MESSAGE("add@/x\0SUBSYSTEM=pci\0SEQNUM=") },
        { MESSAGE("add@/x\0SUBSYSTEM=pci\0SEQNUM=-1") },
        { MESSAGE("add@/x\0SUBSYSTEM=pci\0SEQNUM=99999999999999999999") },
        { MESSAGE("add@/x\0SUBSYSTEM=pci\0XSEQNUM=1") },
        { MESSAGE("add@/x\0SUBSYSTEM=pci") },
        { MESSAGE("add@/x\0SEQNUM=1") },
        { "add@/x\0SUBSYSTEM=pci\0SEQNUM=1", 29 }, /* without the last NUL */
        { "add@/x", 6 },
    };

    forget();
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        const struct dh_uevents_head *head = hear(bad[i].text, bad[i].n, i);

        check_row = bad[i].text;
        CHECK_U64(head->malformed, i + 1);
        CHECK_U64(head->messages, i + 1);
        CHECK(!head->entries && !heard.news);
    }
    check_row = "";
    CHECK_U64(hear(MESSAGE("add@/x\0SUBSYSTEM=pci\0SEQNUM=1"), 99)->entries, 1);
}

static void of_other_subsystems_nobody_hears(void)
{
    const struct dh_uevents_head *head;

    forget();
    happens("add", "/devices/virtual/net/veth1", "net", 1);
    happens("add", "/devices/system/cpu/cpu1", "cpuid", 2);
    head = happens("add", "/bus/pci/drivers/nvidia", "drivers", 3);
    CHECK_U64(head->messages, 3);
    CHECK_U64(head->entries + head->malformed, 0);
    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        CHECK_U64(head->changes[i], 0);
    CHECK(!heard.news && !heard.poke);
}

static void an_action_that_nobody_knows_is_a_change_without_a_name(void)
{
    const struct dh_uevents_head *head;

    forget();
    head = happens("implode", GPU, "pci", 1);
    CHECK_U64(head->changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(head->entries, 0);
    CHECK(heard.news);
}

static void all_but_pci_devices_are_for_those_who_read_files(void)
{
    static const struct {
        const char *name;
        enum dh_subsystem subsystem;
        bool poke;
    } row[] = {
        { "cpu", DH_SUBSYSTEM_CPU, true },   { "memory", DH_SUBSYSTEM_MEMORY, true },
        { "node", DH_SUBSYSTEM_NODE, true }, { "machinecheck", DH_SUBSYSTEM_MACHINECHECK, true },
        { "edac", DH_SUBSYSTEM_EDAC, true }, { "pci", DH_SUBSYSTEM_PCI, false },
    };

    for (size_t i = 0; i < sizeof(row) / sizeof(*row); i++) {
        check_row = row[i].name;
        forget();
        happens("change", "/devices/x", row[i].name, 1);
        CHECK_U64(heard.work.head.changes[row[i].subsystem], 1);
        CHECK_U64(heard.work.entry[0].subsystem, row[i].subsystem);
        CHECK(heard.news);
        CHECK_INT(heard.poke, row[i].poke);
    }
    check_row = "";
}

static void what_was_missed_may_have_been_anything(void)
{
    forget();
    dh_heard_missed(&heard);
    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        CHECK_U64(heard.work.head.changes[i], 1);
    CHECK(heard.news && heard.poke && !heard.work.head.entries);
}

static void what_cannot_be_printed_is_escaped(void)
{
    forget();
    hear(MESSAGE("add@/a\n\x7f\xffz\0SUBSYSTEM=pci\0DRIVER=\t!\0SEQNUM=1"), 1);
    CHECK_STR(heard.work.entry[0].path, "a\\x0a\\x7f\\xffz");
    CHECK_STR(heard.work.entry[0].driver, "\\x09!");
}

static void a_path_is_cut_but_not_inside_an_escape(void)
{
    for (int at = LONG; at <= DH_UEVENT_PATH; at++) {
        char path[DH_UEVENT_PATH + 8], want[DH_UEVENT_PATH + 8], got[DH_UEVENT_PATH];

        forget();
        snprintf(path, sizeof(path), "/%0*d\nz", at, 0);
        happens("add", path, "pci", 1);
        snprintf(want, sizeof(want), "%0*d%s", at < 255 ? at : 255, 0,
                 at + 5 < 256 ? "\\x0az" : at + 4 < 256 ? "\\x0a" : "");
        memcpy(got, heard.work.entry[0].path, sizeof(got));
        CHECK_INT(got[DH_UEVENT_PATH - 1], 0);
        CHECK_STR(got + LONG, want + LONG);
    }
}

static void a_full_table_forgets_what_was_seen_longest_ago(void)
{
    char path[32];
    uint64_t now_ns = 0;

    forget();
    for (int i = 0; i < DH_UEVENT_MAX; i++) {
        snprintf(path, sizeof(path), "/devices/d%d", i);
        happens("add", path, "memory", ++now_ns);
    }
    happens("change", "/devices/d0", "memory", ++now_ns);
    CHECK_U64(heard.work.head.evicted, 0);
    happens("add", "/devices/new", "memory", ++now_ns);
    CHECK_U64(heard.work.head.entries, DH_UEVENT_MAX);
    CHECK_U64(heard.work.head.evicted, 1);
    CHECK_STR(heard.work.entry[0].path, "devices/d0");
    CHECK_STR(heard.work.entry[1].path, "devices/new");
    CHECK_U64(heard.work.entry[1].count, 1);
    CHECK_U64(heard.work.head.changes[DH_SUBSYSTEM_MEMORY], DH_UEVENT_MAX + 2);
}

/* ---- the socket ---- */

struct ear {
    struct dh_uevents *u;
    int wake_fd;
    int poke_fd;
    uint64_t turn_ns; /* when its last turn began */
    struct dh_uevents_head *head;
    const struct dh_uevent *entry;
};

static void turn(struct ear *e)
{
    e->u->rest_ns = 0;
    e->turn_ns = dh_now_ns();
    dh_uevents_turn(e->u);
    CHECK(dh_uevents_read(e->u, e->head, dh_uevents_size(e->u)) >= (int64_t)sizeof(*e->head));
}

static uint64_t taken(int fd)
{
    uint64_t n;

    return read(fd, &n, sizeof(n)) == sizeof(n) ? n : 0;
}

static struct ear opened(void)
{
    struct ear e = { .wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) };

    e.poke_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fx_must(!dh_uevents_open(e.wake_fd, &e.poke_fd, 1, &e.u), "dh_uevents_open");
    e.head = aligned_alloc(8, dh_uevents_size(e.u));
    e.entry = (const struct dh_uevent *)(const void *)(e.head + 1);
    return e;
}

/* One that listens, and whose wakes of that are forgotten. */
static struct ear listening(void)
{
    struct ear e = opened();

    turn(&e);
    CHECK(e.u->fd >= 0);
    CHECK_U64(taken(e.wake_fd), 1);
    e.u->ring_ns = 0;
    return e;
}

static void closed(struct ear *e)
{
    CHECK_INT(dh_uevents_stop(e->u, 0), 0);
    close(e->wake_fd);
    close(e->poke_fd);
    free(e->head);
}

static void what_the_kernel_tells_is_published(void)
{
    struct ear e = listening();

    CHECK_U64(e.head->changes[DH_SUBSYSTEM_PCI], 0); /* what was before the start is no loss */
    CHECK_U64(e.head->size, sizeof(*e.head));
    ue_inject("add", GPU, "pci", "nvidia");
    turn(&e);
    CHECK_U64(e.head->entries, 1);
    CHECK_U64(e.entry[0].action, DH_ACTION_ADD);
    CHECK_STR(e.entry[0].path, GPU + 1);
    CHECK_STR(e.entry[0].driver, "nvidia");
    CHECK(e.entry[0].seqnum > 0);
    CHECK(e.entry[0].last_ns <= e.head->beat_ns);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 0);
    ue_inject("offline", "/devices/system/memory/memory32", "memory", "");
    turn(&e);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 1);
    CHECK_U64(e.head->wakes, 3);
    CHECK_INT(dh_uevents_read(e.u, e.head, sizeof(*e.head) - 1), -ENOSPC);
    CHECK_INT(dh_uevents_read(e.u, e.head, sizeof(*e.head)), -ENOSPC);
    closed(&e);
}

static void network_devices_wake_nobody(void)
{
    struct ear e = listening();

    for (int i = 0; i < 50; i++)
        ue_inject("add", "/devices/virtual/net/veth1", "net", "");
    turn(&e);
    CHECK_U64(e.head->messages, 50);
    CHECK_U64(taken(e.wake_fd) + taken(e.poke_fd), 0);
    closed(&e);
}

/* Root of a network namespace may send to the group, but not from the kernel's port. */
static void who_is_not_the_kernel_is_not_believed(void)
{
    struct sockaddr_nl everybody = { .nl_family = AF_NETLINK, .nl_groups = 1 };
    struct ear e = listening();
    char text[2048];
    size_t n = ue_format(text, sizeof(text), "remove", GPU, "pci", "");
    int fd = ue_socket();

    memcpy(text + n, "SEQNUM=1", sizeof("SEQNUM=1"));
    n += sizeof("SEQNUM=1");
    fx_must(sendto(fd, text, n, 0, (struct sockaddr *)&everybody, sizeof(everybody)) == (ssize_t)n, "sendto");
    turn(&e);
    CHECK_U64(e.head->foreign, 1);
    CHECK_U64(e.head->messages + e.head->entries, 0);
    CHECK_U64(taken(e.wake_fd), 0);
    close(fd);
    closed(&e);
}

static void what_the_kernel_had_to_throw_away_is_a_loss(void)
{
    struct ear e = listening();
    int bytes = 1; /* the kernel's least: some five events */

    fx_must(!setsockopt(e.u->fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)), "setsockopt");
    for (int i = 0; i < 50; i++)
        ue_inject("add", GPU, "pci", "");
    turn(&e);
    CHECK_U64(e.head->lost, 1);
    CHECK(e.head->messages > 0 && e.head->messages < 50);
    CHECK_U64(e.head->changes[DH_SUBSYSTEM_PCI], e.head->messages + 1);
    CHECK_U64(e.head->changes[DH_SUBSYSTEM_CPU], 1);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 1);
    CHECK_U64(e.head->failures, 0);
    ue_inject("remove", GPU, "pci", ""); /* and it goes on */
    turn(&e);
    CHECK_U64(e.entry[0].action, DH_ACTION_REMOVE);
    CHECK_U64(e.head->lost, 1);
    closed(&e);
}

static void the_first_wakes_come_at_once_and_then_there_are_gaps(void)
{
    struct ear e = listening();
    uint64_t woken = 0;

    for (int i = 0; i < 20; i++) {
        ue_inject("change", "/devices/system/node/node1", "node", "");
        turn(&e);
        woken += taken(e.wake_fd);
    }
    CHECK(woken >= 5);
    CHECK_U64(taken(e.poke_fd), woken);
    e.u->ring_ns = dh_now_ns() + 3600 * DH_NS;
    ue_inject("change", "/devices/system/node/node1", "node", "");
    turn(&e);
    CHECK_U64(taken(e.wake_fd), 0);
    e.u->ring_ns = dh_now_ns();
    turn(&e);
    CHECK_U64(taken(e.wake_fd), 1); /* told, when it is time */
    CHECK_U64(taken(e.poke_fd), 1);
    turn(&e);
    CHECK_U64(taken(e.wake_fd), 0);
    closed(&e);
}

static void a_turn_ends_in_a_flood(void)
{
    struct ear e = listening();

    for (int i = 0; i < 300; i++)
        ue_inject("add", "/devices/virtual/net/veth1", "net", "");
    turn(&e);
    CHECK_U64(e.head->messages, 256);
    CHECK(e.u->rest_ns > 0);
    turn(&e);
    CHECK_U64(e.head->messages, 300);
    CHECK_U64(e.u->rest_ns, 0);
    closed(&e);
}

static void a_socket_that_fails_is_opened_again_and_what_was_missed_is_told(void)
{
    struct ear e = listening();

    close(e.u->fd);
    e.u->fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    turn(&e);
    CHECK_INT(e.head->state, DH_STATE_FAILING);
    CHECK_INT(e.head->err, ENOTSOCK);
    CHECK_U64(e.head->failures, 1);
    CHECK_INT(e.u->fd, -1);
    CHECK(e.u->rest_ns >= e.turn_ns + DH_NS);
    CHECK_U64(taken(e.wake_fd), 1);
    turn(&e);
    CHECK(e.head->state != DH_STATE_FAILING);
    CHECK_U64(e.head->changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 1);
    ue_inject("add", GPU, "pci", "");
    turn(&e);
    CHECK_U64(e.head->entries, 1);
    closed(&e);
}

static void without_descriptors_it_fails_and_tries_again_more_seldom(void)
{
    struct rlimit before, none = { 0 };
    struct ear e = opened();

    fx_must(!getrlimit(RLIMIT_NOFILE, &before), "getrlimit");
    none.rlim_max = before.rlim_max;
    fx_must(!setrlimit(RLIMIT_NOFILE, &none), "setrlimit");
    for (int i = 0; i < 10; i++)
        turn(&e);
    fx_must(!setrlimit(RLIMIT_NOFILE, &before), "setrlimit");
    CHECK_INT(e.head->state, DH_STATE_FAILING);
    CHECK_INT(e.head->err, EMFILE);
    CHECK_U64(e.head->failures, 10);
    CHECK_U64(taken(e.wake_fd), 1); /* nothing new after the first */
    CHECK_U64(e.u->retry_ns, 60 * DH_NS);
    turn(&e);
    CHECK(e.head->state != DH_STATE_FAILING);
    CHECK_U64(e.u->retry_ns, DH_NS);
    closed(&e);
}

static void a_user_namespaces_network_is_deaf(void)
{
    struct ear e = listening();

    CHECK(e.head->deaf == 1 || !ue_user);
    CHECK_INT(e.head->state, e.head->deaf ? DH_STATE_ABSENT : DH_STATE_OK);
    CHECK_INT(e.head->err, 0);
    closed(&e);
}

static void wrong_arguments_are_refused(void)
{
    int descriptors = fx_count("/proc/self/fd"), fd = eventfd(0, EFD_CLOEXEC);
    int poke[5] = { fd, fd, fd, fd, fd };
    struct dh_uevents *u;

    CHECK_INT(dh_uevents_open(fd, poke, 5, &u), -EINVAL);
    CHECK_INT(dh_uevents_open(-1, poke, 1, &u), -EBADF);
    poke[3] = -1;
    CHECK_INT(dh_uevents_open(fd, poke, 4, &u), -EBADF);
    CHECK_INT(dh_uevents_open(fd, poke, 3, &u), 0);
    CHECK_INT(dh_uevents_read(u, poke, 0), -ENOSPC);
    CHECK_INT(dh_uevents_stop(u, 0), 0);
    close(fd);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

/* As systemd's RestrictAddressFamilies= does. For the rest of this program's life. */
static void forbid_netlink(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { .len = sizeof(filter) / sizeof(*filter), .filter = filter };

    fx_must(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
    fx_must(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0), "seccomp");
}

static void where_no_socket_may_be_had_it_is_absent(void)
{
    struct ear e = opened();

    forbid_netlink();
    for (int i = 0; i < 3; i++)
        turn(&e);
    CHECK_INT(e.head->state, DH_STATE_ABSENT);
    CHECK_INT(e.head->err, EAFNOSUPPORT);
    CHECK_U64(e.head->failures, 0);
    CHECK_U64(e.head->deaf, 0);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK(e.u->rest_ns >= e.turn_ns + 60 * DH_NS);
    closed(&e);
}

int main(void)
{
    a_message_says_what_happened_to_what();
    of_one_device_the_newest_counts();
    what_the_kernel_does_not_write_is_malformed();
    of_other_subsystems_nobody_hears();
    an_action_that_nobody_knows_is_a_change_without_a_name();
    all_but_pci_devices_are_for_those_who_read_files();
    what_was_missed_may_have_been_anything();
    what_cannot_be_printed_is_escaped();
    a_path_is_cut_but_not_inside_an_escape();
    a_full_table_forgets_what_was_seen_longest_ago();
    wrong_arguments_are_refused();
    if (!ue_isolated()) {
        puts("test_uevents: no network namespace of its own, so nothing of the socket");
        return check_done("test_uevents");
    }
    what_the_kernel_tells_is_published();
    network_devices_wake_nobody();
    who_is_not_the_kernel_is_not_believed();
    what_the_kernel_had_to_throw_away_is_a_loss();
    the_first_wakes_come_at_once_and_then_there_are_gaps();
    a_turn_ends_in_a_flood();
    a_socket_that_fails_is_opened_again_and_what_was_missed_is_told();
    without_descriptors_it_fails_and_tries_again_more_seldom();
    a_user_namespaces_network_is_deaf();
    where_no_socket_may_be_had_it_is_absent();
    return check_done("test_uevents");
}

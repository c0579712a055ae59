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

/* ---- messages ---- */

static struct dh_heard heard; /* by the claims of this half, each from nothing */

static const struct dh_uevent_sample *hear(const char *s, size_t n)
{
    char *copy = check_copy(s, n);

    dh_heard_take(&heard, copy, n);
    free(copy);
    return &heard.sample;
}

static void forget(void)
{
    memset(&heard, 0, sizeof(heard));
}

static uint64_t all_changes(const struct dh_uevent_sample *sample)
{
    uint64_t sum = 0;

    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        sum += sample->changes[i];
    return sum;
}

static const struct dh_uevent_sample *happens(const char *action, const char *path, const char *subsystem)
{
    char text[2048];

    return hear(text, ue_format(text, sizeof(text), action, path, subsystem));
}

static void a_message_counts_for_its_subsystem(void)
{
    const struct dh_uevent_sample *sample;

    forget();
    sample = hear(MESSAGE("unbind@" GPU "\0ACTION=unbind\0DEVPATH=" GPU "\0SUBSYSTEM=pci\0PCI_CLASS=30200\0"
                          "PCI_SLOT_NAME=0000:3b:00.0\0DRIVER=nvidia\0SEQNUM=4711"));
    CHECK_U64(sample->changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(all_changes(sample) + sample->malformed, 1);
    CHECK(heard.news && !heard.poke);
}

/* Its first SUBSYSTEM is the kernel's own; what follows a driver may have added. */
static void of_two_subsystems_the_first_counts(void)
{
    const struct dh_uevent_sample *sample;

    forget();
    sample = hear(MESSAGE("add@/x\0XSUBSYSTEM=edac\0SUBSYSTEM=pci\0SUBSYSTEM=cpu"));
    CHECK_U64(sample->changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(all_changes(sample), 1);
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
        { MESSAGE("add\0at@/x\0SUBSYSTEM=pci") },
        { MESSAGE("add@x\0SUBSYSTEM=pci") },
        { MESSAGE("add@") },
        { MESSAGE("add@/x") },
        { MESSAGE("add@/x\0SUBSYSTEM") },
        { MESSAGE("add@/x\0SEQNUM=1") },
        { "add@/x\0SUBSYSTEM=pci", 20 }, /* without the last NUL */
        { "add@/x", 6 },
    };

    forget();
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        const struct dh_uevent_sample *sample = hear(bad[i].text, bad[i].n);

        check_row = bad[i].text;
        CHECK_U64(sample->malformed, i + 1);
        CHECK(!all_changes(sample) && !heard.news);
    }
    check_row = "";
    CHECK_U64(hear(MESSAGE("add@/x\0SUBSYSTEM=pci"))->changes[DH_SUBSYSTEM_PCI], 1);
}

static void of_other_subsystems_nobody_hears(void)
{
    forget();
    happens("add", "/devices/virtual/net/veth1", "net");
    happens("add", "/devices/system/cpu/cpu1", "cpuid");
    happens("add", "/bus/pci/drivers/nvidia", "drivers");
    CHECK_U64(all_changes(&heard.sample) + heard.sample.malformed, 0);
    CHECK(!heard.news && !heard.poke);
}

static void whatever_happens_to_a_device_is_a_change(void)
{
    static const char *const actions[] = { "add",     "remove", "change", "move",   "online",
                                           "offline", "bind",   "unbind", "implode" };

    forget();
    for (size_t i = 0; i < sizeof(actions) / sizeof(*actions); i++) {
        check_row = actions[i];
        heard.news = false;
        CHECK_U64(happens(actions[i], GPU, "pci")->changes[DH_SUBSYSTEM_PCI], i + 1);
        CHECK(heard.news);
    }
    check_row = "";
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
        happens("change", "/devices/x", row[i].name);
        CHECK_U64(heard.sample.changes[row[i].subsystem], 1);
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
        CHECK_U64(heard.sample.changes[i], 1);
    CHECK(heard.news && heard.poke);
}

/* ---- the socket ---- */

struct ear {
    struct dh_uevents *u;
    int wake_fd;
    int poke_fd;
    uint64_t turn_ns; /* when its last turn began */
    struct dh_uevent_sample said; /* with that turn */
};

static void turn(struct ear *e)
{
    e->u->rest_ns = 0;
    e->turn_ns = dh_now_ns();
    dh_uevents_turn(e->u);
    CHECK_INT(dh_uevents_read(e->u, &e->said, sizeof(e->said)), sizeof(e->said));
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
}

static void what_the_kernel_tells_is_published(void)
{
    struct ear e = listening();

    CHECK_U64(e.said.changes[DH_SUBSYSTEM_PCI], 0); /* what was before the start is no loss */
    CHECK_U64(e.said.size, sizeof(e.said));
    ue_inject("add", GPU, "pci");
    turn(&e);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_PCI], 1);
    CHECK(e.said.beat_ns >= e.turn_ns);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 0);
    ue_inject("offline", "/devices/system/memory/memory32", "memory");
    turn(&e);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 1);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_MEMORY], 1);
    CHECK_INT(dh_uevents_read(e.u, &e.said, sizeof(e.said) - 1), -ENOSPC);
    closed(&e);
}

static void network_devices_wake_nobody(void)
{
    struct ear e = listening();

    for (int i = 0; i < 50; i++)
        ue_inject("add", "/devices/virtual/net/veth1", "net");
    turn(&e);
    CHECK_U64(taken(e.wake_fd) + taken(e.poke_fd), 0);
    ue_inject("add", GPU, "pci"); /* they were heard, or this would not be */
    turn(&e);
    CHECK_U64(all_changes(&e.said), 1);
    CHECK_U64(taken(e.wake_fd), 1);
    closed(&e);
}

/* Root of a network namespace may send to the group, but not from the kernel's port. */
static void who_is_not_the_kernel_is_not_believed(void)
{
    struct sockaddr_nl everybody = { .nl_family = AF_NETLINK, .nl_groups = 1 };
    struct ear e = listening();
    char text[2048];
    size_t n = ue_format(text, sizeof(text), "remove", GPU, "pci");
    int fd = ue_socket();

    fx_must(sendto(fd, text, n, 0, (struct sockaddr *)&everybody, sizeof(everybody)) == (ssize_t)n, "sendto");
    turn(&e);
    CHECK_U64(e.said.foreign, 1);
    CHECK_U64(all_changes(&e.said) + e.said.malformed, 0);
    CHECK_U64(taken(e.wake_fd), 0);
    close(fd);
    closed(&e);
}

static void what_the_kernel_had_to_throw_away_is_a_loss(void)
{
    struct ear e = listening();
    int bytes = 1; /* the kernel's least: some five events */
    uint64_t told;

    fx_must(!setsockopt(e.u->fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)), "setsockopt");
    for (int i = 0; i < 50; i++)
        ue_inject("add", GPU, "pci");
    turn(&e);
    CHECK_U64(e.said.lost, 1);
    told = e.said.changes[DH_SUBSYSTEM_PCI]; /* what was heard, and the loss */
    CHECK(told > 1 && told < 50);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_CPU], 1);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 1);
    CHECK_U64(e.said.failures, 0);
    ue_inject("remove", GPU, "pci"); /* and it goes on */
    turn(&e);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_PCI], told + 1);
    CHECK_U64(e.said.lost, 1);
    closed(&e);
}

static void the_first_wakes_come_at_once_and_then_there_are_gaps(void)
{
    struct ear e = listening();
    uint64_t woken = 0;

    for (int i = 0; i < 20; i++) {
        ue_inject("change", "/devices/system/node/node1", "node");
        turn(&e);
        woken += taken(e.wake_fd);
    }
    CHECK(woken >= 5);
    CHECK_U64(taken(e.poke_fd), woken);
    e.u->ring_ns = dh_now_ns() + 3600 * DH_NS;
    ue_inject("change", "/devices/system/node/node1", "node");
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
        ue_inject("add", GPU, "pci");
    turn(&e);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_PCI], 256);
    CHECK(e.u->rest_ns > 0);
    turn(&e);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_PCI], 300);
    CHECK_U64(e.u->rest_ns, 0);
    closed(&e);
}

static void a_socket_that_fails_is_opened_again_and_what_was_missed_is_told(void)
{
    struct ear e = listening();

    close(e.u->fd);
    e.u->fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    turn(&e);
    CHECK_INT(e.said.state, DH_STATE_FAILING);
    CHECK_INT(e.said.err, ENOTSOCK);
    CHECK_U64(e.said.failures, 1);
    CHECK_INT(e.u->fd, -1);
    CHECK(e.u->rest_ns >= e.turn_ns + DH_NS);
    CHECK_U64(taken(e.wake_fd), 1);
    turn(&e);
    CHECK(e.said.state != DH_STATE_FAILING);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.poke_fd), 1);
    ue_inject("add", GPU, "pci");
    turn(&e);
    CHECK_U64(e.said.changes[DH_SUBSYSTEM_PCI], 2);
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
    CHECK_INT(e.said.state, DH_STATE_FAILING);
    CHECK_INT(e.said.err, EMFILE);
    CHECK_U64(e.said.failures, 10);
    CHECK_U64(taken(e.wake_fd), 1); /* nothing new after the first */
    CHECK_U64(e.u->retry_ns, 60 * DH_NS);
    turn(&e);
    CHECK(e.said.state != DH_STATE_FAILING);
    CHECK_U64(e.u->retry_ns, DH_NS);
    closed(&e);
}

static void a_user_namespaces_network_is_deaf(void)
{
    struct ear e = listening();

    CHECK(e.said.deaf == 1 || !ue_user);
    CHECK_INT(e.said.state, e.said.deaf ? DH_STATE_ABSENT : DH_STATE_OK);
    CHECK_INT(e.said.err, 0);
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
    CHECK_INT(e.said.state, DH_STATE_ABSENT);
    CHECK_INT(e.said.err, EAFNOSUPPORT);
    CHECK_U64(e.said.failures, 0);
    CHECK_U64(e.said.deaf, 0);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK(e.u->rest_ns >= e.turn_ns + 60 * DH_NS);
    closed(&e);
}

int main(void)
{
    a_message_counts_for_its_subsystem();
    of_two_subsystems_the_first_counts();
    what_the_kernel_does_not_write_is_malformed();
    of_other_subsystems_nobody_hears();
    whatever_happens_to_a_device_is_a_change();
    all_but_pci_devices_are_for_those_who_read_files();
    what_was_missed_may_have_been_anything();
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

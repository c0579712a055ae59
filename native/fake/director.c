/*
 * director.c - issues the commands: from the scenario file, its timeline and storms, and the control socket.
 *
 * One thread, started by the first nvmlInit() that found a scenario, and never ended: the GPUs outlive the
 * sessions. The timeline counts from that nvmlInit(). Storms are distributed by the millisecond.
 */
#include "command.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define CLIENTS 8
#define STORMS 8
#define TIMELINE 512

struct storm {
    struct fake_command command;
    uint64_t next_ns, until_ns, every_ns; /* until_ns 0: unlimited */
};

static struct fake_command timeline[TIMELINE]; /* commands still to come, in order */
static uint32_t timeline_num;
static struct storm storms[STORMS];
static int listener = -1;
static struct client {
    int fd;
    uint32_t num;
    char line[4096];
} clients[CLIENTS];

static bool wrong(char answer[FAKE_ERROR], const char *text)
{
    snprintf(answer, FAKE_ERROR, "%s", text);
    return false;
}

static bool schedule(const struct fake_command *c, char answer[FAKE_ERROR])
{
    uint32_t i = timeline_num;

    if (timeline_num == TIMELINE)
        return wrong(answer, "the timeline is full: 512 commands");
    for (; i > 0 && timeline[i - 1].at_ns > c->at_ns; i--)
        timeline[i] = timeline[i - 1];
    timeline[i] = *c;
    timeline[i].timed = false;
    timeline_num++;
    return true;
}

static bool storm_begin(const struct fake_command *c, char answer[FAKE_ERROR])
{
    for (struct storm *s = storms; s < storms + STORMS; s++)
        if (s->until_ns == 0) {
            uint64_t now = fake_now();

            *s = (struct storm){ .command = *c, .next_ns = now, .until_ns = now + c->duration_ns,
                                 .every_ns = FAKE_NS / c->rate };
            s->command.verb = FAKE_EVENT;
            return true;
        }
    return wrong(answer, "8 storms are under way already");
}

/* Execute a command now, or schedule it. */
static bool run_command(const struct fake_command *c, char answer[FAKE_ERROR])
{
    snprintf(answer, FAKE_ERROR, "ok");
    if (c->timed)
        return schedule(c, answer);
    if (c->verb == FAKE_STORM)
        return storm_begin(c, answer);
    fake_execute(c, answer);
    return true;
}

/* Execute what is due. Return: when the next command is due; 0 without one. */
static uint64_t run_due(void)
{
    uint64_t now = fake_now(), next = 0;
    char answer[FAKE_ERROR];

    while (timeline_num && fake.start_ns + timeline[0].at_ns <= now) {
        struct fake_command c = timeline[0];

        memmove(timeline, timeline + 1, --timeline_num * sizeof(timeline[0]));
        if (!run_command(&c, answer))
            fprintf(stderr, "fake NVML: %s\n", answer);
    }
    if (timeline_num)
        next = fake.start_ns + timeline[0].at_ns;
    for (struct storm *s = storms; s < storms + STORMS; s++) {
        if (s->until_ns == 0)
            continue;
        for (; s->next_ns <= now && s->next_ns < s->until_ns; s->next_ns += s->every_ns)
            fake_execute(&s->command, answer);
        if (s->next_ns >= s->until_ns)
            s->until_ns = 0;
        else if (next == 0 || now + FAKE_NS / 1000 < next)
            next = now + FAKE_NS / 1000;
    }
    return next;
}

/* Handle one line from a client, and write the answer. */
static void handle_line(char *line, char answer[FAKE_ERROR + 8])
{
    char text[FAKE_ERROR];
    struct fake_command c;
    bool right;

    pthread_mutex_lock(&fake.lock);
    right = fake_command_parse(line, &c, text);
    if (right && (c.verb == FAKE_PROFILE || c.verb == FAKE_SOCKET))
        right = wrong(text, "a profile and a socket stand in the file only");
    if (right)
        right = run_command(&c, text);
    pthread_mutex_unlock(&fake.lock);
    snprintf(answer, FAKE_ERROR + 8, "%s%s\n", right ? "" : "error: ", text);
}

/* Read from a client. Return: false if it is gone, or sends no lines. */
static bool read_client(struct client *c)
{
    ssize_t n = recv(c->fd, c->line + c->num, sizeof(c->line) - 1 - c->num, MSG_DONTWAIT);
    char *begin = c->line, *end;

    if (n <= 0)
        return n < 0 && (errno == EAGAIN || errno == EINTR);
    c->num += (uint32_t)n;
    c->line[c->num] = '\0';
    while ((end = memchr(begin, '\n', (size_t)(c->line + c->num - begin)))) {
        char answer[FAKE_ERROR + 8];

        *end = '\0';
        handle_line(begin, answer);
        if (send(c->fd, answer, strlen(answer), MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
            return false;
        begin = end + 1;
    }
    c->num = (uint32_t)(c->line + c->num - begin);
    memmove(c->line, begin, c->num);
    return c->num < sizeof(c->line) - 1;
}

static void welcome(void)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

    for (int i = 0; fd >= 0 && i < CLIENTS; i++)
        if (clients[i].fd < 0) {
            clients[i].fd = fd;
            clients[i].num = 0;
            return;
        }
    if (fd >= 0)
        close(fd);
}

static void *direct(void *unused)
{
    pthread_setname_np(pthread_self(), "fake-nvml"); /* not the name of the thread that called nvmlInit() */
    for (;;) {
        struct pollfd fds[CLIENTS + 1];
        struct timespec t;
        uint64_t next, now, left;

        pthread_mutex_lock(&fake.lock);
        next = run_due();
        now = fake_now();
        pthread_mutex_unlock(&fake.lock);
        left = next > now ? next - now : 0;
        t = (struct timespec){ .tv_sec = (time_t)(left / FAKE_NS), .tv_nsec = (long)(left % FAKE_NS) };
        for (int i = 0; i < CLIENTS; i++)
            fds[i] = (struct pollfd){ .fd = clients[i].fd, .events = POLLIN };
        fds[CLIENTS] = (struct pollfd){ .fd = listener, .events = POLLIN };
        if (ppoll(fds, CLIENTS + 1, next ? &t : NULL, NULL) < 0)
            continue;
        for (int i = 0; i < CLIENTS; i++)
            if (fds[i].revents && !read_client(&clients[i])) {
                close(clients[i].fd);
                clients[i].fd = -1;
            }
        if (fds[CLIENTS].revents)
            welcome();
    }
    return unused;
}

/* Listen on a socket. A socket without a listener is replaced; another file, or a live socket, is not. */
static bool listen_at(const char *path, char error[FAKE_ERROR])
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    const struct sockaddr *generic = (const struct sockaddr *)&address;
    struct stat exists;

    memcpy(address.sun_path, path, strlen(path) + 1);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (lstat(path, &exists) == 0 && S_ISSOCK(exists.st_mode)) {
        if (connect(listener, generic, sizeof(address)) == 0)
            errno = EADDRINUSE;
        else if (errno == ECONNREFUSED)
            unlink(path);
    }
    if (bind(listener, generic, sizeof(address)) == 0 && listen(listener, CLIENTS) == 0)
        return true;
    snprintf(error, FAKE_ERROR, "socket %s: %s", path, strerror(errno));
    close(listener);
    listener = -1;
    return false;
}

static bool start(void)
{
    pthread_t thread;
    sigset_t all, before;
    bool started;

    for (int i = 0; i < CLIENTS; i++)
        clients[i].fd = -1;
    sigfillset(&all); /* signals are for the program that loaded the library */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    started = pthread_create(&thread, NULL, direct, NULL) == 0 && pthread_detach(thread) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

/* The socket opens last: a client that can connect finds the whole file executed. */
static bool read_file(FILE *file, uint32_t *line_num, char error[FAKE_ERROR])
{
    char line[4096], path[sizeof(((struct fake_command *)0)->text)] = "";
    bool begun = false;

    while (fgets(line, sizeof(line), file)) {
        struct fake_command c;

        ++*line_num;
        if (!strchr(line, '\n') && !feof(file))
            return wrong(error, "the line is longer than 4094 bytes");
        if (!fake_command_parse(line, &c, error))
            return false;
        if (c.timed && (c.verb == FAKE_PROFILE || c.verb == FAKE_SOCKET))
            return wrong(error, "a profile and a socket are from the beginning");
        if (c.verb == FAKE_PROFILE && begun)
            return wrong(error, "the profile comes before all other commands");
        if (c.verb == FAKE_PROFILE)
            fake_machine_make(c.profile, c.num);
        else if (c.verb == FAKE_SOCKET)
            memcpy(path, c.text, sizeof(path));
        else if (!run_command(&c, error))
            return false;
        begun |= c.verb != FAKE_NOTHING;
    }
    if (ferror(file)) {
        snprintf(error, FAKE_ERROR, "cannot be read: %s", strerror(errno));
        return false;
    }
    return !path[0] || listen_at(path, error);
}

bool fake_scenario_load(const char *path)
{
    char error[FAKE_ERROR];
    uint32_t line_num = 0;
    bool right;
    FILE *file;

    timeline_num = 0;
    memset(storms, 0, sizeof(storms));
    fake_machine_make(fake_profile_find("h100"), 1);
    fake.start_ns = fake_now();
    if (!path || !*path)
        return true;
    file = fopen(path, "re");
    if (!file) {
        fprintf(stderr, "FAKE_NVML: %s: %s\n", path, strerror(errno));
        return false;
    }
    right = read_file(file, &line_num, error);
    if (!right)
        fprintf(stderr, "%s:%u: %s\n", path, line_num, error);
    fclose(file);
    return right && start();
}

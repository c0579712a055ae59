/* spawn.c - starts an operator's command with rights, descriptors and a cgroup of its own. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "drahealth.h"

#define ERROR_FD 3   /* in the child: takes the failed step, and ends with execve(2) */
#define SPARE_FD 10  /* the child's first copies are above the numbers that it gives them */
#define FDS_MAX 4096 /* closed one by one where the kernel has no close_range(2) */

/* In the child: report the failed step with errno, and end. */
static _Noreturn void child_fail(int fd, enum dh_spawn_step step)
{
    const int32_t error[2] = { (int32_t)step, errno };

    if (write(fd, error, sizeof error) < 0)
        _exit(126);
    _exit(127);
}

static void close_others(void)
{
#ifdef SYS_close_range
    if (syscall(SYS_close_range, ERROR_FD + 1, ~0u, 0) == 0)
        return;
#endif
    for (int fd = ERROR_FD + 1; fd < FDS_MAX; fd++)
        close(fd);
}

static void default_signals(void)
{
    struct sigaction act = { .sa_handler = SIG_DFL };
    sigset_t none;

    for (int number = 1; number < NSIG; number++)
        sigaction(number, &act, NULL); /* EINVAL for SIGKILL, SIGSTOP and those of the C library */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Standard input, output and error, and ERROR_FD; no other descriptor stays open. */
static int child_descriptors(const struct dh_spawn *s, int error_fd)
{
    int from[] = { open("/dev/null", O_RDONLY | O_CLOEXEC), s->out_fd, s->err_fd, error_fd };

    for (int i = 0; i <= ERROR_FD; i++)
        if ((from[i] = fcntl(from[i], F_DUPFD_CLOEXEC, SPARE_FD)) < 0)
            return -1;
    for (int i = 0; i <= ERROR_FD; i++)
        if (dup3(from[i], i, i == ERROR_FD ? O_CLOEXEC : 0) < 0)
            return -1;
    close_others();
    return 0;
}

/* The C library's functions would also change the user of the parent's other threads, of which it still has a
 * list; none of them is in the child. */
static int child_user(const struct dh_spawn *s)
{
    if (s->uid < 0)
        return 0;
    if (syscall(SYS_setgroups, 0, NULL) < 0 || syscall(SYS_setresgid, s->gid, s->gid, s->gid) < 0)
        return -1;
    return (int)syscall(SYS_setresuid, s->uid, s->uid, s->uid);
}

/* fork(2) without the handlers that libraries registered with pthread_atfork(3): those of gRPC abort the process
 * if two threads fork at once. The child only makes system calls. */
static pid_t fork_without_handlers(void)
{
    return (pid_t)syscall(SYS_clone, (unsigned long)SIGCHLD, NULL, NULL, NULL, NULL);
}

static _Noreturn void child_run(const struct dh_spawn *s, const char *const *argv, const char *const *envp,
                                int error_fd, pid_t parent)
{
    const struct rlimit none = { 0, 0 };

    default_signals();
    if (setsid() < 0)
        child_fail(error_fd, DH_SPAWN_SESSION);
    if (s->cgroup_fd >= 0 && write(s->cgroup_fd, "0\n", 2) < 0)
        child_fail(error_fd, DH_SPAWN_CGROUP);
    if (child_descriptors(s, error_fd) < 0)
        child_fail(error_fd, DH_SPAWN_DESCRIPTORS);
    error_fd = ERROR_FD;
    if (child_user(s) < 0)
        child_fail(error_fd, DH_SPAWN_USER);
    /* after the change of user, which resets the signal */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        child_fail(error_fd, DH_SPAWN_RIGHTS);
    if (getppid() != parent)
        _exit(127); /* it ended before the signal was set */
    setrlimit(RLIMIT_CORE, &none);
    umask(022);
    if (chdir("/") < 0)
        child_fail(error_fd, DH_SPAWN_EXEC);
    execve(argv[0], (char *const *)argv, (char *const *)envp);
    child_fail(error_fd, DH_SPAWN_EXEC);
}

int dh_spawn(const struct dh_spawn *s, const char *const *argv, const char *const *envp, int *error_fd)
{
    int fds[2], err;
    pid_t pid, parent = getpid();
    sigset_t all, before;

    if (s->size != sizeof *s || s->version != DH_VERSION || !argv[0])
        return -EINVAL;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -errno;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* no handler of the parent runs in the child */
    pid = fork_without_handlers();
    if (pid == 0)
        child_run(s, argv, envp, fds[1], parent);
    err = errno;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    close(fds[1]);
    if (pid < 0) {
        close(fds[0]);
        return -err;
    }
    *error_fd = fds[0];
    return pid;
}

/* Tests of a GPU watch in shared memory: its reader needs nothing but the memory. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "check.h"
#include "gpu_fixture.h"

#define MEMORY_BYTES (1ull << 62) /* far more than a sanitizer needs */

static int memory_make(size_t bytes, unsigned int seals)
{
    int fd = memfd_create("drahealth-gpus", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    fx_must(fd >= 0 && !ftruncate(fd, (off_t)bytes) && !fcntl(fd, F_ADD_SEALS, seals), "memfd_create");
    return fd;
}

/* The reader maps the memory once more and read-only, at another address, as another process does. */
static void test_attached_reader_copies_what_the_watch_publishes(void)
{
    int fd = memory_make(dh_gpus_memory_size(), F_SEAL_SHRINK | F_SEAL_GROW);
    struct gx g = gx_fake(580, "profile h100 gpus=2\ngpu 1 set temperature=71");
    struct dh_gpus_options o = gx_options();
    struct dh_gpu_watch *reader;
    size_t cap = dh_gpus_size(NULL);
    struct dh_gpus *copy = aligned_alloc(8, cap);

    fx_must(copy != NULL, "aligned_alloc");
    CHECK_INT(dh_gpus_attach(fd, &reader), 0);
    CHECK_INT(dh_gpus_read(reader, copy, cap), -ENODATA); /* before the watch exists */
    g.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK_INT(dh_gpus_open(&o, g.library, fx_root, NULL, 0, g.wake_fd, fd, &g.w), 0);
    close(fd);
    CHECK(reader != g.w);
    CHECK_INT(dh_gpus_start(g.w), 0);
    g.cap = cap;
    g.head = aligned_alloc(8, cap);
    gx_ready(&g, 2);
    EVENTUALLY(dh_gpus_read(reader, copy, cap) > 0 && copy->gpus == 2);
    EVENTUALLY(dh_gpus_read(reader, copy, cap) > 0 &&
               ((const struct dh_gpu *)(const void *)(copy + 1))[1].value[DH_GPU_TEMP] == 71);
    CHECK_INT(dh_gpus_stop(g.w, FX_PATIENCE_NS), 0);
    CHECK(dh_gpus_read(reader, copy, cap) > 0); /* the last records stay readable */
    CHECK_U64(copy->wait_period_ns, DH_EVENT_WAIT_OWN_PROCESS_NS);
    dh_gpus_detach(reader);
    free(copy);
    gx_free(&g);
}

static void test_impossible_count_is_an_error(void)
{
    int fd = memory_make(dh_gpus_memory_size(), F_SEAL_SHRINK);
    const size_t bytes = dh_gpus_memory_size();
    struct dh_gpu_watch *reader, *writer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uint64_t *copy = aligned_alloc(8, dh_gpus_size(NULL));

    fx_must(writer != MAP_FAILED && copy, "mmap");
    CHECK_INT(dh_gpus_attach(fd, &reader), 0);
    atomic_store(&writer->head_seq.seq, 2);
    atomic_store(&writer->wait_seq.seq, 2);
    CHECK(dh_gpus_read(reader, copy, dh_gpus_size(NULL)) > 0);
    atomic_store(&writer->gpus, DH_GPU_MAX + 1);
    CHECK_INT(dh_gpus_read(reader, copy, dh_gpus_size(NULL)), -EBADMSG);
    atomic_store(&writer->gpus, 0);
    atomic_store(&writer->head_seq.seq, 3); /* a writer that was killed in the middle */
    CHECK_INT(dh_gpus_read(reader, copy, dh_gpus_size(NULL)), DH_ETORN);
    munmap(writer, bytes);
    dh_gpus_detach(reader);
    free(copy);
    close(fd);
}

static void test_memory_that_can_shrink_or_has_another_size_is_refused(void)
{
    int fd = memory_make(dh_gpus_memory_size(), F_SEAL_GROW), small = memory_make(4096, F_SEAL_SHRINK);
    int large = memory_make(dh_gpus_memory_size() + 4096, F_SEAL_SHRINK); /* of an agent of another build */
    struct dh_gpu_watch *reader;

    CHECK_INT(dh_gpus_attach(fd, &reader), -EINVAL);
    CHECK_INT(dh_gpus_attach(small, &reader), -EINVAL);
    CHECK_INT(dh_gpus_attach(large, &reader), -EINVAL);
    CHECK_INT(dh_gpus_attach(-1, &reader), -EBADF);
    close(fd);
    close(small);
    close(large);
}

/* In a child: 0 if it has what dh_confine() promises, under a lower limit of an ordinary user if @is_limited. */
static int confined(int parent, bool is_limited)
{
    uint64_t memory_bytes = is_limited ? MEMORY_BYTES / 2 : MEMORY_BYTES;
    struct rlimit memory = { .rlim_cur = memory_bytes, .rlim_max = memory_bytes };

    if (is_limited && (setrlimit(RLIMIT_DATA, &memory) || (!geteuid() && setresuid(65534, 65534, 65534))))
        return 7;
    if (dh_confine(parent, MEMORY_BYTES))
        return 1;
    if (getrlimit(RLIMIT_DATA, &memory) || memory.rlim_max != memory_bytes)
        return 2;
    if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1)
        return 3;
    if (prctl(PR_CAPBSET_READ, 0, 0, 0, 0) == 1 && !geteuid())
        return 4;
    if (kill(getpid(), SIGTERM) || kill(getpid(), SIGINT) || kill(getpid(), SIGHUP))
        return 5;
    return dh_confine(parent + 1, MEMORY_BYTES) == -ESRCH ? 0 : 6;
}

static void test_confined_process_loses_privileges_and_ends_with_its_parent(bool is_limited)
{
    pid_t parent = getpid(), child = fork();
    int status = 0;

    if (!child)
        _exit(confined(parent, is_limited));
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status), 0);
}

int main(void)
{
    fx_begin();
    test_confined_process_loses_privileges_and_ends_with_its_parent(false);
    test_confined_process_loses_privileges_and_ends_with_its_parent(true);
    test_attached_reader_copies_what_the_watch_publishes();
    test_impossible_count_is_an_error();
    test_memory_that_can_shrink_or_has_another_size_is_refused();
    return check_done("test_thread_gpu_shared");
}

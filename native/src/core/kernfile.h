/*
 * kernfile.h - reads small files and lists directories of kernel file systems.
 *
 * Threads: any; nothing is allocated, and no state is kept.
 * Blocks: as long as the kernel does.
 */
#ifndef DH_KERNFILE_H
#define DH_KERNFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * dh_is_absence() - return whether an errno means that the file does not exist, rather than that it cannot be
 * read.
 */
bool dh_is_absence(int err);

/*
 * dh_is_own_failure() - return whether an errno means that this process, or the machine, has no descriptors or
 * memory left. Such an error shows nothing about the file, not even that it exists.
 */
bool dh_is_own_failure(int err);

/* dh_open_file_bytes() - return the kernel memory of an open file that was read. */
size_t dh_open_file_bytes(void);

/*
 * dh_fd_read() - read an open file once, from its start.
 * @buf, @reads: as for dh_file_read()
 *
 * Return: as dh_file_read().
 */
int64_t dh_fd_read(int fd, char *buf, size_t cap, uint64_t *reads);

/*
 * dh_file_read() - open a file, read it once, and close it.
 * @dir_fd: directory of the relative @path
 * @buf:    @cap bytes; gets no NUL
 * @reads:  incremented for the read(2)
 *
 * Return: bytes read; -errno; -EFBIG for a text that fills @cap: a cut text could parse as another value.
 */
int64_t dh_file_read(int dir_fd, const char *path, char *buf, size_t cap, uint64_t *reads);

/*
 * dh_file_read_all() - read a file to its end, as dh_file_read(). Needed for files of rows, of which the
 * kernel may return one page per read(2).
 */
int64_t dh_file_read_all(int dir_fd, const char *path, char *buf, size_t cap, uint64_t *reads);

/*
 * dh_dir_list() - call @each for every entry of a directory except "." and "..".
 * @each: receives @arg, and the name with its length
 *
 * Return: 0 or -errno, possibly after some entries.
 */
int dh_dir_list(int dir_fd, const char *path, void (*each)(void *arg, const char *name, size_t len),
                void *arg);

#endif

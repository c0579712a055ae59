/*
 * kernfile.h - small files of the kernel, opened, read and closed; and what a directory holds.
 *
 * Nothing is allocated and no state is kept, so each may be called from any thread. Each may hang for as long
 * as the kernel does.
 */
#ifndef DH_KERNFILE_H
#define DH_KERNFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* dh_is_absence() - whether an errno says that there is no such thing, and not that it cannot be read. */
bool dh_is_absence(int err);

/*
 * dh_file_read() - open, read once, close.
 * @dir_fd: @path is relative to it
 * @buf:    @cap bytes; gets no NUL
 * @reads:  counts the read(2), if it comes to that
 *
 * Return: bytes read; -errno; -EFBIG for a text that fills @cap: cut, it would parse as another.
 */
int64_t dh_file_read(int dir_fd, const char *path, char *buf, size_t cap, uint64_t *reads);

/*
 * dh_file_read_all() - as dh_file_read(), but to the end: of a file in rows the kernel may give out a page
 * per read(2).
 */
int64_t dh_file_read_all(int dir_fd, const char *path, char *buf, size_t cap, uint64_t *reads);

/*
 * dh_dir_list() - call @each for every entry of a directory but "." and "..".
 * @each: gets @arg, and the name with its length
 *
 * Return: 0 or -errno, then perhaps after some of the entries.
 */
int dh_dir_list(int dir_fd, const char *path, void (*each)(void *arg, const char *name, size_t len),
                void *arg);

#endif

/*
 * text.h - parsers for small files of the kernel, and for cgroup names of the kubelet and of runtimes.
 *
 * Every function accepts any bytes of any length, reads nothing behind s + n, and needs no terminating NUL.
 * None allocates, blocks, depends on the locale or keeps state, so each may be called from any thread. On
 * failure the output is unchanged, unless documented otherwise. Callers open and read the files, and
 * interpret the values.
 */
#ifndef DH_TEXT_H
#define DH_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "drahealth.h"

/*
 * dh_text_u64() - parse a file with one number: "512\n", "max\n".
 * @s, @n: the text; a single newline at its end may be missing
 * @out:   the number; "max" is UINT64_MAX
 *
 * Return: 0; DH_EPARSE for any other text: empty, a sign, a space, a second line, a NUL, a number above
 *         2^64-1.
 */
int dh_text_u64(const char *s, size_t n, uint64_t *out);

/*
 * dh_text_limit() - normalize a limit in bytes: a value that stands for "no limit" becomes UINT64_MAX.
 * @value: from memory.limit_in_bytes, memory.max or any of hugetlb.<size>.{max,rsvd.max,limit_in_bytes}
 *
 * Without a limit a page counter holds PAGE_COUNTER_MAX, LONG_MAX / PAGE_SIZE pages on a 64-bit kernel
 * (include/linux/page_counter.h). A file that does not print "max" prints the product: 2^63 - 4096 with pages
 * of 4 KiB, 2^63 - 65536 with 64 KiB. hugetlb rounds it down to its own page size, at most 16 GiB on arm64
 * and ppc64 (mm/hugetlb_cgroup.c), and prints "max" for exactly that number: on kernels that leave a new
 * group unrounded, such as 6.18, hugetlb.<size>.max is a number too.
 *
 * Return: UINT64_MAX from 2^63 - 2^34 up, else @value.
 */
uint64_t dh_text_limit(uint64_t value);

/*
 * dh_text_quota() - parse cgroup v1's cpu.cfs_quota_us: "150000\n", "-1\n".
 * @s, @n: the text; the newline at its end may be missing
 * @us:    the quota [us]; -1, no limit, is UINT64_MAX
 *
 * Return: 0; DH_EPARSE for any other text.
 */
int dh_text_quota(const char *s, size_t n, uint64_t *us);

/*
 * dh_text_cpu_max() - parse cgroup v2's cpu.max: "150000 100000\n", "max 100000\n".
 * @s, @n:     the text; the newline is required, because a cut text could be another value
 * @quota_us:  "max" is UINT64_MAX
 * @period_us: period of the quota
 *
 * Return: 0; DH_EPARSE for any other text.
 */
int dh_text_cpu_max(const char *s, size_t n, uint64_t *quota_us, uint64_t *period_us);

/*
 * dh_text_cpus() - parse a CPU list: "0-3,8\n". An empty text, or a newline alone, is the empty set.
 * @s, @n: the text; the newline at its end may be missing
 * @words: the whole set, CPU c is bit c % 64 of words[c / 64]
 *
 * The list has the kernel's format ("%*pbl"): in ascending order, no CPU twice, no spaces.
 *
 * Return: 0; DH_EPARSE for any other text, or a CPU of 64 * DH_CPU_WORDS or above.
 */
int dh_text_cpus(const char *s, size_t n, uint64_t words[DH_CPU_WORDS]);

/* A key for dh_text_keys(): the caller sets @key and @len, the function sets @value and @found. */
struct dh_text_key {
    const char *key; /* @len bytes, borrowed; no NUL needed */
    uint32_t len;
    uint64_t value;  /* 0 unless found */
    int found;       /* 1 or 0 */
};

/*
 * dh_text_keys() - extract numbers from a flat keyed file: "nr_periods 30\nnr_throttled 3\n".
 * @s, @n: the text
 * @keys:  @nkeys entries; @value and @found of each are written, on failure with 0
 *
 * Reads the text once, up to the line with the last wanted key. Fastest if @keys are in the file's order. The
 * first of two lines with the same key counts. A last line without a newline is an incomplete read, and an
 * error.
 *
 * Return: number of keys found; DH_EPARSE if a line that was read is not "key value", or a wanted value is no
 *         number below 2^64.
 */
int dh_text_keys(const char *s, size_t n, struct dh_text_key *keys, uint32_t nkeys);

/*
 * dh_text_pressure() - parse waiting times: "some avg10=0.61 ... total=158974\nfull avg10=...\n".
 * @s, @n: the text of /proc/pressure/{cpu,memory,io}
 * @us:    [0] of "some", [1] of "full" [us]; both are written, 0 for a missing line
 *
 * The averages are ignored: the reader keeps a window of its own over the totals. Before Linux 5.13 cpu has
 * no line "full".
 *
 * Return: number of lines, 1 or 2; DH_EPARSE for any other text.
 */
int dh_text_pressure(const char *s, size_t n, uint64_t us[2]);

/*
 * dh_text_kib() - parse a row of a meminfo: "MemTotal:       32614536 kB\n".
 * @s, @n: /proc/meminfo, or the meminfo of a NUMA node with "Node 0 " before each key
 * @key:   the key, without its colon
 * @kib:   the number
 *
 * Return: 0; -ENOENT without such a row; DH_EPARSE if the first such row is cut, or has no number of kB.
 */
int dh_text_kib(const char *s, size_t n, const char *key, uint64_t *kib);

/*
 * dh_text_numbered() - parse the number in a numbered name: 12 in "cpu12".
 * @name, @n: the name
 * @prefix:   the text before the number: "cpu"
 *
 * Return: 0; -ENOENT for any other name. The kernel writes no leading zeros, so "cpu012" is another name.
 */
int dh_text_numbered(const char *name, size_t n, const char *prefix, uint32_t *number);

/*
 * dh_text_hugepage_dir() - parse the page size in the name of a sysfs directory: "hugepages-2048kB".
 * @name, @n: the name
 * @kib:      the size in KiB, at least 1
 *
 * Return: 0; -ENOENT for any other name.
 */
int dh_text_hugepage_dir(const char *name, size_t n, uint64_t *kib);

/*
 * dh_text_hugetlb() - format a page size as in names of cgroup files: 64 "64KB", 2048 "2MB", 16777216 "16GB".
 * @kib: the size in KiB
 * @out: @cap bytes; receives the text and a NUL
 *
 * Whole units of the largest unit that fits, as mem_fmt() in the kernel's mm/hugetlb_cgroup.c.
 *
 * Return: length without the NUL; -ENOSPC if @cap is too small; 32 bytes always suffice.
 */
int dh_text_hugetlb(uint64_t kib, char *out, size_t cap);

/*
 * dh_text_pod() - parse the pod's uid in the name of its cgroup.
 * @name, @n: the last component of the path
 * @uid:      NUL-padded, at most DH_UID_LEN - 1 characters of [0-9a-zA-Z-]
 *
 * The cgroupfs driver writes "pod<uid>", the systemd driver "kubepods-pod<uid>.slice",
 * "kubepods-burstable-pod<uid>.slice" and "kubepods-besteffort-pod<uid>.slice" with "_" for "-", after the
 * names of a --cgroup-root: "kubelet-kubepods-pod<uid>.slice". A static pod's uid is a hash of 32 hex digits
 * without dashes.
 *
 * Return: 0; -ENOENT for any other name.
 */
int dh_text_pod(const char *name, size_t n, char uid[DH_UID_LEN]);

/*
 * dh_text_container() - parse the container's id in the name of a cgroup directly below a pod's.
 * @name, @n: the last component of the path
 * @id:       NUL-padded, at most 64 characters
 *
 * With all current runtimes an id has 64 hex digits, alone ("<id>", cgroupfs) or after a prefix ("crio-<id>";
 * "cri-containerd-<id>.scope", systemd). In names that cannot mean anything else (the id alone, or after
 * "cri-containerd-", "crio-" or "docker-" in a .scope) 12 to 64 characters of [0-9a-zA-Z-] are accepted.
 * "crio-conmon-<id>" and "libpod-conmon-<id>" hold the runtime's monitor and no container. Names of cgroup
 * files are no ids: they contain a "." or "_", or are shorter.
 *
 * Return: 0; -ENOENT for any other name.
 */
int dh_text_container(const char *name, size_t n, char id[DH_NAME_LEN]);

/*
 * dh_text_digest() - return a number that differs for different texts, never 0. Two texts of which one is a
 * later one of the same file have the same digest with a chance of 2^-64.
 */
uint64_t dh_text_digest(const char *text, size_t n);

#endif

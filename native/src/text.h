/*
 * text.h - what the kernel writes into small files, and how the kubelet and the runtimes name cgroups.
 *
 * Every function is total: it takes any bytes of any length, reads nothing behind s + n, and needs no
 * terminating NUL. None allocates, blocks, looks at the locale or keeps state, so each may be called
 * from any thread. What a function gives back through a pointer is untouched when it fails, unless it
 * says otherwise. Opening and reading the files is the callers' work, and so is what a value means.
 */
#ifndef DH_TEXT_H
#define DH_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "drahealth.h"

/*
 * dh_text_u64() - a file that holds one number: "512\n", "max\n".
 * @s, @n: the text; a single newline at its end may be missing
 * @out:   the number; "max" is UINT64_MAX
 *
 * Return: 0; DH_EPARSE for anything else: nothing at all, a sign, a space, a second line, a NUL, a
 *         number above 2^64-1.
 */
int dh_text_u64(const char *s, size_t n, uint64_t *out);

/*
 * dh_text_limit() - a limit in bytes as the kernel means it: "as good as none" is none.
 * @value: from memory.limit_in_bytes, memory.max or any of hugetlb.<size>.{max,rsvd.max,limit_in_bytes}
 *
 * Without a limit a page counter stands at PAGE_COUNTER_MAX, LONG_MAX / PAGE_SIZE pages on a 64-bit
 * kernel (include/linux/page_counter.h). A file that does not say "max" shows it multiplied out:
 * 2^63 - 4096 with pages of 4 KiB, 2^63 - 65536 with 64 KiB. hugetlb rounds it down to its own page
 * size, at most 16 GiB on arm64 and ppc64 (mm/hugetlb_cgroup.c), and says "max" for that number alone:
 * on kernels that leave a fresh group unrounded, 6.18 for one, hugetlb.<size>.max is a number too.
 *
 * Return: UINT64_MAX from 2^63 - 2^34 up, else @value.
 */
uint64_t dh_text_limit(uint64_t value);

/*
 * dh_text_quota() - cgroup v1's cpu.cfs_quota_us: "150000\n", "-1\n".
 * @s, @n: the text; the newline at its end may be missing
 * @us:    the quota [us]; -1, no limit, is UINT64_MAX
 *
 * Return: 0; DH_EPARSE for anything else.
 */
int dh_text_quota(const char *s, size_t n, uint64_t *us);

/*
 * dh_text_cpu_max() - cgroup v2's cpu.max: "150000 100000\n", "max 100000\n".
 * @s, @n:     the text; cut before its newline it could be another, so there must be one
 * @quota_us:  "max" is UINT64_MAX
 * @period_us: that the quota is for
 *
 * Return: 0; DH_EPARSE for anything else.
 */
int dh_text_cpu_max(const char *s, size_t n, uint64_t *quota_us, uint64_t *period_us);

/*
 * dh_text_cpus() - a CPU list: "0-3,8\n"; empty, or a newline alone, is the empty set.
 * @s, @n:  the text; the newline at its end may be missing
 * @words:  the whole set, CPU c is bit c % 64 of words[c / 64]
 *
 * As the kernel prints it ("%*pbl"): in ascending order, no CPU twice, no spaces.
 *
 * Return: 0; DH_EPARSE for any other text, or a CPU of 64 * DH_CPU_WORDS or above.
 */
int dh_text_cpus(const char *s, size_t n, uint64_t words[DH_CPU_WORDS]);

/* One key that dh_text_keys() looks for: the caller's @key and @len, the answer in the others. */
struct dh_text_key {
    const char *key; /* @len bytes, borrowed; no NUL needed */
    uint32_t len;
    uint64_t value;  /* 0 unless found */
    int found;       /* 1 or 0 */
};

/*
 * dh_text_keys() - pick numbers out of a flat keyed file: "nr_periods 30\nnr_throttled 3\n".
 * @s, @n:  the text
 * @keys:   @nkeys entries; @value and @found of each are written, on failure with 0
 *
 * Reads the text once, up to the line in which the last wanted key is found. Fastest if @keys are in
 * the file's order. Of two lines with one key the first counts. A last line without a newline is a
 * torn read, and broken.
 *
 * Return: how many keys were found; DH_EPARSE if a line that was read is not "key value" or the value
 *         of a wanted key is not a number below 2^64.
 */
int dh_text_keys(const char *s, size_t n, struct dh_text_key *keys, uint32_t nkeys);

/*
 * dh_text_pressure() - how long tasks have waited: "some avg10=0.61 ... total=158974\nfull avg10=...\n".
 * @s, @n: the text of /proc/pressure/{cpu,memory,io}
 * @us:    [0] of "some", [1] of "full" [us]; both are written, 0 for a line that is not there
 *
 * The averages are passed over: a window of one's own over the totals says more. Before Linux 5.13 cpu has
 * no line "full".
 *
 * Return: how many lines there are, 1 or 2; DH_EPARSE for any other text.
 */
int dh_text_pressure(const char *s, size_t n, uint64_t us[2]);

/*
 * dh_text_kib() - a row of a meminfo: "MemTotal:       32614536 kB\n".
 * @s, @n: /proc/meminfo, or that of a NUMA node, where "Node 0 " stands before each key
 * @key:   the key, without its colon
 * @kib:   the number behind it
 *
 * Return: 0; -ENOENT if there is no such row; DH_EPARSE if the first such is cut, or has no number of kB.
 */
int dh_text_kib(const char *s, size_t n, const char *key, uint64_t *kib);

/*
 * dh_text_numbered() - the number in the name of a thing of which there are several: 12 in "cpu12".
 * @name, @n: the name
 * @prefix:   what stands before the number: "cpu"
 *
 * Return: 0; -ENOENT if it is no such name; the kernel writes no zeros in front, so "cpu012" is none.
 */
int dh_text_numbered(const char *name, size_t n, const char *prefix, uint32_t *number);

/*
 * dh_text_hugepage_dir() - the page size in the name of a sysfs directory: "hugepages-2048kB".
 * @name, @n: the name
 * @kib:      the size in KiB, at least 1
 *
 * Return: 0; -ENOENT if it is no such name.
 */
int dh_text_hugepage_dir(const char *name, size_t n, uint64_t *kib);

/*
 * dh_text_hugetlb() - a page size as cgroup files spell it: 64 "64KB", 2048 "2MB", 16777216 "16GB".
 * @kib: the size in KiB
 * @out: @cap bytes; gets the text and a NUL
 *
 * The whole units of the largest that fits, as mem_fmt() in the kernel's mm/hugetlb_cgroup.c.
 *
 * Return: the length without the NUL; -ENOSPC if @cap is too small, 32 never is.
 */
int dh_text_hugetlb(uint64_t kib, char *out, size_t cap);

/*
 * dh_text_pod() - the pod's uid in the name of its cgroup.
 * @name, @n: the last component of the path
 * @uid:      NUL-padded, at most DH_UID_LEN - 1 characters of [0-9a-zA-Z-]
 *
 * The cgroupfs driver's "pod<uid>", and the systemd driver's "kubepods-pod<uid>.slice",
 * "kubepods-burstable-pod<uid>.slice" and "kubepods-besteffort-pod<uid>.slice", where "_" stands for
 * "-" and the names of a --cgroup-root come first: "kubelet-kubepods-pod<uid>.slice". A static pod's
 * uid is a hash of 32 hex digits without dashes.
 *
 * Return: 0; -ENOENT if it is no such name.
 */
int dh_text_pod(const char *name, size_t n, char uid[DH_UID_LEN]);

/*
 * dh_text_container() - the container's id in the name of a cgroup directly below a pod's.
 * @name, @n: the last component of the path
 * @id:       NUL-padded, at most 64 characters
 *
 * An id is 64 hex digits with every runtime of today. It stands alone ("<id>", cgroupfs) or behind a
 * prefix ("crio-<id>"; "cri-containerd-<id>.scope" and its like, systemd). Where nothing but a container
 * can be meant (alone, or behind "cri-containerd-", "crio-" or "docker-" in a .scope) 12 to 64 characters
 * of [0-9a-zA-Z-] will do. In "crio-conmon-<id>" and "libpod-conmon-<id>" runs the runtime's monitor, no
 * container. The files of a cgroup are no ids: all have a "." or "_" in their name, or are shorter.
 *
 * Return: 0; -ENOENT if it is no such name.
 */
int dh_text_container(const char *name, size_t n, char id[DH_NAME_LEN]);

#endif

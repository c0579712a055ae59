/*
 * interrupts.h - parses one row of /proc/interrupts, fed in pieces.
 *
 * With hundreds of CPUs the file has megabytes and its lines exceed any sensible buffer; so only the header
 * and the wanted row are parsed, byte by byte, and other lines are skipped. No I/O.
 */
#ifndef DH_INTERRUPTS_H
#define DH_INTERRUPTS_H

#include <stddef.h>
#include <stdint.h>

#include "drahealth.h"

struct dh_interrupts {
    const char *label; /* label of the wanted row, with its colon: "MCE:" */
    int state;
    uint32_t columns;   /* columns of the header */
    uint32_t counts;    /* counts of the wanted row so far */
    uint32_t token_len; /* bytes in token, of a word that has not ended */
    char token[24];     /* 2^64 has 20 digits */
    char last;          /* last byte that was fed */
    uint16_t cpu[DH_CORE_MAX];
    uint64_t count[DH_CORE_MAX]; /* of cpu[i] */
};

/* dh_interrupts_begin() - start before the first byte of the file. @label is borrowed until the end. */
void dh_interrupts_begin(struct dh_interrupts *r, const char *label);

/*
 * dh_interrupts_feed() - parse the next @n bytes.
 *
 * Return: 1: the row is complete, and the rest of the file need not be read; 0: more bytes are needed;
 *         DH_EPARSE: the header is malformed, or the row lacks a count for one of its CPUs. A CPU may have
 *         come or gone during the read, so a second read may succeed; or it is another file.
 */
int dh_interrupts_feed(struct dh_interrupts *r, const char *s, size_t n);

/*
 * dh_interrupts_end() - finish after the last byte of a file without such a row.
 *
 * Return: 0; DH_EPARSE if the file was cut short.
 */
int dh_interrupts_end(const struct dh_interrupts *r);

#endif

/*
 * interrupts.h - one row of /proc/interrupts, taken piece by piece.
 *
 * With hundreds of CPUs the file is megabytes and a line of it longer than any sensible buffer; so only its
 * header and the wanted row are looked at, byte by byte, and all else is passed over. No I/O.
 */
#ifndef DH_INTERRUPTS_H
#define DH_INTERRUPTS_H

#include <stddef.h>
#include <stdint.h>

#include "drahealth.h"

struct dh_interrupts {
    const char *label; /* of the wanted row, with its colon: "MCE:" */
    int state;
    uint32_t columns;  /* as the header has them */
    uint32_t counts;   /* of the wanted row, so far */
    uint32_t have;     /* bytes in token: of a word that has not ended */
    char token[24];    /* 2^64 has 20 digits */
    char last;         /* byte that was taken */
    uint16_t cpu[DH_CORE_MAX];
    uint64_t count[DH_CORE_MAX]; /* of cpu[i] */
};

/* dh_interrupts_begin() - before the first byte of the file. @label is borrowed until the end. */
void dh_interrupts_begin(struct dh_interrupts *r, const char *label);

/*
 * dh_interrupts_take() - the next @n bytes.
 *
 * Return: 1, the row is whole, and the rest of the file need not be read; 0, more is wanted; DH_EPARSE: the
 *         header is none, or the row has not one count for each of its CPUs. A CPU came or went while the
 *         file was read, and to read it anew helps; or it is no such file.
 */
int dh_interrupts_take(struct dh_interrupts *r, const char *s, size_t n);

/* dh_interrupts_end() - after the last byte of a file without such a row. Return: 0; DH_EPARSE, cut short. */
int dh_interrupts_end(const struct dh_interrupts *r);

#endif

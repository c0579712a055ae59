/*
 * nvml_load.h - NVML's functions, found at run time.
 *
 * The library is the driver's: of any age, absent on most machines, replaced under our feet when the driver
 * is upgraded. So it is loaded with dlopen(3). What an older one lacks is a NULL in the table and no error.
 */
#ifndef DH_NVML_LOAD_H
#define DH_NVML_LOAD_H

#include <stdbool.h>
#include <stddef.h>

#include "nvml.h"

struct dh_nvml {
    void *library; /* dlopen(3)'s; NULL while it is not loaded */
#define DH_NVML_POINTER(result, name, parameters) result(*name) parameters;
    NVML_FUNCTIONS(DH_NVML_POINTER)
#undef DH_NVML_POINTER
};

/*
 * dh_nvml_load() - load the library and look up all functions.
 * @path: name or path for dlopen(3)
 * @why:  @cap bytes; what failed, in words
 *
 * Return: 0; -ENOENT: there is no such library; -ELIBBAD: it cannot be loaded, or lacks a function without
 *         which nothing can be read.
 * Blocks: as the file system does, and as the library's constructors do.
 */
int dh_nvml_load(struct dh_nvml *n, const char *path, char *why, size_t cap);

/* dh_nvml_unload() - the contrary. Nobody may be inside a function. */
void dh_nvml_unload(struct dh_nvml *n);

/* dh_nvml_decode() - the number in one answer of nvmlDeviceGetFieldValues; false if its type is not known. */
bool dh_nvml_decode(const nvmlFieldValue_t *answer, uint64_t *value);

#endif

/*
 * nvml_load.h - NVML's functions, resolved at run time.
 *
 * The library belongs to the driver: it may be of any age, is absent on most machines, and is replaced while
 * the agent runs when the driver is upgraded. So it is loaded with dlopen(3). A function that an older
 * library lacks is NULL in the table, which is no error.
 */
#ifndef DH_NVML_LOAD_H
#define DH_NVML_LOAD_H

#include <stdbool.h>
#include <stddef.h>

#include "gpu/nvml.h"

struct dh_nvml {
    void *library; /* handle of dlopen(3); NULL while the library is not loaded */
#define DH_NVML_POINTER(result, name, parameters) result(*name) parameters;
    NVML_FUNCTIONS(DH_NVML_POINTER)
#undef DH_NVML_POINTER
};

/*
 * dh_nvml_load() - load the library and look up all functions.
 * @path:     name or path for dlopen(3)
 * @err_text: @cap bytes; text of the failure
 *
 * Return: 0; -ENOENT: the library does not exist; -ELIBBAD: it cannot be loaded, or lacks a required
 *         function.
 * Blocks: as the file system does, and as the library's constructors do.
 */
int dh_nvml_load(struct dh_nvml *n, const char *path, char *err_text, size_t cap);

/* dh_nvml_unload() - unload the library. No thread may be inside a function. */
void dh_nvml_unload(struct dh_nvml *n);

/*
 * dh_nvml_decode() - extract the number from one result of nvmlDeviceGetFieldValues. Return: false for an
 * unknown type.
 */
bool dh_nvml_decode(const nvmlFieldValue_t *answer, uint64_t *value);

#endif

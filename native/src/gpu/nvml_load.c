/* nvml_load.c - loads NVML, resolves its functions, and decodes numbers. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpu/nvml_load.h"

struct symbol {
    const char *name;
    size_t offset; /* offset in struct dh_nvml */
};

#define SYMBOL(result, function, parameters) { #function, offsetof(struct dh_nvml, function) },
static const struct symbol symbols[] = { NVML_FUNCTIONS(SYMBOL) };
#undef SYMBOL

/* Older names of functions with the same parameters; the older event names no instance. */
static const struct {
    size_t offset;
    const char *name;
} older[] = {
    { offsetof(struct dh_nvml, nvmlInit_v2), "nvmlInit" },
    { offsetof(struct dh_nvml, nvmlDeviceGetCount_v2), "nvmlDeviceGetCount" },
    { offsetof(struct dh_nvml, nvmlDeviceGetHandleByIndex_v2), "nvmlDeviceGetHandleByIndex" },
    { offsetof(struct dh_nvml, nvmlDeviceGetHandleByPciBusId_v2), "nvmlDeviceGetHandleByPciBusId" },
    { offsetof(struct dh_nvml, nvmlDeviceGetCurrentClocksEventReasons),
      "nvmlDeviceGetCurrentClocksThrottleReasons" },
    { offsetof(struct dh_nvml, nvmlEventSetWait_v2), "nvmlEventSetWait" },
};

/* Functions without which nothing can be read. */
static const size_t required[] = {
    offsetof(struct dh_nvml, nvmlInit_v2),
    offsetof(struct dh_nvml, nvmlShutdown),
    offsetof(struct dh_nvml, nvmlDeviceGetCount_v2),
    offsetof(struct dh_nvml, nvmlDeviceGetHandleByIndex_v2),
};

static void *symbol_get(const struct dh_nvml *n, size_t offset)
{
    void *p;

    memcpy(&p, (const char *)n + offset, sizeof(p));
    return p;
}

/* memcpy(3): ISO C has no cast from object pointers to function pointers. */
static void symbol_find(struct dh_nvml *n, size_t offset, const char *name)
{
    void *p = dlsym(n->library, name);

    memcpy((char *)n + offset, &p, sizeof(p));
}

static const char *symbol_name(size_t offset)
{
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++)
        if (symbols[i].offset == offset)
            return symbols[i].name;
    return "";
}

/*
 * Whether dlopen(3) failed because @path does not exist. It has no error code, only a text: "NAME: cannot
 * open shared object file: No such file ...". If a dependency of the library is missing, NAME is the
 * dependency. The text is the same for an existing file of another architecture, which the loader skips.
 */
static bool is_absence(const char *path, const char *text)
{
    return !strncmp(text, path, strlen(path)) && strstr(text, strerror(ENOENT));
}

static bool is_other_architecture(const char *path)
{
    return strchr(path, '/') && !access(path, F_OK);
}

int dh_nvml_load(struct dh_nvml *n, const char *path, char *err_text, size_t cap)
{
    const char *text;

    *err_text = '\0';
    n->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!n->library) {
        text = dlerror();
        snprintf(err_text, cap, "%s", text ? text : path);
        if (!is_absence(path, err_text))
            return -ELIBBAD;
        if (!is_other_architecture(path))
            return -ENOENT;
        snprintf(err_text, cap, "%s: not a library of this architecture", path);
        return -ELIBBAD;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++)
        symbol_find(n, symbols[i].offset, symbols[i].name);
    for (size_t i = 0; i < sizeof(older) / sizeof(*older); i++)
        if (!symbol_get(n, older[i].offset))
            symbol_find(n, older[i].offset, older[i].name);
    for (size_t i = 0; i < sizeof(required) / sizeof(*required); i++) {
        if (symbol_get(n, required[i]))
            continue;
        snprintf(err_text, cap, "%s: no function %s", path, symbol_name(required[i]));
        dh_nvml_unload(n);
        return -ELIBBAD;
    }
    return 0;
}

void dh_nvml_unload(struct dh_nvml *n)
{
    if (n->library)
        dlclose(n->library);
    *n = (struct dh_nvml){ 0 };
}

bool dh_nvml_decode(const nvmlFieldValue_t *answer, uint64_t *value)
{
    const nvmlValue_t *v = &answer->value;

    switch (answer->valueType) {
    case NVML_VALUE_TYPE_DOUBLE:
        if (!(v->dVal > -9e18 && v->dVal < 9e18)) /* also rejects NaN */
            return false;
        *value = (uint64_t)(int64_t)v->dVal;
        return true;
    case NVML_VALUE_TYPE_UNSIGNED_INT:
        *value = v->uiVal;
        return true;
    case NVML_VALUE_TYPE_UNSIGNED_LONG:
        *value = v->ulVal;
        return true;
    case NVML_VALUE_TYPE_UNSIGNED_LONG_LONG:
        *value = v->ullVal;
        return true;
    case NVML_VALUE_TYPE_SIGNED_LONG_LONG:
        *value = (uint64_t)v->sllVal;
        return true;
    case NVML_VALUE_TYPE_SIGNED_INT:
        *value = (uint64_t)(int64_t)v->siVal;
        return true;
    case NVML_VALUE_TYPE_UNSIGNED_SHORT:
        *value = v->usVal;
        return true;
    }
    return false;
}

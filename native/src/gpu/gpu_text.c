/* gpu_text.c - texts that the library wrote, bounded and terminated. */
#include <string.h>

#include "gpu/gpus.h"

/*
 * dh_text_keep() - copy a text, cut to @cap bytes with its end, and padded with zeros, so that equal records
 * have equal bytes. A byte that is not printable ASCII ends the text: the library did not write it on purpose.
 *
 * Return: whether the text is not empty.
 */
bool dh_text_keep(char *to, size_t cap, const struct dh_text *text)
{
    size_t n = 0;

    while (n < cap - 1 && text->bytes[n] >= ' ' && text->bytes[n] <= '~')
        n++;
    memset(to, 0, cap);
    memcpy(to, text->bytes, n);
    return n > 0;
}

#define UUID_CHARS 40 /* GPU- and 36 characters */

/*
 * dh_uuid_keep() - copy a UUID. What follows the 40 characters of a GPU's UUID is no part of it: without the
 * end of the text, the bytes after it differ from call to call, and each would look like another GPU.
 *
 * Return: whether the UUID is not empty.
 */
bool dh_uuid_keep(char to[DH_UUID_LEN], const struct dh_text *text)
{
    bool found = dh_text_keep(to, DH_UUID_LEN, text);

    if (!strncmp(to, "GPU-", 4) || (!strncmp(to, "MIG-", 4) && strncmp(to, "MIG-GPU-", 8) != 0))
        memset(to + UUID_CHARS, 0, DH_UUID_LEN - UUID_CHARS);
    return found;
}

/*
 * encode.c - encodes the health list as protobuf; drahealth.h documents dh_health_encode().
 *
 *   NodeWatchResourcesResponse { repeated DeviceHealth devices = 1; }
 *   DeviceHealth               { DeviceIdentifier device = 1; HealthStatus health = 2;
 *                                int64 last_updated_time = 3; int64 health_check_timeout_seconds = 4;
 *                                string message = 5; }
 *   DeviceIdentifier           { string pool_name = 1; string device_name = 2; }
 *
 * The encoding is canonical: fields in order, shortest varints, no default values. Each nested length is
 * computed before it is written, so that a device is written completely or not at all.
 */
#include "drahealth.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

/* A field's tag, one byte for fields below 16. */
#define VARINT(field) ((field) << 3)
#define BYTES(field) ((field) << 3 | 2)

/* The lengths of one device's parts: sums of three 32-bit lengths and a few bytes, far below 2^64. */
struct lengths {
    uint64_t id;     /* DeviceIdentifier */
    uint64_t device; /* DeviceHealth */
    uint64_t entry;  /* with tag and length, as an element of the list */
};

/* Seven bits per byte, at least one byte: (bits + 6) / 7 without a division. */
static unsigned int varint_length(uint64_t value)
{
    unsigned int bits = 64 - (unsigned int)__builtin_clzll(value | 1);

    return (bits * 9 + 64) / 64;
}

/* A proto3 field with its default value, 0 or empty, is not written. */
static uint64_t varint_field_length(uint64_t value)
{
    return value == 0 ? 0 : 1 + varint_length(value);
}

static uint64_t text_field_length(uint64_t len)
{
    return len == 0 ? 0 : 1 + varint_length(len) + len;
}

static struct lengths measure(const struct dh_health *h)
{
    struct lengths l;

    l.id = text_field_length(h->pool_len) + text_field_length(h->device_len);
    l.device = 1 + varint_length(l.id) + l.id + varint_field_length((uint64_t)h->health) +
               varint_field_length((uint64_t)h->last_updated_s) +
               varint_field_length((uint64_t)h->timeout_s) + text_field_length(h->message_len);
    l.entry = 1 + varint_length(l.device) + l.device;
    return l;
}

static uint8_t *put_varint(uint8_t *out, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        *out++ = (uint8_t)(value | 0x80);
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *put_varint_field(uint8_t *out, uint8_t tag, uint64_t value)
{
    if (value == 0)
        return out;
    *out++ = tag;
    return put_varint(out, value);
}

static uint8_t *put_text_field(uint8_t *out, uint8_t tag, const uint8_t *text, uint32_t off, uint32_t len)
{
    if (len == 0)
        return out;
    *out++ = tag;
    out = put_varint(out, len);
    memcpy(out, text + off, len);
    return out + len;
}

static uint8_t *put_device(uint8_t *out, const struct dh_health *h, const struct lengths *l,
                           const uint8_t *text)
{
    *out++ = BYTES(1);
    out = put_varint(out, l->device);

    /* written even if empty: an empty submessage is not a default value */
    *out++ = BYTES(1);
    out = put_varint(out, l->id);
    out = put_text_field(out, BYTES(1), text, h->pool_off, h->pool_len);
    out = put_text_field(out, BYTES(2), text, h->device_off, h->device_len);

    /* Negative numbers, also of the enum, are sign-extended to 64 bits and take ten bytes. */
    out = put_varint_field(out, VARINT(2), (uint64_t)h->health);
    out = put_varint_field(out, VARINT(3), (uint64_t)h->last_updated_s);
    out = put_varint_field(out, VARINT(4), (uint64_t)h->timeout_s);
    return put_text_field(out, BYTES(5), text, h->message_off, h->message_len);
}

/* Reads the next number of a column; Python's buffers need not be aligned. */
#define TAKE(from, to) (memcpy(&(to), (from), sizeof(to)), (from) += sizeof(to))

int dh_health_fill(struct dh_health *list, uint32_t n, const uint8_t *columns)
{
    uint64_t end = 0;

    for (uint32_t i = 0; i < n; i++) {
        TAKE(columns, list[i].pool_len);
        list[i].pool_off = (uint32_t)end;
        end += list[i].pool_len;
    }
    for (uint32_t i = 0; i < n; i++) {
        TAKE(columns, list[i].device_len);
        list[i].device_off = (uint32_t)end;
        end += list[i].device_len;
    }
    for (uint32_t i = 0; i < n; i++) {
        TAKE(columns, list[i].message_len);
        list[i].message_off = (uint32_t)end;
        end += list[i].message_len;
    }
    for (uint32_t i = 0; i < n; i++)
        TAKE(columns, list[i].health);
    for (uint32_t i = 0; i < n; i++)
        TAKE(columns, list[i].last_updated_s);
    for (uint32_t i = 0; i < n; i++)
        TAKE(columns, list[i].timeout_s);
    return end > UINT32_MAX ? -EOVERFLOW : 0;
}

static bool inside(uint32_t off, uint32_t len, size_t text_len)
{
    return off <= text_len && len <= text_len - off;
}

int64_t dh_health_encode(const struct dh_health *list, uint32_t n, const uint8_t *text,
                         size_t text_len, uint8_t *out, size_t cap, uint32_t *taken)
{
    size_t used = 0;
    uint32_t i;

    *taken = 0;
    for (i = 0; i < n; i++) {
        const struct dh_health *h = &list[i];
        struct lengths l;

        if (!inside(h->pool_off, h->pool_len, text_len) || !inside(h->device_off, h->device_len, text_len) ||
            !inside(h->message_off, h->message_len, text_len))
            return -EINVAL;
        l = measure(h);
        if (l.entry > cap - used)
            break;
        put_device(out + used, h, &l, text);
        used += (size_t)l.entry;
    }
    if (i == 0 && n > 0)
        return -ENOSPC;
    *taken = i;
    return (int64_t)used;
}

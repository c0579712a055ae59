/*
 * streams.c - sends one gRPC message to many HTTP/2 streams; drahealth.h documents dh_streams_send().
 *
 * A message becomes DATA frames (RFC 9113, 6.1): the header of a frame has the length in 24 bits, type and flags 0,
 * and the stream. The first frame also has the prefix of a gRPC message: an uncompressed message of so many bytes.
 */
#include "drahealth.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define HEAD 9
#define PREFIX 5
/* Frames of the longest message, whose frames have the smallest size that a peer may set. */
#define FRAMES ((DH_STREAM_MESSAGE + PREFIX) / DH_STREAM_FRAME + 1)

static uint8_t *put_u32(uint8_t *out, uint32_t value)
{
    *out++ = (uint8_t)(value >> 24);
    *out++ = (uint8_t)(value >> 16);
    *out++ = (uint8_t)(value >> 8);
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *put_head(uint8_t *out, uint32_t len, uint32_t stream)
{
    *out++ = (uint8_t)(len >> 16);
    *out++ = (uint8_t)(len >> 8);
    *out++ = (uint8_t)len;
    *out++ = 0; /* DATA */
    *out++ = 0; /* no flags */
    return put_u32(out, stream);
}

/* Sends the frames of a message with one system call. Returns the number of bytes that were not sent, or -errno. */
static int64_t send_message(const struct dh_stream *s, const uint8_t *message, uint32_t len)
{
    uint8_t heads[FRAMES][HEAD + PREFIX];
    struct iovec parts[2 * FRAMES];
    struct msghdr all = {.msg_iov = parts};
    uint32_t at = 0, room = s->frame_size, prefix = PREFIX;
    int64_t size = 0;
    ssize_t sent;

    for (uint32_t i = 0; at < len || prefix != 0; i++) {
        uint32_t size_here = len - at < room - prefix ? len - at : room - prefix;
        uint8_t *end = put_head(heads[i], size_here + prefix, s->id);

        if (prefix != 0) {
            *end++ = 0; /* not compressed */
            end = put_u32(end, len);
        }
        parts[all.msg_iovlen++] = (struct iovec){heads[i], (size_t)(end - heads[i])};
        if (size_here != 0)
            parts[all.msg_iovlen++] = (struct iovec){(void *)(message + at), size_here};
        size += (end - heads[i]) + size_here;
        at += size_here;
        prefix = 0;
    }
    sent = sendmsg(s->fd, &all, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 ? -errno : size - sent;
}

uint32_t dh_streams_send(struct dh_stream *streams, uint32_t n, uint32_t group, uint64_t since, uint64_t number,
                         const uint8_t *message, uint32_t len, uint32_t *cut)
{
    uint32_t count = 0;

    *cut = 0;
    if (len > DH_STREAM_MESSAGE)
        return 0;
    for (uint32_t i = 0; i < n; i++) {
        struct dh_stream *s = &streams[i];
        int64_t size = len == 0 ? 0 : (int64_t)len + PREFIX, unsent = 0;

        if (s->group != group || s->number != since || s->unsent != 0 || size > s->room ||
            s->frame_size < DH_STREAM_FRAME)
            continue;
        if (len != 0)
            unsent = send_message(s, message, len);
        if (unsent < 0)
            continue;
        s->unsent = (uint32_t)unsent;
        *cut += unsent != 0;
        s->room -= size;
        s->sent += (uint64_t)size;
        s->number = number;
        s->lists += len != 0;
        count++;
    }
    return count;
}

uint32_t dh_streams_behind(const struct dh_stream *streams, uint32_t n, uint64_t number)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < n; i++)
        count += streams[i].number != number || streams[i].unsent != 0;
    return count;
}

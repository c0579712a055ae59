/*
 * test_streams.c - frames of a message to many streams: whole, in the right streams, and within their windows.
 *
 * tests/test_serve_idle_streams.py compares the bytes with those of the Python server.
 */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "drahealth.h"

enum { N = 3, ROOM = 1 << 30, FRAMED = 9 + 5 };

static uint8_t message[DH_STREAM_MESSAGE + 1];
static uint8_t received[DH_STREAM_MESSAGE + 1024];

struct pipes {
    struct dh_stream streams[N];
    int peers[N];
};

static void open_pipes(struct pipes *p)
{
    for (int i = 0; i < N; i++) {
        int ends[2];

        CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
        CHECK_INT(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
        p->streams[i] = (struct dh_stream){
            .fd = ends[0], .id = (uint32_t)i + 1, .frame_size = DH_STREAM_FRAME, .room = ROOM, .number = 1};
        p->peers[i] = ends[1];
    }
}

static void close_pipes(struct pipes *p)
{
    for (int i = 0; i < N; i++) {
        close(p->streams[i].fd);
        close(p->peers[i]);
    }
}

static uint32_t send_to_all(struct pipes *p, uint64_t since, uint64_t number, uint32_t len, uint32_t *cut)
{
    return dh_streams_send(p->streams, N, 0, since, number, message, len, cut);
}

static size_t take(struct pipes *p, int index)
{
    size_t size = 0;
    ssize_t n;

    while ((n = read(p->peers[index], received + size, sizeof(received) - size)) > 0)
        size += (size_t)n;
    return size;
}

static void test_each_stream_gets_the_message_with_its_number(void)
{
    static const uint8_t frame[] = {0, 0, 9, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 4, 'a', 'b', 'c', 'd'};
    struct pipes p;
    uint32_t cut = 77;

    open_pipes(&p);
    memcpy(message, "abcd", 4);
    CHECK_U64(send_to_all(&p, 1, 2, 4, &cut), N);
    CHECK_U64(cut, 0);
    CHECK_U64(take(&p, 1), sizeof(frame));
    CHECK(memcmp(received, frame, sizeof(frame)) == 0);
    for (int i = 0; i < N; i++) {
        CHECK_U64(p.streams[i].number, 2);
        CHECK_U64(p.streams[i].sent, 9);
        CHECK_U64(p.streams[i].lists, 1);
        CHECK_INT(p.streams[i].room, ROOM - 9);
    }
    CHECK_U64(dh_streams_behind(p.streams, N, 2), 0);
    CHECK_U64(dh_streams_behind(p.streams, N, 3), N);
    close_pipes(&p);
}

static void test_longest_message_fits_into_the_frames_and_a_longer_one_is_not_sent(void)
{
    struct pipes p;
    uint32_t cut = 77;

    open_pipes(&p);
    for (int i = 0; i < N; i++) {
        int size = 4 * DH_STREAM_MESSAGE;

        CHECK_INT(setsockopt(p.streams[i].fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size)), 0);
    }
    CHECK_U64(send_to_all(&p, 1, 2, DH_STREAM_MESSAGE + 1, &cut), 0);
    CHECK_U64(cut, 0);
    CHECK_U64(send_to_all(&p, 1, 2, DH_STREAM_MESSAGE, &cut), N);
    for (int i = 0; i < N; i++)
        CHECK_U64(take(&p, i) + p.streams[i].unsent, DH_STREAM_MESSAGE + 5 + 17 * 9);
    close_pipes(&p);
}

static void test_streams_without_room_or_with_another_publication_are_unchanged(void)
{
    struct pipes p;
    uint32_t cut;

    open_pipes(&p);
    p.streams[0].room = 8;
    p.streams[1].number = 0;
    p.streams[2].frame_size = DH_STREAM_FRAME - 1;
    CHECK_U64(send_to_all(&p, 1, 2, 4, &cut), 0);
    for (int i = 0; i < N; i++)
        CHECK_U64(take(&p, i), 0);
    CHECK_INT(p.streams[0].room, 8);
    CHECK_U64(send_to_all(&p, 1, 2, 0, &cut), 1); /* no message: only the publication counts */
    CHECK_U64(p.streams[0].number, 2);
    CHECK_U64(p.streams[0].lists, 0);
    close_pipes(&p);
}

static void test_cut_message_is_counted_and_its_stream_gets_no_other(void)
{
    struct pipes p;
    uint32_t cut = 77, len = 100000;
    int size = 5000;

    open_pipes(&p);
    CHECK_INT(setsockopt(p.streams[0].fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size)), 0);
    CHECK_U64(send_to_all(&p, 1, 2, len, &cut), N);
    CHECK_U64(cut, 1);
    CHECK(p.streams[0].unsent > 0);
    CHECK_U64(dh_streams_behind(p.streams, N, 2), 1);
    CHECK_U64(take(&p, 0) + p.streams[0].unsent, len + 5 + 7 * 9);
    CHECK_U64(send_to_all(&p, 2, 3, 4, &cut), N - 1);
    CHECK_U64(cut, 0);
    CHECK_U64(take(&p, 0), 0);
    close_pipes(&p);
}

static void test_error_of_one_socket_does_not_stop_the_others(void)
{
    struct pipes p;
    uint32_t cut;

    open_pipes(&p);
    close(p.peers[0]);
    CHECK_U64(send_to_all(&p, 1, 2, 4, &cut), N - 1);
    CHECK_U64(p.streams[0].number, 1);
    CHECK_U64(p.streams[0].sent, 0);
    CHECK_U64(take(&p, 2), FRAMED + 4);
    p.peers[0] = p.streams[0].fd; /* closed once more below, which has no effect */
    close_pipes(&p);
}

int main(void)
{
    test_each_stream_gets_the_message_with_its_number();
    test_longest_message_fits_into_the_frames_and_a_longer_one_is_not_sent();
    test_streams_without_room_or_with_another_publication_are_unchanged();
    test_cut_message_is_counted_and_its_stream_gets_no_other();
    test_error_of_one_socket_does_not_stop_the_others();
    return check_done("test_streams");
}

// Load on a broker in frames, with next to no work of its own: `bench.small_requests` compiles and runs it.
//
//     small_requests SOCKET FRAMES FRAME_BYTES IN_FLIGHT RATE WARM_UP_S SECONDS
//
// FRAMES is a file of requests of FRAME_BYTES each, one for each connection that is made: a whole frame with one chunk,
// of a producer of its own, whose sequence is 0. It is sent again and again, with the next request id and sequence, and
// the checksums of the two headers made anew. Each connection keeps IN_FLIGHT requests unanswered; those that there is
// room for go out with one call. With a RATE (requests a second, over the first connection only) each is due at a time,
// from which what it took is counted, however late it was sent.
//
// Prints a line of JSON about what was answered in SECONDS after the WARM_UP_S; `sent` is from beginning to end. Any
// answer that is an error ends it with exit code 1 and a line on standard error.

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"

#define SECOND_NS 1000000000ull
#define EARLY_NS 50000ull  // to wake up takes about as long: the rest is spent looking at the clock
#define PATIENCE_NS (10 * SECOND_NS)
#define SEND_BUFFER_BYTES (2 << 20)  // as the project's own clients have it
#define ANSWERS_BYTES (256 << 10)
#define LATENCIES_MAX (4 << 20)

// Of a frame's header, and of a chunk's: see docs/format.md.
enum { FRAME_HEADER = 32, REQUEST_ID_AT = 8, HEAD_BYTES_AT = 16, BULK_BYTES_AT = 20, FRAME_CRC_AT = 28 };
enum { SEQUENCE_AT = 48, HEADER_CRC_AT = 84 };
enum { REPLY = 2, STATUS_TAG = 3 << 3 | 2, ERROR_TAG = 1 << 3 | 2 };

typedef struct {
    int fd;
    uint8_t *frames;  // in_flight requests, each in the place of its id modulo that
    bool *waiting;  // for an answer, of the request in each place
    uint64_t *since_ns;  // when it was sent, or due
    uint64_t next;  // request id and sequence
    size_t prepared_at, prepared_end;  // bytes of `frames` that are to be sent
    uint8_t *answers;
    size_t answers_bytes;
} Connection;

static size_t frame_bytes, in_flight;
static uint64_t count_from_ns, count_until_ns, answered, unanswered;
static uint64_t *latencies;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void *memory(size_t size)
{
    void *made = calloc(1, size);
    if (!made)
        fail("memory", "there is not enough");
    return made;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

static uint32_t u32_at(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t u64_at(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void connect_to(Connection *made, const char *path, const uint8_t *frame)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int size = SEND_BUFFER_BYTES;
    if (strlen(path) >= sizeof address.sun_path)
        fail(path, "too long for a socket");
    strcpy(address.sun_path, path);
    made->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(made->fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    if (connect(made->fd, (struct sockaddr *)&address, sizeof address))
        fail(path, strerror(errno));
    made->frames = memory(frame_bytes * in_flight);
    for (size_t place = 0; place < in_flight; place++)
        memcpy(made->frames + place * frame_bytes, frame, frame_bytes);
    made->waiting = memory(in_flight * sizeof *made->waiting);
    made->since_ns = memory(in_flight * sizeof *made->since_ns);
    made->answers = memory(ANSWERS_BYTES);
}

// The next request, into its place.
static void prepare(Connection *of, uint64_t since_ns)
{
    size_t place = of->next % in_flight;
    uint8_t *frame = of->frames + place * frame_bytes;
    uint8_t *chunk = frame + FRAME_HEADER + u32_at(frame + HEAD_BYTES_AT);
    uint64_t id = of->next + 1, sequence = of->next;  // 0 is not a request's id
    uint32_t crc;
    memcpy(frame + REQUEST_ID_AT, &id, sizeof id);
    crc = crc32c(0, frame, FRAME_CRC_AT);
    memcpy(frame + FRAME_CRC_AT, &crc, sizeof crc);
    memcpy(chunk + SEQUENCE_AT, &sequence, sizeof sequence);
    crc = crc32c(0, chunk, HEADER_CRC_AT);
    memcpy(chunk + HEADER_CRC_AT, &crc, sizeof crc);
    of->waiting[place] = true;
    of->since_ns[place] = since_ns;
    of->next++;
    unanswered++;
}

static bool has_room(const Connection *at)
{
    return !at->waiting[at->next % in_flight];
}

// What is prepared and lies together, as far as the kernel takes it; whether it has taken all.
static bool send_prepared(Connection *to)
{
    while (to->prepared_at < to->prepared_end) {
        size_t size = to->prepared_end - to->prepared_at;
        ssize_t sent = send(to->fd, to->frames + to->prepared_at, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN)
            return false;
        if (sent < 0)
            fail("send", strerror(errno));
        to->prepared_at += sent;
    }
    return true;
}

// As many requests as there is room for, and are due by now: those whose places follow each other with one call.
static void send_more(Connection *to, uint64_t now, uint64_t *due_ns, uint64_t every_ns, uint64_t end_ns)
{
    while (send_prepared(to)) {
        size_t first = to->next % in_flight, place = first;
        to->prepared_at = to->prepared_end = first * frame_bytes;
        for (; place < in_flight && has_room(to) && now < end_ns; place++) {
            if (every_ns && *due_ns > now)
                break;
            prepare(to, every_ns ? *due_ns : now);
            *due_ns += every_ns;
        }
        to->prepared_end += (place - first) * frame_bytes;
        if (place == first)
            return;
    }
}

static void take_answer(Connection *of, const uint8_t *frame, uint64_t now)
{
    size_t head_bytes = u32_at(frame + HEAD_BYTES_AT);
    const uint8_t *head = frame + FRAME_HEADER;
    uint64_t id = u64_at(frame + REQUEST_ID_AT);
    size_t place = (id - 1) % in_flight;
    if (frame[3] != REPLY || head_bytes < 3 || head[0] != STATUS_TAG || head[2] == ERROR_TAG) {
        fprintf(stderr, "the broker refuses: %.*s\n", (int)head_bytes, head);
        exit(1);
    }
    if (!of->waiting[place] || id > of->next || id + in_flight <= of->next)
        fail("the broker", "answers what was not asked");
    of->waiting[place] = false;
    unanswered--;
    if (now < count_from_ns || now >= count_until_ns)
        return;
    if (answered < LATENCIES_MAX)
        latencies[answered] = now - of->since_ns[place];
    answered++;
}

static void receive(Connection *from)
{
    uint8_t *to = from->answers + from->answers_bytes;
    ssize_t found = recv(from->fd, to, ANSWERS_BYTES - from->answers_bytes, MSG_DONTWAIT);
    if (found < 0 && errno == EAGAIN)
        return;
    if (found <= 0)
        fail("the broker", found ? strerror(errno) : "has closed a connection");
    from->answers_bytes += found;
    uint64_t now = now_ns();
    size_t at = 0;
    while (from->answers_bytes - at >= FRAME_HEADER) {
        const uint8_t *frame = from->answers + at;
        size_t size = (size_t)FRAME_HEADER + u32_at(frame + HEAD_BYTES_AT) + u32_at(frame + BULK_BYTES_AT);
        if (size > ANSWERS_BYTES)
            fail("the broker", "answers with more than there is to say");
        if (from->answers_bytes - at < size)
            break;
        take_answer(from, frame, now);
        at += size;
    }
    from->answers_bytes -= at;
    memmove(from->answers, from->answers + at, from->answers_bytes);
}

static int ascending(const void *left, const void *right)
{
    uint64_t one = *(const uint64_t *)left, other = *(const uint64_t *)right;
    return (one > other) - (one < other);
}

static double us_at(size_t count, double share)
{
    return count ? latencies[(size_t)((count - 1) * share)] / 1e3 : 0.0;
}

static void wait_for_any(struct pollfd *polled, size_t count, uint64_t ns)
{
    struct timespec most = {ns / SECOND_NS, ns % SECOND_NS};
    if (ppoll(polled, count, &most, NULL) < 0 && errno != EINTR)
        fail("poll", strerror(errno));
}

static size_t read_frames(const char *path, uint8_t **frames)
{
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END))
        fail(path, strerror(errno));
    size_t size = ftell(file);
    rewind(file);
    *frames = memory(size);
    if (frame_bytes <= FRAME_HEADER || !size || size % frame_bytes || fread(*frames, 1, size, file) != size)
        fail(path, "is not of frames of that size");
    fclose(file);
    return size / frame_bytes;
}

int main(int argc, char **argv)
{
    if (argc != 8)
        fail(argv[0], "SOCKET FRAMES FRAME_BYTES IN_FLIGHT RATE WARM_UP_S SECONDS");
    crc32c_init();
    prctl(PR_SET_TIMERSLACK, 1);
    uint8_t *frames;
    frame_bytes = strtoull(argv[3], NULL, 10);
    in_flight = strtoull(argv[4], NULL, 10);
    double rate = atof(argv[5]);
    size_t count = read_frames(argv[2], &frames);
    if (!in_flight)
        fail("IN_FLIGHT", "is at least 1");
    if (rate > 0)
        count = 1;
    Connection *connections = memory(count * sizeof *connections);
    struct pollfd *polled = memory(count * sizeof *polled);
    latencies = memory(LATENCIES_MAX * sizeof *latencies);
    for (size_t each = 0; each < count; each++)
        connect_to(&connections[each], argv[1], frames + each * frame_bytes);

    uint64_t now = now_ns(), due_ns = now, every_ns = rate > 0 ? (uint64_t)(SECOND_NS / rate) : 0;
    count_from_ns = now + (uint64_t)(atof(argv[6]) * SECOND_NS);
    count_until_ns = count_from_ns + (uint64_t)(atof(argv[7]) * SECOND_NS);
    while ((now = now_ns()) < count_until_ns || unanswered) {
        if (now > count_until_ns + PATIENCE_NS)
            fail("the broker", "does not answer");
        for (size_t each = 0; each < count; each++) {
            Connection *to = &connections[each];
            send_more(to, now, &due_ns, every_ns, count_until_ns);
            polled[each].fd = to->fd;
            polled[each].events = POLLIN | (to->prepared_at < to->prepared_end ? POLLOUT : 0);
        }
        uint64_t wait_ns = SECOND_NS;
        if (every_ns && now < count_until_ns)
            wait_ns = due_ns > now + EARLY_NS ? due_ns - now - EARLY_NS : 0;
        wait_for_any(polled, count, wait_ns);
        for (size_t each = 0; each < count; each++)
            if (polled[each].revents & (POLLIN | POLLHUP | POLLERR))
                receive(&connections[each]);
    }

    struct rusage used;
    uint64_t sent = 0, timed = answered < LATENCIES_MAX ? answered : LATENCIES_MAX;
    getrusage(RUSAGE_SELF, &used);
    for (size_t each = 0; each < count; each++)
        sent += connections[each].next;
    qsort(latencies, timed, sizeof *latencies, ascending);
    double cpu_s = used.ru_utime.tv_sec + used.ru_stime.tv_sec;
    cpu_s += (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"sent\": %llu, \"answered\": %llu, \"cpu_s\": %.6f, \"p50_us\": %.1f, \"p99_us\": %.1f}\n",
           (unsigned long long)sent, (unsigned long long)answered, cpu_s, us_at(timed, 0.5), us_at(timed, 0.99));
    return 0;
}

/* Reads of files that the system has under way while one thread waits for them: Linux's io_submit, past the page cache. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

/* A read of consecutive blocks; `done` becomes the bytes that were read, or an error number below zero. */
typedef struct {
    int64_t file, into, nbytes, offset, done;
} Read;

#ifdef __linux__
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_AT_ONCE = 64,
    WAITING = 16, /* Where less than this fraction of the time passes in waiting, reads were made while they were started. */
};

typedef struct {
    aio_context_t context;
    int at_once;
} Queue;

/* A queue for reads by one thread at a time, `at_once` of them under way; NULL if the system has none to give. */
API void *moesched_new_reads(int at_once) {
    Queue *queue = calloc(1, sizeof *queue);
    if (!queue) return NULL;
    queue->at_once = at_once < MOST_AT_ONCE ? at_once : MOST_AT_ONCE;
    if (syscall(SYS_io_setup, queue->at_once, &queue->context) < 0) {
        free(queue);
        return NULL;
    }
    return queue;
}

API void moesched_free_reads(void *given) {
    Queue *queue = given;
    syscall(SYS_io_destroy, queue->context);
    free(queue);
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Starts reads from the first of `reads` on; returns their number, 0 if the system refuses the first. */
static int start(const Queue *queue, Read *reads, int64_t count) {
    struct iocb blocks[MOST_AT_ONCE], *listed[MOST_AT_ONCE];
    memset(blocks, 0, sizeof blocks);
    for (int i = 0; i < count; i++) {
        blocks[i].aio_lio_opcode = IOCB_CMD_PREAD;
        blocks[i].aio_fildes = (uint32_t)reads[i].file;
        blocks[i].aio_buf = (uint64_t)reads[i].into;
        blocks[i].aio_nbytes = (uint64_t)reads[i].nbytes;
        blocks[i].aio_offset = reads[i].offset;
        blocks[i].aio_data = (uint64_t)(uintptr_t)&reads[i];
        listed[i] = &blocks[i];
    }
    const long started = syscall(SYS_io_submit, queue->context, (long)count, listed);
    if (started > 0) return (int)started;
    reads->done = started < 0 ? -errno : -EAGAIN;
    return 0;
}

/* Makes the reads, and returns when none is under way: 1 if each was made while it was started, as some file systems do. */
API int moesched_read(const void *given, Read *reads, int64_t count) {
    const Queue *queue = given;
    struct io_event ended[MOST_AT_ONCE];
    int64_t next = 0, under_way = 0, waiting = 0;
    const int64_t begun = nanoseconds();
    while (next < count || under_way) {
        const int64_t room = queue->at_once - under_way, left = count - next;
        if (room && left) {
            const int started = start(queue, reads + next, room < left ? room : left);
            under_way += started;
            next += started ? started : 1; /* the caller sees by `done` that a read was refused */
            continue;
        }
        const int64_t since = nanoseconds();
        const long many = syscall(SYS_io_getevents, queue->context, 1L, (long)MOST_AT_ONCE, ended, NULL);
        waiting += nanoseconds() - since;
        for (long i = 0; i < many; i++) ((Read *)(uintptr_t)ended[i].data)->done = ended[i].res;
        if (many > 0) under_way -= many;
    }
    return waiting * WAITING < nanoseconds() - begun;
}
#else
API void *moesched_new_reads(int at_once) { return (void)at_once, NULL; }
API void moesched_free_reads(void *given) { (void)given; }
API int moesched_read(const void *given, Read *reads, int64_t count) { return (void)given, (void)reads, (void)count, 0; }
#endif

/* Threads that share out the phases of a task. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum {
    ALONE_BYTES = 128 << 10, /* up to this many bytes, one thread is faster */
    SPIN_NANOSECONDS = 50000,
};

/* A late helper finds the work done by the others: nobody waits for a helper that has not begun. */
struct Team {
    InstructionSet set;
    int helpers;
    pthread_t *threads;
    pid_t process; /* a forked child has no helpers */
    pthread_mutex_t calling; /* held by the caller that the helpers work for */
    pthread_mutex_t sleeping;
    pthread_cond_t wake;
    _Atomic(Task *) task;
    _Atomic uint64_t calls;
    _Atomic int inside, asleep, ending;
};

InstructionSet set_of(const Team *team) { return team->set; }

int threads_of(const Team *team) { return team->helpers + 1; }

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void wait_for(_Atomic int64_t *value, int64_t wanted) {
    for (int tries = 1; atomic_load(value) < wanted; tries++) {
        if (tries % 1024 == 0) sched_yield(); /* the thread with the last chunk may be waiting for this core */
        pause_briefly();
    }
}

static void work(Task *task) {
    for (Phase *phase = task->phase; phase < task->phase + task->phases; phase++) {
        const int64_t items = phase->items;
        int64_t first;
        while ((first = atomic_fetch_add(&phase->taken, phase->chunk)) < items) {
            const int64_t end = first + phase->chunk, last = end < items ? end : items;
            phase->part(task->job, first, last);
            atomic_fetch_add(&phase->done, last - first);
        }
        wait_for(&phase->done, items);
    }
}

/* Until there is another call than the ones seen. */
static void wait_for_call(Team *team, uint64_t seen) {
    const int64_t sleepy = nanoseconds() + SPIN_NANOSECONDS;
    while (atomic_load(&team->calls) == seen) {
        for (int i = 0; i < 32; i++) pause_briefly();
        if (nanoseconds() < sleepy) continue;
        pthread_mutex_lock(&team->sleeping);
        atomic_fetch_add(&team->asleep, 1);
        while (atomic_load(&team->calls) == seen) pthread_cond_wait(&team->wake, &team->sleeping);
        atomic_fetch_sub(&team->asleep, 1);
        pthread_mutex_unlock(&team->sleeping);
    }
}

static void *help(void *argument) {
    Team *team = argument;
    for (uint64_t seen = 0; !atomic_load(&team->ending); ) {
        wait_for_call(team, seen);
        seen = atomic_load(&team->calls);
        atomic_fetch_add(&team->inside, 1);
        Task *task = atomic_load(&team->task);
        if (task) work(task);
        atomic_fetch_sub(&team->inside, 1);
    }
    return NULL;
}

static void call_helpers(Team *team) {
    atomic_fetch_add(&team->calls, 1);
    if (atomic_load(&team->asleep)) {
        pthread_mutex_lock(&team->sleeping);
        pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->sleeping);
    }
}

void run(Team *team, Task *task, int64_t bytes) {
    const int alone = !team->helpers || bytes <= ALONE_BYTES || team->process != getpid();
    if (alone || pthread_mutex_trylock(&team->calling)) {
        work(task);
        return;
    }
    atomic_store(&team->task, task);
    call_helpers(team);
    work(task);
    atomic_store(&team->task, NULL);
    while (atomic_load(&team->inside)) pause_briefly();
    pthread_mutex_unlock(&team->calling);
}

API void moesched_free_team(Team *team) {
    if (team->process == getpid()) {
        atomic_store(&team->ending, 1);
        call_helpers(team);
        for (int i = 0; i < team->helpers; i++) pthread_join(team->threads[i], NULL);
    }
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->sleeping);
    pthread_mutex_destroy(&team->calling);
    free(team->threads);
    free(team);
}

/* A team of the caller and `helpers` threads; NULL if there is no such instruction set, or no memory.
 * cores: the core that each helper is pinned to, or NULL. */
API Team *moesched_new_team(const char *instruction_set, int helpers, const int *cores) {
    const int set = set_named(instruction_set);
    Team *team = set < 0 ? NULL : calloc(1, sizeof *team);
    if (!team) return NULL;
    team->set = (InstructionSet)set;
    team->process = getpid();
    pthread_mutex_init(&team->calling, NULL);
    pthread_mutex_init(&team->sleeping, NULL);
    pthread_cond_init(&team->wake, NULL);
    team->threads = calloc((size_t)helpers + 1, sizeof *team->threads);
    while (team->threads && team->helpers < helpers) {
        if (pthread_create(&team->threads[team->helpers], NULL, help, team)) break; /* fewer will do */
#if defined(__linux__)
        if (cores) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cores[team->helpers], &one);
            pthread_setaffinity_np(team->threads[team->helpers], sizeof one, &one);
        }
#endif
        team->helpers++;
    }
    return team;
}

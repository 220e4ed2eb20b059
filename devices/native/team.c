/* Threads that share out the phases of a task. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    ALONE_BYTES = 128 << 10, /* up to this many bytes, one thread is faster */
    SPIN_NANOSECONDS = 50000,
    AWAKE_NANOSECONDS = 5000000, /* as long as a page may come from a disk; a core that sleeps comes late to the next task */
};

/* How many pieces of a thread's share of a phase are taken off its front, and off its back in the upper half. A piece is the
 * least items that are taken at a time. */
typedef _Atomic uint64_t Taken;

/* A task that a team does. */
typedef struct {
    Task *task;
    int threads;
    Taken *taken; /* of each phase, of each thread */
} Call;

/* A late helper finds the work done by the others: nobody waits for a helper that has not begun. */
struct Team {
    InstructionSet set;
    int helpers;
    pthread_t *threads;
    pid_t process; /* a forked child has no helpers */
    pthread_mutex_t calling; /* held by the caller that the helpers work for */
    pthread_mutex_t sleeping;
    pthread_cond_t wake;
    _Atomic(Call *) call;
    _Atomic uint64_t calls;
    _Atomic int inside, asleep, ending, numbered;
    _Atomic int core; /* the caller's when it called */
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

/* Pieces [first, last) of a phase. */
typedef struct {
    int64_t first, last;
} Pieces;

/* The share of a thread: neighbours, as are those of the other threads. */
static Pieces share_of(const Phase *phase, int thread, int threads) {
    const int64_t pieces = (phase->items + phase->least - 1) / phase->least;
    return (Pieces){pieces * thread / threads, pieces * (thread + 1) / threads};
}

/* Takes three quarters of what is left of a share, or all for a thread alone: off its front as its owner, else off its back.
 * The less is left the less is taken, so that all threads end together. */
static Pieces take(const Phase *phase, Taken *share, Pieces all, int alone, int owner) {
    const int64_t most = phase->most > phase->least ? phase->most / phase->least : 1;
    uint64_t before = atomic_load(share), after;
    Pieces pieces;
    do {
        const int64_t front = all.first + (int64_t)(uint32_t)before, back = all.last - (int64_t)(before >> 32);
        const int64_t left = back - front, wanted = alone ? left : (3 * left + 3) / 4, count = wanted < most ? wanted : most;
        pieces = owner ? (Pieces){front, front + count} : (Pieces){back - count, back};
        after = before + ((uint64_t)count << (owner ? 0 : 32));
    } while (after != before && !atomic_compare_exchange_weak(share, &before, after));
    return pieces;
}

static void do_pieces(const Task *task, Phase *phase, Pieces pieces) {
    const int64_t first = pieces.first * phase->least, end = pieces.last * phase->least;
    const int64_t last = end < phase->items ? end : phase->items;
    phase->part(task->job, first, last);
    atomic_fetch_add(&phase->done, last - first);
}

/* Does the thread's own share of each phase, then helps with those of the others. */
static void work(const Call *call, int thread) {
    const Task *task = call->task;
    const int threads = call->threads;
    Taken *taken = call->taken;
    for (Phase *phase = task->phase; phase < task->phase + task->phases; phase++, taken += threads) {
        const int64_t items = phase->items;
        for (int other = 0; other < threads; other++) {
            const int owner = (thread + other) % threads;
            const Pieces share = share_of(phase, owner, threads);
            for (;;) {
                const Pieces pieces = take(phase, taken + owner, share, threads == 1, !other);
                if (pieces.first == pieces.last) break;
                do_pieces(task, phase, pieces);
            }
        }
        wait_for(&phase->done, items);
    }
}

#if defined(__linux__)
static int this_core(void) { return sched_getcpu(); }

/* Moves the thread off a core. */
static void leave(int core) {
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR(core, &others);
    if (!sched_setaffinity(0, sizeof others, &others)) sched_setaffinity(0, sizeof allowed, &allowed);
}
#else
static int this_core(void) { return -1; }

static void leave(int core) { (void)core; }
#endif

/* Linux may wake a thread on the core of the one that wakes it, call after call: then both would take turns. */
static void leave_caller(Team *team) {
    const int core = this_core();
    if (core >= 0 && core == atomic_load(&team->core)) leave(core);
}

/* Until there is another call than the ones seen. */
static void wait_for_call(Team *team, uint64_t seen) {
    const int64_t begun = nanoseconds();
    while (atomic_load(&team->calls) == seen) {
        for (int i = 0; i < 32; i++) pause_briefly();
        const int64_t waited = nanoseconds() - begun;
        if (waited < SPIN_NANOSECONDS) continue;
        if (waited < AWAKE_NANOSECONDS) {
            sched_yield();
            continue;
        }
        pthread_mutex_lock(&team->sleeping);
        atomic_fetch_add(&team->asleep, 1);
        while (atomic_load(&team->calls) == seen) pthread_cond_wait(&team->wake, &team->sleeping);
        atomic_fetch_sub(&team->asleep, 1);
        pthread_mutex_unlock(&team->sleeping);
    }
}

static void *help(void *argument) {
    Team *team = argument;
    const int thread = 1 + atomic_fetch_add(&team->numbered, 1);
    for (uint64_t seen = 0; !atomic_load(&team->ending); ) {
        wait_for_call(team, seen);
        seen = atomic_load(&team->calls);
        atomic_fetch_add(&team->inside, 1);
        const Call *call = atomic_load(&team->call);
        if (call) {
            leave_caller(team);
            work(call, thread);
        }
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
    const int alone = !team->helpers || bytes <= ALONE_BYTES || team->process != getpid() ||
                      pthread_mutex_trylock(&team->calling);
    const int threads = alone ? 1 : threads_of(team);
    Taken taken[task->phases * threads];
    memset(taken, 0, sizeof taken);
    Call call = {task, threads, taken};
    if (!alone) {
        atomic_store(&team->core, this_core());
        atomic_store(&team->call, &call);
        call_helpers(team);
    }
    work(&call, 0);
    if (alone) return;
    atomic_store(&team->call, NULL);
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

/* Keeps a thread on some cores, where the system allows that. */
static void keep_on(pthread_t thread, const int *cores, int count) {
#if defined(__linux__)
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    for (int i = 0; i < count; i++) CPU_SET(cores[i], &allowed);
    pthread_setaffinity_np(thread, sizeof allowed, &allowed);
#else
    (void)thread, (void)cores, (void)count;
#endif
}

/* A team of the caller and `helpers` threads; NULL if there is no such instruction set, or no memory.
 * cores: the `count` cores that the helpers may run on; any where it is 0. If `pinned`, each has one of them while they last. */
API Team *moesched_new_team(const char *instruction_set, int helpers, const int *cores, int count, int pinned) {
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
        pthread_t *thread = &team->threads[team->helpers];
        if (pthread_create(thread, NULL, help, team)) break; /* fewer will do */
        if (!pinned && count) keep_on(*thread, cores, count);
        if (pinned && team->helpers < count) keep_on(*thread, cores + team->helpers, 1);
        team->helpers++;
    }
    return team;
}

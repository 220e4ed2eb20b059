/* Threads that share out the phases of a task. */
#ifndef MOESCHED_TEAM_H
#define MOESCHED_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

#include "instructions.h"

/* A function that Python calls. */
#define API __attribute__((visibility("default")))

/* Does items [first, last) of a phase. */
typedef void (*Part)(void *job, int64_t first, int64_t last);

/* Items that threads share out, `least` to `most` at a time. A phase begins when the one before is done, and may have its
 * `items` from there. */
typedef struct {
    Part part;
    int64_t items, least, most;
    _Atomic int64_t done;
} Phase;

typedef struct {
    void *job;
    int64_t phases;
    Phase *phase;
} Task;

/* The calling thread and its helpers, which compute with one instruction set. */
typedef struct Team Team;

InstructionSet set_of(const Team *team);

/* The number of threads, the caller included. */
int threads_of(const Team *team);

/* Does all phases; alone if `bytes`, which it will read, are few, or if the helpers work for another caller. */
void run(Team *team, Task *task, int64_t bytes);

#endif

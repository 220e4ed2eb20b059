/* Memory for the length of one call. */
#ifndef MOESCHED_SCRATCH_H
#define MOESCHED_SCRATCH_H

#include <stdint.h>

/* At least `bytes` bytes on a cache line, until the calling thread's next call; NULL without memory. */
char *scratch(int64_t bytes);

#endif

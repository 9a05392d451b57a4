/* Threads that share the work of a kernel. They are the library's own: it needs no runtime of OpenMP. */
#ifndef PARALLEL_H
#define PARALLEL_H

#include <stddef.h>

/* One of `parts` parts of `work`, which run at the same time. */
typedef void part_runner(void *work, ptrdiff_t part, ptrdiff_t parts);

/* Items [first, end) of `work`. */
typedef void range_runner(void *work, ptrdiff_t first, ptrdiff_t end);

/* Runs `threads` parts, the first in this thread, and returns when all have ended. There is one part alone where the
   threads are at work for another caller, or the caller is itself such a part; there may be fewer where the system
   starts no more threads. */
void run_parts(part_runner *run, void *work, ptrdiff_t threads);

/* Runs items [0, count), cut into ranges of like length, one for each part. */
void run_ranges(range_runner *run, void *work, ptrdiff_t count, ptrdiff_t threads);

/* Waits until all parts of the work have come here. */
void meet_parts(ptrdiff_t parts);

#endif

/* A thread that waits spins for a moment and then sleeps. If it slept at once, a step of few rows would take a third
   longer, for there are some eighty waits in it. If it spun for milliseconds, it would keep the processor from the
   thread that it waits for as soon as anything else runs beside them, as it does where there are more threads than
   processors. */

#define _GNU_SOURCE /* of clocks, signals and processors */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "parallel.h"

enum { MOST_THREADS = 1 << 10, STACK_BYTES = 1 << 20, LINE = 64 };
enum { SPIN_NANOSECONDS = 150000, SHORT_SPIN = 1000, PAUSES = 32 }; /* pauses between looks at the clock */

typedef struct {
    pthread_t thread;
    ptrdiff_t part;
    size_t seen; /* the order before its first */
} helper;

/* An order is MOST_THREADS times its number, plus how many parts the work has: so a thread that takes no part in it
   never reads what belongs to the next. 0 parts: end. */
static struct {
    pthread_mutex_t busy; /* held while there is work, and after the process' end for ever */
    pthread_mutex_t lock; /* of those that sleep */
    pthread_cond_t changed;
    part_runner *run;
    void *work;
    ptrdiff_t started;
    int knows_forks;
    atomic_int spin; /* nanoseconds */
    helper helpers[MOST_THREADS];
    _Alignas(LINE) atomic_size_t order;
    _Alignas(LINE) atomic_size_t running; /* helpers that have not ended their part */
    _Alignas(LINE) atomic_size_t done;    /* the last order whose parts have all ended */
    _Alignas(LINE) atomic_size_t met;     /* parts that wait for the others */
    _Alignas(LINE) atomic_size_t meeting; /* how often all have met */
    _Alignas(LINE) atomic_size_t sleeping;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void pause_shortly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int spins_until_changed(atomic_size_t *word, size_t old) {
    int64_t until = nanoseconds() + atomic_load_explicit(&pool.spin, memory_order_relaxed);
    do
        for (int i = 0; i < PAUSES; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old)
                return 1;
            pause_shortly();
        }
    while (nanoseconds() < until);
    return 0;
}

/* Returns what the word is by then. It sleeps only after it has said so, and who changes the word looks at that
   afterwards: one of the two sees the other. */
static size_t wait_for_change(atomic_size_t *word, size_t old) {
    if (!spins_until_changed(word, old)) {
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_add(&pool.sleeping, 1);
        while (atomic_load(word) == old)
            pthread_cond_wait(&pool.changed, &pool.lock);
        atomic_fetch_sub(&pool.sleeping, 1);
        pthread_mutex_unlock(&pool.lock);
    }
    return atomic_load_explicit(word, memory_order_acquire);
}

static void change(atomic_size_t *word, size_t to) {
    atomic_store(word, to);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.changed);
        pthread_mutex_unlock(&pool.lock);
    }
}

static void *help(void *argument) {
    helper *self = argument;
    for (size_t order = self->seen;;) {
        order = wait_for_change(&pool.order, order);
        ptrdiff_t parts = (ptrdiff_t)(order % MOST_THREADS);
        if (!parts)
            return NULL;
        if (self->part >= parts)
            continue;
        pool.run(pool.work, self->part, parts);
        if (atomic_fetch_sub(&pool.running, 1) == 1)
            change(&pool.done, order);
    }
}

/* In a child of fork, which has no thread but the one that forked. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.changed, NULL);
    pool.started = 0;
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.met, 0);
}

/* With signals blocked that are for the threads of Python; those of its own faults end the process with a traceback.
   Returns whether it started. */
static int start_helper(helper *new, ptrdiff_t part) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    sigset_t all, before;
    pthread_attr_t attributes;
    *new = (helper){.part = part, .seen = atomic_load(&pool.order)};
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int failed = pthread_create(&new->thread, &attributes, help, new);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !failed;
}

/* That this thread may run on. */
static long count_processors(void) {
#ifdef __linux__
    cpu_set_t allowed;
    if (!sched_getaffinity(0, sizeof allowed, &allowed))
        return CPU_COUNT(&allowed);
#endif
    return sysconf(_SC_NPROCESSORS_ONLN);
}

/* Returns how many parts there can be. */
static ptrdiff_t start_helpers(ptrdiff_t threads) {
    if (threads >= MOST_THREADS)
        threads = MOST_THREADS - 1;
    if (threads <= pool.started + 1)
        return threads;
    if (!pool.knows_forks)
        pool.knows_forks = !pthread_atfork(NULL, NULL, forget_helpers);
    int spin = threads > count_processors() ? SHORT_SPIN : SPIN_NANOSECONDS;
    atomic_store_explicit(&pool.spin, spin, memory_order_relaxed);
    while (pool.started + 1 < threads && start_helper(&pool.helpers[pool.started], pool.started + 1))
        pool.started++;
    return pool.started + 1;
}

static size_t next_order(ptrdiff_t parts) {
    return (atomic_load_explicit(&pool.order, memory_order_relaxed) / MOST_THREADS + 1) * MOST_THREADS + (size_t)parts;
}

void run_parts(part_runner *run, void *work, ptrdiff_t threads) {
    if (threads < 2 || pthread_mutex_trylock(&pool.busy)) {
        run(work, 0, 1);
        return;
    }
    ptrdiff_t parts = start_helpers(threads);
    size_t order = next_order(parts), done = atomic_load_explicit(&pool.done, memory_order_relaxed);
    pool.run = run, pool.work = work;
    if (parts > 1) {
        atomic_store_explicit(&pool.running, (size_t)parts - 1, memory_order_relaxed);
        change(&pool.order, order);
    }
    run(work, 0, parts);
    if (parts > 1)
        wait_for_change(&pool.done, done);
    pthread_mutex_unlock(&pool.busy);
}

typedef struct {
    range_runner *run;
    void *work;
    ptrdiff_t count;
} ranges;

static void run_range(void *work, ptrdiff_t part, ptrdiff_t parts) {
    const ranges *all = work;
    all->run(all->work, all->count * part / parts, all->count * (part + 1) / parts);
}

void run_ranges(range_runner *run, void *work, ptrdiff_t count, ptrdiff_t threads) {
    ranges all = {run, work, count};
    run_parts(run_range, &all, threads < count ? threads : count);
}

void meet_parts(ptrdiff_t parts) {
    if (parts < 2)
        return;
    size_t meeting = atomic_load_explicit(&pool.meeting, memory_order_relaxed);
    if (atomic_fetch_add(&pool.met, 1) == (size_t)parts - 1) {
        atomic_store_explicit(&pool.met, 0, memory_order_relaxed);
        change(&pool.meeting, meeting + 1);
    } else
        wait_for_change(&pool.meeting, meeting);
}

/* Waits for the work under way, and leaves later work to its callers. */
__attribute__((destructor)) static void end_helpers(void) {
    pthread_mutex_lock(&pool.busy);
    change(&pool.order, next_order(0));
    for (ptrdiff_t i = 0; i < pool.started; i++)
        pthread_join(pool.helpers[i].thread, NULL);
}

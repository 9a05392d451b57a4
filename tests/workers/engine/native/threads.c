/* Work in parts that meet, that call for parts themselves, and that come from several threads at once, for the thread
   sanitizer. Prints one line, "right" or what is wrong. */

#include <pthread.h>
#include <stdio.h>

#include "parallel.h"

enum { NUMBERS = 64, TIMES = 2000, CALLERS = 3, MOST_PARTS = 5 };

static int there[NUMBERS], back[NUMBERS], wrong[MOST_PARTS], of_callers[CALLERS][NUMBERS];

static void count_up(void *work, ptrdiff_t first, ptrdiff_t end) {
    for (int *numbers = work; first < end; first++)
        numbers[first]++;
}

/* Each part reads what others wrote before they met. */
static void turn_round(void *work, ptrdiff_t part, ptrdiff_t parts) {
    int own[NUMBERS] = {0}, *from = work;
    for (ptrdiff_t i = part; i < NUMBERS; i += parts)
        from[i] += (int)i;
    meet_parts(parts);
    for (ptrdiff_t i = part; i < NUMBERS; i += parts)
        back[i] = from[NUMBERS - 1 - i];
    run_ranges(count_up, own, NUMBERS, MOST_PARTS);
    meet_parts(parts);
    for (ptrdiff_t i = 0; i < NUMBERS; i++)
        wrong[part] |= back[i] != from[NUMBERS - 1 - i] || own[i] != 1;
}

static void *call(void *numbers) {
    for (int i = 0; i < TIMES; i++)
        run_ranges(count_up, numbers, NUMBERS, MOST_PARTS);
    return NULL;
}

static int parts_are_right(void) {
    for (int i = 0; i < TIMES; i++)
        run_parts(turn_round, there, 1 + i % MOST_PARTS);
    for (int i = 0; i < NUMBERS; i++)
        if (there[i] != TIMES * i)
            return 0;
    for (int part = 0; part < MOST_PARTS; part++)
        if (wrong[part])
            return 0;
    return 1;
}

static int callers_are_right(void) {
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        pthread_create(&callers[i], NULL, call, of_callers[i]);
    for (int i = 0; i < CALLERS; i++)
        pthread_join(callers[i], NULL);
    for (int i = 0; i < CALLERS * NUMBERS; i++)
        if (of_callers[0][i] != TIMES)
            return 0;
    return 1;
}

int main(void) {
    if (!parts_are_right())
        puts("parts are wrong");
    else
        puts(callers_are_right() ? "right" : "calls at once are wrong");
}

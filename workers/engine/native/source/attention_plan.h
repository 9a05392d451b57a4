#ifndef ATTENTION_PLAN_H
#define ATTENTION_PLAN_H

#include "attention.h"

/* A place in the order of all tiles: by row, then by head, then by query or segment. */
typedef struct {
    int32_t row, head, n;
    row_plan plan;
} cursor;

/* Deals out the work to `shares`. Returns how many floats `partials` takes; 0 where no row's keys are cut. */
ptrdiff_t attention_plan(attention_step *step);

row_plan plan_row(const attention_step *step, int32_t row);
tile nth_tile(const attention_step *step, const row_plan *plan, int32_t row, int32_t head, int32_t n);

/* To the first tile of the row that the cursor is at, or of the next that has one. */
void start_row(const attention_step *step, cursor *at);
void move_on(const attention_step *step, cursor *at);

#endif

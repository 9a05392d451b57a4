/* Rows into tiles, and tiles into shares of equal work: the same for all layers of a step. */

#include "attention_plan.h"

row_plan plan_row(const attention_step *step, int32_t row) {
    int32_t tokens = step->query_start[row + 1] - step->query_start[row];
    row_plan plan = {.context = step->contexts[row], .queries = tokens * (step->heads / step->kv_heads)};
    plan.start = plan.context - tokens;
    plan.tiles = (int32_t)parts(plan.queries, TILE);
    plan.few = has_few(step, row);
    plan.heads = plan.few ? step->together : 1;
    plan.segments = 1;
    if (plan.tiles == 1) {
        int32_t begin = (int32_t)oldest_seen(step, plan.start);
        plan.first_segment = begin / SEGMENT;
        plan.segments = (int32_t)at_least(parts(plan.context, SEGMENT) - plan.first_segment, 1);
    }
    return plan;
}

/* One tile of a row; a segment of the keys, where those are cut. */
tile nth_tile(const attention_step *step, const row_plan *plan, int32_t row, int32_t head, int32_t n) {
    int32_t group = step->heads / step->kv_heads;
    tile t = {.row = row, .head = head, .heads = (int32_t)at_most(plan->heads, step->kv_heads - head)};
    t.segment = plan->segments > 1 ? n : 0;
    t.first = plan->segments > 1 ? 0 : n * TILE;
    t.count = (int32_t)at_most(TILE, plan->queries - t.first);
    int32_t oldest = plan->start + t.first / group, newest = plan->start + (t.first + t.count - 1) / group;
    t.begin = (int32_t)oldest_seen(step, oldest);
    t.end = (int32_t)at_most(at_least(newest + 1 + step->after, 0), plan->context);
    if (plan->segments > 1) {
        int32_t from = (plan->first_segment + n) * SEGMENT;
        t.begin = (int32_t)at_least(t.begin, from);
        t.end = (int32_t)at_most(t.end, from + SEGMENT);
    }
    return t;
}

/* About how long a tile takes: reading its keys and values, and computing with them. */
static int64_t work_of(const tile *t) {
    return t->heads * (16 + at_least(t->end - t->begin, 0) * (10 + t->count));
}

static int64_t work_of_head(const attention_step *step, const row_plan *plan, int32_t row, int32_t head) {
    int64_t work = 0;
    for (int32_t n = 0; n < plan->tiles * plan->segments; n++) {
        tile t = nth_tile(step, plan, row, head, n);
        work += work_of(&t);
    }
    return work;
}

void start_row(const attention_step *step, cursor *at) {
    at->head = at->n = 0;
    for (; at->row < step->num_rows; at->row++) {
        at->plan = plan_row(step, at->row);
        if (at->plan.tiles)
            return;
    }
}

void move_on(const attention_step *step, cursor *at) {
    if (++at->n < at->plan.tiles * at->plan.segments)
        return;
    at->n = 0;
    at->head += at->plan.heads;
    if (at->head < step->kv_heads)
        return;
    at->row++;
    start_row(step, at);
}

/* Whether another row's keys have that block in that place. No block is shared in two places: keys depend on their
   position. */
static int has_block(const attention_step *step, int32_t row, ptrdiff_t place, int64_t block) {
    return step->contexts[row] > place * step->block_size
        && step->tables[(ptrdiff_t)row * step->max_blocks + place] == block;
}

/* Whether a row of few queries fills a block that another sees in this very step. None is shared before it is full. */
static int fills_for_others(const attention_step *step, const row_plan *plan, int32_t row) {
    for (ptrdiff_t position = at_least(plan->start, 0); position < plan->context; position++) {
        if ((position + 1) % step->block_size)
            continue;
        int64_t block = step->slots[step->query_start[row] + position - plan->start] / step->block_size;
        for (int32_t other = 0; other < step->num_rows; other++)
            if (other != row && has_block(step, other, position / step->block_size, block))
                return 1;
    }
    return 0;
}

ptrdiff_t attention_plan(attention_step *step) {
    ptrdiff_t partials = 0, few = 0;
    int64_t whole = 0, reached = 0;
    step->together = 1;
    step->any_ahead = 0;
    for (int32_t row = 0; row < step->num_rows; row++) {
        row_plan plan = plan_row(step, row);
        few += plan.few ? plan.segments : 0;
        step->ahead[row] = !plan.few || fills_for_others(step, &plan, row);
        step->any_ahead |= step->ahead[row];
        step->partials_at[row] = plan.segments > 1 ? partials : -1;
        if (plan.segments > 1)
            partials += (ptrdiff_t)step->kv_heads * plan.segments * partial_size(step, &plan);
        whole += work_of_head(step, &plan, row, 0) * step->kv_heads;
    }
    step->together = few >= 8 * step->shares ? step->kv_heads : (int32_t)parts(step->kv_heads, step->shares);
    cursor at = {0};
    int32_t share = 0;
    for (start_row(step, &at); at.row < step->num_rows; move_on(step, &at)) {
        for (; share < step->shares && whole * share <= reached * step->shares; share++)
            memcpy(step->starts[share], (int32_t[3]){at.row, at.head, at.n}, sizeof *step->starts);
        tile t = nth_tile(step, &at.plan, at.row, at.head, at.n);
        reached += work_of(&t);
    }
    for (; share <= step->shares; share++)
        memcpy(step->starts[share], (int32_t[3]){step->num_rows, 0, 0}, sizeof *step->starts);
    return partials;
}

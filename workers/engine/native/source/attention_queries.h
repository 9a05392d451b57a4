/* A tile's queries before they attend, and what comes of them after. */
#ifndef ATTENTION_QUERIES_H
#define ATTENTION_QUERIES_H

#include "attention_write.h"

/* The part of a workspace that is for one of a tile's heads. */
ALWAYS_INLINE workspace of_head(const workspace *work, const attention_step *step, const tile *t, ptrdiff_t head,
                                int mode) {
    ptrdiff_t before = (head - t->head) * t->count;
    workspace part = *work;
    part.queries += before * query_words(step->head_dim, mode);
    part.sums += before * value_words(step->head_dim);
    part.top += before;
    part.total += before * LANES;
    return part;
}

/* Queries of a tile of one head, as they attend, and nothing summed up; where they are many, also what fills up the
   last ROWS. The next head's, and the places for this one's results, are fetched meanwhile: they lie too far apart for
   the processor to see that they are next. */
NEVER_INLINE void begin_head(const attention_layer *layer, const workspace *work, const tile *t, ptrdiff_t head,
                             int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t steps = query_words(step->head_dim, mode), size = value_words(step->head_dim),
        group = step->heads / step->kv_heads;
    ptrdiff_t bytes = step->head_dim * number_bytes(mode),
        count = has_few(step, t->row) ? t->count : parts(t->count, ROWS) * ROWS;
    for (ptrdiff_t i = 0; i < t->count; i++) {
        ptrdiff_t token = step->query_start[t->row] + (t->first + i) / group;
        uint32_t *query = work->queries + i * steps;
        ptrdiff_t of = head * group + (t->first + i) % group;
        const void *from = numbers_at(layer->q, step->query_stride, token, of, mode);
        fetch(numbers_at(layer->q, step->query_stride, token, of + group, mode), bytes);
        fetch_to_write((char *)layer->out + (token * step->heads + of) * bytes, bytes);
        query[steps - 1] = 0;
        from = prepared(layer, work, from, layer->query_norm, token, of, query, 0, mode);
        if (from != query)
            memcpy(query, from, (size_t)bytes);
    }
    memset(work->queries + t->count * steps, 0, (size_t)((count - t->count) * steps) * sizeof(uint32_t));
    memset(work->sums, 0, (size_t)(count * size) * sizeof(float));
    memset(work->total, 0, (size_t)(count * LANES) * sizeof(float));
    for (ptrdiff_t i = 0; i < count; i++)
        work->top[i] = -INFINITY;
}

/* The factor of a query's summed values: one over its total of weights, which have the base `top`, and its sink's. */
static float share_of(const attention_layer *layer, ptrdiff_t head, float top, float total) {
    if (!layer->sinks)
        return total == 0 ? 0 : 1 / total;
    float sink = layer->sinks[head] * LOG2_E, most = sink > top ? sink : top, fade = exp2_of(top - most);
    return fade / (total * fade + exp2_of(sink - most));
}

/* The sums of one head's queries into the result, or into the segment's place among the partial ones: its sums, tops
   and totals. */
NEVER_INLINE void finish_head(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan,
                              ptrdiff_t head,
                               int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t size = value_words(step->head_dim), group = step->heads / step->kv_heads;
    if (plan->segments > 1) {
        float *to = step->partials + step->partials_at[t->row]
            + (head * plan->segments + t->segment) * partial_size(step, plan);
        memcpy(to, work->sums, (size_t)(t->count * size) * sizeof(float));
        memcpy(to + t->count * size, work->top, (size_t)t->count * sizeof(float));
        for (ptrdiff_t i = 0; i < t->count; i++)
            to[t->count * (size + 1) + i] = added_up(load(work->total + i * LANES));
        return;
    }
    for (ptrdiff_t i = 0; i < t->count; i++) {
        ptrdiff_t token = step->query_start[t->row] + (t->first + i) / group,
            of = head * group + (t->first + i) % group;
        float *sums = work->sums + i * size,
            share = share_of(layer, of, work->top[i], added_up(load(work->total + i * LANES)));
        for (ptrdiff_t c = 0; c < size; c += LANES)
            store(sums + c, load(sums + c) * share);
        ptrdiff_t place = token * step->heads + of;
        narrow((char *)layer->out + place * step->head_dim * number_bytes(mode), sums, step->head_dim, mode == PAIRS);
    }
}

/* One query's segments, in their order, into the result. */
ALWAYS_INLINE void combine(const attention_layer *layer, const workspace *work, const row_plan *plan, ptrdiff_t row,
                           ptrdiff_t head, ptrdiff_t query, int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t size = value_words(step->head_dim), group = step->heads / step->kv_heads, one = partial_size(step, plan);
    const float *partials = step->partials + step->partials_at[row] + head * plan->segments * one;
    float top = -INFINITY, total = 0, *sums = work->sums;
    for (ptrdiff_t s = 0; s < plan->segments; s++) {
        float of = partials[s * one + plan->queries * size + query];
        top = of > top ? of : top;
    }
    top = top == -INFINITY ? 0 : top;
    memset(sums, 0, (size_t)size * sizeof(float));
    for (ptrdiff_t s = 0; s < plan->segments; s++) {
        const float *from = partials + s * one;
        float share = exp2_of(from[plan->queries * size + query] - top);
        total += from[plan->queries * (size + 1) + query] * share;
        for (ptrdiff_t c = 0; c < size; c += LANES)
            store(sums + c, load(sums + c) + load(from + query * size + c) * share);
    }
    ptrdiff_t token = step->query_start[row] + query / group, of = head * group + query % group;
    float share = share_of(layer, of, top, total);
    for (ptrdiff_t c = 0; c < size; c += LANES)
        store(sums + c, load(sums + c) * share);
    ptrdiff_t place = token * step->heads + of;
    narrow((char *)layer->out + place * step->head_dim * number_bytes(mode), sums, step->head_dim, mode == PAIRS);
}

#endif

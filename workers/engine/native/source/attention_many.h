/* Tiles of many queries, which compute more than they wait for memory: one head of keys, in steps of several panels.
   Queries are taken ROWS at a time, and the last of them with what lies behind; of each, panels that none of them sees
   are left out. */
#ifndef ATTENTION_MANY_H
#define ATTENTION_MANY_H

#include "attention_panels.h"
#include "attention_queries.h"

/* A tile's keys of one step: whole panels, of which the first `count` tokens exist. */
typedef struct {
    const uint32_t *panels[STEP_PANELS];
    ptrdiff_t count;
    ptrdiff_t steps, size; /* key_words, value_words */
} key_step;

/* Scores of ROWS queries with `columns` vectors of keys, from vector `first` on. */
ALWAYS_INLINE void score(int columns, const uint32_t *queries, const key_step *keys, ptrdiff_t first, float *to,
                         int mode) {
    lanes sums[ROWS][COLUMNS];
    const uint32_t *panel[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        panel[j] = keys->panels[(first + j) / VECTORS] + (first + j) % VECTORS * LANES;
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            sums[i][j] = (lanes){0};
    }
    ptrdiff_t steps = keys->steps, own = factor_words(mode);
#pragma GCC unroll 2
    for (ptrdiff_t s = 0; s < steps; s++) {
        factor query[ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            query[i] = repeated_factor(queries + (i * steps + s) * own, mode);
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            words key = load_words(panel[j] + s * PANEL);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++)
                sums[i][j] = multiply_add(sums[i][j], query[i], key, mode);
        }
    }
    store_sums(ROWS, columns, to + first * LANES, KEYS, sums);
}

/* Adds the values of a step's first `count` keys, weighted, to `columns` vectors of the sums of ROWS queries, from
   vector `first` on. */
ALWAYS_INLINE void add_values(int columns, const uint32_t *weights, const key_step *keys, ptrdiff_t count,
                              ptrdiff_t first, float *to, int mode) {
    lanes sums[ROWS][COLUMNS];
    load_sums(ROWS, columns, to + first * LANES, keys->size, sums);
    for (ptrdiff_t p = 0; p * PANEL < count; p++)
        add_panel(ROWS, columns, weights + p * (PANEL / word_numbers(mode)) * factor_words(mode), KEYS,
                  keys->panels[p] + keys->steps * PANEL + first * LANES,
                  at_most(PANEL, count - p * PANEL), keys->size, 0, sums, mode);
    store_sums(ROWS, columns, to + first * LANES, keys->size, sums);
}

/* Turns the scores of ROWS queries with a step's keys into weights, of which those of keys [from, to) are not 0. */
ALWAYS_INLINE void weigh(float *scores, ptrdiff_t columns, const ptrdiff_t from[ROWS], const ptrdiff_t to[ROWS],
                         float factor, float *top, float *total, float *sums, ptrdiff_t size, int mode) {
    ptrdiff_t whole_from = 0, whole_to = columns;
    lanes most[ROWS], sum[ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
        whole_from = at_least(whole_from, parts(from[i], LANES));
        whole_to = at_most(whole_to, to[i] / LANES);
        most[i] = all(-INFINITY);
    }
    for (ptrdiff_t c = 0; c < columns; c++) {
        int whole = whole_from <= c && c < whole_to;
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
            lanes x = load(scores + i * KEYS + c * LANES);
            most[i] = larger(most[i], whole ? x : choose(between(c * LANES, from[i], to[i]), x, all(-INFINITY)));
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
        raise_top(most[i] * factor, top + i, total + i * LANES, sums + i * size, size);
        sum[i] = load(total + i * LANES);
    }
    for (ptrdiff_t c = 0; c < columns; c++) {
        int whole = whole_from <= c && c < whole_to;
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
            lanes weights = exp2_lanes(load(scores + i * KEYS + c * LANES) * factor - base_of(top[i]));
            if (!whole)
                weights = choose(between(c * LANES, from[i], to[i]), weights, (lanes){0});
            sum[i] += weights;
            store_weights(scores + i * KEYS, c, weights, mode);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++)
        store(total + i * LANES, sum[i]);
}

/* Functions of their own, so that each has the registers for itself. */
#define KERNELS(of, mode)                                                                                              \
    NEVER_INLINE void score_##of(const uint32_t *queries, const key_step *keys, ptrdiff_t columns, float *to) {        \
        ptrdiff_t c = 0;                                                                                               \
        for (; c + COLUMNS <= columns; c += COLUMNS)                                                                   \
            score(COLUMNS, queries, keys, c, to, mode);                                                                \
        if (columns - c == 3)                                                                                          \
            score(3, queries, keys, c, to, mode);                                                                      \
        else if (columns - c == 2)                                                                                     \
            score(2, queries, keys, c, to, mode);                                                                      \
        else if (columns - c)                                                                                          \
            score(1, queries, keys, c, to, mode);                                                                      \
    }                                                                                                                  \
    NEVER_INLINE void add_values_##of(const uint32_t *weights, const key_step *keys, ptrdiff_t count, float *to) {     \
        ptrdiff_t c = 0;                                                                                               \
        for (; c + COLUMNS <= keys->size / LANES; c += COLUMNS)                                                        \
            add_values(COLUMNS, weights, keys, count, c, to, mode);                                                    \
        for (; c < keys->size / LANES; c++)                                                                            \
            add_values(1, weights, keys, count, c, to, mode);                                                          \
    }                                                                                                                  \
    NEVER_INLINE void weigh_##of(float *scores, ptrdiff_t columns, const ptrdiff_t from[ROWS],                         \
                                 const ptrdiff_t to[ROWS], float factor, float *top, float *total, float *sums,        \
                                 ptrdiff_t size) {                                                                     \
        weigh(scores, columns, from, to, factor, top, total, sums, size, mode);                                        \
    }
KERNELS(floats, FLOATS)
KERNELS(pairs, PAIRS)
KERNELS(floats_by_pairs, FLOATS_BY_PAIRS)

typedef void scorer(const uint32_t *queries, const key_step *keys, ptrdiff_t columns, float *to);
typedef void weigher(float *scores, ptrdiff_t columns, const ptrdiff_t from[ROWS], const ptrdiff_t to[ROWS],
                     float factor, float *top, float *total, float *sums, ptrdiff_t size);
typedef void value_adder(const uint32_t *weights, const key_step *keys, ptrdiff_t count, float *to);

/* By the mode. */
static scorer *const scorers[] = {score_floats, score_pairs, score_floats_by_pairs};
static weigher *const weighers[] = {weigh_floats, weigh_pairs, weigh_floats_by_pairs};
static value_adder *const value_adders[] = {add_values_floats, add_values_pairs, add_values_floats_by_pairs};

/* Caps the scores of ROWS queries, which are yet to be multiplied with `scale`; the results are, with the cap. */
NEVER_INLINE void cap_scores(ptrdiff_t columns, float scale, float cap, float *scores) {
    for (ptrdiff_t r = 0; r < ROWS; r++)
        for (ptrdiff_t at = r * KEYS, c = 0; c < columns; c++, at += LANES)
            store(scores + at, tanh_lanes(load(scores + at) * (scale / cap)));
}

/* Adds to the scores of the tile's `rows` queries from query `i` on, with keys from `first` on, what is added by their
   places. Scores are yet to be multiplied with `scale`. */
NEVER_INLINE void add_bias(const attention_step *step, const tile *t, const row_plan *plan, ptrdiff_t i, ptrdiff_t rows,
                           ptrdiff_t first, ptrdiff_t columns, float scale, float *scores) {
    ptrdiff_t group = step->heads / step->kv_heads;
    float inverse = 1 / scale;
    for (ptrdiff_t r = 0; r < rows; r++) {
        ptrdiff_t query = t->first + i + r, position = plan->start + query / group;
        const float *bias = step->bias + (t->head * group + query % group) * step->bias_stride + first - position;
        for (ptrdiff_t at = r * KEYS, c = 0; c < columns; c++, at += LANES)
            store(scores + at, load(scores + at) + load(bias + c * LANES) * inverse);
    }
}

ALWAYS_INLINE void find_keys(const attention_layer *layer, const workspace *work, const tile *t, ptrdiff_t first,
                             ptrdiff_t end, key_step *keys, int mode) {
    ptrdiff_t words = panel_words(layer->step->head_dim, mode);
    keys->count = end - first;
    keys->steps = key_words(layer->step->head_dim, mode);
    keys->size = value_words(layer->step->head_dim);
    for (ptrdiff_t p = 0; p * PANEL < keys->count; p++)
        keys->panels[p] = find_panel(layer, t, t->head, first + p * PANEL, keys->count - p * PANEL,
                                     work->panels + p * words, mode);
}

/* Keys and values [first, end) of the tile's head. */
ALWAYS_INLINE void attend_keys(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan,
                               ptrdiff_t first, ptrdiff_t end, int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t group = step->heads / step->kv_heads;
    key_step keys;
    find_keys(layer, work, t, first, end, &keys, mode);
    for (ptrdiff_t i = 0; i < t->count; i += ROWS) {
        ptrdiff_t rows = at_most(ROWS, t->count - i), newest = plan->start + (t->first + i + rows - 1) / group;
        ptrdiff_t count = at_most(at_least(newest + 1 + step->after - first, 0), keys.count),
            columns = parts(count, PANEL) * VECTORS;
        const uint32_t *queries = work->queries + i * query_words(step->head_dim, mode);
        float *sums = work->sums + i * keys.size;
        ptrdiff_t from[ROWS] = {0}, to[ROWS] = {0};
        for (ptrdiff_t r = 0; r < rows; r++) {
            ptrdiff_t position = plan->start + (t->first + i + r) / group;
            from[r] = at_most(at_least(oldest_seen(step, position) - first, 0), KEYS);
            to[r] = at_most(at_least(position + 1 + step->after - first, 0), keys.count);
        }
        scorers[mode](queries, &keys, columns, work->scores);
        float scale = layer->scale;
        if (layer->soft_cap) {
            cap_scores(columns, scale, layer->soft_cap, work->scores);
            scale = layer->soft_cap;
        }
        if (step->bias)
            add_bias(step, t, plan, i, rows, first, columns, scale, work->scores);
        weighers[mode](work->scores, columns, from, to, scale * LOG2_E, work->top + i, work->total + i * LANES,
                       sums, keys.size);
        value_adders[mode]((uint32_t *)work->scores, &keys, count, sums);
    }
}

ALWAYS_INLINE void attend_many(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan,
                               int mode) {
    begin_head(layer, work, t, t->head, mode);
    for (ptrdiff_t at = t->begin / KEYS * KEYS; at < t->end; at += KEYS)
        attend_keys(layer, work, t, plan, at_least(at, t->begin / PANEL * PANEL), at_most(at + KEYS, t->end), mode);
    finish_head(layer, work, t, plan, t->head, mode);
}

#endif

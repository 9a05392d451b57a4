/* Tiles of few queries: several heads of keys, panel by panel in the order of the cache, so that it is read from one
   end to the other. What is computed must not keep memory waiting: a panel's scores are summed up in several chains,
   nothing is added up across a vector, and sums fade only where a score is above all before. */
#ifndef ATTENTION_FEW_H
#define ATTENTION_FEW_H

#include "attention_panels.h"
#include "attention_queries.h"

enum { CHAINS = LANES / 4 };

/* A panel, and up to ROWS queries of a head with what they have gathered. */
typedef struct {
    const uint32_t *panel, *queries; /* queries [ROWS][query_words] */
    float *sums, *total, *top;       /* [ROWS][value_words], [ROWS][LANES], [ROWS] */
    ptrdiff_t steps, size;           /* key_words, value_words */
    float factor, inner;             /* of scores; of what is capped, before it is */
    ptrdiff_t count;                    /* of the panel's tokens that exist */
    ptrdiff_t oldest[ROWS], end[ROWS];  /* those that each query sees, counted in the panel */
} meeting;

ALWAYS_INLINE void add_scores(int rows, const uint32_t *queries, ptrdiff_t width, const uint32_t *keys,
                              lanes sums[ROWS][VECTORS], int mode) {
    prefetch_ahead(keys, WORDS_AHEAD, VECTORS);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        words key = load_words(keys + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
            sums[i][v] = multiply_add(sums[i][v], repeated_factor(queries + i * width, mode), key, mode);
    }
}

ALWAYS_INLINE void score_panel(int rows, const meeting *m, lanes scores[ROWS][VECTORS], int mode) {
    ptrdiff_t own = factor_words(mode), width = m->steps * own;
    lanes sums[CHAINS][ROWS][VECTORS];
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++)
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[chain][i][v] = (lanes){0};
    ptrdiff_t s = 0;
    for (; s + CHAINS <= m->steps; s += CHAINS)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
            add_scores(rows, m->queries + (s + chain) * own, width, m->panel + (s + chain) * PANEL, sums[chain], mode);
    for (; s < m->steps; s++)
        add_scores(rows, m->queries + s * own, width, m->panel + s * PANEL, sums[0], mode);
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            scores[i][v] = sums[0][i][v];
#pragma GCC unroll 4
            for (int chain = 1; chain < CHAINS; chain++)
                scores[i][v] += sums[chain][i][v];
        }
}

/* How a panel is seen: as a whole, which exists; in part; or in part, with capped scores. */
enum { IN_PART, WHOLE, CAPPED };

/* Turns a query's scores into weights. */
ALWAYS_INLINE void weigh_panel(int i, int seen, const meeting *m, lanes scores[VECTORS], uint32_t *weights, int mode) {
    lanes most = all(-INFINITY);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        scores[v] = (seen == CAPPED ? tanh_lanes(scores[v] * m->inner) : scores[v]) * m->factor;
        if (seen != WHOLE)
            scores[v] = choose(between(v * LANES, m->oldest[i], m->end[i]), scores[v], all(-INFINITY));
        most = larger(most, scores[v]);
    }
    raise_top(most, m->top + i, m->total + i * LANES, m->sums + i * m->size, m->size);
    lanes total = load(m->total + i * LANES);
    float base = base_of(m->top[i]);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        lanes weight = exp2_lanes(scores[v] - base);
        if (seen != WHOLE)
            weight = choose(between(v * LANES, m->oldest[i], m->end[i]), weight, (lanes){0});
        total += weight;
        store_weights((float *)weights, v, weight, mode);
    }
    store(m->total + i * LANES, total);
}

ALWAYS_INLINE void add_columns(int rows, int columns, const uint32_t *weights, const meeting *m, ptrdiff_t count,
                               ptrdiff_t first, int mode) {
    lanes sums[ROWS][COLUMNS];
    load_sums(rows, columns, m->sums + first, m->size, sums);
    add_panel(rows, columns, weights, PANEL, m->panel + m->steps * PANEL + first, count, m->size, WORDS_AHEAD,
              sums, mode);
    store_sums(rows, columns, m->sums + first, m->size, sums);
}

ALWAYS_INLINE void gather(int rows, int seen, const meeting *m, int mode) {
    lanes scores[ROWS][VECTORS];
    uint32_t weights[ROWS][PANEL];
    score_panel(rows, m, scores, mode);
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
        weigh_panel(i, seen, m, scores[i], weights[i], mode);
    ptrdiff_t first = 0, count = seen == WHOLE ? PANEL : m->count;
    for (; first + COLUMNS * LANES <= m->size; first += COLUMNS * LANES)
        add_columns(rows, COLUMNS, weights[0], m, count, first, mode);
    for (; first < m->size; first += LANES)
        add_columns(rows, 1, weights[0], m, count, first, mode);
}

/* A function for each case, so that each has the registers for itself. */
#define GATHER(name, rows, mode)                         \
    NEVER_INLINE void name(const meeting *m) {           \
        gather(rows, WHOLE, m, mode);                    \
    }                                                    \
    NEVER_INLINE void name##_in_part(const meeting *m) { \
        gather(rows, IN_PART, m, mode);                  \
    }                                                    \
    NEVER_INLINE void name##_capped(const meeting *m) {  \
        gather(rows, CAPPED, m, mode);                   \
    }
#define AT_MOST_ROWS(n) ((n) < ROWS ? (n) : ROWS)
#define GATHERERS(of, mode)                      \
    GATHER(gather_1_##of, 1, mode)               \
    GATHER(gather_2_##of, 2, mode)               \
    GATHER(gather_3_##of, AT_MOST_ROWS(3), mode) \
    GATHER(gather_4_##of, AT_MOST_ROWS(4), mode)
GATHERERS(floats, FLOATS)
GATHERERS(pairs, PAIRS)
GATHERERS(floats_by_pairs, FLOATS_BY_PAIRS)

typedef void gatherer(const meeting *m);

/* By the mode, by the number of queries, and by how the panel is seen. */
#define OF_EACH_WAY(of) {of##_in_part, of, of##_capped}
#define OF_EACH_NUMBER(of)                                          \
    {                                                               \
        OF_EACH_WAY(gather_1_##of), OF_EACH_WAY(gather_2_##of),     \
        OF_EACH_WAY(gather_3_##of), OF_EACH_WAY(gather_4_##of),     \
    }
static gatherer *const gatherers[][4][3] = {
    OF_EACH_NUMBER(floats), OF_EACH_NUMBER(pairs), OF_EACH_NUMBER(floats_by_pairs)
};

/* What ROWS queries of each head, from query `first` of the tile on, see of the panel that begins with token `at`.
   Returns whether all of it. */
ALWAYS_INLINE int see(const attention_step *step, const tile *t, const row_plan *plan, ptrdiff_t first, ptrdiff_t rows,
                      ptrdiff_t at, meeting *m) {
    ptrdiff_t group = step->heads / step->kv_heads;
    int whole = m->count == PANEL;
    for (ptrdiff_t i = 0; i < rows; i++) {
        ptrdiff_t position = plan->start + (t->first + first + i) / group;
        m->oldest[i] = oldest_seen(step, position) - at;
        m->end[i] = at_most(position + 1 - at, m->count);
        whole &= m->oldest[i] <= 0 && m->end[i] == PANEL;
    }
    return whole;
}

/* Adds the panels of a tile's heads that begin with token `at` to what the heads' queries have gathered. */
ALWAYS_INLINE void meet(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan,
                        ptrdiff_t at, int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t steps = key_words(step->head_dim, mode), size = value_words(step->head_dim),
        beside = block_words(step, mode);
    int whole = in_panels(step->head_dim, step->block_size);
    float cap = layer->soft_cap;
    meeting m = {.steps = steps, .size = size, .factor = (cap ? cap : layer->scale) * LOG2_E,
                 .inner = cap ? layer->scale / cap : 0, .count = at_most(PANEL, t->end - at)};
    for (ptrdiff_t first = 0; first < t->count; first += ROWS) {
        ptrdiff_t rows = at_most(ROWS, t->count - first);
        int whole_panel = see(step, t, plan, first, rows, at, &m);
        gatherer *add = gatherers[mode][rows - 1][cap ? CAPPED : whole_panel ? WHOLE : IN_PART];
        m.panel = find_panel(layer, t, t->head, at, m.count, work->panels, mode);
        for (ptrdiff_t head = 0, query = first; head < t->heads; head++, query += t->count) {
            if (head > 0)
                m.panel = whole ? m.panel + beside
                    : find_panel(layer, t, t->head + head, at, m.count, work->panels, mode);
            m.queries = work->queries + query * query_words(step->head_dim, mode);
            m.sums = work->sums + query * size;
            m.total = work->total + query * LANES;
            m.top = work->top + query;
            add(&m);
        }
    }
}

ALWAYS_INLINE void attend_few(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan,
                              int mode) {
    write_tile(layer, work, t, plan, mode);
    for (ptrdiff_t head = t->head; head < t->head + t->heads; head++) {
        workspace part = of_head(work, layer->step, t, head, mode);
        begin_head(layer, &part, t, head, mode);
    }
    for (ptrdiff_t at = t->begin / PANEL * PANEL; at < t->end; at += PANEL)
        meet(layer, work, t, plan, at, mode);
    for (ptrdiff_t head = t->head; head < t->head + t->heads; head++) {
        workspace part = of_head(work, layer->step, t, head, mode);
        finish_head(layer, &part, t, plan, head, mode);
    }
}

#endif

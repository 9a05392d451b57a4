/* Attention over a paged cache, prefill and decode rows in one call, in float, in bf16 with sums in float, or in float
   over a cache in bf16.

   Keys and values are stored in panels of 16 tokens of one head. A panel's keys go first, by pairs along the head's
   numbers, each pair for all 16 tokens; then its values, by pairs of tokens, each pair for all of the head's numbers.
   (With a cache in float, for "pair" read one number.) So one vector instruction takes what both products need, as it
   lies there: 16 scores at a time, and 16 numbers of a result. Where a block does not consist of whole panels, or a head
   of whole vectors, blocks hold plain rows, and panels are made of them as they are read.

   A row's queries, of all heads that share a head of keys, are cut into tiles; a tile goes through its keys in steps,
   with the softmax of Milakov and Gimelshein (2018). The keys of a row with a single tile are cut too, at fixed places,
   and what comes of them is combined in their order. Tiles are dealt out in shares of equal work, but no row's numbers
   depend on the other rows, or on how many threads there are.

   What lies behind the end of a row in its last panel, be it no numbers at all, changes nothing: scores with such keys
   are thrown away, and such values are never multiplied with. */

#include "attention_few.h"
#include "attention_many.h"
#include "attention_plan.h"
#include "parallel.h"

ptrdiff_t attention_scratch(int32_t mode, int32_t kv_heads, int32_t head_dim, int32_t block_size);

/* The next `words` words of a workspace, whole lines of them; nothing where only its size is asked for. */
static void *taken(float *space, ptrdiff_t *used, ptrdiff_t words) {
    float *start = space ? space + *used : NULL;
    *used += parts(words, PANEL) * PANEL;
    return start;
}

/* Lays out `space`, and returns how many floats that takes. */
static ptrdiff_t lay_out(workspace *work, float *space, int mode, ptrdiff_t kv_heads, ptrdiff_t head_dim,
                         ptrdiff_t block_size) {
    ptrdiff_t used = 0, queries = at_least(TILE, FEW * kv_heads);
    work->numbers = taken(space, &used, head_dim);
    work->turned = taken(space, &used, head_dim);
    work->queries = taken(space, &used, queries * query_words(head_dim, mode));
    work->scores = taken(space, &used, ROWS * KEYS);
    work->sums = taken(space, &used, queries * value_words(head_dim));
    work->top = taken(space, &used, queries);
    work->total = taken(space, &used, queries * LANES);
    work->panels = taken(space, &used, in_panels(head_dim, block_size) ? 0 : STEP_PANELS * panel_words(head_dim, mode));
    work->values = taken(space, &used, mode == FLOATS_BY_PAIRS ? PANEL * key_words(head_dim, mode) : 0);
    return used;
}

/* Floats of scratch that each share of the work needs. */
ptrdiff_t attention_scratch(int32_t mode, int32_t kv_heads, int32_t head_dim, int32_t block_size) {
    workspace work;
    return lay_out(&work, NULL, mode, kv_heads, head_dim, block_size);
}

static int comes_before(const cursor *at, const int32_t end[3]) {
    return at->row < end[0] || (at->row == end[0] && (at->head < end[1] || (at->head == end[1] && at->n < end[2])));
}

ALWAYS_INLINE void attend_share(const attention_layer *layer, const workspace *work, const int32_t from[3],
                                const int32_t to[3], int mode) {
    const attention_step *step = layer->step;
    cursor at = {from[0], from[1], from[2], {0}};
    if (at.row < step->num_rows)
        at.plan = plan_row(step, at.row);
    for (; comes_before(&at, to); move_on(step, &at)) {
        tile t = nth_tile(step, &at.plan, at.row, at.head, at.n);
        if (at.plan.few)
            attend_few(layer, work, &t, &at.plan, mode);
        else
            attend_many(layer, work, &t, &at.plan, mode);
    }
}

ALWAYS_INLINE void combine_share(const attention_layer *layer, const workspace *work, ptrdiff_t share, int mode) {
    const attention_step *step = layer->step;
    ptrdiff_t number = 0;
    for (int32_t row = 0; row < step->num_rows; row++) {
        if (step->partials_at[row] < 0)
            continue;
        row_plan plan = plan_row(step, row);
        for (ptrdiff_t head = 0; head < step->kv_heads; head++)
            for (ptrdiff_t query = 0; query < plan.queries; query++)
                if (number++ % step->shares == share)
                    combine(layer, work, &plan, row, head, query, mode);
    }
}

/* One thread's part of a layer. */
ALWAYS_INLINE void attend(const attention_layer *layer, ptrdiff_t thread, ptrdiff_t threads, int mode) {
    const attention_step *step = layer->step;
    workspace work;
    lay_out(&work, step->scratch + at_most(thread, step->shares - 1) * step->scratch_size, mode, step->kv_heads,
            step->head_dim, step->block_size);
    if (step->any_ahead && layer->k) {
        for (ptrdiff_t share = thread; share < step->shares; share += threads)
            write_share(layer, &work, share, mode);
        meet_parts(threads);
    }
    for (ptrdiff_t share = thread; share < step->shares; share += threads)
        attend_share(layer, &work, step->starts[share], step->starts[share + 1], mode);
    if (step->partials) {
        meet_parts(threads);
        for (ptrdiff_t share = thread; share < step->shares; share += threads)
            combine_share(layer, &work, share, mode);
    }
}

/* A function for each mode, which is compiled for it. */
static void attend_floats(void *layer, ptrdiff_t thread, ptrdiff_t threads) {
    attend(layer, thread, threads, FLOATS);
}

static void attend_pairs(void *layer, ptrdiff_t thread, ptrdiff_t threads) {
    attend(layer, thread, threads, PAIRS);
}

static void attend_floats_by_pairs(void *layer, ptrdiff_t thread, ptrdiff_t threads) {
    attend(layer, thread, threads, FLOATS_BY_PAIRS);
}

static part_runner *const attenders[] = {attend_floats, attend_pairs, attend_floats_by_pairs};

/* Writes k and v to the cache, then attend q over it: q [num_tokens][heads], k and v [num_tokens][kv_heads], of
   head_dim numbers each, with the step's strides; out [num_tokens][heads][head_dim]. With a rotation, queries and keys
   are turned first and, where there are norms, normed before or after that. Scores are limited to the soft cap, if it is
   not 0; sinks [heads], if there are any, are scores without values. With k and v NULL nothing is written: the keys and
   values of the step's tokens are in the cache. */
void attend_layer(const attention_step *step, const head_rotation *rotation, uint32_t *cache, const void *q,
                  const void *k, const void *v, void *out, const norm_weights *query_norm,
                  const norm_weights *key_norm, float scale, float soft_cap, const float *sinks) {
    attention_layer layer = {step, rotation, cache, q, k, v, query_norm, key_norm, out, scale, soft_cap, sinks};
    run_parts(attenders[step->mode], &layer, step->shares);
}

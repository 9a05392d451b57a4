/* Attention over a paged cache, prefill and decode rows in one call, in float or in bf16 with sums in float.

   Keys and values stand in panels of 16 tokens of one head. A panel's keys go first, by pairs along the head's numbers, each pair for all 16
   tokens; then its values, by pairs of tokens, each pair for all of the head's numbers. (In float, for "pair" read one number.) So one
   vector instruction takes what both products need, as it lies there: 16 scores at a time, and 16 numbers of a result. Where a block does not
   consist of whole panels, or a head of whole vectors, blocks hold plain rows, and panels are made of them as they are read.

   A row's queries, of all heads that share a head of keys, are cut into tiles; a tile goes through its keys in steps, with the softmax of
   Milakov and Gimelshein (2018). The keys of a row with a single tile are cut too, at fixed places, and what comes of them is combined in their
   order. Tiles are dealt out in shares of equal work, but nobody's numbers depend on the other rows, or on how many threads there are.

   Nothing is read that does not belong to the row: in a last panel, what lies behind its end is never multiplied with. */

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels.h"
#include "lanes.h"

enum {
    PANEL = 16,              /* tokens */
    VECTORS = PANEL / LANES, /* of a panel's scores */
    TILE = 32,               /* queries */
    KEYS = 128,              /* in one step of a tile */
    SEGMENT = 256,           /* keys after which a single tile's are cut */
    STEP_PANELS = KEYS / PANEL,
    FEW = 8,          /* queries of a row that waits for memory more than it computes: a tile of it takes several heads of keys, */
    FEW_KEYS = PANEL, /* and in one step a panel of each, for these lie one behind the other */
#if defined(__AVX512F__)
    ROWS = 4, /* queries, and vectors, whose sums are kept in registers */
    COLUMNS = 4
#else
    ROWS = 2,
    COLUMNS = 4
#endif
};

typedef struct {
    int32_t row, head, heads; /* heads of keys, from `head` on */
    int32_t first, count;     /* queries of the row for each head of keys: token by token, and of one token head by head */
    int32_t begin, end;       /* keys */
    int32_t segment;
} tile;

struct attention_step {
    int32_t pair; /* numbers in a word: 1 of float, 2 of bf16 */
    int32_t heads, kv_heads, head_dim, block_size;
    int32_t window; /* tokens that a query sees, itself included; 0 for all before it */
    int32_t num_tokens, num_rows, max_blocks;
    int32_t shares;             /* into which the work is cut */
    int32_t together;           /* heads of keys that a tile of few queries takes */
    const int64_t *slots;       /* [num_tokens] block * block_size + offset */
    const int32_t *query_start; /* [num_rows + 1] */
    const int32_t *contexts;    /* [num_rows] */
    const int32_t *tables;      /* [num_rows][max_blocks] */
    int32_t (*starts)[3];       /* [shares + 1] of row, head and tile */
    int64_t *partials_at;       /* [num_rows] in `partials`; -1 where keys are not cut */
    float *partials;
    float *scratch;
    ptrdiff_t scratch_size; /* floats of each share */
    ptrdiff_t query_stride[2], key_stride[2], value_stride[2]; /* in numbers, from token to token and from head to head */
    const void *cos, *sin; /* [num_tokens][head_dim], with the sine's first half negated; NULL for no rotation */
    ptrdiff_t rotation_stride;
};

typedef struct {
    const attention_step *step;
    uint32_t *cache;
    const void *q, *k, *v, *query_norm, *key_norm;
    void *out;
    float eps, scale;
} attention_layer;

ptrdiff_t attention_scratch(int32_t pair, int32_t kv_heads, int32_t head_dim, int32_t block_size);
ptrdiff_t attention_plan(attention_step *step);

ALWAYS_INLINE ptrdiff_t at_most(ptrdiff_t x, ptrdiff_t y) {
    return x < y ? x : y;
}

ALWAYS_INLINE ptrdiff_t at_least(ptrdiff_t x, ptrdiff_t y) {
    return x > y ? x : y;
}

ALWAYS_INLINE ptrdiff_t parts(ptrdiff_t whole, ptrdiff_t part) {
    return (whole + part - 1) / part;
}

/* Words of a head's query or key, and of one token pair's values in a panel, whole vectors of them. */
ALWAYS_INLINE ptrdiff_t key_words(ptrdiff_t head_dim, int pair) {
    return parts(head_dim, pair);
}

ALWAYS_INLINE ptrdiff_t value_words(ptrdiff_t head_dim) {
    return parts(head_dim, PANEL) * PANEL;
}

ALWAYS_INLINE ptrdiff_t panel_words(ptrdiff_t head_dim, int pair) {
    return key_words(head_dim, pair) * PANEL + PANEL / pair * value_words(head_dim);
}

ALWAYS_INLINE int in_panels(ptrdiff_t head_dim, ptrdiff_t block_size) {
    return head_dim % PANEL == 0 && block_size % PANEL == 0;
}

/* Where a share of the work keeps what it works on. */
typedef struct {
    float *numbers, *turned;   /* [head_dim], one query or key */
    uint32_t *queries;         /* [queries of a tile][key_words] */
    float *scores;             /* [TILE][KEYS], then the weights as words [TILE][KEYS] */
    float *sums;               /* [queries of a tile][value_words] */
    float *top, *total, *fade; /* [queries of a tile] */
    uint32_t *panels;          /* [STEP_PANELS], where blocks hold plain rows */
} workspace;

/* The next `words` words of a workspace, whole lines of them; nothing where only its size is asked for. */
static void *taken(float *space, ptrdiff_t *used, ptrdiff_t words) {
    float *start = space ? space + *used : NULL;
    *used += parts(words, PANEL) * PANEL;
    return start;
}

/* Lays out `space`, and returns how many floats that takes. */
static ptrdiff_t lay_out(workspace *work, float *space, int pair, ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t block_size) {
    ptrdiff_t used = 0, queries = at_least(TILE, FEW * kv_heads);
    work->numbers = taken(space, &used, head_dim);
    work->turned = taken(space, &used, head_dim);
    work->queries = taken(space, &used, queries * key_words(head_dim, pair));
    work->scores = taken(space, &used, TILE * KEYS);
    work->sums = taken(space, &used, queries * value_words(head_dim));
    work->top = taken(space, &used, queries);
    work->total = taken(space, &used, queries);
    work->fade = taken(space, &used, queries);
    work->panels = taken(space, &used, in_panels(head_dim, block_size) ? 0 : STEP_PANELS * panel_words(head_dim, pair));
    return used;
}

/* Floats of scratch that each share of the work needs. */
ptrdiff_t attention_scratch(int32_t pair, int32_t kv_heads, int32_t head_dim, int32_t block_size) {
    workspace work;
    return lay_out(&work, NULL, pair, kv_heads, head_dim, block_size);
}

/* ---- The plan: rows into tiles, tiles into shares. The same for all layers of a step. ---- */

typedef struct {
    int32_t context, start, queries, heads, tiles, segments, first_segment;
} row_plan;

static row_plan plan_row(const attention_step *step, int32_t row) {
    int32_t tokens = step->query_start[row + 1] - step->query_start[row];
    row_plan plan = {.context = step->contexts[row], .queries = tokens * (step->heads / step->kv_heads)};
    plan.start = plan.context - tokens;
    plan.tiles = (int32_t)parts(plan.queries, TILE);
    plan.heads = plan.queries <= FEW ? step->together : 1;
    plan.segments = 1;
    if (plan.tiles == 1) {
        int32_t begin = step->window ? (int32_t)at_least(plan.start + 1 - step->window, 0) : 0;
        plan.first_segment = begin / SEGMENT;
        plan.segments = (int32_t)at_least(parts(plan.context, SEGMENT) - plan.first_segment, 1);
    }
    return plan;
}

/* One tile of a row; a segment of the keys, where those are cut. */
static tile nth_tile(const attention_step *step, const row_plan *plan, int32_t row, int32_t head, int32_t n) {
    int32_t group = step->heads / step->kv_heads;
    tile t = {.row = row, .head = head, .heads = (int32_t)at_most(plan->heads, step->kv_heads - head)};
    t.segment = plan->segments > 1 ? n : 0;
    t.first = plan->segments > 1 ? 0 : n * TILE;
    t.count = (int32_t)at_most(TILE, plan->queries - t.first);
    int32_t oldest = plan->start + t.first / group, newest = plan->start + (t.first + t.count - 1) / group;
    t.begin = step->window ? (int32_t)at_least(oldest + 1 - step->window, 0) : 0;
    t.end = (int32_t)at_least(newest + 1, 0);
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

/* A place in the order of all tiles: by row, then by head, then by query or segment. */
typedef struct {
    int32_t row, head, n;
    row_plan plan;
} cursor;

static void start_row(const attention_step *step, cursor *at) {
    at->head = at->n = 0;
    for (; at->row < step->num_rows; at->row++) {
        at->plan = plan_row(step, at->row);
        if (at->plan.tiles)
            return;
    }
}

static void move_on(const attention_step *step, cursor *at) {
    if (++at->n < at->plan.tiles * at->plan.segments)
        return;
    at->n = 0;
    at->head += at->plan.heads;
    if (at->head < step->kv_heads)
        return;
    at->row++;
    start_row(step, at);
}

/* Deals out the work to `shares`. Returns how many floats `partials` takes; 0 where no row's keys are cut. */
ptrdiff_t attention_plan(attention_step *step) {
    ptrdiff_t partials = 0, few = 0;
    int64_t whole = 0, reached = 0;
    step->together = 1;
    for (int32_t row = 0; row < step->num_rows; row++) {
        row_plan plan = plan_row(step, row);
        few += plan.queries <= FEW ? plan.segments : 0;
        step->partials_at[row] = plan.segments > 1 ? partials : -1;
        if (plan.segments > 1)
            partials += (ptrdiff_t)step->kv_heads * plan.segments * plan.queries * (value_words(step->head_dim) + 2);
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

/* ---- Keys and values into the cache. ---- */

/* A head's query or key as it attends: normed and turned where the model does that. Points to its words: `from` itself, or `to`. */
ALWAYS_INLINE const void *prepared(const attention_layer *layer, const workspace *work, const void *from, const void *norm, ptrdiff_t token,
                                   void *to, int pair) {
    const attention_step *step = layer->step;
    ptrdiff_t size = step->head_dim, half = size / 2;
    if (!step->cos)
        return from;
    float *x = work->numbers, *turned = work->turned;
    widen(x, from, size, pair);
    if (norm) {
        lanes squares = {0};
        float rest = 0, *weights = turned;
        ptrdiff_t i = 0;
        for (; i + LANES <= size; i += LANES)
            squares += load(x + i) * load(x + i);
        for (; i < size; i++)
            rest += x[i] * x[i];
        float scale = 1.0f / sqrtf((added_up(squares) + rest) / (float)size + layer->eps);
        widen(weights, norm, size, pair);
        for (i = 0; i < size; i++)
            x[i] = x[i] * scale * weights[i];
    }
    const char *cos = step->cos, *sin = step->sin;
    ptrdiff_t row = token * step->rotation_stride * (4 / pair);
    if (pair == 1) {
        const float *c = (const float *)(cos + row), *s = (const float *)(sin + row);
        for (ptrdiff_t i = 0; i < half; i++)
            turned[i] = x[i] * c[i] + x[i + half] * s[i];
        for (ptrdiff_t i = half; i < size; i++)
            turned[i] = x[i] * c[i] + x[i - half] * s[i];
    } else {
        const bf16 *c = (const bf16 *)(cos + row), *s = (const bf16 *)(sin + row);
        for (ptrdiff_t i = 0; i < half; i++)
            turned[i] = x[i] * float_of_bf16(c[i]) + x[i + half] * float_of_bf16(s[i]);
        for (ptrdiff_t i = half; i < size; i++)
            turned[i] = x[i] * float_of_bf16(c[i]) + x[i - half] * float_of_bf16(s[i]);
    }
    narrow(to, turned, size, pair);
    return to;
}

ALWAYS_INLINE const void *numbers_at(const void *tensor, const ptrdiff_t stride[2], ptrdiff_t token, ptrdiff_t head, int pair) {
    return (const char *)tensor + (token * stride[0] + head * stride[1]) * (4 / pair);
}

/* Words of one head's keys and values in a block. */
ALWAYS_INLINE ptrdiff_t block_words(const attention_step *step, int pair) {
    return 2 * (ptrdiff_t)step->block_size * step->head_dim / pair;
}

ALWAYS_INLINE uint32_t *panel_at(const attention_step *step, uint32_t *cache, ptrdiff_t block, ptrdiff_t head, ptrdiff_t offset, int pair) {
    return cache + (block * step->kv_heads + head) * block_words(step, pair) + offset / PANEL * panel_words(step->head_dim, pair);
}

/* One token's key and value into their panel. Other tokens' may be written at the same time by others, so no byte of theirs is touched. */
ALWAYS_INLINE void put_token(const attention_step *step, uint32_t *panel, ptrdiff_t lane, const void *key, const void *value, int pair) {
    ptrdiff_t size = step->head_dim, steps = size / pair;
    for (ptrdiff_t i = 0; i < steps; i++)
        memcpy(panel + i * PANEL + lane, (const char *)key + 4 * i, 4);
    uint32_t *values = panel + steps * PANEL + lane / pair * size;
    if (pair == 1)
        memcpy(values, value, (size_t)size * 4);
    else
        for (ptrdiff_t i = 0; i < size; i++)
            ((bf16 *)values)[2 * i + lane % 2] = ((const bf16 *)value)[i];
}

static void put_row(const attention_step *step, uint32_t *cache, ptrdiff_t slot, ptrdiff_t head, const void *key, const void *value, int pair) {
    ptrdiff_t bytes = step->head_dim * (4 / pair), block = slot / step->block_size, offset = slot % step->block_size;
    char *keys = (char *)cache + (block * step->kv_heads + head) * 2 * step->block_size * bytes;
    memcpy(keys + offset * bytes, key, (size_t)bytes);
    memcpy(keys + (step->block_size + offset) * bytes, value, (size_t)bytes);
}

/* A whole panel at once: `keys` and `values` are of its 16 tokens. */
ALWAYS_INLINE void put_panel(const attention_step *step, uint32_t *panel, const char *const keys[PANEL], const char *const values[PANEL],
                             int pair) {
    ptrdiff_t size = step->head_dim, steps = size / pair;
    for (ptrdiff_t from = 0; from < steps; from += LANES)
        for (ptrdiff_t lane = 0; lane < PANEL; lane += LANES) {
            words square[LANES];
            ptrdiff_t width = at_most(LANES, steps - from);
            for (ptrdiff_t i = 0; i < LANES; i++) {
                square[i] = (words){0};
                if (width == LANES)
                    square[i] = load_words(keys[lane + i] + 4 * from);
                else
                    memcpy(&square[i], keys[lane + i] + 4 * from, (size_t)width * 4);
            }
            transpose(square);
            for (ptrdiff_t i = 0; i < width; i++)
                store_words(panel + (from + i) * PANEL + lane, square[i]);
        }
    panel += steps * PANEL;
    for (ptrdiff_t token = 0; token < PANEL; token += pair, panel += size) {
        if (pair == 1) {
            memcpy(panel, values[token], (size_t)size * 4);
            continue;
        }
        const bf16 *even = (const bf16 *)values[token], *odd = (const bf16 *)values[token + 1];
        for (ptrdiff_t i = 0; i < size; i++)
            panel[i] = even[i] | (uint32_t)odd[i] << 16;
    }
}

/* Whether the tokens from `token` on are those of a whole panel, in their order. */
static int panel_begins(const attention_step *step, ptrdiff_t token, ptrdiff_t end) {
    const int64_t *slots = step->slots + token;
    if (end - token < PANEL || slots[0] % PANEL)
        return 0;
    for (ptrdiff_t i = 1; i < PANEL; i++)
        if (slots[i] != slots[0] + i)
            return 0;
    return 1;
}

/* `count` tokens' keys and values of one head: one token, or a panel of them. */
ALWAYS_INLINE void write_head(const attention_layer *layer, const workspace *work, ptrdiff_t token, ptrdiff_t count, ptrdiff_t head,
                              int pair) {
    const attention_step *step = layer->step;
    ptrdiff_t slot = step->slots[token], steps = key_words(step->head_dim, pair);
    const char *keys[PANEL], *values[PANEL];
    for (ptrdiff_t i = 0; i < count; i++) {
        const void *key = numbers_at(layer->k, step->key_stride, token + i, head, pair);
        keys[i] = prepared(layer, work, key, layer->key_norm, token + i, work->queries + i * steps, pair);
        values[i] = numbers_at(layer->v, step->value_stride, token + i, head, pair);
    }
    if (!in_panels(step->head_dim, step->block_size)) {
        put_row(step, layer->cache, slot, head, keys[0], values[0], pair);
        return;
    }
    uint32_t *panel = panel_at(step, layer->cache, slot / step->block_size, head, slot % step->block_size, pair);
    if (count == PANEL)
        put_panel(step, panel, keys, values, pair);
    else
        put_token(step, panel, slot % PANEL, keys[0], values[0], pair);
}

ALWAYS_INLINE void write_tokens(const attention_layer *layer, const workspace *work, ptrdiff_t from, ptrdiff_t to, int pair) {
    const attention_step *step = layer->step;
    int whole = in_panels(step->head_dim, step->block_size);
    for (ptrdiff_t count = 1, token = from; token < to; token += count) {
        count = whole && panel_begins(step, token, to) ? PANEL : 1;
        for (ptrdiff_t head = 0; head < step->kv_heads; head++)
            write_head(layer, work, token, count, head, pair);
    }
}

/* ---- Tiles. ---- */

/* A tile's keys of one step: whole panels, of which the first `count` tokens exist. */
typedef struct {
    const uint32_t *panels[STEP_PANELS];
    ptrdiff_t count;
} key_step;

/* Scores of `rows` queries with `columns` vectors of keys. */
ALWAYS_INLINE void score(int rows, int columns, const uint32_t *queries, const key_step *keys, ptrdiff_t first, ptrdiff_t steps, float *to,
                         int pair) {
    lanes sums[ROWS][COLUMNS];
    const uint32_t *panel[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        panel[j] = keys->panels[(first + j) / VECTORS] + (first + j) % VECTORS * LANES;
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
            sums[i][j] = (lanes){0};
    }
    for (ptrdiff_t s = 0; s < steps; s++) {
        words key[COLUMNS];
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            key[j] = load_words(panel[j] + s * PANEL);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            words query = repeated(queries + i * steps + s);
#pragma GCC unroll 8
            for (int j = 0; j < columns; j++)
                sums[i][j] = multiply_add(sums[i][j], query, key[j], pair);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            store(to + i * KEYS + (first + j) * LANES, sums[i][j]);
}

/* Adds a word of values of each number, weighted, to sums. `mask`: which bits of the values are the row's. */
ALWAYS_INLINE void add_words(int rows, int columns, const uint32_t *weights, const uint32_t *values, uint32_t mask, lanes sums[ROWS][COLUMNS],
                             int pair) {
    words value[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++)
        value[j] = load_words(values + j * LANES) & mask;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        words weight = repeated(weights + i * KEYS);
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            sums[i][j] = multiply_add(sums[i][j], weight, value[j], pair);
    }
}

/* Adds the values of a step's keys, weighted, to `columns` vectors of the sums of `rows` queries, after these have faded. */
ALWAYS_INLINE void add_values(int rows, int columns, const uint32_t *weights, const key_step *keys, ptrdiff_t first, ptrdiff_t key_size,
                              ptrdiff_t size, const float *fade, float *to, int pair) {
    lanes sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            sums[i][j] = load(to + i * size + (first + j) * LANES) * fade[i];
    for (ptrdiff_t p = 0, left = keys->count; left > 0; p++, left -= PANEL) {
        const uint32_t *values = keys->panels[p] + key_size + first * LANES;
        const uint32_t *end = values + at_most(left, PANEL) / pair * size;
        for (; values < end; values += size, weights++)
            add_words(rows, columns, weights, values, 0xffffffffu, sums, pair);
        if (pair == 2 && left < PANEL && left % 2) /* the last pair's other half is not the row's */
            add_words(rows, columns, weights, values, 0xffffu, sums, pair);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            store(to + i * size + (first + j) * LANES, sums[i][j]);
}

/* The same code for each number of rows and columns that fit into registers, so that their loops are unrolled. */
#define FOR_COLUMNS(CALL, rows) \
    switch (columns) {          \
    case 1: CALL(rows, 1);      \
    case 2: CALL(rows, 2);      \
    case 3: CALL(rows, 3);      \
    default: CALL(rows, 4);     \
    }
#define FOR_ROWS_AND_COLUMNS(CALL)          \
    switch (rows) {                         \
    case 1: FOR_COLUMNS(CALL, 1);           \
    case 2: FOR_COLUMNS(CALL, 2);           \
    case 3: FOR_COLUMNS(CALL, at_most_rows(3)); \
    default: FOR_COLUMNS(CALL, at_most_rows(4)); \
    }
#define at_most_rows(n) ((n) < ROWS ? (n) : ROWS)

ALWAYS_INLINE void score_some(int rows, int columns, const uint32_t *queries, const key_step *keys, ptrdiff_t first, ptrdiff_t steps,
                              float *to, int pair) {
#define CALL(r, c) score(r, c, queries, keys, first, steps, to, pair); return
    FOR_ROWS_AND_COLUMNS(CALL)
#undef CALL
}

ALWAYS_INLINE void add_some_values(int rows, int columns, const uint32_t *weights, const key_step *keys, ptrdiff_t first,
                                   ptrdiff_t key_size, ptrdiff_t size, const float *fade, float *to, int pair) {
#define CALL(r, c) add_values(r, c, weights, keys, first, key_size, size, fade, to, pair); return
    FOR_ROWS_AND_COLUMNS(CALL)
#undef CALL
}

ALWAYS_INLINE integers between(ptrdiff_t at, ptrdiff_t from, ptrdiff_t to) {
    integers number;
    for (int i = 0; i < LANES; i++)
        number[i] = (int32_t)at + i;
    return (number >= (int32_t)from) & (number < (int32_t)to);
}

/* Weights of half a panel's words or more, over the scores that they are made of, which were read already. */
ALWAYS_INLINE void store_weights(float *scores, ptrdiff_t column, lanes weights, int pair) {
    if (pair == 1) {
        store(scores + column * LANES, weights);
        return;
    }
#if defined(__AVX512BF16__)
    __m256bh packed = _mm512_cvtneps_pbh((__m512)weights);
    memcpy(scores + column * LANES / 2, &packed, sizeof packed);
#else
    words bits = (words)weights;
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    bf16 packed[LANES];
    for (int i = 0; i < LANES; i++)
        packed[i] = (bf16)bits[i];
    memcpy((bf16 *)scores + column * LANES, packed, sizeof packed);
#endif
}

/* Turns one query's scores with a step's keys into weights, of which those of keys [from, to) are not 0. Scores are multiplied by `factor`. */
ALWAYS_INLINE void weigh(float *scores, ptrdiff_t columns, ptrdiff_t from, ptrdiff_t to, float factor, float *top, float *total, float *fade,
                         int pair) {
    lanes most = all(-INFINITY);
    ptrdiff_t first = at_least(from, 0) / LANES, last = at_most(parts(at_least(to, 0), LANES), columns);
    ptrdiff_t whole_from = parts(at_least(from, 0), LANES), whole_to = at_least(to, 0) / LANES;
    for (ptrdiff_t c = first; c < last; c++) {
        lanes x = load(scores + c * LANES);
        if (c < whole_from || c >= whole_to)
            x = choose(between(c * LANES, from, to), x, all(-INFINITY));
        most = larger(most, x);
    }
    float before = *top, now = largest(most) * factor;
    now = before > now ? before : now;
    *top = now;
    float base = now == -INFINITY ? 0.0f : now;
    *fade = exp2_of(before - base);
    lanes sum = {0};
    for (ptrdiff_t c = 0; c < columns; c++) {
        lanes weights = {0};
        if (c >= first && c < last) {
            weights = exp2_lanes(load(scores + c * LANES) * factor - base);
            if (c < whole_from || c >= whole_to)
                weights = choose(between(c * LANES, from, to), weights, (lanes){0});
            sum += weights;
        }
        store_weights(scores, c, weights, pair);
    }
    *total = *total * *fade + added_up(sum);
}

/* Panels of rows that lie one behind the other in blocks; what does not exist is 0. */
static void make_panel(const attention_step *step, const uint32_t *cache, const int32_t *table, ptrdiff_t head, ptrdiff_t first,
                       ptrdiff_t count, uint32_t *panel, int pair) {
    ptrdiff_t size = step->head_dim, width = 4 / pair, steps = key_words(size, pair), across = value_words(size);
    memset(panel, 0, (size_t)panel_words(size, pair) * 4);
    for (ptrdiff_t lane = 0; lane < count; lane++) {
        ptrdiff_t block = table[(first + lane) / step->block_size], offset = (first + lane) % step->block_size;
        const char *key = (const char *)cache + ((block * step->kv_heads + head) * 2 * step->block_size + offset) * size * width;
        const char *value = key + step->block_size * size * width;
        char *keys = (char *)(panel + lane), *values = (char *)(panel + steps * PANEL + lane / pair * across) + lane % pair * width;
        for (ptrdiff_t i = 0; i < size; i++) {
            memcpy(keys + i / pair * PANEL * 4 + i % pair * width, key + i * width, (size_t)width);
            memcpy(values + i * 4, value + i * width, (size_t)width);
        }
    }
}

ALWAYS_INLINE void find_keys(const attention_layer *layer, const workspace *work, ptrdiff_t row, ptrdiff_t head, ptrdiff_t first,
                             ptrdiff_t end, key_step *keys, int pair) {
    const attention_step *step = layer->step;
    const int32_t *table = step->tables + row * step->max_blocks;
    int whole = in_panels(step->head_dim, step->block_size);
    keys->count = end - first;
    for (ptrdiff_t p = 0; p * PANEL < keys->count; p++) {
        ptrdiff_t token = first + p * PANEL;
        if (whole) {
            keys->panels[p] = panel_at(step, layer->cache, table[token / step->block_size], head, token % step->block_size, pair);
        } else {
            uint32_t *panel = work->panels + p * panel_words(step->head_dim, pair);
            make_panel(step, layer->cache, table, head, token, at_most(PANEL, end - token), panel, pair);
            keys->panels[p] = panel;
        }
    }
}

/* Queries of a tile of one head, as they attend, and nothing summed up. */
ALWAYS_INLINE void begin_head(const attention_layer *layer, const workspace *work, const tile *t, ptrdiff_t head, int pair) {
    const attention_step *step = layer->step;
    ptrdiff_t steps = key_words(step->head_dim, pair), size = value_words(step->head_dim), group = step->heads / step->kv_heads;
    for (ptrdiff_t i = 0; i < t->count; i++) {
        ptrdiff_t token = step->query_start[t->row] + (t->first + i) / group;
        uint32_t *query = work->queries + i * steps;
        const void *from = numbers_at(layer->q, step->query_stride, token, head * group + (t->first + i) % group, pair);
        query[steps - 1] = 0;
        from = prepared(layer, work, from, layer->query_norm, token, query, pair);
        if (from != query)
            memcpy(query, from, (size_t)(step->head_dim * (4 / pair)));
        work->top[i] = -INFINITY;
        work->total[i] = 0;
    }
    memset(work->sums, 0, (size_t)(t->count * size) * sizeof(float));
}

/* Keys and values [first, end) of one head. */
ALWAYS_INLINE void attend_keys(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan, ptrdiff_t head,
                               ptrdiff_t first, ptrdiff_t end, int pair) {
    const attention_step *step = layer->step;
    ptrdiff_t steps = key_words(step->head_dim, pair), size = value_words(step->head_dim), group = step->heads / step->kv_heads;
    key_step keys;
    find_keys(layer, work, t->row, head, first, end, &keys, pair);
    ptrdiff_t columns = parts(keys.count, PANEL) * VECTORS;
    for (ptrdiff_t c = 0; c < columns; c += COLUMNS)
        for (ptrdiff_t i = 0; i < t->count; i += ROWS)
            score_some((int)at_most(ROWS, t->count - i), (int)at_most(COLUMNS, columns - c), work->queries + i * steps, &keys, c, steps,
                       work->scores + i * KEYS, pair);
    for (ptrdiff_t i = 0; i < t->count; i++) {
        ptrdiff_t position = plan->start + (t->first + i) / group, oldest = step->window ? position + 1 - step->window : 0;
        weigh(work->scores + i * KEYS, columns, oldest - first, at_most(position + 1, end) - first, layer->scale * 1.44269504f,
              work->top + i, work->total + i, work->fade + i, pair);
    }
    for (ptrdiff_t c = 0; c < size / LANES; c += COLUMNS)
        for (ptrdiff_t i = 0; i < t->count; i += ROWS)
            add_some_values((int)at_most(ROWS, t->count - i), (int)at_most(COLUMNS, size / LANES - c),
                            (uint32_t *)work->scores + i * KEYS, &keys, c, steps * PANEL, size, work->fade + i, work->sums + i * size, pair);
}

/* The sums of one head's queries into the result, or into the segment's place among the partial ones: its sums, tops and totals. */
ALWAYS_INLINE void finish_head(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan, ptrdiff_t head,
                               int pair) {
    const attention_step *step = layer->step;
    ptrdiff_t size = value_words(step->head_dim), group = step->heads / step->kv_heads;
    if (plan->segments > 1) {
        ptrdiff_t one = t->count * (size + 2);
        float *to = step->partials + step->partials_at[t->row] + (head * plan->segments + t->segment) * one;
        memcpy(to, work->sums, (size_t)(t->count * size) * sizeof(float));
        memcpy(to + t->count * size, work->top, (size_t)t->count * sizeof(float));
        memcpy(to + t->count * (size + 1), work->total, (size_t)t->count * sizeof(float));
        return;
    }
    for (ptrdiff_t i = 0; i < t->count; i++) {
        ptrdiff_t token = step->query_start[t->row] + (t->first + i) / group;
        float *sums = work->sums + i * size, scale = work->total[i] == 0 ? 0 : 1 / work->total[i];
        for (ptrdiff_t c = 0; c < size; c += LANES)
            store(sums + c, load(sums + c) * scale);
        ptrdiff_t place = token * step->heads + head * group + (t->first + i) % group;
        narrow((char *)layer->out + place * step->head_dim * (4 / pair), sums, step->head_dim, pair);
    }
}

/* The part of a workspace that is for one of a tile's heads. */
ALWAYS_INLINE workspace of_head(const workspace *work, const attention_step *step, const tile *t, ptrdiff_t head, int pair) {
    ptrdiff_t before = (head - t->head) * t->count;
    workspace part = *work;
    part.queries += before * key_words(step->head_dim, pair);
    part.sums += before * value_words(step->head_dim);
    part.top += before;
    part.total += before;
    return part;
}

ALWAYS_INLINE void attend_tile(const attention_layer *layer, const workspace *work, const tile *t, const row_plan *plan, int pair) {
    ptrdiff_t keys = plan->queries > FEW ? KEYS : FEW_KEYS, end = t->head + t->heads;
    for (ptrdiff_t head = t->head; head < end; head++) {
        workspace part = of_head(work, layer->step, t, head, pair);
        begin_head(layer, &part, t, head, pair);
    }
    for (ptrdiff_t at = t->begin / keys * keys; at < t->end; at += keys)
        for (ptrdiff_t head = t->head; head < end; head++) {
            workspace part = of_head(work, layer->step, t, head, pair);
            attend_keys(layer, &part, t, plan, head, at_least(at, t->begin / PANEL * PANEL), at_most(at + keys, t->end), pair);
        }
    for (ptrdiff_t head = t->head; head < end; head++) {
        workspace part = of_head(work, layer->step, t, head, pair);
        finish_head(layer, &part, t, plan, head, pair);
    }
}

/* One query's segments, in their order, into the result. */
ALWAYS_INLINE void combine(const attention_layer *layer, const workspace *work, const row_plan *plan, ptrdiff_t row, ptrdiff_t head,
                           ptrdiff_t query, int pair) {
    const attention_step *step = layer->step;
    ptrdiff_t size = value_words(step->head_dim), group = step->heads / step->kv_heads, one = plan->queries * (size + 2);
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
    float scale = total == 0 ? 0 : 1 / total;
    for (ptrdiff_t c = 0; c < size; c += LANES)
        store(sums + c, load(sums + c) * scale);
    ptrdiff_t token = step->query_start[row] + query / group;
    narrow((char *)layer->out + (token * step->heads + head * group + query % group) * step->head_dim * (4 / pair), sums, step->head_dim, pair);
}

/* ---- A layer. ---- */

static int comes_before(const cursor *at, const int32_t end[3]) {
    return at->row < end[0] || (at->row == end[0] && (at->head < end[1] || (at->head == end[1] && at->n < end[2])));
}

ALWAYS_INLINE void attend_share(const attention_layer *layer, const workspace *work, const int32_t from[3], const int32_t to[3], int pair) {
    const attention_step *step = layer->step;
    cursor at = {from[0], from[1], from[2], {0}};
    if (at.row < step->num_rows)
        at.plan = plan_row(step, at.row);
    for (; comes_before(&at, to); move_on(step, &at)) {
        tile t = nth_tile(step, &at.plan, at.row, at.head, at.n);
        attend_tile(layer, work, &t, &at.plan, pair);
    }
}

ALWAYS_INLINE void combine_share(const attention_layer *layer, const workspace *work, ptrdiff_t share, int pair) {
    const attention_step *step = layer->step;
    ptrdiff_t number = 0;
    for (int32_t row = 0; row < step->num_rows; row++) {
        if (step->partials_at[row] < 0)
            continue;
        row_plan plan = plan_row(step, row);
        for (ptrdiff_t head = 0; head < step->kv_heads; head++)
            for (ptrdiff_t query = 0; query < plan.queries; query++)
                if (number++ % step->shares == share)
                    combine(layer, work, &plan, row, head, query, pair);
    }
}

ALWAYS_INLINE void attend(const attention_layer *layer, int pair) {
    const attention_step *step = layer->step;
#pragma omp parallel
    {
        ptrdiff_t thread = 0, threads = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
#endif
        workspace work;
        lay_out(&work, step->scratch + at_most(thread, step->shares - 1) * step->scratch_size, pair, step->kv_heads, step->head_dim, step->block_size);
        for (ptrdiff_t share = thread; share < step->shares; share += threads)
            write_tokens(layer, &work, share * step->num_tokens / step->shares, (share + 1) * step->num_tokens / step->shares, pair);
#pragma omp barrier
        for (ptrdiff_t share = thread; share < step->shares; share += threads)
            attend_share(layer, &work, step->starts[share], step->starts[share + 1], pair);
        if (step->partials) {
#pragma omp barrier
            for (ptrdiff_t share = thread; share < step->shares; share += threads)
                combine_share(layer, &work, share, pair);
        }
    }
}

/* Writes k and v to the cache, then attends q over it: q [num_tokens][heads], k and v [num_tokens][kv_heads], of head_dim numbers each, with the
   step's strides; out [num_tokens][heads][head_dim]. With a rotation, queries and keys are turned first and, where there are norms
   [head_dim], normed before that. */
void attend_layer(const attention_step *step, uint32_t *cache, const void *q, const void *k, const void *v, void *out, const void *query_norm,
                  const void *key_norm, float eps, float scale) {
    attention_layer layer = {step, cache, q, k, v, query_norm, key_norm, out, eps, scale};
    if (step->pair == 2)
        attend(&layer, 2);
    else
        attend(&layer, 1);
}

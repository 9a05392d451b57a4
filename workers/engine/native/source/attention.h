/* What the parts of attention have in common: a step, its sizes, and the place where a thread works. attention.c says
   how it is done. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "kernels.h"
#include "lanes.h"

enum {
    PANEL = 16,              /* tokens */
    VECTORS = PANEL / LANES, /* of a panel's scores */
    TILE = 32,               /* queries */
    KEYS = 128,              /* in one step of a tile */
    SEGMENT = 256,           /* keys after which a single tile's are cut */
    STEP_PANELS = KEYS / PANEL,
    /* queries of a row whose tiles take several heads of keys, panel by panel, and write them themselves */
    FEW = 8,
#if defined(__AVX512F__)
    ROWS = 4, /* queries, and vectors, whose sums are kept in registers */
    COLUMNS = 4
#else
    ROWS = 2,
    COLUMNS = 4
#endif
};

/* What is the same for all layers of one pattern. */
struct attention_step {
    int32_t mode; /* FLOATS, PAIRS or FLOATS_BY_PAIRS (lanes.h) */
    int32_t heads, kv_heads, head_dim, block_size;
    int32_t before, after; /* tokens to either side of its own that a query sees at most; far more than any row has */
    int32_t chunk;         /* tokens of a chunk, before which a query sees none; 0 for no chunks */
    int32_t num_tokens, num_rows, max_blocks;
    int32_t shares;             /* into which the work is cut */
    int32_t together;           /* heads of keys that a tile of few queries takes */
    int32_t any_ahead;          /* whether any row is written ahead */
    const int64_t *slots;       /* [num_tokens] block * block_size + offset */
    const int32_t *query_start; /* [num_rows + 1] */
    const int32_t *contexts;    /* [num_rows] */
    const int32_t *tables;      /* [num_rows][max_blocks] */
    int32_t (*starts)[3];       /* [shares + 1] of row, head and tile */
    int32_t *ahead;             /* [num_rows] whether a row's keys are written before anybody attends */
    int64_t *partials_at;       /* [num_rows] in `partials`; -1 where keys are not cut */
    float *partials;
    float *scratch;
    ptrdiff_t scratch_size; /* floats of each share */
    /* in numbers, from token to token and from head to head */
    ptrdiff_t query_stride[2], key_stride[2], value_stride[2];
    /* what is added to a head's scores for keys at the query's own place, and around it what for keys before and
       behind, a panel further than any row is long; NULL for nothing */
    const float *bias;
    ptrdiff_t bias_stride; /* from head to head */
    ptrdiff_t block_stride; /* words of the cache from block to block, at least a block's own */
};

#define LOG2_E 1.44269504f

typedef struct {
    const attention_step *step;
    const head_rotation *rotation; /* NULL for none */
    uint32_t *cache;
    const void *q, *k, *v; /* k and v NULL: nothing is written */
    const norm_weights *query_norm, *key_norm; /* NULL for none */
    void *out;
    float scale, soft_cap; /* no cap: 0 */
    const float *sinks;    /* [heads], NULL for none */
} attention_layer;

typedef struct {
    int32_t context, start; /* tokens after this step, and before it */
    int32_t queries, few;   /* for each head of keys; whether these are few */
    int32_t heads, tiles, segments, first_segment;
} row_plan;

typedef struct {
    int32_t row, head, heads; /* heads of keys, from `head` on */
    /* queries of the row for each head of keys: token by token, and of one token head by head */
    int32_t first, count;
    int32_t begin, end;       /* keys */
    int32_t segment;
} tile;

/* Where a share of the work keeps what it works on. */
typedef struct {
    float *numbers, *turned; /* [head_dim], one query or key */
    uint32_t *queries;       /* [queries of a tile][query_words] */
    float *scores;           /* [ROWS][KEYS], then the weights as words [ROWS][KEYS] */
    float *sums;             /* [queries of a tile][value_words] */
    float *total;            /* [queries of a tile][LANES], to be added up */
    float *top;              /* [queries of a tile] */
    uint32_t *panels;        /* [STEP_PANELS], where blocks hold plain rows */
    uint32_t *values;        /* [PANEL][key_words], rounded for the cache; FLOATS_BY_PAIRS only */
} workspace;

ALWAYS_INLINE ptrdiff_t at_most(ptrdiff_t x, ptrdiff_t y) {
    return x < y ? x : y;
}

ALWAYS_INLINE ptrdiff_t at_least(ptrdiff_t x, ptrdiff_t y) {
    return x > y ? x : y;
}

ALWAYS_INLINE ptrdiff_t parts(ptrdiff_t whole, ptrdiff_t part) {
    return (whole + part - 1) / part;
}

/* Into the cache of the processor, without waiting for it. */
ALWAYS_INLINE void fetch(const void *from, ptrdiff_t bytes) {
    for (ptrdiff_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)from + i);
}

ALWAYS_INLINE void fetch_to_write(char *to, ptrdiff_t bytes) {
    for (ptrdiff_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(to + i, 1);
}

/* Numbers in a word of the cache. */
ALWAYS_INLINE ptrdiff_t word_numbers(int mode) {
    return mode == FLOATS ? 1 : 2;
}

/* Bytes of a number of queries, keys, values and results. */
ALWAYS_INLINE ptrdiff_t number_bytes(int mode) {
    return mode == PAIRS ? 2 : 4;
}

/* Words of a head's key, of its query, and of one token pair's values in a panel, whole vectors of them. */
ALWAYS_INLINE ptrdiff_t key_words(ptrdiff_t head_dim, int mode) {
    return parts(head_dim, word_numbers(mode));
}

ALWAYS_INLINE ptrdiff_t query_words(ptrdiff_t head_dim, int mode) {
    return key_words(head_dim, mode) * factor_words(mode);
}

ALWAYS_INLINE ptrdiff_t value_words(ptrdiff_t head_dim) {
    return parts(head_dim, PANEL) * PANEL;
}

ALWAYS_INLINE ptrdiff_t panel_words(ptrdiff_t head_dim, int mode) {
    return key_words(head_dim, mode) * PANEL + PANEL / word_numbers(mode) * value_words(head_dim);
}

/* The first token that a query sees. */
ALWAYS_INLINE ptrdiff_t oldest_seen(const attention_step *step, ptrdiff_t position) {
    return step->chunk ? position - position % step->chunk : at_least(position - step->before, 0);
}

/* Floats of what one tile of a row whose keys are cut leaves for one head: sums, tops and totals. */
ALWAYS_INLINE ptrdiff_t partial_size(const attention_step *step, const row_plan *plan) {
    return plan->queries * (value_words(step->head_dim) + 2);
}

/* Whether a row has so few queries that it waits for memory more than it computes, and is computed as such. Where later
   tokens are seen, all of its keys are of this step, and at hand. */
ALWAYS_INLINE int has_few(const attention_step *step, ptrdiff_t row) {
    return step->after == 0 && !step->bias
        && (step->query_start[row + 1] - step->query_start[row]) * (step->heads / step->kv_heads) <= FEW;
}

/* Whether the cache holds panels; else it holds plain rows. */
ALWAYS_INLINE int in_panels(ptrdiff_t head_dim, ptrdiff_t block_size) {
    return head_dim % PANEL == 0 && block_size % PANEL == 0;
}

/* Words of one head's keys and values in a block. */
ALWAYS_INLINE ptrdiff_t block_words(const attention_step *step, int mode) {
    return 2 * (ptrdiff_t)step->block_size * step->head_dim / word_numbers(mode);
}

ALWAYS_INLINE uint32_t *panel_at(const attention_step *step, uint32_t *cache, ptrdiff_t block, ptrdiff_t head,
                                 ptrdiff_t offset, int mode) {
    return cache + block * step->block_stride + head * block_words(step, mode)
        + offset / PANEL * panel_words(step->head_dim, mode);
}

ALWAYS_INLINE const void *numbers_at(const void *tensor, const ptrdiff_t stride[2], ptrdiff_t token, ptrdiff_t head,
                                     int mode) {
    return (const char *)tensor + (token * stride[0] + head * stride[1]) * number_bytes(mode);
}

#endif
